// Blocks of 256, whose groups are scaled by small whole numbers, against x with one scale for 256 of its
// values: all of a block is one whole number before it becomes a float.
//   y[m][n] += scale[n] * x_scale[m] * (sum over groups g of whole[n][g] * dot[m][n][g]), then
//   y[m][n] += minimum[n][g] * x_scale[m] * sum[m][g] for each group g.
// Planes of x are joined after the sum, which is below 2^28 in any order: five rows and more have the bits
// from AMX tile registers that fewer have from vectors.
#pragma once
#include "amx.h"
#include "dots_direct.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kBlock = 256;  // elements

// ---- few rows of x, in vectors, against fields straight from memory ---------------------------------------

template <class Block>
struct WholeScales {
    static constexpr int kGroups = kBlock / Block::kGroup;
    alignas(64) int32_t whole[kGroups * kRows];  // [group][16]
    alignas(64) float scale[kRows], minimum[Block::kHasMinimum ? kGroups * kRows : 1];

    INFINI_INLINE void read(const uint8_t* packed) {
        alignas(64) int8_t bytes[kGroups * kRows], least[kGroups * kRows];
        Block::template group_scales<kRows>(bytes, least, packed);
        for (int i = 0; i < kGroups * kRows; ++i) whole[i] = bytes[i];
        halves<kRows>(scale, packed + Block::kScale * kRows);
        if constexpr (Block::kHasMinimum) group_minimums<Block, kRows>(minimum, least, packed);
    }
};

template <int P>
struct WholeRow {
    PlaneDots<P> dots, sums;
    Totals<> totals;

    INFINI_INLINE void start() {
        if constexpr (P == 2) sums.high.start(0);
        sums.low.start(0);
    }
    INFINI_INLINE void add_dots(const int32_t* whole) {
        const vi scale = *reinterpret_cast<const vi*>(whole);
        if constexpr (P == 2) sums.high.part[0] += dots.high.part[0] * scale;
        sums.low.part[0] += dots.low.part[0] * scale;
    }
    INFINI_INLINE void add_sums(const float* scale, float x_scale, float radix) {
        vf v = __builtin_convertvector(sums.low.part[0], vf);
        if constexpr (P == 2) v = fma(__builtin_convertvector(sums.high.part[0], vf), splat(radix), v);
        totals.part[0] = fma(v, load(scale) * x_scale, totals.part[0]);
    }
};

// Rows of x against one block of weight: where what belongs to them begins
template <class Block, int P>
struct WholeRows {
    static constexpr int G = Block::kGroup, kSplit = kGroup / G;  // groups of weight to one of sums
    const int64_t step;
    const float radix;
    const int8_t* const q;
    const float *const x_scale, *const x_totals;
    const int32_t* const first_sums;

    INFINI_INLINE WholeRows(const Activations& x, int64_t first, int64_t row)
        : step(1 << x.log_rows), radix(static_cast<float>(x.radix)), q(x.q_at(first, row)),
          x_scale(x.scale + x.at(first, row)), x_totals(x.total_at(first, row, 0, G)),
          first_sums(x.sums_at(first, row)) {}

    INFINI_INLINE const int8_t* sixteen(int m, int which) const { return q + m * P * kBlock + 16 * which; }
    INFINI_INLINE GroupSums<P> sums(int g, int m) const {
        return {first_sums + g / kSplit * (step * P * kSums) + m, step, g % kSplit, G};
    }

    // What is left when groups have been summed. Until then totals would take registers.
    template <class Tile>
    INFINI_INLINE void finish(Tile& tile, float* total, const WholeScales<Block>& scales) const {
        tile.each([&](auto& r, int m) INFINI_INLINE {
            r.totals.load_from(total + m * kRows);
            r.add_sums(scales.scale, x_scale[m], radix);
        });
        for (int g = 0; Block::kHasMinimum && g < kBlock / G; ++g) {
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
            r.dots.template add<kBlock>(quad, turn, fields, rows.sixteen(m, kWhich));
        });
    });
    tile.each([&](auto& r, int) INFINI_INLINE { r.add_dots(scales.whole + g * kRows); });
}

// The scheduler would move too many loads up.
template <class Block, int P, int M>
INFINI_NOT_SCHEDULED void add_whole_blocks_to_rows(float* total, const uint8_t* packed, const Activations& x,
                                                   int64_t row) {
    constexpr int kGroups = kBlock / Block::kGroup, kSize = Block::kBytes * kRows, kLines = (kSize + 63) / 64;
    Tile<WholeRow<P>, M> tile;
    for (int64_t first = 0; first < x.num_groups; first += kBlock / kGroup, packed += kSize) {
        const WholeRows<Block, P> rows(x, first, row);
        WholeScales<Block> scales;
        scales.read(packed);
        tile.each([](auto& r, int) INFINI_INLINE { r.start(); });
        unrolled<kGroups>([&](auto g) INFINI_INLINE {
            // Bytes that groups share are read again: kept, they would push sums out of registers.
            asm volatile("" ::: "memory");
            for (int line = g * kLines / kGroups; line < (g + 1) * kLines / kGroups; ++line)
                ask_for(packed + kPackedPrefetchBytes + 64 * line);
            add_whole_group<Block, P, g>(tile, packed, rows, scales);
        });
        rows.finish(tile, total, scales);
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

// ---- five rows of x and more, in tile registers -----------------------------------------------------------
//
// Fields are multiplied by the whole scales of their groups when they are unpacked, so that a block is summed
// 64 at a time, and leaves the tile registers once. Where such a product does not fit a byte it is two planes
// of bytes, high and low:
//   Q5_K            8 * high + low, of the scale's upper bits and its lowest three, all unsigned
//   Q6_K, IQ4_XS    256 * high + low, the low byte unsigned
// One plane is enough for Q2_K, and for Q3_K if it is negated: of -32..31 times -4..3 only 128 leaves a byte.

template <class Block>
constexpr int kWeightPlanes = Block::kBits < 4 ? 1 : 2;
template <class Block>
constexpr bool kHasSplitScale = Block::kHasMinimum && kWeightPlanes<Block> == 2;
template <class Block>
constexpr bool kIsNegated = Block::kBits == 3;

// Bytes of `low` where they are the lower ones of 16 bits, of `high` where they are the upper ones
INFINI_INLINE inline __m512i mixed(__m512i low, __m512i high) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xff), low, high, 0xca);
}

// Of a group's whole scales, each row's twice in 16 bits: what multiplies four of its fields
INFINI_INLINE inline __m512i scales_in_pairs(const int8_t* whole) {
    const __m512i v = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(whole)));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, v, _mm512_slli_epi32(v, 16));
}

// The planes of 64 fields times `scale`. Where no product leaves its byte, one multiplication makes two.
template <class Block>
INFINI_INLINE inline void put_scaled(int8_t* high, int8_t* low, __m512i fields, __m512i scale) {
    const __m512i upper = _mm512_set1_epi16(static_cast<int16_t>(0xff00));
    if constexpr (kHasSplitScale<Block>) {
        const __m512i seven = _mm512_set1_epi16(7);
        _mm512_store_si512(high, _mm512_mullo_epi16(fields, _mm512_srli_epi16(scale, 3)));
        _mm512_store_si512(low, _mm512_mullo_epi16(fields, _mm512_and_si512(scale, seven)));
    } else if constexpr (kIsNegated<Block>) {
        const __m512i s = _mm512_sub_epi16(_mm512_setzero_si512(), scale);
        const __m512i odd = _mm512_mullo_epi16(_mm512_and_si512(fields, upper), s);
        _mm512_store_si512(low, mixed(_mm512_mullo_epi16(fields, s), odd));
    } else if constexpr (kWeightPlanes<Block> == 1) {
        _mm512_store_si512(low, _mm512_mullo_epi16(fields, scale));
    } else {
        const __m512i s = _mm512_slli_epi16(scale, 8);
        const __m512i even = _mm512_mulhi_epi16(_mm512_slli_epi16(fields, 8), s),
                      odd = _mm512_mulhi_epi16(_mm512_and_si512(fields, upper), s);
        _mm512_store_si512(high, mixed(_mm512_srli_epi16(even, 8), odd));
        _mm512_store_si512(low, mixed(even, _mm512_slli_epi16(odd, 8)));
    }
}

// A block of each of the 16 rows, times its whole scales
template <class Block>
struct ScaledChunk {
    static constexpr int kGroups = kBlock / Block::kGroup;
    alignas(64) int8_t w[kWeightPlanes<Block>][kBlock * kRows];  // [K / 4][16][4]
    alignas(64) float scale[kRows], minimum[Block::kHasMinimum ? kGroups * kRows : 1];

    __attribute__((noinline)) void read(const uint8_t* packed) {
        alignas(64) int8_t whole[kGroups * kRows], least[kGroups * kRows];
        prefetch<Block>(packed);
        Block::template group_scales<kRows>(whole, least, packed);
        halves<kRows>(scale, packed + Block::kScale * kRows);
        if constexpr (kIsNegated<Block>) store(scale, -load(scale));
        if constexpr (Block::kHasMinimum) group_minimums<Block, kRows>(minimum, least, packed);
        unrolled<kBlock / 16>([&](auto i) INFINI_INLINE {
            const __m512i s = scales_in_pairs(whole + i * 16 / Block::kGroup * kRows);
            unrolled<4>([&](auto quad) INFINI_INLINE {
                const vb fields = fields_at<Block, i, quad>(packed).part[0] - kOffset<Block>;
                const int at = (4 * i + quad) * 64;
                put_scaled<Block>(w[0] + at, w[kWeightPlanes<Block> - 1] + at, (__m512i)fields, s);
            });
        });
    }
};

// The sums of a block: of high and low planes of weight, and of either the planes of x
using WholeSums = int32_t[2][2][kRowBlock][kRows];

// 64 of K. Tiles 0 and 1 are for the high plane of weight, or for every other 64 of the only one: a product
// that adds to the one before has to wait for it.
template <class Block, int P, int which>
INFINI_INLINE inline void multiply_64(const ScaledChunk<Block>& chunk, const int8_t* q) {
    constexpr int64_t stride = P * kBlock;
    constexpr int kAt = 64 * which * kRows;
    INFINI_LOAD_ROWS(4, q + 64 * which, stride);
    if constexpr (P == 2) INFINI_LOAD_ROWS(5, q + kBlock + 64 * which, stride);
    if constexpr (kWeightPlanes<Block> == 2 || which % 2 == 0) {
        INFINI_LOAD(6, chunk.w[0] + kAt);
        if constexpr (kHasSplitScale<Block>) {
            INFINI_ADD_PRODUCT("tdpbsud", 6, 4, 0);
            if constexpr (P == 2) INFINI_ADD_PRODUCT("tdpbsud", 6, 5, 1);
        } else {
            INFINI_ADD_PRODUCT("tdpbssd", 6, 4, 0);
            if constexpr (P == 2) INFINI_ADD_PRODUCT("tdpbssd", 6, 5, 1);
        }
    }
    if constexpr (kWeightPlanes<Block> == 2) {
        INFINI_LOAD(7, chunk.w[1] + kAt);
        INFINI_ADD_PRODUCT("tdpbsud", 7, 4, 2);
        if constexpr (P == 2) INFINI_ADD_PRODUCT("tdpbsud", 7, 5, 3);
    } else if constexpr (which % 2 == 1) {
        INFINI_LOAD(7, chunk.w[0] + kAt);
        INFINI_ADD_PRODUCT("tdpbssd", 7, 4, 2);
        if constexpr (P == 2) INFINI_ADD_PRODUCT("tdpbssd", 7, 5, 3);
    }
}

// All of a block, with a call of meanwhile(i) after each 64
template <class Block, int P, class F>
INFINI_INLINE inline void multiply_block(const ScaledChunk<Block>& chunk, const int8_t* q, F&& meanwhile) {
    asm volatile("tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3" ::);
    unrolled<kBlock / 64>([&](auto i) INFINI_INLINE {
        multiply_64<Block, P, i>(chunk, q);
        meanwhile(i);
    });
}

template <int P>
INFINI_INLINE inline void store_sums(WholeSums& sums) {
    INFINI_STORE(0, sums[0][0]);
    if constexpr (P == 2) INFINI_STORE(1, sums[0][1]);
    INFINI_STORE(2, sums[1][0]);
    if constexpr (P == 2) INFINI_STORE(3, sums[1][1]);
}

// The planes of weight as one
template <class Block>
INFINI_INLINE inline __m512i joined(__m512i high, __m512i low) {
    if constexpr (kWeightPlanes<Block> == 1) return _mm512_add_epi32(high, low);
    if constexpr (kHasSplitScale<Block>) return _mm512_add_epi32(_mm512_slli_epi32(high, 3), low);
    return _mm512_add_epi32(times_256(high), low);
}

// total[0:R][0:16] += the sums of a block, scaled, and its minimums; `from` is the first of these rows
template <class Block, int P, int R>
INFINI_INLINE inline void add_sums(float* total, const WholeSums& sums, int from,
                                   const ScaledChunk<Block>& chunk, const Activations& x, int64_t first,
                                   int64_t row) {
    constexpr int G = Block::kGroup, kSplit = kGroup / G;  // groups of weight to one of totals
    const float* x_scale = x.scale + x.at(first, row);
    const vf scale = load(chunk.scale), radix = splat(static_cast<float>(x.radix));
    vf t[R];
    unrolled<R>([&](auto r) INFINI_INLINE {
        const auto value = [&](int plane) INFINI_INLINE {
            return (vf)_mm512_cvtepi32_ps(joined<Block>(_mm512_load_si512(sums[0][plane][from + r]),
                                                        _mm512_load_si512(sums[1][plane][from + r])));
        };
        const vf v = P == 2 ? fma(value(0), radix, value(P - 1)) : value(0);
        t[r] = fma(v, scale * x_scale[r], load(total + r * kRows));
    });
    if constexpr (Block::kHasMinimum)
        for (int g = 0; g < kBlock / G; ++g) {
            const vf minimum = load(chunk.minimum + g * kRows);
            const float* x_total = x.total_at(first + g / kSplit, row, g % kSplit, G);
            unrolled<R>([&](auto r) INFINI_INLINE { t[r] = fma(minimum, splat(x_total[r]), t[r]); });
        }
    unrolled<R>([&](auto r) INFINI_INLINE { store(total + r * kRows, t[r]); });
}

// total[panel][row][0:16], panels of `band` rows. While tiles multiply, what they made before is scaled.
template <class Block, int P, int R>
void add_whole_blocks(float* total, int64_t band, const uint8_t* packed, int num_panels, const Activations& x,
                      int64_t first_row, int64_t num_rows) {
    ScaledChunk<Block> chunks[kPackedPanels];
    alignas(64) WholeSums sums;
    const int64_t size = Block::kBytes * kRows, panel_bytes = x.num_spans() * size;
    const int64_t count = (num_rows + R - 1) / R * num_panels;
    configure_tiles(TileConfig(R, 64));
    for (int64_t first = 0; first < x.num_groups; first += kBlock / kGroup, packed += size) {
        for (int i = 0; i < num_panels; ++i) chunks[i].read(packed + i * panel_bytes);
        const auto add = [&](int64_t at, int quarter) INFINI_INLINE {
            const int64_t from = quarter * (R / 4), r = at / num_panels * R + from, i = at % num_panels;
            add_sums<Block, P, R / 4>(total + (i * band + r) * kRows, sums, from, chunks[i], x, first,
                                      first_row + r);
        };
        for (int64_t at = 0; at < count; ++at) {
            multiply_block<Block, P>(chunks[at % num_panels], x.q_at(first, first_row + at / num_panels * R),
                                     [&](int quarter) INFINI_INLINE {
                                         if (at > 0) add(at - 1, quarter);
                                     });
            store_sums<P>(sums);
        }
        for (int quarter = 0; quarter < 4; ++quarter) add(count - 1, quarter);
    }
    release_tiles();
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
