// This level's column of the table that isa.cpp chooses from.
#include "ops.h"

#if defined(INFINI_BASE)
namespace infini::INFINI_BASE {
extern const Kernels kKernels;
}
#endif

namespace infini::INFINI_LEVEL {

#define X(name, Args) int64_t name(const Args&);
INFINI_OPS(X)
INFINI_PREPARATIONS(X)
#undef X

extern const Kernels kKernels;

#if defined(INFINI_BASE)
// A level that multiplies matrices is another level but for its products, and attention where that has tiles.
const Kernels kKernels = [] {
    Kernels kernels = INFINI_BASE::kKernels;
    kernels.linear = linear;
    kernels.quantized_linear = quantized_linear;
    kernels.packed_linear = packed_linear;
    kernels.experts = experts;
    kernels.count_products = count_products;
#if defined(__AMX_INT8__)
    kernels.attention = attention;
#endif
    return kernels;
}();
#else
#define X(name, Args) .name = name,
const Kernels kKernels = {INFINI_OPS(X) INFINI_PREPARATIONS(X)};
#undef X
#endif

}  // namespace infini::INFINI_LEVEL
