#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "float_mode.h"

namespace infini {
namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // about as long as x86's pause; `yield` is a no-op on most cores
#endif
}

// Some tens of microseconds: longer than the gap between two ops of one token
constexpr int kSpinPauses = 2000;

using Body = void (*)(void*, int64_t, int64_t, bool);

struct Job {
    Body body;
    void* context;
    int64_t count, num_units;
    uint64_t mode;

    int64_t begin_of(int64_t unit) const { return count * unit / num_units; }
    void run(int64_t begin, int64_t end, bool is_first) const {
        body(context, begin_of(begin), begin_of(end), is_first);
    }
};

constexpr int kUnitBits = 12, kRegionBits = 64 - 2 * kUnitBits;
constexpr int64_t kMaxUnits = (1 << kUnitBits) - 1;

// The region that is open, whose work is cut into units
struct Open { uint64_t region : kRegionBits, num_units : 2 * kUnitBits; };

// The units of a region that nobody has begun of those that are a thread's own. In one number, so that a
// thread that comes late takes nothing of another region than it thinks.
struct Share {
    uint64_t region : kRegionBits, begin : kUnitBits, end : kUnitBits;

    bool is_empty() const { return begin == end; }
    int size() const { return static_cast<int>(end - begin); }
};

// What a thread writes and others seldom look at
struct alignas(64) Place {
    std::atomic<Share> share{};
    alignas(64) std::atomic<uint64_t> num_done{0};  // units of all regions
};

// The work of a region is shared out evenly beforehand: a thread takes a quarter of what is left of its own,
// again and again, and then of what others have left, so that nobody waits long for a core that is slow or
// busy with others, and where none is, each writes to nothing but its own place.
class Pool {
public:
    explicit Pool(int num_threads) { resize(num_threads); }
    ~Pool() { stop(); }

    int size() const { return num_threads_; }

    void resize(int num_threads) {
        std::lock_guard lock(region_);
        stop();
        num_threads_ = num_threads;
        places_ = std::vector<Place>(num_threads);
        num_asked_ = 0;
    }

    void run(Body body, void* context, int64_t count, int64_t most) {
        std::unique_lock lock(region_, std::try_to_lock);
        if (!lock || num_threads_ == 1) return body(context, 0, count, true);
        start();
        job_ = {body, context, count, most < kMaxUnits ? most : kMaxUnits, float_mode()};
        num_asked_ += static_cast<uint64_t>(job_.num_units);
        take_part(begin_region(static_cast<uint64_t>(job_.num_units)), 0);
        for (int spins = 0; num_done() != num_asked_; ++spins)
            spins < kSpinPauses ? relax() : static_cast<void>(sched_yield());
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    }

private:
    Open begin_region(uint64_t num_units) {
        const Open open{open_.load(std::memory_order_relaxed).region + 1, num_units};
        open_.store(open, std::memory_order_release);
        open_.notify_all();
        return open;
    }

    uint64_t num_done() const {
        uint64_t sum = 0;
        for (const Place& place : places_) sum += place.num_done.load(std::memory_order_acquire);
        return sum;
    }

    // The system may have no room for all: a bound on threads, no memory for their stacks.
    void start() try {
        while (static_cast<int>(workers_.size()) < num_threads_ - 1)
            workers_.emplace_back(&Pool::work, this, static_cast<int>(workers_.size()) + 1, open_.load());
    } catch (const std::system_error& error) {
        throw std::runtime_error(std::string("the native core cannot start its threads, of which it has ") +
                                 std::to_string(workers_.size() + 1) + " of " + std::to_string(num_threads_) +
                                 ": " + error.what() + "; INFINICORE_NUM_THREADS takes a smaller number");
    }

    void stop() {
        stopping_ = true;
        begin_region(0);
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    // Of few units the caller, which is awake, has the first.
    Share whole_share(Open open, uint64_t thread) const {
        const uint64_t num_threads = num_threads_, round_up = num_threads - 1;
        return {open.region, (open.num_units * thread + round_up) / num_threads,
                (open.num_units * (thread + 1) + round_up) / num_threads};
    }

    // Takes a quarter of what is left of a share, of one's own the first and of another's the last, or
    // nothing. What was last written of it may be of a region before; if it is of a later one, this one is
    // over.
    Share take(Open open, int thread, bool is_own) {
        std::atomic<Share>& share = places_[thread].share;
        for (Share found = share.load(std::memory_order_relaxed);;) {
            if (found.region > open.region) return {};
            const Share left = found.region == open.region ? found : whole_share(open, thread);
            if (left.is_empty()) return {};
            const int quarter = (left.size() + 3) / 4;
            Share taken = left, rest = left;
            if (is_own)
                taken.end = rest.begin = left.begin + quarter;
            else
                taken.begin = rest.end = left.end - quarter;
            if (share.compare_exchange_weak(found, rest, std::memory_order_acq_rel,
                                            std::memory_order_relaxed))
                return taken;
        }
    }

    // A body may find no memory, which its caller hears of when nobody is at work for it any more.
    void run_units(Share units, bool is_first) {
        if (is_first) set_float_mode(job_.mode);
        try {
            job_.run(units.begin, units.end, is_first);
        } catch (...) {
            std::lock_guard lock(failing_);
            error_ = std::current_exception();
        }
    }

    // The job stays as it is while a unit of it is not done.
    void take_part(Open open, int own) {
        std::atomic<uint64_t>& num_done = places_[own].num_done;
        bool is_first = true;
        for (int i = 0; i < num_threads_;) {
            const Share taken = take(open, (own + i) % num_threads_, i == 0);
            if (taken.is_empty()) {
                ++i;
                continue;
            }
            run_units(taken, is_first);
            is_first = false;
            num_done.store(num_done.load(std::memory_order_relaxed) + taken.size(),
                           std::memory_order_release);
        }
    }

    Open next_region(Open seen) {
        for (int spins = 0;; ++spins) {
            const Open open = open_.load(std::memory_order_acquire);
            if (open.region != seen.region) return open;
            spins < kSpinPauses ? relax() : open_.wait(seen, std::memory_order_acquire);
        }
    }

    void work(int own, Open seen) {
        for (;;) {
            seen = next_region(seen);
            if (stopping_) return;
            take_part(seen, own);
        }
    }

    std::mutex region_, failing_;
    std::exception_ptr error_;  // of a unit of the region
    std::vector<std::thread> workers_;
    std::vector<Place> places_;
    uint64_t num_asked_ = 0;  // units of all regions
    std::atomic<int> num_threads_;
    std::atomic<bool> stopping_{false};
    // What all threads wait for, and what they find there
    alignas(64) std::atomic<Open> open_{};
    Job job_{};
};

int default_num_threads() {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
    const unsigned count = std::thread::hardware_concurrency();
    return count ? static_cast<int>(count) : 1;
}

class Buffer {
public:
    ~Buffer() { ::operator delete(data_, kAlignment); }

    void* room_for(int64_t bytes) {
        if (bytes <= size_) return data_;
        ::operator delete(data_, kAlignment);
        data_ = nullptr, size_ = 0;
        data_ = ::operator new(static_cast<size_t>(bytes), kAlignment);
        size_ = bytes;
        return data_;
    }

private:
    static constexpr std::align_val_t kAlignment{kPage};
    void* data_ = nullptr;
    int64_t size_ = 0;
};

// Made when the core is loaded, so that no fork can come in the midst of it, and never destroyed: workers may
// outlive static destructors. A forked child has no workers and takes a new pool.
Pool* g_pool = [] {
    pthread_atfork(nullptr, nullptr, [] { g_pool = new Pool(g_pool->size()); });
    return new Pool(default_num_threads());
}();

}  // namespace

int num_threads() { return g_pool->size(); }

void set_num_threads(int count) { g_pool->resize(count); }

void* scratch(Scratch use, int64_t bytes) {
    static thread_local Buffer buffers[2];
    return buffers[static_cast<int>(use)].room_for(bytes);
}

void parallel_run(int64_t count, int64_t grain, Body body, void* context) {
    if (count <= 0) return;
    const int64_t most = count / (grain > 0 ? grain : 1);
    if (most <= 1) return body(context, 0, count, true);
    g_pool->run(body, context, count, most);
}

}  // namespace infini
