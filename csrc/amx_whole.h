// Blocks of 256 as whole numbers (dots_whole.h), against five rows of x and more, in tile registers.
//
// Fields are multiplied by the whole scales of their groups when they are unpacked, so that a block is summed
// 64 at a time, and leaves the tile registers once. Where such a product does not fit a byte it is two planes
// of bytes, high and low:
//   Q5_K            8 * high + low, of the scale's upper bits and its lowest three, all unsigned
//   Q6_K, IQ4_XS    256 * high + low, the low byte unsigned
// One plane is enough for Q2_K, and for Q3_K if it is negated: of -32..31 times -4..3 only 128 leaves a byte.
#pragma once
#include "amx.h"
#include "dots_whole.h"

namespace infini::INFINI_LEVEL {
namespace {

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
    alignas(64) int8_t w[kWeightPlanes<Block>][kBlock * kRows];  // [K / 4][16][4]
    WholeScales<Block> scales;

    __attribute__((noinline)) void read(const uint8_t* packed) {
        prefetch<Block>(packed);
        scales.read(packed);
        if constexpr (kIsNegated<Block>) store(scales.scale, -load(scales.scale));
        unrolled<kBlock / 16>([&](auto i) INFINI_INLINE {
            const __m512i s = in_pairs(scales.of_group(i * 16 / Block::kGroup));
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
    constexpr Terms kLow = kWeightPlanes<Block> == 2 ? Terms::unsigned_bytes : Terms::bytes,
                    kHigh = kHasSplitScale<Block> ? Terms::unsigned_bytes : Terms::bytes;
    load_tile<4>(q + 64 * which, stride);
    if constexpr (P == 2) load_tile<5>(q + kBlock + 64 * which, stride);
    if constexpr (kWeightPlanes<Block> == 2 || which % 2 == 0) {
        load_tile<6>(chunk.w[0] + kAt);
        add_product<0, 4, 6, kHigh>();
        if constexpr (P == 2) add_product<1, 5, 6, kHigh>();
    }
    if constexpr (kWeightPlanes<Block> == 2 || which % 2 == 1) {
        load_tile<7>(chunk.w[kWeightPlanes<Block> - 1] + kAt);
        add_product<2, 4, 7, kLow>();
        if constexpr (P == 2) add_product<3, 5, 7, kLow>();
    }
}

// All of a block, with a call of meanwhile(i) after each 64
template <class Block, int P, class F>
INFINI_INLINE inline void multiply_block(const ScaledChunk<Block>& chunk, const int8_t* q, F&& meanwhile) {
    unrolled<4>([](auto i) INFINI_INLINE { clear_tile<i>(); });
    unrolled<kBlock / 64>([&](auto i) INFINI_INLINE {
        multiply_64<Block, P, i>(chunk, q);
        meanwhile(i);
    });
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
    const vf scale = load(chunk.scales.scale), radix = splat(static_cast<float>(x.radix));
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
            const vf minimum = load(chunk.scales.minimum + g * kRows);
            const float* x_total = x.total_at(first + g / kSplit, row, g % kSplit, G);
            unrolled<R>([&](auto r) INFINI_INLINE { t[r] = fma(minimum, splat(x_total[r]), t[r]); });
        }
    unrolled<R>([&](auto r) INFINI_INLINE { store(total + r * kRows, t[r]); });
}

// total[panel][row][0:16]. While tiles multiply, what they made before is scaled.
template <class Block, int P, int R>
void add_whole_blocks(float* total, const uint8_t* packed, int num_panels, const Activations& x,
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
            add_sums<Block, P, R / 4>(total + (i * kPackedBandRows + r) * kRows, sums, from, chunks[i], x,
                                      first, first_row + r);
        };
        for (int64_t at = 0; at < count; ++at) {
            multiply_block<Block, P>(chunks[at % num_panels], x.q_at(first, first_row + at / num_panels * R),
                                     [&](int quarter) INFINI_INLINE {
                                         if (at > 0) add(at - 1, quarter);
                                     });
            unrolled<2>([&](auto i) INFINI_INLINE {
                store_tile<2 * i>(sums[i][0]);
                if constexpr (P == 2) store_tile<2 * i + 1>(sums[i][1]);
            });
        }
        for (int quarter = 0; quarter < 4; ++quarter) add(count - 1, quarter);
    }
    release_tiles();
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
