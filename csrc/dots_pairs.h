// Two rows of rounded activations at a time against a chunk of weight, whose rows lie by twos too: an
// instruction multiplies 2 x 8 bytes with 8 x 2 (i8mm). A vector has sums of rows of weight n and n + 1 with
// rows of x m and m + 1: [n m, n m+1, n+1 m, n+1 m+1]. The sums and their order are those of dots_chunk.h,
// bit by bit.
#pragma once
#include "dots_chunk.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kPairs = kRows / 2;

// 4 columns of 16 rows and the next 4 become 8 columns of two rows, eight times
inline void pair_up(int8_t* q) {
    int32x4_t four[2][kParts];
    for (int i = 0; i < 2 * kParts; ++i)
        four[i / kParts][i % kParts] = vld1q_s32(reinterpret_cast<int32_t*>(q) + 4 * i);
    for (int i = 0; i < kParts; ++i) {
        vst1q_s32(reinterpret_cast<int32_t*>(q) + 8 * i, vzip1q_s32(four[0][i], four[1][i]));
        vst1q_s32(reinterpret_cast<int32_t*>(q) + 8 * i + 4, vzip2q_s32(four[0][i], four[1][i]));
    }
}

// Each of `count` numbers twice
inline void repeat(float* to, const float* from, int64_t count) {
    for (int64_t i = 0; i < count; i += W) {
        store(to + 2 * i, vzip1q_f32(load(from + i), load(from + i)));
        store(to + 2 * i + W, vzip2q_f32(load(from + i), load(from + i)));
    }
}

struct PairedChunk {
    Chunk<> chunk;
    alignas(64) float scale[2 * kPackedChunkElements], minimum[2 * kPackedChunkElements];  // [groups][16][2]

    template <class Block>
    void read(const uint8_t* packed, int64_t length) {
        chunk.template read<Block, read_fields<Block, -Block::kOffset>>(packed, length);
        for (int64_t k = 0; k < length; k += 8) pair_up(chunk.q + k * kRows);
        repeat(scale, chunk.scale, length / Block::kGroup * kRows);
        if (Block::kHasMinimum) repeat(minimum, chunk.minimum, length / Block::kGroup * kRows);
    }
};

// What 16 weight rows have come to for two rows of x
struct PairTotals {
    vf part[kPairs];

    INFINI_INLINE void load_from(const float* y) {
        for (int i = 0; i < kParts; ++i) {
            const vf first = load(y + i * W), second = load(y + kRows + i * W);
            part[2 * i] = vzip1q_f32(first, second), part[2 * i + 1] = vzip2q_f32(first, second);
        }
    }
    INFINI_INLINE void store_to(float* y) const {
        for (int i = 0; i < kParts; ++i) {
            store(y + i * W, vuzp1q_f32(part[2 * i], part[2 * i + 1]));
            store(y + kRows + i * W, vuzp2q_f32(part[2 * i], part[2 * i + 1]));
        }
    }
};

// Two numbers, twice
INFINI_INLINE inline vf twice(const float* p) {
    const float32x2_t two = vld1_f32(p);
    return vcombine_f32(two, two);
}

// total[0:2][0:16] += the products of two rows of x from `row` on with a chunk of weight, whose first group
// of K is `first`
template <int P, int G, bool kHasMinimum>
INFINI_NOT_SCHEDULED void add_pair(float* __restrict total, const PairedChunk& chunk, const Activations& x,
                                   int64_t first, int64_t num_groups, int64_t row) {
    const int64_t at = x.group_at(first, row);
    const int8_t* __restrict w = chunk.chunk.q;
    const int8_t* __restrict q = x.q + at * P * kGroup;
    const float* __restrict x_scale = x.scale + at;
    const float* __restrict x_total = x.total_at(first, row, 0, G);
    const float* __restrict scale = chunk.scale, * __restrict minimum = chunk.minimum;
    const Radix radix(x.radix);
    PairTotals totals;
    totals.load_from(total);
    for (; num_groups > 0; --num_groups, q += 2 * P * kGroup, x_scale += 2, x_total += 2 * kTotals)
        for (int half = 0; half < kGroup / G; ++half, scale += 2 * kRows, minimum += 2 * kRows) {
            PlaneDots<P, kPairs> dots;
            dots.start();
            for (int k = half * G; k < half * G + G; k += 8, w += 8 * kRows) {
                if constexpr (P == 2) dots.high.add_pairs(w, vld1q_s8(q + 2 * k));
                dots.low.add_pairs(w, vld1q_s8(q + (P - 1) * 2 * kGroup + 2 * k));
            }
            for (int i = 0; i < kPairs; ++i) {
                totals.part[i] =
                    fma(dots.value(i, radix), load(scale + W * i) * twice(x_scale), totals.part[i]);
                if (kHasMinimum)
                    totals.part[i] = fma(load(minimum + W * i), twice(x_total + 2 * half), totals.part[i]);
            }
        }
    totals.store_to(total);
}

template <class Block, int P>
void add_paired_rows(float* total, const uint8_t* packed, const Activations& x, int64_t first_row,
                     int64_t num_rows) {
    PairedChunk chunk;
    for_chunks<Block>(x.num_groups * kGroup, packed, [&](const uint8_t* p, int64_t k, int64_t length) {
        chunk.template read<Block>(p, length);
        for (int64_t r = 0; r < num_rows; r += 2)
            add_pair<P, Block::kGroup, Block::kHasMinimum>(total + r * kRows, chunk, x, k / kGroup,
                                                           length / kGroup, first_row + r);
    });
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
