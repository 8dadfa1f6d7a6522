// store_kv:  keys[stream[n], :, position[n]] = k[n], values likewise
// attention: y[n, h] = sum over j of softmax_j(scale * q[n, h] . keys[s, g, j]) * values[s, g, j], where
//            s = stream[n], g = h / (heads / kv heads), and j runs over the positions up to position[n]
//            (the last `window` of them)
// Keys are taken in splits of kSplit absolute positions. A split's maximum, sum and weighted values are found
// alone, and folded into the result in the order of the splits. So a token's result depends on its own keys
// only: not on the other tokens, on how a prompt was cut up, nor on the threads. Few tokens over long streams
// share out their splits.
#include "attention.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kSplit = 256;
constexpr int64_t kStateFloats = kMaxGroupFloats;  // of one task's running results

struct Span { int64_t begin, end; };

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// What is known of a token's head after some keys: the largest score, sum of exp(score - max), and weighted
// values.
struct State {
    float* data;  // [max, sum, values of D]
    float& top() const { return data[0]; }
    float& sum() const { return data[1]; }
    float* values() const { return data + 2; }
};

// Dot products run over the head size from first to last, with a lane for each key, and values over the keys:
// what a query gets does not depend on the queries beside it.
constexpr int kLanes = 16;  // keys scored side by side
constexpr int kVectors = kLanes / W;
constexpr int kScores = kSplit + W;  // a vector may begin at the last key
constexpr int kMaxDim = kMaxHeadDim;

// keys[j][0:dim] for j < num_keys with a lane for each key: [key / kLanes][dim][kLanes], zeros behind the
// last
struct Keys {
    alignas(64) float data[kMaxDim * kSplit];

    template <class T>
    void read(const T* k, int64_t stride, int64_t num_keys, int64_t dim) {
        for (int64_t j = 0; j < (num_keys + kLanes - 1) / kLanes * kLanes; j += 4) {
            alignas(64) float room[4][kMaxDim];
            const float* rows[4];
            for (int i = 0; i < 4; ++i)
                rows[i] = as_floats(room[i], j + i < num_keys ? k + (j + i) * stride : nullptr, dim);
            float* to = data + j / kLanes * kLanes * dim + j % kLanes;
            int64_t d = 0;
            for (; d + 4 <= dim; d += 4) transpose(to + d * kLanes, rows, d);
            for (; d < dim; ++d)
                for (int i = 0; i < 4; ++i) to[d * kLanes + i] = rows[i][d];
        }
    }

    template <class T>
    static const float* as_floats(float* room, const T* row, int64_t dim) {
        if (!row) return static_cast<const float*>(memset(room, 0, dim * sizeof(float)));
        if constexpr (std::is_same_v<T, float>) return row;
        map([](vf v) { return v; }, dim, room, row);
        return room;
    }

    static void transpose(float* to, const float* const* rows, int64_t at) {
        typedef float v4 __attribute__((vector_size(16)));
        v4 a, b, c, d;
        memcpy(&a, rows[0] + at, 16), memcpy(&b, rows[1] + at, 16), memcpy(&c, rows[2] + at, 16),
            memcpy(&d, rows[3] + at, 16);
        const v4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
        const v4 AB = __builtin_shufflevector(a, b, 2, 6, 3, 7),
                 CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
        const v4 columns[] = {
            __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
            __builtin_shufflevector(AB, CD, 0, 1, 4, 5), __builtin_shufflevector(AB, CD, 2, 3, 6, 7)};
        for (int i = 0; i < 4; ++i) memcpy(to + i * kLanes, &columns[i], 16);
    }
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

// scores[m][j] = scale * q[m] . keys[j], to the next kLanes of num_keys
template <int M>
void score(float (*scores)[kScores], const float* const* q, const Keys& keys, int64_t num_keys, int64_t dim,
           float scale) {
    for (int64_t j = 0; j < num_keys; j += kLanes) {
        Grid<M, kVectors> sums;
        sums.each([&](vf& s, int, int) INFINI_INLINE { s = vf{}; });
        const float* row = keys.data + j * dim;
        for (int64_t d = 0; d < dim; ++d, row += kLanes)
            sums.each([&](vf& s, int m, int n)
                          INFINI_INLINE { s = fma(splat(q[m][d]), load(row + n * W), s); });
        sums.each([&](vf& s, int m, int n) INFINI_INLINE { store(scores[m] + j + n * W, s * scale); });
    }
}

// out[m] += weights[m][j] * v[j] for the keys j from `begin` to `end`, in that order for every element. The
// first pass over values that are far away fetches whole rows.
template <int M, class T>
void add_values(float* const* out, const float (*weights)[kScores], const T* v, int64_t stride, int64_t begin,
                int64_t end, int64_t dim, bool is_far = false) {
    constexpr int kWidth = 4;
    int64_t i = 0;
    for (; i + kWidth * W <= dim; i += kWidth * W) {
        Grid<M, kWidth> sums;
        sums.each([&](vf& s, int m, int n) INFINI_INLINE { s = load(out[m] + i + n * W); });
        for (int64_t j = begin; j < end; ++j) {
            for (int64_t d = 0; is_far && i == 0 && d < dim; d += 64 / sizeof(T))
                __builtin_prefetch(v + (j + kAttentionPrefetchRows) * stride + d);
            sums.each([&](vf& s, int m, int n) INFINI_INLINE {
                s = fma(splat(weights[m][j]), load(v + j * stride + i + n * W), s);
            });
        }
        sums.each([&](vf& s, int m, int n) INFINI_INLINE { store(out[m] + i + n * W, s); });
    }
    for (; i < dim; i += W) {
        const int64_t count = dim - i < W ? dim - i : W;
        for (int m = 0; m < M; ++m) {
            vf sum = load_n(out[m] + i, count);
            for (int64_t j = begin; j < end; ++j)
                sum = fma(splat(weights[m][j]), load_n(v + j * stride + i, count), sum);
            store_n(out[m] + i, sum, count);
        }
    }
}

// scores[begin:end] become exp(score - max), and out knows the max and the sum
void soften(State out, float* scores, int64_t begin, int64_t end) {
    vf top = splat(-__builtin_inff()), total{};
    store(scores + end, top);  // what fills up the last vector counts for nothing
    for (int64_t j = begin; j < end; j += W) top = max(top, load(scores + j));
    out.top() = max(top);
    for (int64_t j = begin; j < end; j += W) {
        const vf e = exp(load(scores + j) - out.top());
        store(scores + j, e);
        total += e;
    }
    out.sum() = sum(total);
}

// One query head of one token, and the keys of a split that it sees
struct Query {
    const float* q;
    State out;
    int64_t begin, end;
};

// The states of M queries after the keys of one split alone
template <int M, class T>
void attend_queries(const Query* queries, const Keys& keys, const T* v, int64_t v_stride, int64_t dim,
                    float scale, bool is_far) {
    alignas(64) float scores[M][kScores];
    const float* q[M];
    float* out[M];
    int64_t last = 0, shared_begin = 0, shared_end = kSplit;
    for (int m = 0; m < M; ++m) {
        q[m] = queries[m].q, out[m] = queries[m].out.values();
        memset(out[m], 0, dim * sizeof(float));
        last = queries[m].end > last ? queries[m].end : last;
        shared_begin = queries[m].begin > shared_begin ? queries[m].begin : shared_begin;
        shared_end = queries[m].end < shared_end ? queries[m].end : shared_end;
    }
    score<M>(scores, q, keys, last, dim, scale);
    for (int m = 0; m < M; ++m) soften(queries[m].out, scores[m], queries[m].begin, queries[m].end);
    if (shared_end < shared_begin) shared_end = shared_begin;
    for (int m = 0; m < M; ++m)
        add_values<1>(out + m, scores + m, v, v_stride, queries[m].begin,
                      smaller(shared_begin, queries[m].end), dim);
    add_values<M>(out, scores, v, v_stride, shared_begin, shared_end, dim, is_far);
    for (int m = 0; m < M; ++m)
        add_values<1>(out + m, scores + m, v, v_stride, larger(shared_end, queries[m].begin), queries[m].end,
                      dim);
}

template <int M, class T>
void attend_all(const Query* queries, int64_t count, const Keys& keys, const T* v, int64_t v_stride,
                int64_t dim, float scale, bool is_far) {
    for (; count >= M; count -= M, queries += M, is_far = false)
        attend_queries<M>(queries, keys, v, v_stride, dim, scale, is_far);
    if constexpr (M > 1) attend_all<M - 1>(queries, count, keys, v, v_stride, dim, scale, is_far);
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

struct Problem {
    const Attention& a;
    int64_t num_tokens, num_heads, num_kv_heads, group, dim, state_size;

    explicit Problem(const Attention& a)
        : a(a), num_tokens(a.q.shape[0]), num_heads(a.q.shape[1]), num_kv_heads(a.keys.shape[1]),
          group(num_heads / num_kv_heads), dim(a.q.shape[2]), state_size(dim + 2) {}

    int64_t stream(int64_t n) const { return index_at(a.streams.data, a.streams.dtype, n); }
    int64_t position(int64_t n) const { return index_at(a.positions.data, a.positions.dtype, n); }
    int64_t num_splits(int64_t n) const { return position(n) / kSplit + 1; }
    int64_t first_split(int64_t n) const { return first_key(n) / kSplit; }
    bool sees(int64_t n, int64_t split) const { return split >= first_split(n) && split < num_splits(n); }
    int64_t first_key(int64_t n) const {
        return a.window > 0 && position(n) >= a.window ? position(n) - a.window + 1 : 0;
    }

    // A query as float32: where it lies, or widened into the room
    const float* query(float* room, int64_t n, int64_t h) const {
        const int64_t at = n * a.q.stride[0] + h * a.q.stride[1];
        if (a.q.dtype == DType::f32) return static_cast<const float*>(a.q.data) + at;
        with_type(a.q.dtype, [&](auto type) {
            map([](vf v) { return v; }, dim, room, static_cast<const decltype(type)*>(a.q.data) + at);
        });
        return room;
    }

    // The keys of a split that token n sees, counted from the split's first
    Span visible(int64_t n, int64_t split) const {
        const int64_t start = split * kSplit;
        return {larger(first_key(n) - start, 0), smaller(position(n) + 1 - start, kSplit)};
    }

    Query ask(const float* q, int64_t n, int64_t split, State out) const {
        const Span keys = visible(n, split);
        return {q, out, keys.begin, keys.end};
    }

    template <class T>
    static const T* at(const Tensor& cache, int64_t stream, int64_t g, int64_t split) {
        return static_cast<const T*>(cache.data) + stream * cache.stride[0] + g * cache.stride[1] +
               split * kSplit * cache.stride[2];
    }

    template <class T>
    void read_keys(Keys* keys, int64_t n, int64_t g, int64_t split, int64_t num_keys) const {
        keys->read(at<T>(a.keys, stream(n), g, split), a.keys.stride[2], num_keys, dim);
    }

    template <class T>
    void answer(const Query* queries, int64_t count, const Keys& keys, int64_t n, int64_t g, int64_t split,
                bool is_first) const {
        const T* v = at<T>(a.values, stream(n), g, split);
        attend_all<kAttentionQueries>(queries, count, keys, v, a.values.stride[2], dim, a.scale, is_first);
    }

    void finish(State state, int64_t n, int64_t h) const {
        const vf inverse = splat(1.0f / state.sum());
        with_type(a.y.dtype, [&](auto type) {
            auto* y = static_cast<decltype(type)*>(a.y.data) + n * a.y.stride[0] + h * a.y.stride[1];
            map([&](vf v) { return v * inverse; }, dim, y, state.values());
        });
    }
};

constexpr int kBatch = 16;  // queries asked at once

// What a thread works with
struct Room {
    Keys keys;
    alignas(64) float states[kStateFloats], queries[kStateFloats], parts[kBatch][kMaxDim + 2];
};

// One task: some tokens of one stream and the query heads of one key head, split after split, so that the
// keys and values of a split are read from memory once for all of them.
template <class T>
void attend_tokens(const Problem& p, int64_t begin, int64_t end, int64_t g) {
    Room& room = *own_scratch<Room>();
    const int64_t count = (end - begin) * p.group;
    const auto token = [&](int64_t i) { return begin + i / p.group; };
    const auto head = [&](int64_t i) { return g * p.group + i % p.group; };
    const auto state = [&](int64_t i) { return State{room.states + i * p.state_size}; };
    const float* q[kStateFloats / 3];  // a state has three floats at least
    for (int64_t i = 0; i < count; ++i) q[i] = p.query(room.queries + i * p.dim, token(i), head(i));
    int64_t first = p.first_split(begin), last = 0;
    for (int64_t n = begin; n < end; ++n)
        first = smaller(first, p.first_split(n)), last = larger(last, p.num_splits(n));
    for (int64_t i = 0; i < count; ++i) start(state(i), p.dim);
    for (int64_t split = first; split < last; ++split) {
        int64_t num_keys = 0;
        for (int64_t n = begin; n < end; ++n) num_keys = larger(num_keys, p.visible(n, split).end);
        p.read_keys<T>(&room.keys, begin, g, split, num_keys);
        for (int64_t i = 0; i < count;) {
            const bool is_first = i == 0;
            Query questions[kBatch];
            int64_t asked[kBatch], num_asked = 0;
            for (; i < count && num_asked < kBatch; ++i)
                if (p.sees(token(i), split)) {
                    asked[num_asked] = i;
                    questions[num_asked] = p.ask(q[i], token(i), split, State{room.parts[num_asked]});
                    ++num_asked;
                }
            p.answer<T>(questions, num_asked, room.keys, begin, g, split, is_first);
            for (int64_t k = 0; k < num_asked; ++k) fold(state(asked[k]), questions[k].out, p.dim);
        }
    }
    for (int64_t i = 0; i < count; ++i) p.finish(state(i), token(i), head(i));
}

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
    parallel_for(p.num_tokens * p.num_kv_heads, (kGrainElements + work - 1) / work,
                 [&](int64_t first, int64_t last) {
                     // Runs are found from the start of each key head's tokens; a thread takes those that
                     // begin in its share.
                     for (int64_t item = first; item < last;) {
                         const int64_t g = item / p.num_tokens, n = item % p.num_tokens;
                         int64_t end = end_of_run(p, n);
                         const int64_t room = last - item;
                         if (end - n > room) end = n + room;
                         attend_tokens<T>(p, n, end, g);
                         item += end - n;
                     }
                 });
}

// Few tokens: every (token, head, split) is a task of its own, folded afterwards
template <class T>
void attend_by_splits(const Problem& p, int64_t most_splits) {
    const int64_t num_parts = p.num_tokens * p.num_heads * most_splits;
    auto* parts = static_cast<float*>(scratch(Scratch::shared, num_parts * p.state_size * sizeof(float)));
    const auto part = [&](int64_t n, int64_t h, int64_t split) {
        return State{parts + ((n * p.num_heads + h) * most_splits + split) * p.state_size};
    };
    const int64_t rows = p.num_tokens * p.num_kv_heads;
    parallel_for(rows * most_splits, 1, [&](int64_t first, int64_t last) {
        Room& room = *own_scratch<Room>();
        for (int64_t item = first; item < last; ++item) {
            const int64_t n = item / most_splits / p.num_kv_heads, g = item / most_splits % p.num_kv_heads;
            const int64_t split = item % most_splits;
            if (!p.sees(n, split)) continue;
            p.read_keys<T>(&room.keys, n, g, split, p.visible(n, split).end);
            for (int64_t first_head = 0; first_head < p.group; first_head += kBatch) {
                Query queries[kBatch];
                const int64_t count = smaller(kBatch, p.group - first_head), h = g * p.group + first_head;
                for (int64_t i = 0; i < count; ++i)
                    queries[i] =
                        p.ask(p.query(room.queries + i * p.dim, n, h + i), n, split, part(n, h + i, split));
                p.answer<T>(queries, count, room.keys, n, g, split, first_head == 0);
            }
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

int64_t first_bad_token(const Tensor& streams, const Tensor& positions, const Tensor& keys) {
    for (int64_t n = 0; n < num_elements(positions); ++n) {
        const int64_t stream = index_at(streams.data, streams.dtype, n),
                      position = index_at(positions.data, positions.dtype, n);
        if (stream < 0 || stream >= keys.shape[0] || position < 0 || position >= keys.shape[2]) return n;
    }
    return kOk;
}

}  // namespace

int64_t attention(const Attention& a) {
    if (const int64_t bad = first_bad_token(a.streams, a.positions, a.keys); bad != kOk) return bad;
    if (num_elements(a.q) == 0) return kOk;
    const Problem p(a);
    int64_t most_splits = 0;
    for (int64_t n = 0; n < p.num_tokens; ++n)
        most_splits = p.num_splits(n) > most_splits ? p.num_splits(n) : most_splits;
    const bool by_splits = p.num_tokens <= kAttentionMaxSplitTokens && most_splits > 1;
    with_type(a.keys.dtype, [&](auto type) {
        using T = decltype(type);
        if (by_splits)
            attend_by_splits<T>(p, most_splits);
        else
            attend_by_tokens<T>(p, most_splits);
    });
    return kOk;
}

int64_t store_kv(const StoreKv& a) {
    if (const int64_t bad = first_bad_token(a.streams, a.positions, a.keys); bad != kOk) return bad;
    const int64_t num_tokens = a.k.shape[0], num_heads = a.k.shape[1], dim = a.k.shape[2];
    const auto copy = [&](auto to_type, auto from_type, const Tensor& to, const Tensor& from, int64_t n,
                          int64_t h) {
        const int64_t s = index_at(a.streams.data, a.streams.dtype, n),
                      t = index_at(a.positions.data, a.positions.dtype, n);
        map([](vf v) { return v; }, dim,
            static_cast<decltype(to_type)*>(to.data) + s * to.stride[0] + h * to.stride[1] + t * to.stride[2],
            static_cast<const decltype(from_type)*>(from.data) + n * from.stride[0] + h * from.stride[1]);
    };
    with_type(a.keys.dtype, [&](auto to) {
        with_type(a.k.dtype, [&](auto from) {
            for (int64_t n = 0; n < num_tokens; ++n)
                for (int64_t h = 0; h < num_heads; ++h)
                    copy(to, from, a.keys, a.k, n, h), copy(to, from, a.values, a.v, n, h);
        });
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
