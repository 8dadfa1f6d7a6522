// Jobs that are done behind their caller, so that Python makes one step ready while another one runs.
#pragma once
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "binding_calls.h"
#include "float_mode.h"

namespace infini {
namespace {

// Moves of numbers and replays in their order, which are done again each time the job is. Its tensors keep
// their memory.
class Job {
public:
    void copy(nb::object to, nb::object from) {
        const Tensor y = kept(to), x = kept(from);
        require(y.dtype == x.dtype && same_shape(y, x), "copy: both tensors must have one dtype and shape");
        parts_.push_back([=]() -> Complaint {
            memcpy(y.data, x.data, static_cast<size_t>(num_elements(x) * item_size(x.dtype)));
            return {};
        });
    }

    // to[i] = table[index[i]], or 0 for what is less; where the table ends before that, to[i] stays
    void take(nb::object to, nb::object table, nb::object index) {
        const Tensor y = kept(to), x = kept(table), at = kept(index);
        const bool is_long = y.dtype == DType::i64 && x.dtype == DType::i64 && at.dtype == DType::i64;
        require(is_long && same_shape(y, at), "take: expected tensors of int64, an index for each number");
        parts_.push_back([=]() -> Complaint {
            auto* numbers = static_cast<int64_t*>(y.data);
            const auto *known = static_cast<int64_t*>(x.data), *places = static_cast<int64_t*>(at.data);
            for (int64_t i = 0; i < num_elements(y); ++i)
                if (places[i] >= 0 && places[i] < num_elements(x))
                    numbers[i] = known[places[i]] > 0 ? known[places[i]] : 0;
            return {};
        });
    }

    void replay(nb::object graph) {
        Graph* replayed = &nb::cast<Graph&>(graph);
        owners_.push_back(graph);
        graphs_.push_back(replayed);
        parts_.push_back([replayed] { return replayed->run_all(); });
    }

    // Where tensors are now; they are not moved while another job reads them
    template <class F>
    void look(F&& before_moving) {
        for (Graph* graph : graphs_) graph->look(before_moving);
    }

    // Without the GIL
    Complaint run() const try {
        for (const auto& part : parts_)
            if (Complaint complaint = part()) return complaint;
        return {};
    } catch (...) {
        return [error = std::current_exception()] { std::rethrow_exception(error); };
    }

private:
    Tensor kept(const nb::object& owner) {
        const Tensor t = tensor(owner);
        require(is_contiguous(t), "a job's tensors must be contiguous");
        owners_.push_back(owner);
        return t;
    }

    std::vector<nb::object> owners_;
    std::vector<Graph*> graphs_;
    std::vector<std::function<Complaint()>> parts_;
};

// Jobs are done one after the other by a thread of the queue's own.
class Queue {
public:
    ~Queue() {
        if (!is_own()) {
            forget();
            return;
        }
        {
            const std::lock_guard lock(state_->mutex);
            state_->is_stopping = true;
        }
        state_->changed.notify_all();
        const nb::gil_scoped_release release;
        if (state_->thread.joinable()) state_->thread.join();
    }

    // Its number, to wait for
    uint64_t begin(nb::object job) {
        const Job& given = nb::cast<Job&>(job);
        nb::cast<Job&>(job).look([this] { settle(); });
        State& state = own_state();
        const std::lock_guard lock(state.mutex);
        if (!state.thread.joinable()) state.thread = std::thread(&State::work, &state);
        state.given.push_back({std::move(job), &given, float_mode(), {}});
        state.changed.notify_all();
        return ++state.num_given;
    }

    // Throws what was found wrong in this job
    void wait(uint64_t number) {
        require(number <= own_state().num_given, "wait: no job of this number has begun");
        if (const Complaint complaint = finished(number)) complaint();
    }

    // Waits for all; what was found wrong, nobody wants to know.
    void settle() { finished(own_state().num_given); }

private:
    struct Given {
        nb::object owner;
        const Job* job;
        uint64_t mode;
        Complaint complaint;
    };

    struct State {
        const pid_t process = getpid();
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<Given> given;  // of which the first num_done - num_let_go are done
        uint64_t num_given = 0, num_done = 0, num_let_go = 0;
        bool is_stopping = false;
        std::thread thread;

        bool has_done(uint64_t number, std::chrono::milliseconds patience) {
            std::unique_lock lock(mutex);
            return changed.wait_for(lock, patience, [&] { return num_done >= number; });
        }

        void work() {
            std::unique_lock lock(mutex);
            for (;;) {
                changed.wait(lock, [&] { return is_stopping || num_done < num_given; });
                if (is_stopping) return;
                Given& next = given[num_done - num_let_go];  // stays where it is when others come
                lock.unlock();
                set_float_mode(next.mode);
                next.complaint = next.job->run();
                lock.lock();
                ++num_done;
                changed.notify_all();
            }
        }
    };

    bool is_own() const { return state_->process == getpid(); }

    // A forked child has no such thread, and nobody can tell what that was at: its state is left as it is.
    void forget() { static_cast<void>(state_.release()); }

    State& own_state() {
        if (!is_own()) {
            const uint64_t num_given = state_->num_given;
            forget();
            state_ = std::make_unique<State>();
            state_->num_given = state_->num_done = state_->num_let_go = num_given;
        }
        return *state_;
    }

    // Waits for a job and those before it, and lets go of them; what it has to say. Who need not wait keeps
    // the GIL.
    Complaint finished(uint64_t number) {
        State& state = own_state();
        bool is_done = state.has_done(number, std::chrono::milliseconds(0));
        while (!is_done) {
            is_done = without_gil([&] { return state.has_done(number, std::chrono::milliseconds(20)); });
            if (!is_done && PyErr_CheckSignals() != 0) throw nb::python_error();  // an interrupt
        }
        return let_go(state, number);
    }

    Complaint let_go(State& state, uint64_t number) {
        std::vector<Given> done;  // which may end Python objects, so not under the lock
        {
            const std::lock_guard lock(state.mutex);
            for (; state.num_let_go < number; ++state.num_let_go) {
                done.push_back(std::move(state.given.front()));
                state.given.pop_front();
            }
        }
        return done.empty() ? Complaint{} : std::move(done.back().complaint);
    }

    std::unique_ptr<State> state_ = std::make_unique<State>();
};

}  // namespace
}  // namespace infini
