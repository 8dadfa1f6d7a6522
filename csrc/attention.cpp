// store_kv:  keys[stream[n], :, position[n]] = k[n], values likewise
// attention: y[n, h] = sum over j of softmax_j(scale * q[n, h] . keys[s, g, j]) * values[s, g, j], where s = stream[n],
//            g = h / (heads / kv heads), and j runs over the positions up to position[n] (the last `window` of them)
// Keys are taken in splits of kSplit absolute positions. A split's maximum, sum and weighted values are found alone,
// and folded into the result in the order of the splits. So a token's result depends on its own keys only: not on the
// other tokens, on how a prompt was cut up, nor on the threads. Few tokens over long streams share out their splits.
#include "kernels.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kSplit = 256;
constexpr int64_t kStateFloats = kAttentionState;  // of one task's running results, on the stack

struct Span { int64_t begin, end; };

// What is known of a token's head after some keys: the largest score, sum of exp(score - max), and weighted values.
struct State {
    float* data;  // [max, sum, values of D]
    float& top() const { return data[0]; }
    float& sum() const { return data[1]; }
    float* values() const { return data + 2; }
};

template <class T>
inline float dot(const float* q, const T* k, int64_t n) {
    vf s0{}, s1{};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        s0 = fma(load(q + i), load(k + i), s0);
        s1 = fma(load(q + i + W), load(k + i + W), s1);
    }
    for (; i < n; i += W) {
        const int64_t count = n - i < W ? n - i : W;
        s0 = fma(load_n(q + i, count), load_n(k + i, count), s0);
    }
    return sum(s0 + s1);
}

// values += weight[j] * v[j] for each key j, in that order for every element
template <class T>
inline void add_values(float* values, const float* weights, const T* v, int64_t stride, int64_t num_keys, int64_t dim) {
    int64_t i = 0;
    for (; i + 4 * W <= dim; i += 4 * W) {
        vf a0 = load(values + i), a1 = load(values + i + W), a2 = load(values + i + 2 * W), a3 = load(values + i + 3 * W);
        for (int64_t j = 0; j < num_keys; ++j) {
            const vf w = splat(weights[j]);
            const T* row = v + j * stride + i;
            a0 = fma(w, load(row), a0);
            a1 = fma(w, load(row + W), a1);
            a2 = fma(w, load(row + 2 * W), a2);
            a3 = fma(w, load(row + 3 * W), a3);
        }
        store(values + i, a0), store(values + i + W, a1), store(values + i + 2 * W, a2), store(values + i + 3 * W, a3);
    }
    for (; i < dim; i += W) {
        const int64_t count = dim - i < W ? dim - i : W;
        vf a = load_n(values + i, count);
        for (int64_t j = 0; j < num_keys; ++j) a = fma(splat(weights[j]), load_n(v + j * stride + i, count), a);
        store_n(values + i, a, count);
    }
}

// The state of one query head after the keys of one split alone
template <class T>
void attend_split(State out, const float* q, const T* k, const T* v, int64_t k_stride, int64_t v_stride, int64_t num_keys,
                  int64_t dim, float scale) {
    float scores[kSplit];
    vf top = splat(-__builtin_inff());
    for (int64_t j = 0; j < num_keys; ++j) scores[j] = scale * dot(q, k + j * k_stride, dim);
    for (int64_t j = 0; j < num_keys; j += W)
        top = max(top, load_n(scores + j, num_keys - j < W ? num_keys - j : W, -__builtin_inff()));
    out.top() = max(top);
    vf total{};
    for (int64_t j = 0; j < num_keys; j += W) {
        const int64_t count = num_keys - j < W ? num_keys - j : W;
        const vf e = exp(load_n(scores + j, count, -__builtin_inff()) - out.top());
        store_n(scores + j, e, count);
        total += e;
    }
    out.sum() = sum(total);
    memset(out.values(), 0, dim * sizeof(float));
    add_values(out.values(), scores, v, v_stride, num_keys, dim);
}

inline float scalar_exp(float x) { return exp(splat(x))[0]; }

void fold(State all, State part, int64_t dim) {
    const float top = all.top() > part.top() ? all.top() : part.top();
    const float kept = all.sum() > 0 ? scalar_exp(all.top() - top) : 0, added = scalar_exp(part.top() - top);
    all.top() = top;
    all.sum() = all.sum() * kept + part.sum() * added;
    map([&](vf a, vf p) { return fma(a, splat(kept), p * added); }, dim, all.values(), all.values(), part.values());
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
    int64_t first_key(int64_t n) const {
        return a.window > 0 && position(n) >= a.window ? position(n) - a.window + 1 : 0;
    }

    const float* query(int64_t n, int64_t h) const {
        return static_cast<const float*>(a.q.data) + n * a.q.stride[0] + h * a.q.stride[1];
    }

    // The keys of a split that token n sees
    Span visible(int64_t n, int64_t split) const {
        const int64_t first = first_key(n), last = position(n) + 1, begin = split * kSplit;
        return {first > begin ? first : begin, last < begin + kSplit ? last : begin + kSplit};
    }

    template <class T>
    void attend(State out, int64_t n, int64_t h, int64_t split) const {
        const Span keys = visible(n, split);
        const int64_t at_k = stream(n) * a.keys.stride[0] + h / group * a.keys.stride[1] + keys.begin * a.keys.stride[2];
        const int64_t at_v = stream(n) * a.values.stride[0] + h / group * a.values.stride[1] + keys.begin * a.values.stride[2];
        attend_split(out, query(n, h), static_cast<const T*>(a.keys.data) + at_k, static_cast<const T*>(a.values.data) + at_v,
                     a.keys.stride[2], a.values.stride[2], keys.end - keys.begin, dim, a.scale);
    }

    void finish(State state, int64_t n, int64_t h) const {
        float* y = static_cast<float*>(a.y.data) + n * a.y.stride[0] + h * a.y.stride[1];
        const vf inverse = splat(1.0f / state.sum());
        map([&](vf v) { return v * inverse; }, dim, y, state.values());
    }
};

// One task: some tokens of one stream and the query heads of one key head, split after split, so that the keys and
// values of a split are read from memory once for all of them.
template <class T>
void attend_tokens(const Problem& p, int64_t begin, int64_t end, int64_t g) {
    float states[kStateFloats], part[kStateFloats];
    const auto state = [&](int64_t n, int64_t h) { return State{states + ((n - begin) * p.group + h) * p.state_size}; };
    int64_t first = p.first_split(begin), last = 0;
    for (int64_t n = begin; n < end; ++n) {
        first = p.first_split(n) < first ? p.first_split(n) : first;
        last = p.num_splits(n) > last ? p.num_splits(n) : last;
        for (int64_t h = 0; h < p.group; ++h) {
            memset(state(n, h).data, 0, p.state_size * sizeof(float));
            state(n, h).top() = -__builtin_inff();
        }
    }
    for (int64_t split = first; split < last; ++split)
        for (int64_t n = begin; n < end; ++n) {
            if (split < p.first_split(n) || split >= p.num_splits(n)) continue;
            for (int64_t h = 0; h < p.group; ++h) {
                p.attend<T>(State{part}, n, g * p.group + h, split);
                fold(state(n, h), State{part}, p.dim);
            }
        }
    for (int64_t n = begin; n < end; ++n)
        for (int64_t h = 0; h < p.group; ++h) p.finish(state(n, h), n, g * p.group + h);
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
    parallel_for(p.num_tokens * p.num_kv_heads, (kGrain + work - 1) / work, [&](int64_t first, int64_t last) {
        // Runs are found from the start of each key head's tokens; a thread takes those that begin in its share.
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
    float* parts = static_cast<float*>(p.a.workspace.data);
    const auto part = [&](int64_t n, int64_t h, int64_t split) {
        return State{parts + ((n * p.num_heads + h) * most_splits + split) * p.state_size};
    };
    const int64_t rows = p.num_tokens * p.num_kv_heads;
    parallel_for(rows * most_splits, 1, [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last; ++item) {
            const int64_t n = item / most_splits / p.num_kv_heads, g = item / most_splits % p.num_kv_heads;
            const int64_t split = item % most_splits;
            if (split < p.first_split(n) || split >= p.num_splits(n)) continue;
            for (int64_t h = g * p.group; h < (g + 1) * p.group; ++h) p.attend<T>(part(n, h, split), n, h, split);
        }
    });
    for (int64_t n = 0; n < p.num_tokens; ++n)
        for (int64_t h = 0; h < p.num_heads; ++h) {
            float data[kStateFloats];
            const State all{data};
            memset(data, 0, p.state_size * sizeof(float));
            all.top() = -__builtin_inff();
            for (int64_t split = p.first_split(n); split < p.num_splits(n); ++split) fold(all, part(n, h, split), p.dim);
            p.finish(all, n, h);
        }
}

int64_t first_bad_token(const Tensor& streams, const Tensor& positions, const Tensor& keys) {
    for (int64_t n = 0; n < num_elements(positions); ++n) {
        const int64_t stream = index_at(streams.data, streams.dtype, n), position = index_at(positions.data, positions.dtype, n);
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
    for (int64_t n = 0; n < p.num_tokens; ++n) most_splits = p.num_splits(n) > most_splits ? p.num_splits(n) : most_splits;
    const int64_t needed = p.num_tokens * p.num_heads * most_splits * p.state_size;
    const bool by_splits = p.num_tokens <= 16 && most_splits > 1 && needed <= num_elements(a.workspace);
    with_type(a.keys.dtype, [&](auto type) {
        using T = decltype(type);
        if (by_splits) attend_by_splits<T>(p, most_splits);
        else attend_by_tokens<T>(p, most_splits);
    });
    return kOk;
}

int64_t store_kv(const StoreKv& a) {
    if (const int64_t bad = first_bad_token(a.streams, a.positions, a.keys); bad != kOk) return bad;
    const int64_t num_tokens = a.k.shape[0], num_heads = a.k.shape[1], dim = a.k.shape[2];
    with_type(a.keys.dtype, [&](auto type) {
        using T = decltype(type);
        const auto copy = [&](const Tensor& to, const Tensor& from, int64_t n, int64_t h) {
            const int64_t s = index_at(a.streams.data, a.streams.dtype, n), t = index_at(a.positions.data, a.positions.dtype, n);
            map([](vf v) { return v; }, dim, static_cast<T*>(to.data) + s * to.stride[0] + h * to.stride[1] + t * to.stride[2],
                static_cast<const float*>(from.data) + n * from.stride[0] + h * from.stride[1]);
        };
        for (int64_t n = 0; n < num_tokens; ++n)
            for (int64_t h = 0; h < num_heads; ++h) copy(a.keys, a.k, n, h), copy(a.values, a.v, n, h);
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
