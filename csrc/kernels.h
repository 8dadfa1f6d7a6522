// The native ops: one argument struct each, and the table of functions that every level fills in (table.cpp).
// Kernels trust their arguments (bindings.cpp checks them), allocate nothing, and give the same bits on any
// number of threads. An op that reads indices returns the flat position of the first bad one, or kOk.
#pragma once
#include "tensor.h"

namespace infini {

constexpr int64_t kOk = -1;
constexpr int kAttentionDim = 256;  // the largest head size
constexpr int64_t kAttentionState =
    8192;  // floats: heads that share a key head times (head size + 2) must fit

// How the rows of a weight are stored, under ggml's ids; quant.h says what each means.
enum class BlockType : uint8_t {
    f32 = 0,
    f16 = 1,
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    q2_k = 10,
    q3_k = 11,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14,
    iq4_nl = 20,
    bf16 = 30,
};

constexpr int kPackedRows = 16;    // weight rows side by side in a packed weight
constexpr int kPackedWeights = 3;  // that packed_linear takes at most
constexpr int kRowBlock = 16;      // rows of activations that its workspace comes in

// Bytes that an activation of 8, 12 or 16 bits takes
constexpr int num_planes_of(int activation_bits) { return activation_bits > 8 ? 2 : 1; }

struct BlockSize { int64_t elements, bytes; };

static inline BlockSize block_size(BlockType type) {
    switch (type) {
        case BlockType::f32: return {1, 4};
        case BlockType::f16: return {1, 2};
        case BlockType::bf16: return {1, 2};
        case BlockType::q4_0: return {32, 18};
        case BlockType::q4_1: return {32, 20};
        case BlockType::q5_0: return {32, 22};
        case BlockType::q5_1: return {32, 24};
        case BlockType::q8_0: return {32, 34};
        case BlockType::q2_k: return {256, 84};
        case BlockType::q3_k: return {256, 110};
        case BlockType::q4_k: return {256, 144};
        case BlockType::q5_k: return {256, 176};
        case BlockType::q6_k: return {256, 210};
        case BlockType::iq4_nl: return {32, 18};
    }
    return {0, 0};  // not one of them
}

struct RmsNorm {
    Tensor y, x, weight;
    float eps;
};
struct AddRmsNorm {
    Tensor y, sum, x, residual, weight;
    float eps;
};
struct LayerNorm {
    Tensor y, x, weight, bias;
    double eps;
    bool has_affine;
};
struct Rope {
    Tensor y, x, positions, sin, cos;
    bool interleaved;
};
struct Unary { Tensor y, x; };
struct Binary { Tensor y, a, b; };
struct Softmax {
    Tensor y, x;
    bool causal;
};
struct Embedding { Tensor y, ids, weight; };
struct Linear {
    Tensor y, x, weight, bias;
    BlockType type;
    bool has_bias;
};
struct PackedLinear {
    Tensor y, x, residual, workspace, weight[kPackedWeights],
        bias[kPackedWeights];  // without data where there is none
    BlockType type[kPackedWeights];
    int64_t num_rows[kPackedWeights];
    int count, activation_bits;
    bool is_gated;
};
struct QuantizedEmbedding {
    Tensor y, ids, weight;
    BlockType type;
    int64_t num_rows;
};
struct Pack {
    Tensor packed, blocks;
    BlockType type;
};
struct Quantize {
    Tensor blocks, x;
    BlockType type;
};
struct Attention {
    Tensor y, q, keys, values, streams, positions, workspace;
    float scale;
    int64_t window;
};
struct StoreKv { Tensor keys, values, k, v, streams, positions; };
struct RandomSample {
    Tensor y, logits, workspace;
    double random_val, topp, temperature;
    int64_t topk;
};

struct Kernels {
    int64_t (*rms_norm)(const RmsNorm&);
    int64_t (*add_rms_norm)(const AddRmsNorm&);
    int64_t (*layer_norm)(const LayerNorm&);
    int64_t (*rope)(const Rope&);
    int64_t (*silu)(const Unary&);
    int64_t (*gelu)(const Unary&);
    int64_t (*gelu_tanh)(const Unary&);
    int64_t (*gelu_fast)(const Unary&);
    int64_t (*swiglu)(const Binary&);
    int64_t (*add)(const Binary&);
    int64_t (*softmax)(const Softmax&);
    int64_t (*embedding)(const Embedding&);
    int64_t (*random_sample)(const RandomSample&);
    int64_t (*attention)(const Attention&);
    int64_t (*store_kv)(const StoreKv&);
    int64_t (*linear)(const Linear&);
    int64_t (*packed_linear)(const PackedLinear&);
    int64_t (*quantized_embedding)(const QuantizedEmbedding&);
    int64_t (*packed_embedding)(const QuantizedEmbedding&);
    int64_t (*pack_rows)(const Pack&);
    int64_t (*unpack_rows)(const Pack&);
    int64_t (*quantize_rows)(const Quantize&);
};

}  // namespace infini
