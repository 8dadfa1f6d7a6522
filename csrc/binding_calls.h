// Kernels called from Python: at once, bound to their tensors to be called again and again, or many in one
// replay.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "binding_tensors.h"
#include "kernels.h"

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
void report_place(const Tensor& streams, const Tensor& positions, const Tensor& keys, int64_t at) {
    const auto value = [&](const Tensor& t) { return std::to_string(index_at(t.data, t.dtype, at)); };
    throw nb::index_error(("token " + std::to_string(at) + " is at position " + value(positions) +
                           " of stream " + value(streams) + ", but the cache has " +
                           std::to_string(keys.shape[0]) + " streams of " + std::to_string(keys.shape[2]) +
                           " positions")
                              .c_str());
}

void report(const Attention& a, int64_t at) { report_place(a.streams, a.positions, a.keys, at); }
void report(const StoreKv& a, int64_t at) { report_place(a.streams, a.positions, a.keys, at); }
void report(const QuantizedEmbedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.num_rows); }
void report(const PackedLinear&, int64_t) {
    refuse("linear: out may not be the input, which is read while out is written");
}
void report(const Linear&, int64_t) {
    refuse("linear: out may not be the input, which is read while out is written");
}
void report(const RandomSample& a, int64_t at) {
    if (at == a.logits.shape[0]) refuse("random_sample: every logit is -inf, so there is no token to take");
    refuse("random_sample: logit " + std::to_string(at) + " is NaN or +inf; expected finite values or -inf");
}

// ---- calls ------------------------------------------------------------------------------------------------

template <class Args>
void run_kernel(int64_t (*kernel)(const Args&), const Args& args) {
    int64_t status;
    {
        nb::gil_scoped_release release;
        status = kernel(args);
    }
    if (status != kOk) report(args, status);
}

// An op with its tensors, checked. `run` takes their addresses and needs no Python; `report` throws for its
// status.
struct Call {
    std::vector<nb::object> owners;  // None where an optional tensor is absent
    std::vector<Tensor> layouts;
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
        if (owners[i].is_none()) return nullptr;
        Tensor t = tensor(h);
        void* data = t.data;
        t.data = layouts[i].data;
        if (!is_same_view(t, layouts[i]))
            refuse("tensor " + std::to_string(i) +
                   " differs in dtype, shape or strides from the one this call was made for");
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
        infini::report(with_addresses(args, data), status);
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
                const bool is_own = i == 0 || std::find(made.begin(), made.end(), owner) != made.end();
                if (i == 0) made.push_back(owner);
                if (!is_own && !call->owners[i].is_none()) outside_.push_back({data_.size() - 1, i});
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
