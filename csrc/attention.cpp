// Attention in vector registers, in float32: keys are scored sixteen side by side, a lane for each. What it
// computes, and how it is shared out, attention_runs.h says. Scores are logarithms to base 2.
#include "attention_runs.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kScores = kSplit + W;                    // a vector may begin at the last key
constexpr int64_t kStateFloats = 4 * kMaxGroupFloats;  // of one run's states
constexpr float kLog2e = 1.44269504f;

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

// What is known of a token's head after some keys: the largest score, sum of 2^(score - max), and weighted
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

// Each query's scores become 2^(score - max), and its state knows the max and the sum. Of the vectors that
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
            const vf e = exp2(load(scores[m] + j) - queries[m].out.top());
            store(scores[m] + j, e);
            total += e;
        });
    totals.each([&](vf& total, int m, int) INFINI_INLINE { queries[m].out.sum() = sum(total); });
}

// How a score is made: scale * q . k, or cap * tanh(scale * q . k) where there is a cap
struct Scoring {
    float scale, cap;

    explicit Scoring(const Attention& a)
        : scale(a.softcap > 0 ? a.scale / a.softcap : a.scale * kLog2e), cap(a.softcap * kLog2e) {}
};

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

inline float scalar_exp2(float x) { return exp2(splat(x))[0]; }

void forget(State state, int64_t dim) {
    memset(state.data, 0, (dim + 2) * sizeof(float));
    state.top() = -__builtin_inff();
}

void fold_part(State all, State part, int64_t dim) {
    const float top = all.top() > part.top() ? all.top() : part.top();
    const float kept = all.sum() > 0 ? scalar_exp2(all.top() - top) : 0,
                added = scalar_exp2(part.top() - top);
    all.top() = top;
    all.sum() = all.sum() * kept + part.sum() * added;
    map([&](vf a, vf p) { return fma(a, splat(kept), p * added); }, dim, all.values(), all.values(),
        part.values());
}

// ---- a run ------------------------------------------------------------------------------------------------

constexpr int kBatch = 16;  // queries asked at once

// What a thread works with
struct Room {
    Widened widened;
    alignas(64) float states[kStateFloats], parts[kStateFloats], queries[kStateFloats];
    const float* q[kStateFloats / 3];  // a state has three floats at least
};

template <class T>
struct VectorKernel {
    using Element = T;
    const Run& run;
    const Problem& p = run.p;
    const int64_t count = run.num_rows();
    const Scoring scoring{p.a};
    Room& room = *own_scratch<Room>();

    explicit VectorKernel(const Run& run) : run(run) {}

    static int64_t most_tokens(const Problem& p) {
        return smaller(kAttentionRunTokens, kStateFloats / (p.group * (p.dim + 2)));
    }
    static int64_t num_floats(const Run& run) { return run.num_rows() * (run.p.dim + 2); }

    float* parts() const { return room.parts; }
    State of(float* states, int64_t row) const { return {states + row * (p.dim + 2)}; }
    bool sees(int64_t row, int64_t split) const { return p.sees(run.token(row), split); }

    void read_queries() {
        for (int64_t i = 0; i < count; ++i)
            room.q[i] = p.query(room.queries + i * p.dim, run.token(i), run.head(i));
    }

    void start() {
        for (int64_t i = 0; i < count; ++i) forget(of(room.states, i), p.dim);
    }

    void fold(float* parts, int64_t split) {
        for (int64_t i = 0; i < count; ++i)
            if (sees(i, split)) fold_part(of(room.states, i), of(parts, i), p.dim);
    }

    void finish() {
        for (int64_t i = 0; i < count; ++i) {
            const State state = of(room.states, i);
            const float sunk = scalar_exp2(p.sink(run.head(i)) * kLog2e - state.top());
            p.write(state.values(), state.sum() + sunk, run.token(i), run.head(i));
        }
    }

    // The slots that any of its tokens sees
    Range seen(int64_t split) const {
        Range slots{kSplit, 0};
        for (int64_t n = run.begin; n < run.end; ++n)
            if (p.sees(n, split))
                slots = {smaller(slots.begin, p.visible(n, split).begin),
                         larger(slots.end, p.visible(n, split).end)};
        return slots;
    }

    void attend(float* parts, int64_t split, const Split<T>& found, const Split<T>* next) {
        if constexpr (!std::is_same_v<T, float>)
            if (count > kAttentionNarrowQueries) {
                const Range slots = seen(split);
                return ask<float>(parts, split, room.widened.read(found, slots.begin, slots.end, p.dim),
                                  nullptr);
            }
        ask<T>(parts, split, found, next);
    }

    template <class Read>
    void ask(float* parts, int64_t split, const Split<Read>& found, const Split<Read>* next) {
        for (int64_t i = 0; i < count; next = nullptr) {
            Query queries[kBatch];
            int64_t num_asked = 0;
            for (; i < count && num_asked < kBatch; ++i)
                if (sees(i, split))
                    queries[num_asked++] = {room.q[i], of(parts, i), p.visible(run.token(i), split)};
            attend_all<kAttentionQueries>(queries, num_asked, found, p.dim, scoring, next);
        }
    }
};

}  // namespace

int64_t attention(const Attention& a) {
    if (const int64_t bad = first_bad_token(a, a.window); bad != kOk) return bad;
    if (num_elements(a.q) == 0) return kOk;
    const Problem p(a);
    with_pool_type(a.keys.dtype, [&](auto type) { attend<VectorKernel<decltype(type)>>(p); });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
