// y[r] = exp(x[r] - max(x[r])) / sum(exp(x[r] - max(x[r]))), the row read by one thread; y may be x.
// Causal: x is [..., s, t]; row i sees the first t - s + i + 1 columns and the others become 0.
#include "softmax.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr float kLowest = -__builtin_inff();

template <class T>
float row_max(const T* x, int64_t n) {
    vf m0 = splat(kLowest), m1 = m0;
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        m0 = max(m0, load(x + i));
        m1 = max(m1, load(x + i + W));
    }
    for (; i + W <= n; i += W) m0 = max(m0, load(x + i));
    if (i < n) m1 = max(m1, load_n(x + i, n - i, kLowest));
    return max(max(m0, m1));
}

// Exponentials are kept in float32 until they are divided: in y itself, or, for half types, in a buffer on
// the stack. A half row too long for the buffer is exponentiated twice, which rounds no differently.
constexpr int64_t kBufferElements = 4096;

template <class T>
vf exponentials(float* kept, const T* x, int64_t n, vf top) {
    vf total[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
        for (int j = 0; j < 2; ++j) {
            const vf e = exp(load(x + i + j * W) - top);
            if (kept) store(kept + i + j * W, e);
            total[j] += e;
        }
    for (; i < n; i += W) {
        const int64_t count = n - i < W ? n - i : W;
        const vf e = exp(load_n(x + i, count, kLowest) - top);
        if (kept) store_n(kept + i, e, count);
        total[0] += e;
    }
    return total[0] + total[1];
}

template <class T>
void softmax_row(T* y, const T* x, int64_t n) {
    float buffer[sizeof(T) == sizeof(float) ? 1 : kBufferElements];
    float* kept = sizeof(T) == sizeof(float) ? reinterpret_cast<float*>(y)
                  : n <= kBufferElements     ? buffer
                                             : nullptr;
    const vf top = splat(row_max(x, n));
    const vf inverse = splat(1.0f / sum(exponentials(kept, x, n, top)));
    if (kept)
        map([&](vf e) { return e * inverse; }, n, y, kept);
    else
        map([&](vf v) { return exp(v - top) * inverse; }, n, y, x);
}

// Row i of [..., queries, columns] sees all columns but the last queries - 1 - i.
template <class T>
void softmax_rows(const Softmax& a, int64_t queries) {
    const Rows y{a.y}, x{a.x};
    for_rows(a.x, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t hidden = queries - 1 - r % queries, visible = x.length() - hidden;
            T* row = y.at<T>(r);
            softmax_row(row, x.at<T>(r), visible);
            memset(static_cast<void*>(row + visible), 0, hidden * sizeof(T));
        }
    });
}

}  // namespace

int64_t softmax(const Softmax& a) {
    with_type(a.x.dtype, [&](auto type) { softmax_rows<decltype(type)>(a, 1); });
    return kOk;
}

int64_t causal_softmax(const CausalSoftmax& a) {
    with_type(a.x.dtype, [&](auto type) { softmax_rows<decltype(type)>(a, a.x.shape[a.x.ndim - 2]); });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
