// The arguments of lora.cpp's op
#pragma once
#include "tensor.h"

namespace infini {

struct AddLora {
    Tensor y, base, x, a, b, ends, adapters;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 7, .overwritten = 1 << 1};
};

// Adapter i has the rows of a and b from the end of the one before it to its own
static inline int64_t lora_begin(const Tensor& ends, int64_t adapter) {
    return adapter > 0 ? index_at(ends.data, ends.dtype, adapter - 1) : 0;
}

}  // namespace infini
