// The arguments of norms, activations, softmax and rope, checked
#pragma once
#include "binding_arguments.h"

namespace infini {
namespace {

// ---- norms, activations, softmax --------------------------------------------------------------------------

void read_arguments(Reading<RmsNorm>& r, nb::handle x, nb::handle weight, double eps) {
    r.take_rows(r.args.x, x);
    check_vector(r.take(r.args.weight, weight), r.args.x);
    r.args.eps = static_cast<float>(eps);
}

void read_arguments(Reading<AddRmsNorm>& r, nb::handle x, nb::handle residual, nb::handle weight,
                    double eps) {
    r.take_rows(r.args.x, x);
    check_like(r.take(r.args.residual, residual), r.args.x);
    check_vector(r.take(r.args.weight, weight), r.args.x);
    r.args.eps = static_cast<float>(eps);
}

void read_arguments(Reading<LayerNorm>& r, nb::handle x, nb::handle weight, nb::handle bias, double eps) {
    r.take_rows(r.args.x, x);
    require(weight.is_none() == bias.is_none(), "layer_norm: expected weight and bias, or neither");
    if (!weight.is_none()) {
        check_vector(r.take(r.args.weight, weight), r.args.x);
        check_vector(r.take(r.args.bias, bias), r.args.x);
    }
    r.args.eps = eps;
}

void read_arguments(Reading<Unary>& r, nb::handle x) { r.take_rows(r.args.x, x); }

GeluKind gelu_kind(const char* approximate) {
    const char* const kinds[] = {"none", "tanh", "fast"};
    int kind = 0;
    while (kind < 3 && strcmp(kinds[kind], approximate)) ++kind;
    require(kind < 3, "gelu: approximate must be 'none', 'tanh' or 'fast'");
    return static_cast<GeluKind>(kind);
}

void read_arguments(Reading<Gelu>& r, nb::handle x, const char* approximate) {
    r.take_rows(r.args.x, x);
    r.args.kind = gelu_kind(approximate);
}

void read_arguments(Reading<GateRows>& r, nb::handle x, nb::handle gates) {
    r.take_rows(r.args.x, x);
    check_float_rows(r.take(r.args.gates, gates));
    const Tensor &rows = r.args.x, &each = r.args.gates;
    bool fits = each.dtype == rows.dtype && each.ndim == rows.ndim && each.shape[each.ndim - 1] == 1;
    for (int i = 0; fits && i + 1 < rows.ndim; ++i) fits = each.shape[i] == rows.shape[i];
    require(fits, "gate_rows: expected a gate for each row, of its dtype");
}

void read_arguments(Reading<Scale>& r, nb::handle x, double factor) {
    r.take_rows(r.args.x, x);
    r.args.factor = static_cast<float>(factor);
}

void read_arguments(Reading<Softcap>& r, nb::handle x, double cap) {
    r.take_rows(r.args.x, x);
    require(cap > 0, "softcap: the cap must be positive");
    r.args.cap = static_cast<float>(cap);
}

void read_arguments(Reading<Binary>& r, nb::handle a, nb::handle b) {
    r.take_rows(r.args.a, a);
    check_like(r.take(r.args.b, b), r.args.a);
}

void read_arguments(Reading<Geglu>& r, nb::handle a, nb::handle b, const char* approximate) {
    r.take_rows(r.args.a, a);
    check_like(r.take(r.args.b, b), r.args.a);
    r.args.kind = gelu_kind(approximate);
}

void read_arguments(Reading<AddScaled>& r, nb::handle a, nb::handle b, double factor) {
    r.take_rows(r.args.a, a);
    check_like(r.take(r.args.b, b), r.args.a);
    r.args.factor = static_cast<float>(factor);
}

void read_arguments(Reading<Softmax>& r, nb::handle x) { r.take_rows(r.args.x, x); }

void read_arguments(Reading<CausalSoftmax>& r, nb::handle x) {
    r.take_rows(r.args.x, x);
    const Tensor& t = r.args.x;
    require(t.ndim >= 2 && t.shape[t.ndim - 2] <= t.shape[t.ndim - 1],
            "causal_softmax: needs [..., s, t] with s <= t");
}

// ---- rope -------------------------------------------------------------------------------------------------

void check_positions(const Tensor& p, int64_t batch, int64_t seq) {
    require(is_index(p.dtype) && is_contiguous(p), "rope: positions must be contiguous integers");
    const bool fits =
        p.ndim == 1 ? p.shape[0] == seq : p.ndim == 2 && p.shape[0] == batch && p.shape[1] == seq;
    require(fits, "rope: positions must be [seq] or [batch, seq]");
}

// Of heads x
void check_angles(const Tensor& x, const Tensor& sin, const Tensor& cos) {
    require(x.dtype == sin.dtype && x.dtype == cos.dtype, "rope: x, sin and cos need one dtype");
    require(sin.ndim == 2 && same_shape(sin, cos) && is_contiguous(sin) && is_contiguous(cos),
            "rope: sin and cos must be contiguous [length, d/2] tables of one shape");
    require(x.shape[x.ndim - 1] == 2 * sin.shape[1],
            "rope: the head size must be twice the width of the tables");
}

void read_arguments(Reading<Rope>& r, nb::handle x, nb::handle positions, nb::handle sin, nb::handle cos,
                    bool interleaved) {
    Rope& a = r.args;
    r.take(a.x, x), r.take(a.positions, positions), r.take(a.sin, sin), r.take(a.cos, cos);
    require(a.x.ndim == 3 || a.x.ndim == 4, "rope: x must be [seq, heads, d] or [batch, seq, heads, d]");
    require(is_float(a.x.dtype) || a.x.dtype == DType::f64, "rope: x needs a floating dtype");
    require(has_rows(a.x), "rope: the last dimension of x must be contiguous");
    check_angles(a.x, a.sin, a.cos);
    check_positions(a.positions, a.x.ndim == 4 ? a.x.shape[0] : 1, a.x.shape[a.x.ndim - 3]);
    a.interleaved = interleaved;
    r.promise_like(x, a.x);
}

}  // namespace
}  // namespace infini
