// The pairs of a head, rotated: as halves, or as neighbours
#pragma once
#include <utility>

#include "vec.h"

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

inline void rotate_halves(double* y, const double* x, const double* s, const double* c, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const double x0 = x[i], x1 = x[half + i];
        y[i] = x0 * c[i] - x1 * s[i];
        y[half + i] = x0 * s[i] + x1 * c[i];
    }
}

inline void rotate_neighbours(double* y, const double* x, const double* s, const double* c, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const double x0 = x[2 * i], x1 = x[2 * i + 1];
        y[2 * i] = x0 * c[i] - x1 * s[i];
        y[2 * i + 1] = x0 * s[i] + x1 * c[i];
    }
}

// How a head is rotated
template <class T>
using Rotate = void (*)(T* y, const T* x, const T* s, const T* c, int64_t half);

template <class T>
Rotate<T> rotation(bool is_interleaved) {
    return is_interleaved ? static_cast<Rotate<T>>(rotate_neighbours) : static_cast<Rotate<T>>(rotate_halves);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
