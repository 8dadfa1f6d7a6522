// y[i] = dequantized(weight[ids[i]]), in float32
#include "quant.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {

int64_t quantized_embedding(const QuantizedEmbedding& a) {
    const int64_t num_ids = num_elements(a.ids);
    for (int64_t i = 0; i < num_ids; ++i) {
        const int64_t id = index_at(a.ids.data, a.ids.dtype, i);
        if (id < 0 || id >= a.weight.shape[0]) return i;
    }
    const BlockSize size = block_size(a.type);
    const int64_t row_length = a.weight.shape[1] / size.bytes * size.elements;
    if (row_length == 0) return kOk;
    const Dequantize dequantize = dequantizer(a.type);
    parallel_for(num_ids, (kGrain + row_length - 1) / row_length, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t id = index_at(a.ids.data, a.ids.dtype, i);
            const uint8_t* row = static_cast<const uint8_t*>(a.weight.data) + id * a.weight.stride[0];
            dequantize(static_cast<float*>(a.y.data) + i * row_length, row, row_length);
        }
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
