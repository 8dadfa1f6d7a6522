#include "isa.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace infini {

#define X(level)                   \
    namespace level {              \
    extern const Kernels kKernels; \
    }
INFINI_LEVELS
#undef X

namespace {

bool has_portable() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

// Tile registers need the kernel's leave, asked for once a process (ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool has_amx() {
    unsigned eax, ebx, ecx, edx;
    if (!has_avx512() || !__builtin_cpu_supports("gfni") || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return false;
    constexpr unsigned kTileBf16Int8 = 1u << 22 | 1u << 24 | 1u << 25;
    unsigned eax1;
    if ((edx & kTileBf16Int8) != kTileBf16Int8 || !__get_cpuid_count(7, 1, &eax1, &ebx, &ecx, &edx))
        return false;
    constexpr unsigned kAvx512Bf16 = 1u << 5;
    return (eax1 & kAvx512Bf16) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#elif defined(__aarch64__)
bool has_neon() {
#if defined(__linux__)
    constexpr unsigned long kWanted = HWCAP_ASIMDDP | HWCAP_ASIMDHP | HWCAP_FPHP;
    return (getauxval(AT_HWCAP) & kWanted) == kWanted;
#else
    return true;  // every arm64 Mac
#endif
}

bool has_i8mm() {
#if defined(__linux__)
    constexpr unsigned long kI8mm = 1ul << 13;  // HWCAP2_I8MM, which older headers lack
    return has_neon() && (getauxval(AT_HWCAP2) & kI8mm);
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) && found;
#else
    return false;
#endif
}
#endif

const Level* g_active = nullptr;

}  // namespace

#define X(level) {#level, &level::kKernels, has_##level},
const Level kLevels[] = {INFINI_LEVELS};
#undef X
const int kNumLevels = sizeof(kLevels) / sizeof(kLevels[0]);

const Level& active_level() {
    for (int i = kNumLevels; !g_active;)
        if (kLevels[--i].is_supported()) g_active = &kLevels[i];
    return *g_active;
}

Wholes active_wholes() {
    const char* name = active_level().name;
    return !strcmp(name, "amx") ? Wholes::of_block : !strcmp(name, "avx512") ? Wholes::of_64 : Wholes::none;
}

bool set_level(const char* name) {
    for (int i = 0; i < kNumLevels; ++i)
        if (!strcmp(kLevels[i].name, name) && kLevels[i].is_supported()) return g_active = &kLevels[i], true;
    return false;
}

}  // namespace infini
