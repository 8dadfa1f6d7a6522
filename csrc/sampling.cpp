// random_sample: with w[i] = exp((logits[i] - max) / temperature), put the tokens in falling order of logits
// (equal ones: lower id first), keep the first topk (0: all), of these the fewest whose weight reaches
// topp of theirs, and take the first kept token at which the running weight passes random_val of the kept
// weight. temperature 0 takes the first token of the order. O(vocabulary): only the buckets that are walked
// get sorted.
// sample: the same for each row, once weights below min_p are 0. A row from which nothing can be drawn gets
// -1.
// logprobs: logits[i] - max - log(sum(exp(logits - max))) of the given token, with its rank, and of the
// num_top largest logits, with their ids.
// adjust_logits: each row after the penalties of the tokens before it, -inf where a token is not allowed.
// A row is read by one thread, in an order that its length alone fixes.
#include "sampling.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

// Weights lie in [0, 1]; the exponent and four bits of mantissa of the float split them into ordered buckets.
constexpr int kBucketShift = 19;
constexpr int kNumBuckets = (0x3f800000 >> kBucketShift) + 1;

inline float number(const float* p) { return *p; }
template <class T>
inline float number(const T* p) {
    return load_n(p, 1)[0];
}

// Tokens in falling order of their values (equal ones: lower id first), by heaps: no memory, no bad case
template <class T>
struct FallingOrder {
    const T* values;

    bool goes_before(int32_t a, int32_t b) const {
        const float x = number(values + a), y = number(values + b);
        return x != y ? x > y : a < b;
    }

    void sift_down(int32_t* items, int64_t root, int64_t n) const {
        for (int64_t child; (child = 2 * root + 1) < n; root = child) {
            if (child + 1 < n && goes_before(items[child], items[child + 1])) ++child;
            if (!goes_before(items[root], items[child])) return;
            std::swap(items[root], items[child]);
        }
    }

    // Afterwards the first item is the one that goes last.
    void make_heap(int32_t* items, int64_t n) const {
        for (int64_t i = n / 2 - 1; i >= 0; --i) sift_down(items, i, n);
    }

    void sort_heap(int32_t* items, int64_t n) const {
        for (int64_t end = n - 1; end > 0; --end) {
            std::swap(items[0], items[end]);
            sift_down(items, 0, end);
        }
    }
};

// In falling order of the logits: where the temperature is high, rounding leaves many weights equal.
template <class T>
struct FallingWeights {
    const float* weights;
    const T* logits;
    int32_t* order;
    int64_t num_sorted = 0;
    int next_bucket = 0;
    int64_t bucket_end[kNumBuckets];

    FallingWeights(const float* weights, const T* logits, int32_t* order, int64_t n)
        : weights(weights), logits(logits), order(order) {
        int64_t fill[kNumBuckets] = {};
        for (int64_t i = 0; i < n; ++i) ++fill[bucket(weights[i])];
        for (int64_t b = 0, total = 0; b < kNumBuckets; ++b) {
            const int64_t count = fill[b];
            fill[b] = total;
            bucket_end[b] = total += count;
        }
        for (int64_t i = 0; i < n; ++i) order[fill[bucket(weights[i])]++] = static_cast<int32_t>(i);
    }

    static int bucket(float weight) {
        uint32_t bits;
        memcpy(&bits, &weight, sizeof bits);
        return kNumBuckets - 1 - static_cast<int>(bits >> kBucketShift);
    }

    // The last bucket has weights of 0, and less than a sum that begins with 1 is changed by: they are never
    // drawn, and after min_p or at a low temperature most tokens lie there, so it is not sorted.
    int64_t num_drawable() const { return bucket_end[kNumBuckets - 2]; }

    int64_t token(int64_t rank) {
        while (rank >= num_sorted) sort_next_bucket();
        return order[rank];
    }

    double weight(int64_t rank) { return weights[token(rank)]; }

    void sort_next_bucket() {
        const FallingOrder<T> falling{logits};
        int32_t* items = order + num_sorted;
        const int64_t n = bucket_end[next_bucket] - num_sorted;
        falling.make_heap(items, n);
        falling.sort_heap(items, n);
        num_sorted = bucket_end[next_bucket++];
    }
};

constexpr float kLargest = 0x1.fffffep127f;
constexpr int64_t kBlock = 16 * W;  // of logits, which are skipped together

// Whether a block of logits holds one that is above `top`, or none that a logit may be
template <class T>
bool is_worth_a_look(const T* logits, int64_t n, float top) {
    vf largest = splat(-__builtin_inff());
    vi is_good = vi{} - 1;
    for (int64_t i = 0; i < n; i += W) {
        const vf v = n - i < W ? load_n(logits + i, n - i, -__builtin_inff()) : load(logits + i);
        largest = max(largest, v);
        is_good &= v <= splat(kLargest);
    }
    bool are_all_good = true;
    for (int i = 0; i < W; ++i) are_all_good &= is_good[i] != 0;
    return !are_all_good || max(largest) > top;
}

// The first bad logit (NaN or +inf), n when every logit is -inf, else kOk; *best is the first largest
template <class T>
int64_t find_best(const T* logits, int64_t n, int64_t* best, float* top) {
    *top = -__builtin_inff();
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t end = begin + kBlock < n ? begin + kBlock : n;
        if (!is_worth_a_look(logits + begin, end - begin, *top)) continue;
        for (int64_t i = begin; i < end; ++i) {
            const float v = number(logits + i);
            if (!(v <= kLargest)) return i;
            if (v > *top) *top = v, *best = i;
        }
    }
    return *top == -__builtin_inff() ? n : kOk;
}

// How a token is drawn from a row
struct Draw {
    double random_val, topp, temperature;
    float min_p;
    int64_t topk;

    // Weights are defined for no other temperature.
    bool is_sound() const { return temperature >= 0 && temperature <= kLargest; }
    // What is less than a normal float32 may be 0 where there is a division by it.
    bool is_greedy() const { return temperature < 0x1p-126 || topk == 1 || random_val == 0; }
};

template <class T>
void fill_weights(float* weights, const T* logits, int64_t n, float top, const Draw& how) {
    const vf divisor = splat(static_cast<float>(how.temperature));
    const vf least = splat(how.min_p < 1 ? how.min_p : 1);  // the largest logit is always kept
    map(
        [&](vf v) {
            const vf weight = exp((v - top) / divisor);
            return select(weight < least, vf{}, weight);
        },
        n, weights, logits);
}

template <class T>
int64_t draw(FallingWeights<T>& falling, int64_t n, const Draw& how) {
    const bool is_cut = how.topk > 0 && how.topk < n;
    int64_t num_kept = is_cut ? smaller(how.topk, falling.num_drawable()) : falling.num_drawable();
    double kept = 0;
    if (is_cut)
        for (int64_t i = 0; i < num_kept; ++i) kept += falling.weight(i);
    else
        for (int64_t i = 0; i < n; ++i) kept += falling.weights[i];
    if (how.topp < 1) {
        const double wanted = how.topp * kept;
        int64_t i = 0;
        for (kept = 0; i < num_kept && (i == 0 || kept < wanted); ++i) kept += falling.weight(i);
        num_kept = i;
    }
    const double target = how.random_val * kept;
    double passed = 0;
    int64_t last = 0;  // rounding may leave the running weight short of its target
    for (int64_t i = 0; i < num_kept; ++i) {
        last = i;
        if ((passed += falling.weight(i)) > target) break;
    }
    return falling.token(last);
}

// As find_best, with the token that is drawn
template <class T>
int64_t draw_token(const T* logits, int64_t n, const Draw& how, int64_t* token) {
    float top;
    if (const int64_t status = find_best(logits, n, token, &top); status != kOk) return status;
    if (how.is_greedy()) return kOk;
    auto* weights = static_cast<float*>(scratch(Scratch::own, n * (sizeof(float) + sizeof(int32_t))));
    fill_weights(weights, logits, n, top, how);
    FallingWeights falling(weights, logits, reinterpret_cast<int32_t*>(weights + n), n);
    *token = draw(falling, n, how);
    return kOk;
}

template <class T>
void sample_rows(const Sample& a) {
    const Rows logits{a.logits}, settings{a.settings};
    const auto* uniforms = static_cast<const double*>(a.uniforms.data);
    const auto* top_k = static_cast<const int64_t*>(a.top_k.data);
    auto* y = static_cast<int64_t*>(a.y.data);
    for_rows(a.logits, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* s = settings.at<float>(r);
            const Draw how{uniforms[r], s[1], s[0], s[2], top_k[r]};
            int64_t token;
            const bool is_drawn =
                how.is_sound() && draw_token(logits.at<T>(r), logits.length(), how, &token) == kOk;
            y[r] = is_drawn ? token : -1;
        }
    });
}

// ---- logprobs ---------------------------------------------------------------------------------------------

typedef double vd __attribute__((vector_size(W * 8)));

template <class T>
double sum_of_weights(const T* logits, int64_t n, float top) {
    vd sums{};
    for (int64_t i = 0; i < n; i += W) {
        const vf v = n - i < W ? load_n(logits + i, n - i, -__builtin_inff()) : load(logits + i);
        sums += __builtin_convertvector(exp(v - top), vd);
    }
    double total = 0;
    for (int i = 0; i < W; ++i) total += sums[i];
    return total;
}

template <class T>
int64_t count_larger(const T* logits, int64_t n, float value) {
    vi counts{};
    for (int64_t i = 0; i < n; i += W) {
        const vf v = n - i < W ? load_n(logits + i, n - i, -__builtin_inff()) : load(logits + i);
        counts -= v > splat(value);  // where it holds, a lane is -1
    }
    int64_t total = 0;
    for (int i = 0; i < W; ++i) total += counts[i];
    return total;
}

// The `count` largest logits in falling order
template <class T>
void find_largest(int32_t* found, int64_t count, const T* logits, int64_t n) {
    const FallingOrder<T> falling{logits};
    for (int64_t i = 0; i < count; ++i) found[i] = static_cast<int32_t>(i);
    falling.make_heap(found, count);
    for (int64_t begin = count; count && begin < n; begin += kBlock) {
        const int64_t end = begin + kBlock < n ? begin + kBlock : n;
        if (!is_worth_a_look(logits + begin, end - begin, number(logits + found[0]))) continue;
        for (int64_t i = begin; i < end; ++i) {
            if (!falling.goes_before(static_cast<int32_t>(i), found[0])) continue;
            found[0] = static_cast<int32_t>(i);
            falling.sift_down(found, 0, count);
        }
    }
    falling.sort_heap(found, count);
}

// A row without probabilities has no ids, and a token of -1 no rank.
template <class T>
void logprobs_row(int64_t* ids, float* values, const T* logits, int64_t n, int64_t token, int64_t num_top) {
    for (int64_t i = 0; i <= num_top; ++i) ids[i] = -1, values[i] = __builtin_nanf("");
    int64_t best;
    float top;
    if (find_best(logits, n, &best, &top) != kOk) return;
    const double log_sum = log(sum_of_weights(logits, n, top));
    const auto logprob = [&](int64_t id) {
        return static_cast<float>(static_cast<double>(number(logits + id)) - top - log_sum);
    };
    if (token >= 0) ids[0] = 1 + count_larger(logits, n, number(logits + token)), values[0] = logprob(token);
    auto* largest = static_cast<int32_t*>(scratch(Scratch::own, num_top * sizeof(int32_t)));
    find_largest(largest, num_top, logits, n);
    for (int64_t i = 0; i < num_top; ++i) ids[1 + i] = largest[i], values[1 + i] = logprob(largest[i]);
}

// ---- adjust_logits ----------------------------------------------------------------------------------------

// The tokens of row r: the prompt's from `begin`, those drawn since from `prompt_end`
struct Span { int64_t begin, prompt_end, end; };

Span span_of(const AdjustLogits& a, int64_t r) {
    const auto* ends = static_cast<const int64_t*>(a.ends.data);
    return {r ? ends[2 * r - 1] : 0, ends[2 * r], ends[2 * r + 1]};
}

// The first bad token, or the first bad end, counted on from the length of the history; else kOk
int64_t find_bad(const AdjustLogits& a) {
    const int64_t length = a.history.shape[0], num_rows = a.logits.shape[0];
    const auto *ends = static_cast<const int64_t*>(a.ends.data),
               *history = static_cast<const int64_t*>(a.history.data);
    int64_t begin = 0;
    for (int64_t i = 0; i < 2 * num_rows; begin = ends[i++])
        if (ends[i] < begin || ends[i] > length) return length + i;
    for (int64_t i = 0; i < begin; ++i)
        if (history[i] < 0 || history[i] >= a.logits.shape[1]) return i;
    return kOk;
}

// What is counted of a token, for which the memory is zero before and after: 1 once it was seen, and 1 more
// each time it was drawn
void punish(float* y, int32_t* seen, const int64_t* history, Span tokens, const float* penalties) {
    const float repetition = penalties[0], presence = penalties[1], frequency = penalties[2];
    if (repetition == 1 && presence == 0 && frequency == 0) return;
    for (int64_t i = tokens.begin; i < tokens.prompt_end; ++i) seen[history[i]] = 1;
    for (int64_t i = tokens.prompt_end; i < tokens.end; ++i) seen[history[i]] += seen[history[i]] ? 1 : 2;
    for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        const int64_t id = history[i];
        if (!seen[id]) continue;
        const float count = static_cast<float>(seen[id] - 1);
        y[id] = y[id] < 0 ? y[id] * repetition : y[id] / repetition;
        if (count > 0) y[id] -= presence + frequency * count;
        seen[id] = 0;
    }
}

void forbid(float* y, const int32_t* allowed, int64_t n) {
    constexpr int64_t kBits = 32;
    for (int64_t begin = 0; begin < n; begin += kBits) {
        const auto word = static_cast<uint32_t>(allowed[begin / kBits]);
        if (word == ~uint32_t{}) continue;
        const int64_t count = smaller(kBits, n - begin);
        for (int64_t i = 0; i < count; ++i)
            if (!(word >> i & 1)) y[begin + i] = -__builtin_inff();
    }
}

template <class T>
void adjust_rows(const AdjustLogits& a) {
    const Rows y{a.y}, logits{a.logits}, penalties{a.penalties}, allowed{a.allowed};
    const int64_t n = logits.length();
    for_rows(a.logits, [&](int64_t begin, int64_t end) {
        auto* seen = static_cast<int32_t*>(scratch(Scratch::own, n * sizeof(int32_t)));
        memset(seen, 0, n * sizeof(int32_t));
        for (int64_t r = begin; r < end; ++r) {
            float* row = y.at<float>(r);
            if (a.y.data != a.logits.data) map([](vf v) { return v; }, n, row, logits.at<T>(r));
            punish(row, seen, static_cast<const int64_t*>(a.history.data), span_of(a, r),
                   penalties.at<float>(r));
            if (a.allowed.data) forbid(row, allowed.at<int32_t>(r), n);
        }
    });
}

}  // namespace

int64_t random_sample(const RandomSample& a) {
    const Draw how{a.random_val, a.topp, a.temperature, 0, a.topk};
    int64_t status = kOk, token = 0;
    with_type(a.logits.dtype, [&](auto type) {
        status =
            draw_token(static_cast<const decltype(type)*>(a.logits.data), a.logits.shape[0], how, &token);
    });
    if (status != kOk) return status;
    if (a.y.dtype == DType::i64)
        *static_cast<int64_t*>(a.y.data) = token;
    else
        *static_cast<int32_t*>(a.y.data) = static_cast<int32_t>(token);
    return kOk;
}

int64_t sample(const Sample& a) {
    with_type(a.logits.dtype, [&](auto type) { sample_rows<decltype(type)>(a); });
    return kOk;
}

int64_t logprobs(const Logprobs& a) {
    const Rows ids{a.ids}, values{a.values}, logits{a.logits};
    const auto* tokens = static_cast<const int64_t*>(a.tokens.data);
    for (int64_t r = 0; r < logits.count(); ++r)
        if (tokens[r] < -1 || tokens[r] >= logits.length()) return r;
    with_type(a.logits.dtype, [&](auto type) {
        for_rows(a.logits, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r)
                logprobs_row(ids.at<int64_t>(r), values.at<float>(r), logits.at<decltype(type)>(r),
                             logits.length(), tokens[r], a.num_top);
        });
    });
    return kOk;
}

int64_t adjust_logits(const AdjustLogits& a) {
    if (const int64_t status = find_bad(a); status != kOk) return status;
    with_type(a.logits.dtype, [&](auto type) { adjust_rows<decltype(type)>(a); });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
