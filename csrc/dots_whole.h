// Blocks of 256, whose groups are scaled by small whole numbers, against x with one scale for a span of it
// (kWholeSpan): all of a span is one whole number before it becomes a float.
//   y[m][n] += scale[n] * x_scale[m] * (sum over groups g of whole[n][g] * dot[m][n][g]) for each span, then
//   y[m][n] += minimum[n][g] * x_scale[m] * sum[m][g] for each group g.
// Here few rows of x meet fields straight from memory; amx_whole.h and dots_shorts.h have many rows, which
// come to the same bits. Spans of 64 are one sum of 32 bits, in any order; of 256 planes of x are joined
// after their sums, which are below 2^28.
#pragma once
#include "dots_direct.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kBlock = 256;  // elements

template <class Block>
struct WholeScales {
    static constexpr int kGroups = kBlock / Block::kGroup;
    alignas(64) int8_t whole[kGroups * kRows];  // [group][16]
    alignas(64) float scale[kRows], minimum[Block::kHasMinimum ? kGroups * kRows : 1];

    INFINI_INLINE void read(const uint8_t* packed) {
        alignas(64) int8_t least[kGroups * kRows];
        Block::template group_scales<kRows>(whole, least, packed);
        halves<kRows>(scale, packed + Block::kScale * kRows);
        if constexpr (Block::kHasMinimum) group_minimums<Block, kRows>(minimum, least, packed);
    }
    INFINI_INLINE vi of_group(int g) const {
        return (vi)_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(whole + g * kRows)));
    }
};

// Of a group's whole scales, each row's twice in 16 bits: what multiplies four of its fields
INFINI_INLINE inline __m512i in_pairs(vi scales) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)scales, _mm512_slli_epi32((__m512i)scales, 16));
}

template <int P>
struct WholeRow {
    static constexpr bool is_one_sum = kWholes == Wholes::of_64;
    PlaneDots<P> dots, sums;  // of one sum, the low one
    Totals<> totals;

    INFINI_INLINE void start() {
        if constexpr (P == 2) sums.high.start(0);
        sums.low.start(0);
    }
    INFINI_INLINE void add_dots(vi whole, [[maybe_unused]] int log_radix) {
        if constexpr (is_one_sum) {
            sums.low.part[0] += ((dots.high.part[0] << log_radix) + dots.low.part[0]) * whole;
        } else {
            if constexpr (P == 2) sums.high.part[0] += dots.high.part[0] * whole;
            sums.low.part[0] += dots.low.part[0] * whole;
        }
    }
    INFINI_INLINE void add_sums(const float* scale, float x_scale, [[maybe_unused]] float radix) {
        vf v = __builtin_convertvector(sums.low.part[0], vf);
        if constexpr (P == 2 && !is_one_sum)
            v = fma(__builtin_convertvector(sums.high.part[0], vf), splat(radix), v);
        totals.part[0] = fma(v, load(scale) * x_scale, totals.part[0]);
    }
};

// Rows of x against one block of weight: where what belongs to them begins
template <class Block, int P>
struct WholeRows {
    static constexpr int G = Block::kGroup, kSplit = kGroup / G;  // groups of weight to one of sums
    static constexpr int kGroups = kWholeSpan / G;                // of weight in a span
    const int64_t step;
    const int radix, log_radix;
    const int8_t* const q;
    const float *const x_scale, *const x_totals;
    const int32_t* const first_sums;

    INFINI_INLINE WholeRows(const Activations& x, int64_t first, int64_t row)
        : step(1 << x.log_rows), radix(x.radix), log_radix(__builtin_ctz(x.radix)), q(x.q_at(first, row)),
          x_scale(x.scale + x.at(first, row)), x_totals(x.total_at(first, row, 0, G)),
          first_sums(x.sums_at(first, row)) {}

    INFINI_INLINE const int8_t* sixteen(int m, int which) const {
        constexpr int kSixteens = kWholeSpan / 16;
        return q + (which / kSixteens * step + m) * P * kWholeSpan + which % kSixteens * 16;
    }
    INFINI_INLINE GroupSums<P> sums(int g, int m) const {
        return {first_sums + g / kSplit * (step * P * kSums) + m, step, g % kSplit, G};
    }

    // What is left when groups have been summed. Until then totals would take registers.
    template <class Tile>
    INFINI_INLINE void add_span(Tile& tile, float* total, const WholeScales<Block>& scales, int span) const {
        tile.each([&](auto& r, int m) INFINI_INLINE {
            r.totals.load_from(total + m * kRows);
            r.add_sums(scales.scale, x_scale[span * step + m], static_cast<float>(radix));
            r.totals.store_to(total + m * kRows);
        });
    }

    template <class Tile>
    INFINI_INLINE void add_minimums(Tile& tile, float* total, const WholeScales<Block>& scales) const {
        tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.load_from(total + m * kRows); });
        for (int g = 0; g < kBlock / G; ++g) {
            const float* x_total = x_totals + (g / kSplit * kTotals + g % kSplit) * step;
            tile.each([&](auto& r, int m)
                          INFINI_INLINE { r.totals.add_minimum(scales.minimum + g * kRows, x_total[m]); });
        }
        tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.store_to(total + m * kRows); });
    }
};

template <class Block, int P, int g, class Tile>
INFINI_INLINE inline void add_whole_group(Tile& tile, const uint8_t* packed, const WholeRows<Block, P>& rows,
                                          const WholeScales<Block>& scales) {
    constexpr int G = Block::kGroup;
    tile.each([&](auto& r, int m) INFINI_INLINE { r.dots.start(kOffset<Block>, rows.sums(g, m), 0); });
    unrolled<G / 4>([&](auto turn) INFINI_INLINE {
        constexpr int kSixteens = G / 16, kWhich = g * kSixteens + turn % kSixteens;
        constexpr std::integral_constant<int, turn / kSixteens> quad;
        const Quad<> fields = fields_at<Block, kWhich, quad>(packed);
        tile.each([&](auto& r, int m) INFINI_INLINE {
            r.dots.template add<kWholeSpan>(quad, turn, fields, rows.sixteen(m, kWhich));
        });
    });
    const vi whole = scales.of_group(g);
    tile.each([&](auto& r, int) INFINI_INLINE { r.add_dots(whole, rows.log_radix); });
}

// The scheduler would move too many loads up.
template <class Block, int P, int M>
INFINI_NOT_SCHEDULED void add_whole_blocks_to_rows(float* total, const uint8_t* packed, const Activations& x,
                                                   int64_t row) {
    constexpr int kGroups = kBlock / Block::kGroup, kSize = Block::kBytes * kRows, kLines = (kSize + 63) / 64,
                  kOfSpan = kWholeSpan / Block::kGroup;
    Tile<WholeRow<P>, M> tile;
    for (int64_t first = 0; first < x.num_groups; first += kBlock / kGroup, packed += kSize) {
        const WholeRows<Block, P> rows(x, first, row);
        WholeScales<Block> scales;
        scales.read(packed);
        unrolled<kGroups>([&](auto g) INFINI_INLINE {
            if (g % kOfSpan == 0) tile.each([](auto& r, int) INFINI_INLINE { r.start(); });
            // Bytes that groups share are read again: kept, they would push sums out of registers.
            asm volatile("" ::: "memory");
            for (int line = g * kLines / kGroups; line < (g + 1) * kLines / kGroups; ++line)
                ask_ahead<kSize>(packed + 64 * line);
            add_whole_group<Block, P, g>(tile, packed, rows, scales);
            if (g % kOfSpan == kOfSpan - 1) rows.add_span(tile, total, scales, g / kOfSpan);
        });
        if constexpr (Block::kHasMinimum) rows.add_minimums(tile, total, scales);
    }
}

// As many rows together as there are, up to M
template <class Block, int P, int M>
void add_few_whole_rows(float* total, const uint8_t* packed, const Activations& x, int64_t row,
                        int64_t num_rows) {
    for (; num_rows >= M; num_rows -= M, row += M, total += M * kRows)
        add_whole_blocks_to_rows<Block, P, M>(total, packed, x, row);
    if constexpr (M > 1) add_few_whole_rows<Block, P, M - 1>(total, packed, x, row, num_rows);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
