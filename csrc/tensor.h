// What a kernel sees of a tensor: a pointer, a dtype, sizes and strides (counted in elements).
#pragma once
#include <cstdint>

namespace infini {

enum class DType : uint8_t { f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64 };

constexpr int kMaxDims = 6;

struct Tensor {
    void* data;
    int64_t shape[kMaxDims];
    int64_t stride[kMaxDims];
    int32_t ndim;
    DType dtype;
};

constexpr int64_t kOk = -1;  // what a kernel returns that found nothing wrong

// Of the tensors that a struct of arguments begins with: the first `outputs` are written, and those whose bit
// is set in `overwritten` may be the very view that is written, because each row is read before it is.
struct Roles {
    int outputs, tensors;
    unsigned overwritten = 0;
    bool is_in_place = false;  // the outputs are arguments too, and keep what is not written
};

// Asks memory for the line at p. On x86 into the second cache alone: the first waits for too few lines at
// once to keep memory busy. Inlined before GCC finds that a call of it does nothing, and leaves it out.
__attribute__((always_inline)) static inline void ask_for(const void* p) {
#if defined(__x86_64__)
    __builtin_prefetch(p, 0, 2);
#else
    __builtin_prefetch(p);
#endif
}

// For who reads on from `p`: a line of the run of pages after the one that p is in. They are asked for in
// turn, since memory gives the lines of several pages faster than those of one.
__attribute__((always_inline)) static inline void ask_in_turn(const void* p) {
    constexpr uintptr_t kLine = 64, kPage = 4096, kPages = 4, kRun = kPages * kPage;
    const auto at = reinterpret_cast<uintptr_t>(p), line = at % kRun / kLine;
    const uintptr_t next = at - at % kRun + kRun;
    ask_for(reinterpret_cast<const void*>(next + line % kPages * kPage + line / kPages * kLine));
}

static constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t item_size(DType dtype) {
    constexpr int64_t sizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8};
    return sizes[static_cast<int>(dtype)];
}

static inline int64_t num_elements(const Tensor& t) {
    int64_t count = 1;
    for (int i = 0; i < t.ndim; ++i) count *= t.shape[i];
    return count;
}

// The i-th integer of a contiguous index array of any integer dtype. A uint64 beyond int64 comes back
// negative, which every bounds check refuses.
static inline int64_t index_at(const void* data, DType dtype, int64_t i) {
    switch (dtype) {
        case DType::i8: return static_cast<const int8_t*>(data)[i];
        case DType::i16: return static_cast<const int16_t*>(data)[i];
        case DType::i32: return static_cast<const int32_t*>(data)[i];
        case DType::u8: return static_cast<const uint8_t*>(data)[i];
        case DType::u16: return static_cast<const uint16_t*>(data)[i];
        case DType::u32: return static_cast<const uint32_t*>(data)[i];
        default: return static_cast<const int64_t*>(data)[i];
    }
}

}  // namespace infini
