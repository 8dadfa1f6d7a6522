// The arguments of embedding.cpp's op
#pragma once
#include "tensor.h"

namespace infini {

struct Embedding {
    Tensor y, ids, weight;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 3};
};

}  // namespace infini
