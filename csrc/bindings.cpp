// The native core as Python sees it. Each op is there twice: `rms_norm(...)` runs it, `bind_rms_norm(...)`
// checks it once and returns a Call that runs it again and again, on the same tensors or on others of the
// same layout. These four files, bindings.cpp and binding_*.h, are the only ones that know Python.
#include <nanobind/stl/string.h>

#include <atomic>

#include "binding_arguments.h"
#include "binding_calls.h"
#include "isa.h"
#include "pool.h"

using namespace infini;

namespace {

template <class P>
auto any_object() {
    return nb::arg().none();
}  // None reaches our own checks and their messages

template <class... P>
void def_accepts(nb::module_& m, const char* name, bool (*accepts)(P...)) {
    m.def(name, accepts, any_object<P>()...);
}

template <class Args, class... P>
void def_bind(nb::module_& m, const char* name, Args (*make)(P...),
              int64_t (*Kernels::*member)(const Args&)) {
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
nb::object empty_like_first(nb::handle x, P...) {
    return g_torch.empty_like(x);
}

nb::object empty_rows(nb::handle ids, nb::handle weight) {  // [*] and [rows, E] -> [*, E]
    const Tensor t = tensor(ids);
    nb::list sizes;
    for (int i = 0; i < t.ndim; ++i) sizes.append(t.shape[i]);
    sizes.append(tensor(weight).shape[1]);
    return weight.attr("new_empty")(*sizes);
}

// The whole of an op in one call: the function makes an output that is None, and returns the output, or None
// where `accepts` says no or `make` finds a rule broken.
template <class Args, class... P>
void def_whole_op(nb::module_& m, const char* name, Args (*make)(nb::handle, P...),
                  int64_t (*Kernels::*member)(const Args&),
                  bool (*accepts)(nb::handle, P...) = accepts_row_op,
                  nb::object (*empty)(P...) = empty_like_first) {
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

void use_torch(nb::handle tensor_type, nb::handle parameter_type, nb::handle is_grad_enabled,
               nb::handle empty_like, bool use_exchange) {
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

void move_rows(int64_t (*Kernels::*member)(const Pack&), nb::handle packed, nb::handle blocks, int type) {
    const Pack a{tensor(packed), tensor(blocks), static_cast<BlockType>(type)};
    const Tensor rows = as_rows(a.packed, a.blocks.ndim == 2 ? a.blocks.shape[0] : -1);
    require(a.blocks.dtype == DType::u8 && is_contiguous(a.blocks) && rows.ndim == 2 &&
                rows.shape[1] == a.blocks.shape[1],
            "pack: expected uint8 blocks and room for 16 rows of them side by side");
    const BlockSize block = block_size(a.type);
    require(block.elements > 1 && a.blocks.shape[1] % block.bytes == 0,
            "pack: expected rows of whole blocks");
    nb::gil_scoped_release release;
    (active_level().kernels->*member)(a);
}

void quantize_rows(nb::handle blocks, nb::handle x, int type) {
    const Quantize a{tensor(blocks), tensor(x), static_cast<BlockType>(type)};
    require(a.type == BlockType::q8_0 || a.type == BlockType::q4_0,
            "quantize: expected the type Q8_0 or Q4_0");
    require(is_float(a.x.dtype) && a.x.ndim == 2 && has_rows(a.x), "quantize: expected rows of floats");
    const BlockSize block = block_size(a.type);
    const bool fits = a.blocks.dtype == DType::u8 && a.blocks.ndim == 2 && is_contiguous(a.blocks) &&
                      a.x.shape[1] % block.elements == 0 && a.blocks.shape[0] == a.x.shape[0] &&
                      a.blocks.shape[1] == a.x.shape[1] / block.elements * block.bytes;
    require(fits, "quantize: expected contiguous uint8 blocks for each row");
    nb::gil_scoped_release release;
    active_level().kernels->quantize_rows(a);
}

// The wrapped sum of every word, so that none of the reads can be left out; each asks for what lies `ahead`
// bytes on
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
            ask_for(reinterpret_cast<const char*>(words + i * kLine) + ahead);
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
    nb::class_<Graph>(m, "Graph")
        .def(nb::init<nb::list>())
        .def("replay", &Graph::replay)
        .def("__len__", &Graph::size);
    m.def("use_torch", &use_torch);
    m.def(
        "accepts_rows", [](nb::handle out, nb::args inputs) { return accepts_rows(out, inputs); },
        nb::arg().none(), nb::arg());
    def_accepts(m, "accepts_linear", accepts_linear);
    def_accepts(m, "accepts_quantized_linear", accepts_quantized_linear);
    def_accepts(m, "accepts_quantized_embedding", accepts_quantized_embedding);
    def_accepts(m, "accepts_packed_linear", accepts_packed_linear);
    def_accepts(m, "accepts_packed_embedding", accepts_packed_embedding);
    m.def("pack_rows", [](nb::handle packed, nb::handle blocks, int type) {
        move_rows(&Kernels::pack_rows, packed, blocks, type);
    });
    m.def("unpack_rows", [](nb::handle blocks, nb::handle packed, int type) {
        move_rows(&Kernels::unpack_rows, packed, blocks, type);
    });
    m.def("quantize_rows", &quantize_rows);
    m.def("packed_room",
          [](nb::handle x, int activation_bits) { return packed_room(tensor(x), activation_bits); });
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
        refuse("set_isa and INFINICORE_ISA take a level of this CPU, one of " + levels + ", but found '" +
               name + "'");
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
