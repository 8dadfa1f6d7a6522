// Kernels called from Python: at once, bound to their tensors to be called again and again, or many in one
// replay.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
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

// An op with the tensors it runs on, which may be moved. `run` needs no Python; `report` throws for its
// status.
struct Placed {
    virtual ~Placed() = default;
    virtual std::unique_ptr<Placed> copy() const = 0;
    virtual void move(size_t i, void* data) = 0;
    virtual int64_t run() const = 0;
    virtual void report(int64_t status) const = 0;
};

constexpr int64_t kOverlap = -2;

template <class Args>
struct PlacedOp final : Placed {
    PlacedOp(int64_t (*kernel)(const Args&), const Args& args) : kernel_(kernel), args_(args) {}

    std::unique_ptr<Placed> copy() const override { return std::make_unique<PlacedOp>(*this); }

    void move(size_t i, void* data) override {
        reinterpret_cast<Tensor*>(&args_)[i].data = data;
        broken_ = broken_overlap(args_);
    }

    int64_t run() const override { return broken_ ? kOverlap : kernel_(args_); }

    void report(int64_t status) const override {
        if (status == kOverlap) refuse(broken_);
        infini::report(args_, status);
    }

private:
    int64_t (*kernel_)(const Args&);
    Args args_;
    const char* broken_ = nullptr;
};

// Where tensor i of a call now is, which must be laid out as the one the call was made with
void* address(size_t i, nb::handle h, const Tensor& layout) {
    Tensor t = tensor(h);
    void* data = t.data;
    t.data = layout.data;
    if (!is_same_view(t, layout))
        refuse("tensor " + std::to_string(i) +
               " differs in dtype, shape or strides from the one this call was made for");
    return data;
}

// An op, checked, that can be repeated on its tensors or on others like them
struct Call {
    std::vector<nb::object> owners;  // null where an optional tensor is absent
    std::vector<Tensor> layouts;
    std::shared_ptr<const Placed> op;

    void operator()(const nb::args& given) const {
        if (given.size() != 0 && given.size() != owners.size())
            throw nb::type_error(("expected no tensors, or " + std::to_string(owners.size())).c_str());
        const auto local = op->copy();  // two threads may run one call
        for (size_t i = 0; i < owners.size(); ++i) {
            if (!owners[i].is_valid()) continue;
            const nb::handle h = given.size() ? nb::handle(given[i]) : nb::handle(owners[i]);
            local->move(i, address(i, h, layouts[i]));
        }
        const int64_t status = without_gil([&] { return local->run(); });
        if (status != kOk) local->report(status);
    }
};

// Checks the op now
template <class Args, class... P>
Call bind_op(KernelOf<Args> kernel, nb::handle out, P... given) {
    Reading<Args> r;
    read_arguments(r, given...);
    const nb::object y = take_outputs(r, out);  // keeps a new one alive until the call does
    Call call;
    for (int i = 0; i < Args::kRoles.tensors; ++i) {
        call.owners.push_back(nb::borrow(r.owners[i]));
        call.layouts.push_back(r.tensors()[i]);
    }
    call.op = std::make_shared<PlacedOp<Args>>(active_level().kernels->*kernel, r.args);
    return call;
}

// What was found wrong, thrown for Python; empty where nothing was
using Complaint = std::function<void()>;

// Calls replayed in order by one call from Python. What the recording made stays where it was, whether or not
// its tensor lives: of it there is the address alone. All other tensors may be moved or resized, so they are
// kept and looked at again before each replay, each once: threads wait meanwhile.
class Graph {
public:
    explicit Graph(const Arena& arena) : recording_{arena.slabs, ++last_id} {}
    Graph(const Graph&) = delete;

    const Recording& recording() const { return recording_; }

    void append(const Call& call) {
        steps_.push_back(call.op->copy());
        for (size_t i = 0; i < call.owners.size(); ++i)
            if (call.owners[i].is_valid() && !recording_.made(call.layouts[i].data))
                outside(call.owners[i], call.layouts[i]).places.push_back({steps_.size() - 1, i});
    }

    void replay() {
        look([] {});
        for (size_t at = 0; at < steps_.size();) {
            const int64_t status = run_for_a_while(at);
            if (status != kOk) return steps_[at]->report(status);
            if (PyErr_CheckSignals() != 0) throw nb::python_error();  // an interrupt
        }
    }

    // Where the tensors are now that were there before the recording; before any of them is followed to a new
    // place, before_moving is called.
    template <class F>
    void look(F&& before_moving) {
        for (size_t i = 0; i < outside_.size(); ++i) {
            if (i + kAhead < outside_.size()) ask_for(outside_[i + kAhead].owner.ptr());
            follow(outside_[i], before_moving);
        }
    }

    // All steps, with tensors where they were last seen. It needs no Python.
    Complaint run_all() const {
        for (const auto& step : steps_)
            if (const int64_t status = step->run(); status != kOk)
                return [&step, status] { step->report(status); };
        return {};
    }

    size_t size() const { return steps_.size(); }

private:
    static constexpr size_t kAhead = 8;  // a step of the model has left nothing of these in the caches

    struct Place { size_t step, index; };

    // A tensor that was there before the recording, and where calls are given it
    struct Outside {
        nb::object owner;
        Tensor layout;
        std::vector<Place> places;
    };

    Outside& outside(const nb::object& owner, const Tensor& layout) {
        for (Outside& known : outside_)
            if (known.owner.is(owner) && is_same_view(known.layout, layout)) return known;
        return outside_.emplace_back(Outside{owner, layout, {}});
    }

    template <class F>
    void follow(Outside& tensor, F&& before_moving) {
        void* data = address(tensor.places.front().index, tensor.owner, tensor.layout);
        if (data == tensor.layout.data) return;
        before_moving();
        tensor.layout.data = data;
        for (const auto& [step, index] : tensor.places) steps_[step]->move(index, data);
    }

    // Steps from `at` on, until an interrupt should be heard, or up to one that finds something wrong
    int64_t run_for_a_while(size_t& at) {
        nb::gil_scoped_release release;
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
        for (; at < steps_.size() && std::chrono::steady_clock::now() < end; ++at)
            if (const int64_t status = steps_[at]->run(); status != kOk) return status;
        return kOk;
    }

    inline static std::atomic<uint64_t> last_id{0};
    Recording recording_;
    std::vector<std::unique_ptr<Placed>> steps_;
    std::vector<Outside> outside_;
};

}  // namespace
}  // namespace infini
