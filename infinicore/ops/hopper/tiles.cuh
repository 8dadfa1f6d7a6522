// Weights in tiles (infinicore/tiles.py): where what they are made of lies, and their scales.
//
// Given when this is compiled: TYPE (ggml's number, or that of float8, which lies in rows).

enum { FP8 = -1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12 };

// What a tile has for 8 groups, in bytes, part by part (PARTS in tiles.py)
constexpr int kMinimums = TYPE == Q4_K ? 256 : TYPE == Q4_1 ? 512 : 0, kOfBlocks = TYPE == Q4_K ? 64 : 0;
constexpr int kScales = TYPE == FP8 ? 0 : TYPE == Q4_K ? 256 : 512;
__device__ constexpr int kParts[] = {TYPE == Q8_0 || TYPE == FP8 ? 8192 : 4096, kScales, kMinimums, kOfBlocks,
                                     kOfBlocks};

__device__ float half_to_float(unsigned bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)bits));
    return wide;
}

// Four float16, those of rows g, g + 8, g + 16 and g + 24
__device__ void four_halves(float (&f)[4], const char* at) {
    const uint2 both = *(const uint2*)at;
    f[0] = half_to_float(both.x & 0xFFFF), f[1] = half_to_float(both.x >> 16);
    f[2] = half_to_float(both.y & 0xFFFF), f[3] = half_to_float(both.y >> 16);
}

// Times four bytes
__device__ void times_bytes(float (&f)[4], const char* at) {
    const unsigned word = *(const unsigned*)at;
#pragma unroll
    for (int j = 0; j < 4; j++) f[j] *= (float)(word >> 8 * j & 0xFF);
}
