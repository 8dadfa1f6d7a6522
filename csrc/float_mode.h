// How a thread rounds, and whether denormals are zero for it; workers do as their caller does.
#pragma once
#include <cstdint>

namespace infini {

inline uint64_t float_mode() {
    uint64_t mode = 0;
#if defined(__x86_64__)
    mode = __builtin_ia32_stmxcsr() & ~0x3Fu;  // without what has happened
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(mode));
#endif
    return mode;
}

inline void set_float_mode(uint64_t mode) {
    if (mode == float_mode()) return;
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" ::"r"(mode));
#endif
}

}  // namespace infini
