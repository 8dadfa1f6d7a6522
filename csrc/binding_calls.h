// Kernels called from Python: at once, bound to their tensors to be called again and again, or many in one
// replay.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "binding_arguments.h"
#include "isa.h"

namespace infini {
namespace {

// ---- what a kernel found wrong ----------------------------------------------------------------------------

template <class Args>
void report(const Args&, int64_t) {}

void report_index(const char* what, const Tensor& indices, int64_t at, int64_t limit) {
    const int64_t found = index_at(indices.data, indices.dtype, at);
    const std::string value =
        indices.dtype == DType::u64 ? std::to_string(static_cast<uint64_t>(found)) : std::to_string(found);
    throw nb::index_error((std::string(what) + " " + value + " (element " + std::to_string(at) +
                           ") is outside [0, " + std::to_string(limit) + ")")
                              .c_str());
}

void report(const Rope& a, int64_t at) { report_index("rope: position", a.positions, at, a.sin.shape[0]); }
void report(const Embedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.weight.shape[0]); }

// Of a token that is nowhere, or that sees a slot which is
template <class Args>
void report_place(const Args& a, int64_t window, int64_t at) {
    const int64_t stream = index_at(a.streams.data, a.streams.dtype, at),
                  slot = index_at(a.slots.data, a.slots.dtype, at), block_size = a.values.shape[2];
    const auto text = [](int64_t value) { return std::to_string(value); };
    std::string message =
        "token " + text(at) + " is at slot " + text(slot) + " of stream " + text(stream) + ", but ";
    if (!has_slot(a.tables, block_size, stream, slot)) {
        message += "there are block tables of " + text(a.tables.shape[0]) + " streams, each with room for " +
                   text(a.tables.shape[1] * block_size) + " slots";
    } else {
        const int64_t entry =
            first_bad_block(a.tables, stream, blocks_seen(slot, window, block_size), a.keys.shape[0]);
        message += "entry " + text(entry) + " of that stream's block table, of " + text(a.tables.shape[1]) +
                   ", is " + text(entry < 0 ? entry : table_entry(a.tables, stream, entry)) +
                   ", and the pools have " + text(a.keys.shape[0]) + " blocks";
    }
    throw nb::index_error(message.c_str());
}

void report(const Attention& a, int64_t at) { report_place(a, a.window, at); }
void report(const StoreKv& a, int64_t at) { report_place(a, 1, at); }
void report(const QuantizedEmbedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.num_rows); }
void report(const PackedEmbedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.num_rows); }
void report(const RandomSample& a, int64_t at) {
    if (at == a.logits.shape[0]) refuse("random_sample: every logit is -inf, so there is no token to take");
    refuse("random_sample: logit " + std::to_string(at) + " is NaN or +inf; expected finite values or -inf");
}
void report(const Logprobs& a, int64_t at) {
    report_index("logprobs: token", a.tokens, at, a.logits.shape[1]);
}
void report(const AdjustLogits& a, int64_t at) {
    const int64_t length = a.history.shape[0];
    if (at < length) report_index("adjust_logits: token", a.history, at, a.logits.shape[1]);
    const int64_t found = index_at(a.ends.data, a.ends.dtype, at - length);
    throw nb::index_error(("adjust_logits: end " + std::to_string(found) + " (element " +
                           std::to_string(at - length) +
                           ") is before the one in front of it, or beyond the " + std::to_string(length) +
                           " tokens of the history")
                              .c_str());
}

// ---- outputs ----------------------------------------------------------------------------------------------

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

nb::object new_output(const Tensor& promised, nb::handle like) {
    if (like.is_valid()) return g_torch.empty_like(like);
    nb::list sizes;
    for (int i = 0; i < promised.ndim; ++i) sizes.append(promised.shape[i]);
    return g_torch.empty(sizes, nb::arg("dtype") = g_torch.dtypes[static_cast<int>(promised.dtype)]);
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

// ---- calls ------------------------------------------------------------------------------------------------

template <class Args>
using KernelOf = int64_t (*Kernels::*)(const Args&);

// Runs the op and returns its output, a new one where out is None; or None where the op declines
template <class Args, class... P>
nb::object run_op(KernelOf<Args> kernel, nb::handle out, P... given) {
    Reading<Args> r;
    nb::object y;
    try {
        Binding<Args>::read(r, given...);
        y = take_outputs(r, out);
    } catch (const nb::builtin_exception&) {
        return nb::none();
    }
    int64_t status;
    {
        nb::gil_scoped_release release;
        status = (active_level().kernels->*kernel)(r.args);
    }
    if (status != kOk) report(r.args, status);
    return y;
}

template <class Args, class... P>
bool accepts_op(nb::handle out, P... given) {
    Reading<Args> r;
    try {
        Binding<Args>::read(r, given...);
        if (!out.is_none()) take_outputs(r, out);
        return true;
    } catch (const nb::builtin_exception&) {
        return false;
    }
}

// An op with its tensors, checked. `run` takes their addresses and needs no Python; `report` throws for its
// status.
struct Call {
    std::vector<nb::object> owners;  // null where an optional tensor is absent
    std::vector<Tensor> layouts;
    size_t num_made;  // of the tensors, the first so many come to be by the call
    std::function<int64_t(const std::vector<void*>&)> run;
    std::function<void(int64_t, const std::vector<void*>&)> report;

    void operator()(const nb::args& given) const {
        if (given.size() != 0 && given.size() != owners.size())
            throw nb::type_error(("expected no tensors, or " + std::to_string(owners.size())).c_str());
        std::vector<void*> data(owners.size());
        for (size_t i = 0; i < owners.size(); ++i)
            data[i] = address(i, given.size() ? nb::handle(given[i]) : nb::handle(owners[i]));
        int64_t status;
        {
            nb::gil_scoped_release release;
            status = run(data);
        }
        if (status != kOk) report(status, data);
    }

    // Where the tensor now is, which must be laid out as the one the call was made with
    void* address(size_t i, nb::handle h) const {
        if (!owners[i].is_valid()) return nullptr;
        Tensor t = tensor(h);
        void* data = t.data;
        t.data = layouts[i].data;
        if (!is_same_view(t, layouts[i]))
            refuse("tensor " + std::to_string(i) +
                   " differs in dtype, shape or strides from the one this call was made for");
        return data;
    }
};

constexpr int64_t kOverlap = -2;

template <class Args>
Args with_addresses(Args args, const std::vector<void*>& data) {
    auto* tensors = reinterpret_cast<Tensor*>(&args);
    for (size_t i = 0; i < data.size(); ++i) tensors[i].data = data[i];
    return args;
}

// Checks the op now, for a call that can be repeated
template <class Args, class... P>
Call bind_op(KernelOf<Args> member, nb::handle out, P... given) {
    Reading<Args> r;
    Binding<Args>::read(r, given...);
    take_outputs(r, out);
    Call call;
    call.num_made = Args::kRoles.is_in_place ? 0 : Args::kRoles.outputs;
    for (int i = 0; i < Args::kRoles.tensors; ++i) {
        call.owners.push_back(nb::borrow(r.owners[i]));
        call.layouts.push_back(r.tensors()[i]);
    }
    const auto kernel = active_level().kernels->*member;
    call.run = [kernel, args = r.args](const std::vector<void*>& data) {
        const Args local = with_addresses(args, data);  // a copy: two threads may run one call
        return broken_overlap(local) ? kOverlap : kernel(local);
    };
    call.report = [args = r.args](int64_t status, const std::vector<void*>& data) {
        const Args local = with_addresses(args, data);
        if (status == kOverlap) refuse(broken_overlap(local));
        infini::report(local, status);
    };
    return call;
}

// Calls replayed in order by one call from Python. Tensors that no call of the graph made may be moved or
// resized by others, so they are looked at again before each replay.
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
                if (i < call->num_made) made.push_back(owner);
                if (owner && std::find(made.begin(), made.end(), owner) == made.end())
                    outside_.push_back({data_.size() - 1, i});
            }
        }
    }

    void replay() {
        for (const auto& [call, i] : outside_)
            data_[call][i] = calls_[call]->address(i, calls_[call]->owners[i]);
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

}  // namespace
}  // namespace infini
