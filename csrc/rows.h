// A tensor as rows: the last dimension contiguous, the leading ones under any strides.
#pragma once
#include "pool.h"
#include "tuning.h"

namespace infini::INFINI_LEVEL {

struct Rows {
    const Tensor& t;

    int64_t length() const { return t.ndim ? t.shape[t.ndim - 1] : 1; }

    int64_t count() const {
        int64_t rows = 1;
        for (int i = 0; i + 1 < t.ndim; ++i) rows *= t.shape[i];
        return rows;
    }

    template <class T>
    T* at(int64_t row) const {
        T* at = static_cast<T*>(t.data);
        for (int i = t.ndim - 2; i >= 0; --i) {
            if (row < t.shape[i]) return at + row * t.stride[i];  // mostly: divisions take long
            at += row % t.shape[i] * t.stride[i];
            row /= t.shape[i];
        }
        return at;
    }
};

// body(first_row, last_row), in parallel where there is work enough
template <class Body>
inline void for_rows(const Tensor& t, Body&& body) {
    const Rows rows{t};
    if (rows.length() == 0) return;
    parallel_for(rows.count(), (kRowsElements + rows.length() - 1) / rows.length(), body);
}

// Calls body with a value of the tensor's element type
template <class Body>
inline void with_type(DType dtype, Body&& body) {
    if (dtype == DType::f32)
        body(float{});
    else if (dtype == DType::bf16)
        body(bf16{});
    else
        body(f16{});
}

// y = sums + bias, if there is one
template <class T>
inline void write_sums(T* y, const float* sums, const T* bias, int64_t count) {
    if (bias)
        map([](vf sum, vf b) { return sum + b; }, count, y, sums, bias);
    else
        map([](vf sum) { return sum; }, count, y, sums);
}

}  // namespace infini::INFINI_LEVEL
