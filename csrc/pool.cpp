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

struct Job {
    void (*body)(void*, int64_t, int64_t);
    void* context;
    int64_t count;
    int num_parts;
    void run(int part) const { body(context, count * part / num_parts, count * (part + 1) / num_parts); }
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

    void run(Job job, int64_t max_parts) {
        std::unique_lock lock(region_, std::try_to_lock);
        if (!lock || num_threads_ == 1) return job.body(job.context, 0, job.count);
        start();
        const int most = num_threads_;
        job.num_parts = max_parts < most ? static_cast<int>(max_parts) : most;
        job_ = job;
        pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        job.run(0);
        for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins)
            spins < kSpinPauses ? relax() : static_cast<void>(sched_yield());
    }

private:
    void start() {
        while (static_cast<int>(workers_.size()) < num_threads_ - 1)
            workers_.emplace_back(&Pool::work, this, static_cast<int>(workers_.size()) + 1, epoch_.load());
    }

    void stop() {
        stopping_ = true;
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    void work(int part, uint64_t seen) {
        for (;;) {
            for (int spins = 0; spins < kSpinPauses && epoch_.load(std::memory_order_acquire) == seen;
                 ++spins)
                relax();
            epoch_.wait(seen, std::memory_order_acquire);
            seen = epoch_.load(std::memory_order_acquire);
            if (stopping_) return;
            if (part < job_.num_parts) job_.run(part);
            pending_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex region_;
    std::vector<std::thread> workers_;
    Job job_{};
    std::atomic<int> num_threads_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint64_t> epoch_{0};
    alignas(64) std::atomic<int> pending_{0};
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

void parallel_run(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context) {
    if (count <= 0) return;
    const int64_t most = count / (grain > 0 ? grain : 1);
    if (most <= 1) return body(context, 0, count);
    g_pool->run({body, context, count, 1}, most);
}

}  // namespace infini
