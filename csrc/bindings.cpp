// The only file that knows Python: reads torch tensors (through DLPack's C exchange, so nothing of torch is linked),
// checks what memory safety needs, and calls the kernels. Each op is there twice: `rms_norm(...)` runs it,
// `bind_rms_norm(...)` checks it once and returns a Call that runs it again and again, on the same tensors or on
// others of the same layout.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace nb = nanobind;
using namespace infini;

namespace {

// ---- tensors -------------------------------------------------------------------------------------------------------

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
    nb::handle is_grad_enabled, empty_like;
    const ExchangeApi* api = nullptr;
} g_torch;

constexpr int kDlpackCpu = 1;

bool read_dtype(nb::dlpack::dtype found, DType* dtype) {
    struct { int code, bits; DType dtype; } const known[] = {
        {2, 32, DType::f32}, {2, 64, DType::f64}, {2, 16, DType::f16}, {4, 16, DType::bf16},
        {0, 8, DType::i8},   {0, 16, DType::i16}, {0, 32, DType::i32}, {0, 64, DType::i64},
        {1, 8, DType::u8},   {1, 16, DType::u16}, {1, 32, DType::u32}, {1, 64, DType::u64}};
    for (const auto& k : known)
        if (k.code == found.code && k.bits == found.bits && found.lanes == 1) return *dtype = k.dtype, true;
    return false;
}

bool read_exchange(nb::handle h, Tensor* t) {
    nb::dlpack::dltensor d;
    if (g_torch.api->view(h.ptr(), &d) != 0) return PyErr_Clear(), false;
    if (d.device.device_type != kDlpackCpu || d.ndim > kMaxDims || !read_dtype(d.dtype, &t->dtype)) return false;
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
    for (int i = 0; i < t->ndim; ++i) t->shape[i] = nb::cast<int64_t>(shape[i]), t->stride[i] = nb::cast<int64_t>(stride[i]);
    return true;
}

// Subclasses other than Parameter (fake, wrapped, quantised tensors) have no memory of their own to read.
bool read(nb::handle h, Tensor* t) {
    if (Py_TYPE(h.ptr()) != g_torch.tensor && !PyObject_TypeCheck(h.ptr(), g_torch.parameter)) return false;
    if (!(g_torch.api ? read_exchange(h, t) : read_attributes(h, t))) return false;
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
    if (!read(h, &t)) throw nb::type_error("expected a plain CPU tensor of a numeric dtype with at most 6 dimensions");
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

// Writing y while x is read element by element is safe: they are one view, or lie apart
bool may_write(const Tensor& y, const Tensor& x) {
    const Span a = span(y), b = span(x);
    return a.end <= b.begin || b.end <= a.begin || is_same_view(y, x);
}

bool overlaps_itself(const Tensor& t) {  // conservative: strides must nest
    for (int i = 0; i < t.ndim; ++i)
        for (int j = 0; j < t.ndim; ++j) {
            if (t.shape[i] <= 1 || i == j || t.stride[j] > t.stride[i]) continue;
            if (t.shape[j] > 1 && t.stride[i] < t.stride[j] * t.shape[j] && (t.stride[i] != t.stride[j] || i < j)) return true;
        }
    for (int i = 0; i < t.ndim; ++i)
        if (t.shape[i] > 1 && t.stride[i] <= 0) return true;
    return false;
}

bool is_true(nb::object value) { return value.ptr() == Py_True; }

bool is_tensor(nb::handle h) {
    return Py_TYPE(h.ptr()) == g_torch.tensor || PyObject_TypeCheck(h.ptr(), g_torch.tensor);
}

// Kernels have no backward pass
bool needs_grad(nb::handle h) {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    nb::object flag = nb::steal(PyObject_GetAttr(h.ptr(), name));
    if (!flag.is_valid()) throw nb::python_error();
    return is_true(flag) && is_true(g_torch.is_grad_enabled());
}

// Can the row kernels take these? One floating dtype, rows contiguous, no gradient wanted, out None or safe to write.
// Arguments that are not tensors are passed over.
template <class Handles>
bool accepts_rows(nb::handle out, const Handles& arguments) {
    Tensor x[4], y;
    int count = 0;
    const bool may_need_grad = is_true(g_torch.is_grad_enabled());
    for (nb::handle argument : arguments) {
        if (!is_tensor(argument)) continue;
        if (count == 4 || !read(argument, &x[count]) || (may_need_grad && needs_grad(argument))) return false;
        const Tensor& t = x[count++];
        if (!is_float(t.dtype) || t.dtype != x[0].dtype || t.ndim == 0 || !has_rows(t)) return false;
    }
    if (out.is_none()) return count > 0;
    if (!read(out, &y) || y.dtype != x[0].dtype || !has_rows(y) || overlaps_itself(y)) return false;
    for (int i = 0; i < count; ++i)
        if (!may_write(y, x[i])) return false;
    return count > 0;
}

template <class... P>
bool accepts_row_op(nb::handle out, P... p) {
    const auto tensor_or_none = [](auto p) -> nb::handle {
        if constexpr (std::is_same_v<decltype(p), nb::handle>) return p;
        return Py_None;
    };
    return accepts_rows(out, std::initializer_list<nb::handle>{tensor_or_none(p)...});
}

bool may_write_all(const Tensor& y, const Tensor* x, int count) {
    if (!has_rows(y) || overlaps_itself(y)) return false;
    for (int i = 0; i < count; ++i)
        if (!may_write(y, x[i])) return false;
    return true;
}

bool are_apart(nb::handle a, nb::handle b) {
    Tensor x, y;
    return read(a, &x) && read(b, &y) && may_write(x, y) && x.data != y.data;
}

void check_rows(const Tensor& y, const Tensor& x) {
    require(is_float(x.dtype) && x.dtype == y.dtype, "expected float32, float16 or bfloat16, the same in and out");
    if (!same_shape(x, y)) refuse("out has shape " + shape_of(y) + ", but the input has " + shape_of(x));
    require(x.ndim >= 1 && has_rows(x) && has_rows(y), "expected the last dimension to be contiguous");
}

void check_vector(const Tensor& v, const Tensor& x) {
    require(v.dtype == x.dtype, "expected the weight in the dtype of the input");
    require(is_contiguous(v) && num_elements(v) == x.shape[x.ndim - 1], "expected a contiguous weight as long as a row");
}

// ---- arguments of each op: checked, unpacked -----------------------------------------------------------------------

RmsNorm make_rms_norm(nb::handle y, nb::handle x, nb::handle weight, double eps) {
    const RmsNorm a{tensor(y), tensor(x), tensor(weight), static_cast<float>(eps)};
    check_rows(a.y, a.x);
    check_vector(a.weight, a.x);
    return a;
}

AddRmsNorm make_add_rms_norm(nb::handle y, nb::handle sum, nb::handle x, nb::handle residual, nb::handle weight, double eps) {
    const AddRmsNorm a{tensor(y), tensor(sum), tensor(x), tensor(residual), tensor(weight), static_cast<float>(eps)};
    check_rows(a.y, a.x);
    check_rows(a.sum, a.x);
    check_rows(a.residual, a.x);
    check_vector(a.weight, a.x);
    return a;
}

bool accepts_layer_norm(nb::handle out, nb::handle x, nb::handle weight, nb::handle bias, double eps) {
    return weight.is_none() == bias.is_none() && accepts_row_op(out, x, weight, bias, eps);
}

LayerNorm make_layer_norm(nb::handle y, nb::handle x, nb::handle weight, nb::handle bias, double eps) {
    const bool has_affine = !weight.is_none();
    LayerNorm a{tensor(y), tensor(x), {}, {}, eps, has_affine};
    check_rows(a.y, a.x);
    if (!has_affine) return a;
    check_vector(a.weight = tensor(weight), a.x);
    check_vector(a.bias = tensor(bias), a.x);
    return a;
}

Tensor with_batch(Tensor t) {  // [seq, heads, d] -> [1, seq, heads, d]
    if (t.ndim != 3) return t;
    for (int i = 3; i > 0; --i) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
    t.shape[0] = 1, t.stride[0] = 0, t.ndim = 4;
    return t;
}

const char* broken_rope_rule(const Rope& a) {
    const auto [batch, seq] = std::pair(a.x.shape[0], a.x.shape[1]);
    if (a.x.ndim != 4 || !same_shape(a.x, a.y)) return "rope: x and y need one shape, [seq, heads, d] or [batch, seq, heads, d]";
    if (!is_float(a.x.dtype) && a.x.dtype != DType::f64) return "rope: x needs a floating dtype";
    if (a.x.dtype != a.y.dtype || a.x.dtype != a.sin.dtype || a.x.dtype != a.cos.dtype) return "rope: x, y, sin and cos need one dtype";
    if (!has_rows(a.x) || !has_rows(a.y)) return "rope: the last dimension of x and y must be contiguous";
    if (a.sin.ndim != 2 || !same_shape(a.sin, a.cos) || !is_contiguous(a.sin) || !is_contiguous(a.cos))
        return "rope: sin and cos must be contiguous [length, d/2] tables of one shape";
    if (a.x.shape[3] != 2 * a.sin.shape[1]) return "rope: the head size must be twice the width of the tables";
    if (!is_index(a.positions.dtype) || !is_contiguous(a.positions)) return "rope: positions must be contiguous integers";
    const Tensor& p = a.positions;
    const bool fits = p.ndim == 1 ? p.shape[0] == seq : p.ndim == 2 && p.shape[0] == batch && p.shape[1] == seq;
    return fits ? nullptr : "rope: positions must be [seq] or [batch, seq]";
}

bool accepts_rope(nb::handle out, nb::handle x, nb::handle positions, nb::handle sin, nb::handle cos, bool) {
    Tensor in[4], y;
    if (!read(x, &in[0]) || !read(positions, &in[1]) || !read(sin, &in[2]) || !read(cos, &in[3])) return false;
    if (!read(out.is_none() ? x : out, &y)) return false;
    if (broken_rope_rule({with_batch(y), with_batch(in[0]), in[1], in[2], in[3], false})) return false;
    if (needs_grad(x) || needs_grad(sin) || needs_grad(cos)) return false;
    return out.is_none() || may_write_all(y, in, 4);
}

Rope make_rope(nb::handle y, nb::handle x, nb::handle positions, nb::handle sin, nb::handle cos, bool interleaved) {
    const Rope a{with_batch(tensor(y)), with_batch(tensor(x)), tensor(positions), tensor(sin), tensor(cos), interleaved};
    if (const char* rule = broken_rope_rule(a)) refuse(rule);
    return a;
}

Unary make_unary(nb::handle y, nb::handle x) {
    const Unary a{tensor(y), tensor(x)};
    check_rows(a.y, a.x);
    return a;
}

Binary make_binary(nb::handle y, nb::handle first, nb::handle second) {
    const Binary a{tensor(y), tensor(first), tensor(second)};
    check_rows(a.y, a.a);
    check_rows(a.y, a.b);
    return a;
}

Softmax make_softmax(nb::handle y, nb::handle x) {
    const Unary a = make_unary(y, x);
    return {a.y, a.x, false};
}

Softmax make_causal_softmax(nb::handle y, nb::handle x) {
    const Unary a = make_unary(y, x);
    require(a.x.ndim >= 2 && a.x.shape[a.x.ndim - 2] <= a.x.shape[a.x.ndim - 1], "causal_softmax: needs [..., s, t] with s <= t");
    return {a.y, a.x, true};
}

bool accepts_embedding(nb::handle out, nb::handle ids, nb::handle weight) {
    Tensor in[2], y;
    if (!read(ids, &in[0]) || !read(weight, &in[1]) || !is_index(in[0].dtype) || !is_contiguous(in[0])) return false;
    if (is_index(in[1].dtype) || in[1].ndim != 2 || !has_rows(in[1]) || needs_grad(weight)) return false;
    return out.is_none() || (read(out, &y) && is_contiguous(y) && may_write_all(y, in, 2));
}

Embedding make_embedding(nb::handle y, nb::handle ids, nb::handle weight) {
    const Embedding a{tensor(y), tensor(ids), tensor(weight)};
    require(is_index(a.ids.dtype) && is_contiguous(a.ids), "embedding: ids must be contiguous integers");
    require(a.weight.ndim == 2 && has_rows(a.weight), "embedding: weight must be [num_embeddings, embedding_dim]");
    require(a.y.dtype == a.weight.dtype || (a.y.dtype == DType::f32 && is_float(a.weight.dtype)),
            "embedding: out must have the weight's dtype, or be float32 where that is half precision");
    bool fits = is_contiguous(a.y) && a.y.ndim == a.ids.ndim + 1 && a.y.shape[a.ids.ndim] == a.weight.shape[1];
    for (int i = 0; fits && i < a.ids.ndim; ++i) fits = a.y.shape[i] == a.ids.shape[i];
    require(fits, "embedding: out must be contiguous, with one row an id");
    return a;
}

bool has_same_rows(const Tensor& y, const Tensor& x) {  // all but the last dimension
    bool same = y.ndim == x.ndim;
    for (int i = 0; same && i + 1 < x.ndim; ++i) same = x.shape[i] == y.shape[i];
    return same;
}

const char* broken_linear_rule(const Linear& a) {
    if (a.x.dtype != DType::f32 && (!is_float(a.x.dtype) || a.x.dtype != a.weight.dtype))
        return "linear: x must be float32, or half precision as the weight is";
    if (a.y.dtype != a.x.dtype) return "linear: out must have the dtype of x";
    if (a.x.ndim < 1 || !has_rows(a.x) || !has_rows(a.y)) return "linear: the rows of x and out must be contiguous";
    if (a.weight.ndim != 2 || !has_rows(a.weight)) return "linear: weight must be two-dimensional, with contiguous rows";
    const BlockSize block = block_size(a.type);
    if (block.bytes == 0) return "linear: no such block type";
    const int64_t length = a.x.shape[a.x.ndim - 1], row_bytes = a.weight.shape[1] * item_size(a.weight.dtype);
    if (length % block.elements || row_bytes != length / block.elements * block.bytes)
        return "linear: a row of weight must be as long as a row of x";
    if (!has_same_rows(a.y, a.x) || a.y.shape[a.y.ndim - 1] != a.weight.shape[0])
        return "linear: out must have the rows of x, each as long as weight has rows";
    const bool is_bias = a.bias.dtype == a.x.dtype && is_contiguous(a.bias) && num_elements(a.bias) == a.weight.shape[0];
    return !a.has_bias || is_bias ? nullptr : "linear: bias must be contiguous, of the dtype of x, one value a row of weight";
}

bool read_block_type(const Tensor& dense, BlockType* type) {
    *type = dense.dtype == DType::f16 ? BlockType::f16 : dense.dtype == DType::bf16 ? BlockType::bf16 : BlockType::f32;
    return is_float(dense.dtype);
}

bool accepts_product(nb::handle out, nb::handle bias, nb::handle x, Linear a) {
    a.has_bias = !bias.is_none();
    if (a.has_bias && (!read(bias, &a.bias) || needs_grad(bias))) return false;
    if (!read(out.is_none() ? x : out, &a.y)) return false;
    if (out.is_none() && a.y.ndim) a.y.shape[a.y.ndim - 1] = a.weight.shape[0];
    if (broken_linear_rule(a) || needs_grad(x)) return false;
    const Tensor inputs[] = {a.x, a.weight, a.has_bias ? a.bias : a.weight};
    return out.is_none() || (a.y.data != a.x.data && may_write_all(a.y, inputs, 3));
}

bool accepts_linear(nb::handle out, nb::handle x, nb::handle weight, nb::handle bias) {
    Linear a{};
    if (!read(x, &a.x) || !read(weight, &a.weight) || needs_grad(weight)) return false;
    return read_block_type(a.weight, &a.type) && accepts_product(out, bias, x, a);
}

bool accepts_quantized_linear(nb::handle out, nb::handle x, nb::handle blocks, nb::handle bias, int type) {
    Linear a{};
    a.type = static_cast<BlockType>(type);
    return read(x, &a.x) && read(blocks, &a.weight) && a.weight.dtype == DType::u8 && accepts_product(out, bias, x, a);
}

Linear checked(Linear a) {
    if (const char* rule = broken_linear_rule(a)) refuse(rule);
    return a;
}

Linear make_linear(nb::handle y, nb::handle x, nb::handle weight, nb::handle bias) {
    Linear a{tensor(y), tensor(x), tensor(weight), bias.is_none() ? Tensor{} : tensor(bias), {}, !bias.is_none()};
    require(read_block_type(a.weight, &a.type), "linear: weight must be float32, float16 or bfloat16");
    return checked(a);
}

Linear make_quantized_linear(nb::handle y, nb::handle x, nb::handle blocks, nb::handle bias, int type) {
    const Linear a{tensor(y), tensor(x), tensor(blocks), bias.is_none() ? Tensor{} : tensor(bias),
                   static_cast<BlockType>(type), !bias.is_none()};
    require(a.weight.dtype == DType::u8, "quantized_linear: blocks must be uint8");
    return checked(a);
}

// Packed rows seen as the rows they were, for the rules of those
Tensor as_rows(Tensor packed, int64_t num_rows) {
    const bool is_packed = packed.dtype == DType::u8 && packed.ndim == 2 && is_contiguous(packed) && num_rows >= 0 &&
                           packed.shape[0] == (num_rows + kPackedRows - 1) / kPackedRows && packed.shape[1] % kPackedRows == 0;
    if (!is_packed) return packed.ndim = 0, packed;  // breaks every rule
    packed.shape[0] = num_rows, packed.shape[1] /= kPackedRows;
    return packed;
}

// The product with weight i alone, whose columns of y begin at `first`
Linear part_of(const PackedLinear& a, int i, int64_t first) {
    Linear part{a.y, a.x, as_rows(a.weight[i], a.num_rows[i]), a.bias[i], a.type[i], a.bias[i].data != nullptr};
    if (a.y.ndim) part.y.shape[a.y.ndim - 1] = smaller(a.num_rows[i], a.y.shape[a.y.ndim - 1] - first);
    return part;
}

const char* broken_packed_rule(const PackedLinear& a) {
    if (a.count == 0 || (a.is_gated && (a.count != 2 || a.num_rows[0] != a.num_rows[1])))
        return "packed_linear: expected one to three weights, and of a gated product two of one size";
    int64_t columns = 0;
    for (int i = 0; i < a.count; ++i) {
        if (block_size(a.type[i]).elements <= 1) return "packed_linear: weight must be packed blocks";
        if (const char* rule = broken_linear_rule(part_of(a, i, columns))) return rule;
        if (!a.is_gated) columns += a.num_rows[i];
    }
    if (!a.is_gated && columns != a.y.shape[a.y.ndim - 1]) return "packed_linear: out must have a column for each row of weight";
    const bool fits = a.residual.dtype == DType::f32 && same_shape(a.residual, a.y) && has_rows(a.residual);
    return !a.residual.data || fits ? nullptr : "packed_linear: residual must be float32 in the shape of out, with contiguous rows";
}

// Fills in the weights, which may be None from some place on, and their biases; false where one is no tensor
bool read_weights(PackedLinear* a, const nb::handle* weights, const nb::handle* biases, const int* types, const int64_t* num_rows) {
    for (int i = 0; i < kPackedWeights && !weights[i].is_none(); ++i, ++a->count) {
        if (!read(weights[i], &a->weight[i]) || (!biases[i].is_none() && !read(biases[i], &a->bias[i]))) return false;
        a->type[i] = static_cast<BlockType>(types[i]);
        a->num_rows[i] = num_rows[i];
    }
    return true;
}

bool accepts_packed_linear(nb::handle out, nb::handle x, nb::handle residual, nb::handle w0, nb::handle w1, nb::handle w2, nb::handle b0,
                           nb::handle b1, nb::handle b2, int t0, int t1, int t2, int64_t n0, int64_t n1, int64_t n2, bool is_gated) {
    const nb::handle weights[] = {w0, w1, w2}, biases[] = {b0, b1, b2};
    const int types[] = {t0, t1, t2};
    const int64_t num_rows[] = {n0, n1, n2};
    PackedLinear a{};
    a.is_gated = is_gated;
    if (!read(x, &a.x) || !read_weights(&a, weights, biases, types, num_rows)) return false;
    if ((!residual.is_none() && !read(residual, &a.residual)) || !read(out.is_none() ? x : out, &a.y)) return false;
    if (out.is_none() && a.y.ndim) {
        int64_t& columns = a.y.shape[a.y.ndim - 1] = n0;
        for (int i = 1; i < a.count && !is_gated; ++i) columns += num_rows[i];
    }
    if (broken_packed_rule(a) || needs_grad(x)) return false;
    for (nb::handle h : {residual, b0, b1, b2})
        if (!h.is_none() && needs_grad(h)) return false;
    if (out.is_none()) return true;
    if (a.y.data == a.x.data || !may_write_all(a.y, &a.x, 1)) return false;
    return may_write_all(a.y, a.weight, a.count) && may_write_all(a.y, a.bias, a.count) && (!a.residual.data || may_write(a.y, a.residual));
}

// The floats that packed_linear needs beside its tensors: blocks of rows, each group of 32 with a scale and 10 for a plane
int64_t packed_room(const Tensor& x, int activation_bits) {
    const int64_t length = x.shape[x.ndim - 1], num_rows = length ? num_elements(x) / length : 0;
    int64_t block = 1;
    while (block < kRowBlock && block < num_rows) block *= 2;
    return (num_rows + block - 1) / block * block * (length / 32) * (1 + 10 * num_planes_of(activation_bits));
}

PackedLinear make_packed_linear(nb::handle y, nb::handle x, nb::handle residual, nb::handle workspace, nb::handle w0, nb::handle w1,
                                nb::handle w2, nb::handle b0, nb::handle b1, nb::handle b2, int t0, int t1, int t2, int64_t n0,
                                int64_t n1, int64_t n2, bool is_gated, int activation_bits) {
    const nb::handle weights[] = {w0, w1, w2}, biases[] = {b0, b1, b2};
    const int types[] = {t0, t1, t2};
    const int64_t num_rows[] = {n0, n1, n2};
    PackedLinear a{tensor(y), tensor(x), residual.is_none() ? Tensor{} : tensor(residual), tensor(workspace), {}, {}, {}, {}, 0,
                   activation_bits, is_gated};
    require(read_weights(&a, weights, biases, types, num_rows), "packed_linear: weights and biases must be CPU tensors");
    if (const char* rule = broken_packed_rule(a)) refuse(rule);
    require(activation_bits == 8 || activation_bits == 12 || activation_bits == 16, "packed_linear: activations have 8, 12 or 16 bits");
    require(a.workspace.dtype == DType::f32 && is_contiguous(a.workspace) && num_elements(a.workspace) >= packed_room(a.x, activation_bits),
            "packed_linear: the workspace is too small");
    return a;
}

const char* broken_lookup_rule(const QuantizedEmbedding& a) {
    const BlockSize block = block_size(a.type);
    if (block.elements <= 1) return "embedding: no such block type";
    if (!is_index(a.ids.dtype) || !is_contiguous(a.ids)) return "embedding: ids must be contiguous integers";
    if (a.weight.dtype != DType::u8 || a.weight.ndim != 2 || !has_rows(a.weight) || a.weight.shape[1] % block.bytes)
        return "embedding: weight must be rows of whole blocks, uint8";
    const int64_t row_length = a.weight.shape[1] / block.bytes * block.elements;
    const bool fits = a.y.dtype == DType::f32 && is_contiguous(a.y) && num_elements(a.y) == num_elements(a.ids) * row_length;
    return fits ? nullptr : "embedding: out must be contiguous float32 with one row an id";
}

// Without `out` the caller allocates what fits, so the ids and the blocks are all there is to check.
bool accepts_quantized_embedding(nb::handle out, nb::handle ids, nb::handle blocks, int type) {
    QuantizedEmbedding a{};
    a.type = static_cast<BlockType>(type);
    if (!read(ids, &a.ids) || !read(blocks, &a.weight)) return false;
    if (out.is_none()) return is_index(a.ids.dtype) && is_contiguous(a.ids) && a.weight.ndim == 2 && has_rows(a.weight);
    return read(out, &a.y) && !broken_lookup_rule(a) && may_write_all(a.y, &a.ids, 1) && may_write_all(a.y, &a.weight, 1);
}

QuantizedEmbedding make_quantized_embedding(nb::handle y, nb::handle ids, nb::handle blocks, int type) {
    QuantizedEmbedding a{tensor(y), tensor(ids), tensor(blocks), static_cast<BlockType>(type), 0};
    if (const char* rule = broken_lookup_rule(a)) refuse(rule);
    a.num_rows = a.weight.shape[0];
    return a;
}

bool accepts_packed_embedding(nb::handle out, nb::handle ids, nb::handle packed, int type, int64_t num_rows) {
    QuantizedEmbedding a{};
    a.type = static_cast<BlockType>(type);
    if (!read(ids, &a.ids) || !read(packed, &a.weight)) return false;
    a.weight = as_rows(a.weight, num_rows);
    if (out.is_none()) return is_index(a.ids.dtype) && is_contiguous(a.ids) && a.weight.ndim == 2;
    return read(out, &a.y) && !broken_lookup_rule(a) && may_write_all(a.y, &a.ids, 1) && may_write_all(a.y, &a.weight, 1);
}

QuantizedEmbedding make_packed_embedding(nb::handle y, nb::handle ids, nb::handle packed, int type, int64_t num_rows) {
    QuantizedEmbedding a{tensor(y), tensor(ids), tensor(packed), static_cast<BlockType>(type), num_rows};
    const Tensor weight = a.weight;
    a.weight = as_rows(weight, num_rows);
    if (const char* rule = broken_lookup_rule(a)) refuse(rule);
    a.weight = weight;
    return a;
}

void move_rows(int64_t (*Kernels::*member)(const Pack&), nb::handle packed, nb::handle blocks, int type) {
    const Pack a{tensor(packed), tensor(blocks), static_cast<BlockType>(type)};
    const Tensor rows = as_rows(a.packed, a.blocks.ndim == 2 ? a.blocks.shape[0] : -1);
    require(a.blocks.dtype == DType::u8 && is_contiguous(a.blocks) && rows.ndim == 2 && rows.shape[1] == a.blocks.shape[1],
            "pack: expected uint8 blocks and room for 16 rows of them side by side");
    const BlockSize block = block_size(a.type);
    require(block.elements > 1 && a.blocks.shape[1] % block.bytes == 0, "pack: expected rows of whole blocks");
    nb::gil_scoped_release release;
    (active_level().kernels->*member)(a);
}

void quantize_rows(nb::handle blocks, nb::handle x, int type) {
    const Quantize a{tensor(blocks), tensor(x), static_cast<BlockType>(type)};
    require(a.type == BlockType::q8_0 || a.type == BlockType::q4_0, "quantize: expected the type Q8_0 or Q4_0");
    require(is_float(a.x.dtype) && a.x.ndim == 2 && has_rows(a.x), "quantize: expected rows of floats");
    const BlockSize block = block_size(a.type);
    const bool fits = a.blocks.dtype == DType::u8 && a.blocks.ndim == 2 && is_contiguous(a.blocks) &&
                      a.x.shape[1] % block.elements == 0 && a.blocks.shape[0] == a.x.shape[0] &&
                      a.blocks.shape[1] == a.x.shape[1] / block.elements * block.bytes;
    require(fits, "quantize: expected contiguous uint8 blocks for each row");
    nb::gil_scoped_release release;
    active_level().kernels->quantize_rows(a);
}

RandomSample make_random_sample(nb::handle y, nb::handle logits, nb::handle workspace, double random_val, double topp,
                                int64_t topk, double temperature) {
    const RandomSample a{tensor(y), tensor(logits), tensor(workspace), random_val, topp, temperature, topk};
    require(a.logits.ndim == 1 && a.logits.shape[0] > 0 && is_float(a.logits.dtype) && has_rows(a.logits),
            "random_sample: logits must be one contiguous row of floats");
    require(num_elements(a.y) == 1 && (a.y.dtype == DType::i64 || a.y.dtype == DType::i32), "random_sample: out must be one int64 or int32");
    require(a.logits.shape[0] < (int64_t{1} << 31), "random_sample: too many logits");
    require(a.workspace.dtype == DType::i32 && is_contiguous(a.workspace) && num_elements(a.workspace) >= 2 * a.logits.shape[0],
            "random_sample: workspace needs two int32 a logit");
    return a;
}

// [tokens, heads, dim] floats, rows contiguous
void check_heads(const Tensor& t, const char* rule) { require(t.ndim == 3 && t.dtype == DType::f32 && has_rows(t), rule); }

void check_cache(const Tensor& keys, const Tensor& values, int64_t dim) {
    require(keys.ndim == 4 && is_float(keys.dtype) && has_rows(keys) && keys.shape[3] == dim,
            "the key cache must be [streams, kv heads, room, dim] of floats with contiguous rows");
    require(values.dtype == keys.dtype && has_rows(values) && same_shape(keys, values), "the value cache must be like the key cache");
}

void check_places(const Tensor& streams, const Tensor& positions, int64_t num_tokens) {
    for (const Tensor* t : {&streams, &positions})
        require(t->ndim == 1 && is_index(t->dtype) && is_contiguous(*t) && t->shape[0] == num_tokens,
                "streams and positions must be one integer a token");
}

Attention make_attention(nb::handle y, nb::handle q, nb::handle keys, nb::handle values, nb::handle streams,
                         nb::handle positions, nb::handle workspace, double scale, int64_t window) {
    const Attention a{tensor(y), tensor(q), tensor(keys), tensor(values), tensor(streams), tensor(positions), tensor(workspace),
                      static_cast<float>(scale), window};
    check_heads(a.q, "attention: q must be [tokens, heads, dim] of float32 with contiguous rows");
    check_heads(a.y, "attention: out must be [tokens, heads, dim] of float32 with contiguous rows");
    require(same_shape(a.y, a.q), "attention: out must have the shape of q");
    check_cache(a.keys, a.values, a.q.shape[2]);
    check_places(a.streams, a.positions, a.q.shape[0]);
    const int64_t num_kv_heads = a.keys.shape[1];
    require(num_kv_heads > 0 && a.q.shape[1] % num_kv_heads == 0, "attention: query heads must be a multiple of key heads");
    require(a.q.shape[2] <= kAttentionDim && a.q.shape[1] / num_kv_heads * (a.q.shape[2] + 2) <= kAttentionState, "attention: too many or too wide heads share a key head");
    require(a.workspace.dtype == DType::f32 && is_contiguous(a.workspace), "attention: the workspace must be contiguous float32");
    require(window >= 0, "attention: the window must not be negative");
    return a;
}

StoreKv make_store_kv(nb::handle keys, nb::handle values, nb::handle k, nb::handle v, nb::handle streams, nb::handle positions) {
    const StoreKv a{tensor(keys), tensor(values), tensor(k), tensor(v), tensor(streams), tensor(positions)};
    check_heads(a.k, "store_kv: k must be [tokens, kv heads, dim] of float32 with contiguous rows");
    check_heads(a.v, "store_kv: v must be [tokens, kv heads, dim] of float32 with contiguous rows");
    check_cache(a.keys, a.values, a.k.shape[2]);
    require(same_shape(a.k, a.v) && a.keys.shape[1] == a.k.shape[1], "store_kv: k and v must have the heads of the cache");
    check_places(a.streams, a.positions, a.k.shape[0]);
    return a;
}

// ---- what a kernel found wrong -------------------------------------------------------------------------------------

template <class Args>
void report(const Args&, int64_t) {}

void report_index(const char* what, const Tensor& indices, int64_t at, int64_t limit) {
    const int64_t found = index_at(indices.data, indices.dtype, at);
    const std::string value = indices.dtype == DType::u64 ? std::to_string(static_cast<uint64_t>(found)) : std::to_string(found);
    throw nb::index_error((std::string(what) + " " + value + " (element " + std::to_string(at) + ") is outside [0, " +
                           std::to_string(limit) + ")").c_str());
}

void report(const Rope& a, int64_t at) { report_index("rope: position", a.positions, at, a.sin.shape[0]); }
void report(const Embedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.weight.shape[0]); }
void report_place(const Tensor& streams, const Tensor& positions, const Tensor& keys, int64_t at) {
    const auto value = [&](const Tensor& t) { return std::to_string(index_at(t.data, t.dtype, at)); };
    throw nb::index_error(("token " + std::to_string(at) + " is at position " + value(positions) + " of stream " + value(streams) +
                           ", but the cache has " + std::to_string(keys.shape[0]) + " streams of " + std::to_string(keys.shape[2]) +
                           " positions").c_str());
}

void report(const Attention& a, int64_t at) { report_place(a.streams, a.positions, a.keys, at); }
void report(const StoreKv& a, int64_t at) { report_place(a.streams, a.positions, a.keys, at); }
void report(const QuantizedEmbedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.num_rows); }
void report(const PackedLinear&, int64_t) { refuse("linear: out may not be the input, which is read while out is written"); }
void report(const Linear&, int64_t) { refuse("linear: out may not be the input, which is read while out is written"); }
void report(const RandomSample& a, int64_t at) {
    if (at == a.logits.shape[0]) refuse("random_sample: every logit is -inf, so there is no token to take");
    refuse("random_sample: logit " + std::to_string(at) + " is NaN or +inf; expected finite values or -inf");
}

// ---- calls ---------------------------------------------------------------------------------------------------------

template <class Args>
void run_kernel(int64_t (*kernel)(const Args&), const Args& args) {
    int64_t status;
    {
        nb::gil_scoped_release release;
        status = kernel(args);
    }
    if (status != kOk) report(args, status);
}

// An op with its tensors, checked. `run` takes their addresses and needs no Python; `report` throws for its status.
struct Call {
    std::vector<nb::object> owners;  // None where an optional tensor is absent
    std::vector<Tensor> layouts;
    std::function<int64_t(const std::vector<void*>&)> run;
    std::function<void(int64_t, const std::vector<void*>&)> report;

    void operator()(const nb::args& given) const {
        if (given.size() != 0 && given.size() != owners.size())
            throw nb::type_error(("expected no tensors, or " + std::to_string(owners.size())).c_str());
        std::vector<void*> data(owners.size());
        for (size_t i = 0; i < owners.size(); ++i) data[i] = address(i, given.size() ? nb::handle(given[i]) : nb::handle(owners[i]));
        int64_t status;
        {
            nb::gil_scoped_release release;
            status = run(data);
        }
        if (status != kOk) report(status, data);
    }

    // Where the tensor now is, which must be laid out as the one the call was made with
    void* address(size_t i, nb::handle h) const {
        if (owners[i].is_none()) return nullptr;
        Tensor t = tensor(h);
        void* data = t.data;
        t.data = layouts[i].data;
        if (!is_same_view(t, layouts[i]))
            refuse("tensor " + std::to_string(i) + " differs in dtype, shape or strides from the one this call was made for");
        return data;
    }

    void add(nb::handle h) {
        owners.push_back(nb::borrow(h));
        layouts.push_back(h.is_none() ? Tensor{} : tensor(h));
    }
    template <class Scalar>
    void add(Scalar) {}
};

constexpr int64_t kOverlap = -2;

// Args starts with its tensors, in the order of the handles among P.
template <class Args>
Args with_addresses(Args args, const std::vector<void*>& data) {
    auto* tensors = reinterpret_cast<Tensor*>(&args);
    for (size_t i = 0; i < data.size(); ++i) tensors[i].data = data[i];
    return args;
}

template <class Args, class... P>
Call bind_call(int64_t (*kernel)(const Args&), Args (*make)(P...), P... p) {
    Call call;
    (call.add(p), ...);
    const Args args = make(p...);
    call.run = [kernel, args](const std::vector<void*>& data) {
        const Args local = with_addresses(args, data);  // a copy: two threads may run one call
        const auto* tensors = reinterpret_cast<const Tensor*>(&local);
        for (size_t i = 1; i < data.size(); ++i)
            if (data[i] && !may_write(tensors[0], tensors[i])) return kOverlap;
        return kernel(local);
    };
    call.report = [args](int64_t status, const std::vector<void*>& data) {
        if (status == kOverlap) refuse("the output overlaps another tensor in part");
        ::report(with_addresses(args, data), status);
    };
    return call;
}

// Calls replayed in order by one call from Python. Tensors that no call of the graph made may be moved or resized by
// others, so they are looked at again before each replay.
class Graph {
public:
    explicit Graph(const nb::list& calls) {
        for (nb::handle h : calls) calls_.push_back(nb::cast<Call*>(h)), keep_.push_back(nb::borrow(h));
        std::vector<PyObject*> made;
        for (const Call* call : calls_) {
            data_.emplace_back(call->owners.size());
            for (size_t i = 0; i < call->owners.size(); ++i) {
                PyObject* owner = call->owners[i].ptr();
                data_.back()[i] = call->layouts[i].data;
                const bool is_own = i == 0 || std::find(made.begin(), made.end(), owner) != made.end();
                if (i == 0) made.push_back(owner);
                if (!is_own && !call->owners[i].is_none()) outside_.push_back({data_.size() - 1, i});
            }
        }
    }

    void replay() {
        for (const auto& [call, i] : outside_) data_[call][i] = calls_[call]->address(i, calls_[call]->owners[i]);
        size_t at = 0;
        int64_t status = kOk;
        {
            nb::gil_scoped_release release;
            while (at < calls_.size() && (status = calls_[at]->run(data_[at])) == kOk) ++at;
        }
        if (status != kOk) calls_[at]->report(status, data_[at]);
    }

    size_t size() const { return calls_.size(); }

private:
    struct Place { size_t call, index; };
    std::vector<Call*> calls_;
    std::vector<nb::object> keep_;
    std::vector<std::vector<void*>> data_;
    std::vector<Place> outside_;
};

template <class P>
auto any_object() { return nb::arg().none(); }  // None reaches our own checks and their messages

template <class... P>
void def_accepts(nb::module_& m, const char* name, bool (*accepts)(P...)) {
    m.def(name, accepts, any_object<P>()...);
}

template <class Args, class... P>
void def_bind(nb::module_& m, const char* name, Args (*make)(P...), int64_t (*Kernels::*member)(const Args&)) {
    const auto bind = [=](P... p) { return bind_call(active_level().kernels->*member, make, p...); };
    m.def((std::string("bind_") + name).c_str(), bind, any_object<P>()...);
}

template <class Args, class... P>
void def_op(nb::module_& m, const char* name, Args (*make)(P...), int64_t (*Kernels::*member)(const Args&)) {
    const auto run = [=](P... p) { run_kernel(active_level().kernels->*member, make(p...)); };
    m.def(name, run, any_object<P>()...);
    def_bind(m, name, make, member);
}

template <class... P>
nb::object empty_like_first(nb::handle x, P...) { return g_torch.empty_like(x); }

nb::object empty_rows(nb::handle ids, nb::handle weight) {  // [*] and [rows, E] -> [*, E]
    const Tensor t = tensor(ids);
    nb::list sizes;
    for (int i = 0; i < t.ndim; ++i) sizes.append(t.shape[i]);
    sizes.append(tensor(weight).shape[1]);
    return weight.attr("new_empty")(*sizes);
}

// The whole of an op in one call: the function makes an output that is None, and returns the output, or None where
// `accepts` says no or `make` finds a rule broken.
template <class Args, class... P>
void def_whole_op(nb::module_& m, const char* name, Args (*make)(nb::handle, P...), int64_t (*Kernels::*member)(const Args&),
                  bool (*accepts)(nb::handle, P...) = accepts_row_op, nb::object (*empty)(P...) = empty_like_first) {
    const auto run = [=](nb::handle out, P... p) -> nb::object {
        if (!accepts(out, p...)) return nb::none();
        nb::object y = out.is_none() ? empty(p...) : nb::borrow(out);
        Args args;
        try {
            args = make(y, p...);
        } catch (const nb::builtin_exception&) {
            return nb::none();
        }
        run_kernel(active_level().kernels->*member, args);
        return y;
    };
    m.def(name, run, nb::arg().none(), any_object<P>()...);
    def_accepts(m, (std::string("accepts_") + name).c_str(), accepts);
    def_bind(m, name, make, member);
}

void use_torch(nb::handle tensor_type, nb::handle parameter_type, nb::handle is_grad_enabled, nb::handle empty_like,
               bool use_exchange) {
    g_torch.tensor = reinterpret_cast<PyTypeObject*>(tensor_type.ptr());
    g_torch.parameter = reinterpret_cast<PyTypeObject*>(parameter_type.ptr());
    g_torch.is_grad_enabled = is_grad_enabled.inc_ref();
    g_torch.empty_like = empty_like.inc_ref();
    g_torch.api = nullptr;
    if (!use_exchange || !nb::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return;
    nb::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
    auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) return PyErr_Clear();
    if (api->version.major == 1 && api->view) g_torch.api = api;
}

// The wrapped sum of every word, so that none of the reads can be left out; each asks for what lies `ahead` bytes on
uint64_t read_all(nb::handle buffer, int64_t ahead) {
    const Tensor t = tensor(buffer);
    require(t.dtype == DType::i64 && is_contiguous(t), "read_all: expected a contiguous int64 tensor");
    const auto* words = static_cast<const uint64_t*>(t.data);
    std::atomic<uint64_t> total{0};
    nb::gil_scoped_release release;
    constexpr int64_t kLine = 8;
    parallel_for(num_elements(t) / kLine, 1 << 13, [&](int64_t begin, int64_t end) {
        uint64_t sums[kLine] = {};
        for (int64_t i = begin; i < end; ++i) {
            __builtin_prefetch(reinterpret_cast<const char*>(words + i * kLine) + ahead);
            for (int64_t j = 0; j < kLine; ++j) sums[j] += words[i * kLine + j];
        }
        for (const uint64_t sum : sums) total += sum;
    });
    for (int64_t i = num_elements(t) / kLine * kLine; i < num_elements(t); ++i) total += words[i];
    return total;
}

nb::list level_names() {
    nb::list names;
    for (int i = 0; i < kNumLevels; ++i)
        if (kLevels[i].is_supported()) names.append(kLevels[i].name);
    return names;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::class_<Call>(m, "Call").def("__call__", [](const Call& call, nb::args tensors) { call(tensors); });
    nb::class_<Graph>(m, "Graph").def(nb::init<nb::list>()).def("replay", &Graph::replay).def("__len__", &Graph::size);
    m.def("use_torch", &use_torch);
    m.def("accepts_rows", [](nb::handle out, nb::args inputs) { return accepts_rows(out, inputs); },
          nb::arg().none(), nb::arg());
    def_accepts(m, "accepts_linear", accepts_linear);
    def_accepts(m, "accepts_quantized_linear", accepts_quantized_linear);
    def_accepts(m, "accepts_quantized_embedding", accepts_quantized_embedding);
    def_accepts(m, "accepts_packed_linear", accepts_packed_linear);
    def_accepts(m, "accepts_packed_embedding", accepts_packed_embedding);
    m.def("pack_rows", [](nb::handle packed, nb::handle blocks, int type) { move_rows(&Kernels::pack_rows, packed, blocks, type); });
    m.def("unpack_rows", [](nb::handle blocks, nb::handle packed, int type) { move_rows(&Kernels::unpack_rows, packed, blocks, type); });
    m.def("quantize_rows", &quantize_rows);
    m.def("packed_room", [](nb::handle x, int activation_bits) { return packed_room(tensor(x), activation_bits); });
    m.def("are_apart", &are_apart);
    m.def("read_all", &read_all);
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", [](int count) {
        require(count >= 1 && count <= 1024, "set_num_threads: expected 1 to 1024");
        nb::gil_scoped_release release;
        set_num_threads(count);
    });
    m.def("isa_levels", &level_names);
    m.def("isa", [] { return std::string(active_level().name); });
    m.def("set_isa", [](const std::string& name) {
        if (set_level(name.c_str())) return;
        const std::string levels = nb::repr(level_names()).c_str();
        refuse("set_isa and INFINICORE_ISA take a level of this CPU, one of " + levels + ", but found '" + name + "'");
    });

    def_whole_op(m, "rms_norm", make_rms_norm, &Kernels::rms_norm);
    def_op(m, "add_rms_norm", make_add_rms_norm, &Kernels::add_rms_norm);
    def_whole_op(m, "layer_norm", make_layer_norm, &Kernels::layer_norm, accepts_layer_norm);
    def_whole_op(m, "rope", make_rope, &Kernels::rope, accepts_rope);
    def_whole_op(m, "silu", make_unary, &Kernels::silu);
    def_whole_op(m, "gelu", make_unary, &Kernels::gelu);
    def_whole_op(m, "gelu_tanh", make_unary, &Kernels::gelu_tanh);
    def_whole_op(m, "gelu_fast", make_unary, &Kernels::gelu_fast);
    def_whole_op(m, "swiglu", make_binary, &Kernels::swiglu);
    def_whole_op(m, "add", make_binary, &Kernels::add);
    def_whole_op(m, "softmax", make_softmax, &Kernels::softmax);
    def_whole_op(m, "causal_softmax", make_causal_softmax, &Kernels::softmax);
    def_whole_op(m, "embedding", make_embedding, &Kernels::embedding, accepts_embedding, empty_rows);
    def_op(m, "random_sample", make_random_sample, &Kernels::random_sample);
    def_op(m, "linear", make_linear, &Kernels::linear);
    def_op(m, "quantized_linear", make_quantized_linear, &Kernels::linear);
    def_op(m, "quantized_embedding", make_quantized_embedding, &Kernels::quantized_embedding);
    def_op(m, "packed_linear", make_packed_linear, &Kernels::packed_linear);
    def_op(m, "packed_embedding", make_packed_embedding, &Kernels::packed_embedding);
    def_op(m, "attention", make_attention, &Kernels::attention);
    def_op(m, "store_kv", make_store_kv, &Kernels::store_kv);
}
