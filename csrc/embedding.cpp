// y[i] = weight[ids[i]]: rows copied as bytes, so every dtype is exact
#include "kernels.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {

int64_t embedding(const Embedding& a) {
    const int64_t num_ids = num_elements(a.ids), size = item_size(a.weight.dtype);
    for (int64_t i = 0; i < num_ids; ++i) {
        const int64_t id = index_at(a.ids.data, a.ids.dtype, i);
        if (id < 0 || id >= a.weight.shape[0]) return i;
    }
    const int64_t row_bytes = a.weight.shape[1] * size, weight_stride = a.weight.stride[0] * size;
    if (row_bytes == 0) return kOk;
    parallel_for(num_ids, (4 * kGrain + row_bytes - 1) / row_bytes, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t id = index_at(a.ids.data, a.ids.dtype, i);
            memcpy(static_cast<char*>(a.y.data) + i * row_bytes, static_cast<const char*>(a.weight.data) + id * weight_stride, row_bytes);
        }
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
