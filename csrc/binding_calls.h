// Kernels called from Python: at once, bound to their tensors to be called again and again, or many in one
// replay.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "binding_attention.h"
#include "binding_elementwise.h"
#include "binding_products.h"
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

void report(const Experts& a, int64_t at) { report_index("experts: id", a.ids, at, a.num_experts); }
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
void report(const AddLora& a, int64_t at) {
    const auto text = [](int64_t value) { return std::to_string(value); };
    const int64_t adapter = at - a.x.shape[0];
    const std::string message =
        adapter < 0
            ? "adapter " + text(index_at(a.adapters.data, a.adapters.dtype, at)) + " of row " + text(at) +
                  " is not -1, and outside [0, " + text(a.ends.shape[0]) + ")"
            : "end " + text(lora_begin(a.ends, adapter + 1)) + " of adapter " + text(adapter) +
                  " is before the one in front of it, or beyond the " + text(a.a.shape[0]) + " rows of a";
    throw nb::index_error(("add_lora: " + message).c_str());
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

// ---- the memory of recordings -----------------------------------------------------------------------------

// Slabs of memory cut into regions, one for each tensor that a recording makes. A region goes back when the
// storage of its tensor dies, which is when the last view does, and serves what is made from then on.
class Slabs {
public:
    struct Place {
        char* begin;
        uint64_t serial;
    };

    Place take(int64_t bytes, uint64_t recording) {
        const int64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        std::lock_guard lock(mutex_);
        auto hole = smallest_hole(size);
        if (hole == holes_.end()) hole = add_slab(size);
        const auto [begin, room] = *hole;
        holes_.erase(hole);
        if (room > size) holes_[begin + size] = room - size;
        regions_[begin] = {size, recording, ++last_serial_};
        return {begin, last_serial_};
    }

    // What a tensor leaves, unless its recording had left it already
    void give_back(Place place) {
        std::lock_guard lock(mutex_);
        const auto region = regions_.find(place.begin);
        if (region != regions_.end() && region->second.serial == place.serial) set_free(region);
    }

    // What outlives a recording, its result, is left to the next
    void end(uint64_t recording) {
        std::lock_guard lock(mutex_);
        for (auto region = regions_.begin(); region != regions_.end();)
            region->second.recording == recording ? set_free(region++) : void(++region);
    }

    // Whether the address lies in what this recording made and what still lives
    bool holds(const void* address, uint64_t recording) {
        auto* p = const_cast<char*>(static_cast<const char*>(address));
        std::lock_guard lock(mutex_);
        auto region = regions_.upper_bound(p);
        if (region == regions_.begin()) return false;
        const auto& [begin, found] = *--region;
        return p < begin + found.size && found.recording == recording;
    }

    int64_t num_bytes() {
        std::lock_guard lock(mutex_);
        return num_bytes_;
    }

private:
    struct Region {
        int64_t size;
        uint64_t recording, serial;
    };
    struct Free {
        void operator()(char* slab) const { ::operator delete(slab, std::align_val_t{kAlignment}); }
    };
    using Holes = std::map<char*, int64_t>;

    void set_free(std::map<char*, Region>::iterator region) {
        auto hole = holes_.emplace(region->first, region->second.size).first;
        regions_.erase(region);
        if (auto next = std::next(hole); next != holes_.end()) join(hole, next);
        if (hole != holes_.begin()) join(std::prev(hole), hole);
    }

    Holes::iterator smallest_hole(int64_t size) {
        auto best = holes_.end();
        for (auto hole = holes_.begin(); hole != holes_.end(); ++hole)
            if (hole->second >= size && (best == holes_.end() || hole->second < best->second)) best = hole;
        return best;
    }

    Holes::iterator add_slab(int64_t size) {
        const int64_t room = size > kSlabBytes ? size : kSlabBytes;
        auto* memory = static_cast<char*>(::operator new(room, std::align_val_t{kAlignment}));
        slabs_.emplace_back(memory);
        num_bytes_ += room;
        return holes_.emplace(memory, room).first;
    }

    void join(Holes::iterator hole, Holes::iterator next) {
        if (hole->first + hole->second != next->first) return;
        hole->second += next->second;
        holes_.erase(next);
    }

    static constexpr int64_t kAlignment = 64, kSlabBytes = 1 << 20;
    std::mutex mutex_;
    std::vector<std::unique_ptr<char, Free>> slabs_;
    Holes holes_;
    std::map<char*, Region> regions_;
    int64_t num_bytes_ = 0;
    uint64_t last_serial_ = 0;
};

// What Python holds of slabs; graphs and tensors hold them too
struct Arena { std::shared_ptr<Slabs> slabs = std::make_shared<Slabs>(); };

struct Recording {
    std::shared_ptr<Slabs> slabs;
    uint64_t id = 0;

    bool made(const void* address) const { return slabs->holds(address, id); }
    nb::object empty(const Tensor& layout) const;
    nb::object empty_like(nb::object plain) const;
};

thread_local Recording t_recording;  // without slabs while nothing is recorded

// A tensor of this layout, with elements, in the recording's memory
nb::object Recording::empty(const Tensor& t) const {
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
nb::object Recording::empty_like(nb::object plain) const {
    Tensor t;
    return read(plain, &t) && num_elements(t) ? empty(t) : plain;
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

nb::object plain_output(const Tensor& promised, nb::handle like) {
    if (like.is_valid()) return g_torch.empty_like(like);
    nb::list sizes;
    for (int i = 0; i < promised.ndim; ++i) sizes.append(promised.shape[i]);
    return g_torch.empty(sizes, nb::arg("dtype") = g_torch.dtypes[static_cast<int>(promised.dtype)]);
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
