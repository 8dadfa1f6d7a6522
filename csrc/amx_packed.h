// Integer dot products in AMX tile registers, a block of 8 or 16 rows of x with 16 of weight: what add_tiles
// of dots_chunk.h does, with the same bits. A tile sums 64 bytes of K at once, of which a group fills half.
// Where weights have four bits and activations 12, it holds both planes: [high | low] of x meets [16 w | w],
// whose product is the whole dot. 16 w fills a byte, a signed one or an unsigned one as w is.
// Few rows keep their totals in registers, from group to group (add_block). Of many rows, weights stay in
// tiles while x comes and goes (Passes).
#pragma once
#include "amx.h"
#include "dots_chunk.h"

namespace infini::INFINI_LEVEL {
namespace {

// What puts the bits of a byte into another order, in one instruction: bits[0] becomes the lowest, and so on;
// 8 is none.
constexpr uint64_t bit_matrix(const int (&bits)[8]) {
    uint64_t matrix = 0;
    for (int i = 0; i < 8; ++i)
        if (bits[i] < 8) matrix |= uint64_t{1} << (8 * (7 - i) + bits[i]);
    return matrix;
}

// The fields w of a block of each of the 16 rows, each group's 16 w and then its w, of the low halves of
// bytes and of the high ones. A half that stands for w + 8 has its highest bit turned, and w is filled up
// with it.
template <class Block>
void read_pairs(int8_t* __restrict q, const uint8_t* __restrict packed) {
    constexpr int kCount = kGroup * kRows, kHalf = Block::kRun / 2 * kRows;
    constexpr bool is_signed = Block::kOffset != 0;
    constexpr int kTurned = is_signed ? 128 : 0, kFilled = is_signed ? 248 : 0;
    constexpr int kLow = is_signed ? 3 : 8, kHigh = is_signed ? 7 : 8;
    const auto place = [](int element) { return element / kCount * 2 * kCount + element % kCount; };
    constexpr int kNext =
        kHalf < kCount ? kHalf : 2 * kCount;  // from the low fields of a run to the high ones
    packed += Block::kData * kRows;
    for (int run = 0; run < Block::kElements / Block::kRun; ++run, packed += kHalf) {
        int8_t* low = q + place(2 * kHalf * run);
        for (int i = 0; i < kHalf; i += 64) {
            const __m512i bytes = _mm512_loadu_si512(packed + i);
            const auto put = [&](int at, auto turned, uint64_t matrix) INFINI_INLINE {
                _mm512_store_si512(
                    low + at + i,
                    _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_set1_epi64(matrix), decltype(turned)::value));
            };
            constexpr std::integral_constant<int, kTurned> turned;
            constexpr std::integral_constant<int, kFilled> filled;
            put(0, turned, bit_matrix({8, 8, 8, 8, 0, 1, 2, 3}));
            put(kCount, filled, bit_matrix({0, 1, 2, 3, kLow, kLow, kLow, kLow}));
            put(kNext, turned, bit_matrix({8, 8, 8, 8, 4, 5, 6, 7}));
            put(kNext + kCount, filled, bit_matrix({4, 5, 6, 7, kHigh, kHigh, kHigh, kHigh}));
        }
    }
}

// A load waits for the stores before it whose addresses end in the same twelve bits, and these wait for their
// product. Groups of x and of weight, 1 KB each, and their dots lie a whole number of such places behind a
// page's begin: dots have as many, so that they need not lie as what is loaded next.
constexpr int64_t kPlaceBytes = sizeof(int32_t) * kRowBlock * kRows, kPlaces = kPage / kPlaceBytes;
using TileDots = int32_t[kRowBlock][kRows];

inline int64_t place_of(const void* p) { return reinterpret_cast<intptr_t>(p) / kPlaceBytes; }

// Dots of R rows of x with 16 of weight: both planes of x in a tile, or each in its own. Of the weight's type
// matters whether it has minimums, and whether its bytes have signs.
template <bool kHasMinimum, bool is_unsigned, int P, int R, int kCopies>
struct Tiles {
    static constexpr int kPlanes = P / kCopies;  // whose dots come apart
    static constexpr Terms kTerms = is_unsigned ? Terms::unsigned_bytes : Terms::bytes;
    static constexpr int64_t kGroupBytes = R * P * kGroup, kWeightBytes = kCopies * kGroup * kRows;
    static_assert(kPlanes == 1 || !is_unsigned);

    template <int x>
    static INFINI_INLINE void load_x(const int8_t* q) {
        load_tile<x>(q, P * kGroup);
        if constexpr (kPlanes == 2) load_tile<x + 1>(q + kGroup, P * kGroup);
    }

    template <int sum, int x, int weight>
    static INFINI_INLINE void multiply() {
        unrolled<kPlanes>([](auto plane) INFINI_INLINE {
            clear_tile<sum + plane>();
            add_product<sum + plane, x + plane, weight, kTerms>();
        });
    }

    template <int sum>
    static INFINI_INLINE void leave(TileDots* to) {
        unrolled<kPlanes>([&](auto plane) INFINI_INLINE { store_tile<sum + plane>(to[plane]); });
    }

    // t[0:N] += the dots of N rows from the first one on, scaled, and their minimums
    template <int N, int first>
    static INFINI_INLINE void scale(vf* t, const TileDots* dots, vf w_scale, vf minimum, const float* x_scale,
                                    const float* x_total) {
        unrolled<N>([&](auto i) INFINI_INLINE {
            constexpr int r = first + i;
            const __m512i high = _mm512_load_si512(dots[0][r]),
                          dot = kPlanes == 2 ? _mm512_add_epi32(times_256(high),
                                                                _mm512_load_si512(dots[kPlanes - 1][r]))
                                             : high;
            t[i] = fma((vf)_mm512_cvtepi32_ps(dot), w_scale * x_scale[r], t[i]);
            if (kHasMinimum) t[i] = fma(minimum, splat(x_total[r]), t[i]);
        });
    }

    // total[0:R][0:16] += the products with a chunk of one panel. Tiles 0 to 3 take products, 4 and 5 have x,
    // 6 and 7 weights.
    static void add_block(float* total, const Chunk<kCopies>& chunk, const Activations& x, int64_t first,
                          int64_t num_groups, int64_t row) {
        const int64_t at = x.group_at(first, row);
        alignas(kPage) TileDots dots[kPlaces];
        const int8_t *q = x.q + at * P * kGroup, *w = chunk.q;
        // Dots of group g do not lie as weights of g + 2 and g + 3, which are loaded after those are stored;
        // nor as those groups of x, but where x lies two groups off, which leaves one of them.
        const int64_t apart = (place_of(q) - place_of(w)) & (kPlaces - 1), shift = apart == 1 || apart == 2;
        const auto dots_of = [&](int64_t g) INFINI_INLINE { return dots + (g + shift) * kPlanes % kPlaces; };
        vf t[R];
        unrolled<R>([&](auto r) INFINI_INLINE { t[r] = load(total + r * kRows); });
        const auto multiply_group = [&](auto odd, int64_t g) INFINI_INLINE {
            load_tile<6 + odd>(w + g * kWeightBytes);
            load_x<4>(q + g * kGroupBytes);
            multiply<2 * odd, 4, 6 + odd>();
        };
        const auto scale_group = [&](int64_t g) INFINI_INLINE {
            scale<R, 0>(t, dots_of(g), load(chunk.scale + g * kRows), load(chunk.minimum + g * kRows),
                        x.scale + at + g * R, x.total_at(first + g, row, 0, kGroup));
        };
        constexpr std::integral_constant<int, 0> even;
        constexpr std::integral_constant<int, 1> odd;
        const int64_t last = num_groups - 1;
        // What is made leaves its tile register two groups later, and takes a while to arrive: others are
        // scaled.
        multiply_group(even, 0);
        if (last > 0) multiply_group(odd, 1);
        leave<0>(dots_of(0));
        for (int64_t g = 0; g <= last; g += 2) {
            if (g + 2 <= last) multiply_group(even, g + 2);
            scale_group(g);
            if (g < last) leave<2>(dots_of(g + 1));
            if (g + 3 <= last) multiply_group(odd, g + 3);
            if (g < last) scale_group(g + 1);
            if (g + 2 <= last) leave<0>(dots_of(g + 2));
        }
        unrolled<R>([&](auto r) INFINI_INLINE { store(total + r * kRows, t[r]); });
    }
};

constexpr int kWeightTiles = 4;     // stay while rows of x come and go: of one panel, or of two side by side
constexpr int64_t kPassRows = 128;  // of x, whose totals are near, meet these before the next ones do

// The same of many rows. Tiles 0 and 1 take products, 2 and 3 have x, 4 to 7 weights. Where a core is shared,
// every instruction counts: what belongs to a pass is worked out before its rows.
template <bool kHasMinimum, bool is_unsigned, int P, int R, int kCopies>
class Passes : Tiles<kHasMinimum, is_unsigned, P, R, kCopies> {
    using T = Tiles<kHasMinimum, is_unsigned, P, R, kCopies>;
    static constexpr int kPlanes = T::kPlanes, kHeld = kWeightTiles * kPlanes;  // dots of R rows
    static constexpr int kBehind = 2 / kPlanes;  // tiles until products leave their registers

public:
    Passes(float* total, const Chunk<kCopies>* chunks, const Activations& x, int64_t first, int64_t first_row,
           int64_t num_rows)
        : total_(total), chunks_(chunks), x_(x), first_(first), first_row_(first_row), num_rows_(num_rows) {}

    // total[panel][row][0:16] += the products with `count` panels
    template <int count>
    void run(int64_t num_groups) {
        const int64_t last = run<count, kWeightTiles / count>(0, num_groups);
        if constexpr (count == 1)
            run<1, 1>(run<1, 2>(last, num_groups), num_groups);
        else
            run<count, 1>(last, num_groups);
    }

private:
    // As many whole times G groups as there are; returns where it stopped. Tile j is for the j / count-th of
    // these groups and panel j % count.
    template <int count, int G>
    int64_t run(int64_t group, int64_t num_groups) {
        for (; group + G <= num_groups; group += G) {
            unrolled<count * G>([&](auto tile) INFINI_INLINE {
                load_tile<4 + tile>(chunks_[tile % count].q + (group + tile / count) * T::kWeightBytes);
            });
            pass<count, G>(group);
        }
        return group;
    }

    // While tiles multiply, what they made of the rows before is scaled.
    template <int count, int G>
    __attribute__((noinline)) void pass(int64_t group) {
        constexpr int kTiles = count * G, kLast = kBehind < kTiles ? kBehind : kTiles;
        const int64_t at = x_.group_at(first_ + group, first_row_), step = x_.num_groups;
        const int8_t* q = x_.q + at * P * kGroup;
        const float *x_scale = x_.scale + at, *x_total = x_.total_at(first_ + group, first_row_, 0, kGroup);
        float* total = total_;
        TileDots *dots[kTiles], *now = dots_, *before = dots_ + kHeld;
        for (int tile = 0; tile < kTiles; ++tile)
            dots[tile] = now + (place_of(q) / kPlanes + tile) % kWeightTiles * kPlanes;
        const auto leave = [&](auto tile) INFINI_INLINE {
            T::template leave<tile * kPlanes % 2>(dots[tile] + (now - dots_));
        };
        const auto multiply_all = [&](auto&& meanwhile) INFINI_INLINE {
            unrolled<kTiles>([&](auto tile) INFINI_INLINE {
                if constexpr (tile >= kBehind) leave(std::integral_constant<int, tile - kBehind>());
                constexpr int kX = kPlanes == 2 ? 2 : 2 + tile / count % 2;
                if constexpr (tile % count == 0) T::template load_x<kX>(q + tile / count * T::kGroupBytes);
                T::template multiply<tile * kPlanes % 2, kX, 4 + tile>();
                meanwhile(tile);
            });
            unrolled<kLast>([&](auto i)
                                INFINI_INLINE { leave(std::integral_constant<int, kTiles - kLast + i>()); });
        };
        const auto scale_before = [&](auto tile) INFINI_INLINE {
            scale<count, G, tile / G, tile % G>(total, dots, before - dots_, group, x_scale, x_total);
        };
        multiply_all([](auto) {});
        for (int64_t row = R; row < num_rows_; row += R) {
            q += step * T::kGroupBytes, std::swap(now, before);
            multiply_all(scale_before);
            x_scale += step * R, x_total += step * kTotals * R, total += R * kRows;
        }
        std::swap(now, before);
        unrolled<kTiles>(scale_before);
    }

    // The part-th R / G rows of a panel, whose dots are `held` behind their places
    template <int count, int G, int panel, int part>
    INFINI_INLINE void scale(float* total, TileDots* const* dots, int64_t held, int64_t group,
                             const float* x_scale, const float* x_total) const {
        constexpr int N = R / G, kFirst = part * N;
        const Chunk<kCopies>& chunk = chunks_[panel];
        total += (panel * kPackedBandRows + kFirst) * kRows;
        vf t[N];
        unrolled<N>([&](auto r) INFINI_INLINE { t[r] = load(total + r * kRows); });
        unrolled<G>([&](auto g) INFINI_INLINE {
            const int64_t at = (group + g) * kRows;
            T::template scale<N, kFirst>(t, dots[g * count + panel] + held, load(chunk.scale + at),
                                         load(chunk.minimum + at), x_scale + g * R,
                                         x_total + g * kTotals * R);
        });
        unrolled<N>([&](auto r) INFINI_INLINE { store(total + r * kRows, t[r]); });
    }

    float* const total_;
    const Chunk<kCopies>* const chunks_;
    const Activations& x_;
    const int64_t first_, first_row_, num_rows_;
    alignas(kPage) TileDots dots_[2 * kHeld];
};

// Planes whose dots come apart are bytes of a 16-bit number.
template <class Block, int P>
bool suits_tiles(const Activations& x) {
    return P == 1 || x.radix == 256 || kIsFourBits<Block> || kIsWhole<Block, P>;
}

// Whether so many rows pass by weights: it takes a while to begin.
template <int kPlanes, int R>
constexpr bool is_passed(int64_t num_rows) {
    return R == kRowBlock && num_rows >= kPassedRows<kPlanes>;
}

// total[panel][row][0:16] += the products with a chunk of one panel, or of two that rows pass by
template <bool kHasMinimum, bool is_unsigned, int P, int R, int kCopies>
void add_chunks(float* total, const Chunk<kCopies>* chunks, int num_panels, const Activations& x,
                int64_t first, int64_t num_groups, int64_t first_row, int64_t num_rows) {
    static_assert(kPackedPanels == 2);
    if (!is_passed<P / kCopies, R>(num_rows)) {
        for (int64_t r = 0; r < num_rows; r += R)
            Tiles<kHasMinimum, is_unsigned, P, R, kCopies>::add_block(total + r * kRows, *chunks, x, first,
                                                                      num_groups, first_row + r);
        return;
    }
    for (int64_t r = 0; r < num_rows; r += kPassRows) {
        Passes<kHasMinimum, is_unsigned, P, R, kCopies> passes(
            total + r * kRows, chunks, x, first, first_row + r, smaller(kPassRows, num_rows - r));
        num_panels == 2 ? passes.template run<2>(num_groups) : passes.template run<1>(num_groups);
    }
}

// total[panel][row][0:16] of `together` panels at a time. Few rows meet one: what was read of it is near.
template <class Block, int P, int R, int kCopies>
void add_panels(float* total, const uint8_t* packed, int num_panels, const Activations& x, int64_t first_row,
                int64_t num_rows) {
    constexpr bool is_unsigned = kCopies == 2 && Block::kOffset == 0;
    const bool are_passed = is_passed<P / kCopies, R>(num_rows);
    const int together = are_passed ? num_panels : 1;
    Chunk<kCopies> chunks[kPackedPanels];
    const int64_t row_length = x.num_groups * kGroup,
                  panel_bytes = row_length / Block::kElements * Block::kBytes * kRows;
    configure_tiles(TileConfig(R, kCopies * kGroup, are_passed ? 2 : 4));
    for (int panel = 0; panel < num_panels; panel += together)
        for_chunks<Block>(
            row_length, packed + panel * panel_bytes, [&](const uint8_t* p, int64_t k, int64_t length) {
                for (int i = 0; i < together; ++i)
                    if constexpr (kCopies == 2)
                        chunks[i].template read<Block, read_pairs<Block>>(p + i * panel_bytes, length);
                    else
                        chunks[i].template read<Block, read_fields<Block, -Block::kOffset>>(
                            p + i * panel_bytes, length);
                add_chunks<Block::kHasMinimum, is_unsigned, P, R>(total + panel * kPackedBandRows * kRows,
                                                                  chunks, together, x, k / kGroup,
                                                                  length / kGroup, first_row, num_rows);
            });
    release_tiles();
}

template <class Block, int P, int R>
void add_blocks(float* total, const uint8_t* packed, int num_panels, const Activations& x, int64_t first_row,
                int64_t num_rows) {
    constexpr int kCopies = kIsFourBits<Block> && P == 2 ? 2 : 1;
    if (kCopies == 2 && x.radix == 16)
        add_panels<Block, P, R, kCopies>(total, packed, num_panels, x, first_row, num_rows);
    else
        add_panels<Block, P, R, 1>(total, packed, num_panels, x, first_row, num_rows);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
