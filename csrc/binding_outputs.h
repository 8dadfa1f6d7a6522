// The outputs of ops: given and checked, or new ones, which lie in the memory of a recording while one is on
#pragma once
#include "binding_arguments.h"
#include "slabs.h"

namespace infini {
namespace {

// What Python holds of slabs; graphs and tensors hold them too
struct Arena { std::shared_ptr<Slabs> slabs = std::make_shared<Slabs>(); };

struct Recording {
    std::shared_ptr<Slabs> slabs;
    uint64_t id = 0;

    bool made(const void* address) const { return slabs->holds(address, id); }

    // A tensor of this layout, with elements, in the recording's memory
    nb::object empty(const Tensor& t) const {
        struct Lease {
            std::shared_ptr<Slabs> slabs;
            Slabs::Place place;
            ~Lease() { slabs->give_back(place); }
        };
        const Span bytes = span(t);
        auto* lease = new Lease{slabs, slabs->take(bytes.end - bytes.begin, id)};
        const nb::capsule owner(lease, [](void* p) noexcept { delete static_cast<Lease*>(p); });
        size_t shape[kMaxDims];
        for (int i = 0; i < t.ndim; ++i) shape[i] = static_cast<size_t>(t.shape[i]);
        const auto& type = kDlpackTypes[static_cast<int>(t.dtype)];
        return nb::cast(nb::ndarray<nb::pytorch>(lease->place.begin, t.ndim, shape, owner, t.stride,
                                                 nb::dlpack::dtype{type.code, type.bits, 1}));
    }

    // The same for a tensor that torch has made. What kernels could not read stays as it is.
    nb::object empty_like(nb::object plain) const {
        Tensor t;
        return read(plain, &t) && num_elements(t) ? empty(t) : plain;
    }
};

thread_local Recording t_recording;  // without slabs while nothing is recorded

// What keeps an output from being written while the other tensors are read, or null
template <class Args>
const char* broken_overlap(const Args& args) {
    constexpr Roles roles = Args::kRoles;
    const auto* tensors = reinterpret_cast<const Tensor*>(&args);
    for (int y = 0; y < roles.outputs; ++y)
        for (int i = y + 1; i < roles.tensors; ++i) {
            if (!tensors[i].data || lie_apart(tensors[y], tensors[i])) continue;
            if (i < roles.outputs) return "two outputs overlap";
            if (!(roles.overwritten >> i & 1) || !is_same_view(tensors[y], tensors[i]))
                return "the output overlaps an input that is read while it is written";
        }
    return nullptr;
}

nb::object plain_output(const Tensor& promised, nb::handle like) {
    if (like.is_valid()) return g_torch.empty_like(like);
    nb::list sizes;
    for (int i = 0; i < promised.ndim; ++i) sizes.append(promised.shape[i]);
    return g_torch.empty(sizes, nb::arg("dtype") = g_torch.dtypes[static_cast<int>(promised.dtype)],
                         nb::arg("device") = g_torch.cpu);  // whatever device torch's default is
}

Tensor made_contiguous(Tensor t) {
    for (int64_t i = t.ndim - 1, size = 1; i >= 0; size *= t.shape[i--]) t.stride[i] = size;
    return t;
}

nb::object new_output(const Tensor& promised, nb::handle like) {
    if (!t_recording.slabs) return plain_output(promised, like);
    const bool is_plain = !like.is_valid() || is_contiguous(promised);
    if (is_plain && num_elements(promised)) return t_recording.empty(made_contiguous(promised));
    return t_recording.empty_like(plain_output(promised, like));
}

void check_output(const Tensor& y, const Tensor& promised, bool may_widen) {
    const bool is_widened = may_widen && y.dtype == DType::f32 && is_float(promised.dtype);
    require(y.dtype == promised.dtype || is_widened, "out must have the dtype of the result");
    if (!same_shape(y, promised))
        refuse("out has shape " + shape_of(y) + ", but the result has " + shape_of(promised));
    require(has_rows(y) && !overlaps_itself(y), "out must have contiguous rows that lie apart");
    require(!may_widen || is_contiguous(y), "out must be contiguous");
}

template <class Args>
void take_output(Reading<Args>& r, int i, nb::handle out) {
    if constexpr (Args::kRoles.is_in_place) {
        require(out.is(r.owners[i]), "a result that is written in place needs its arguments as out");
        require(!overlaps_itself(r.tensors()[i]), "out must lie apart from itself");
    } else {
        const Tensor y = tensor(out);
        check_output(y, r.tensors()[i], r.may_widen);
        r.tensors()[i] = y, r.owners[i] = out;
    }
}

// Fills in the outputs, and returns them: `out`, or new ones where it is None
template <class Args>
nb::object take_outputs(Reading<Args>& r, nb::handle out) {
    constexpr int kCount = Args::kRoles.outputs;
    nb::object y = nb::borrow(out);
    if constexpr (kCount == 1) {
        if (out.is_none()) y = new_output(r.tensors()[0], r.like);
        take_output(r, 0, y);
    } else {
        if (out.is_none()) {
            require(!Args::kRoles.is_in_place,
                    "a result that is written in place needs its arguments as out");
            y = nb::make_tuple(new_output(r.tensors()[0], r.like), new_output(r.tensors()[1], r.like));
        }
        static_assert(kCount == 2);
        require(nb::isinstance<nb::tuple>(y) && nb::len(y) == kCount, "out must be a pair of tensors");
        for (int i = 0; i < kCount; ++i) take_output(r, i, nb::borrow<nb::tuple>(y)[i]);
    }
    if (const char* rule = broken_overlap(r.args)) refuse(rule);
    return y;
}

}  // namespace
}  // namespace infini
