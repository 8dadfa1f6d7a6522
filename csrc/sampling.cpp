// random_sample: with w[i] = exp((logits[i] - max) / temperature), put the tokens in falling order of w
// (equal weights: lower id first), keep the first topk (0: all), of these the fewest whose weight reaches
// topp of theirs, and take the first kept token at which the running weight passes random_val of the kept
// weight. temperature 0 takes the first token of the order. O(vocabulary): only the buckets that are walked
// get sorted.
#include "sampling.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

// Weights lie in [0, 1]; the exponent and four bits of mantissa of the float split them into ordered buckets.
constexpr int kBucketShift = 19;
constexpr int kNumBuckets = (0x3f800000 >> kBucketShift) + 1;

struct FallingWeights {
    const float* weights;
    int32_t* order;
    int64_t num_sorted = 0;
    int next_bucket = 0;
    int64_t bucket_end[kNumBuckets];

    FallingWeights(const float* weights, int32_t* order, int64_t n) : weights(weights), order(order) {
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

    int64_t token(int64_t rank) {
        while (rank >= num_sorted) sort_next_bucket();
        return order[rank];
    }

    double weight(int64_t rank) { return weights[token(rank)]; }

    bool goes_before(int32_t a, int32_t b) const {
        return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    }

    void sort_next_bucket() {  // heapsort: no memory, no bad case
        int32_t* items = order + num_sorted;
        const int64_t n = bucket_end[next_bucket] - num_sorted;
        for (int64_t i = n / 2 - 1; i >= 0; --i) sift_down(items, i, n);
        for (int64_t end = n - 1; end > 0; --end) {
            std::swap(items[0], items[end]);
            sift_down(items, 0, end);
        }
        num_sorted = bucket_end[next_bucket++];
    }

    void sift_down(int32_t* items, int64_t root, int64_t n) const {
        for (int64_t child; (child = 2 * root + 1) < n; root = child) {
            if (child + 1 < n && goes_before(items[child], items[child + 1])) ++child;
            if (!goes_before(items[root], items[child])) return;
            std::swap(items[root], items[child]);
        }
    }
};

constexpr float kLargest = 0x1.fffffep127f;

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
    constexpr int64_t kBlock = 16 * W;
    *top = -__builtin_inff();
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t end = begin + kBlock < n ? begin + kBlock : n;
        if (!is_worth_a_look(logits + begin, end - begin, *top)) continue;
        for (int64_t i = begin; i < end; ++i) {
            const float v = load_n(logits + i, 1)[0];
            if (!(v <= kLargest)) return i;
            if (v > *top) *top = v, *best = i;
        }
    }
    return *top == -__builtin_inff() ? n : kOk;
}

template <class T>
void fill_weights(float* weights, const T* logits, int64_t n, float top, float temperature) {
    const vf divisor = splat(temperature);
    map([&](vf v) { return exp((v - top) / divisor); }, n, weights, logits);
}

int64_t draw(FallingWeights& falling, int64_t n, const RandomSample& a) {
    int64_t num_kept = a.topk > 0 && a.topk < n ? a.topk : n;
    double kept = 0;
    if (num_kept == n)
        for (int64_t i = 0; i < n; ++i) kept += falling.weights[i];
    else
        for (int64_t i = 0; i < num_kept; ++i) kept += falling.weight(i);
    if (a.topp < 1) {
        const double wanted = a.topp * kept;
        int64_t i = 0;
        for (kept = 0; i < num_kept && (i == 0 || kept < wanted); ++i) kept += falling.weight(i);
        num_kept = i;
    }
    const double target = a.random_val * kept;
    double passed = 0;
    int64_t last = 0;  // rounding may leave the running weight short of its target
    for (int64_t i = 0; i < num_kept && falling.weight(i) > 0; ++i) {
        last = i;
        if ((passed += falling.weight(i)) > target) break;
    }
    return falling.token(last);
}

template <class T>
int64_t sample_of(const RandomSample& a, int64_t* token) {
    const T* logits = static_cast<const T*>(a.logits.data);
    const int64_t n = a.logits.shape[0];
    float top;
    if (const int64_t status = find_best(logits, n, token, &top); status != kOk) return status;
    const float temperature = static_cast<float>(a.temperature);
    if (temperature == 0 || a.topk == 1 || a.random_val == 0) return kOk;
    auto* weights = static_cast<float*>(scratch(Scratch::own, n * (sizeof(float) + sizeof(int32_t))));
    fill_weights(weights, logits, n, top, temperature);
    FallingWeights falling(weights, reinterpret_cast<int32_t*>(weights + n), n);
    *token = draw(falling, n, a);
    return kOk;
}

}  // namespace

int64_t random_sample(const RandomSample& a) {
    int64_t status = kOk, token = 0;
    with_type(a.logits.dtype, [&](auto type) { status = sample_of<decltype(type)>(a, &token); });
    if (status != kOk) return status;
    if (a.y.dtype == DType::i64)
        *static_cast<int64_t*>(a.y.data) = token;
    else
        *static_cast<int32_t*>(a.y.data) = static_cast<int32_t>(token);
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
