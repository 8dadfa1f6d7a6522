// The arguments of activation.cpp's ops
#pragma once
#include "tensor.h"

namespace infini {

struct Unary {
    Tensor y, x;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 2, .overwritten = 1 << 1};
};

struct Binary {
    Tensor y, a, b;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 3, .overwritten = 1 << 1 | 1 << 2};
};

enum class GeluKind { exact, tanh, fast };

struct Gelu {
    Tensor y, x;
    GeluKind kind;
    static constexpr Roles kRoles = Unary::kRoles;
};

struct Geglu {
    Tensor y, a, b;
    GeluKind kind;
    static constexpr Roles kRoles = Binary::kRoles;
};

struct GateRows {
    Tensor y, x, gates;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 3, .overwritten = 1 << 1};
};

struct Scale {
    Tensor y, x;
    float factor;
    static constexpr Roles kRoles = Unary::kRoles;
};

struct AddScaled {
    Tensor y, a, b;
    float factor;
    static constexpr Roles kRoles = Binary::kRoles;
};

struct Softcap {
    Tensor y, x;
    float cap;
    static constexpr Roles kRoles = Unary::kRoles;
};

}  // namespace infini
