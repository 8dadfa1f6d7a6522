// Blocks to floats and floats to blocks, with the bits that ggml gives them
#pragma once
#include <algorithm>

#include "blocks.h"

namespace infini::INFINI_LEVEL {

// ---- float32 values ---------------------------------------------------------------------------------------

template <class Block>
void dequantize_blocks(float* __restrict y, const uint8_t* __restrict blocks, int64_t num_elements) {
    for (int64_t first = 0; first < num_elements; first += Block::kElements, blocks += Block::kBytes) {
        alignas(64) int8_t q[Block::kElements];
        float scale[Block::kElements / Block::kGroup], minimum[Block::kElements / Block::kGroup];
        Block::template fields<1>(q, blocks);
        Block::template scales<1>(scale, minimum, blocks);
        for (int i = 0; i < Block::kElements; i += Block::kGroup)
            for (int j = i; j < i + Block::kGroup; ++j) {
                const int8_t shifted = static_cast<int8_t>(q[j] - Block::kOffset);
                const float scaled = scale[i / Block::kGroup] * static_cast<float>(shifted);
                y[first + j] = Block::kHasMinimum ? scaled + minimum[i / Block::kGroup] : scaled;
            }
    }
}

template <class T>
void widen_elements(float* y, const uint8_t* x, int64_t num_elements) {
    map([](vf v) { return v; }, num_elements, y, reinterpret_cast<const T*>(x));
}

// ---- floats to blocks, with ggml's bits; what is not finite leaves such a scale ---------------------------

// The largest absolute value, as its bits: they order numbers as they order integers, and NaN above all
inline uint32_t largest_bits(const float* x) {
    uint32_t bits[32], largest = 0;
    memcpy(bits, x, sizeof bits);
    for (const uint32_t b : bits) largest = std::max(largest, b & 0x7fffffffu);
    return largest;
}

inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The float16 scale at `block`, and what to multiply by: 0 where the block is zero, or so small that
// 1 / scale is not finite
inline float write_scale(uint8_t* block, float scale) {
    f16 lanes[W];
    store(lanes, splat(scale));
    memcpy(block, lanes, sizeof(f16));
    const float inverse = 1 / scale;
    return std::isfinite(inverse) ? inverse : 0;
}

inline void quantize_block(Q8_0, uint8_t* __restrict block, const float* __restrict x) {
    const float inverse = write_scale(block, from_bits(largest_bits(x)) / 127);
    int8_t q[32] = {};
    if (inverse == 0) return void(memcpy(block + 2, q, 32));
    for (int i = 0; i < 32; ++i) {  // halves are rounded away from zero
        const float scaled = x[i] * inverse, size = std::fabs(scaled);
        const int32_t whole = static_cast<int32_t>(size);
        const int32_t rounded = whole + (size - static_cast<float>(whole) >= 0.5f);
        q[i] = static_cast<int8_t>(scaled < 0 ? -rounded : rounded);
    }
    memcpy(block + 2, q, 32);
}

// The extreme value keeps its sign and becomes -8, the end of the range that has one more step; the first of
// equals counts.
inline void quantize_block(Q4_0, uint8_t* __restrict block, const float* __restrict x) {
    const float largest = from_bits(largest_bits(x));
    int at = 0;
    while (at < 31 && std::fabs(x[at]) != largest) ++at;
    const float inverse = write_scale(block, largest == largest ? x[at] / -8 : largest);
    uint8_t q[32];
    for (int i = 0; i < 32; ++i) {
        const int32_t field = static_cast<int32_t>(x[i] * inverse + 8.5f);
        q[i] = static_cast<uint8_t>(field < 15 ? field : 15);
    }
    for (int i = 0; i < 16; ++i) block[2 + i] = static_cast<uint8_t>(q[i] | q[16 + i] << 4);
}

template <class Block, class T>
void quantize_row(uint8_t* blocks, const T* x, int64_t length) {
    for (int64_t k = 0; k < length; k += 32, blocks += Block::kBytes) {
        alignas(64) float values[32];
        for (int i = 0; i < 32; i += W) store(values + i, load(x + k + i));
        quantize_block(Block{}, blocks, values);
    }
}

using Dequantize = void (*)(float* y, const uint8_t* blocks, int64_t num_elements);

inline Dequantize dequantizer(BlockType type) {
    if (type == BlockType::f32) return widen_elements<float>;
    if (type == BlockType::f16) return widen_elements<f16>;
    if (type == BlockType::bf16) return widen_elements<bf16>;
    Dequantize found = nullptr;
    with_block(type, [&](auto block) { found = dequantize_blocks<decltype(block)>; });
    return found;
}

}  // namespace infini::INFINI_LEVEL
