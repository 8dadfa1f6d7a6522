// The arguments of softmax.cpp's ops
#pragma once
#include "tensor.h"

namespace infini {

struct Softmax {
    Tensor y, x;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 2, .overwritten = 1 << 1};
};

struct CausalSoftmax : Softmax {};

}  // namespace infini
