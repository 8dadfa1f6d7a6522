// The native ops: one argument struct each, and the table of functions that every level fills in (table.cpp).
// Kernels trust their arguments (bindings.cpp checks them), allocate nothing, and give the same bits on any
// number of threads. An op that reads indices returns the flat position of the first bad one, or kOk.
#pragma once
#include "tensor.h"

namespace infini {

constexpr int64_t kOk = -1;

struct RmsNorm { Tensor y, x, weight; float eps; };
struct AddRmsNorm { Tensor y, sum, x, residual, weight; float eps; };
struct LayerNorm { Tensor y, x, weight, bias; double eps; bool has_affine; };
struct Rope { Tensor y, x, positions, sin, cos; bool interleaved; };
struct Unary { Tensor y, x; };
struct Binary { Tensor y, a, b; };
struct Softmax { Tensor y, x; bool causal; };
struct Embedding { Tensor y, ids, weight; };
struct RandomSample { Tensor y, logits, workspace; double random_val, topp, temperature; int64_t topk; };

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
    int64_t (*softmax)(const Softmax&);
    int64_t (*embedding)(const Embedding&);
    int64_t (*random_sample)(const RandomSample&);
};

}  // namespace infini
