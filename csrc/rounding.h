// Activations rounded to integers for packed_linear: the 32 of a group become x_scale * q. q has 8 bits, or 8 and a
// few more that make a second plane of bytes: q = radix * high + low, the radix 16 (12 bits) or 256 (16 bits).
//
// Rows come in blocks: the groups of a block one after another, each with all rows of the block.
#pragma once
#include "kernels.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kGroup = 32, kSumLength = 16;
constexpr int kSums = kGroup / kSumLength;

// Integers below 2^22 and floats, without a conversion: the bits of kShift + i are those of kShift, plus i.
constexpr float kShift = 0x1.8p23f;
constexpr int32_t kShiftBits = 0x4b400000;

struct Activations {
    int64_t num_rows, num_groups;
    int num_planes, log_rows;  // of a block
    int radix;
    int8_t* q;      // [block][group][row][plane][32]
    float* scale;   // [block][group][row]
    int32_t* sums;  // [block][group][plane][2][row], each of 16 bytes

    Activations(const PackedLinear& a, void* room)
        : num_rows(Rows{a.x}.count()), num_groups(a.x.shape[a.x.ndim - 1] / kGroup), num_planes(num_planes_of(a.activation_bits)),
          log_rows(0), radix(1 << (a.activation_bits - 8)) {
        while (1 << log_rows < kRowBlock && 1 << log_rows < num_rows) ++log_rows;
        const int64_t count = (((num_rows - 1) >> log_rows) + 1) * num_groups << log_rows;
        q = static_cast<int8_t*>(room);
        scale = reinterpret_cast<float*>(q + count * num_planes * kGroup);
        sums = reinterpret_cast<int32_t*>(scale + count);
    }

    int64_t first_at(int64_t group, int64_t row) const { return ((row >> log_rows) * num_groups + group) << log_rows; }
    int64_t at(int64_t group, int64_t row) const { return first_at(group, row) + (row & ((1 << log_rows) - 1)); }

    // The first of a row's sums in a group; the next ones are as many apart as a block has rows
    int32_t* sums_at(int64_t group, int64_t row) const {
        return sums + first_at(group, row) * num_planes * kSums + (row & ((1 << log_rows) - 1));
    }
};

// Of floats without their signs, the order is that of their bits, with infinity and NaN on top.
float largest_magnitude(const float* x) {
    vu largest{};
    for (int i = 0; i < kGroup; i += W) {
        const vu magnitude = as_bits(load(x + i)) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const uint32_t most = max(largest);
    float magnitude;
    memcpy(&magnitude, &most, sizeof most);
    return magnitude;
}

// The nearest integers to x * inverse, ties to even
void round_values(int32_t* __restrict v, const float* __restrict x, float inverse) {
    for (int i = 0; i < kGroup; i += W) {
        const vi rounded = (vi)as_bits(load(x + i) * inverse + kShift) - kShiftBits;
        memcpy(v + i, &rounded, sizeof rounded);
    }
}

// v = radix * high + low. Low bytes run from -127 to 127, so that every kernel can negate them.
void split_planes(int32_t* __restrict high, int32_t* __restrict low, const int32_t* __restrict v, int radix) {
    const int shift = radix == 16 ? 4 : 8;
    for (int i = 0; i < kGroup; ++i) {
        high[i] = (v[i] + radix / 2) >> shift;
        const int32_t rest = v[i] - high[i] * radix;
        low[i] = rest < -127 ? -127 : rest;
    }
}

void store_plane(const Activations& to, int64_t group, int64_t row, int plane, const int32_t* __restrict v) {
    int8_t* __restrict q = to.q + (to.at(group, row) * to.num_planes + plane) * kGroup;
    for (int i = 0; i < kGroup; ++i) q[i] = static_cast<int8_t>(v[i]);
    for (int half = 0; half < kSums; ++half) {
        int32_t sum = 0;
        for (int i = 0; i < kSumLength; ++i) sum += v[half * kSumLength + i];
        to.sums_at(group, row)[(plane * kSums + half) << to.log_rows] = sum;
    }
}

void round_group(const Activations& to, int64_t group, int64_t row, const float* x, float inverse) {
    alignas(64) int32_t v[kGroup], high[kGroup], low[kGroup];
    round_values(v, x, inverse);
    if (to.num_planes == 1) return store_plane(to, group, row, 0, v);
    split_planes(high, low, v, to.radix);
    store_plane(to, group, row, 0, high);
    store_plane(to, group, row, 1, low);
}

// Infinity less itself is NaN: what is not finite makes every product of its row NaN.
void round_row(const Activations& to, int64_t row, const float* x) {
    const float most = static_cast<float>(127 * to.radix);
    constexpr int kBatch = 8;  // groups whose divisions overlap
    for (int64_t first = 0; first < to.num_groups; first += kBatch) {
        const int64_t last = smaller(first + kBatch, to.num_groups);
        float inverse[kBatch];
        for (int64_t g = first; g < last; ++g) {
            const float largest = largest_magnitude(x + g * kGroup);
            inverse[g - first] = largest >= 0x1p-100f ? most / largest : 0.0f;
            to.scale[to.at(g, row)] = largest / most + (largest - largest);
        }
        for (int64_t g = first; g < last; ++g) round_group(to, g, row, x + g * kGroup, inverse[g - first]);
    }
}

void round_rows(const Activations& to, const Tensor& x) {
    for_rows(x, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) round_row(to, r, Rows{x}.at<const float>(r));
    });
}

// The sums of a weight group of 16 or 32, of those that sums_at begins with
template <int P>
struct GroupSums {
    int32_t plane[P];

    INFINI_INLINE GroupSums(const int32_t* p, int64_t stride, int half, int group) {
        for (int i = 0; i < P; ++i) {
            plane[i] = p[(i * kSums + half) * stride];
            if (group == kGroup) plane[i] += p[(i * kSums + 1) * stride];
        }
    }

    INFINI_INLINE int32_t whole(int radix) const { return P == 2 ? radix * plane[0] + plane[P - 1] : plane[0]; }
};

}  // namespace
}  // namespace infini::INFINI_LEVEL
