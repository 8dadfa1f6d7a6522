// Few rows of rounded activations against the fields of weight straight from memory
#pragma once
#include "dots.h"

namespace infini::INFINI_LEVEL {
namespace {

// Four of the 16 elements `sixteenth` of a block, of the rows of N vectors from part `first` on. Where the
// halves of bytes are rows, the first half of the vectors has the lower ones, and the others have the bytes
// as they are, which stand for 16 times the upper ones and once the lower ones.
template <class Block, int sixteenth, int quad, int N = kParts, int first = 0>
INFINI_INLINE inline Quad<N> fields_at(const uint8_t* packed) {
    constexpr Place place = Block::place(sixteenth, quad);
    constexpr int kLow = Block::kLowBits;
    packed += first * sizeof(vb);
    if constexpr (kHasRowsInBytes<Block>) {
        const Quad<N / 2> both(packed + place.bytes * kRows + (place.shift ? 2 * kRows : 0));
        return {both.template field<4, 0>(), both};
    }
    Quad<N> w = Quad<N>(packed + place.bytes * kRows).template field<kLow, place.shift>();
    if constexpr (Block::kBits > kLow) {
        const Quad<N> upper(packed + place.upper * kRows);
        w.put_above(upper.template moved<place.bit, kLow>(), (1 << Block::kBits) - (1 << kLow));
    }
    if constexpr (kHasLevels<Block>)
        w.look_up(Block::kLevels, kBias);
    else if constexpr (kBias && Block::kIsSigned)
        for (int i = 0; i < N; ++i) w.part[i] ^= kBias;
    return w;
}

// Vectors of weight rows that are summed before the next ones, so that `count` sums of each stay in registers
template <int count>
constexpr int kPartsAtOnce = count * kParts <= kPackedFewSums ? kParts : kPackedFewSums / count;

// total[r][0:16] = the products of M rows of x from `row` on with 16 of weight
template <class Block, int P, int M>
INFINI_INLINE inline void multiply_blocks(float* total, const uint8_t* packed, const Activations& x,
                                          int64_t row) {
    constexpr int G = Block::kGroup, kGroups = Block::kElements / G,
                  kSplit = kGroup / G;  // groups to one of x
    constexpr int kSize = Block::kBytes * kRows, kLines = (kSize + 63) / 64;
    constexpr bool is_joined = kHasRowsInBytes<Block>;
    constexpr int N = is_joined ? kParts : kPartsAtOnce<P * M>;
    const int64_t step = 1 << x.log_rows;
    const Radix radix(x.radix);
    Tile<RowOfTile<P, kInShorts<Block>, N>, M> tile;
    tile.each([](auto& r, int) INFINI_INLINE { r.totals = {}; });
    for (int64_t first = 0; first < x.num_groups; first += kGroups / kSplit, packed += kSize) {
        alignas(64) float scale[kGroups * kRows], minimum[kGroups * kRows];
        Block::template scales<kRows>(scale, minimum, packed);
        unrolled<kGroups>([&](auto g) INFINI_INLINE {
            // Bytes that groups share are read again: kept, they would push sums out of registers.
            if constexpr (kGroups > 1) asm volatile("" ::: "memory");
            for (int line = g * kLines / kGroups; line < (g + 1) * kLines / kGroups; ++line)
                ask_ahead<kSize>(packed + 64 * line);
            const int64_t at = x.group_at(first + g / kSplit, row);
            const int8_t* q = x.q + at * P * kGroup + g % kSplit * G;
            const int32_t* sums = x.sums_at(first + g / kSplit, row);
            const float* x_total = x.total_at(first + g / kSplit, row, g % kSplit, G);
            unrolled<kParts / N>([&](auto piece) INFINI_INLINE {
                constexpr int kFirst = decltype(piece)::value * N;
                tile.each([&](auto& r, int m) INFINI_INLINE {
                    // Of blocks of one group GCC orders what it reads better without such a load.
                    if constexpr (kOffset<Block> == 0 && kGroups > 1)
                        r.dots.start();
                    else
                        r.dots.start(kOffset<Block>, GroupSums<P>(sums + m, step, g % kSplit, G));
                });
                unrolled<G / 4>([&](auto turn) INFINI_INLINE {
                    constexpr int kSixteens = G / 16, kSixteenth = turn % kSixteens;
                    constexpr std::integral_constant<int, turn / kSixteens> quad;
                    const Quad<N> fields =
                        fields_at<Block, g * kSixteens + kSixteenth, quad, N, kFirst>(packed);
                    tile.each([&](auto& r, int m) INFINI_INLINE {
                        r.dots.add(quad, turn, fields, q + m * P * kGroup + 16 * kSixteenth);
                    });
                });
                tile.each([&](auto& r, int m) INFINI_INLINE {
                    if constexpr (is_joined)
                        r.totals.add_joined(r.dots, scale + g * kRows, x.scale[at + m], radix);
                    else
                        r.totals.add(r.dots, scale + g * kRows, x.scale[at + m], radix, kFirst);
                });
            });
            if constexpr (Block::kHasMinimum)
                tile.each([&](auto& r, int m)
                              INFINI_INLINE { r.totals.add_minimum(minimum + g * kRows, x_total[m]); });
        });
    }
    tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.store_to(total + m * kRows); });
}

// Of blocks of 256, too many loads would be moved up.
template <class Block, int P, int M>
INFINI_NOT_SCHEDULED void multiply_long_blocks(float* total, const uint8_t* packed, const Activations& x,
                                               int64_t row) {
    multiply_blocks<Block, P, M>(total, packed, x, row);
}

// As many rows together as there are, up to M
template <class Block, int P, int M>
void multiply_few_rows(float* total, const uint8_t* packed, const Activations& x, int64_t row,
                       int64_t num_rows) {
    for (; num_rows >= M; num_rows -= M, row += M, total += M * kRows) {
        if constexpr (Block::kElements > kGroup)
            multiply_long_blocks<Block, P, M>(total, packed, x, row);
        else
            multiply_blocks<Block, P, M>(total, packed, x, row);
    }
    if constexpr (M > 1) multiply_few_rows<Block, P, M - 1>(total, packed, x, row, num_rows);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
