// The arguments of attention.cpp's and store_heads.cpp's ops
#pragma once
#include "tensor.h"

namespace infini {

constexpr int kMaxHeadDim = 256;
constexpr int64_t kMaxGroupFloats = 8192;  // heads that share a key head times (head size + 2) must fit
constexpr int kKeyLanes = 16;              // keys that lie side by side in a pool
constexpr int64_t kMaxBlockSize = 256;

// Pools are [blocks, kv heads, slots / 16, dim, 16] of keys and [blocks, kv heads, slots, dim] of values, or
// bytes of q8_0: [blocks, kv heads, slots / 16, dim / 32 * 544] and [blocks, kv heads, slots, dim / 32 * 34].
// Tables are [streams, blocks of a stream].
struct Attention {
    Tensor y, q, keys, values, tables, streams, slots, sinks;  // without data where there are no sinks
    float scale, softcap;                                      // 0: no cap
    int64_t window;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 8};
};

// The outputs are pools, written in place.
struct StoreKv {
    Tensor keys, values, k, v, tables, streams, slots;
    static constexpr Roles kRoles{.outputs = 2, .tensors = 7, .is_in_place = true};
};

// y is of the queries. Without queries and angles k is stored as it is.
struct StoreHeads {
    Tensor y, q, k, v, positions, sin, cos, keys, values, tables, streams, slots;
    bool interleaved;
    static constexpr Roles kRoles{.outputs = 1, .tensors = 12, .overwritten = 1 << 1};
};

struct Range { int64_t begin, end; };

static inline int64_t table_entry(const Tensor& tables, int64_t stream, int64_t i) {
    return index_at(tables.data, tables.dtype, stream * tables.stride[0] + i);
}

static inline bool has_slot(const Tensor& tables, int64_t block_size, int64_t stream, int64_t slot) {
    return stream >= 0 && stream < tables.shape[0] && slot >= 0 && slot / block_size < tables.shape[1];
}

// The first slot that the token at `slot` sees
static inline int64_t first_slot(int64_t slot, int64_t window) {
    return window > 0 && slot >= window ? slot - window + 1 : 0;
}

// The entries of its stream's table that are looked at for it
static inline Range blocks_seen(int64_t slot, int64_t window, int64_t block_size) {
    return {first_slot(slot, window) / block_size, slot / block_size + 1};
}

// The first of these entries that is no block of a pool, or -1
static inline int64_t first_bad_block(const Tensor& tables, int64_t stream, Range entries,
                                      int64_t num_blocks) {
    for (int64_t i = entries.begin; i < entries.end; ++i)
        if (const int64_t block = table_entry(tables, stream, i); block < 0 || block >= num_blocks) return i;
    return -1;
}

}  // namespace infini
