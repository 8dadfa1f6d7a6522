// rms_norm:     y = round(x / sqrt(mean(x^2) + eps)) * weight, where round is to the dtype of x, as in LLaMA
// add_rms_norm: sum = x + residual, then y = rms_norm(sum)
// layer_norm:   y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, sums in float64 with compensation
// A row is read by one thread; y may be x, and sum may be x or residual.
#include "norm.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

template <class T>
void rms_norm_row(T* y, const T* x, const T* weight, int64_t n, float eps) {
    const float mean_square = sum_of(x, n, [](vf s, vf v) { return fma(v, v, s); }) / static_cast<float>(n);
    const vf scale = splat(1.0f / sqrtf(mean_square + eps));
    map([&](vf v, vf w) { return rounded_to(T{}, v * scale) * w; }, n, y, x, weight);
}

// ---- float64 sums ----

typedef double vd __attribute__((vector_size(W * 4)));  // W / 2 doubles

struct Halves { vd low, high; };

inline Halves widen(vf v) {
#if defined(INFINI_AVX512)
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))};
#elif defined(INFINI_AVX2)
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))};
#elif defined(INFINI_NEON)
    return {vcvt_f64_f32(vget_low_f32(v)), vcvt_high_f64_f32(v)};
#else
    return {vd{v[0], v[1]}, vd{v[2], v[3]}};
#endif
}

// A float64 sum that carries its rounding error along (Kahan)
struct CompensatedSum {
    vd total{}, error{};

    void add(vd x) {
        const vd y = x - error;
        const vd t = total + y;
        error = (t - total) - y;
        total = t;
    }

    double value() const {
        double result = 0, carried = 0;
        for (int i = 0; i < W / 2; ++i) result += total[i], carried += error[i];
        return result - carried;
    }
};

struct Moments { double mean, variance; };

// Both sums in one pass, of distances from the row's first element so that a large mean does not swallow the
// variance. Eight vectors are added plainly, then compensated: that alone is far below a float32's last bit.
template <class T>
Moments moments(const T* x, int64_t n) {
    const vf origin = splat(load_n(x, 1)[0]);
    const vd shift = widen(origin).low;
    CompensatedSum sum, squares;
    const auto add_vectors = [&](auto vector_at, int64_t begin, int64_t end) {
        vd s0{}, s1{}, q0{}, q1{};
        for (int64_t i = begin; i < end; i += W) {
            const Halves h = widen(vector_at(i));
            const vd low = h.low - shift, high = h.high - shift;
            s0 += low;
            s1 += high;
            q0 += low * low;
            q1 += high * high;
        }
        sum.add(s0 + s1);
        squares.add(q0 + q1);
    };
    int64_t i = 0;
    for (; i + 8 * W <= n; i += 8 * W) add_vectors([&](int64_t at) { return load(x + at); }, i, i + 8 * W);
    const auto short_vector = [&](int64_t at) { return load_n(x + at, n - at < W ? n - at : W, origin[0]); };
    if (i < n) add_vectors(short_vector, i, n);
    const double offset = sum.value() / static_cast<double>(n);
    const double variance = squares.value() / static_cast<double>(n) - offset * offset;
    return {shift[0] + offset, variance > 0 ? variance : (variance == variance ? 0 : variance)};
}

template <class T>
void layer_norm_row(T* y, const T* x, const T* weight, const T* bias, int64_t n, double eps) {
    const Moments m = moments(x, n);
    const vf scale = splat(static_cast<float>(1.0 / std::sqrt(m.variance + eps)));
    // the mean in two floats: x minus the first is exact where it matters
    const float mean = static_cast<float>(m.mean);
    const vf high = splat(mean), low = splat(static_cast<float>(m.mean - mean));
    const auto normalized = [&](vf v) { return ((v - high) - low) * scale; };
    if (!weight) return map(normalized, n, y, x);
    map([&](vf v, vf w, vf b) { return fma(normalized(v), w, b); }, n, y, x, weight, bias);
}

}  // namespace

int64_t rms_norm(const RmsNorm& a) {
    with_type(a.x.dtype, [&](auto type) {
        using T = decltype(type);
        const Rows y{a.y}, x{a.x};
        const T* weight = static_cast<const T*>(a.weight.data);
        for_rows(a.x, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r)
                rms_norm_row(y.at<T>(r), x.at<T>(r), weight, x.length(), a.eps);
        });
    });
    return kOk;
}

int64_t add_rms_norm(const AddRmsNorm& a) {
    with_type(a.x.dtype, [&](auto type) {
        using T = decltype(type);
        const Rows y{a.y}, sum{a.sum}, x{a.x}, residual{a.residual};
        const T* weight = static_cast<const T*>(a.weight.data);
        for_rows(a.x, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                map([](vf a, vf b) { return a + b; }, x.length(), sum.at<T>(r), x.at<T>(r),
                    residual.at<T>(r));
                rms_norm_row(y.at<T>(r), sum.at<T>(r), weight, x.length(), a.eps);
            }
        });
    });
    return kOk;
}

int64_t layer_norm(const LayerNorm& a) {
    with_type(a.x.dtype, [&](auto type) {
        using T = decltype(type);
        const Rows y{a.y}, x{a.x};
        const T* weight = a.weight.data ? static_cast<const T*>(a.weight.data) : nullptr;
        const T* bias = a.weight.data ? static_cast<const T*>(a.bias.data) : nullptr;
        for_rows(a.x, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r)
                layer_norm_row(y.at<T>(r), x.at<T>(r), weight, bias, x.length(), a.eps);
        });
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
