// Pools of keys and values: what they hold, as floats, and where slots lie in them. Slot j of stream s is in
// block tables[s, j / S], S slots a block. Keys lie there as they are read: sixteen side by side, a lane for
// each.
#pragma once
#include "attention.h"
#include "quant.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kSplit = 256;  // slots that are taken together
constexpr int kLanes = kKeyLanes, kVectors = kLanes / W;
constexpr int kGroups = kSplit / kLanes;
constexpr int kMaxDim = kMaxHeadDim;
static_assert(kSplit % kMaxBlockSize == 0);

struct q8 { uint8_t byte; };  // of a pool in q8_0

// Calls body with a value of the pool's element type
template <class Body>
void with_pool_type(DType dtype, Body&& body) {
    if (dtype == DType::u8)
        body(q8{});
    else
        with_type(dtype, body);
}

// A split: where each sixteen of its slots lie
template <class T>
struct Split {
    const T *keys[kGroups], *values[kGroups];
    int64_t key_stride, value_stride;  // from one of D to the next, from one slot to the next
};

constexpr int kRun = 32;  // of D, which share a scale in q8_0

// Sixteen keys, a lane for each. `enter` comes before a run, `at` gives vector n of the i-th of it.
template <class T>
struct KeyLanes {
    const T* data;
    int64_t stride;
    const T* run;

    INFINI_INLINE void enter(int64_t first) { run = data + first * stride; }
    INFINI_INLINE vf at(int64_t i, int n) const { return load(run + i * stride + n * W); }
};

template <>
struct KeyLanes<q8> {
    const q8* data;
    int64_t stride;  // runs are contiguous
    const int8_t* codes;
    vf scales[kVectors];

    INFINI_INLINE void enter(int64_t first) {
        const uint8_t* run = &data->byte + first / kRun * kLanes * Q8_0::kBytes;
        for (int n = 0; n < kVectors; ++n) scales[n] = load(reinterpret_cast<const f16*>(run) + n * W);
        codes = reinterpret_cast<const int8_t*>(run) + kLanes * sizeof(f16);
    }
    INFINI_INLINE vf at(int64_t i, int n) const { return scales[n] * load(codes + i * kLanes + n * W); }
};

template <class T>
INFINI_INLINE inline KeyLanes<T> lanes_of(const Split<T>& split, int64_t group) {
    KeyLanes<T> lanes;
    lanes.data = split.keys[group], lanes.stride = split.key_stride;
    return lanes;
}

// Elements i to i + W of the value at `row`
template <class T>
INFINI_INLINE inline vf value_at(const T* row, int64_t i) {
    return load(row + i);
}
INFINI_INLINE inline vf value_at(const q8* row, int64_t i) {
    const uint8_t* block = &row->byte + i / kRun * Q8_0::kBytes;
    return splat_half(block) * load(reinterpret_cast<const int8_t*>(block) + sizeof(f16) + i % kRun);
}

// The first `count` < W of them, which rows of blocks never need
template <class T>
INFINI_INLINE inline vf value_at(const T* row, int64_t i, int64_t count) {
    if constexpr (std::is_same_v<T, q8>)
        return vf{};
    else
        return load_n(row + i, count);
}

// The first token that is nowhere, or sees a slot that is. Tokens of one stream that follow each other look
// at an entry of its table once.
template <class Args>
int64_t first_bad_token(const Args& a, int64_t window) {
    const int64_t block_size = a.values.shape[2];
    int64_t last_stream = -1;
    Range good{0, 0};
    for (int64_t n = 0; n < num_elements(a.slots); ++n) {
        const int64_t stream = index_at(a.streams.data, a.streams.dtype, n),
                      slot = index_at(a.slots.data, a.slots.dtype, n);
        if (!has_slot(a.tables, block_size, stream, slot)) return n;
        if (stream != last_stream) last_stream = stream, good = {0, 0};
        const Range seen = blocks_seen(slot, window, block_size);
        const bool is_near = seen.begin <= good.end && good.begin <= seen.end;
        if (!is_near) good = {seen.begin, seen.begin};
        if (first_bad_block(a.tables, stream, {seen.begin, good.begin}, a.keys.shape[0]) >= 0) return n;
        if (first_bad_block(a.tables, stream, {good.end, seen.end}, a.keys.shape[0]) >= 0) return n;
        good = {smaller(seen.begin, good.begin), larger(seen.end, good.end)};
    }
    return kOk;
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
