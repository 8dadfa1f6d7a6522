// Blocks of 256 as whole numbers (dots_whole.h), against several rows of x in 16 bits: fields are multiplied
// by the whole scales of their groups when they are unpacked, and an instruction adds two products of 16 bits
// to each of 16 sums.
#pragma once
#include "dots_chunk.h"
#include "dots_whole.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kShortRowBytes = 2 * kWholeSpan;    // of a span of x
constexpr int kShortSteps = kBlock / kWholeSpan;  // of a tile

// A block of each of the 16 rows, times its whole scales
template <class Block>
struct ShortChunk {
    alignas(64) int16_t w[kBlock * kRows];  // [K / 4][even and odd ones][16][2]
    WholeScales<Block> scales;

    __attribute__((noinline)) void read(const uint8_t* packed) {
        scales.read(packed);
        unrolled<kBlock / 16>([&](auto i) INFINI_INLINE {
            const __m512i scale = in_pairs(scales.of_group(i * 16 / Block::kGroup));
            unrolled<4>([&](auto quad) INFINI_INLINE {
                put(w + (4 * i + quad) * 4 * kRows, (__m512i)fields_at<Block, i, quad>(packed).part[0],
                    scale);
            });
        });
    }

    // 64 fields, which stand above the integers they mean
    static INFINI_INLINE void put(int16_t* to, __m512i fields, __m512i scale) {
        const __m512i offset = _mm512_set1_epi16(kOffset<Block>);
        const auto put_two = [&](int16_t* to, __m512i two) INFINI_INLINE {
            if constexpr (kOffset<Block> != 0) two = _mm512_sub_epi16(two, offset);
            _mm512_store_si512(to, _mm512_mullo_epi16(two, scale));
        };
        put_two(to, _mm512_and_si512(fields, _mm512_set1_epi16(0xff)));
        put_two(to + 2 * kRows, _mm512_srli_epi16(fields, 8));
    }
};

// What 16 rows of each of N panels have come to for a row of x
template <int N>
struct ShortRow {
    __m512i sums[N];  // of a span
    Totals<N> totals;

    INFINI_INLINE void start() {
        for (int i = 0; i < N; ++i) sums[i] = _mm512_setzero_si512();
    }
    INFINI_INLINE void add(const __m512i (&w)[N], const int8_t* q) {
        int32_t two;
        memcpy(&two, q, 4);
        const __m512i v = _mm512_set1_epi32(two);
        // By its name: of the intrinsic GCC 12 makes a copy of each sum, which takes a product's place.
        for (int i = 0; i < N; ++i) asm("vpdpwssd %2, %1, %0" : "+v"(sums[i]) : "v"(w[i]), "v"(v));
    }
    INFINI_INLINE void add_sums(const float* scale, float x_scale, int64_t apart) {
        for (int i = 0; i < N; ++i)
            totals.part[i] =
                fma((vf)_mm512_cvtepi32_ps(sums[i]), load(scale + i * apart) * x_scale, totals.part[i]);
    }
};

// total[panel][m][0:16] += the products of M rows of x, from `row` on, with a block of N panels
template <class Block, int M, int N>
INFINI_NOT_SCHEDULED void add_short_tile(float* __restrict total, const ShortChunk<Block>* __restrict chunks,
                                         const Activations& x, int64_t first, int64_t row, Asked<N> asked) {
    constexpr int G = Block::kGroup, kSplit = kGroup / G;  // groups of weight to one of totals
    constexpr int64_t kApart = sizeof(ShortChunk<Block>) / sizeof(float);
    const int64_t step = 1 << x.log_rows, at = x.at(first, row);
    const int8_t* __restrict q = x.q + at * kShortRowBytes;
    const float* __restrict x_scale = x.scale + at;
    Tile<ShortRow<N>, M> tile;
    tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.load_from(total + m * kRows, kTotalsApart); });
    for (int span = 0; span < kShortSteps; ++span, q += step * kShortRowBytes, x_scale += step) {
        asked.ask();
        tile.each([](auto& r, int) INFINI_INLINE { r.start(); });
        for (int k = 0; k < kWholeSpan; k += 8)
            unrolled<4>([&](auto two) INFINI_INLINE {
                const int64_t place = span * kWholeSpan + k + 2 * two;
                __m512i w[N];
                for (int i = 0; i < N; ++i) w[i] = _mm512_load_si512(chunks[i].w + place * kRows);
                tile.each([&](auto& r, int m)
                              INFINI_INLINE { r.add(w, q + m * kShortRowBytes + 2 * k + 4 * two); });
            });
        tile.each([&](auto& r, int m)
                      INFINI_INLINE { r.add_sums(chunks->scales.scale, x_scale[m], kApart); });
    }
    for (int g = 0; Block::kHasMinimum && g < kBlock / G; ++g) {
        const float* x_total = x.total_at(first + g / kSplit, row, g % kSplit, G);
        tile.each([&](auto& r, int m) INFINI_INLINE {
            r.totals.add_minimum(chunks->scales.minimum + g * kRows, x_total[m], kApart);
        });
    }
    tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.store_to(total + m * kRows, kTotalsApart); });
}

// The same of all rows from `r` on, M at a time
template <class Block, int M, int N>
void add_short_rows(float* total, const ShortChunk<Block>* chunks, const Activations& x, int64_t first,
                    int64_t first_row, int64_t r, int64_t num_rows, const Next& next, int panel) {
    for (; r + M <= num_rows; r += M)
        add_short_tile<Block, M, N>(total + r * kRows, chunks, x, first, first_row + r,
                                    Asked<N>(next, panel, r, kShortTileRows));
    if constexpr (M > 1)
        add_short_rows<Block, M / 2, N>(total, chunks, x, first, first_row, r, num_rows, next, panel);
}

// total[panel][row][0:16] of a strip
template <class Block>
void multiply_shorts(float* total, const uint8_t* packed, int num_panels, const Activations& x,
                     int64_t first_row, int64_t num_rows) {
    ShortChunk<Block> chunks[kPackedPanels];
    const int64_t size = Block::kBytes * kRows, num_tiles = (num_rows + kShortTileRows - 1) / kShortTileRows;
    Next next;
    next.panel_bytes = x.num_groups * kGroup / kBlock * size, next.num_steps = kShortSteps;
    for (int i = 0; i < num_panels; ++i)
        memset(total + i * kTotalsApart, 0, num_rows * kRows * sizeof(float));
    for (int64_t first = 0; first < x.num_groups; first += kBlock / kGroup, packed += size) {
        for (int i = 0; i < num_panels; ++i) chunks[i].read(packed + i * next.panel_bytes);
        const bool is_last = first + kBlock / kGroup == x.num_groups;
        next.plan(packed + size + (is_last ? (num_panels - 1) * next.panel_bytes : 0), size, num_tiles);
        const auto add = [&](auto count, int i) {
            add_short_rows<Block, kShortTileRows, count>(total + i * kTotalsApart, chunks + i, x, first,
                                                         first_row, 0, num_rows, next, i);
        };
        int i = 0;
        for (; i + kTilePanels <= num_panels; i += kTilePanels)
            add(std::integral_constant<int, kTilePanels>(), i);
        for (; i < num_panels; ++i) add(std::integral_constant<int, 1>(), i);
    }
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
