// Rotary position embedding. With (c, s) = (cos, sin)[position][i], every pair (x0, x1) of a head becomes
//   y0 = x0 * c - x1 * s,  y1 = x0 * s + x1 * c
// The pair is (2i, 2i + 1) when interleaved (GPT-J), (i, i + d/2) otherwise (GPT-NeoX). y may be x.
// x and y are [(batch,) seq, heads, d]; positions [seq] or [batch, seq]; tables [length, d/2].
#include "rope.h"

#include "rotation.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

Tensor with_batch(Tensor t) {  // [seq, heads, d] -> [1, seq, heads, d]
    if (t.ndim != 3) return t;
    for (int i = 3; i > 0; --i) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
    t.shape[0] = 1, t.stride[0] = 0, t.ndim = 4;
    return t;
}

template <class T>
void rope_of(const Rope& a) {
    const int64_t seq = a.x.shape[1], heads = a.x.shape[2], half = a.x.shape[3] / 2;
    const int64_t position_stride = a.positions.ndim == 2 ? seq : 0;
    const Rotate<T> rotate_head = rotation<T>(a.interleaved);
    const int64_t grain = half ? (kGrainElements / 2 + half - 1) / half : 1;
    parallel_for(a.x.shape[0] * seq * heads, grain, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t h = item % heads, t = item / heads % seq, b = item / heads / seq;
            const int64_t row = index_at(a.positions.data, a.positions.dtype, b * position_stride + t) * half;
            const T* x =
                static_cast<const T*>(a.x.data) + b * a.x.stride[0] + t * a.x.stride[1] + h * a.x.stride[2];
            T* y = static_cast<T*>(a.y.data) + b * a.y.stride[0] + t * a.y.stride[1] + h * a.y.stride[2];
            rotate_head(y, x, static_cast<const T*>(a.sin.data) + row,
                        static_cast<const T*>(a.cos.data) + row, half);
        }
    });
}

}  // namespace

int64_t rope(const Rope& a) {
    const int64_t num_positions = num_elements(a.positions);
    for (int64_t i = 0; i < num_positions; ++i) {  // before anything is written: y may be x
        const int64_t position = index_at(a.positions.data, a.positions.dtype, i);
        if (position < 0 || position >= a.sin.shape[0]) return i;
    }
    Rope batched = a;
    batched.x = with_batch(a.x), batched.y = with_batch(a.y);
    if (a.x.dtype == DType::f64)
        rope_of<double>(batched);
    else
        with_type(a.x.dtype, [&](auto type) { rope_of<decltype(type)>(batched); });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
