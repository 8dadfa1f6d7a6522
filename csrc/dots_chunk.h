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
    } else if constexpr (Block::kBits == 8) {
        packed += Block::place(0, 0).bytes * kRows;
        for (int i = 0; i < Block::kElements * kRows; ++i) q[i] = static_cast<int8_t>(packed[i] + moved);
    } else {
        Block::template fields<kRows>(q, packed);
        if (moved)
            for (int i = 0; i < Block::kElements * kRows; ++i) q[i] = static_cast<int8_t>(q[i] + moved);
    }
}

template <int kCopies = 1>  // of each field
struct Chunk {
    alignas(kCopies == 2 ? kPage : 64) int8_t q[kCopies * kPackedChunkElements * kRows];  // [K / 4][16][4]
    alignas(64) float scale[kPackedChunkElements],
        minimum[kPackedChunkElements];  // [groups][16], groups of 16 or 32

    // fields(q, packed) writes those of a block. Not inlined: it is the same for all that multiply the chunk.
    template <class Block, void (*fields)(int8_t*, const uint8_t*), bool asks = true>
    __attribute__((noinline)) void read(const uint8_t* packed, int64_t length) {
        constexpr int kGroups = Block::kElements / Block::kGroup;
        for (int64_t b = 0; b < length / Block::kElements; ++b, packed += Block::kBytes * kRows) {
            if constexpr (asks) prefetch<Block>(packed);
            fields(q + b * kCopies * Block::kElements * kRows, packed);
            Block::template scales<kRows>(scale + b * kGroups * kRows, minimum + b * kGroups * kRows, packed);
        }
    }
};

// body(packed, first of K, length) for the chunks of a panel whose rows have any, as few and as equal as
// can be
template <class Block, class Body>
inline void for_chunks(int64_t row_length, const uint8_t* packed, Body&& body) {
    constexpr int64_t kBlocks = kPackedChunkElements / Block::kElements;
    const int64_t num_blocks = row_length / Block::kElements, count = (num_blocks + kBlocks - 1) / kBlocks;
    const int64_t each = (num_blocks + count - 1) / count * Block::kElements;
    for (int64_t k = 0; k < row_length; k += each, packed += each / Block::kElements * Block::kBytes * kRows)
        body(packed, k, smaller(each, row_length - k));
}

// What fields of a chunk stand above the integers they mean, where products want fields without signs
constexpr bool kChunksHaveOffsets = kBias || kMostInShorts;
template <class Block>
constexpr int kChunkOffset = kChunksHaveOffsets ? kOffset<Block> : 0;

// What the sums of planes begin with, so that they come out as if fields stood for their integers
template <int P, int G>
struct Starts {
    static constexpr int kOfGroup = P * kGroup / G;  // of a row
    alignas(64) int32_t of[kPackedBandRows * kPackedChunkElements / kGroup * kOfGroup];

    // [block][group][half][plane][row], of the groups of a chunk. Rows that fill up a block have any sums,
    // which may overflow.
    void read(uint32_t offset, const Activations& x, int64_t first, int64_t num_groups, int64_t first_row,
              int64_t num_rows) {
        int32_t* to = of;
        const auto read_block = [&](auto step, int64_t row) INFINI_INLINE {
            const int32_t* sums = x.sums_at(first, row);
            for (int64_t g = 0; g < num_groups; ++g, sums += P * kSums * step)
                for (int half = 0; half < kGroup / G; ++half)
                    for (int plane = 0; plane < P; ++plane, to += step)
                        for (int r = 0; r < step; ++r) {
                            const int32_t* sum = sums + (plane * kSums + half) * step + r;
                            const uint32_t rest = G == kGroup ? sum[step] : 0;
                            to[r] = static_cast<int32_t>(kShiftBits - offset * (sum[0] + rest));
                        }
        };
        const int step = 1 << x.log_rows;
        for (int64_t row = first_row; row < first_row + num_rows; row += step)
            if (step == kRowBlock)
                read_block(std::integral_constant<int, kRowBlock>(), row);
            else if (step == kRowBlock / 2)
                read_block(std::integral_constant<int, kRowBlock / 2>(), row);
            else
                read_block(step, row);
    }

    // That of a row, counted from the first one, in its first group
    const int32_t* at(const Activations& x, int64_t num_groups, int64_t row) const {
        const int64_t block = row >> x.log_rows, inside = row & ((1 << x.log_rows) - 1);
        return of + (block * num_groups * kOfGroup << x.log_rows) + inside;
    }
};

// Floats between the panels of a strip: of what they come to, and of their chunks
constexpr int64_t kTotalsApart = kPackedBandRows * kRows, kChunksApart = sizeof(Chunk<>) / sizeof(float);

// What is read next of the first panel of a strip, and how many of its lines a tile asks for at each of its
// steps: all at once would take as long as they take to come
struct Next {
    const uint8_t* at = nullptr;
    int64_t panel_bytes = 0, num_steps = 0;
    int num_lines = 0, lines_at_once = 0;

    void plan(const uint8_t* packed, int64_t bytes, int64_t num_tiles) {
        at = packed;
        num_lines = static_cast<int>((bytes + 63) / 64);
        const int64_t all_steps = num_tiles * num_steps;
        lines_at_once = static_cast<int>((num_lines + all_steps - 1) / all_steps);
    }
};

// The lines that a tile of `count` panels asks for, and none twice
template <int count>
struct Asked {
    const uint8_t *at, *end;
    int64_t panel_bytes;
    int lines_at_once;

    // Of rows from `r` on; a last, small tile is beside another one
    Asked(const Next& next, int panel, int64_t r, int tile_rows)
        : at(next.at + panel * next.panel_bytes), end(at + 64 * next.num_lines),
          panel_bytes(next.panel_bytes), lines_at_once(r % tile_rows == 0 ? next.lines_at_once : 0) {
        at += 64 * (r / tile_rows) * next.num_steps * lines_at_once;
    }

    INFINI_INLINE void ask() {
        for (int i = 0; i < lines_at_once && at < end; ++i, at += 64)
            for (int panel = 0; panel < count; ++panel) ask_for(at + panel * panel_bytes);
    }
};

// A chunk of each panel of a strip, for a band of rows of x
template <int P, int G>
struct StripChunk {
    Chunk<> panel[kPackedPanels];
    int num_panels;
    Starts<P, G> starts;
    int64_t first, num_groups;  // of K
    Next next;

    template <class Block>
    void read(const uint8_t* packed, int64_t k, int64_t length, const Activations& x, int64_t first_row,
              int64_t num_rows) {
        constexpr int kAbove = kChunkOffset<Block>;
        for (int i = 0; i < num_panels; ++i)
            panel[i].template read<Block, read_fields<Block, kAbove - Block::kOffset>, !kTilesAsk>(
                packed + i * next.panel_bytes, length);
        first = k / kGroup, num_groups = length / kGroup;
        if constexpr (kChunksHaveOffsets) starts.read(kAbove, x, first, num_groups, first_row, num_rows);
        if constexpr (!kTilesAsk) return;
        const int64_t bytes = length / Block::kElements * Block::kBytes * kRows;
        const bool is_last = first + num_groups == x.num_groups;
        next.num_steps = num_groups;
        next.plan(packed + bytes + (is_last ? (num_panels - 1) * next.panel_bytes : 0), bytes,
                  (num_rows + kPackedTileRows<P> - 1) / kPackedTileRows<P>);
    }
};

// total[panel][r][0:16] += the products of M rows of the band, from `r` on, with `count` panels; the first
// chunk of K finds nothing there
template <int P, int G, bool kHasMinimum, int kInShorts, int M, int count>
INFINI_NOT_SCHEDULED void add_tile(float* __restrict total, const StripChunk<P, G>& strip, int panel,
                                   const Activations& x, int64_t first_row, int64_t r) {
    constexpr int N = count * kParts;
    const Chunk<>& chunk = strip.panel[panel];
    const int64_t row = first_row + r, at = x.group_at(strip.first, row), step = 1 << x.log_rows;
    const Radix radix(x.radix);
    const uint8_t* __restrict w = reinterpret_cast<const uint8_t*>(chunk.q);
    const int8_t* __restrict q = x.q + at * P * kGroup;
    const int32_t* __restrict start = strip.starts.at(x, strip.num_groups, r);
    const float* __restrict x_scale = x.scale + at;
    const float* __restrict x_total = x.total_at(strip.first, row, 0, kGroup);
    const float* __restrict scale = chunk.scale, * __restrict minimum = chunk.minimum;
    Asked<count> asked(strip.next, panel, r, kPackedTileRows<P>);
    Tile<RowOfTile<P, kInShorts, N, count>, M> tile;
    if (strip.first == 0)
        tile.each([](auto& t, int) INFINI_INLINE { t.totals = {}; });
    else
        tile.each([&](auto& t, int m) INFINI_INLINE { t.totals.load_from(total + m * kRows, kTotalsApart); });
    for (int64_t g = 0; g < strip.num_groups;
         ++g, q += step * P * kGroup, x_scale += step, x_total += step * kTotals) {
        if constexpr (kTilesAsk) asked.ask();
        for (int half = 0; half < kGroup / G; ++half, scale += kRows, minimum += kRows, start += P * step) {
            tile.each([&](auto& t, int m) INFINI_INLINE {
                if constexpr (kChunksHaveOffsets)
                    t.dots.start_from(start + m, step);
                else
                    t.dots.start();
            });
            for (int k = half * G; k < half * G + G; k += 16, w += 16 * kRows)
                unrolled<4>([&](auto quad) INFINI_INLINE {
                    const Quad<N> fields = quads<count>(w + 4 * kRows * quad, sizeof(Chunk<>));
                    tile.each([&](auto& t, int m)
                                  INFINI_INLINE { t.dots.add(quad, quad, fields, q + m * P * kGroup + k); });
                });
            tile.each([&](auto& t, int m) INFINI_INLINE {
                t.totals.add(t.dots, scale, x_scale[m], radix, 0, kChunksApart);
                if (kHasMinimum)
                    t.totals.add_minimum(minimum, x_total[(G == kGroup ? 0 : 1 + half) * step + m],
                                         kChunksApart);
            });
        }
    }
    tile.each([&](auto& t, int m) INFINI_INLINE { t.totals.store_to(total + m * kRows, kTotalsApart); });
}

// The same of all panels and the rest of num_rows rows, M at a time, which meet one tile of weight after the
// other while they are near
template <int P, int G, bool kHasMinimum, int kInShorts, int M>
void add_tiles(float* total, const StripChunk<P, G>& strip, const Activations& x, int64_t first_row,
               int64_t r, int64_t num_rows) {
    for (; r + M <= num_rows; r += M) {
        const auto add = [&](auto count, int i) {
            add_tile<P, G, kHasMinimum, kInShorts, M, count>(total + i * kTotalsApart + r * kRows, strip, i,
                                                             x, first_row, r);
        };
        int i = 0;
        for (; i + kTilePanels <= strip.num_panels; i += kTilePanels)
            add(std::integral_constant<int, kTilePanels>(), i);
        for (; i < strip.num_panels; ++i) add(std::integral_constant<int, 1>(), i);
    }
    if constexpr (M > 1)
        add_tiles<P, G, kHasMinimum, kInShorts, M / 2>(total, strip, x, first_row, r, num_rows);
}

// total[panel][row][0:16] of a strip
template <class Block, int P>
void multiply_rows(float* total, const uint8_t* packed, int num_panels, const Activations& x,
                   int64_t first_row, int64_t num_rows) {
    constexpr int G = Block::kGroup;
    const int64_t row_length = x.num_groups * kGroup;
    StripChunk<P, G> strip;
    strip.num_panels = num_panels;
    strip.next.panel_bytes = row_length / Block::kElements * Block::kBytes * kRows;
    for_chunks<Block>(row_length, packed, [&](const uint8_t* p, int64_t k, int64_t length) {
        strip.template read<Block>(p, k, length, x, first_row, num_rows);
        add_tiles<P, G, Block::kHasMinimum, kInShorts<Block>, kPackedTileRows<P>>(total, strip, x, first_row,
                                                                                  0, num_rows);
    });
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
