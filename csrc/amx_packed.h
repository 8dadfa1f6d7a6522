// Integer dot products in AMX tile registers, a block of 8 or 16 rows of x with 16 of weight: what add_tiles
// of dots_chunk.h does, with the same bits. A tile sums 64 bytes of K at once, of which a group fills half.
// Where weights have four bits and activations 12, it holds both planes: [high | low] of x meets [16 w | w],
// whose product is the whole dot. 16 w fills a byte, a signed one or an unsigned one as w is.
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

// `how` is tdpbssd, or tdpbsud where the bytes of weight are unsigned
#define INFINI_MULTIPLY(how, weight, x, product, p)                                                      \
    asm volatile("tilezero %%tmm" #product "\n tileloadd (%0,%1,1), %%tmm" #x "\n " how " %%tmm" #weight \
                 ", %%tmm" #x ", %%tmm" #product::"r"(p),                                                \
                 "r"(stride)                                                                             \
                 : "memory")

// The dots of a group, in one of two slots of tile registers. Rows of x are `stride` bytes apart, their
// second plane follows the first.
template <int slot, int kPlanes, bool is_unsigned, int64_t stride>
INFINI_INLINE inline void multiply_group(const int8_t* w, const int8_t* q) {
    static_assert(kPlanes == 1 || !is_unsigned);
    if constexpr (slot == 0) {
        INFINI_LOAD(6, w);
        if constexpr (is_unsigned)
            INFINI_MULTIPLY("tdpbsud", 6, 4, 0, q);
        else
            INFINI_MULTIPLY("tdpbssd", 6, 4, 0, q);
        if constexpr (kPlanes == 2) INFINI_MULTIPLY("tdpbssd", 6, 5, 1, q + kGroup);
    } else {
        INFINI_LOAD(7, w);
        if constexpr (is_unsigned)
            INFINI_MULTIPLY("tdpbsud", 7, 4, 2, q);
        else
            INFINI_MULTIPLY("tdpbssd", 7, 4, 2, q);
        if constexpr (kPlanes == 2) INFINI_MULTIPLY("tdpbssd", 7, 5, 3, q + kGroup);
    }
}

// A load waits for the stores before it whose addresses end in the same twelve bits, and these wait for their
// product. Groups of x and of weight, 1 KB each, lie a whole number of groups behind a page's begin. So do
// the dots of group g, and never as weights of g + 2 and g + 3 do, which are loaded after those are stored;
// nor as those groups of x, but where x lies two groups off, which leaves one of them.
constexpr int64_t kGroupBytes = sizeof(int32_t) * kRowBlock * kRows, kPlaces = kPage / kGroupBytes;

inline int64_t first_place(const int8_t* x, const int8_t* w) {
    const int64_t apart = (x - w) / kGroupBytes % kPlaces;
    return apart == 1 || apart == 2 || apart == 1 - kPlaces || apart == 2 - kPlaces;
}

template <int slot, int kPlanes>
INFINI_INLINE inline void store_group(int32_t (*dots)[kRowBlock][kRows]) {
    if constexpr (slot == 0) {
        INFINI_STORE(0, dots[0]);
        if constexpr (kPlanes == 2) INFINI_STORE(1, dots[1]);
    } else {
        INFINI_STORE(2, dots[0]);
        if constexpr (kPlanes == 2) INFINI_STORE(3, dots[1]);
    }
}

// total[0:R][0:16] += the products of R rows of x with a chunk of weight; of its type matters whether it has
// minimums, and whether its bytes have signs. kCopies is 2 where tiles hold both planes.
template <bool kHasMinimum, bool is_unsigned, int P, int R, int kCopies>
void add_block(float* total, const Chunk<kCopies>& chunk, const Activations& x, int64_t first,
               int64_t num_groups, int64_t row) {
    constexpr int kPlanes = P / kCopies;  // whose dots come apart
    const int64_t at = x.group_at(first, row);
    alignas(kPage) int32_t dots[kPlaces][kRowBlock][kRows];
    const int64_t shift = first_place(x.q + at * P * kGroup, chunk.q);
    const auto dots_of = [&](int64_t g) INFINI_INLINE { return dots + (g + shift) * kPlanes % kPlaces; };
    vf t[R];
    unrolled<R>([&](auto r) INFINI_INLINE { t[r] = load(total + r * kRows); });
    const auto multiply = [&](auto slot, int64_t g) INFINI_INLINE {
        const int8_t* q = x.q + (at + g * R) * P * kGroup;
        multiply_group<slot, kPlanes, is_unsigned, P * kGroup>(chunk.q + g * kCopies * kGroup * kRows, q);
    };
    const auto scale = [&](int64_t g) INFINI_INLINE {
        const auto found = dots_of(g);
        const float* x_scale = x.scale + at + g * R;
        const vf w_scale = load(chunk.scale + g * kRows), minimum = load(chunk.minimum + g * kRows);
        const float* x_total = x.total_at(first + g, row, 0, kGroup);
        unrolled<R>([&](auto r) INFINI_INLINE {
            const __m512i high = _mm512_load_si512(found[0][r]),
                          dot = kPlanes == 2 ? _mm512_add_epi32(times_256(high),
                                                                _mm512_load_si512(found[kPlanes - 1][r]))
                                             : high;
            t[r] = fma((vf)_mm512_cvtepi32_ps(dot), w_scale * x_scale[r], t[r]);
            if (kHasMinimum) t[r] = fma(minimum, splat(x_total[r]), t[r]);
        });
    };
    constexpr std::integral_constant<int, 0> even;
    constexpr std::integral_constant<int, 1> odd;
    const int64_t last = num_groups - 1;
    // What is made leaves its tile register two groups later, and takes a while to arrive: others are scaled.
    const auto leave = [&](auto slot, int64_t g) INFINI_INLINE { store_group<slot, kPlanes>(dots_of(g)); };
    multiply(even, 0);
    if (last > 0) multiply(odd, 1);
    leave(even, 0);
    for (int64_t g = 0; g <= last; g += 2) {
        if (g + 2 <= last) multiply(even, g + 2);
        scale(g);
        if (g < last) leave(odd, g + 1);
        if (g + 3 <= last) multiply(odd, g + 3);
        if (g < last) scale(g + 1);
        if (g + 2 <= last) leave(even, g + 2);
    }
    unrolled<R>([&](auto r) INFINI_INLINE { store(total + r * kRows, t[r]); });
}

// Planes whose dots come apart are bytes of a 16-bit number.
template <class Block, int P>
bool suits_tiles(const Activations& x) {
    return P == 1 || x.radix == 256 || kIsFourBits<Block> || kIsWhole<Block, P>;
}

// total[panel][row][0:16], panels of `band` rows
template <class Block, int P, int R, int kCopies>
void add_blocks(float* total, int64_t band, const uint8_t* packed, int num_panels, const Activations& x,
                int64_t first_row, int64_t num_rows) {
    constexpr bool is_unsigned = kCopies == 2 && Block::kOffset == 0;
    Chunk<kCopies> chunks[kPackedPanels];
    const int64_t row_length = x.num_groups * kGroup,
                  panel_bytes = row_length / Block::kElements * Block::kBytes * kRows;
    configure_tiles(TileConfig(R, kCopies * kGroup));
    for_chunks<Block>(row_length, packed, [&](const uint8_t* p, int64_t k, int64_t length) {
        for (int i = 0; i < num_panels; ++i)
            if constexpr (kCopies == 2)
                chunks[i].template read<Block, read_pairs<Block>>(p + i * panel_bytes, length);
            else
                chunks[i].template read<Block, read_fields<Block, -Block::kOffset>>(p + i * panel_bytes,
                                                                                    length);
        for (int64_t r = 0; r < num_rows; r += R)
            for (int i = 0; i < num_panels; ++i)
                add_block<Block::kHasMinimum, is_unsigned, P, R>(total + (i * band + r) * kRows, chunks[i], x,
                                                                 k / kGroup, length / kGroup, first_row + r);
    });
    release_tiles();
}

// Of many rows each block meets several panels while it is near. Few rows meet one: what was read of it is.
template <class Block, int P, int R>
void add_blocks(float* total, int64_t band, const uint8_t* packed, int num_panels, const Activations& x,
                int64_t first_row, int64_t num_rows) {
    const int together = num_rows <= kPackedNearRows ? 1 : num_panels;
    const int64_t panel_bytes = x.num_groups * kGroup / Block::kElements * Block::kBytes * kRows;
    for (int i = 0; i < num_panels;
         i += together, total += together * band * kRows, packed += together * panel_bytes)
        if (kIsFourBits<Block> && P == 2 && x.radix == 16)
            add_blocks<Block, P, R, kIsFourBits<Block> && P == 2 ? 2 : 1>(total, band, packed, together, x,
                                                                          first_row, num_rows);
        else
            add_blocks<Block, P, R, 1>(total, band, packed, together, x, first_row, num_rows);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
