// Kernels called from Python: at once, bound to their tensors to be called again and again, or many in one
// replay.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "binding_attention.h"
#include "binding_elementwise.h"
#include "binding_errors.h"
#include "binding_outputs.h"
#include "binding_products.h"

namespace infini {
namespace {

template <class Args>
using KernelOf = int64_t (*Kernels::*)(const Args&);

template <class F>
auto without_gil(F&& f) {
    nb::gil_scoped_release release;
    return f();
}

// Runs the op and returns its output, a new one where out is None; or None where the op declines
template <class Args, class... P>
nb::object run_op(KernelOf<Args> kernel, nb::handle out, P... given) {
    Reading<Args> r;
    nb::object y;
    try {
        read_arguments(r, given...);
        y = take_outputs(r, out);
    } catch (const nb::builtin_exception&) {
        return nb::none();
    }
    const int64_t status = without_gil([&] { return (active_level().kernels->*kernel)(r.args); });
    if (status != kOk) report(r.args, status);
    return y;
}

template <class Args, class... P>
bool accepts_op(nb::handle out, P... given) {
    Reading<Args> r;
    try {
        read_arguments(r, given...);
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
    std::function<int64_t(const std::vector<void*>&)> run;
    std::function<void(int64_t, const std::vector<void*>&)> report;

    void operator()(const nb::args& given) const {
        if (given.size() != 0 && given.size() != owners.size())
            throw nb::type_error(("expected no tensors, or " + std::to_string(owners.size())).c_str());
        std::vector<void*> data(owners.size());
        for (size_t i = 0; i < owners.size(); ++i)
            data[i] = address(i, given.size() ? nb::handle(given[i]) : nb::handle(owners[i]));
        const int64_t status = without_gil([&] { return run(data); });
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
    read_arguments(r, given...);
    take_outputs(r, out);
    Call call;
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

// Calls replayed in order by one call from Python. What the recording made stays where it was, whether or not
// its tensor lives: of it there is the address alone. All other tensors may be moved or resized, so they are
// kept and looked at again before each replay, each once: threads wait meanwhile.
class Graph {
public:
    explicit Graph(const Arena& arena) : recording_{arena.slabs, ++last_id} {}

    const Recording& recording() const { return recording_; }

    void append(const Call& call) {
        Step& step = steps_.emplace_back(Step{call, {}});
        for (size_t i = 0; i < call.owners.size(); ++i) {
            step.data.push_back(call.layouts[i].data);
            if (!call.owners[i].is_valid()) continue;
            if (recording_.made(call.layouts[i].data))
                step.call.owners[i].reset();
            else
                places_of(call, i).push_back({steps_.size() - 1, i});
        }
    }

    void replay() {
        for (const auto& places : outside_) {
            const auto& [first, index] = places.front();
            void* data = steps_[first].call.address(index, steps_[first].call.owners[index]);
            if (data == steps_[first].data[index]) continue;
            for (const auto& [at, i] : places) steps_[at].data[i] = data;
        }
        for (size_t at = 0; at < steps_.size();) {
            const int64_t status = run_for_a_while(at);
            if (status != kOk) return steps_[at].call.report(status, steps_[at].data);
            if (PyErr_CheckSignals() != 0) throw nb::python_error();  // an interrupt
        }
    }

    size_t size() const { return steps_.size(); }

private:
    struct Step {
        Call call;
        std::vector<void*> data;
    };

    // Steps from `at` on, until an interrupt should be heard, or up to one that finds something wrong
    int64_t run_for_a_while(size_t& at) {
        nb::gil_scoped_release release;
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
        for (; at < steps_.size() && std::chrono::steady_clock::now() < end; ++at)
            if (const int64_t status = steps_[at].call.run(steps_[at].data); status != kOk) return status;
        return kOk;
    }

    struct Place { size_t step, index; };
    using Places = std::vector<Place>;

    // Of a call's tensor from outside, with those where it was given before, laid out as now
    Places& places_of(const Call& call, size_t i) {
        for (Places& places : outside_) {
            const Call& known = steps_[places.front().step].call;
            const size_t index = places.front().index;
            if (known.owners[index].is(call.owners[i]) && is_same_view(known.layouts[index], call.layouts[i]))
                return places;
        }
        return outside_.emplace_back();
    }

    inline static std::atomic<uint64_t> last_id{0};
    Recording recording_;
    std::vector<Step> steps_;
    std::vector<Places> outside_;  // of each tensor
};

}  // namespace
}  // namespace infini
