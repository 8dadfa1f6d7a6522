// torch tensors as kernels see them, read through DLPack's C exchange, so that nothing of torch is linked;
// and what has to hold for them before a kernel may run.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "tensor.h"

namespace nb = nanobind;

namespace infini {
namespace {

// The start of DLPack 1.x's DLPackExchangeAPI; its address is torch.Tensor.__dlpack_c_exchange_api__
struct ExchangeApi {
    struct { uint32_t major, minor; } version;
    void* previous;
    void* allocate;
    void* to_managed;
    void* from_managed;
    int (*view)(void* object, nb::dlpack::dltensor* out);
    void* stream;
};

struct TorchTypes {
    PyTypeObject *tensor = nullptr, *parameter = nullptr;
    nb::handle is_grad_enabled, empty_like, empty, cpu, dtypes;  // dtypes in the order of DType
    const ExchangeApi* api = nullptr;
} g_torch;

constexpr int kDlpackCpu = 1;

// DLPack's names of the types, in the order of DType
constexpr struct {
    uint8_t code, bits;
} kDlpackTypes[] = {{2, 32}, {2, 64}, {2, 16}, {4, 16}, {0, 8},  {0, 16},
                    {0, 32}, {0, 64}, {1, 8},  {1, 16}, {1, 32}, {1, 64}};

bool read_dtype(nb::dlpack::dtype found, DType* dtype) {
    int index = 0;
    for (const auto& known : kDlpackTypes) {
        if (known.code == found.code && known.bits == found.bits && found.lanes == 1)
            return *dtype = static_cast<DType>(index), true;
        ++index;
    }
    return false;
}

bool read_exchange(nb::handle h, Tensor* t) {
    nb::dlpack::dltensor d;
    if (g_torch.api->view(h.ptr(), &d) != 0) return PyErr_Clear(), false;
    if (d.device.device_type != kDlpackCpu || d.ndim > kMaxDims || !read_dtype(d.dtype, &t->dtype))
        return false;
    t->data = static_cast<char*>(d.data) + d.byte_offset;
    t->ndim = d.ndim;
    for (int i = 0; i < d.ndim; ++i) t->shape[i] = d.shape[i], t->stride[i] = d.strides[i];
    return true;
}

// The same by attribute, for a torch that has no exchange API (before 2.10)
bool read_attributes(nb::handle h, Tensor* t) {
    static const char* const names[] = {"torch.float32", "torch.float64", "torch.float16", "torch.bfloat16",
                                        "torch.int8",    "torch.int16",   "torch.int32",   "torch.int64",
                                        "torch.uint8",   "torch.uint16",  "torch.uint32",  "torch.uint64"};
    if (!nb::cast<bool>(h.attr("is_cpu"))) return false;
    const nb::object dtype_object = h.attr("dtype"), size = h.attr("shape"), steps = h.attr("stride")();
    const std::string dtype = nb::str(dtype_object).c_str();
    int index = 0;
    while (index < 12 && dtype != names[index]) ++index;
    const nb::tuple shape(size), stride(steps);
    if (index == 12 || shape.size() > kMaxDims) return false;
    t->dtype = static_cast<DType>(index);
    t->data = reinterpret_cast<void*>(nb::cast<uintptr_t>(h.attr("data_ptr")()));
    t->ndim = static_cast<int>(shape.size());
    for (int i = 0; i < t->ndim; ++i)
        t->shape[i] = nb::cast<int64_t>(shape[i]), t->stride[i] = nb::cast<int64_t>(stride[i]);
    return true;
}

// Whether torch has yet to negate what lies in memory: the imaginary parts of conjugates. Between them lie
// the real ones, so that only rows of one element could pass for others.
bool is_negated(nb::handle h, const Tensor& t) {
    return (t.ndim == 0 || t.shape[t.ndim - 1] == 1) && nb::cast<bool>(h.attr("is_neg")());
}

// Subclasses other than Parameter (fake, wrapped, quantised tensors) have no memory of their own to read.
bool read(nb::handle h, Tensor* t) {
    if (Py_TYPE(h.ptr()) != g_torch.tensor && !PyObject_TypeCheck(h.ptr(), g_torch.parameter)) return false;
    if (!(g_torch.api ? read_exchange(h, t) : read_attributes(h, t)) || is_negated(h, *t)) return false;
    for (int i = 0; i < t->ndim; ++i)
        if (t->shape[i] == 1) t->stride[i] = 1;  // never stepped over
    return t->data || num_elements(*t) == 0;
}

std::string shape_of(const Tensor& t) {
    std::string text = "(";
    for (int i = 0; i < t.ndim; ++i) text += (i ? ", " : "") + std::to_string(t.shape[i]);
    return text + ")";
}

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

void require(bool holds, const char* rule) {
    if (!holds) refuse(rule);
}

Tensor tensor(nb::handle h) {
    Tensor t;
    if (!read(h, &t))
        throw nb::type_error("expected a plain CPU tensor of a numeric dtype with at most 6 dimensions");
    return t;
}

bool is_float(DType d) { return d == DType::f32 || d == DType::f16 || d == DType::bf16; }
bool is_index(DType d) { return d != DType::f64 && !is_float(d); }
bool same_shape(const Tensor& a, const Tensor& b) {
    bool same = a.ndim == b.ndim;
    for (int i = 0; same && i < a.ndim; ++i) same = a.shape[i] == b.shape[i];
    return same;
}
bool is_contiguous(const Tensor& t) {
    int64_t expected = 1;
    for (int i = t.ndim - 1; i >= 0; expected *= t.shape[i--])
        if (t.shape[i] != 1 && t.stride[i] != expected) return num_elements(t) == 0;
    return true;
}
bool has_rows(const Tensor& t) { return t.ndim == 0 || t.stride[t.ndim - 1] == 1 || num_elements(t) == 0; }

struct Span { const char *begin, *end; };

Span span(const Tensor& t) {
    int64_t last = 0;
    for (int i = 0; i < t.ndim; ++i) last += (t.shape[i] - 1) * t.stride[i];
    const char* begin = static_cast<const char*>(t.data);
    return {begin, num_elements(t) ? begin + (last + 1) * item_size(t.dtype) : begin};
}

bool is_same_view(const Tensor& a, const Tensor& b) {
    bool same = a.data == b.data && a.dtype == b.dtype && same_shape(a, b);
    for (int i = 0; same && i < a.ndim; ++i) same = a.stride[i] == b.stride[i];
    return same;
}

bool lie_apart(const Tensor& a, const Tensor& b) {
    const Span x = span(a), y = span(b);
    return x.end <= y.begin || y.end <= x.begin;
}

bool overlaps_itself(const Tensor& t) {  // conservative: strides must nest
    for (int i = 0; i < t.ndim; ++i)
        for (int j = 0; j < t.ndim; ++j) {
            if (t.shape[i] <= 1 || i == j || t.stride[j] > t.stride[i]) continue;
            if (t.shape[j] > 1 && t.stride[i] < t.stride[j] * t.shape[j] &&
                (t.stride[i] != t.stride[j] || i < j))
                return true;
        }
    for (int i = 0; i < t.ndim; ++i)
        if (t.shape[i] > 1 && t.stride[i] <= 0) return true;
    return false;
}

bool is_true(nb::object value) { return value.ptr() == Py_True; }

bool needs_grad(nb::handle h) {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    nb::object flag = nb::steal(PyObject_GetAttr(h.ptr(), name));
    if (!flag.is_valid()) throw nb::python_error();
    return is_true(flag);
}

}  // namespace
}  // namespace infini
