// Parts of the products of matmul.cpp and packed.cpp, on the calling thread: what other kernels are made of.
#pragma once
#include "linear.h"

namespace infini::INFINI_LEVEL {

struct Activations;

constexpr int64_t kPieceOutputs = 32;  // whose first ones a part may begin with

// y[:][begin : end]
void multiply_outputs(const Linear& a, int64_t begin, int64_t end);

// The same of one packed weight, with the rows of x rounded already
void multiply_outputs(const PackedLinear& a, const Activations& x, int64_t begin, int64_t end);

}  // namespace infini::INFINI_LEVEL
