// The arguments of norm.cpp's ops
#pragma once
#include "tensor.h"

namespace infini {

struct RmsNorm {
    Tensor y, x, weight;
    float eps;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 3, .overwritten = 1 << 1};
};

struct AddRmsNorm {
    Tensor y, sum, x, residual, weight;
    float eps;
    static constexpr Roles kRoles{.outputs = 2, .tensors = 5, .overwritten = 1 << 2 | 1 << 3};
};

struct LayerNorm {
    Tensor y, x, weight, bias;  // both or neither of weight and bias
    double eps;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 4, .overwritten = 1 << 1};
};

}  // namespace infini
