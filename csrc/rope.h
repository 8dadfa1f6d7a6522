// The arguments of rope.cpp's op
#pragma once
#include "tensor.h"

namespace infini {

struct Rope {
    Tensor y, x, positions, sin, cos;
    bool interleaved;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 5, .overwritten = 1 << 1};
};

}  // namespace infini
