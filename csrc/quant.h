// What the blocks of GGUF's weight types mean: value = scale * q, or scale * q + minimum, with one scale (and
// minimum) for each group of a block. `fields` reads the integers q of a block, `scales` what multiplies and
// shifts each group; float32 operations stand in ggml's order, so every value has the bits ggml gives it.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {

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

// 16 bytes of two halves: the low ones are elements 0-15, the high ones 16-31
inline void nibbles(int8_t* __restrict q, const uint8_t* __restrict packed, int offset = 0) {
    for (int i = 0; i < 16; ++i) q[i] = static_cast<int8_t>((packed[i] & 15) - offset);
    for (int i = 0; i < 16; ++i) q[16 + i] = static_cast<int8_t>((packed[i] >> 4) - offset);
}

// As nibbles, with a fifth bit for each element in 4 bytes, element 0 lowest
inline void five_bits(int8_t* __restrict q, const uint8_t* __restrict high, const uint8_t* __restrict packed, int offset) {
    alignas(16) int8_t sixteens[32];
    for (int i = 0; i < 4; ++i) {
        // A copy of the byte for each of its bits, each copy keeping its own bit: 16 where that is set
        const uint64_t own_bits = high[i] * 0x0101010101010101u & 0x8040201008040201u;
        const uint64_t spread = ((own_bits + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
        memcpy(sixteens + 8 * i, &spread, 8);
    }
    nibbles(q, packed, offset);
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(q[i] + sixteens[i]);
}

// q[i] = table[index[i]], 16 of 16
inline void look_up(int8_t* q, const int8_t* table, const int8_t* index) {
#if defined(INFINI_NEON)
    vst1q_s8(q, vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(vld1q_s8(index))));
#elif defined(INFINI_AVX512) || defined(INFINI_AVX2)
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    const __m128i found = _mm_shuffle_epi8(entries, _mm_loadu_si128(reinterpret_cast<const __m128i*>(index)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), found);
#else
    for (int i = 0; i < 16; ++i) q[i] = table[index[i]];
#endif
}

struct Q4_0 {  // scale f16 | 16 bytes of nibbles; value = scale * (q - 8)
    static constexpr int kElements = 32, kBytes = 18, kGroup = 32;
    static constexpr bool kHasMinimum = false;
    static void fields(int8_t* q, const uint8_t* block) { nibbles(q, block + 2, 8); }
    static void scales(float* scale, float*, const uint8_t* block) { scale[0] = half(block); }
};

struct Q4_1 {  // scale f16 | minimum f16 | 16 bytes of nibbles; value = scale * q + minimum
    static constexpr int kElements = 32, kBytes = 20, kGroup = 32;
    static constexpr bool kHasMinimum = true;
    static void fields(int8_t* q, const uint8_t* block) { nibbles(q, block + 4); }
    static void scales(float* scale, float* minimum, const uint8_t* block) {
        scale[0] = half(block);
        minimum[0] = half(block + 2);
    }
};

struct Q5_0 {  // scale f16 | 4 bytes of fifth bits | 16 bytes of nibbles; value = scale * (q - 16)
    static constexpr int kElements = 32, kBytes = 22, kGroup = 32;
    static constexpr bool kHasMinimum = false;
    static void fields(int8_t* q, const uint8_t* block) { five_bits(q, block + 2, block + 6, 16); }
    static void scales(float* scale, float*, const uint8_t* block) { scale[0] = half(block); }
};

struct Q5_1 {  // scale f16 | minimum f16 | 4 bytes of fifth bits | 16 bytes of nibbles; value = scale * q + minimum
    static constexpr int kElements = 32, kBytes = 24, kGroup = 32;
    static constexpr bool kHasMinimum = true;
    static void fields(int8_t* q, const uint8_t* block) { five_bits(q, block + 4, block + 8, 0); }
    static void scales(float* scale, float* minimum, const uint8_t* block) { Q4_1::scales(scale, minimum, block); }
};

struct Q8_0 {  // scale f16 | 32 signed bytes; value = scale * q
    static constexpr int kElements = 32, kBytes = 34, kGroup = 32;
    static constexpr bool kHasMinimum = false;
    static void fields(int8_t* q, const uint8_t* block) { memcpy(q, block + 2, 32); }
    static void scales(float* scale, float*, const uint8_t* block) { scale[0] = half(block); }
};

struct IQ4_NL {  // scale f16 | 16 bytes of nibbles; value = scale * level[q]
    static constexpr int kElements = 32, kBytes = 18, kGroup = 32;
    static constexpr bool kHasMinimum = false;
    static void fields(int8_t* q, const uint8_t* block) {
        alignas(16) static constexpr int8_t level[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                         1,    13,   25,  38,  53,  69,  89,  113};
        alignas(16) int8_t index[32];
        nibbles(index, block + 2);
        look_up(q, level, index);
        look_up(q + 16, level, index + 16);
    }
    static void scales(float* scale, float*, const uint8_t* block) { scale[0] = half(block); }
};

// ---- 256 elements a block: a float16 scale (and minimum) of the block times a small integer of the group -----------

// Two-bit fields in runs of 32 bytes: the lowest of each byte of a run, then the next of each
inline void two_bits(int8_t* __restrict q, const uint8_t* __restrict packed) {
    for (int field = 0; field < 8; ++field)
        for (int i = 0; i < 32; ++i) q[32 * field + i] = packed[field / 4 * 32 + i] >> field % 4 * 2 & 3;
}

// Four-bit fields in runs of 32 bytes
inline void four_bits(int8_t* __restrict q, const uint8_t* __restrict packed) {
    for (int run = 0; run < 4; ++run)
        for (int i = 0; i < 32; ++i) {
            q[64 * run + i] = packed[32 * run + i] & 15;
            q[64 * run + 32 + i] = packed[32 * run + i] >> 4;
        }
}

struct Q2_K {  // 16 bytes: group scale low, minimum high | 64 bytes of two bits | scale f16 | minimum f16
    // value = scale * group scale * q - minimum * group minimum
    static constexpr int kElements = 256, kBytes = 84, kGroup = 16;
    static constexpr bool kHasMinimum = true;
    static void fields(int8_t* q, const uint8_t* block) { two_bits(q, block + 16); }
    static void scales(float* scale, float* minimum, const uint8_t* block) {
        const float d = half(block + 80), least = half(block + 82);
        for (int g = 0; g < 16; ++g) scale[g] = d * static_cast<float>(block[g] & 15);
        for (int g = 0; g < 16; ++g) minimum[g] = -(least * static_cast<float>(block[g] >> 4));
    }
};

struct Q3_K {  // 32 bytes of third bits, bit f of byte i for element 32 f + i | 64 bytes of two bits |
    // 12 bytes of group scales: low 4 bits in bytes 0-7, high 2 bits in bytes 8-11 | scale f16
    // value = scale * (group scale - 32) * (q - 4)
    static constexpr int kElements = 256, kBytes = 110, kGroup = 16;
    static constexpr bool kHasMinimum = false;
    static void fields(int8_t* __restrict q, const uint8_t* __restrict block) {
        two_bits(q, block + 32);
        for (int field = 0; field < 8; ++field)
            for (int i = 0; i < 32; ++i)
                q[32 * field + i] = static_cast<int8_t>(q[32 * field + i] + (block[i] >> field & 1) * 4 - 4);
    }
    static void scales(float* scale, float*, const uint8_t* block) {
        const uint8_t *low = block + 96, *high = block + 104;
        const float d = half(block + 108);
        for (int g = 0; g < 16; ++g) {
            const int group_scale = (low[g % 8] >> g / 8 * 4 & 15) | (high[g % 4] >> g / 4 * 2 & 3) << 4;
            scale[g] = d * static_cast<float>(group_scale - 32);
        }
    }
};

struct Q4_K {  // scale f16 | minimum f16 | 12 bytes of group scales and minimums | 128 bytes of four bits
    // Bytes 0-3 of the 12 hold scales 0-3 and bytes 4-7 minimums 0-3, in the low 6 bits. Their top 2 bits belong to
    // scales and minimums 4-7, whose low 4 bits are the low and the high halves of bytes 8-11.
    // value = scale * group scale * q - minimum * group minimum
    static constexpr int kElements = 256, kBytes = 144, kGroup = 32;
    static constexpr bool kHasMinimum = true;
    static void fields(int8_t* q, const uint8_t* block) { four_bits(q, block + 16); }
    static void scales(float* scale, float* minimum, const uint8_t* block) {
        const float d = half(block), least = half(block + 2);
        const uint8_t* packed = block + 4;
        for (int g = 0; g < 4; ++g) {
            scale[g] = d * static_cast<float>(packed[g] & 63);
            minimum[g] = -(least * static_cast<float>(packed[4 + g] & 63));
            scale[4 + g] = d * static_cast<float>((packed[8 + g] & 15) | packed[g] >> 6 << 4);
            minimum[4 + g] = -(least * static_cast<float>(packed[8 + g] >> 4 | packed[4 + g] >> 6 << 4));
        }
    }
};

struct Q5_K {  // as Q4_K, with 32 bytes of fifth bits before the nibbles: bit f of byte i for element 32 f + i
    static constexpr int kElements = 256, kBytes = 176, kGroup = 32;
    static constexpr bool kHasMinimum = true;
    static void fields(int8_t* __restrict q, const uint8_t* __restrict block) {
        four_bits(q, block + 48);
        for (int field = 0; field < 8; ++field)
            for (int i = 0; i < 32; ++i)
                q[32 * field + i] = static_cast<int8_t>(q[32 * field + i] + (block[16 + i] >> field & 1) * 16);
    }
    static void scales(float* scale, float* minimum, const uint8_t* block) { Q4_K::scales(scale, minimum, block); }
};

struct Q6_K {  // 128 bytes of low four bits in runs of 64 | 64 bytes of high two bits | 16 signed group scales | scale f16
    // value = scale * group scale * (q - 32)
    static constexpr int kElements = 256, kBytes = 210, kGroup = 16;
    static constexpr bool kHasMinimum = false;
    static void fields(int8_t* __restrict q, const uint8_t* __restrict block) {
        two_bits(q, block + 128);
        for (int field = 0; field < 4; ++field)
            for (int i = 0; i < 64; ++i) {
                const int low = block[field / 2 * 64 + i] >> field % 2 * 4 & 15;
                q[64 * field + i] = static_cast<int8_t>(q[64 * field + i] * 16 + low - 32);
            }
    }
    static void scales(float* scale, float*, const uint8_t* block) {
        const float d = half(block + 208);
        for (int g = 0; g < 16; ++g) scale[g] = d * static_cast<float>(static_cast<int8_t>(block[192 + g]));
    }
};

// ---- float32 values ------------------------------------------------------------------------------------------------

template <class Block>
void dequantize_blocks(float* __restrict y, const uint8_t* __restrict blocks, int64_t num_elements) {
    for (int64_t first = 0; first < num_elements; first += Block::kElements, blocks += Block::kBytes) {
        alignas(64) int8_t q[Block::kElements];
        float scale[Block::kElements / Block::kGroup], minimum[Block::kElements / Block::kGroup];
        Block::fields(q, blocks);
        Block::scales(scale, minimum, blocks);
        for (int i = 0; i < Block::kElements; i += Block::kGroup)
            for (int j = i; j < i + Block::kGroup; ++j) {
                const float scaled = scale[i / Block::kGroup] * static_cast<float>(q[j]);
                y[first + j] = Block::kHasMinimum ? scaled + minimum[i / Block::kGroup] : scaled;
            }
    }
}

template <class T>
void widen_elements(float* y, const uint8_t* x, int64_t num_elements) {
    map([](vf v) { return v; }, num_elements, y, reinterpret_cast<const T*>(x));
}

using Dequantize = void (*)(float* y, const uint8_t* blocks, int64_t num_elements);

inline Dequantize dequantizer(BlockType type) {
    switch (type) {
        case BlockType::f32: return widen_elements<float>;
        case BlockType::f16: return widen_elements<f16>;
        case BlockType::bf16: return widen_elements<bf16>;
        case BlockType::q4_0: return dequantize_blocks<Q4_0>;
        case BlockType::q4_1: return dequantize_blocks<Q4_1>;
        case BlockType::q5_0: return dequantize_blocks<Q5_0>;
        case BlockType::q5_1: return dequantize_blocks<Q5_1>;
        case BlockType::q8_0: return dequantize_blocks<Q8_0>;
        case BlockType::q2_k: return dequantize_blocks<Q2_K>;
        case BlockType::q3_k: return dequantize_blocks<Q3_K>;
        case BlockType::q4_k: return dequantize_blocks<Q4_K>;
        case BlockType::q5_k: return dequantize_blocks<Q5_K>;
        case BlockType::q6_k: return dequantize_blocks<Q6_K>;
        case BlockType::iq4_nl: return dequantize_blocks<IQ4_NL>;
    }
    __builtin_unreachable();
}

}  // namespace infini::INFINI_LEVEL
