// Integer dot products of rounded activations (rounding.h) with 16 rows of weight side by side, in vector
// registers
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

typedef uint8_t vb __attribute__((vector_size(W * 4)));

// Four fields of each of the 16 rows, or of those that the first N vectors hold
template <int N = kParts>
struct Quad {
    vb part[N];

    INFINI_INLINE explicit Quad(const uint8_t* p) {
        for (int i = 0; i < N; ++i) memcpy(&part[i], p + i * sizeof(vb), sizeof(vb));
    }

    INFINI_INLINE Quad(const Quad<N / 2>& first, const Quad<N / 2>& last) {
        for (int i = 0; i < N; ++i) part[i] = i < N / 2 ? first.part[i] : last.part[i - N / 2];
    }

    // `bits` of each byte, from bit `shift` on
    template <int bits, int shift>
    INFINI_INLINE Quad field() const {
        constexpr uint8_t kMask = (1 << bits) - 1;
        Quad q = *this;
        for (int i = 0; i < N; ++i) {
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
        for (int i = 0; i < N; ++i) part[i] = vqtbl1q_u8(vld1q_u8(table), part[i]);
#elif defined(INFINI_AVX512)
        const __m512i entries = _mm512_broadcast_i32x4(*reinterpret_cast<const __m128i*>(table));
        part[0] = (vb)_mm512_shuffle_epi8(entries, (__m512i)part[0]);
#elif defined(INFINI_AVX2)
        const __m256i entries = _mm256_broadcastsi128_si256(*reinterpret_cast<const __m128i*>(table));
        for (int i = 0; i < N; ++i) part[i] = (vb)_mm256_shuffle_epi8(entries, (__m256i)part[i]);
#else
        for (int i = 0; i < N; ++i)
            for (size_t j = 0; j < sizeof(vb); ++j) part[i][j] = table[part[i][j]];
#endif
    }

    // Each byte shifted so that its bit `from` becomes bit `to`
    template <int from, int to>
    INFINI_INLINE Quad moved() const {
        Quad q = *this;
        for (int i = 0; i < N; ++i) {
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
        for (int i = 0; i < N; ++i) part[i] = vbslq_u8(vdupq_n_u8(mask), upper.part[i], part[i]);
#else
        for (int i = 0; i < N; ++i) part[i] |= upper.part[i] & mask;
#endif
    }
};

// Those of a few panels, each `apart` bytes from the one before
template <int kPanels>
INFINI_INLINE inline Quad<kPanels * kParts> quads(const uint8_t* p, int64_t apart) {
    if constexpr (kPanels == 1)
        return Quad<kParts>(p);
    else
        return {quads<kPanels / 2>(p, apart), quads<kPanels / 2>(p + kPanels / 2 * apart, apart)};
}

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

// What the fields of a type stand above the integers they mean, as Dots::add takes them
template <class Block>
constexpr int kOffset = kBias && Block::kIsSigned ? kBias : Block::kOffset;

// How many pairs of products AVX2 adds up in 16 bits; 0: fields have signs, or it is not AVX2
#if defined(INFINI_AVX2)
constexpr int kMostInShorts = 4;
static_assert(kMostInShorts * 2 * 127 * 31 < 1 << 15 && kMostInShorts / 2 * 2 * 127 * 63 < 1 << 15);
#else
constexpr int kMostInShorts = 0;
#endif
template <class Block>
constexpr int kInShorts = Block::kIsSigned ? 0 : kMostInShorts / (Block::kBits <= 5 ? 1 : 2);

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

template <int N = kParts, int kInShorts = 0>
struct Dots {
    vi part[N];
#if defined(INFINI_AVX2)
    __m256i shorts[N];
#endif

    INFINI_INLINE void start(int32_t first) {
        for (int i = 0; i < N; ++i) part[i] = vi{} + first;
    }

    // From nothing, for value(). On NEON a load: a copy of a register would take the place of a product.
    INFINI_INLINE void start() {
#if defined(INFINI_NEON)
        for (int i = 0; i < N; ++i) asm volatile("ldr %q0, %1" : "=w"(part[i]) : "m"(kNothing));
#else
        start(kShiftBits);
#endif
    }
    // Of small sums that began with kShiftBits
    INFINI_INLINE vf value(int i) const { return (vf)part[i] - kShift; }

#if defined(INFINI_I8MM)
    // Of 8 columns: two rows of weight a vector, and two of x
    INFINI_INLINE void add_pairs(const int8_t* w, int8x16_t x) {
        for (int i = 0; i < N; ++i) part[i] = vmmlaq_s32(part[i], vld1q_s8(w + 16 * i), x);
    }
#endif

    // Of the 16 activations, `quad` names four, which are added after `turn` others.
    template <int quad, int turn>
    INFINI_INLINE void add(std::integral_constant<int, quad>, std::integral_constant<int, turn>,
                           const Quad<N>& w, const Sixteen& x) {
#if defined(INFINI_NEON)
        for (int i = 0; i < N; ++i)
            part[i] = vdotq_laneq_s32(part[i], vreinterpretq_s8_u8(w.part[i]), x.q, quad);
#else
        int32_t four;
        memcpy(&four, x.q + 4 * quad, 4);
#if defined(INFINI_AVX512)
        const __m512i v = _mm512_set1_epi32(four);
        for (int i = 0; i < N; ++i)
            part[i] = (vi)_mm512_dpbusd_epi32((__m512i)part[i], (__m512i)w.part[i], v);
#elif defined(INFINI_AVX2)
        // Unsigned times signed bytes, pairs added in 16 bits
        const __m256i v = _mm256_set1_epi32(four);
        for (int i = 0; i < N; ++i) {
            const __m256i q = (__m256i)w.part[i];
            if constexpr (kInShorts == 0) {
                shorts[i] = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(v, q));
            } else {
                const __m256i pairs = _mm256_maddubs_epi16(q, v);
                shorts[i] = turn % kInShorts == 0 ? pairs : _mm256_add_epi16(shorts[i], pairs);
            }
            if (kInShorts == 0 || turn % kInShorts == kInShorts - 1)
                part[i] += (vi)_mm256_madd_epi16(shorts[i], _mm256_set1_epi16(1));
        }
#else
        add_fours(part, w.part, x.q + 4 * quad);
#endif
#endif
    }
};

// What joins two planes whose sums began with kShiftBits: value * (high - kShift) + low - kShift, where the
// low one's kShift goes with the high one's, exactly
struct Radix {
    float value, shift;
    explicit Radix(int radix) : value(static_cast<float>(radix)), shift(kShift + kShift / value) {}
};

// The same with one plane of x or two
template <int P, int N = kParts, int kInShorts = 0>
struct PlaneDots {
    Dots<N, kInShorts> high, low;  // of one plane, the low one alone

    INFINI_INLINE void start() {
        if constexpr (P == 2) high.start();
        low.start();
    }

    // `offset` is what the fields stand above the integers they mean.
    INFINI_INLINE void start(int offset, const GroupSums<P>& sums, int32_t first = kShiftBits) {
        if constexpr (P == 2) high.start(first - offset * sums.plane[0]);
        low.start(first - offset * sums.plane[P - 1]);
    }

    // `first` is a row's start of each plane, which are `apart`.
    INFINI_INLINE void start_from(const int32_t* first, int64_t apart) {
        if constexpr (P == 2) high.start(first[0]);
        low.start(first[(P - 1) * apart]);
    }

    // Planes are a span apart.
    template <int span = kGroup, class Quarter, class Turn>
    INFINI_INLINE void add(Quarter quad, Turn turn, const Quad<N>& w, const int8_t* q) {
        if constexpr (P == 2) high.add(quad, turn, w, Sixteen(q));
        low.add(quad, turn, w, Sixteen(q + (P - 1) * span));
    }

    INFINI_INLINE vf value(int i, Radix radix) const {
        if constexpr (P == 1) return low.value(i);
        return fma((vf)high.part[i] - radix.shift, splat(radix.value), (vf)low.part[i]);
    }

    // Of 16 times a row's fields and those of the row 8 before: the former alone, exactly
    INFINI_INLINE vf upper_value(int i, Radix radix) const {
        vf sixteen = (vf)low.part[i] - (vf)low.part[i - N / 2];
        if constexpr (P == 2)
            sixteen = fma((vf)high.part[i] - (vf)high.part[i - N / 2], splat(radix.value), sixteen);
        return sixteen * (1 / 16.0f);
    }
};

// What the rows of weight of some panels have come to for one row of x. Where panels have their own arrays,
// these are `apart` floats from one another.
template <int kPanels = 1>
struct Totals {
    vf part[kPanels * kParts];

    static INFINI_INLINE int64_t place(int i, int64_t apart) {
        if constexpr (kPanels == 1)
            return i * W;  // GCC unrolls nothing longer in time to keep parts in registers
        return i / kParts * apart + i % kParts * W;
    }

    INFINI_INLINE void load_from(const float* y, int64_t apart = 0) {
        for (int i = 0; i < kPanels * kParts; ++i) part[i] = load(y + place(i, apart));
    }
    INFINI_INLINE void store_to(float* y, int64_t apart = 0) const {
        for (int i = 0; i < kPanels * kParts; ++i) store(y + place(i, apart), part[i]);
    }

    // To those from part `first` on
    template <int P, int N, int kInShorts>
    INFINI_INLINE void add(const PlaneDots<P, N, kInShorts>& dots, const float* scale, float x_scale,
                           Radix radix, int first = 0, int64_t apart = 0) {
        for (int i = 0; i < N; ++i)
            part[first + i] =
                fma(dots.value(i, radix), load(scale + place(first + i, apart)) * x_scale, part[first + i]);
    }
    // The same of dots with bytes that hold two rows (fields_at)
    template <int P>
    INFINI_INLINE void add_joined(const PlaneDots<P>& dots, const float* scale, float x_scale, Radix radix) {
        for (int i = 0; i < kParts; ++i)
            part[i] = fma(2 * i < kParts ? dots.value(i, radix) : dots.upper_value(i, radix),
                          load(scale + i * W) * x_scale, part[i]);
    }
    INFINI_INLINE void add_minimum(const float* minimum, float x_total, int64_t apart = 0) {
        for (int i = 0; i < kPanels * kParts; ++i)
            part[i] = fma(load(minimum + place(i, apart)), splat(x_total), part[i]);
    }
};

template <int P, int kInShorts, int N = kParts, int kPanels = 1>
struct RowOfTile {
    PlaneDots<P, N, kInShorts> dots;
    Totals<kPanels> totals;
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

// Asks for weight that is read some time after `packed`, past a block of kSize bytes.
template <int kSize>
INFINI_INLINE inline void ask_ahead(const uint8_t* packed) {
    if constexpr (kPagesInTurn)
        ask_in_turn(packed);
    else
        ask_for(packed + (kPackedPrefetchBytes > kSize ? kPackedPrefetchBytes : kSize));
}

// Asks for a later block of each of the 16 rows.
template <class Block>
inline void prefetch(const uint8_t* packed) {
    for (int line = 0; line < Block::kBytes * kRows; line += 64)
        ask_for(packed + kPackedPrefetchBytes + line);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
