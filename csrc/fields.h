// How the bytes of blocks are read: scales in half precision, and fields of one to eight bits, of one row or
// of R rows side by side.
#pragma once
#include "linear.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {

struct Field {
    int bytes, piece;
    bool is_transposed = false;
};

// Where four elements of a block are, the quad of sixteen, for kernels that take them straight from memory:
// the bytes with their low bits, and by how much these are shifted up; then, where fields have more bits than
// those, the bytes with the upper ones, and the lowest of these.
struct Place { int bytes, shift = 0, upper = 0, bit = 0; };

// Packed integers of four bits share a byte with another of their row. On Arm, whose vectors have four rows,
// those of Q4_0 share it with that of row r + 8 at the same column, in the upper half and less 8: a byte as
// it is then stands for 16 times the one and once the other, so that few rows of x need not have them apart
// (dots_direct.h). Types with a minimum gain little by that.
#if defined(__aarch64__)
constexpr bool kHalvesAreRows = true;
#else
constexpr bool kHalvesAreRows = false;
#endif

inline float half(const uint8_t* p) {
    f16 lanes[W] = {};
    memcpy(lanes, p, sizeof(f16));
#if defined(INFINI_NEON)
    __fp16 value;
    memcpy(&value, lanes, sizeof value);
    return value;
#elif defined(INFINI_AVX512) || defined(INFINI_AVX2)
    return _cvtsh_ss(lanes[0].bits);
#else
    return load(lanes)[0];
#endif
}

template <int R>
inline void halves(float* y, const uint8_t* p) {
    if constexpr (R % W == 0)
        for (int r = 0; r < R; r += W) store(y + r, load(reinterpret_cast<const f16*>(p) + r));
    else
        for (int r = 0; r < R; ++r) y[r] = half(p + 2 * r);
}

// y[r] = factor[r] * bytes[r], where factors are float16, whose products with seven bits are exact
template <int R, bool kIsSigned>
INFINI_INLINE inline void scaled_bytes(float* __restrict y, const int8_t* __restrict bytes,
                                       const float* __restrict factor) {
#if defined(INFINI_NEON)
    // A byte below the exponent of 2^23 is 2^23 and the byte: faster than NEON's own conversion.
    if constexpr (R == 16) {
        const uint8x16_t all =
            veorq_u8(vreinterpretq_u8_s8(vld1q_s8(bytes)), vdupq_n_u8(kIsSigned ? 128 : 0));
        for (int i = 0; i < R; i += 4) {
            const uint32x4_t places =
                uint32x4_t{0x10ffff00u, 0x10ffff01u, 0x10ffff02u, 0x10ffff03u} + static_cast<uint32_t>(i);
            const vf raised = (vf)vqtbl2q_u8({all, vdupq_n_u8(0x4b)}, vreinterpretq_u8_u32(places));
            const vf f = load(factor + i);
            store(y + i, kIsSigned ? f * (raised - (0x1p23f + 128)) : fma(raised, f, f * -0x1p23f));
        }
        return;
    }
#endif
    for (int r = 0; r < R; ++r) y[r] = factor[r] * static_cast<float>(bytes[r]);
}

// ---- fields: of N bytes at p each, the low ones first -----------------------------------------------------

template <int... I, class F>
INFINI_INLINE inline void unrolled(std::integer_sequence<int, I...>, F&& f) {
    (f(std::integral_constant<int, I>{}), ...);
}

// f(0), f(1) … f(N - 1) with the number known to the compiler
template <int N, class F>
INFINI_INLINE inline void unrolled(F&& f) {
    unrolled(std::make_integer_sequence<int, N>{}, f);
}

// v shifted so that its bit `from` becomes bit `to`
template <int from, int to>
inline int moved(uint8_t v) {
    return from < to ? v << (to - from) : v >> (from - to);
}

template <int N, int moved = 0>
inline void four_bits(int8_t* __restrict q, const uint8_t* __restrict p) {
    for (int i = 0; i < N; ++i) {
        q[i] = static_cast<int8_t>((p[i] & 15) + moved);
        q[N + i] = static_cast<int8_t>((p[i] >> 4) + moved);
    }
}

// Where the halves of bytes are rows: of 8 rows, moved up, then of the other 8
template <int N, int moved>
inline void halves_of_rows(int8_t* __restrict q, const uint8_t* __restrict p) {
    for (int i = 0; i < N; ++i) {
        q[i] = static_cast<int8_t>((p[i] & 15) + moved);
        q[N + i] = static_cast<int8_t>(p[i]) >> 4;
    }
}

template <int N>
inline void two_bits(int8_t* __restrict q, const uint8_t* __restrict p) {
    for (int i = 0; i < N; ++i)
        for (int field = 0; field < 4; ++field) q[N * field + i] = p[i] >> 2 * field & 3;
}

// Four bits and a fifth one from `high`: bit `low_bit` of a byte for the low fields, `high_bit` for the high
// ones
template <int N, int low_bit, int high_bit>
inline void five_bits(int8_t* __restrict low, int8_t* __restrict up, const uint8_t* __restrict p,
                      const uint8_t* __restrict high) {
    for (int i = 0; i < N; ++i) {
        low[i] = static_cast<int8_t>((p[i] & 15) | (moved<low_bit, 4>(high[i]) & 16));
        up[i] = static_cast<int8_t>((p[i] >> 4) | (moved<high_bit, 4>(high[i]) & 16));
    }
}

// The 32 elements of Q5_0 and Q5_1, whose 4 bytes of fifth bits have element 0 lowest. Packed, byte i of a
// row's four has the bits of elements i, i + 4 … i + 28 (transposed_bits).
template <int R>
inline void five_bits_of_32(int8_t* __restrict q, const uint8_t* __restrict p,
                            const uint8_t* __restrict high) {
    if constexpr (R == 1) {
        alignas(16) int8_t sixteens[32];
        for (int i = 0; i < 4; ++i) {
            // A copy of the byte for each of its bits, each copy keeping its own bit: 16 where that is set
            const uint64_t own_bits = high[i] * 0x0101010101010101u & 0x8040201008040201u;
            const uint64_t spread = ((own_bits + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
            memcpy(sixteens + 8 * i, &spread, 8);
        }
        four_bits<16>(q, p);
        for (int i = 0; i < 32; ++i) q[i] |= sixteens[i];
    } else {
        unrolled<4>([&](auto j) {
            five_bits<4 * R, j, j + 4>(q + 4 * R * j, q + 4 * R * (j + 4), p + 4 * R * j, high);
        });
    }
}

// q[i] = table[q[i]], in place
inline void look_up(int8_t* q, int count, const int8_t (&table)[16]) {
#if defined(INFINI_NEON)
    for (int i = 0; i < count; i += 16)
        vst1q_s8(q + i, vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(vld1q_s8(q + i))));
#elif defined(INFINI_AVX512) || defined(INFINI_AVX2)
    const __m256i entries = _mm256_broadcastsi128_si256(*reinterpret_cast<const __m128i*>(table));
    for (int i = 0; i < count; i += 32) {
        __m256i* at = reinterpret_cast<__m256i*>(q + i);
        _mm256_storeu_si256(at, _mm256_shuffle_epi8(entries, _mm256_loadu_si256(at)));
    }
#else
    for (int i = 0; i < count; ++i) q[i] = table[q[i]];
#endif
}

}  // namespace infini::INFINI_LEVEL
