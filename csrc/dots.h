// Integer dot products of rounded activations (rounding.h) with 16 rows of weight side by side, in vector
// registers: tiles of several rows against a chunk of weight unpacked to bytes, and few rows against fields
// straight from memory.
#pragma once
#include "blocks.h"
#include "rounding.h"

// Ahead of register allocation, GCC's scheduler moves so many loads up that tiles of sums are spilled.
#if defined(__GNUC__) && !defined(__clang__)
#define INFINI_NOT_SCHEDULED __attribute__((optimize("no-schedule-insns")))
#else
#define INFINI_NOT_SCHEDULED
#endif

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kRows = kPackedRows;  // weight rows side by side
constexpr int kParts = kRows / W;   // vectors that hold a value for each of them

// ---- integer dot products of one row of x with 16 of weight -----------------------------------------------

typedef uint8_t vb __attribute__((vector_size(W * 4)));

// Four fields of each of the 16 rows
struct Quad {
    vb part[kParts];

    INFINI_INLINE explicit Quad(const uint8_t* p) {
        for (int i = 0; i < kParts; ++i) memcpy(&part[i], p + i * sizeof(vb), sizeof(vb));
    }

    // `bits` of each byte, from bit `shift` on
    template <int bits, int shift>
    INFINI_INLINE Quad field() const {
        constexpr uint8_t kMask = (1 << bits) - 1;
        Quad q = *this;
        for (int i = 0; i < kParts; ++i) {
            if constexpr (shift > 0) q.part[i] >>= shift;
            if constexpr (bits + shift < 8) q.part[i] &= kMask;
        }
        return q;
    }

    // The level that each byte numbers, moved up
    INFINI_INLINE void look_up(const int8_t (&levels)[16], uint8_t moved) {
        alignas(16) uint8_t table[16];
        for (int i = 0; i < 16; ++i) table[i] = static_cast<uint8_t>(levels[i] + moved);
#if defined(INFINI_NEON)
        for (int i = 0; i < kParts; ++i) part[i] = vqtbl1q_u8(vld1q_u8(table), part[i]);
#elif defined(INFINI_AVX512)
        const __m512i entries = _mm512_broadcast_i32x4(*reinterpret_cast<const __m128i*>(table));
        part[0] = (vb)_mm512_shuffle_epi8(entries, (__m512i)part[0]);
#elif defined(INFINI_AVX2)
        const __m256i entries = _mm256_broadcastsi128_si256(*reinterpret_cast<const __m128i*>(table));
        for (int i = 0; i < kParts; ++i) part[i] = (vb)_mm256_shuffle_epi8(entries, (__m256i)part[i]);
#else
        for (int i = 0; i < kParts; ++i)
            for (size_t j = 0; j < sizeof(vb); ++j) part[i][j] = table[part[i][j]];
#endif
    }

    // Each byte shifted so that its bit `from` becomes bit `to`
    template <int from, int to>
    INFINI_INLINE Quad moved() const {
        Quad q = *this;
        for (int i = 0; i < kParts; ++i) {
            if constexpr (from < to)
                q.part[i] <<= to - from;
            else
                q.part[i] >>= from - to;
        }
        return q;
    }

    // The bits of `mask` from another
    INFINI_INLINE void put_above(const Quad& upper, uint8_t mask) {
#if defined(INFINI_NEON)
        for (int i = 0; i < kParts; ++i) part[i] = vbslq_u8(vdupq_n_u8(mask), upper.part[i], part[i]);
#else
        for (int i = 0; i < kParts; ++i) part[i] |= upper.part[i] & mask;
#endif
    }
};

// 16 activations of a plane
struct Sixteen {
#if defined(INFINI_NEON)
    int8x16_t q;
    explicit Sixteen(const int8_t* p) : q(vld1q_s8(p)) {}
#else
    const int8_t* q;
    explicit Sixteen(const int8_t* p) : q(p) {}
#endif
};

// VNNI multiplies unsigned with signed bytes: signed fields are moved up by this much, and the sums back
// down.
#if defined(INFINI_AVX512)
constexpr int kBias = 128;
#else
constexpr int kBias = 0;
#endif

#if !defined(INFINI_NEON) && !defined(INFINI_AVX512) && !defined(INFINI_AVX2)
__attribute__((noinline)) void add_fours(vi* sums, const vb* fields, const int8_t* four) {
    int32_t sum[kRows];
    int8_t field[kRows * 4];
    memcpy(sum, sums, sizeof sum);
    memcpy(field, fields, sizeof field);
    for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < 4; ++j) sum[i] += field[4 * i + j] * four[j];
    memcpy(sums, sum, sizeof sum);
}
#endif

const vi kNothing = vi{} + kShiftBits;

struct Dots {
    vi part[kParts];

    INFINI_INLINE void start(int32_t first) {
        for (int i = 0; i < kParts; ++i) part[i] = vi{} + first;
    }

    // From nothing, for value(). On NEON a load: a copy of a register would take the place of a product.
    INFINI_INLINE void start() {
#if defined(INFINI_NEON)
        for (int i = 0; i < kParts; ++i) asm volatile("ldr %q0, %1" : "=w"(part[i]) : "m"(kNothing));
#else
        start(kShiftBits);
#endif
    }
    // Of small sums that began with kShiftBits
    INFINI_INLINE vf value(int i) const { return (vf)part[i] - kShift; }

    // Of the 16 activations, `quad` names four.
    template <int quad>
    INFINI_INLINE void add(std::integral_constant<int, quad>, const Quad& w, const Sixteen& x) {
#if defined(INFINI_NEON)
        for (int i = 0; i < kParts; ++i)
            part[i] = vdotq_laneq_s32(part[i], vreinterpretq_s8_u8(w.part[i]), x.q, quad);
#else
        int32_t four;
        memcpy(&four, x.q + 4 * quad, 4);
#if defined(INFINI_AVX512)
        part[0] = (vi)_mm512_dpbusd_epi32((__m512i)part[0], (__m512i)w.part[0], _mm512_set1_epi32(four));
#elif defined(INFINI_AVX2)
        // Unsigned times signed bytes, pairs added in 16 bits: 2 * 127 * 127 fits.
        const __m256i v = _mm256_set1_epi32(four);
        for (int i = 0; i < kParts; ++i) {
            const __m256i q = (__m256i)w.part[i];
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(v, q));
            part[i] += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        }
#else
        add_fours(part, w.part, x.q + 4 * quad);
#endif
#endif
    }
};

// The same with one plane of x or two
template <int P>
struct PlaneDots {
    Dots high, low;  // of one plane, the low one alone

    INFINI_INLINE void start() {
        if constexpr (P == 2) high.start();
        low.start();
    }

    // `offset` is what the fields stand above the integers they mean.
    INFINI_INLINE void start(int offset, const GroupSums<P>& sums, int32_t first = kShiftBits) {
        if constexpr (P == 2) high.start(first - offset * sums.plane[0]);
        low.start(first - offset * sums.plane[P - 1]);
    }

    // Planes are a span apart.
    template <int span = kGroup, class Quarter>
    INFINI_INLINE void add(Quarter quad, const Quad& w, const int8_t* q) {
        if constexpr (P == 2) high.add(quad, w, Sixteen(q));
        low.add(quad, w, Sixteen(q + (P - 1) * span));
    }

    INFINI_INLINE vf value(int i, int radix) const {
        if constexpr (P == 2) return fma(high.value(i), splat(static_cast<float>(radix)), low.value(i));
        return low.value(i);
    }
};

// What 16 weight rows have come to for one row of x
struct Totals {
    vf part[kParts];

    INFINI_INLINE void load_from(const float* y) {
        for (int i = 0; i < kParts; ++i) part[i] = load(y + i * W);
    }
    INFINI_INLINE void store_to(float* y) const {
        for (int i = 0; i < kParts; ++i) store(y + i * W, part[i]);
    }

    template <int P>
    INFINI_INLINE void add(const PlaneDots<P>& dots, const float* scale, float x_scale, int radix) {
        for (int i = 0; i < kParts; ++i)
            part[i] = fma(dots.value(i, radix), load(scale + i * W) * x_scale, part[i]);
    }
    INFINI_INLINE void add_minimum(const float* minimum, float x_total) {
        for (int i = 0; i < kParts; ++i) part[i] = fma(load(minimum + i * W), splat(x_total), part[i]);
    }
};

// ---- several rows of x, against a chunk of weight unpacked to bytes ---------------------------------------

template <class Block>
inline void prefetch(const uint8_t* packed) {
    for (int line = 0; line < Block::kBytes * kRows; line += 64)
        ask_for(packed + kPackedPrefetchBytes + line);
}

// The fields of a block of each of the 16 rows, moved up
template <class Block, int moved>
void read_fields(int8_t* q, const uint8_t* packed) {
    if constexpr (kIsFourBits<Block>) {
        constexpr int kHalf = Block::kRun / 2 * kRows;
        packed += Block::kData * kRows;
        for (int i = 0; i < Block::kElements / Block::kRun; ++i)
            four_bits<kHalf, moved>(q + 2 * kHalf * i, packed + kHalf * i);
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

template <int P>
struct RowOfTile {
    PlaneDots<P> dots;
    Totals totals;
};

// M rows of x: a list rather than an array, which GCC would keep in memory. each(f) calls f(row, its index).
template <class Row, int M>
struct Tile {
    Tile<Row, M - 1> rest;
    Row last;

    template <class F>
    INFINI_INLINE void each(F&& f) {
        rest.each(f);
        f(last, M - 1);
    }
};

template <class Row>
struct Tile<Row, 0> {
    template <class F>
    INFINI_INLINE void each(F&&) {}
};

// total[r][0:16] += the products of M rows of x from `row` on with a chunk of weight, whose first group of K
// is `first`
template <int P, int G, bool kHasMinimum, int M>
INFINI_NOT_SCHEDULED void add_tile(float* __restrict total, const Chunk<>& chunk, const Activations& x,
                                   int64_t first, int64_t num_groups, int64_t row) {
    const int64_t at = x.group_at(first, row), step = 1 << x.log_rows;
    const int radix = x.radix;
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
                    const Quad fields(w + 4 * kRows * quad);
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

// ---- few rows of x, against fields straight from memory ---------------------------------------------------

// What the fields of a type stand above the integers they mean, as Dots::add takes them
template <class Block>
constexpr int kOffset = kBias && Block::kIsSigned ? kBias : Block::kOffset;

// Four of the 16 elements `sixteenth` of a block
template <class Block, int sixteenth, int quad>
INFINI_INLINE inline Quad fields_at(const uint8_t* packed) {
    constexpr Place place = Block::place(sixteenth, quad);
    constexpr int kLow = Block::kLowBits;
    Quad w = Quad(packed + place.bytes * kRows).template field<kLow, place.shift>();
    if constexpr (Block::kBits > kLow) {
        const Quad upper(packed + place.upper * kRows);
        w.put_above(upper.template moved<place.bit, kLow>(), (1 << Block::kBits) - (1 << kLow));
    }
    if constexpr (kHasLevels<Block>)
        w.look_up(Block::kLevels, kBias);
    else if constexpr (kBias && Block::kIsSigned)
        for (int i = 0; i < kParts; ++i) w.part[i] ^= kBias;
    return w;
}

// total[r][0:16] += the products of M rows of x from `row` on with 16 of weight
template <class Block, int P, int M>
INFINI_INLINE inline void add_blocks_to_rows(float* total, const uint8_t* packed, const Activations& x,
                                             int64_t row) {
    constexpr int G = Block::kGroup, kGroups = Block::kElements / G,
                  kSplit = kGroup / G;  // groups to one of x
    constexpr int kSize = Block::kBytes * kRows, kLines = (kSize + 63) / 64,
                  kDistance = kPackedPrefetchBytes > kSize ? kPackedPrefetchBytes : kSize;
    const int64_t step = 1 << x.log_rows;
    Tile<RowOfTile<P>, M> tile;
    tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.load_from(total + m * kRows); });
    for (int64_t first = 0; first < x.num_groups; first += kGroups / kSplit, packed += kSize) {
        alignas(64) float scale[kGroups * kRows], minimum[kGroups * kRows];
        Block::template scales<kRows>(scale, minimum, packed);
        unrolled<kGroups>([&](auto g) INFINI_INLINE {
            // Bytes that groups share are read again: kept, they would push sums out of registers.
            if constexpr (kGroups > 1) asm volatile("" ::: "memory");
            for (int line = g * kLines / kGroups; line < (g + 1) * kLines / kGroups; ++line)
                ask_for(packed + kDistance + 64 * line);
            const int64_t at = x.group_at(first + g / kSplit, row);
            const int8_t* q = x.q + at * P * kGroup + g % kSplit * G;
            const int32_t* sums = x.sums_at(first + g / kSplit, row);
            const float* x_total = x.total_at(first + g / kSplit, row, g % kSplit, G);
            tile.each([&](auto& r, int m) INFINI_INLINE {
                r.dots.start(kOffset<Block>, GroupSums<P>(sums + m, step, g % kSplit, G));
            });
            unrolled<4>([&](auto quad) INFINI_INLINE {
                unrolled<G / 16>([&](auto i) INFINI_INLINE {
                    const Quad fields = fields_at<Block, g * G / 16 + i, quad>(packed);
                    tile.each([&](auto& r, int m)
                                  INFINI_INLINE { r.dots.add(quad, fields, q + m * P * kGroup + 16 * i); });
                });
            });
            tile.each([&](auto& r, int m) INFINI_INLINE {
                r.totals.add(r.dots, scale + g * kRows, x.scale[at + m], x.radix);
                if constexpr (Block::kHasMinimum) r.totals.add_minimum(minimum + g * kRows, x_total[m]);
            });
        });
    }
    tile.each([&](auto& r, int m) INFINI_INLINE { r.totals.store_to(total + m * kRows); });
}

// Of blocks of 256, too many loads would be moved up.
template <class Block, int P, int M>
INFINI_NOT_SCHEDULED void add_long_blocks_to_rows(float* total, const uint8_t* packed, const Activations& x,
                                                  int64_t row) {
    add_blocks_to_rows<Block, P, M>(total, packed, x, row);
}

// As many rows together as there are, up to M
template <class Block, int P, int M>
void add_few_rows(float* total, const uint8_t* packed, const Activations& x, int64_t row, int64_t num_rows) {
    for (; num_rows >= M; num_rows -= M, row += M, total += M * kRows) {
        if constexpr (Block::kElements > kGroup)
            add_long_blocks_to_rows<Block, P, M>(total, packed, x, row);
        else
            add_blocks_to_rows<Block, P, M>(total, packed, x, row);
    }
    if constexpr (M > 1) add_few_rows<Block, P, M - 1>(total, packed, x, row, num_rows);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
