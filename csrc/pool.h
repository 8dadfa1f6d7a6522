// The one thread pool. Workers spin a little while after a region, then park, so a process at rest uses no
// CPU.
#pragma once
#include <cstdint>
#include <new>
#include <type_traits>

namespace infini {

int num_threads();
void set_num_threads(int count);

// Calls body(context, begin, end, is_first) over [0, count), cut into runs of at least `grain` items, of
// which each thread takes one after the other; is_first tells whether it is the thread's first one. A second
// caller while a region runs does its work alone. Results may not depend on where the cuts fall.
void parallel_run(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t, bool), void* context);

// The body may leave out is_first.
template <class Body>
static inline void parallel_for(int64_t count, int64_t grain, Body&& body) {
    using Stored = std::remove_reference_t<Body>;
    parallel_run(
        count, grain,
        [](void* context, int64_t begin, int64_t end, bool is_first) {
            auto& body = *static_cast<Stored*>(context);
            if constexpr (std::is_invocable_v<Stored&, int64_t, int64_t, bool>)
                body(begin, end, is_first);
            else
                body(begin, end);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
}

constexpr int64_t kPage = 4096;

// Memory of the calling thread, aligned to a page, which stays and grows to the largest size asked for.
// There are two: one for what an op's caller makes for all threads of a region, one for what each thread has
// for itself in it.
enum class Scratch { shared, own };
void* scratch(Scratch use, int64_t bytes);

// A thread's own scratch as a T, for what is too large for a stack; without values it is not initialised
template <class T, class... Values>
static inline T* own_scratch(const Values&... values) {
    void* room = scratch(Scratch::own, sizeof(T));
    if constexpr (sizeof...(Values) == 0)
        return new (room) T;
    else
        return new (room) T(values...);
}

}  // namespace infini
