// The arguments of matmul.cpp's, packed.cpp's and quant.cpp's ops: products with weights and rows of them,
// dense or in blocks
#pragma once
#include "tensor.h"

namespace infini {

// How the rows of a weight are stored, under ggml's ids: elements and bytes of a block; blocks.h says what
// they mean.
#define INFINI_BLOCK_TYPES(X) \
    X(f32, 0, 1, 4)           \
    X(f16, 1, 1, 2)           \
    X(q4_0, 2, 32, 18)        \
    X(q4_1, 3, 32, 20)        \
    X(q5_0, 6, 32, 22)        \
    X(q5_1, 7, 32, 24)        \
    X(q8_0, 8, 32, 34)        \
    X(q2_k, 10, 256, 84)      \
    X(q3_k, 11, 256, 110)     \
    X(q4_k, 12, 256, 144)     \
    X(q5_k, 13, 256, 176)     \
    X(q6_k, 14, 256, 210)     \
    X(iq4_nl, 20, 32, 18)     \
    X(iq4_xs, 23, 256, 136)   \
    X(bf16, 30, 1, 2)         \
    X(mxfp4, 39, 32, 17)

#define X(name, id, elements, bytes) name = id,
enum class BlockType : uint8_t { INFINI_BLOCK_TYPES(X) };
#undef X

struct BlockSize { int64_t elements, bytes; };

constexpr BlockSize block_size(BlockType type) {
    switch (type) {
#define X(name, id, elements, bytes) \
    case BlockType::name: return {elements, bytes};
        INFINI_BLOCK_TYPES(X)
#undef X
    }
    return {0, 0};  // not one of them
}

constexpr int kPackedRows = 16;    // weight rows side by side in a packed weight
constexpr int kPackedWeights = 3;  // that packed_linear takes at most

// How a level sums blocks of 256, whose groups have whole scales: each group by itself, or as whole numbers,
// all of a block in tile registers, or 64 values where integers of 16 bits are multiplied
enum class Wholes : uint8_t { none, of_64, of_block };

// What activations become in a product with a packed weight: integers of so many bits, `span` with one scale
struct Rounding {
    int bits, span;
    bool operator==(const Rounding&) const = default;
};

// Tile registers have half as many products for blocks of four bits a group at a time. Where integers of 16
// bits are multiplied, 64 products of the largest must fit 32 bits.
constexpr Rounding rounding_of(BlockType type, int bits, Wholes wholes) {
    const bool is_of_groups = block_size(type).elements < 256 || wholes == Wholes::none;
    if (is_of_groups || (wholes == Wholes::of_64 ? bits == 8 : type == BlockType::q4_k)) return {bits, 32};
    if (wholes == Wholes::of_block) return {bits, 256};
    const int most = type == BlockType::q6_k || type == BlockType::iq4_xs ? 14
                     : type == BlockType::q5_k                            ? 15
                                                                          : 16;
    return {bits < most ? bits : most, 64};
}

// What a gate gives is rounded by the thread that made it, whole spans at a time: none may be longer.
constexpr int kMostGatedSpan = 64;

// Bytes that an activation of 8, 12 or 16 bits takes
constexpr int num_planes_of(int activation_bits) { return activation_bits > 8 ? 2 : 1; }

struct Linear {
    Tensor y, x, weight, bias;
    BlockType type;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 4};
};

struct QuantizedLinear : Linear {};

// What becomes of the first of two products before it multiplies the second; none: they stay side by side.
// A third weight multiplies what a gate gives.
enum class Gate : uint8_t { none, silu, gelu_tanh };

struct PackedLinear {
    Tensor y, x, residual, weight[kPackedWeights], bias[kPackedWeights];  // without data where there is none
    BlockType type[kPackedWeights];
    int64_t num_rows[kPackedWeights];
    int count, activation_bits;  // of x
    int gated_bits;              // of what a gate gives, where a third weight multiplies that
    Gate gate;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 3 + 2 * kPackedWeights, .overwritten = 1 << 2};

    int num_first() const { return gate != Gate::none && count > 2 ? 2 : count; }  // that multiply x
    bool has_last() const { return num_first() < count; }
};

struct QuantizedEmbedding {
    Tensor y, ids, weight;
    BlockType type;
    int64_t num_rows;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 3};
};

struct PackedEmbedding : QuantizedEmbedding {};

// Blocks to packed ones, and back
struct Pack {
    Tensor packed, blocks;
    BlockType type;
};
struct Unpack : Pack {};

// Of every `step` bytes, those from begin to end are float16
struct Halves {
    Tensor bytes;
    int64_t step, begin, end;
};

struct Quantize {
    Tensor blocks, x;
    BlockType type;
};

struct CountProducts { int64_t rounds; };

}  // namespace infini
