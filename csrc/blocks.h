// What the blocks of GGUF's weight types mean: value = scale * (q - offset), or scale * q + minimum, with a
// scale (and minimum) for each group of a block. `fields` reads the integers q of a block, `scales` what
// multiplies and shifts its groups; float32 operations stand in ggml's order, so every value has the bits
// ggml gives it.
//
// Every type is also read R blocks at a time, from R rows packed side by side (pack_rows): a field of n bytes
// then takes n * R, at R times its offset, in pieces of 1, 2 or 4 bytes (`Field::piece`), the first piece of
// each row, then the second of each. q comes out likewise, 4 elements of each row, the next 4 of each; scales
// one of each row. (On Arm the integers of Q4_0 lie otherwise: kHalvesAreRows.)
#pragma once
#include "fields.h"

namespace infini::INFINI_LEVEL {

// ---- 32 elements a block ----------------------------------------------------------------------------------

struct Q4_0 {  // scale f16 | 16 bytes of four bits; value = scale * (q - 8)
    static constexpr int kElements = 32, kBytes = 18, kGroup = 32, kOffset = 8;
    static constexpr bool kHasMinimum = false, kIsSigned = false;
    static constexpr int kData = 2, kBits = 4, kLowBits = 4, kRun = 32;
    static constexpr Field kFields[] = {{2, 2}, {16, 4}};
    static constexpr Place place(int s, int quad) { return {2 + 4 * quad, 4 * s}; }
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        four_bits<16 * R>(q, block + 2 * R);
    }
    template <int R>
    static void scales(float* scale, float*, const uint8_t* block) {
        halves<R>(scale, block);
    }
};

struct Q4_1 {  // scale f16 | minimum f16 | 16 bytes of four bits; value = scale * q + minimum
    static constexpr int kElements = 32, kBytes = 20, kGroup = 32, kOffset = 0;
    static constexpr bool kHasMinimum = true, kIsSigned = false;
    static constexpr int kData = 4, kBits = 4, kLowBits = 4, kRun = 32;
    static constexpr Field kFields[] = {{2, 2}, {2, 2}, {16, 4}};
    static constexpr Place place(int s, int quad) { return {4 + 4 * quad, 4 * s}; }
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        four_bits<16 * R>(q, block + 4 * R);
    }
    template <int R>
    static void scales(float* scale, float* minimum, const uint8_t* block) {
        halves<R>(scale, block);
        halves<R>(minimum, block + 2 * R);
    }
};

struct Q5_0 {  // scale f16 | 4 bytes of fifth bits | 16 bytes of four bits; value = scale * (q - 16)
    static constexpr int kElements = 32, kBytes = 22, kGroup = 32, kOffset = 16;
    static constexpr bool kHasMinimum = false, kIsSigned = false;
    static constexpr int kBits = 5, kLowBits = 4;
    static constexpr Field kFields[] = {{2, 2}, {4, 4, true}, {16, 4}};
    static constexpr Place place(int s, int quad) { return {6 + 4 * quad, 4 * s, 2, 4 * s + quad}; }
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        five_bits_of_32<R>(q, block + 6 * R, block + 2 * R);
    }
    template <int R>
    static void scales(float* scale, float*, const uint8_t* block) {
        halves<R>(scale, block);
    }
};

// scale f16 | minimum f16 | 4 bytes of fifth bits | 16 bytes of four bits; value = scale * q + minimum
struct Q5_1 {
    static constexpr int kElements = 32, kBytes = 24, kGroup = 32, kOffset = 0;
    static constexpr bool kHasMinimum = true, kIsSigned = false;
    static constexpr int kBits = 5, kLowBits = 4;
    static constexpr Field kFields[] = {{2, 2}, {2, 2}, {4, 4, true}, {16, 4}};
    static constexpr Place place(int s, int quad) { return {8 + 4 * quad, 4 * s, 4, 4 * s + quad}; }
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        five_bits_of_32<R>(q, block + 8 * R, block + 4 * R);
    }
    template <int R>
    static void scales(float* scale, float* minimum, const uint8_t* block) {
        Q4_1::scales<R>(scale, minimum, block);
    }
};

struct Q8_0 {  // scale f16 | 32 signed bytes; value = scale * q
    static constexpr int kElements = 32, kBytes = 34, kGroup = 32, kOffset = 0;
    static constexpr bool kHasMinimum = false, kIsSigned = true;
    static constexpr int kBits = 8, kLowBits = 8;
    static constexpr Field kFields[] = {{2, 2}, {32, 4}};
    static constexpr Place place(int s, int quad) { return {2 + 16 * s + 4 * quad}; }
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        memcpy(q, block + 2 * R, 32 * R);
    }
    template <int R>
    static void scales(float* scale, float*, const uint8_t* block) {
        halves<R>(scale, block);
    }
};

struct IQ4_NL {  // scale f16 | 16 bytes of four bits; value = scale * level[q]
    static constexpr int kElements = 32, kBytes = 18, kGroup = 32, kOffset = 0;
    static constexpr bool kHasMinimum = false, kIsSigned = true;
    static constexpr int kBits = 4, kLowBits = 4;
    static constexpr Field kFields[] = {{2, 2}, {16, 4}};
    static constexpr Place place(int s, int quad) { return {2 + 4 * quad, 4 * s}; }
    static constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                           1,    13,   25,  38,  53,  69,  89,  113};
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        four_bits<16 * R>(q, block + 2 * R);
        look_up(q, 32 * R, kLevels);
    }
    template <int R>
    static void scales(float* scale, float*, const uint8_t* block) {
        halves<R>(scale, block);
    }
};

// scale, a byte that is an exponent | 16 bytes of four bits; value = scale * level[q]
// Levels are twice OCP's E2M1 and scales half its E8M0, as ggml has them.
struct MXFP4 {
    static constexpr int kElements = 32, kBytes = 17, kGroup = 32, kOffset = 0;
    static constexpr bool kHasMinimum = false, kIsSigned = true;
    static constexpr int kBits = 4, kLowBits = 4;
    static constexpr Field kFields[] = {{1, 1}, {16, 4}};
    static constexpr Place place(int s, int quad) { return {1 + 4 * quad, 4 * s}; }
    static constexpr int8_t kLevels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        four_bits<16 * R>(q, block + R);
        look_up(q, 32 * R, kLevels);
    }
    template <int R>
    static void scales(float* scale, float*, const uint8_t* block) {
        for (int r = 0; r < R; ++r) {
            const uint32_t e = block[r], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
            memcpy(scale + r, &bits, sizeof bits);
        }
    }
};

// ---- 256 elements a block: a float16 scale (and minimum) of the block times a small integer of the group --
//
// `group_scales` reads those integers, kScale and kMinimum are where the float16 are. kMost is how large an
// element times its group's integer can be.

// What multiplies the groups of R rows: minus their minimums
template <class Block, int R>
inline void group_minimums(float* __restrict minimum, const int8_t* __restrict whole, const uint8_t* block) {
    float least[R];
    halves<R>(least, block + Block::kMinimum * R);
    for (int r = 0; r < R; ++r) least[r] = -least[r];
    for (int g = 0; g < Block::kElements / Block::kGroup; ++g)
        scaled_bytes<R, false>(minimum + g * R, whole + g * R, least);
}

template <class Block>
struct Grouped {
    template <int R>
    static void scales(float* __restrict scale, float* __restrict minimum, const uint8_t* block) {
        constexpr int kGroups = Block::kElements / Block::kGroup;
        int8_t whole[kGroups * R], least[kGroups * R];
        float d[R];
        Block::template group_scales<R>(whole, least, block);
        halves<R>(d, block + Block::kScale * R);
        for (int g = 0; g < kGroups; ++g)
            scaled_bytes<R, !Block::kHasMinimum>(scale + g * R, whole + g * R, d);
        if constexpr (Block::kHasMinimum) group_minimums<Block, R>(minimum, least, block);
    }
};

// 16 bytes: group scale low, minimum high | 64 bytes of two bits in runs of 32 | scale f16 | minimum f16
// value = scale * group scale * q - minimum * group minimum
struct Q2_K : Grouped<Q2_K> {
    static constexpr int kElements = 256, kBytes = 84, kGroup = 16, kOffset = 0;
    static constexpr bool kHasMinimum = true, kIsSigned = false;
    static constexpr int kMost = 3 * 15;
    static constexpr int kBits = 2, kLowBits = 2;
    static constexpr Place place(int s, int quad) {
        return {16 + s / 8 * 32 + s % 2 * 16 + 4 * quad, s / 2 % 4 * 2};
    }
    static constexpr Field kFields[] = {{16, 1}, {64, 4}, {2, 2}, {2, 2}};
    static constexpr int kScale = 80, kMinimum = 82;
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        for (int run = 0; run < 2; ++run) two_bits<32 * R>(q + 128 * R * run, block + (16 + 32 * run) * R);
    }
    template <int R>
    static void group_scales(int8_t* __restrict scale, int8_t* __restrict minimum,
                             const uint8_t* __restrict block) {
        for (int i = 0; i < 16 * R; ++i) scale[i] = block[i] & 15, minimum[i] = block[i] >> 4;
    }
};

struct Q3_K : Grouped<Q3_K> {  // 32 bytes of third bits | 64 bytes of two bits in runs of 32 |
    // 12 bytes of group scales: low 4 bits in bytes 0-7, high 2 bits in bytes 8-11 | scale f16
    // value = scale * (group scale - 32) * (q - 4)
    static constexpr int kElements = 256, kBytes = 110, kGroup = 16, kOffset = 4;
    static constexpr bool kHasMinimum = false, kIsSigned = false;
    static constexpr int kMost = 4 * 32;
    static constexpr int kBits = 3, kLowBits = 2;
    static constexpr Place place(int s, int quad) {
        return {32 + s / 8 * 32 + s % 2 * 16 + 4 * quad, s / 2 % 4 * 2, s % 2 * 16 + 4 * quad, s / 2};
    }
    static constexpr Field kFields[] = {{32, 4}, {64, 4}, {12, 1}, {2, 2}};
    static constexpr int kScale = 108;
    template <int R>
    static void fields(int8_t* __restrict q, const uint8_t* __restrict block) {
        unrolled<2>([&](auto run) {
            for (int i = 0; i < 32 * R; ++i)
                unrolled<4>([&](auto field) {
                    const int two = block[(32 + 32 * run) * R + i] >> 2 * field & 3;
                    q[(128 * run + 32 * field) * R + i] =
                        static_cast<int8_t>(two | (moved<4 * run + field, 2>(block[i]) & 4));
                });
        });
    }
    template <int R>
    static void group_scales(int8_t* __restrict scale, int8_t*, const uint8_t* __restrict block) {
        const uint8_t *low = block + 96 * R, *high = block + 104 * R;
        unrolled<16>([&](auto g) INFINI_INLINE {
            for (int r = 0; r < R; ++r)
                scale[g * R + r] = static_cast<int8_t>(
                    ((low[g % 8 * R + r] >> g / 8 * 4 & 15) | (high[g % 4 * R + r] >> g / 4 * 2 & 3) << 4) -
                    32);
        });
    }
};

// scale f16 | minimum f16 | 12 bytes of group scales and minimums | 128 bytes of four bits in runs of 32
// Bytes 0-3 of the 12 hold scales 0-3 and bytes 4-7 minimums 0-3, in the low 6 bits. Their top 2 bits belong
// to scales and minimums 4-7, whose low 4 bits are the low and the high halves of bytes 8-11. value = scale
// * group scale * q - minimum * group minimum
struct Q4_K : Grouped<Q4_K> {
    static constexpr int kElements = 256, kBytes = 144, kGroup = 32, kOffset = 0;
    static constexpr bool kHasMinimum = true, kIsSigned = false;
    static constexpr int kMost = 15 * 63;
    static constexpr int kData = 16, kBits = 4, kLowBits = 4, kRun = 64;
    static constexpr Field kFields[] = {{2, 2}, {2, 2}, {12, 1}, {128, 4}};
    static constexpr int kScale = 0, kMinimum = 2;
    static constexpr Place place(int s, int quad) {
        return {16 + s / 4 * 32 + s % 2 * 16 + 4 * quad, s / 2 % 2 * 4};
    }
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        for (int run = 0; run < 4; ++run) four_bits<32 * R>(q + 64 * R * run, block + (16 + 32 * run) * R);
    }
    template <int R>
    static void group_scales(int8_t* __restrict scale, int8_t* __restrict minimum,
                             const uint8_t* __restrict block) {
        const uint8_t *p = block + 4 * R, *m = p + 4 * R, *rest = p + 8 * R;
        for (int i = 0; i < 4 * R; ++i) {
            scale[i] = p[i] & 63, minimum[i] = m[i] & 63;
            scale[4 * R + i] = static_cast<int8_t>((rest[i] & 15) | p[i] >> 6 << 4);
            minimum[4 * R + i] = static_cast<int8_t>(rest[i] >> 4 | m[i] >> 6 << 4);
        }
    }
};

struct Q5_K : Grouped<Q5_K> {  // as Q4_K, with 32 bytes of fifth bits before the 128
    static constexpr int kElements = 256, kBytes = 176, kGroup = 32, kOffset = 0;
    static constexpr bool kHasMinimum = true, kIsSigned = false;
    static constexpr int kMost = 31 * 63;
    static constexpr int kBits = 5, kLowBits = 4;
    static constexpr Field kFields[] = {{2, 2}, {2, 2}, {12, 1}, {32, 4}, {128, 4}};
    static constexpr int kScale = 0, kMinimum = 2;
    static constexpr Place place(int s, int quad) {
        return {48 + s / 4 * 32 + s % 2 * 16 + 4 * quad, s / 2 % 2 * 4, 16 + s % 2 * 16 + 4 * quad, s / 2};
    }
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        unrolled<4>([&](auto run) {
            int8_t* low = q + 64 * R * run;
            five_bits<32 * R, 2 * run, 2 * run + 1>(low, low + 32 * R, block + (48 + 32 * run) * R,
                                                    block + 16 * R);
        });
    }
    template <int R>
    static void group_scales(int8_t* scale, int8_t* minimum, const uint8_t* block) {
        Q4_K::group_scales<R>(scale, minimum, block);
    }
};

// 128 bytes of low four bits in runs of 64 | 64 of high two bits in runs of 32 | 16 signed group scales |
// scale f16; value = scale * group scale * (q - 32)
struct Q6_K : Grouped<Q6_K> {
    static constexpr int kElements = 256, kBytes = 210, kGroup = 16, kOffset = 32;
    static constexpr bool kHasMinimum = false, kIsSigned = false;
    static constexpr int kMost = 32 * 128;
    static constexpr int kBits = 6, kLowBits = 4;
    static constexpr Field kFields[] = {{128, 4}, {64, 4}, {16, 1}, {2, 2}};
    static constexpr int kScale = 208;
    static constexpr Place place(int s, int quad) {
        const int run = s / 8, quarter = s / 2 % 4, half = s % 2;
        return {64 * run + quarter % 2 * 32 + half * 16 + 4 * quad, quarter / 2 * 4,
                128 + 32 * run + half * 16 + 4 * quad, 2 * quarter};
    }
    template <int R>
    static void fields(int8_t* __restrict q, const uint8_t* __restrict block) {
        for (int run = 0; run < 2; ++run, q += 128 * R) {
            const uint8_t *low = block + 64 * R * run, *high = block + (128 + 32 * run) * R;
            for (int i = 0; i < 32 * R; ++i) {
                q[i] = static_cast<int8_t>((low[i] & 15) | (high[i] << 4 & 48));
                q[32 * R + i] = static_cast<int8_t>((low[32 * R + i] & 15) | (high[i] << 2 & 48));
                q[64 * R + i] = static_cast<int8_t>((low[i] >> 4) | (high[i] & 48));
                q[96 * R + i] = static_cast<int8_t>((low[32 * R + i] >> 4) | (high[i] >> 2 & 48));
            }
        }
    }
    template <int R>
    static void group_scales(int8_t* scale, int8_t*, const uint8_t* block) {
        memcpy(scale, block + 192 * R, 16 * R);
    }
};

// scale f16 | 2 bytes of the high 2 bits of group scales | 4 bytes of their low 4 bits |
// 128 bytes of four bits in runs of 16; value = scale * (group scale - 32) * level[q], levels as in IQ4_NL
struct IQ4_XS : Grouped<IQ4_XS> {
    static constexpr int kElements = 256, kBytes = 136, kGroup = 32, kOffset = 0;
    static constexpr bool kHasMinimum = false, kIsSigned = true;
    static constexpr int kMost = 127 * 32;
    static constexpr int kBits = 4, kLowBits = 4;
    static constexpr const auto& kLevels = IQ4_NL::kLevels;
    static constexpr Place place(int s, int quad) { return {8 + s / 2 * 16 + 4 * quad, s % 2 * 4}; }
    static constexpr Field kFields[] = {{2, 2}, {2, 1}, {4, 1}, {128, 4}};
    static constexpr int kScale = 0;
    template <int R>
    static void fields(int8_t* q, const uint8_t* block) {
        for (int run = 0; run < 8; ++run) four_bits<16 * R>(q + 32 * R * run, block + (8 + 16 * run) * R);
        look_up(q, 256 * R, kLevels);
    }
    template <int R>
    static void group_scales(int8_t* __restrict scale, int8_t*, const uint8_t* __restrict block) {
        const uint8_t *high = block + 2 * R, *low = block + 4 * R;
        unrolled<8>([&](auto g) INFINI_INLINE {
            for (int r = 0; r < R; ++r)
                scale[g * R + r] = static_cast<int8_t>(
                    ((low[g / 2 * R + r] >> g % 2 * 4 & 15) | (high[g / 4 * R + r] >> g % 4 * 2 & 3) << 4) -
                    32);
        });
    }
};

// Whether fields of four bits are integers themselves, or number the levels of a table
template <class Block>
constexpr bool kHasLevels = Block::kBits == 4 && Block::kIsSigned;
template <class Block>
constexpr bool kIsFourBits = Block::kBits == 4 && !Block::kIsSigned;
template <class Block>
constexpr bool kHasRowsInBytes = kHalvesAreRows && kIsFourBits<Block> && !Block::kHasMinimum;

#if defined(__AMX_INT8__)
constexpr Wholes kWholes = Wholes::of_block;
#elif defined(INFINI_AVX512)
constexpr Wholes kWholes = Wholes::of_64;
#else
constexpr Wholes kWholes = Wholes::none;
#endif
constexpr int kWholeSpan = kWholes == Wholes::of_block ? 256 : 64;

// Whether such a block is summed as whole numbers, against activations of P planes
template <class Block, int P>
constexpr bool kIsWhole = Block::kElements == 256 && (kWholes == Wholes::of_block ? !kIsFourBits<Block>
                                                      : kWholes == Wholes::of_64  ? P == 2
                                                                                  : false);

template <BlockType type, class Block, int bits>
constexpr bool is_rounded_well() {
    constexpr Rounding rounding = rounding_of(type, bits, kWholes);
    constexpr bool is_whole = kIsWhole<Block, num_planes_of(bits)>;
    if constexpr (is_whole && kWholes == Wholes::of_64)
        return rounding.span == kWholeSpan &&
               int64_t{Block::kMost} * (127 << (rounding.bits - 8)) * kWholeSpan < int64_t{1} << 31;
    else
        return rounding == Rounding{bits, is_whole ? kWholeSpan : 32};
}

// A type's struct, whose blocks are what is known of the type
template <BlockType type, class Block>
constexpr Block struct_of() {
    static_assert(Block::kElements == block_size(type).elements && Block::kBytes == block_size(type).bytes);
    static_assert(is_rounded_well<type, Block, 8>() && is_rounded_well<type, Block, 12>() &&
                  is_rounded_well<type, Block, 16>());
    return {};
}

// Calls body with a value of the type's struct
template <class Body>
inline void with_block(BlockType type, Body&& body) {
    switch (type) {
        case BlockType::q4_0: return body(struct_of<BlockType::q4_0, Q4_0>());
        case BlockType::q4_1: return body(struct_of<BlockType::q4_1, Q4_1>());
        case BlockType::q5_0: return body(struct_of<BlockType::q5_0, Q5_0>());
        case BlockType::q5_1: return body(struct_of<BlockType::q5_1, Q5_1>());
        case BlockType::q8_0: return body(struct_of<BlockType::q8_0, Q8_0>());
        case BlockType::q2_k: return body(struct_of<BlockType::q2_k, Q2_K>());
        case BlockType::q3_k: return body(struct_of<BlockType::q3_k, Q3_K>());
        case BlockType::q4_k: return body(struct_of<BlockType::q4_k, Q4_K>());
        case BlockType::q5_k: return body(struct_of<BlockType::q5_k, Q5_K>());
        case BlockType::q6_k: return body(struct_of<BlockType::q6_k, Q6_K>());
        case BlockType::iq4_nl: return body(struct_of<BlockType::iq4_nl, IQ4_NL>());
        case BlockType::iq4_xs: return body(struct_of<BlockType::iq4_xs, IQ4_XS>());
        case BlockType::mxfp4: return body(struct_of<BlockType::mxfp4, MXFP4>());
        default: return;
    }
}

}  // namespace infini::INFINI_LEVEL
