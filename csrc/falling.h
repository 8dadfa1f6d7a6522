// The tokens of a row in falling order of their logits, as far as anybody asks for them
#pragma once
#include <utility>

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Weights lie in [0, 1]. The bits of such floats are ordered as they are; a bucket is an exponent and four
// bits of mantissa. What is less than a normal number is less than a sum that begins with 1 is changed by,
// and never drawn.
constexpr int kExponentShift = 23, kBucketShift = 19;
constexpr uint32_t kSmallest = 1 << kExponentShift,
                   kHighest = (127 << kExponentShift) + (1 << kBucketShift);  // above 1
constexpr int kNumBuckets = (kHighest - kSmallest) >> kBucketShift;

constexpr int bucket(uint32_t bits) { return static_cast<int>((kHighest - 1 - bits) >> kBucketShift); }

// Where the level ends that begins below the ceiling: weights fall to a 16th in it.
constexpr uint32_t floor_below(uint32_t ceiling) {
    constexpr uint32_t kLevel = 4 << kExponentShift;
    return ceiling - kSmallest > kLevel ? ceiling - kLevel : kSmallest;
}

inline uint32_t bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float value(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

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

// Vector i / W of a row, with `fill` behind its end
template <class T>
INFINI_INLINE inline vf vector_at(const T* row, int64_t i, int64_t n, float fill) {
    return n - i < W ? load_n(row + i, n - i, fill) : load(row + i);
}

typedef double vd __attribute__((vector_size(W * 8)));

// The sum of f over a row, of `fill` behind its end
template <class T, class F>
double sum_in_doubles(const T* row, int64_t n, float fill, F&& f) {
    vd sums{};
    for (int64_t i = 0; i < n; i += W) sums += __builtin_convertvector(f(vector_at(row, i, n, fill)), vd);
    double total = 0;
    for (int i = 0; i < W; ++i) total += sums[i];
    return total;
}

struct Level {
    int64_t count = 0;  // of tokens
    float rest = 0;     // the largest weight below
};

// The tokens from `begin` to `end` whose weights are of the level below the ceiling
inline Level find_level(int32_t* found, const float* weights, int64_t begin, int64_t end, uint32_t ceiling) {
    const vf least = splat(value(floor_below(ceiling))), limit = splat(value(ceiling));
    Level level;
    vf rest{};
    for (int64_t i = begin; i < end; i += W) {
        const vf v = vector_at(weights, i, end, 0.0f);
        const vi is_below = v < least;
        rest = max(rest, select(is_below, v, vf{}));
        for (uint32_t left = bits_of(~is_below & (v < limit)); left; left &= left - 1)
            found[level.count++] = static_cast<int32_t>(i + __builtin_ctz(left));
    }
    level.rest = max(rest);
    return level;
}

struct Taken {
    int64_t count;
    double weight;
};

// The tokens of a row in falling order of the logits, for where the temperature is high, rounding leaves many
// weights equal. They are found a level at a time, and a bucket is sorted only where not all of it is taken:
// mostly few are wanted of very many.
template <class T>
struct FallingWeights {
    const float* weights;
    const T* logits;
    const int64_t n;
    int32_t *found, *order;       // each has room for all tokens
    uint32_t ceiling = kHighest;  // of the next level; kSmallest: there is none
    int num_buckets = 0;          // of the levels above
    int64_t ends[kNumBuckets];
    double sums[kNumBuckets];
    bool is_sorted[kNumBuckets];

    FallingWeights(const float* weights, const T* logits, int64_t n, int32_t* found, int32_t* order)
        : weights(weights), logits(logits), n(n), found(found), order(order) {}

    int64_t begin(int b) const { return b ? ends[b - 1] : 0; }

    bool has_bucket(int b) {
        while (b >= num_buckets && ceiling > kSmallest) add_level(find_level(found, weights, 0, n, ceiling));
        return b < num_buckets;
    }

    // The next one, which lies in `found`
    void add_level(Level level) {
        const int first = std::exchange(num_buckets, bucket(floor_below(ceiling)) + 1);
        const uint32_t rest = bits(level.rest);
        ceiling = rest >= kSmallest ? ((rest >> kBucketShift) + 1) << kBucketShift : kSmallest;
        int64_t end = begin(first), places[kNumBuckets];
        for (int b = first; b < num_buckets; ++b) places[b] = 0, sums[b] = 0, is_sorted[b] = false;
        for (int64_t i = 0; i < level.count; ++i) {
            const float weight = weights[found[i]];
            ++places[bucket(bits(weight))];
            sums[bucket(bits(weight))] += weight;
        }
        for (int b = first; b < num_buckets; ++b) {
            const int64_t size = std::exchange(places[b], end);
            ends[b] = end += size;
        }
        for (int64_t i = 0; i < level.count; ++i) order[places[bucket(bits(weights[found[i]]))]++] = found[i];
    }

    void sort(int b) {
        if (std::exchange(is_sorted[b], true)) return;
        const FallingOrder<T> falling{logits};
        falling.make_heap(order + begin(b), ends[b] - begin(b));
        falling.sort_heap(order + begin(b), ends[b] - begin(b));
    }

    // The first ones, until their weight is enough or there are `most`
    template <class IsEnough>
    Taken take(int64_t most, IsEnough&& is_enough) {
        Taken taken{0, 0};
        for (int b = 0; taken.count < most && has_bucket(b); ++b) {
            if (ends[b] <= most && !is_enough(taken.weight + sums[b])) {
                taken = {ends[b], taken.weight + sums[b]};
                continue;
            }
            sort(b);
            while (taken.count < smaller(ends[b], most)) {
                taken.weight += weights[order[taken.count++]];
                if (is_enough(taken.weight)) return taken;
            }
        }
        return taken;
    }

    int64_t last_of(Taken taken) {
        int b = 0;
        while (ends[b] < taken.count) ++b;
        sort(b);
        return order[taken.count - 1];
    }
};

}  // namespace
}  // namespace infini::INFINI_LEVEL
