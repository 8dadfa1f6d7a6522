// store_kv:  the key and value of slot[n] of stream[n] become k[n] and v[n]
// attention: y[n, h] = sum over j of softmax_j(scale * q[n, h] . keys[s, g, j]) * values[s, g, j], where
//            s = stream[n], g = h / (heads / kv heads), and j runs over the slots up to slot[n] (the last
//            `window` of them). With a soft cap a score is softcap * tanh(score / softcap) before the
//            softmax; with sinks, sinks[h] is one more score in it, which has no value.
// Slot j of stream s lies in block tables[s, j / S] of the pools, S slots a block. Keys lie there as they are
// read: sixteen side by side, a lane for each.
//
// Slots are taken in splits of kSplit, counted from the start of the stream. A split's maximum, sum and
// weighted values are found alone, and folded into the result in the order of the splits. So a token's result
// depends on its own keys only: not on the other tokens, on how a prompt was cut up, where blocks lie, nor on
// the threads. Few tokens over long streams share out their splits.
#include "attention.h"
#include "quant.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kSplit = 256;
constexpr int kLanes = kKeyLanes, kVectors = kLanes / W;
constexpr int kGroups = kSplit / kLanes;
constexpr int kScores = kSplit + W;  // a vector may begin at the last key
constexpr int kMaxDim = kMaxHeadDim;
constexpr int64_t kStateFloats = kMaxGroupFloats;  // of one task's running results
static_assert(kSplit % kMaxBlockSize == 0);

struct q8 { uint8_t byte; };  // of a pool in q8_0

// Calls body with a value of the pool's element type
template <class Body>
void with_pool_type(DType dtype, Body&& body) {
    if (dtype == DType::u8)
        body(q8{});
    else
        with_type(dtype, body);
}

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- what pools hold --------------------------------------------------------------------------------------

// A split: where each sixteen of its slots lie
template <class T>
struct Split {
    const T *keys[kGroups], *values[kGroups];
    int64_t key_stride, value_stride;  // from one of D to the next, from one slot to the next
};

constexpr int kRun = 32;  // of D, which share a scale in q8_0

// Sixteen keys, a lane for each. `enter` comes before a run, `at` gives vector n of the i-th of it.
template <class T>
struct KeyLanes {
    const T* data;
    int64_t stride;
    const T* run;

    INFINI_INLINE void enter(int64_t first) { run = data + first * stride; }
    INFINI_INLINE vf at(int64_t i, int n) const { return load(run + i * stride + n * W); }
};

template <>
struct KeyLanes<q8> {
    const q8* data;
    int64_t stride;  // runs are contiguous
    const int8_t* codes;
    vf scales[kVectors];

    INFINI_INLINE void enter(int64_t first) {
        const uint8_t* run = &data->byte + first / kRun * kLanes * Q8_0::kBytes;
        for (int n = 0; n < kVectors; ++n) scales[n] = load(reinterpret_cast<const f16*>(run) + n * W);
        codes = reinterpret_cast<const int8_t*>(run) + kLanes * sizeof(f16);
    }
    INFINI_INLINE vf at(int64_t i, int n) const { return scales[n] * load(codes + i * kLanes + n * W); }
};

template <class T>
INFINI_INLINE inline KeyLanes<T> lanes_of(const Split<T>& split, int64_t group) {
    KeyLanes<T> lanes;
    lanes.data = split.keys[group], lanes.stride = split.key_stride;
    return lanes;
}

// Elements i to i + W of the value at `row`
template <class T>
INFINI_INLINE inline vf value_at(const T* row, int64_t i) {
    return load(row + i);
}
INFINI_INLINE inline vf value_at(const q8* row, int64_t i) {
    const uint8_t* block = &row->byte + i / kRun * Q8_0::kBytes;
    return splat_half(block) * load(reinterpret_cast<const int8_t*>(block) + sizeof(f16) + i % kRun);
}

// The first `count` < W of them, which rows of blocks never need
template <class T>
INFINI_INLINE inline vf value_at(const T* row, int64_t i, int64_t count) {
    if constexpr (std::is_same_v<T, q8>)
        return vf{};
    else
        return load_n(row + i, count);
}

// Room for a split as floats
struct Widened {
    alignas(64) float keys[kMaxDim * kSplit], values[kMaxDim * kSplit];

    // The groups of a split that hold its slots from `begin` to `end`. A scale times a code is exact, so it
    // is all the same whether what is computed reads these or the pool.
    template <class T>
    Split<float> read(const Split<T>& split, int64_t begin, int64_t end, int64_t dim) {
        Split<float> wide{{}, {}, kLanes, dim};
        for (int64_t group = begin / kLanes; group * kLanes < end; ++group) {
            wide.keys[group] = keys + group * kLanes * dim,
            wide.values[group] = values + group * kLanes * dim;
            read_keys(keys + group * kLanes * dim, lanes_of(split, group), dim);
            for (int64_t j = 0; j < kLanes; ++j)
                read_value(values + (group * kLanes + j) * dim, split.values[group] + j * split.value_stride,
                           dim);
        }
        return wide;
    }

    template <class T>
    static void read_keys(float* to, KeyLanes<T> lanes, int64_t dim) {
        for (int64_t first = 0; first < dim; first += kRun) {
            lanes.enter(first);
            for (int64_t i = 0; i < smaller(kRun, dim - first); ++i, to += kLanes)
                for (int n = 0; n < kVectors; ++n) store(to + n * W, lanes.at(i, n));
        }
    }

    template <class T>
    static void read_value(float* to, const T* row, int64_t dim) {
        int64_t i = 0;
        for (; i + W <= dim; i += W) store(to + i, value_at(row, i));
        if (i < dim) store_n(to + i, value_at(row, i, dim - i), dim - i);
    }
};

// ---- a split for some queries -----------------------------------------------------------------------------

// What is known of a token's head after some keys: the largest score, sum of exp(score - max), and weighted
// values.
struct State {
    float* data;  // [max, sum, values of D]
    float& top() const { return data[0]; }
    float& sum() const { return data[1]; }
    float* values() const { return data + 2; }
};

// N vectors for each of M queries: lists rather than arrays, which GCC would keep in memory. each(f) calls
// f(sum, m, n).
template <int M, int N>
struct Sums {
    Sums<M, N - 1> rest;
    vf last;

    template <class F>
    INFINI_INLINE void each(int m, F&& f) {
        rest.each(m, f);
        f(last, m, N - 1);
    }
};

template <int M>
struct Sums<M, 0> {
    template <class F>
    INFINI_INLINE void each(int, F&&) {}
};

template <int M, int N>
struct Grid {
    Grid<M - 1, N> rest;
    Sums<M, N> last;

    template <class F>
    INFINI_INLINE void each(F&& f) {
        rest.each(f);
        last.each(M - 1, f);
    }
};

template <int N>
struct Grid<0, N> {
    template <class F>
    INFINI_INLINE void each(F&&) {}
};

// How many vectors of sums to keep for each of M queries: enough to hide the latency of an fma
constexpr int sums_each(int num_queries, int most) {
    int count = 1;
    while (count * 2 <= most && num_queries * count * 2 <= kAttentionSums) count *= 2;
    return count;
}

// scores[m][j] = scale * q[m] . keys[j] for the keys of G groups. Dot products run over the head size from
// first to last, with a lane for each key, so what a query gets does not depend on the queries beside it.
// While a line of keys is read, one of `ahead` is asked for, where `asks`: a test in the loop costs half as
// much again.
template <int M, int G, bool asks, class T>
void score_groups(float (*scores)[kScores], const float* const* q, const Split<T>& split, int64_t group,
                  int64_t dim, float scale, const T* const* ahead) {
    Grid<M, G * kVectors> sums;
    KeyLanes<T> keys[G];
    sums.each([&](vf& s, int, int) INFINI_INLINE { s = vf{}; });
    for (int g = 0; g < G; ++g) keys[g] = lanes_of(split, group + g);
    for (int64_t first = 0; first < dim; first += kRun) {
        const int64_t count = smaller(kRun, dim - first);
        for (int g = 0; g < G; ++g) keys[g].enter(first);
        for (int64_t i = 0; i < count; ++i) {
            if (asks && i % (4 / sizeof(T)) == 0)
                for (int g = 0; g < G; ++g) ask_for(ahead[group + g] + (first + i) * kLanes);
            sums.each([&](vf& s, int m, int n) INFINI_INLINE {
                s = fma(splat(q[m][first + i]), keys[n / kVectors].at(i, n % kVectors), s);
            });
        }
    }
    sums.each([&](vf& s, int m, int n)
                  INFINI_INLINE { store(scores[m] + group * kLanes + n * W, s * scale); });
}

// Of the groups that hold these slots: what others they hold is scored as well, for nothing
template <int M, bool asks, class T>
void score(float (*scores)[kScores], const float* const* q, const Split<T>& split, Range slots, int64_t dim,
           float scale, const T* const* ahead) {
    constexpr int G = sums_each(M * kVectors, 4);
    int64_t group = slots.begin / kLanes;
    const int64_t last = (slots.end + kLanes - 1) / kLanes;
    for (; group + G <= last; group += G)
        score_groups<M, G, asks>(scores, q, split, group, dim, scale, ahead);
    for (; group < last; ++group) score_groups<M, 1, asks>(scores, q, split, group, dim, scale, ahead);
}

// f(j, row) for the values of these slots
template <class T, class F>
INFINI_INLINE inline void each_row(const Split<T>& split, Range slots, F&& f) {
    for (int64_t j = slots.begin; j < slots.end;) {
        const T* row = split.values[j / kLanes] + j % kLanes * split.value_stride;
        const int64_t stop = smaller(slots.end, j / kLanes * kLanes + kLanes);
        for (; j < stop; ++j, row += split.value_stride) f(j, row);
    }
}

// out[m][i : i + N * W] += weights[m][j] * values[j] for these slots j, in their order
template <int M, int N, bool asks, class T>
void add_columns(float* const* out, const float (*weights)[kScores], const Split<T>& split, Range slots,
                 int64_t i, int64_t dim, const T* const* ahead) {
    Grid<M, N> sums;
    sums.each([&](vf& s, int m, int n) INFINI_INLINE { s = load(out[m] + i + n * W); });
    each_row(split, slots, [&](int64_t j, const T* row) INFINI_INLINE {
        for (int64_t d = 0; asks && d < dim; d += 64 / sizeof(T))
            ask_for(ahead[j / kLanes] + j % kLanes * dim + d);
        sums.each([&](vf& s, int m, int n)
                      INFINI_INLINE { s = fma(splat(weights[m][j]), value_at(row, i + n * W), s); });
    });
    sums.each([&](vf& s, int m, int n) INFINI_INLINE { store(out[m] + i + n * W, s); });
}

// All columns. While a row is read for the first of them, as much of `ahead` is asked for.
template <int M, bool asks, class T>
void add_values(float* const* out, const float (*weights)[kScores], const Split<T>& split, Range slots,
                int64_t dim, const T* const* ahead) {
    constexpr int N = sums_each(M, 4);
    int64_t i = 0;
    if (asks && N * W <= dim) {
        add_columns<M, N, asks>(out, weights, split, slots, i, dim, ahead);
        i += N * W;
    }
    for (; i + N * W <= dim; i += N * W) add_columns<M, N, false>(out, weights, split, slots, i, dim, ahead);
    for (; i + W <= dim; i += W) add_columns<M, 1, false>(out, weights, split, slots, i, dim, ahead);
    for (int m = 0; i < dim && m < M; ++m) {
        vf sum = load_n(out[m] + i, dim - i);
        each_row(split, slots, [&](int64_t j, const T* row) INFINI_INLINE {
            sum = fma(splat(weights[m][j]), value_at(row, i, dim - i), sum);
        });
        store_n(out[m] + i, sum, dim - i);
    }
}

// One query head of one token, and the slots of a split that it sees
struct Query {
    const float* q;
    State out;
    Range seen;
};

// Each query's scores become exp(score - max), and its state knows the max and the sum. Of the vectors that
// any of them sees, what it does not see itself counts for nothing. Queries go side by side, for each waits
// for its own maximum and sum.
template <int M>
void soften(const Query* queries, float (*scores)[kScores], Range any) {
    const int64_t begin = any.begin / W * W, end = (any.end + W - 1) / W * W;
    for (int m = 0; m < M; ++m) {
        for (int64_t j = begin; j < queries[m].seen.begin; ++j) scores[m][j] = -__builtin_inff();
        for (int64_t j = queries[m].seen.end; j < end; ++j) scores[m][j] = -__builtin_inff();
    }
    Grid<M, 1> tops, totals;
    tops.each([&](vf& top, int, int) INFINI_INLINE { top = splat(-__builtin_inff()); });
    for (int64_t j = begin; j < end; j += W)
        tops.each([&](vf& top, int m, int) INFINI_INLINE { top = max(top, load(scores[m] + j)); });
    tops.each([&](vf& top, int m, int) INFINI_INLINE { queries[m].out.top() = max(top); });
    totals.each([&](vf& total, int, int) INFINI_INLINE { total = vf{}; });
    for (int64_t j = begin; j < end; j += W)
        totals.each([&](vf& total, int m, int) INFINI_INLINE {
            const vf e = exp(load(scores[m] + j) - queries[m].out.top());
            store(scores[m] + j, e);
            total += e;
        });
    totals.each([&](vf& total, int m, int) INFINI_INLINE { queries[m].out.sum() = sum(total); });
}

// How a score is made: scale * q . k, or cap * tanh(scale * q . k) where there is a cap
struct Scoring { float scale, cap; };

// Of the vectors that any query sees
template <int M>
void cap_scores(float (*scores)[kScores], Range any, float cap) {
    const int64_t begin = any.begin / W * W, end = (any.end + W - 1) / W * W;
    for (int m = 0; m < M; ++m)
        for (int64_t j = begin; j < end; j += W) store(scores[m] + j, cap * tanh(load(scores[m] + j)));
}

// The states of M queries after one split alone. Where it `asks`, the split is far: its values, and then the
// keys of the `next` one, which may be itself, are asked for in time.
template <int M, bool asks, class T>
void attend_queries(const Query* queries, const Split<T>& split, int64_t dim, Scoring scoring,
                    const Split<T>& next) {
    alignas(64) float scores[M][kScores];
    const float* q[M];
    float* out[M];
    Range any{kSplit, 0}, all{0, kSplit};
    for (int m = 0; m < M; ++m) {
        const Range seen = queries[m].seen;
        q[m] = queries[m].q, out[m] = queries[m].out.values();
        memset(out[m], 0, dim * sizeof(float));
        any = {smaller(any.begin, seen.begin), larger(any.end, seen.end)};
        all = {larger(all.begin, seen.begin), smaller(all.end, seen.end)};
    }
    all.end = larger(all.begin, all.end);
    score<M, asks>(scores, q, split, any, dim, scoring.scale, split.values);
    if (scoring.cap > 0) cap_scores<M>(scores, any, scoring.cap);
    soften<M>(queries, scores, any);
    const auto add_alone = [&](int m, int64_t begin, int64_t end) {
        add_values<1, false>(out + m, scores + m, split, Range{begin, end}, dim, split.keys);
    };
    for (int m = 0; m < M; ++m) add_alone(m, queries[m].seen.begin, smaller(all.begin, queries[m].seen.end));
    add_values<M, asks>(out, scores, split, all, dim, next.keys);
    for (int m = 0; m < M; ++m) add_alone(m, larger(all.end, queries[m].seen.begin), queries[m].seen.end);
}

// The first of them ask for what is far; without a `next` split nothing is.
template <int M, class T>
void attend_all(const Query* queries, int64_t count, const Split<T>& split, int64_t dim, Scoring scoring,
                const Split<T>* next) {
    for (; count >= M; count -= M, queries += M, next = nullptr)
        if (next)
            attend_queries<M, true>(queries, split, dim, scoring, *next);
        else
            attend_queries<M, false>(queries, split, dim, scoring, split);
    if constexpr (M > 1) attend_all<M - 1>(queries, count, split, dim, scoring, next);
}

inline float scalar_exp(float x) { return exp(splat(x))[0]; }

void start(State state, int64_t dim) {
    memset(state.data, 0, (dim + 2) * sizeof(float));
    state.top() = -__builtin_inff();
}

void fold(State all, State part, int64_t dim) {
    const float top = all.top() > part.top() ? all.top() : part.top();
    const float kept = all.sum() > 0 ? scalar_exp(all.top() - top) : 0, added = scalar_exp(part.top() - top);
    all.top() = top;
    all.sum() = all.sum() * kept + part.sum() * added;
    map([&](vf a, vf p) { return fma(a, splat(kept), p * added); }, dim, all.values(), all.values(),
        part.values());
}

// ---- all tokens -------------------------------------------------------------------------------------------

struct Problem {
    const Attention& a;
    int64_t num_tokens, num_heads, num_kv_heads, group, dim, state_size, block_size;
    Scoring scoring;

    explicit Problem(const Attention& a)
        : a(a), num_tokens(a.q.shape[0]), num_heads(a.q.shape[1]), num_kv_heads(a.keys.shape[1]),
          group(num_heads / num_kv_heads), dim(a.q.shape[2]), state_size(dim + 2),
          block_size(a.values.shape[2]), scoring{a.softcap > 0 ? a.scale / a.softcap : a.scale, a.softcap} {}

    int64_t stream(int64_t n) const { return index_at(a.streams.data, a.streams.dtype, n); }
    int64_t slot(int64_t n) const { return index_at(a.slots.data, a.slots.dtype, n); }
    int64_t num_splits(int64_t n) const { return slot(n) / kSplit + 1; }
    int64_t first_split(int64_t n) const { return first_slot(slot(n), a.window) / kSplit; }
    bool sees(int64_t n, int64_t split) const { return split >= first_split(n) && split < num_splits(n); }

    // A query as float32: where it lies, or widened into the room
    const float* query(float* room, int64_t n, int64_t h) const {
        const int64_t at = n * a.q.stride[0] + h * a.q.stride[1];
        if (a.q.dtype == DType::f32) return static_cast<const float*>(a.q.data) + at;
        with_type(a.q.dtype, [&](auto type) {
            map([](vf v) { return v; }, dim, room, static_cast<const decltype(type)*>(a.q.data) + at);
        });
        return room;
    }

    // The slots of a split that token n sees, counted from the split's first
    Range visible(int64_t n, int64_t split) const {
        const int64_t start = split * kSplit;
        return {larger(first_slot(slot(n), a.window) - start, 0), smaller(slot(n) + 1 - start, kSplit)};
    }

    Query ask(const float* q, int64_t n, int64_t split, State out) const {
        return {q, out, visible(n, split)};
    }

    // An entry that no token sees may be anything; it then stands for a block whose slots are read for
    // nothing.
    int64_t block_at(int64_t stream, int64_t i) const {
        const int64_t block = i < a.tables.shape[1] ? table_entry(a.tables, stream, i) : 0;
        return block >= 0 && block < a.keys.shape[0] ? block : 0;
    }

    template <class T>
    Split<T> split_of(int64_t stream, int64_t g, int64_t split) const {
        Split<T> found;
        found.key_stride = a.keys.stride[3], found.value_stride = a.values.stride[2];
        const auto *keys = static_cast<const T*>(a.keys.data) + g * a.keys.stride[1],
                   *values = static_cast<const T*>(a.values.data) + g * a.values.stride[1];
        for (int64_t slot = 0; slot < kSplit; slot += block_size) {
            const int64_t block = block_at(stream, (split * kSplit + slot) / block_size);
            for (int64_t i = 0; i < block_size; i += kLanes) {
                const int64_t at = (slot + i) / kLanes;
                found.keys[at] = keys + block * a.keys.stride[0] + i / kLanes * a.keys.stride[2];
                found.values[at] = values + block * a.values.stride[0] + i * a.values.stride[2];
            }
        }
        return found;
    }

    template <class T>
    void answer(const Query* queries, int64_t count, const Split<T>& split, const Split<T>* next) const {
        attend_all<kAttentionQueries>(queries, count, split, dim, scoring, next);
    }

    // What a head's sink adds to its sum: as much as a key would
    float sunk(int64_t h, float top) const {
        if (!a.sinks.data) return 0;
        float sink;
        with_type(a.sinks.dtype, [&](auto type) {
            sink = load_n(static_cast<const decltype(type)*>(a.sinks.data) + h, 1)[0];
        });
        return scalar_exp(sink - top);
    }

    void finish(State state, int64_t n, int64_t h) const {
        const vf inverse = splat(1.0f / (state.sum() + sunk(h, state.top())));
        with_type(a.y.dtype, [&](auto type) {
            auto* y = static_cast<decltype(type)*>(a.y.data) + n * a.y.stride[0] + h * a.y.stride[1];
            map([&](vf v) { return v * inverse; }, dim, y, state.values());
        });
    }
};

constexpr int kBatch = 16;  // queries asked at once

// What a thread works with
struct Room {
    Widened widened;
    alignas(64) float states[kStateFloats], queries[kStateFloats], parts[kBatch][kMaxDim + 2];
    const float* q[kStateFloats / 3];  // a state has three floats at least
};

// One task: some tokens of one stream and the query heads of one key head, split after split, so that the
// keys and values of a split are read from memory once for all of them.
template <class T>
struct Task {
    const Problem& p;
    int64_t begin, end, g;
    Room& room;
    int64_t count = (end - begin) * p.group;

    int64_t token(int64_t i) const { return begin + i / p.group; }
    int64_t head(int64_t i) const { return g * p.group + i % p.group; }
    State state(int64_t i) const { return {room.states + i * p.state_size}; }

    void run() {
        int64_t first = p.first_split(begin), last = 0;
        for (int64_t n = begin; n < end; ++n)
            first = smaller(first, p.first_split(n)), last = larger(last, p.num_splits(n));
        for (int64_t i = 0; i < count; ++i) {
            room.q[i] = p.query(room.queries + i * p.dim, token(i), head(i));
            start(state(i), p.dim);
        }
        Split<T> next = p.template split_of<T>(p.stream(begin), g, first);
        for (int64_t split = first; split < last; ++split) {
            const Split<T> found = next;
            if (split + 1 < last) next = p.template split_of<T>(p.stream(begin), g, split + 1);
            take(split, found, next);
        }
        for (int64_t i = 0; i < count; ++i) p.finish(state(i), token(i), head(i));
    }

    void take(int64_t split, const Split<T>& found, const Split<T>& next) {
        if constexpr (!std::is_same_v<T, float>)
            if (count > kAttentionNarrowQueries) {
                Range slots{kSplit, 0};
                for (int64_t n = begin; n < end; ++n)
                    if (p.sees(n, split))
                        slots = {smaller(slots.begin, p.visible(n, split).begin),
                                 larger(slots.end, p.visible(n, split).end)};
                return ask<float>(split, room.widened.read(found, slots.begin, slots.end, p.dim), nullptr);
            }
        ask<T>(split, found, &next);
    }

    template <class Read>
    void ask(int64_t split, const Split<Read>& found, const Split<Read>* next) {
        for (int64_t i = 0; i < count; next = nullptr) {
            Query queries[kBatch];
            int64_t asked[kBatch], num_asked = 0;
            for (; i < count && num_asked < kBatch; ++i)
                if (p.sees(token(i), split)) {
                    asked[num_asked] = i;
                    queries[num_asked] = p.ask(room.q[i], token(i), split, State{room.parts[num_asked]});
                    ++num_asked;
                }
            p.answer(queries, num_asked, found, next);
            for (int64_t k = 0; k < num_asked; ++k) fold(state(asked[k]), queries[k].out, p.dim);
        }
    }
};

// Tokens [begin, end) of one stream that one task takes
int64_t end_of_run(const Problem& p, int64_t begin) {
    int64_t most = kStateFloats / (p.group * p.state_size);
    most = most < 1 ? 1 : most > 16 ? 16 : most;
    int64_t end = begin + 1;
    while (end < p.num_tokens && end - begin < most && end % 16 && p.stream(end) == p.stream(begin)) ++end;
    return end;
}

template <class T>
void attend_by_tokens(const Problem& p, int64_t most_splits) {
    const int64_t work = most_splits * kSplit * p.dim * p.group;  // of one item, at most
    const int64_t grain = larger((kGrainElements + work - 1) / work, end_of_run(p, 0));
    parallel_for(p.num_tokens * p.num_kv_heads, grain, [&](int64_t first, int64_t last) {
        // Runs are found from the start of each key head's tokens; a thread takes those that
        // begin in its share.
        for (int64_t item = first; item < last;) {
            const int64_t g = item / p.num_tokens, n = item % p.num_tokens;
            int64_t end = end_of_run(p, n);
            const int64_t room = last - item;
            if (end - n > room) end = n + room;
            Task<T>{p, n, end, g, *own_scratch<Room>()}.run();
            item += end - n;
        }
    });
}

// Where runs of tokens of one stream begin, and the end; as long as every thread has something to do
int64_t find_runs(int64_t* begins, const Problem& p, int64_t most_splits) {
    const int64_t longest = p.num_tokens * p.num_kv_heads * most_splits / (2 * num_threads()) + 1;
    int64_t count = 0;
    for (int64_t n = 0; n < p.num_tokens; ++n)
        if (n == 0 || p.stream(n) != p.stream(n - 1) || n - begins[count - 1] == longest) begins[count++] = n;
    begins[count] = p.num_tokens;
    return count;
}

// Few tokens: every (run of tokens, key head, split) is a task of its own; its parts are folded afterwards
template <class T>
void attend_by_splits(const Problem& p, int64_t most_splits) {
    const int64_t num_parts = p.num_tokens * p.num_heads * most_splits;
    auto* parts = static_cast<float*>(scratch(Scratch::shared, num_parts * p.state_size * sizeof(float)));
    const auto part = [&](int64_t n, int64_t h, int64_t split) {
        return State{parts + ((n * p.num_heads + h) * most_splits + split) * p.state_size};
    };
    int64_t begins[kAttentionMaxSplitTokens + 1], first_items[kAttentionMaxSplitTokens + 1];
    const int64_t num_runs = find_runs(begins, p, most_splits);
    // A run has items for the splits that its tokens see, so that threads have equally much to do.
    int64_t num_splits[kAttentionMaxSplitTokens];
    first_items[0] = 0;
    for (int64_t run = 0; run < num_runs; ++run) {
        num_splits[run] = 0;
        for (int64_t n = begins[run]; n < begins[run + 1]; ++n)
            num_splits[run] = larger(num_splits[run], p.num_splits(n));
        first_items[run + 1] = first_items[run] + p.num_kv_heads * num_splits[run];
    }
    struct Item { int64_t run, head, split; };
    const auto item_at = [&](int64_t index) {
        int64_t run = 0;
        while (first_items[run + 1] <= index) ++run;
        const int64_t own = index - first_items[run];
        return Item{run, own / num_splits[run], own % num_splits[run]};
    };
    const auto split_at = [&](const Item& item) {
        return p.split_of<T>(p.stream(begins[item.run]), item.head, item.split);
    };
    const auto attend = [&](const Item& item, const Split<T>& found, const Split<T>* next) {
        Room& room = *own_scratch<Room>();
        const int64_t begin = begins[item.run], count = (begins[item.run + 1] - begin) * p.group;
        for (int64_t i = 0; i < count;) {
            Query queries[kBatch];
            int64_t num_asked = 0;
            for (; i < count && num_asked < kBatch; ++i) {
                const int64_t n = begin + i / p.group, h = item.head * p.group + i % p.group;
                if (!p.sees(n, item.split)) continue;
                const float* q = p.query(room.queries + num_asked * p.dim, n, h);
                queries[num_asked++] = p.ask(q, n, item.split, part(n, h, item.split));
            }
            if (num_asked) p.answer(queries, num_asked, found, next);
            next = nullptr;
        }
    };
    parallel_for(first_items[num_runs], 1, [&](int64_t first, int64_t last) {
        Item item = item_at(first);
        Split<T> next = split_at(item);
        for (int64_t index = first; index < last; ++index) {
            const Item now = item;
            const Split<T> found = next;
            if (index + 1 < last) item = item_at(index + 1), next = split_at(item);
            attend(now, found, &next);
        }
    });
    for (int64_t n = 0; n < p.num_tokens; ++n)
        for (int64_t h = 0; h < p.num_heads; ++h) {
            float data[kMaxDim + 2];
            const State all{data};
            start(all, p.dim);
            for (int64_t split = p.first_split(n); split < p.num_splits(n); ++split)
                fold(all, part(n, h, split), p.dim);
            p.finish(all, n, h);
        }
}

// ---- where tokens are -------------------------------------------------------------------------------------

// The first token that is nowhere, or sees a slot that is. Tokens of one stream that follow each other look
// at an entry of its table once.
template <class Args>
int64_t first_bad_token(const Args& a, int64_t window) {
    const int64_t block_size = a.values.shape[2];
    int64_t last_stream = -1;
    Range good{0, 0};
    for (int64_t n = 0; n < num_elements(a.slots); ++n) {
        const int64_t stream = index_at(a.streams.data, a.streams.dtype, n),
                      slot = index_at(a.slots.data, a.slots.dtype, n);
        if (!has_slot(a.tables, block_size, stream, slot)) return n;
        if (stream != last_stream) last_stream = stream, good = {0, 0};
        const Range seen = blocks_seen(slot, window, block_size);
        const bool is_near = seen.begin <= good.end && good.begin <= seen.end;
        if (!is_near) good = {seen.begin, seen.begin};
        if (first_bad_block(a.tables, stream, {seen.begin, good.begin}, a.keys.shape[0]) >= 0) return n;
        if (first_bad_block(a.tables, stream, {good.end, seen.end}, a.keys.shape[0]) >= 0) return n;
        good = {smaller(seen.begin, good.begin), larger(seen.end, good.end)};
    }
    return kOk;
}

// ---- storing ----------------------------------------------------------------------------------------------

template <class T, class From>
void store_key(T* group, int64_t stride, int64_t lane, const From* k, int64_t dim) {
    for (int64_t first = 0; first < dim; first += kRun) {
        T rounded[kRun];
        const int64_t count = smaller(kRun, dim - first);
        map([](vf v) { return v; }, count, rounded, k + first);
        for (int64_t i = 0; i < count; ++i) group[(first + i) * stride + lane] = rounded[i];
    }
}

template <class From>
void store_key(q8* group, int64_t, int64_t lane, const From* k, int64_t dim) {
    uint8_t* run = &group->byte;
    for (int64_t first = 0; first < dim; first += kRun, run += kLanes * Q8_0::kBytes) {
        uint8_t block[Q8_0::kBytes];
        quantize_row<Q8_0>(block, k + first, kRun);
        memcpy(run + lane * sizeof(f16), block, sizeof(f16));
        for (int i = 0; i < kRun; ++i) run[kLanes * sizeof(f16) + i * kLanes + lane] = block[sizeof(f16) + i];
    }
}

template <class T, class From>
void store_value(T* row, const From* v, int64_t dim) {
    if constexpr (std::is_same_v<T, q8>)
        quantize_row<Q8_0>(&row->byte, v, dim);
    else
        map([](vf x) { return x; }, dim, row, v);
}

template <class T, class From>
void store_head(const StoreKv& a, int64_t g) {
    const int64_t num_tokens = a.k.shape[0], dim = a.k.shape[2], block_size = a.values.shape[2];
    auto* keys = static_cast<T*>(a.keys.data) + g * a.keys.stride[1];
    auto* values = static_cast<T*>(a.values.data) + g * a.values.stride[1];
    for (int64_t n = 0; n < num_tokens; ++n) {
        const int64_t slot = index_at(a.slots.data, a.slots.dtype, n), place = slot % block_size;
        const int64_t block =
            table_entry(a.tables, index_at(a.streams.data, a.streams.dtype, n), slot / block_size);
        store_key(keys + block * a.keys.stride[0] + place / kLanes * a.keys.stride[2], a.keys.stride[3],
                  place % kLanes, static_cast<const From*>(a.k.data) + n * a.k.stride[0] + g * a.k.stride[1],
                  dim);
        store_value(values + block * a.values.stride[0] + place * a.values.stride[2],
                    static_cast<const From*>(a.v.data) + n * a.v.stride[0] + g * a.v.stride[1], dim);
    }
}

}  // namespace

int64_t attention(const Attention& a) {
    if (const int64_t bad = first_bad_token(a, a.window); bad != kOk) return bad;
    if (num_elements(a.q) == 0) return kOk;
    const Problem p(a);
    int64_t most_splits = 0;
    for (int64_t n = 0; n < p.num_tokens; ++n) most_splits = larger(most_splits, p.num_splits(n));
    const bool by_splits = p.num_tokens <= kAttentionMaxSplitTokens && most_splits > 1;
    with_pool_type(a.keys.dtype, [&](auto type) {
        using T = decltype(type);
        if (by_splits)
            attend_by_splits<T>(p, most_splits);
        else
            attend_by_tokens<T>(p, most_splits);
    });
    return kOk;
}

// Heads in parallel: of two tokens at one slot, the later one stays.
int64_t store_kv(const StoreKv& a) {
    if (const int64_t bad = first_bad_token(a, 1); bad != kOk) return bad;
    if (num_elements(a.k) == 0) return kOk;
    const int64_t num_heads = a.k.shape[1], of_a_head = a.k.shape[0] * a.k.shape[2];
    with_pool_type(a.keys.dtype, [&](auto to) {
        with_type(a.k.dtype, [&](auto from) {
            parallel_for(num_heads, (kStoredGrainElements + of_a_head - 1) / of_a_head,
                         [&](int64_t begin, int64_t end) {
                             for (int64_t g = begin; g < end; ++g)
                                 store_head<decltype(to), decltype(from)>(a, g);
                         });
        });
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
