// The arguments of experts.cpp's and route.cpp's ops: mixtures of experts
#pragma once
#include "linear.h"

namespace infini {

enum class Scoring { softmax, sigmoid };

struct Route {
    Tensor ids, shares, logits, bias;  // without data where there is none
    bool normalizes;
    Scoring scoring;
    int64_t num_groups, num_kept;
    static constexpr Roles kRoles{.outputs = 2, .tensors = 4};
};

enum class Gating { silu, swiglu_oai };

constexpr int kExpertWeights = 3;  // gate, up and down

// The rows of an expert's weight follow those of the one before it.
struct Experts {
    Tensor y, x, ids, shares, weight[kExpertWeights],
        bias[kExpertWeights];  // without data where there is none
    BlockType type[kExpertWeights];
    int activation_bits[kExpertWeights];  // 0 where a weight is not packed
    int64_t num_experts, intermediate_size;
    Gating gating;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 4 + 2 * kExpertWeights};
};

}  // namespace infini
