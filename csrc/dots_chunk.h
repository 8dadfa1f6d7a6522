// Several rows of rounded activations against a chunk of weight unpacked to bytes
#pragma once
#include "dots.h"

namespace infini::INFINI_LEVEL {
namespace {

// The fields of a block of each of the 16 rows, moved up
template <class Block, int moved>
void read_fields(int8_t* q, const uint8_t* packed) {
    if constexpr (kIsFourBits<Block>) {
        constexpr int kHalf = Block::kRun / 2 * kRows, kFour = 4 * kRows;
        packed += Block::kData * kRows;
        for (int i = 0; i < Block::kElements / Block::kRun; ++i, q += 2 * kHalf, packed += kHalf)
            if constexpr (!kHasRowsInBytes<Block>)
                four_bits<kHalf, moved>(q, packed);
            else
                for (int k = 0; k < kHalf; k += kFour) {
                    halves_of_rows<kFour / 2, moved>(q + k, packed + k);
                    halves_of_rows<kFour / 2, moved>(q + kHalf + k, packed + k + kFour / 2);
                }
    } else {
        Block::template fields<kRows>(q, packed);
        if (moved)
            for (int i = 0; i < Block::kElements * kRows; ++i) q[i] = static_cast<int8_t>(q[i] + moved);
    }
}

template <int kCopies = 1>  // of each field
struct Chunk {
    alignas(64) int8_t q[kCopies * kPackedChunkElements * kRows];  // [K / 4][16][4]
    alignas(64) float scale[kPackedChunkElements],
        minimum[kPackedChunkElements];  // [groups][16], groups of 16 or 32

    // fields(q, packed) writes those of a block. Not inlined: it is the same for all that multiply the chunk.
    template <class Block, void (*fields)(int8_t*, const uint8_t*)>
    __attribute__((noinline)) void read(const uint8_t* packed, int64_t length) {
        constexpr int kGroups = Block::kElements / Block::kGroup;
        for (int64_t b = 0; b < length / Block::kElements; ++b, packed += Block::kBytes * kRows) {
            prefetch<Block>(packed);
            fields(q + b * kCopies * Block::kElements * kRows, packed);
            Block::template scales<kRows>(scale + b * kGroups * kRows, minimum + b * kGroups * kRows, packed);
        }
    }
};

// body(packed, first of K, length) for the chunks of a panel
template <class Block, class Body>
inline void for_chunks(int64_t row_length, const uint8_t* packed, Body&& body) {
    for (int64_t k = 0; k < row_length;
         k += kPackedChunkElements, packed += kPackedChunkElements / Block::kElements * Block::kBytes * kRows)
        body(packed, k, smaller(kPackedChunkElements, row_length - k));
}

// total[r][0:16] += the products of M rows of x from `row` on with a chunk of weight, whose first group of K
// is `first`
template <int P, int G, bool kHasMinimum, int M>
INFINI_NOT_SCHEDULED void add_tile(float* __restrict total, const Chunk<>& chunk, const Activations& x,
                                   int64_t first, int64_t num_groups, int64_t row) {
    const int64_t at = x.group_at(first, row), step = 1 << x.log_rows;
    const Radix radix(x.radix);
    const uint8_t* __restrict w = reinterpret_cast<const uint8_t*>(chunk.q);
    const int8_t* __restrict q = x.q + at * P * kGroup;
    const int32_t* __restrict sums = x.sums_at(first, row);
    const float* __restrict x_scale = x.scale + at;
    const float* __restrict x_total = x.total_at(first, row, 0, kGroup);
    const float* __restrict scale = chunk.scale, * __restrict minimum = chunk.minimum;
    Tile<RowOfTile<P>, M> tile;
    tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.load_from(total + m * kRows); });
    for (; num_groups > 0; --num_groups, q += step * P * kGroup, sums += step * P * kSums, x_scale += step,
                           x_total += step * kTotals)
        for (int half = 0; half < kGroup / G; ++half, scale += kRows, minimum += kRows) {
            tile.each([&](auto& r, int m) INFINI_INLINE {
                if constexpr (kBias != 0)
                    r.dots.start(kBias, GroupSums<P>(sums + m, step, half, G));
                else
                    r.dots.start();
            });
            for (int k = half * G; k < half * G + G; k += 16, w += 16 * kRows)
                unrolled<4>([&](auto quad) INFINI_INLINE {
                    const Quad<> fields(w + 4 * kRows * quad);
                    tile.each([&](auto& r, int m)
                                  INFINI_INLINE { r.dots.add(quad, fields, q + m * P * kGroup + k); });
                });
            tile.each([&](auto& r, int m) INFINI_INLINE {
                r.totals.add(r.dots, scale, x_scale[m], radix);
                if (kHasMinimum)
                    r.totals.add_minimum(minimum, x_total[(G == kGroup ? 0 : 1 + half) * step + m]);
            });
        }
    tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.store_to(total + m * kRows); });
}

template <int P, int G, bool kHasMinimum, int M>
void add_tiles(float* total, const Chunk<>& chunk, const Activations& x, int64_t first, int64_t num_groups,
               int64_t row, int64_t num_rows) {
    int64_t r = 0;
    for (; r + M <= num_rows; r += M)
        add_tile<P, G, kHasMinimum, M>(total + r * kRows, chunk, x, first, num_groups, row + r);
    if constexpr (M > 1)
        add_tiles<P, G, kHasMinimum, M / 2>(total + r * kRows, chunk, x, first, num_groups, row + r,
                                            num_rows - r);
}

template <class Block, int P>
void add_rows(float* total, const uint8_t* packed, const Activations& x, int64_t first_row,
              int64_t num_rows) {
    Chunk<> chunk;
    for_chunks<Block>(x.num_groups * kGroup, packed, [&](const uint8_t* p, int64_t k, int64_t length) {
        chunk.template read<Block, read_fields<Block, kBias - Block::kOffset>>(p, length);
        add_tiles<P, Block::kGroup, Block::kHasMinimum, kPackedTileRows>(
            total, chunk, x, k / kGroup, length / kGroup, first_row, num_rows);
    });
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
