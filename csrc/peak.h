// What the CPU allows: products of bytes, each added to a sum of 32 bits, by the instruction that packed
// products stand on, with all operands at hand.
#pragma once
#include "dots.h"

namespace infini::INFINI_LEVEL {
namespace {

#if defined(INFINI_AMX)
constexpr int64_t kProductsOfRound = 4 * 16 * 16 * 64;

void multiply_at_hand(int64_t rounds) {
    alignas(64) int8_t ones[16 * 64];
    memset(ones, 1, sizeof ones);
    configure_tiles(TileConfig(16, 64));
    unrolled<4>([&](auto i) INFINI_INLINE { load_tile<4 + i>(ones); });
    for (int64_t i = 0; i < rounds; ++i)
        asm volatile(
            "tdpbssd %%tmm6, %%tmm4, %%tmm0\n tdpbssd %%tmm6, %%tmm5, %%tmm1\n"
            "tdpbssd %%tmm7, %%tmm4, %%tmm2\n tdpbssd %%tmm7, %%tmm5, %%tmm3" ::);
    release_tiles();
}
#elif defined(INFINI_I8MM)
constexpr int kSumsAtOnce = 16;
constexpr int64_t kProductsOfRound = kSumsAtOnce * 2 * 2 * 8;

INFINI_NOT_SCHEDULED void multiply_at_hand(int64_t rounds) {
    const int8x16_t w = vdupq_n_s8(1), x = vdupq_n_s8(1);
    Tile<Dots<1>, kSumsAtOnce> sums;
    sums.each([](auto& sum, int n) INFINI_INLINE { sum.start(n); });
    for (int64_t i = 0; i < rounds; ++i)
        sums.each([&](auto& sum, int) INFINI_INLINE {
            asm volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(sum.part[0]) : "w"(w), "w"(x));
        });
}
#else
constexpr int kSumsAtOnce = kVectorRegisters / 2 / kParts;
constexpr int64_t kProductsOfRound = kSumsAtOnce * 16 * kRows;

INFINI_NOT_SCHEDULED void multiply_at_hand(int64_t rounds) {
    alignas(64) uint8_t w[16 * kRows];
    alignas(64) int8_t x[16];
    memset(w, 1, sizeof w), memset(x, 1, sizeof x);
    Tile<Dots<kParts, kMostInShorts>, kSumsAtOnce> sums;
    sums.each([](auto& sum, int n) INFINI_INLINE { sum.start(n); });  // equal ones would be one
    for (int64_t i = 0; i < rounds; ++i) {
        asm volatile("" ::"r"(w), "r"(x) : "memory");  // as if they were others each time
        unrolled<4>([&](auto quad) INFINI_INLINE {
            const Quad<> fields(w + 4 * kRows * quad);
            sums.each([&](auto& sum, int) INFINI_INLINE { sum.add(quad, quad, fields, Sixteen(x)); });
        });
    }
    // A copy: sums whose address is known would not stay in registers.
    Dots<kParts, kMostInShorts> seen[kSumsAtOnce];
    sums.each([&](auto& sum, int n) INFINI_INLINE { seen[n] = sum; });
    asm volatile("" ::"r"(seen) : "memory");
}
#endif

}  // namespace
}  // namespace infini::INFINI_LEVEL
