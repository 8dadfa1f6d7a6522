// Rotary position embedding. With (c, s) = (cos, sin)[position][i], every pair (x0, x1) of a head becomes
//   y0 = x0 * c - x1 * s,  y1 = x0 * s + x1 * c
// The pair is (2i, 2i + 1) when interleaved (GPT-J), (i, i + d/2) otherwise (GPT-NeoX). y may be x.
// x and y are [(batch,) seq, heads, d]; positions [seq] or [batch, seq]; tables [length, d/2].
#include "rope.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

struct Pair { vf x0, x1; };

inline Pair rotate(Pair p, vf s, vf c) { return {fma(p.x0, c, -(p.x1 * s)), fma(p.x0, s, p.x1 * c)}; }

template <int... I>
inline Pair split_even_odd(vf a, vf b, std::integer_sequence<int, I...>) {
    return {__builtin_shufflevector(a, b, (2 * I)...), __builtin_shufflevector(a, b, (2 * I + 1)...)};
}

template <int... I>
inline Pair interleave(Pair p, std::integer_sequence<int, I...>) {
    return {__builtin_shufflevector(p.x0, p.x1, (I / 2 + I % 2 * W)...),
            __builtin_shufflevector(p.x0, p.x1, (W / 2 + I / 2 + I % 2 * W)...)};
}

using Lanes = std::make_integer_sequence<int, W>;

template <class T>
void rotate_halves(T* y, const T* x, const T* s, const T* c, int64_t half) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const Pair p = rotate({load(x + i), load(x + half + i)}, load(s + i), load(c + i));
        store(y + i, p.x0);
        store(y + half + i, p.x1);
    }
    const int64_t n = half - i;
    if (n == 0) return;
    const Pair p = rotate({load_n(x + i, n), load_n(x + half + i, n)}, load_n(s + i, n), load_n(c + i, n));
    store_n(y + i, p.x0, n);
    store_n(y + half + i, p.x1, n);
}

template <class T>
void rotate_neighbours(T* y, const T* x, const T* s, const T* c, int64_t half) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const Pair p = split_even_odd(load(x + 2 * i), load(x + 2 * i + W), Lanes{});
        const Pair q = interleave(rotate(p, load(s + i), load(c + i)), Lanes{});
        store(y + 2 * i, q.x0);
        store(y + 2 * i + W, q.x1);
    }
    if (i == half) return;
    T buffer[2 * W];  // a short last vector, widened with zeros
    store(buffer, vf{});
    store(buffer + W, vf{});
    memcpy(buffer, x + 2 * i, 2 * (half - i) * sizeof(T));
    const Pair p = split_even_odd(load(buffer), load(buffer + W), Lanes{});
    const Pair q = interleave(rotate(p, load_n(s + i, half - i), load_n(c + i, half - i)), Lanes{});
    store(buffer, q.x0);
    store(buffer + W, q.x1);
    memcpy(y + 2 * i, buffer, 2 * (half - i) * sizeof(T));
}

void rotate_halves(double* y, const double* x, const double* s, const double* c, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const double x0 = x[i], x1 = x[half + i];
        y[i] = x0 * c[i] - x1 * s[i];
        y[half + i] = x0 * s[i] + x1 * c[i];
    }
}

void rotate_neighbours(double* y, const double* x, const double* s, const double* c, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const double x0 = x[2 * i], x1 = x[2 * i + 1];
        y[2 * i] = x0 * c[i] - x1 * s[i];
        y[2 * i + 1] = x0 * s[i] + x1 * c[i];
    }
}

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
    const auto rotate_head =
        a.interleaved ? static_cast<void (*)(T*, const T*, const T*, const T*, int64_t)>(rotate_neighbours)
                      : static_cast<void (*)(T*, const T*, const T*, const T*, int64_t)>(rotate_halves);
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
