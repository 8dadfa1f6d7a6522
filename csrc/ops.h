// The list of native ops: a name, here and in Python, and the struct of its arguments. The table of every
// level, the bindings and, through them, the tests and benchmarks are made from it.
#pragma once
#include "activation.h"
#include "attention.h"
#include "embedding.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "norm.h"
#include "rope.h"
#include "sampling.h"
#include "softmax.h"

#define INFINI_OPS(X)                          \
    X(rms_norm, RmsNorm)                       \
    X(add_rms_norm, AddRmsNorm)                \
    X(layer_norm, LayerNorm)                   \
    X(rope, Rope)                              \
    X(silu, Unary)                             \
    X(gelu, Gelu)                              \
    X(swiglu, Binary)                          \
    X(geglu, Geglu)                            \
    X(add, Binary)                             \
    X(add_scaled, AddScaled)                   \
    X(gate_rows, GateRows)                     \
    X(scale, Scale)                            \
    X(softcap, Softcap)                        \
    X(softmax, Softmax)                        \
    X(causal_softmax, CausalSoftmax)           \
    X(embedding, Embedding)                    \
    X(random_sample, RandomSample)             \
    X(sample, Sample)                          \
    X(logprobs, Logprobs)                      \
    X(adjust_logits, AdjustLogits)             \
    X(attention, Attention)                    \
    X(store_kv, StoreKv)                       \
    X(store_heads, StoreHeads)                 \
    X(linear, Linear)                          \
    X(add_lora, AddLora)                       \
    X(quantized_linear, QuantizedLinear)       \
    X(packed_linear, PackedLinear)             \
    X(route, Route)                            \
    X(experts, Experts)                        \
    X(quantized_embedding, QuantizedEmbedding) \
    X(packed_embedding, PackedEmbedding)

// What makes weights ready, and tells what a CPU can; no ops, since they do not run in a model
#define INFINI_PREPARATIONS(X) \
    X(pack_rows, Pack)         \
    X(unpack_rows, Unpack)     \
    X(quantize_rows, Quantize) \
    X(find_infinite, Halves)   \
    X(count_products, CountProducts)

namespace infini {

// Kernels trust their arguments (binding_*.h check them) and give the same bits on any number of threads.
// One that reads indices returns the flat position of the first bad one, or kOk.
struct Kernels {
#define X(name, Args) int64_t (*name)(const Args&);
    INFINI_OPS(X)
    INFINI_PREPARATIONS(X)
#undef X
};

}  // namespace infini
