// The arguments of each op as Python gives them. Binding<Args>::read looks at every tensor, refuses what
// memory safety does not allow, fills in the struct, and says what a new output would be like.
#pragma once
#include <cstring>
#include <optional>
#include <string>

#include "binding_tensors.h"
#include "isa.h"
#include "ops.h"

namespace infini {
namespace {

// A weight in blocks with what its bytes do not say; packed where activation_bits is not 0
struct Weight {
    nb::object blocks;
    BlockType type;
    int64_t num_rows;
    int activation_bits;
};

template <class Args>
struct Reading {
    Args args{};
    nb::handle owners[Args::kRoles.tensors] =
        {};                  // whose memory it is; none where an optional tensor is absent
    nb::handle like;         // a new output is laid out like this one; none: contiguous
    bool may_widen = false;  // whether out may be float32 where the result is half precision

    Tensor* tensors() { return reinterpret_cast<Tensor*>(&args); }

    const Tensor& take(Tensor& slot, nb::handle given) {
        slot = tensor(given);
        if (wants_grad() && needs_grad(given))
            refuse("an input needs a gradient, which kernels do not compute");
        owners[&slot - tensors()] = given;
        return slot;
    }

    const Tensor& take_if_any(Tensor& slot, nb::handle given) {
        return given.is_none() ? slot : take(slot, given);
    }

    // The weight of a QuantizedTensor, which holds it as `native`
    const Weight& take_weight(Tensor& slot, nb::handle given) {
        const nb::object native = nb::getattr(given, "native", nb::none());
        const Weight* weight = nullptr;
        if (!nb::try_cast(native, weight) || !weight) throw nb::type_error("expected a quantised weight");
        take(slot, weight->blocks);
        return *weight;
    }

    // Outputs have this dtype and shape
    void promise(DType dtype, const Tensor& shape) {
        for (int i = 0; i < Args::kRoles.outputs; ++i) {
            Tensor& y = tensors()[i];
            y = shape;
            y.data = nullptr, y.dtype = dtype;
        }
    }

    void promise_like(nb::handle owner, const Tensor& x) {
        like = owner;
        promise(x.dtype, x);
    }

private:
    bool wants_grad() {
        if (wants_grad_ < 0) wants_grad_ = is_true(g_torch.is_grad_enabled());
        return wants_grad_;
    }
    int wants_grad_ = -1;  // not asked yet
};

template <class Args>
struct Binding;

void check_float_rows(const Tensor& x) {
    require(is_float(x.dtype), "expected float32, float16 or bfloat16");
    require(x.ndim >= 1 && has_rows(x), "expected rows: a last dimension that is contiguous");
}

void check_vector(const Tensor& v, const Tensor& x) {
    require(v.dtype == x.dtype, "expected the weight in the dtype of the input");
    require(is_contiguous(v) && num_elements(v) == x.shape[x.ndim - 1],
            "expected a contiguous weight as long as a row");
}

void check_like(const Tensor& other, const Tensor& x) {
    require(other.dtype == x.dtype && same_shape(other, x) && has_rows(other),
            "expected inputs of one dtype and shape, their rows contiguous");
}

// ---- norms, activations, softmax --------------------------------------------------------------------------

template <>
struct Binding<RmsNorm> {
    static void read(Reading<RmsNorm>& r, nb::handle x, nb::handle weight, double eps) {
        check_float_rows(r.take(r.args.x, x));
        check_vector(r.take(r.args.weight, weight), r.args.x);
        r.args.eps = static_cast<float>(eps);
        r.promise_like(x, r.args.x);
    }
};

template <>
struct Binding<AddRmsNorm> {
    static void read(Reading<AddRmsNorm>& r, nb::handle x, nb::handle residual, nb::handle weight,
                     double eps) {
        check_float_rows(r.take(r.args.x, x));
        check_like(r.take(r.args.residual, residual), r.args.x);
        check_vector(r.take(r.args.weight, weight), r.args.x);
        r.args.eps = static_cast<float>(eps);
        r.promise_like(x, r.args.x);
    }
};

template <>
struct Binding<LayerNorm> {
    static void read(Reading<LayerNorm>& r, nb::handle x, nb::handle weight, nb::handle bias, double eps) {
        check_float_rows(r.take(r.args.x, x));
        require(weight.is_none() == bias.is_none(), "layer_norm: expected weight and bias, or neither");
        if (!weight.is_none()) {
            check_vector(r.take(r.args.weight, weight), r.args.x);
            check_vector(r.take(r.args.bias, bias), r.args.x);
        }
        r.args.eps = eps;
        r.promise_like(x, r.args.x);
    }
};

template <>
struct Binding<Unary> {
    static void read(Reading<Unary>& r, nb::handle x) {
        check_float_rows(r.take(r.args.x, x));
        r.promise_like(x, r.args.x);
    }
};

GeluKind gelu_kind(const char* approximate) {
    const char* const kinds[] = {"none", "tanh", "fast"};
    int kind = 0;
    while (kind < 3 && strcmp(kinds[kind], approximate)) ++kind;
    require(kind < 3, "gelu: approximate must be 'none', 'tanh' or 'fast'");
    return static_cast<GeluKind>(kind);
}

template <>
struct Binding<Gelu> {
    static void read(Reading<Gelu>& r, nb::handle x, const char* approximate) {
        check_float_rows(r.take(r.args.x, x));
        r.args.kind = gelu_kind(approximate);
        r.promise_like(x, r.args.x);
    }
};

template <>
struct Binding<GateRows> {
    static void read(Reading<GateRows>& r, nb::handle x, nb::handle gates) {
        check_float_rows(r.take(r.args.x, x));
        check_float_rows(r.take(r.args.gates, gates));
        const Tensor &rows = r.args.x, &each = r.args.gates;
        bool fits = each.dtype == rows.dtype && each.ndim == rows.ndim && each.shape[each.ndim - 1] == 1;
        for (int i = 0; fits && i + 1 < rows.ndim; ++i) fits = each.shape[i] == rows.shape[i];
        require(fits, "gate_rows: expected a gate for each row, of its dtype");
        r.promise_like(x, r.args.x);
    }
};

template <>
struct Binding<Scale> {
    static void read(Reading<Scale>& r, nb::handle x, double factor) {
        check_float_rows(r.take(r.args.x, x));
        r.args.factor = static_cast<float>(factor);
        r.promise_like(x, r.args.x);
    }
};

template <>
struct Binding<Softcap> {
    static void read(Reading<Softcap>& r, nb::handle x, double cap) {
        check_float_rows(r.take(r.args.x, x));
        require(cap > 0, "softcap: the cap must be positive");
        r.args.cap = static_cast<float>(cap);
        r.promise_like(x, r.args.x);
    }
};

template <>
struct Binding<Binary> {
    static void read(Reading<Binary>& r, nb::handle a, nb::handle b) {
        check_float_rows(r.take(r.args.a, a));
        check_like(r.take(r.args.b, b), r.args.a);
        r.promise_like(a, r.args.a);
    }
};

template <>
struct Binding<Geglu> {
    static void read(Reading<Geglu>& r, nb::handle a, nb::handle b, const char* approximate) {
        check_float_rows(r.take(r.args.a, a));
        check_like(r.take(r.args.b, b), r.args.a);
        r.args.kind = gelu_kind(approximate);
        r.promise_like(a, r.args.a);
    }
};

template <>
struct Binding<AddScaled> {
    static void read(Reading<AddScaled>& r, nb::handle a, nb::handle b, double factor) {
        check_float_rows(r.take(r.args.a, a));
        check_like(r.take(r.args.b, b), r.args.a);
        r.args.factor = static_cast<float>(factor);
        r.promise_like(a, r.args.a);
    }
};

template <>
struct Binding<Softmax> {
    static void read(Reading<Softmax>& r, nb::handle x) {
        check_float_rows(r.take(r.args.x, x));
        r.promise_like(x, r.args.x);
    }
};

template <>
struct Binding<CausalSoftmax> {
    static void read(Reading<CausalSoftmax>& r, nb::handle x) {
        const Tensor& t = r.take(r.args.x, x);
        check_float_rows(t);
        require(t.ndim >= 2 && t.shape[t.ndim - 2] <= t.shape[t.ndim - 1],
                "causal_softmax: needs [..., s, t] with s <= t");
        r.promise_like(x, t);
    }
};

// ---- rope -------------------------------------------------------------------------------------------------

template <>
struct Binding<Rope> {
    static void read(Reading<Rope>& r, nb::handle x, nb::handle positions, nb::handle sin, nb::handle cos,
                     bool interleaved) {
        Rope& a = r.args;
        r.take(a.x, x), r.take(a.positions, positions), r.take(a.sin, sin), r.take(a.cos, cos);
        require(a.x.ndim == 3 || a.x.ndim == 4, "rope: x must be [seq, heads, d] or [batch, seq, heads, d]");
        require(is_float(a.x.dtype) || a.x.dtype == DType::f64, "rope: x needs a floating dtype");
        require(a.x.dtype == a.sin.dtype && a.x.dtype == a.cos.dtype, "rope: x, sin and cos need one dtype");
        require(has_rows(a.x), "rope: the last dimension of x must be contiguous");
        require(a.sin.ndim == 2 && same_shape(a.sin, a.cos) && is_contiguous(a.sin) && is_contiguous(a.cos),
                "rope: sin and cos must be contiguous [length, d/2] tables of one shape");
        require(a.x.shape[a.x.ndim - 1] == 2 * a.sin.shape[1],
                "rope: the head size must be twice the width of the tables");
        check_positions(a.positions, a.x.ndim == 4 ? a.x.shape[0] : 1, a.x.shape[a.x.ndim - 3]);
        a.interleaved = interleaved;
        r.promise_like(x, a.x);
    }

    static void check_positions(const Tensor& p, int64_t batch, int64_t seq) {
        require(is_index(p.dtype) && is_contiguous(p), "rope: positions must be contiguous integers");
        const bool fits =
            p.ndim == 1 ? p.shape[0] == seq : p.ndim == 2 && p.shape[0] == batch && p.shape[1] == seq;
        require(fits, "rope: positions must be [seq] or [batch, seq]");
    }
};

// ---- rows of weights --------------------------------------------------------------------------------------

// [*] ids and rows of this length -> [*, length]
Tensor shape_of_rows(const Tensor& ids, int64_t length) {
    require(is_index(ids.dtype) && is_contiguous(ids), "embedding: ids must be contiguous integers");
    require(ids.ndim < kMaxDims, "embedding: ids have too many dimensions");
    Tensor shape = ids;
    shape.shape[shape.ndim++] = length;
    return shape;
}

template <>
struct Binding<Embedding> {
    static void read(Reading<Embedding>& r, nb::handle ids, nb::handle weight) {
        Embedding& a = r.args;
        r.take(a.ids, ids), r.take(a.weight, weight);
        require(a.weight.ndim == 2 && has_rows(a.weight) && !is_index(a.weight.dtype),
                "embedding: weight must be [num_embeddings, embedding_dim] of floats");
        r.promise(a.weight.dtype, shape_of_rows(a.ids, a.weight.shape[1]));
        r.may_widen = true;
    }
};

// The blocks of a weight seen as rows; packed ones as the rows they were
Tensor as_rows(const Weight& weight, Tensor blocks) {
    const BlockSize block = block_size(weight.type);
    const bool is_packed = weight.activation_bits != 0;
    const int64_t num_panels = (weight.num_rows + kPackedRows - 1) / kPackedRows;
    require(block.elements > 1, "expected a weight in blocks");
    require(blocks.dtype == DType::u8 && blocks.ndim == 2 && has_rows(blocks),
            "blocks must be rows of uint8");
    require(blocks.shape[0] == (is_packed ? num_panels : weight.num_rows),
            "blocks must be as many as the rows");
    if (is_packed) {
        require(is_contiguous(blocks) && blocks.shape[1] % kPackedRows == 0,
                "packed rows must be contiguous");
        blocks.shape[0] = weight.num_rows, blocks.shape[1] /= kPackedRows;
    }
    require(blocks.shape[1] % block.bytes == 0, "rows must be whole blocks");
    return blocks;
}

template <class Args>
void read_lookup(Reading<Args>& r, nb::handle ids, nb::handle given, bool is_packed) {
    Args& a = r.args;
    const Weight& weight = r.take_weight(a.weight, given);
    require((weight.activation_bits != 0) == is_packed,
            "embedding: expected the other kind of quantised weight");
    const BlockSize block = block_size(weight.type);
    const int64_t length = as_rows(weight, a.weight).shape[1] / block.bytes * block.elements;
    a.type = weight.type, a.num_rows = weight.num_rows;
    r.promise(DType::f32, shape_of_rows(r.take(a.ids, ids), length));
}

template <>
struct Binding<QuantizedEmbedding> {
    static void read(Reading<QuantizedEmbedding>& r, nb::handle ids, nb::handle weight) {
        read_lookup(r, ids, weight, false);
    }
};

template <>
struct Binding<PackedEmbedding> {
    static void read(Reading<PackedEmbedding>& r, nb::handle ids, nb::handle weight) {
        read_lookup(r, ids, weight, true);
    }
};

// ---- products ---------------------------------------------------------------------------------------------

// x with rows of another length, as an output is
Tensor with_length(Tensor x, int64_t length) {
    x.shape[x.ndim - 1] = length;
    return x;
}

// `rows` of a weight against those of x
void check_product(const Tensor& x, const Tensor& rows, BlockType type, const Tensor& bias) {
    require(x.ndim >= 1 && has_rows(x), "linear: the rows of x must be contiguous");
    require(rows.ndim == 2 && has_rows(rows), "linear: weight must be two-dimensional, with contiguous rows");
    const BlockSize block = block_size(type);
    const int64_t length = x.shape[x.ndim - 1], row_bytes = rows.shape[1] * item_size(rows.dtype);
    require(length % block.elements == 0 && row_bytes == length / block.elements * block.bytes,
            "linear: a row of weight must be as long as a row of x");
    if (!bias.data) return;
    require(bias.dtype == x.dtype && is_contiguous(bias) && num_elements(bias) == rows.shape[0],
            "linear: bias must be contiguous, of the dtype of x, one value a row of weight");
}

BlockType dense_type(DType dtype) {
    return dtype == DType::f16 ? BlockType::f16 : dtype == DType::bf16 ? BlockType::bf16 : BlockType::f32;
}

template <>
struct Binding<Linear> {
    static void read(Reading<Linear>& r, nb::handle x, nb::handle weight, nb::handle bias) {
        Linear& a = r.args;
        r.take(a.x, x), r.take(a.weight, weight), r.take_if_any(a.bias, bias);
        require(is_float(a.weight.dtype), "linear: weight must be float32, float16 or bfloat16");
        require(a.x.dtype == DType::f32 || a.x.dtype == a.weight.dtype,
                "linear: x must be float32, or half precision as the weight is");
        a.type = dense_type(a.weight.dtype);
        check_product(a.x, a.weight, a.type, a.bias);
        r.promise(a.x.dtype, with_length(a.x, a.weight.shape[0]));
    }
};

template <>
struct Binding<QuantizedLinear> {
    static void read(Reading<QuantizedLinear>& r, nb::handle x, nb::handle given, nb::handle bias) {
        QuantizedLinear& a = r.args;
        require(r.take(a.x, x).dtype == DType::f32, "linear: x must be float32");
        const Weight& weight = r.take_weight(a.weight, given);
        require(weight.activation_bits == 0, "linear: a packed weight is for packed_linear");
        r.take_if_any(a.bias, bias);
        a.type = weight.type;
        check_product(a.x, as_rows(weight, a.weight), a.type, a.bias);
        r.promise(DType::f32, with_length(a.x, weight.num_rows));
    }
};

Gate gate_of(const std::optional<std::string>& activation) {
    if (!activation) return Gate::none;
    require(*activation == "silu" || *activation == "gelu_tanh",
            "packed_linear: activation must be None, 'silu' or 'gelu_tanh'");
    return *activation == "silu" ? Gate::silu : Gate::gelu_tanh;
}

template <>
struct Binding<PackedLinear> {
    static void read(Reading<PackedLinear>& r, nb::handle x, nb::sequence weights, nb::sequence biases,
                     nb::handle residual, std::optional<std::string> activation) {
        PackedLinear& a = r.args;
        require(r.take(a.x, x).dtype == DType::f32, "packed_linear: x must be float32");
        const size_t count = nb::len(weights);
        require(count >= 1 && count <= kPackedWeights && nb::len(biases) == count,
                "packed_linear: expected one to three weights, and a bias or None for each");
        a.count = static_cast<int>(count), a.gate = gate_of(activation);
        for (int i = 0; i < a.count; ++i) take_weight(r, i, nb::object(weights[i]), nb::object(biases[i]));
        require(!activation || (count == 2 && a.num_rows[0] == a.num_rows[1]),
                "packed_linear: a gated product takes two weights of one size");
        int64_t width = 0;
        for (int i = 0; i < (activation ? 1 : a.count); ++i) width += a.num_rows[i];
        r.promise(DType::f32, with_length(a.x, width));
        if (residual.is_none()) return;
        const Tensor& added = r.take(a.residual, residual);
        require(added.dtype == DType::f32 && has_rows(added) && same_shape(added, a.y),
                "packed_linear: the residual must be like the result");
    }

    static void take_weight(Reading<PackedLinear>& r, int i, nb::object given, nb::object bias) {
        PackedLinear& a = r.args;
        const Weight& weight = r.take_weight(a.weight[i], given);
        require(weight.activation_bits != 0, "packed_linear: expected packed weights");
        require(i == 0 || weight.activation_bits == a.activation_bits,
                "packed_linear: expected weights of the same activation_bits");
        require(i == 0 || span_of(weight.type, has_tiles()) == span_of(a.type[0], has_tiles()),
                "packed_linear: expected weights whose activations are rounded as many at a time");
        a.type[i] = weight.type, a.num_rows[i] = weight.num_rows, a.activation_bits = weight.activation_bits;
        check_product(a.x, as_rows(weight, a.weight[i]), weight.type, r.take_if_any(a.bias[i], bias));
    }
};

// ---- mixtures of experts ----------------------------------------------------------------------------------

template <>
struct Binding<Route> {
    static void read(Reading<Route>& r, nb::handle logits, int64_t num_chosen, bool normalizes) {
        Route& a = r.args;
        check_float_rows(r.take(a.logits, logits));
        const int64_t num_experts = a.logits.shape[a.logits.ndim - 1];
        require(a.logits.ndim == 2 && num_experts < (int64_t{1} << 31),
                "route: logits must be [tokens, experts]");
        require(num_chosen >= 1 && num_chosen <= num_experts,
                "route: as many experts must be chosen as there are, or fewer, and one at least");
        a.normalizes = normalizes;
        r.promise(DType::i32, with_length(a.logits, num_chosen));
        a.shares.dtype = DType::f32;
    }
};

template <>
struct Binding<Experts> {
    static void read(Reading<Experts>& r, nb::handle x, nb::handle ids, nb::handle shares,
                     nb::sequence weights, nb::sequence biases, const char* activation) {
        Experts& a = r.args;
        r.take(a.x, x), r.take(a.ids, ids), r.take(a.shares, shares);
        require(is_float(a.x.dtype) && a.x.ndim == 2 && has_rows(a.x),
                "experts: x must be [tokens, hidden size] of floats with contiguous rows");
        check_choice(a.ids, a.shares, a.x.shape[0]);
        require(nb::len(weights) == kExpertWeights && nb::len(biases) == kExpertWeights,
                "experts: expected weights of gate, up and down, and a bias or None for each");
        a.gating = gating(activation);
        Tensor rows[kExpertWeights];
        for (int i = 0; i < kExpertWeights; ++i) rows[i] = take_weight(r, i, nb::object(weights[i]));
        const int64_t hidden = a.x.shape[1];
        require(hidden > 0 && rows[2].shape[0] % hidden == 0,
                "experts: down must have hidden size rows each");
        a.num_experts = rows[2].shape[0] / hidden;
        require(a.num_experts > 0 && rows[0].shape[0] % a.num_experts == 0 && rows[0].shape[0] > 0,
                "experts: gate must have as many rows for each expert");
        a.intermediate_size = rows[0].shape[0] / a.num_experts;
        const int64_t outputs[] = {a.intermediate_size, a.intermediate_size, hidden};
        for (int i = 0; i < kExpertWeights; ++i) {
            require(rows[i].shape[0] == a.num_experts * outputs[i], "experts: gate and up must be alike");
            require(a.activation_bits[i] == 0 || outputs[i] % kPackedRows == 0,
                    "experts: those of a packed weight must have rows by 16");
            check_product(with_length(a.x, i < 2 ? hidden : a.intermediate_size), rows[i], a.type[i],
                          r.take_if_any(a.bias[i], nb::object(biases[i])));
        }
        r.promise(a.x.dtype, a.x);
    }

    static void check_choice(const Tensor& ids, const Tensor& shares, int64_t num_tokens) {
        require(is_index(ids.dtype) && is_contiguous(ids) && ids.ndim == 2 && ids.shape[0] == num_tokens,
                "experts: ids must be contiguous integers, a row for each token");
        require(shares.dtype == DType::f32 && has_rows(shares) && same_shape(shares, ids),
                "experts: shares must be float32, one for each id");
    }

    // Of a weight of any kind, its rows
    static Tensor take_weight(Reading<Experts>& r, int i, nb::object given) {
        Experts& a = r.args;
        if (nb::hasattr(given, "native")) {
            require(a.x.dtype == DType::f32, "experts: x must be float32 where a weight is quantised");
            const Weight& weight = r.take_weight(a.weight[i], given);
            a.type[i] = weight.type, a.activation_bits[i] = weight.activation_bits;
            return as_rows(weight, a.weight[i]);
        }
        const Tensor& weight = r.take(a.weight[i], given);
        require(is_float(weight.dtype), "experts: a weight must be float32, float16 or bfloat16");
        require(a.x.dtype == DType::f32 || a.x.dtype == weight.dtype,
                "experts: x must be float32, or half precision as the weights are");
        require(weight.ndim == 2, "experts: a weight must have the rows of all experts");
        a.type[i] = dense_type(weight.dtype);
        return weight;
    }

    static Gating gating(const char* activation) {
        if (!strcmp(activation, "silu")) return Gating::silu;
        require(!strcmp(activation, "swiglu_oai"), "experts: the activation must be 'silu' or 'swiglu_oai'");
        return Gating::swiglu_oai;
    }
};

// ---- low-rank adapters ------------------------------------------------------------------------------------

template <>
struct Binding<AddLora> {
    static void read(Reading<AddLora>& r, nb::handle base, nb::handle x, nb::handle a, nb::handle b,
                     nb::handle ends, nb::handle adapters) {
        AddLora& args = r.args;
        r.take(args.base, base), r.take(args.x, x), r.take(args.a, a), r.take(args.b, b);
        for (const Tensor* t : {&args.base, &args.x, &args.a, &args.b})
            require(t->ndim == 2 && is_float(t->dtype) && t->dtype == args.x.dtype && has_rows(*t),
                    "add_lora: expected rows of floats of one dtype");
        require(args.base.shape[0] == args.x.shape[0] && args.a.shape[0] == args.b.shape[0] &&
                    args.a.shape[1] == args.x.shape[1] && args.b.shape[1] == args.base.shape[1],
                "add_lora: a must have rows like those of x, and b as many, like those of y");
        r.take(args.ends, ends), r.take(args.adapters, adapters);
        for (const Tensor* t : {&args.ends, &args.adapters})
            require(t->ndim == 1 && t->dtype == DType::i64 && is_contiguous(*t),
                    "add_lora: ends and adapters must be rows of int64");
        require(args.adapters.shape[0] == args.x.shape[0], "add_lora: expected an adapter for each row of x");
        r.promise_like(base, args.base);
    }
};

// ---- attention and sampling -------------------------------------------------------------------------------

// [tokens, heads, dim] floats, rows contiguous
void check_heads(const Tensor& t, const char* rule) {
    require(t.ndim == 3 && is_float(t.dtype) && has_rows(t), rule);
}

// dim as a pool has it: elements, or bytes of q8_0 blocks for each of `keys` side by side
int64_t room_of(const Tensor& pool, int64_t dim, int64_t keys) {
    const BlockSize block = block_size(BlockType::q8_0);
    if (pool.dtype != DType::u8) return dim;
    return dim % block.elements ? -1 : dim / block.elements * block.bytes * keys;
}

void check_pools(const Tensor& keys, const Tensor& values, int64_t dim) {
    const bool is_q8 = keys.dtype == DType::u8;
    require(is_q8 || is_float(keys.dtype), "pools must be float32, float16, bfloat16, or uint8 for q8_0");
    require(keys.ndim == (is_q8 ? 4 : 5) && has_rows(keys) &&
                keys.shape[3] == room_of(keys, dim, kKeyLanes) && (is_q8 || keys.shape[4] == kKeyLanes),
            "the key pool must be [blocks, kv heads, slots / 16, dim, 16] with contiguous lanes, "
            "or [blocks, kv heads, slots / 16, dim / 32 * 544] of q8_0");
    require(values.ndim == 4 && values.dtype == keys.dtype && has_rows(values) &&
                values.shape[3] == room_of(values, dim, 1) && values.shape[0] == keys.shape[0] &&
                values.shape[1] == keys.shape[1] && values.shape[2] == keys.shape[2] * kKeyLanes,
            "the value pool must be [blocks, kv heads, slots, dim] like the key pool, "
            "or [blocks, kv heads, slots, dim / 32 * 34] of q8_0");
    const int64_t size = values.shape[2];
    require(size >= kKeyLanes && size <= kMaxBlockSize && (size & (size - 1)) == 0,
            "a block must have 16, 32, 64, 128 or 256 slots");
}

void check_places(const Tensor& tables, const Tensor& streams, const Tensor& slots, int64_t num_tokens) {
    require(
        tables.ndim == 2 && (tables.dtype == DType::i32 || tables.dtype == DType::i64) && has_rows(tables),
        "block tables must be [streams, blocks] of int32 or int64 with contiguous rows");
    for (const Tensor* t : {&streams, &slots})
        require(t->ndim == 1 && is_index(t->dtype) && is_contiguous(*t) && t->shape[0] == num_tokens,
                "streams and slots must be one integer a token");
}

void check_sinks(const Tensor& sinks, int64_t num_heads) {
    require(is_float(sinks.dtype) && sinks.ndim == 1 && is_contiguous(sinks) && sinks.shape[0] == num_heads,
            "attention: sinks must be one float a query head");
}

template <>
struct Binding<Attention> {
    static void read(Reading<Attention>& r, nb::handle q, nb::handle keys, nb::handle values,
                     nb::handle tables, nb::handle streams, nb::handle slots, double scale, int64_t window,
                     std::optional<double> softcap, std::optional<nb::object> sinks) {
        Attention& a = r.args;
        r.take(a.q, q), r.take(a.keys, keys), r.take(a.values, values);
        r.take(a.tables, tables), r.take(a.streams, streams), r.take(a.slots, slots);
        check_heads(a.q, "attention: q must be [tokens, heads, dim] of floats with contiguous rows");
        check_pools(a.keys, a.values, a.q.shape[2]);
        check_places(a.tables, a.streams, a.slots, a.q.shape[0]);
        const int64_t num_heads = a.q.shape[1], num_kv_heads = a.keys.shape[1], dim = a.q.shape[2];
        require(num_kv_heads > 0 && num_heads % num_kv_heads == 0,
                "attention: query heads must be a multiple of key heads");
        require(dim <= kMaxHeadDim && num_heads / num_kv_heads * (dim + 2) <= kMaxGroupFloats,
                "attention: too many or too wide heads share a key head");
        require(window >= 0, "attention: the window must not be negative");
        require(softcap.value_or(0) >= 0, "attention: the soft cap must not be negative");
        if (sinks) check_sinks(r.take(a.sinks, *sinks), num_heads);
        a.scale = static_cast<float>(scale), a.window = window;
        a.softcap = static_cast<float>(softcap.value_or(0));
        r.promise_like(q, a.q);
    }
};

template <>
struct Binding<StoreKv> {
    static void read(Reading<StoreKv>& r, nb::handle keys, nb::handle values, nb::handle k, nb::handle v,
                     nb::handle tables, nb::handle streams, nb::handle slots) {
        StoreKv& a = r.args;
        r.take(a.keys, keys), r.take(a.values, values), r.take(a.k, k), r.take(a.v, v);
        r.take(a.tables, tables), r.take(a.streams, streams), r.take(a.slots, slots);
        check_heads(a.k, "store_kv: k must be [tokens, kv heads, dim] of floats with contiguous rows");
        check_heads(a.v, "store_kv: v must be [tokens, kv heads, dim] of floats with contiguous rows");
        check_pools(a.keys, a.values, a.k.shape[2]);
        require(a.k.dtype == a.v.dtype && same_shape(a.k, a.v) && a.keys.shape[1] == a.k.shape[1],
                "store_kv: k and v must have the heads of the pools");
        check_places(a.tables, a.streams, a.slots, a.k.shape[0]);
    }
};

template <>
struct Binding<RandomSample> {
    static void read(Reading<RandomSample>& r, nb::handle logits, double random_val, double topp,
                     int64_t topk, double temperature) {
        RandomSample& a = r.args;
        r.take(a.logits, logits);
        require(a.logits.ndim == 1 && a.logits.shape[0] > 0 && is_float(a.logits.dtype) && has_rows(a.logits),
                "random_sample: logits must be one contiguous row of floats");
        require(a.logits.shape[0] < (int64_t{1} << 31), "random_sample: too many logits");
        require(temperature >= 0 && temperature <= 0x1.fffffep127,
                "random_sample: the temperature must be a float32, and not negative");
        a.random_val = random_val, a.topp = topp, a.topk = topk, a.temperature = temperature;
        r.promise(DType::i64, Tensor{});
    }
};

// [rows, vocabulary] of floats, rows contiguous
void check_logits(const Tensor& logits) {
    require(logits.ndim == 2 && is_float(logits.dtype) && has_rows(logits),
            "logits must be [rows, vocabulary] of floats with contiguous rows");
    require(logits.shape[1] > 0 && logits.shape[1] < (int64_t{1} << 31), "too few or too many logits");
}

void check_of_rows(const Tensor& t, DType dtype, int64_t num_rows, const char* rule) {
    require(t.dtype == dtype && t.ndim == 1 && is_contiguous(t) && t.shape[0] == num_rows, rule);
}

// [rows, 3] of float32
void check_triples(const Tensor& t, int64_t num_rows, const char* rule) {
    require(t.dtype == DType::f32 && t.ndim == 2 && has_rows(t), rule);
    require(t.shape[0] == num_rows && t.shape[1] == 3, rule);
}

template <>
struct Binding<Sample> {
    static void read(Reading<Sample>& r, nb::handle logits, nb::handle uniforms, nb::handle settings,
                     nb::handle top_k) {
        Sample& a = r.args;
        check_logits(r.take(a.logits, logits));
        const int64_t num_rows = a.logits.shape[0];
        check_of_rows(r.take(a.uniforms, uniforms), DType::f64, num_rows,
                      "sample: uniforms must be one float64 a row");
        check_triples(r.take(a.settings, settings), num_rows, "sample: settings must be three float32 a row");
        check_of_rows(r.take(a.top_k, top_k), DType::i64, num_rows, "sample: top_k must be one int64 a row");
        r.promise(DType::i64, a.top_k);
    }
};

template <>
struct Binding<Logprobs> {
    static void read(Reading<Logprobs>& r, nb::handle logits, nb::handle tokens, int64_t num_top) {
        Logprobs& a = r.args;
        check_logits(r.take(a.logits, logits));
        check_of_rows(r.take(a.tokens, tokens), DType::i64, a.logits.shape[0],
                      "logprobs: tokens must be one int64 a row");
        require(num_top >= 0 && num_top <= a.logits.shape[1],
                "logprobs: num_top must be from 0 to the vocabulary");
        a.num_top = num_top;
        r.promise(DType::i64, with_length(a.logits, num_top + 1));
        a.values.dtype = DType::f32;
    }
};

template <>
struct Binding<AdjustLogits> {
    static void read(Reading<AdjustLogits>& r, nb::handle logits, nb::handle history, nb::handle ends,
                     nb::handle penalties, nb::handle allowed) {
        AdjustLogits& a = r.args;
        check_logits(r.take(a.logits, logits));
        const int64_t num_rows = a.logits.shape[0], num_words = (a.logits.shape[1] + 31) / 32;
        r.take(a.history, history), r.take(a.ends, ends), r.take_if_any(a.allowed, allowed);
        require(a.history.dtype == DType::i64 && a.history.ndim == 1 && is_contiguous(a.history),
                "adjust_logits: history must be a row of int64");
        require(a.ends.dtype == DType::i64 && a.ends.ndim == 2 && is_contiguous(a.ends) &&
                    a.ends.shape[0] == num_rows && a.ends.shape[1] == 2,
                "adjust_logits: ends must be two int64 a row");
        check_triples(r.take(a.penalties, penalties), num_rows,
                      "adjust_logits: penalties must be three float32 a row");
        require(allowed.is_none() ||
                    (a.allowed.dtype == DType::i32 && a.allowed.ndim == 2 && has_rows(a.allowed) &&
                     a.allowed.shape[0] == num_rows && a.allowed.shape[1] == num_words),
                "adjust_logits: allowed must be an int32 for each 32 logits of each row");
        r.promise(DType::f32, a.logits);
    }
};

}  // namespace
}  // namespace infini
