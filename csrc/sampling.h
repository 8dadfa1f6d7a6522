// The arguments of sampling.cpp's op
#pragma once
#include "tensor.h"

namespace infini {

struct RandomSample {
    Tensor y, logits;
    double random_val, topp, temperature;
    int64_t topk;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 2};
};

}  // namespace infini
