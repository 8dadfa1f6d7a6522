// y[i] = weight[ids[i]]: rows copied as bytes, so every dtype is exact, or half precision widened to float32
#include "embedding.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

void widen_row(float* y, const char* row, int64_t length, DType dtype) {
    with_type(dtype, [&](auto type) {
        map([](vf v) { return v; }, length, y, reinterpret_cast<const decltype(type)*>(row));
    });
}

}  // namespace

int64_t embedding(const Embedding& a) {
    const int64_t num_ids = num_elements(a.ids), size = item_size(a.weight.dtype);
    for (int64_t i = 0; i < num_ids; ++i) {
        const int64_t id = index_at(a.ids.data, a.ids.dtype, i);
        if (id < 0 || id >= a.weight.shape[0]) return i;
    }
    const int64_t length = a.weight.shape[1], row_bytes = length * size,
                  weight_stride = a.weight.stride[0] * size;
    if (row_bytes == 0) return kOk;
    const bool is_widened = a.y.dtype != a.weight.dtype;
    parallel_for(num_ids, (4 * kGrainElements + row_bytes - 1) / row_bytes, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const char* row = static_cast<const char*>(a.weight.data) +
                              index_at(a.ids.data, a.ids.dtype, i) * weight_stride;
            if (is_widened)
                widen_row(static_cast<float*>(a.y.data) + i * length, row, length, a.weight.dtype);
            else
                memcpy(static_cast<char*>(a.y.data) + i * row_bytes, row, row_bytes);
        }
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
