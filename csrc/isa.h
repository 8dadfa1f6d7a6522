// Which instruction-set level runs. Chosen once at load: the best the CPU has, or INFINICORE_ISA.
#pragma once
#include "kernels.h"

namespace infini {

struct Level {
    const char* name;
    const Kernels* kernels;
    bool (*is_supported)();
};

extern const Level kLevels[];  // from the plainest to the fastest
extern const int kNumLevels;

const Level& active_level();
bool set_level(const char* name);  // false: unknown or not on this CPU

}  // namespace infini
