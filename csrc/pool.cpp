#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

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

// The work of a region, cut into parts. Threads take the next part whenever they have done one, of much work
// large ones first and then small ones, so that nobody waits long for a core that is slow or busy with
// others.
struct Job {
    Body body;
    void* context;
    int64_t count;
    int num_large, num_small;

    Job(Body body, void* context, int64_t count, int64_t most, int num_threads)
        : body(body), context(context), count(count),
          num_large(static_cast<int>(most < num_threads ? most : num_threads)),
          num_small(most < 16 * num_threads ? 0 : num_threads) {}
    Job() : Job(nullptr, nullptr, 0, 0, 1) {}

    int num_parts() const { return num_large + num_small; }

    int64_t begin_of(int part) const {
        const int64_t large = num_small ? count / 4 * 3 : count;
        if (part <= num_large) return large * part / num_large;
        return large + (count - large) * (part - num_large) / num_small;
    }

    void run(int part, bool is_first) const { body(context, begin_of(part), begin_of(part + 1), is_first); }
};

// Which part of which region is next. In one number, so that a thread that comes late takes no part of
// another region than it thinks.
struct Ticket {
    uint32_t region;
    uint16_t num_parts, next;
};

class Pool {
public:
    explicit Pool(int num_threads) : num_threads_(num_threads) {}
    ~Pool() { stop(); }

    int size() const { return num_threads_; }

    void resize(int num_threads) {
        std::lock_guard lock(region_);
        stop();
        num_threads_ = num_threads;
    }

    void run(Body body, void* context, int64_t count, int64_t most) {
        std::unique_lock lock(region_, std::try_to_lock);
        if (!lock || num_threads_ == 1) return body(context, 0, count, true);
        start();
        job_ = Job(body, context, count, most, num_threads_);
        const int num_parts = job_.num_parts();
        num_done_.store(0, std::memory_order_relaxed);
        const uint32_t region = epoch_.load(std::memory_order_relaxed) + 1;
        ticket_.store({region, static_cast<uint16_t>(num_parts), 0}, std::memory_order_release);
        epoch_.store(region, std::memory_order_release);
        epoch_.notify_all();
        take_parts();
        for (int spins = 0; num_done_.load(std::memory_order_acquire) != num_parts; ++spins)
            spins < kSpinPauses ? relax() : static_cast<void>(sched_yield());
    }

private:
    void start() {
        while (static_cast<int>(workers_.size()) < num_threads_ - 1)
            workers_.emplace_back(&Pool::work, this, epoch_.load());
    }

    void stop() {
        stopping_ = true;
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    // The job stays as it is while a part of it is not done. After a thread's part another region may have
    // begun.
    void take_parts() {
        Ticket ticket = ticket_.load(std::memory_order_acquire);
        for (uint32_t last = ticket.region - 1; ticket.next < ticket.num_parts;) {
            const Ticket after{ticket.region, ticket.num_parts, static_cast<uint16_t>(ticket.next + 1)};
            if (!ticket_.compare_exchange_weak(ticket, after, std::memory_order_acq_rel,
                                               std::memory_order_acquire))
                continue;
            job_.run(ticket.next, ticket.region != last);
            last = ticket.region;
            num_done_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void work(uint32_t seen) {
        for (;;) {
            for (int spins = 0; spins < kSpinPauses && epoch_.load(std::memory_order_acquire) == seen;
                 ++spins)
                relax();
            epoch_.wait(seen, std::memory_order_acquire);
            seen = epoch_.load(std::memory_order_acquire);
            if (stopping_) return;
            take_parts();
        }
    }

    std::mutex region_;
    std::vector<std::thread> workers_;
    Job job_;
    std::atomic<int> num_threads_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<Ticket> ticket_{};
    alignas(64) std::atomic<int> num_done_{0};
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
    static constexpr std::align_val_t kAlignment{64};
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
