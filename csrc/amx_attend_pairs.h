// Values of bfloat16 in pairs, which are words, as AMX tile registers multiply them, for amx_attention.cpp
#pragma once
#include "amx_bf16.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kTileWords = kSide * kSide;
constexpr int kTogether = 4;  // tiles of sums in registers

// ---- tiles ------------------------------------------------------------------------------------------------

// After half a microsecond without products the tiles' multiplier sleeps, and takes as long again to wake: in
// what takes longer, it is given one that nobody needs.
INFINI_INLINE inline void stay_awake() { add_product<3, 4, 6, Terms::pairs>(); }

// ---- words of two values ----------------------------------------------------------------------------------

// Sixteen keys, [of D / 2][key], while as much of `ahead` is asked for
void pair_keys(uint32_t* to, const bf16* keys, int64_t stride, int64_t dim, const bf16* ahead) {
    alignas(64) static constexpr auto kOrder = [] {
        struct { uint16_t at[kLine]; } order{};
        for (int i = 0; i < kLine; ++i) order.at[i] = static_cast<uint16_t>(i % 2 * kSide + i / 2);
        return order;
    }();
    const __m512i order = _mm512_load_si512(kOrder.at);
    const auto row = [&](int64_t d) INFINI_INLINE {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + d * stride));
    };
    for (int64_t d = 0; d < dim; d += 2) {
        ask_for(ahead + d * kSide);
        const __m512i rows = stride == kSide
                                 ? _mm512_loadu_si512(keys + d * kSide)
                                 : _mm512_inserti64x4(_mm512_castsi256_si512(row(d)), row(d + 1), 1);
        _mm512_store_si512(to + d / 2 * kSide, _mm512_permutexvar_epi16(order, rows));
    }
}

// Two values, or zeros in place of one that is not there. Columns come in another order: place_of says where.
void pair_values(uint32_t* to, const bf16* a, const bf16* b, int64_t dim, const bf16* ahead_a,
                 const bf16* ahead_b) {
    for (int64_t i = 0; i < dim; i += kLine) {
        ask_for(ahead_a + i), ask_for(ahead_b + i);
        const __m512i below = a ? _mm512_loadu_si512(a + i) : __m512i{},
                      above = b ? _mm512_loadu_si512(b + i) : __m512i{};
        _mm512_store_si512(to + i, _mm512_unpacklo_epi16(below, above));
        _mm512_store_si512(to + i + kSide, _mm512_unpackhi_epi16(below, above));
    }
}

inline int64_t place_of(int64_t column) {
    return column / kLine * kLine + column / 4 % 2 * kSide + column % kLine / 8 * 4 + column % 4;
}

// 32 columns from where pair_values has put them
INFINI_INLINE inline void reorder(float* to, const float* from) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
                  second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const vf low = load(from), high = load(from + kSide);
    store(to, _mm512_permutex2var_ps(low, first, high));
    store(to + kSide, _mm512_permutex2var_ps(low, second, high));
}

// Zero in place of what is not finite
void leave_out_infinite(uint32_t* words, int64_t count) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int64_t i = 0; i < count; i += kSide) {
        const __m512i w = _mm512_load_si512(words + i);
        const __mmask32 is_finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(w, exponent), exponent);
        _mm512_store_si512(words + i, _mm512_maskz_mov_epi16(is_finite, w));
    }
}

// The upper halves of two vectors, lane by lane: one below the other
INFINI_INLINE inline __m512i paired(vf below, vf above) {
    constexpr __mmask64 kLowerHalves = 0x3333333333333333;
    return _mm512_mask_shuffle_epi8((__m512i)above, kLowerHalves, (__m512i)below,
                                    _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302));
}

// To bfloat16, as float32
INFINI_INLINE inline vf rounded(vf v) { return as_float((as_bits(v) + 0x8000u) & 0xffff0000u); }

// ---- products ---------------------------------------------------------------------------------------------

// Tiles of words: bytes from row to row, words to the next tile on the right and to the one below
struct Words {
    const uint32_t* data;
    int64_t row_bytes, right, below;
};

// Tiles of sums, side by side
struct Sums {
    float* data;
    int64_t row_bytes;
};

template <int N>
INFINI_INLINE inline void clear_sums() {
    unrolled<N>([](auto i) INFINI_INLINE { clear_tile<i>(); });
}

template <int N>
INFINI_INLINE inline void store_sums(Sums to) {
    unrolled<N>([&](auto i) INFINI_INLINE { store_tile<i>(to.data + i * kSide, to.row_bytes); });
}

// N tiles of sums, with a tile a and N tiles of words from p on to the right
template <int N>
INFINI_INLINE inline void add_tiles(const uint32_t* a, const Words& words, const uint32_t* p) {
    load_tile<4>(a);
    unrolled<N>([&](auto i) INFINI_INLINE {
        load_tile<6 + i % 2>(p + i * words.right, words.row_bytes);
        add_product<i, 4, 6 + i % 2, Terms::pairs>();
    });
}

// N tiles of sums: of `depth` tiles a with as many rows of tiles of words
template <int N>
void multiply(Sums to, const uint32_t* a, const Words& words, int64_t depth) {
    clear_sums<N>();
    for (int64_t k = 0; k < depth; ++k) add_tiles<N>(a + k * kTileWords, words, words.data + k * words.below);
    store_sums<N>(to);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
