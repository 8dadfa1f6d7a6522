// What products of bfloat16 in AMX tile registers share
#pragma once
#include "amx.h"
#include "fields.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kSide = 16;  // rows, lines or pairs of a tile
constexpr int kLine = 32;  // values in 64 bytes

// Tile registers know no numbers below 2^-126. While one of these stands,
// vectors take them for zero, too.
struct FlushToZero {
    const unsigned before = _mm_getcsr();
    FlushToZero() { _mm_setcsr(before | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before); }
};

// Of N rows of 32-bit values: in each 16 bytes, four rows to columns
template <int N>
INFINI_INLINE inline void interleave(__m512i* u, const __m512i* v) {
    __m512i t[N];
    unrolled<N / 2>([&](auto i) INFINI_INLINE {
        t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    });
    unrolled<N / 4>([&](auto i) INFINI_INLINE {
        unrolled<2>([&](auto j) INFINI_INLINE {
            u[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            u[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        });
    });
}

// 16 rows of 16 values of 32 bits: rows to columns
INFINI_INLINE inline void transpose(__m512i* v) {
    __m512i u[16];
    interleave<16>(u, v);
    unrolled<4>([&](auto j) INFINI_INLINE {
        const __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88),
                      b = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd),
                      d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
        v[j] = _mm512_shuffle_i32x4(a, b, 0x88), v[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
        v[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88), v[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
    });
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
