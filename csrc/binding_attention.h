// The arguments of attention and sampling, checked
#pragma once
#include "binding_elementwise.h"

namespace infini {
namespace {

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

void read_arguments(Reading<Attention>& r, nb::handle q, nb::handle keys, nb::handle values,
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

// Keys and values for pools, and where they go
template <class Args>
void take_stored(Reading<Args>& r, nb::handle keys, nb::handle values, nb::handle k, nb::handle v,
                 nb::handle tables, nb::handle streams, nb::handle slots) {
    Args& a = r.args;
    r.take(a.keys, keys), r.take(a.values, values), r.take(a.k, k), r.take(a.v, v);
    r.take(a.tables, tables), r.take(a.streams, streams), r.take(a.slots, slots);
    check_heads(a.k, "k must be [tokens, kv heads, dim] of floats with contiguous rows");
    check_heads(a.v, "v must be [tokens, kv heads, dim] of floats with contiguous rows");
    check_pools(a.keys, a.values, a.k.shape[2]);
    require(a.k.dtype == a.v.dtype && same_shape(a.k, a.v) && a.keys.shape[1] == a.k.shape[1],
            "k and v must have the heads of the pools");
    check_places(a.tables, a.streams, a.slots, a.k.shape[0]);
}

void read_arguments(Reading<StoreKv>& r, nb::handle keys, nb::handle values, nb::handle k, nb::handle v,
                    nb::handle tables, nb::handle streams, nb::handle slots) {
    take_stored(r, keys, values, k, v, tables, streams, slots);
}

void read_arguments(Reading<StoreHeads>& r, nb::handle q, nb::handle k, nb::handle v, nb::handle positions,
                    nb::handle sin, nb::handle cos, bool interleaved, nb::handle keys, nb::handle values,
                    nb::handle tables, nb::handle streams, nb::handle slots) {
    StoreHeads& a = r.args;
    r.take(a.q, q), r.take(a.positions, positions), r.take(a.sin, sin), r.take(a.cos, cos);
    take_stored(r, keys, values, k, v, tables, streams, slots);
    check_heads(a.q, "store_heads: q must be [tokens, heads, dim] of floats with contiguous rows");
    require(a.q.dtype == a.k.dtype && a.q.shape[0] == a.k.shape[0] && a.q.shape[2] == a.k.shape[2],
            "store_heads: q must have the tokens of k and its head size");
    check_angles(a.q, a.sin, a.cos);
    check_positions(a.positions, 1, a.q.shape[0]);
    require(a.positions.ndim == 1 && a.k.shape[1] > 0 && a.k.shape[2] <= kMaxHeadDim,
            "store_heads: positions must be [tokens], and a head at most 256 wide");
    a.interleaved = interleaved;
    r.promise_like(q, a.q);
}

void read_arguments(Reading<RandomSample>& r, nb::handle logits, double random_val, double topp, int64_t topk,
                    double temperature) {
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

void read_arguments(Reading<Sample>& r, nb::handle logits, nb::handle uniforms, nb::handle settings,
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

void read_arguments(Reading<Logprobs>& r, nb::handle logits, nb::handle tokens, int64_t num_top) {
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

void read_arguments(Reading<AdjustLogits>& r, nb::handle logits, nb::handle history, nb::handle ends,
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
    require(
        allowed.is_none() || (a.allowed.dtype == DType::i32 && a.allowed.ndim == 2 && has_rows(a.allowed) &&
                              a.allowed.shape[0] == num_rows && a.allowed.shape[1] == num_words),
        "adjust_logits: allowed must be an int32 for each 32 logits of each row");
    r.promise(DType::f32, a.logits);
}

}  // namespace
}  // namespace infini
