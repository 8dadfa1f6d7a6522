// silu(x) = x * sigmoid(x)                swiglu(a, b) = silu(a) * b                add(a, b) = a + b
// gelu(x) = x * Phi(x)                    gelu_fast(x) = x * sigmoid(1.702 x)
// gelu_tanh(x) = x * (1 + tanh(u)) / 2 = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3)
// geglu(a, b) = gelu(a) * b, of any of the three
// scale(x) = factor * x                   add_scaled(a, b) = a + factor * b
// softcap(x) = cap * tanh(x / cap)        gate_rows(x, g) = x * sigmoid(g), a g for each row
// Elementwise: y may be an input.
#include "activation.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

// erf(x) as x * P(x^2) / Q(x^2) on [-4, 4], beyond which it rounds to 1 (absolute error below 2e-7)
inline vf erf(vf x) {
    const vf z = min(splat(4.0f), max(splat(-4.0f), x)), square = z * z;
    const vf fourth = square * square;
    const vf p0 = fma(square, splat(-2.72614225801306e-10f), splat(2.77068142495902e-08f));
    const vf p1 = fma(square, splat(-2.10102402082508e-06f), splat(-5.69250639462346e-05f));
    const vf p2 = fma(square, splat(-7.34990630326855e-04f), splat(-2.95459980854025e-03f));
    const vf p = fma(fma(fma(p0, fourth, p1), fourth, p2), square, splat(-1.60960333262415e-02f));
    const vf q0 = fma(square, splat(-1.45660718464996e-05f), splat(-2.13374055278905e-04f));
    const vf q1 = fma(square, splat(-1.68282697438203e-03f), splat(-7.37332916720468e-03f));
    const vf q = fma(fma(q0, fourth, q1), square, splat(-1.42647390514189e-02f));
    return z * p * reciprocal(q);
}

inline vf normal_cdf(vf x) {
    const vf cdf = fma(splat(0.5f), erf(x * 0.70710678f), splat(0.5f));
    return select(x < splat(-6.0f), vf{}, cdf);  // below 1e-9
}

struct Flat {
    bool is_contiguous;
    int64_t num_elements;
};

Flat flat(const Tensor& t) {
    int64_t expected = 1;
    bool is_contiguous = true;
    for (int i = t.ndim - 1; i >= 0; --i) {
        is_contiguous &= t.shape[i] == 1 || t.stride[i] == expected;
        expected *= t.shape[i];
    }
    return {is_contiguous, expected};
}

// body(y, inputs..., n) over pieces of rows, or of the whole when everything is contiguous
template <class T, class Body, class... Inputs>
void elementwise(Body body, const Tensor& y, const Inputs&... inputs) {
    const Flat whole = flat(y);
    if (whole.is_contiguous && (flat(inputs).is_contiguous && ...)) {
        parallel_for((whole.num_elements + kPieceElements - 1) / kPieceElements,
                     kGrainElements / kPieceElements, [&](int64_t begin, int64_t end) {
                         const int64_t from = begin * kPieceElements,
                                       to = end * kPieceElements < whole.num_elements ? end * kPieceElements
                                                                                      : whole.num_elements;
                         body(static_cast<T*>(y.data) + from, (static_cast<const T*>(inputs.data) + from)...,
                              to - from);
                     });
        return;
    }
    const Rows rows{y};
    for_rows(y, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            body(rows.at<T>(r), Rows{inputs}.template at<const T>(r)..., rows.length());
    });
}

template <class Args, class F>
int64_t unary(const Args& a, F f) {
    with_type(a.x.dtype, [&](auto type) {
        using T = decltype(type);
        elementwise<T>([&](T* y, const T* x, int64_t n) { map(f, n, y, x); }, a.y, a.x);
    });
    return kOk;
}

template <class Args, class F>
int64_t binary(const Args& args, F f) {
    with_type(args.a.dtype, [&](auto type) {
        using T = decltype(type);
        elementwise<T>([&](T* y, const T* a, const T* b, int64_t n) { map(f, n, y, a, b); }, args.y, args.a,
                       args.b);
    });
    return kOk;
}

// body(f) for the f that `kind` names
template <class Body>
int64_t with_gelu(GeluKind kind, Body&& body) {
    if (kind == GeluKind::exact) return body([](vf x) { return x * normal_cdf(x); });
    if (kind == GeluKind::fast) return body([](vf x) { return x * sigmoid(1.702f * x); });
    return body([](vf x) { return gelu_tanh(x); });
}

}  // namespace

int64_t silu(const Unary& a) {
    return unary(a, [](vf x) { return x * sigmoid(x); });
}

int64_t gelu(const Gelu& a) {
    return with_gelu(a.kind, [&](auto f) { return unary(a, f); });
}

int64_t geglu(const Geglu& args) {
    return with_gelu(args.kind, [&](auto f) { return binary(args, [f](vf a, vf b) { return f(a) * b; }); });
}

int64_t swiglu(const Binary& args) {
    return binary(args, [](vf a, vf b) { return a * sigmoid(a) * b; });
}

int64_t add(const Binary& args) {
    return binary(args, [](vf a, vf b) { return a + b; });
}

int64_t gate_rows(const GateRows& a) {
    with_type(a.x.dtype, [&](auto type) {
        using T = decltype(type);
        const Rows y{a.y}, x{a.x}, gates{a.gates};
        for_rows(a.x, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                const vf share = splat(sigmoid(load_n(gates.at<const T>(r), 1))[0]);
                map([share](vf v) { return v * share; }, x.length(), y.at<T>(r), x.at<const T>(r));
            }
        });
    });
    return kOk;
}

int64_t scale(const Scale& a) {
    return unary(a, [&](vf x) { return a.factor * x; });
}

int64_t add_scaled(const AddScaled& args) {
    return binary(args, [&](vf a, vf b) { return a + args.factor * b; });
}

int64_t softcap(const Softcap& a) {
    return unary(a, [&](vf x) { return a.cap * tanh(x / a.cap); });
}

}  // namespace infini::INFINI_LEVEL
