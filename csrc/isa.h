// Which instruction-set level runs: the one set_level chose (ops/native.py does so for INFINICORE_ISA), or
// from the first use on the best that the CPU has.
#pragma once
#include "ops.h"

namespace infini {

struct Level {
    const char* name;
    const Kernels* kernels;
    bool (*is_supported)();
};

extern const Level kLevels[];  // from the plainest to the fastest
extern const int kNumLevels;

const Level& active_level();
Wholes active_wholes();            // of that level
bool set_level(const char* name);  // false: unknown or not on this CPU

}  // namespace infini
