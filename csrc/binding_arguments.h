// The arguments of each op from Python: `make_` checks what memory safety needs and fills in the struct of
// kernels.h, `accepts_` says without a word whether it could.
#pragma once
#include "binding_tensors.h"
#include "kernels.h"

namespace infini {
namespace {

RmsNorm make_rms_norm(nb::handle y, nb::handle x, nb::handle weight, double eps) {
    const RmsNorm a{tensor(y), tensor(x), tensor(weight), static_cast<float>(eps)};
    check_rows(a.y, a.x);
    check_vector(a.weight, a.x);
    return a;
}

AddRmsNorm make_add_rms_norm(nb::handle y, nb::handle sum, nb::handle x, nb::handle residual,
                             nb::handle weight, double eps) {
    const AddRmsNorm a{tensor(y),        tensor(sum),    tensor(x),
                       tensor(residual), tensor(weight), static_cast<float>(eps)};
    check_rows(a.y, a.x);
    check_rows(a.sum, a.x);
    check_rows(a.residual, a.x);
    check_vector(a.weight, a.x);
    return a;
}

bool accepts_layer_norm(nb::handle out, nb::handle x, nb::handle weight, nb::handle bias, double eps) {
    return weight.is_none() == bias.is_none() && accepts_row_op(out, x, weight, bias, eps);
}

LayerNorm make_layer_norm(nb::handle y, nb::handle x, nb::handle weight, nb::handle bias, double eps) {
    const bool has_affine = !weight.is_none();
    LayerNorm a{tensor(y), tensor(x), {}, {}, eps, has_affine};
    check_rows(a.y, a.x);
    if (!has_affine) return a;
    check_vector(a.weight = tensor(weight), a.x);
    check_vector(a.bias = tensor(bias), a.x);
    return a;
}

Tensor with_batch(Tensor t) {  // [seq, heads, d] -> [1, seq, heads, d]
    if (t.ndim != 3) return t;
    for (int i = 3; i > 0; --i) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
    t.shape[0] = 1, t.stride[0] = 0, t.ndim = 4;
    return t;
}

const char* broken_rope_rule(const Rope& a) {
    const auto [batch, seq] = std::pair(a.x.shape[0], a.x.shape[1]);
    if (a.x.ndim != 4 || !same_shape(a.x, a.y))
        return "rope: x and y need one shape, [seq, heads, d] or [batch, seq, heads, d]";
    if (!is_float(a.x.dtype) && a.x.dtype != DType::f64) return "rope: x needs a floating dtype";
    if (a.x.dtype != a.y.dtype || a.x.dtype != a.sin.dtype || a.x.dtype != a.cos.dtype)
        return "rope: x, y, sin and cos need one dtype";
    if (!has_rows(a.x) || !has_rows(a.y)) return "rope: the last dimension of x and y must be contiguous";
    if (a.sin.ndim != 2 || !same_shape(a.sin, a.cos) || !is_contiguous(a.sin) || !is_contiguous(a.cos))
        return "rope: sin and cos must be contiguous [length, d/2] tables of one shape";
    if (a.x.shape[3] != 2 * a.sin.shape[1])
        return "rope: the head size must be twice the width of the tables";
    if (!is_index(a.positions.dtype) || !is_contiguous(a.positions))
        return "rope: positions must be contiguous integers";
    const Tensor& p = a.positions;
    const bool fits =
        p.ndim == 1 ? p.shape[0] == seq : p.ndim == 2 && p.shape[0] == batch && p.shape[1] == seq;
    return fits ? nullptr : "rope: positions must be [seq] or [batch, seq]";
}

bool accepts_rope(nb::handle out, nb::handle x, nb::handle positions, nb::handle sin, nb::handle cos, bool) {
    Tensor in[4], y;
    if (!read(x, &in[0]) || !read(positions, &in[1]) || !read(sin, &in[2]) || !read(cos, &in[3]))
        return false;
    if (!read(out.is_none() ? x : out, &y)) return false;
    if (broken_rope_rule({with_batch(y), with_batch(in[0]), in[1], in[2], in[3], false})) return false;
    if (needs_grad(x) || needs_grad(sin) || needs_grad(cos)) return false;
    return out.is_none() || may_write_all(y, in, 4);
}

Rope make_rope(nb::handle y, nb::handle x, nb::handle positions, nb::handle sin, nb::handle cos,
               bool interleaved) {
    const Rope a{with_batch(tensor(y)), with_batch(tensor(x)), tensor(positions),
                 tensor(sin),           tensor(cos),           interleaved};
    if (const char* rule = broken_rope_rule(a)) refuse(rule);
    return a;
}

Unary make_unary(nb::handle y, nb::handle x) {
    const Unary a{tensor(y), tensor(x)};
    check_rows(a.y, a.x);
    return a;
}

Binary make_binary(nb::handle y, nb::handle first, nb::handle second) {
    const Binary a{tensor(y), tensor(first), tensor(second)};
    check_rows(a.y, a.a);
    check_rows(a.y, a.b);
    return a;
}

Softmax make_softmax(nb::handle y, nb::handle x) {
    const Unary a = make_unary(y, x);
    return {a.y, a.x, false};
}

Softmax make_causal_softmax(nb::handle y, nb::handle x) {
    const Unary a = make_unary(y, x);
    require(a.x.ndim >= 2 && a.x.shape[a.x.ndim - 2] <= a.x.shape[a.x.ndim - 1],
            "causal_softmax: needs [..., s, t] with s <= t");
    return {a.y, a.x, true};
}

bool accepts_embedding(nb::handle out, nb::handle ids, nb::handle weight) {
    Tensor in[2], y;
    if (!read(ids, &in[0]) || !read(weight, &in[1]) || !is_index(in[0].dtype) || !is_contiguous(in[0]))
        return false;
    if (is_index(in[1].dtype) || in[1].ndim != 2 || !has_rows(in[1]) || needs_grad(weight)) return false;
    return out.is_none() || (read(out, &y) && is_contiguous(y) && may_write_all(y, in, 2));
}

Embedding make_embedding(nb::handle y, nb::handle ids, nb::handle weight) {
    const Embedding a{tensor(y), tensor(ids), tensor(weight)};
    require(is_index(a.ids.dtype) && is_contiguous(a.ids), "embedding: ids must be contiguous integers");
    require(a.weight.ndim == 2 && has_rows(a.weight),
            "embedding: weight must be [num_embeddings, embedding_dim]");
    require(a.y.dtype == a.weight.dtype || (a.y.dtype == DType::f32 && is_float(a.weight.dtype)),
            "embedding: out must have the weight's dtype, or be float32 where that is half precision");
    bool fits =
        is_contiguous(a.y) && a.y.ndim == a.ids.ndim + 1 && a.y.shape[a.ids.ndim] == a.weight.shape[1];
    for (int i = 0; fits && i < a.ids.ndim; ++i) fits = a.y.shape[i] == a.ids.shape[i];
    require(fits, "embedding: out must be contiguous, with one row an id");
    return a;
}

bool has_same_rows(const Tensor& y, const Tensor& x) {  // all but the last dimension
    bool same = y.ndim == x.ndim;
    for (int i = 0; same && i + 1 < x.ndim; ++i) same = x.shape[i] == y.shape[i];
    return same;
}

const char* broken_linear_rule(const Linear& a) {
    if (a.x.dtype != DType::f32 && (!is_float(a.x.dtype) || a.x.dtype != a.weight.dtype))
        return "linear: x must be float32, or half precision as the weight is";
    if (a.y.dtype != a.x.dtype) return "linear: out must have the dtype of x";
    if (a.x.ndim < 1 || !has_rows(a.x) || !has_rows(a.y))
        return "linear: the rows of x and out must be contiguous";
    if (a.weight.ndim != 2 || !has_rows(a.weight))
        return "linear: weight must be two-dimensional, with contiguous rows";
    const BlockSize block = block_size(a.type);
    if (block.bytes == 0) return "linear: no such block type";
    const int64_t length = a.x.shape[a.x.ndim - 1], row_bytes = a.weight.shape[1] * item_size(a.weight.dtype);
    if (length % block.elements || row_bytes != length / block.elements * block.bytes)
        return "linear: a row of weight must be as long as a row of x";
    if (!has_same_rows(a.y, a.x) || a.y.shape[a.y.ndim - 1] != a.weight.shape[0])
        return "linear: out must have the rows of x, each as long as weight has rows";
    const bool is_bias =
        a.bias.dtype == a.x.dtype && is_contiguous(a.bias) && num_elements(a.bias) == a.weight.shape[0];
    return !a.has_bias || is_bias
               ? nullptr
               : "linear: bias must be contiguous, of the dtype of x, one value a row of weight";
}

bool read_block_type(const Tensor& dense, BlockType* type) {
    *type = dense.dtype == DType::f16    ? BlockType::f16
            : dense.dtype == DType::bf16 ? BlockType::bf16
                                         : BlockType::f32;
    return is_float(dense.dtype);
}

bool accepts_product(nb::handle out, nb::handle bias, nb::handle x, Linear a) {
    a.has_bias = !bias.is_none();
    if (a.has_bias && (!read(bias, &a.bias) || needs_grad(bias))) return false;
    if (!read(out.is_none() ? x : out, &a.y)) return false;
    if (out.is_none() && a.y.ndim) a.y.shape[a.y.ndim - 1] = a.weight.shape[0];
    if (broken_linear_rule(a) || needs_grad(x)) return false;
    const Tensor inputs[] = {a.x, a.weight, a.has_bias ? a.bias : a.weight};
    return out.is_none() || (a.y.data != a.x.data && may_write_all(a.y, inputs, 3));
}

bool accepts_linear(nb::handle out, nb::handle x, nb::handle weight, nb::handle bias) {
    Linear a{};
    if (!read(x, &a.x) || !read(weight, &a.weight) || needs_grad(weight)) return false;
    return read_block_type(a.weight, &a.type) && accepts_product(out, bias, x, a);
}

bool accepts_quantized_linear(nb::handle out, nb::handle x, nb::handle blocks, nb::handle bias, int type) {
    Linear a{};
    a.type = static_cast<BlockType>(type);
    return read(x, &a.x) && read(blocks, &a.weight) && a.weight.dtype == DType::u8 &&
           accepts_product(out, bias, x, a);
}

Linear checked(Linear a) {
    if (const char* rule = broken_linear_rule(a)) refuse(rule);
    return a;
}

Linear make_linear(nb::handle y, nb::handle x, nb::handle weight, nb::handle bias) {
    Linear a{tensor(y), tensor(x),      tensor(weight), bias.is_none() ? Tensor{} : tensor(bias),
             {},        !bias.is_none()};
    require(read_block_type(a.weight, &a.type), "linear: weight must be float32, float16 or bfloat16");
    return checked(a);
}

Linear make_quantized_linear(nb::handle y, nb::handle x, nb::handle blocks, nb::handle bias, int type) {
    const Linear a{tensor(y),
                   tensor(x),
                   tensor(blocks),
                   bias.is_none() ? Tensor{} : tensor(bias),
                   static_cast<BlockType>(type),
                   !bias.is_none()};
    require(a.weight.dtype == DType::u8, "quantized_linear: blocks must be uint8");
    return checked(a);
}

// Packed rows seen as the rows they were, for the rules of those
Tensor as_rows(Tensor packed, int64_t num_rows) {
    const bool is_packed = packed.dtype == DType::u8 && packed.ndim == 2 && is_contiguous(packed) &&
                           num_rows >= 0 && packed.shape[0] == (num_rows + kPackedRows - 1) / kPackedRows &&
                           packed.shape[1] % kPackedRows == 0;
    if (!is_packed) return packed.ndim = 0, packed;  // breaks every rule
    packed.shape[0] = num_rows, packed.shape[1] /= kPackedRows;
    return packed;
}

// The product with weight i alone, whose columns of y begin at `first`
Linear part_of(const PackedLinear& a, int i, int64_t first) {
    Linear part{a.y,       a.x,       as_rows(a.weight[i], a.num_rows[i]),
                a.bias[i], a.type[i], a.bias[i].data != nullptr};
    if (a.y.ndim) part.y.shape[a.y.ndim - 1] = smaller(a.num_rows[i], a.y.shape[a.y.ndim - 1] - first);
    return part;
}

const char* broken_packed_rule(const PackedLinear& a) {
    if (a.count == 0 || (a.is_gated && (a.count != 2 || a.num_rows[0] != a.num_rows[1])))
        return "packed_linear: expected one to three weights, and of a gated product two of one size";
    int64_t columns = 0;
    for (int i = 0; i < a.count; ++i) {
        if (block_size(a.type[i]).elements <= 1) return "packed_linear: weight must be packed blocks";
        if (const char* rule = broken_linear_rule(part_of(a, i, columns))) return rule;
        if (!a.is_gated) columns += a.num_rows[i];
    }
    if (!a.is_gated && columns != a.y.shape[a.y.ndim - 1])
        return "packed_linear: out must have a column for each row of weight";
    const bool fits = a.residual.dtype == DType::f32 && same_shape(a.residual, a.y) && has_rows(a.residual);
    return !a.residual.data || fits
               ? nullptr
               : "packed_linear: residual must be float32 in the shape of out, with contiguous rows";
}

// Fills in the weights, which may be None from some place on, and their biases; false where one is no tensor
bool read_weights(PackedLinear* a, const nb::handle* weights, const nb::handle* biases, const int* types,
                  const int64_t* num_rows) {
    for (int i = 0; i < kPackedWeights && !weights[i].is_none(); ++i, ++a->count) {
        if (!read(weights[i], &a->weight[i]) || (!biases[i].is_none() && !read(biases[i], &a->bias[i])))
            return false;
        a->type[i] = static_cast<BlockType>(types[i]);
        a->num_rows[i] = num_rows[i];
    }
    return true;
}

bool accepts_packed_linear(nb::handle out, nb::handle x, nb::handle residual, nb::handle w0, nb::handle w1,
                           nb::handle w2, nb::handle b0, nb::handle b1, nb::handle b2, int t0, int t1, int t2,
                           int64_t n0, int64_t n1, int64_t n2, bool is_gated) {
    const nb::handle weights[] = {w0, w1, w2}, biases[] = {b0, b1, b2};
    const int types[] = {t0, t1, t2};
    const int64_t num_rows[] = {n0, n1, n2};
    PackedLinear a{};
    a.is_gated = is_gated;
    if (!read(x, &a.x) || !read_weights(&a, weights, biases, types, num_rows)) return false;
    if ((!residual.is_none() && !read(residual, &a.residual)) || !read(out.is_none() ? x : out, &a.y))
        return false;
    if (out.is_none() && a.y.ndim) {
        int64_t& columns = a.y.shape[a.y.ndim - 1] = n0;
        for (int i = 1; i < a.count && !is_gated; ++i) columns += num_rows[i];
    }
    if (broken_packed_rule(a) || needs_grad(x)) return false;
    for (nb::handle h : {residual, b0, b1, b2})
        if (!h.is_none() && needs_grad(h)) return false;
    if (out.is_none()) return true;
    if (a.y.data == a.x.data || !may_write_all(a.y, &a.x, 1)) return false;
    return may_write_all(a.y, a.weight, a.count) && may_write_all(a.y, a.bias, a.count) &&
           (!a.residual.data || may_write(a.y, a.residual));
}

// The floats that packed_linear needs beside its tensors: blocks of rows, each group of 32 with a scale and
// 10 for a plane
int64_t packed_room(const Tensor& x, int activation_bits) {
    const int64_t length = x.shape[x.ndim - 1], num_rows = length ? num_elements(x) / length : 0;
    int64_t block = 1;
    while (block < kRowBlock && block < num_rows) block *= 2;
    return (num_rows + block - 1) / block * block * (length / 32) * (1 + 10 * num_planes_of(activation_bits));
}

PackedLinear make_packed_linear(nb::handle y, nb::handle x, nb::handle residual, nb::handle workspace,
                                nb::handle w0, nb::handle w1, nb::handle w2, nb::handle b0, nb::handle b1,
                                nb::handle b2, int t0, int t1, int t2, int64_t n0, int64_t n1, int64_t n2,
                                bool is_gated, int activation_bits) {
    const nb::handle weights[] = {w0, w1, w2}, biases[] = {b0, b1, b2};
    const int types[] = {t0, t1, t2};
    const int64_t num_rows[] = {n0, n1, n2};
    PackedLinear a{tensor(y),
                   tensor(x),
                   residual.is_none() ? Tensor{} : tensor(residual),
                   tensor(workspace),
                   {},
                   {},
                   {},
                   {},
                   0,
                   activation_bits,
                   is_gated};
    require(read_weights(&a, weights, biases, types, num_rows),
            "packed_linear: weights and biases must be CPU tensors");
    if (const char* rule = broken_packed_rule(a)) refuse(rule);
    require(activation_bits == 8 || activation_bits == 12 || activation_bits == 16,
            "packed_linear: activations have 8, 12 or 16 bits");
    require(a.workspace.dtype == DType::f32 && is_contiguous(a.workspace) &&
                num_elements(a.workspace) >= packed_room(a.x, activation_bits),
            "packed_linear: the workspace is too small");
    return a;
}

const char* broken_lookup_rule(const QuantizedEmbedding& a) {
    const BlockSize block = block_size(a.type);
    if (block.elements <= 1) return "embedding: no such block type";
    if (!is_index(a.ids.dtype) || !is_contiguous(a.ids)) return "embedding: ids must be contiguous integers";
    if (a.weight.dtype != DType::u8 || a.weight.ndim != 2 || !has_rows(a.weight) ||
        a.weight.shape[1] % block.bytes)
        return "embedding: weight must be rows of whole blocks, uint8";
    const int64_t row_length = a.weight.shape[1] / block.bytes * block.elements;
    const bool fits = a.y.dtype == DType::f32 && is_contiguous(a.y) &&
                      num_elements(a.y) == num_elements(a.ids) * row_length;
    return fits ? nullptr : "embedding: out must be contiguous float32 with one row an id";
}

// Without `out` the caller allocates what fits, so the ids and the blocks are all there is to check.
bool accepts_quantized_embedding(nb::handle out, nb::handle ids, nb::handle blocks, int type) {
    QuantizedEmbedding a{};
    a.type = static_cast<BlockType>(type);
    if (!read(ids, &a.ids) || !read(blocks, &a.weight)) return false;
    if (out.is_none())
        return is_index(a.ids.dtype) && is_contiguous(a.ids) && a.weight.ndim == 2 && has_rows(a.weight);
    return read(out, &a.y) && !broken_lookup_rule(a) && may_write_all(a.y, &a.ids, 1) &&
           may_write_all(a.y, &a.weight, 1);
}

QuantizedEmbedding make_quantized_embedding(nb::handle y, nb::handle ids, nb::handle blocks, int type) {
    QuantizedEmbedding a{tensor(y), tensor(ids), tensor(blocks), static_cast<BlockType>(type), 0};
    if (const char* rule = broken_lookup_rule(a)) refuse(rule);
    a.num_rows = a.weight.shape[0];
    return a;
}

bool accepts_packed_embedding(nb::handle out, nb::handle ids, nb::handle packed, int type, int64_t num_rows) {
    QuantizedEmbedding a{};
    a.type = static_cast<BlockType>(type);
    if (!read(ids, &a.ids) || !read(packed, &a.weight)) return false;
    a.weight = as_rows(a.weight, num_rows);
    if (out.is_none()) return is_index(a.ids.dtype) && is_contiguous(a.ids) && a.weight.ndim == 2;
    return read(out, &a.y) && !broken_lookup_rule(a) && may_write_all(a.y, &a.ids, 1) &&
           may_write_all(a.y, &a.weight, 1);
}

QuantizedEmbedding make_packed_embedding(nb::handle y, nb::handle ids, nb::handle packed, int type,
                                         int64_t num_rows) {
    QuantizedEmbedding a{tensor(y), tensor(ids), tensor(packed), static_cast<BlockType>(type), num_rows};
    const Tensor weight = a.weight;
    a.weight = as_rows(weight, num_rows);
    if (const char* rule = broken_lookup_rule(a)) refuse(rule);
    a.weight = weight;
    return a;
}

RandomSample make_random_sample(nb::handle y, nb::handle logits, nb::handle workspace, double random_val,
                                double topp, int64_t topk, double temperature) {
    const RandomSample a{tensor(y), tensor(logits), tensor(workspace), random_val, topp, temperature, topk};
    require(a.logits.ndim == 1 && a.logits.shape[0] > 0 && is_float(a.logits.dtype) && has_rows(a.logits),
            "random_sample: logits must be one contiguous row of floats");
    require(num_elements(a.y) == 1 && (a.y.dtype == DType::i64 || a.y.dtype == DType::i32),
            "random_sample: out must be one int64 or int32");
    require(a.logits.shape[0] < (int64_t{1} << 31), "random_sample: too many logits");
    require(a.workspace.dtype == DType::i32 && is_contiguous(a.workspace) &&
                num_elements(a.workspace) >= 2 * a.logits.shape[0],
            "random_sample: workspace needs two int32 a logit");
    return a;
}

// [tokens, heads, dim] floats, rows contiguous
void check_heads(const Tensor& t, const char* rule) {
    require(t.ndim == 3 && t.dtype == DType::f32 && has_rows(t), rule);
}

void check_cache(const Tensor& keys, const Tensor& values, int64_t dim) {
    require(keys.ndim == 4 && is_float(keys.dtype) && has_rows(keys) && keys.shape[3] == dim,
            "the key cache must be [streams, kv heads, room, dim] of floats with contiguous rows");
    require(values.dtype == keys.dtype && has_rows(values) && same_shape(keys, values),
            "the value cache must be like the key cache");
}

void check_places(const Tensor& streams, const Tensor& positions, int64_t num_tokens) {
    for (const Tensor* t : {&streams, &positions})
        require(t->ndim == 1 && is_index(t->dtype) && is_contiguous(*t) && t->shape[0] == num_tokens,
                "streams and positions must be one integer a token");
}

Attention make_attention(nb::handle y, nb::handle q, nb::handle keys, nb::handle values, nb::handle streams,
                         nb::handle positions, nb::handle workspace, double scale, int64_t window) {
    const Attention a{tensor(y),       tensor(q),         tensor(keys),      tensor(values),
                      tensor(streams), tensor(positions), tensor(workspace), static_cast<float>(scale),
                      window};
    check_heads(a.q, "attention: q must be [tokens, heads, dim] of float32 with contiguous rows");
    check_heads(a.y, "attention: out must be [tokens, heads, dim] of float32 with contiguous rows");
    require(same_shape(a.y, a.q), "attention: out must have the shape of q");
    check_cache(a.keys, a.values, a.q.shape[2]);
    check_places(a.streams, a.positions, a.q.shape[0]);
    const int64_t num_kv_heads = a.keys.shape[1];
    require(num_kv_heads > 0 && a.q.shape[1] % num_kv_heads == 0,
            "attention: query heads must be a multiple of key heads");
    require(
        a.q.shape[2] <= kAttentionDim && a.q.shape[1] / num_kv_heads * (a.q.shape[2] + 2) <= kAttentionState,
        "attention: too many or too wide heads share a key head");
    require(a.workspace.dtype == DType::f32 && is_contiguous(a.workspace),
            "attention: the workspace must be contiguous float32");
    require(window >= 0, "attention: the window must not be negative");
    return a;
}

StoreKv make_store_kv(nb::handle keys, nb::handle values, nb::handle k, nb::handle v, nb::handle streams,
                      nb::handle positions) {
    const StoreKv a{tensor(keys), tensor(values), tensor(k), tensor(v), tensor(streams), tensor(positions)};
    check_heads(a.k, "store_kv: k must be [tokens, kv heads, dim] of float32 with contiguous rows");
    check_heads(a.v, "store_kv: v must be [tokens, kv heads, dim] of float32 with contiguous rows");
    check_cache(a.keys, a.values, a.k.shape[2]);
    require(same_shape(a.k, a.v) && a.keys.shape[1] == a.k.shape[1],
            "store_kv: k and v must have the heads of the cache");
    check_places(a.streams, a.positions, a.k.shape[0]);
    return a;
}

}  // namespace
}  // namespace infini
