// The arguments of sampling.cpp's ops
#pragma once
#include "tensor.h"

namespace infini {

struct RandomSample {
    Tensor y, logits;
    double random_val, topp, temperature;
    int64_t topk;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 2};
};

// Of R rows: settings [R, 3] are temperature, top_p and min_p
struct Sample {
    Tensor y, logits, uniforms, settings, top_k;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 5};
};

struct Logprobs {
    Tensor ids, values, logits, tokens;
    int64_t num_top;
    static constexpr Roles kRoles{.outputs = 2, .tensors = 4};
};

// penalties [R, 3] are repetition, presence and frequency
struct AdjustLogits {
    Tensor y, logits, history, ends, penalties, allowed;  // allowed may be absent
    static constexpr Roles kRoles{.outputs = 1, .tensors = 6, .overwritten = 1 << 1};
};

}  // namespace infini
