// store_kv: the key and value of slot[n] of stream[n] become k[n] and v[n]
#include "pools.h"

namespace infini::INFINI_LEVEL {
namespace {

template <class T, class From>
void store_key(T* group, int64_t stride, int64_t lane, const From* k, int64_t dim) {
    for (int64_t first = 0; first < dim; first += kRun) {
        T rounded[kRun];
        const int64_t count = smaller(kRun, dim - first);
        map([](vf v) { return v; }, count, rounded, k + first);
        for (int64_t i = 0; i < count; ++i) group[(first + i) * stride + lane] = rounded[i];
    }
}

template <class From>
void store_key(q8* group, int64_t, int64_t lane, const From* k, int64_t dim) {
    uint8_t* run = &group->byte;
    for (int64_t first = 0; first < dim; first += kRun, run += kLanes * Q8_0::kBytes) {
        uint8_t block[Q8_0::kBytes];
        quantize_row<Q8_0>(block, k + first, kRun);
        memcpy(run + lane * sizeof(f16), block, sizeof(f16));
        for (int i = 0; i < kRun; ++i) run[kLanes * sizeof(f16) + i * kLanes + lane] = block[sizeof(f16) + i];
    }
}

template <class T, class From>
void store_value(T* row, const From* v, int64_t dim) {
    if constexpr (std::is_same_v<T, q8>)
        quantize_row<Q8_0>(&row->byte, v, dim);
    else
        map([](vf x) { return x; }, dim, row, v);
}

template <class T, class From>
void store_head(const StoreKv& a, int64_t g) {
    const int64_t num_tokens = a.k.shape[0], dim = a.k.shape[2], block_size = a.values.shape[2];
    auto* keys = static_cast<T*>(a.keys.data) + g * a.keys.stride[1];
    auto* values = static_cast<T*>(a.values.data) + g * a.values.stride[1];
    for (int64_t n = 0; n < num_tokens; ++n) {
        const int64_t slot = index_at(a.slots.data, a.slots.dtype, n), place = slot % block_size;
        const int64_t block =
            table_entry(a.tables, index_at(a.streams.data, a.streams.dtype, n), slot / block_size);
        store_key(keys + block * a.keys.stride[0] + place / kLanes * a.keys.stride[2], a.keys.stride[3],
                  place % kLanes, static_cast<const From*>(a.k.data) + n * a.k.stride[0] + g * a.k.stride[1],
                  dim);
        store_value(values + block * a.values.stride[0] + place * a.values.stride[2],
                    static_cast<const From*>(a.v.data) + n * a.v.stride[0] + g * a.v.stride[1], dim);
    }
}

}  // namespace

// Heads in parallel: of two tokens at one slot, the later one stays.
int64_t store_kv(const StoreKv& a) {
    if (const int64_t bad = first_bad_token(a, 1); bad != kOk) return bad;
    if (num_elements(a.k) == 0) return kOk;
    const int64_t num_heads = a.k.shape[1], of_a_head = a.k.shape[0] * a.k.shape[2];
    with_pool_type(a.keys.dtype, [&](auto to) {
        with_type(a.k.dtype, [&](auto from) {
            parallel_for(num_heads, (kStoredGrainElements + of_a_head - 1) / of_a_head,
                         [&](int64_t begin, int64_t end) {
                             for (int64_t g = begin; g < end; ++g)
                                 store_head<decltype(to), decltype(from)>(a, g);
                         });
        });
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
