// The arguments of what reads weights, checked: rows of them, products, experts, adapters
#pragma once
#include "binding_arguments.h"

namespace infini {
namespace {

// ---- rows of weights --------------------------------------------------------------------------------------

// [*] ids and rows of this length -> [*, length]
Tensor shape_of_rows(const Tensor& ids, int64_t length) {
    require(is_index(ids.dtype) && is_contiguous(ids), "embedding: ids must be contiguous integers");
    require(ids.ndim < kMaxDims, "embedding: ids have too many dimensions");
    Tensor shape = ids;
    shape.shape[shape.ndim++] = length;
    return shape;
}

void read_arguments(Reading<Embedding>& r, nb::handle ids, nb::handle weight) {
    Embedding& a = r.args;
    r.take(a.ids, ids), r.take(a.weight, weight);
    require(a.weight.ndim == 2 && has_rows(a.weight) && !is_index(a.weight.dtype),
            "embedding: weight must be [num_embeddings, embedding_dim] of floats");
    r.promise(a.weight.dtype, shape_of_rows(a.ids, a.weight.shape[1]));
    r.may_widen = true;
}

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

void read_arguments(Reading<QuantizedEmbedding>& r, nb::handle ids, nb::handle weight) {
    read_lookup(r, ids, weight, false);
}

void read_arguments(Reading<PackedEmbedding>& r, nb::handle ids, nb::handle weight) {
    read_lookup(r, ids, weight, true);
}

// ---- products ---------------------------------------------------------------------------------------------

// `rows` of a weight against those of x
void check_product(const Tensor& x, const Tensor& rows, BlockType type, const Tensor& bias) {
    require(x.ndim >= 1 && has_rows(x), "linear: the rows of x must be contiguous");
    require(rows.ndim == 2 && has_rows(rows), "linear: weight must be two-dimensional, with contiguous rows");
    const BlockSize block = block_size(type);
    const int64_t length = x.shape[x.ndim - 1], row_bytes = rows.shape[1] * item_size(rows.dtype);
    require(length % block.elements == 0 && row_bytes == length / block.elements * block.bytes,
            "linear: a row of weight must be as long as a row of x");
    if (!bias.data && bias.ndim == 0) return;  // there is none; one without elements has dimensions
    require(bias.dtype == x.dtype && is_contiguous(bias) && num_elements(bias) == rows.shape[0],
            "linear: bias must be contiguous, of the dtype of x, one value a row of weight");
}

BlockType dense_type(DType dtype) {
    return dtype == DType::f16 ? BlockType::f16 : dtype == DType::bf16 ? BlockType::bf16 : BlockType::f32;
}

void read_arguments(Reading<Linear>& r, nb::handle x, nb::handle weight, nb::handle bias) {
    Linear& a = r.args;
    r.take(a.x, x), r.take(a.weight, weight), r.take_if_any(a.bias, bias);
    require(is_float(a.weight.dtype), "linear: weight must be float32, float16 or bfloat16");
    require(a.x.dtype == DType::f32 || a.x.dtype == a.weight.dtype,
            "linear: x must be float32, or half precision as the weight is");
    a.type = dense_type(a.weight.dtype);
    check_product(a.x, a.weight, a.type, a.bias);
    r.promise(a.x.dtype, with_length(a.x, a.weight.shape[0]));
}

void read_arguments(Reading<QuantizedLinear>& r, nb::handle x, nb::handle given, nb::handle bias) {
    QuantizedLinear& a = r.args;
    require(r.take(a.x, x).dtype == DType::f32, "linear: x must be float32");
    const Weight& weight = r.take_weight(a.weight, given);
    require(weight.activation_bits == 0, "linear: a packed weight is for packed_linear");
    r.take_if_any(a.bias, bias);
    a.type = weight.type;
    check_product(a.x, as_rows(weight, a.weight), a.type, a.bias);
    r.promise(DType::f32, with_length(a.x, weight.num_rows));
}

Gate gate_of(const std::optional<std::string>& activation) {
    if (!activation) return Gate::none;
    require(*activation == "silu" || *activation == "gelu_tanh",
            "packed_linear: activation must be None, 'silu' or 'gelu_tanh'");
    return *activation == "silu" ? Gate::silu : Gate::gelu_tanh;
}

// A packed weight, against the rows of x; returns its activation_bits
int take_weight(Reading<PackedLinear>& r, int i, const Tensor& x, nb::object given, nb::object bias) {
    PackedLinear& a = r.args;
    const Weight& weight = r.take_weight(a.weight[i], given);
    require(weight.activation_bits != 0, "packed_linear: expected packed weights");
    a.type[i] = weight.type, a.num_rows[i] = weight.num_rows;
    check_product(x, as_rows(weight, a.weight[i]), weight.type, r.take_if_any(a.bias[i], bias));
    return weight.activation_bits;
}

// Those that multiply x, and are given it rounded alike
void take_first_weights(Reading<PackedLinear>& r, nb::sequence weights, nb::sequence biases) {
    PackedLinear& a = r.args;
    for (int i = 0; i < a.num_first(); ++i) {
        const int bits = take_weight(r, i, a.x, nb::object(weights[i]), nb::object(biases[i]));
        const auto rounding = [&](BlockType type) { return rounding_of(type, bits, active_wholes()); };
        require(i == 0 || (bits == a.activation_bits && rounding(a.type[i]) == rounding(a.type[0])),
                "packed_linear: expected weights whose activations are rounded alike");
        a.activation_bits = bits;
    }
    require(a.gate == Gate::none || (a.count >= 2 && a.num_rows[0] == a.num_rows[1]),
            "packed_linear: a gated product takes two weights of one size");
}

// The one that multiplies what a gate gives
void take_last_weight(Reading<PackedLinear>& r, nb::object weight, nb::object bias) {
    PackedLinear& a = r.args;
    a.gated_bits = take_weight(r, 2, with_length(a.x, a.num_rows[0]), weight, bias);
    require(rounding_of(a.type[2], a.gated_bits, active_wholes()).span <= kMostGatedSpan,
            "packed_linear: expected a third weight whose activations are rounded in shorter spans");
}

void read_arguments(Reading<PackedLinear>& r, nb::handle x, nb::sequence weights, nb::sequence biases,
                    nb::handle residual, std::optional<std::string> activation) {
    PackedLinear& a = r.args;
    require(r.take(a.x, x).dtype == DType::f32, "packed_linear: x must be float32");
    const size_t count = nb::len(weights);
    require(count >= 1 && count <= kPackedWeights && nb::len(biases) == count,
            "packed_linear: expected one to three weights, and a bias or None for each");
    a.count = static_cast<int>(count), a.gate = gate_of(activation);
    take_first_weights(r, weights, biases);
    int64_t width = a.num_rows[0];
    if (a.has_last())
        take_last_weight(r, nb::object(weights[2]), nb::object(biases[2])), width = a.num_rows[2];
    for (int i = 1; a.gate == Gate::none && i < a.count; ++i) width += a.num_rows[i];
    r.promise(DType::f32, with_length(a.x, width));
    if (residual.is_none()) return;
    const Tensor& added = r.take(a.residual, residual);
    require(added.dtype == DType::f32 && has_rows(added) && same_shape(added, a.y),
            "packed_linear: the residual must be like the result");
}

// ---- mixtures of experts ----------------------------------------------------------------------------------

Scoring scoring_of(const char* name) {
    if (!strcmp(name, "softmax")) return Scoring::softmax;
    require(!strcmp(name, "sigmoid"), "route: scores must be those of 'softmax' or 'sigmoid'");
    return Scoring::sigmoid;
}

void check_groups(const Route& a, int64_t num_chosen, int64_t num_experts) {
    require(
        a.num_groups >= 1 && num_experts % a.num_groups == 0 && a.num_kept >= 1 && a.num_kept <= a.num_groups,
        "route: groups must be equally large, and some of them be kept");
    const int64_t size = num_experts / a.num_groups;
    require(a.num_groups == 1 || size >= 2, "route: a group must have two experts or more");
    require(num_chosen >= 1 && num_chosen <= a.num_kept * size,
            "route: as many experts must be chosen as are left, or fewer, and one at least");
}

void read_arguments(Reading<Route>& r, nb::handle logits, int64_t num_chosen, bool normalizes,
                    const char* scoring, nb::handle bias, std::pair<int64_t, int64_t> groups) {
    Route& a = r.args;
    check_float_rows(r.take(a.logits, logits));
    const int64_t num_experts = a.logits.shape[a.logits.ndim - 1];
    require(a.logits.ndim == 2 && num_experts < (int64_t{1} << 31),
            "route: logits must be [tokens, experts]");
    a.normalizes = normalizes, a.scoring = scoring_of(scoring);
    a.num_groups = groups.first, a.num_kept = groups.second;
    check_groups(a, num_chosen, num_experts);
    r.take_if_any(a.bias, bias);
    require(bias.is_none() || (a.bias.dtype == DType::f32 && a.bias.ndim == 1 && is_contiguous(a.bias) &&
                               a.bias.shape[0] == num_experts),
            "route: bias must be contiguous float32, one value an expert");
    r.promise(DType::i32, with_length(a.logits, num_chosen));
    a.shares.dtype = DType::f32;
}

void check_choice(const Tensor& ids, const Tensor& shares, int64_t num_tokens) {
    require(is_index(ids.dtype) && is_contiguous(ids) && ids.ndim == 2 && ids.shape[0] == num_tokens,
            "experts: ids must be contiguous integers, a row for each token");
    require(shares.dtype == DType::f32 && has_rows(shares) && same_shape(shares, ids),
            "experts: shares must be float32, one for each id");
}

// Of a weight of any kind, its rows
Tensor take_weight(Reading<Experts>& r, int i, nb::object given) {
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

Gating gating(const char* activation) {
    if (!strcmp(activation, "silu")) return Gating::silu;
    require(!strcmp(activation, "swiglu_oai"), "experts: the activation must be 'silu' or 'swiglu_oai'");
    return Gating::swiglu_oai;
}

void read_arguments(Reading<Experts>& r, nb::handle x, nb::handle ids, nb::handle shares,
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
    require(hidden > 0 && rows[2].shape[0] % hidden == 0, "experts: down must have hidden size rows each");
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

// ---- low-rank adapters ------------------------------------------------------------------------------------

void read_arguments(Reading<AddLora>& r, nb::handle base, nb::handle x, nb::handle a, nb::handle b,
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

}  // namespace
}  // namespace infini
