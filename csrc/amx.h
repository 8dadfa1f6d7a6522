// AMX tile registers: 0 to 3 for products, 4 and 5 for x, 6 and 7 for weight.
#pragma once
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// `rows` of x, and `depth` bytes of K
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16];
    uint8_t num_rows[16];

    constexpr TileConfig(uint8_t rows, uint8_t depth)
        : row_bytes{64, 64, 64, 64, depth, depth, 64, 64}, num_rows{rows,
                                                                    rows,
                                                                    rows,
                                                                    rows,
                                                                    rows,
                                                                    rows,
                                                                    static_cast<uint8_t>(depth / 4),
                                                                    static_cast<uint8_t>(depth / 4)} {}
};

// In assembly, because the compiler's own functions do not say what memory they read.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }

#define INFINI_LOAD(tile, p) asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(p), "r"(64L) : "memory")
#define INFINI_LOAD_ROWS(tile, p, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(p), "r"(stride) : "memory")
#define INFINI_ADD_PRODUCT(how, weight, x, sum) \
    asm volatile(how " %%tmm" #weight ", %%tmm" #x ", %%tmm" #sum::)
#define INFINI_STORE(tile, p) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(p), "r"(64L) : "memory")

// While tiles are busy only one of a core's two vector ports multiplies, converts or shifts. The other moves
// bytes.
INFINI_INLINE inline __m512i times_256(__m512i v) {
    return _mm512_shuffle_epi8(v, _mm512_set4_epi32(0x0e0d0cff, 0x0a0908ff, 0x060504ff, 0x020100ff));
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
