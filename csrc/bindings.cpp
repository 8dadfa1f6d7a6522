// The native core as Python sees it. Each op is there three times: `rms_norm(...)` runs it,
// `accepts_rms_norm(...)` says whether it would, `bind_rms_norm(...)` checks it once and returns a Call that
// runs it again and again, on the same tensors or on others of the same layout. This file and binding_*.h are
// the only ones that know Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <cstdlib>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "binding_queue.h"
#include "pool.h"

using namespace infini;

namespace {

template <class T>
constexpr bool kIsOptional = false;
template <class T>
constexpr bool kIsOptional<std::optional<T>> = true;

// None reaches our own checks and their messages; what is optional may be left out.
template <class P>
auto any_object() {
    if constexpr (kIsOptional<P>)
        return nb::arg().none() = nb::none();
    else
        return nb::arg().none();
}

// The three functions of an op: `name(out, ...)` runs it, `accepts_name` only says whether it would, and
// `bind_name` returns a Call.
template <class Args, class... P>
void define(nb::module_& m, std::string name, KernelOf<Args> kernel, void (*)(Reading<Args>&, P...)) {
    const auto run = [=](nb::handle out, P... given) { return run_op<Args>(kernel, out, given...); };
    const auto bind = [=](nb::handle out, P... given) { return bind_op<Args>(kernel, out, given...); };
    m.def(name.c_str(), run, nb::arg().none(), any_object<P>()...);
    m.def(("accepts_" + name).c_str(), &accepts_op<Args, P...>, nb::arg().none(), any_object<P>()...);
    m.def(("bind_" + name).c_str(), bind, nb::arg().none(), any_object<P>()...);
}

void use_torch(nb::handle torch, nb::handle dtypes, bool use_exchange) {
    const auto kept = [](nb::handle from, const char* name) { return nb::getattr(from, name).release(); };
    const nb::object layers = nb::getattr(torch, "nn");
    g_torch.tensor = reinterpret_cast<PyTypeObject*>(kept(torch, "Tensor").ptr());
    g_torch.parameter = reinterpret_cast<PyTypeObject*>(kept(layers, "Parameter").ptr());
    g_torch.is_grad_enabled = kept(torch, "is_grad_enabled");
    g_torch.empty_like = kept(torch, "empty_like");
    g_torch.empty = kept(torch, "empty");
    g_torch.cpu = nb::getattr(torch, "device")("cpu").release();
    g_torch.dtypes = dtypes.inc_ref();
    g_torch.api = nullptr;
    const nb::handle tensor_type(reinterpret_cast<PyObject*>(g_torch.tensor));
    if (!use_exchange || !nb::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return;
    nb::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
    auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) return PyErr_Clear();
    if (api->version.major == 1 && api->view) g_torch.api = api;
}

// ---- weights ----------------------------------------------------------------------------------------------

// Blocks and room for them, 16 rows side by side
template <class Args>
void move_rows(int64_t (*Kernels::*kernel)(const Args&), nb::handle packed, nb::handle blocks, int type) {
    Args a;
    a.packed = tensor(packed), a.blocks = tensor(blocks), a.type = static_cast<BlockType>(type);
    require(a.blocks.ndim == 2 && is_contiguous(a.blocks), "pack: expected contiguous rows of blocks");
    constexpr int kAnyBits = 8;
    const Tensor rows = as_rows({{}, a.type, a.blocks.shape[0], kAnyBits}, a.packed);
    require(a.blocks.dtype == DType::u8 && rows.shape[1] == a.blocks.shape[1],
            "pack: expected uint8 blocks and room for 16 rows of them side by side");
    nb::gil_scoped_release release;
    (active_level().kernels->*kernel)(a);
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

bool has_finite_halves(nb::handle bytes, int64_t step, int64_t begin, int64_t end) {
    const Halves a{tensor(bytes), step, begin, end};
    require(a.bytes.dtype == DType::u8 && is_contiguous(a.bytes), "has_finite_halves: expected bytes");
    const bool fits = 0 <= begin && begin <= end && end <= step && (end - begin) % 2 == 0 && step > 0;
    require(fits && num_elements(a.bytes) % step == 0,
            "has_finite_halves: expected whole float16 within steps that fill the bytes");
    nb::gil_scoped_release release;
    return active_level().kernels->find_infinite(a) == kOk;
}

// What was freed in between and is kept for later, back to the system
void release_memory() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

// {ggml's id: (elements, bytes)} of every type in blocks
nb::dict block_sizes() {
    nb::dict sizes;
#define X(name, id, elements, bytes) \
    if (elements > 1) sizes[nb::int_(id)] = nb::make_tuple(elements, bytes);
    INFINI_BLOCK_TYPES(X)
#undef X
    return sizes;
}

// {name: whether the output may be the first input}
nb::dict ops() {
    nb::dict ops;
#define X(name, Args) ops[#name] = (Args::kRoles.overwritten >> Args::kRoles.outputs & 1) != 0;
    INFINI_OPS(X)
#undef X
    return ops;
}

// The wrapped sum of every word, so that none of the reads can be left out; each asks for what lies `ahead`
// bytes on, or for lines of the next pages in turn
uint64_t read_all(nb::handle buffer, std::optional<int64_t> ahead) {
    const Tensor t = tensor(buffer);
    require(t.dtype == DType::i64 && is_contiguous(t), "read_all: expected a contiguous int64 tensor");
    const auto* words = static_cast<const uint64_t*>(t.data);
    std::atomic<uint64_t> total{0};
    nb::gil_scoped_release release;
    constexpr int64_t kLine = 8;
    typedef uint64_t Line
        __attribute__((vector_size(kLine * 8)));  // the fewer instructions, the more are on their way
    parallel_for(num_elements(t) / kLine, 1 << 13, [&](int64_t begin, int64_t end) {
        Line sums{}, line;
        for (int64_t i = begin; i < end; ++i) {
            if (ahead)
                ask_for(reinterpret_cast<const char*>(words + i * kLine) + *ahead);
            else
                ask_in_turn(words + i * kLine);
            memcpy(&line, words + i * kLine, sizeof line);
            sums += line;
        }
        for (int64_t j = 0; j < kLine; ++j) total += sums[j];
    });
    for (int64_t i = num_elements(t) / kLine * kLine; i < num_elements(t); ++i) total += words[i];
    return total;
}

int64_t count_products(int64_t rounds) {
    require(rounds >= 0 && rounds <= 1 << 30, "count_products: expected 0 to 2^30 rounds");
    nb::gil_scoped_release release;
    return active_level().kernels->count_products({rounds});
}

nb::list level_names() {
    nb::list names;
    for (int i = 0; i < kNumLevels; ++i)
        if (kLevels[i].is_supported()) names.append(kLevels[i].name);
    return names;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // models may live until the process ends
    nb::class_<Call>(m, "Call").def("__call__", [](const Call& call, nb::args tensors) { call(tensors); });
    nb::class_<Arena>(m, "Arena").def(nb::init<>()).def_prop_ro("num_bytes", [](const Arena& arena) {
        return arena.slabs->num_bytes();
    });
    nb::class_<Graph>(m, "Graph")
        .def(nb::init<const Arena&>())
        .def("append", &Graph::append)
        .def("empty_like",
             [](const Graph& graph, nb::object tensor) { return graph.recording().empty_like(tensor); })
        .def("end", [](const Graph& graph) { graph.recording().slabs->end(graph.recording().id); })
        .def("replay", &Graph::replay)
        .def("__len__", &Graph::size);
    nb::class_<Job>(m, "Job")
        .def(nb::init<>())
        .def("copy", &Job::copy)
        .def("take", &Job::take)
        .def("replay", &Job::replay);
    nb::class_<Queue>(m, "Queue")
        .def(nb::init<>())
        .def("begin", &Queue::begin)
        .def("wait", &Queue::wait)
        .def("settle", &Queue::settle);
    nb::class_<Weight>(m, "Weight")
        .def("__init__",
             [](Weight* self, nb::object blocks, int type, int64_t num_rows, int activation_bits) {
                 require(block_size(static_cast<BlockType>(type)).elements > 1, "no such block type");
                 require(num_rows >= 0 && (activation_bits == 0 || activation_bits == 8 ||
                                           activation_bits == 12 || activation_bits == 16),
                         "activations have 8, 12 or 16 bits, or 0 where rows are not packed");
                 new (self) Weight{blocks, static_cast<BlockType>(type), num_rows, activation_bits};
             });

#define X(name, Args) define<Args>(m, #name, &Kernels::name, &read_arguments);
    INFINI_OPS(X)
#undef X
    m.def("ops", &ops);

    m.def("pack_rows", [](nb::handle packed, nb::handle blocks, int type) {
        move_rows(&Kernels::pack_rows, packed, blocks, type);
    });
    m.def("unpack_rows", [](nb::handle blocks, nb::handle packed, int type) {
        move_rows(&Kernels::unpack_rows, packed, blocks, type);
    });
    m.def("quantize_rows", &quantize_rows);
    m.def("has_finite_halves", &has_finite_halves);
    m.def("release_memory", &release_memory);
    m.def("block_sizes", &block_sizes);
    m.attr("PACKED_ROWS") = kPackedRows;
    m.attr("LONGEST_GATED_SPAN") = kMostGatedSpan;

    m.def(
        "record_into", [](const Graph* graph) { t_recording = graph ? graph->recording() : Recording{}; },
        nb::arg().none());
    m.def("use_torch", &use_torch);
    m.def("read_all", &read_all, nb::arg("buffer"), nb::arg("ahead").none());
    m.def("count_products", &count_products);
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", [](int count) {
        require(count >= 1 && count <= 1024, "set_num_threads: expected 1 to 1024");
        nb::gil_scoped_release release;
        set_num_threads(count);
    });
    m.def("activation_rounding", [](int type, int bits) {
        const Rounding rounding = rounding_of(static_cast<BlockType>(type), bits, active_wholes());
        return std::pair(rounding.bits, rounding.span);
    });
    m.def("isa_levels", &level_names);
    m.def("isa", [] { return std::string(active_level().name); });
    m.def("set_isa", [](const std::string& name) {
        if (set_level(name.c_str())) return;
        const std::string levels = nb::repr(level_names()).c_str();
        refuse("set_isa and INFINICORE_ISA take a level of this CPU, one of " + levels + ", but found '" +
               name + "'");
    });
}
