// The arguments of attention.cpp's ops
#pragma once
#include "tensor.h"

namespace infini {

constexpr int kMaxHeadDim = 256;
constexpr int64_t kMaxGroupFloats = 8192;  // heads that share a key head times (head size + 2) must fit

struct Attention {
    Tensor y, q, keys, values, streams, positions;
    float scale;
    int64_t window;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 6};
};

// The outputs are caches, written in place.
struct StoreKv {
    Tensor keys, values, k, v, streams, positions;
    static constexpr Roles kRoles{.outputs = 2, .tensors = 6, .is_in_place = true};
};

}  // namespace infini
