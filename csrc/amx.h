// AMX tile registers: the first take products, two have x, the others weight.
#pragma once
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// `rows` of x, `depth` bytes of K, and how many tiles take products
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};

    constexpr TileConfig(uint8_t rows, uint8_t depth, int num_products = 4) {
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_x = tile == num_products || tile == num_products + 1;
            row_bytes[tile] = is_x ? depth : 64;
            num_rows[tile] = tile < num_products + 2 ? rows : static_cast<uint8_t>(depth / 4);
        }
    }
};

// In assembly, because the compiler's own functions do not say what memory they read.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }

// Where two threads share a core, tile instructions that follow one another hold each other up, and take a
// third less time if others stand between them. A core that has one thread does not notice.
#define INFINI_APART "\n nop\n nop\n nop\n nop\n nop\n nop"

// What bytes of weight are, those of x have signs; or values of bfloat16 in pairs
enum class Terms { bytes, unsigned_bytes, pairs };

template <int tile>
INFINI_INLINE inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
INFINI_INLINE inline void load_tile(const void* p, int64_t stride = 64) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" INFINI_APART ::"r"(p), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
INFINI_INLINE inline void store_tile(void* p, int64_t stride = 64) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}

// sum += x * weight
template <int sum, int x, int weight, Terms terms = Terms::bytes>
INFINI_INLINE inline void add_product() {
    if constexpr (terms == Terms::bytes)
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" INFINI_APART ::"i"(sum), "i"(x), "i"(weight));
    else if constexpr (terms == Terms::unsigned_bytes)
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" INFINI_APART ::"i"(sum), "i"(x), "i"(weight));
    else
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" INFINI_APART ::"i"(sum), "i"(x), "i"(weight));
}

// While tiles are busy only one of a core's two vector ports multiplies, converts or shifts. The other moves
// bytes.
INFINI_INLINE inline __m512i times_256(__m512i v) {
    return _mm512_shuffle_epi8(v, _mm512_set4_epi32(0x0e0d0cff, 0x0a0908ff, 0x060504ff, 0x020100ff));
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
