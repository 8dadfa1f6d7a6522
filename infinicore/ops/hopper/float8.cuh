// Weights of float8 (e4m3), whose rows lie one after the other: as bfloat16 in the registers from which the tensor
// cores take them, which asks for another order of columns, of x, too.
//
// Of 32 columns a thread 4 g + t has 8 t to 8 t + 7 of each of its rows, which are two words. It gives the first word
// to the first product and the other to the next: bytes 0 and 2 where it has columns 2 t and 2 t + 1 of 16, bytes 1
// and 3 where it has 2 t + 8 and 2 t + 9.

// Of 8 rows of the weight that g has, so that lanes which load at once meet in no bank
__device__ int row_of(int g) { return TYPE == FP8 ? g % 4 * 2 + g / 4 : g; }

// ---- the weight ---------------------------------------------------------------------------------------------

// Two float8 as bfloat16, exactly: moved bits of exponents and fractions are numbers smaller by 2^120.
__device__ unsigned widened_pair(unsigned bits, unsigned signs) {
    constexpr unsigned kBits = 0x07F007F0, kPower = 0x7B807B80;
    unsigned both;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(bits & kBits | signs & ~kBits), "r"(kPower));
    return both;
}

// A thread's values of its four rows in a group, as load_codes has codes
__device__ void load_float8(unsigned (&a)[4][4], const char* stage, int tile, int group, int lane) {
    const int g = row_of(lane / 4), t = lane % 4;
    const char* rows = stage + kXBytes + (group / 4 * TILES + tile) * kPiece;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int piece = (group % 4 * 2 + t / 2) ^ g;
        const uint2 words = *(const uint2*)(rows + (8 * j + g) * 128 + piece * 16 + t % 2 * 8);
        const unsigned word[2] = {words.x, words.y};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned signs = word[i] & 0x80808080;
            a[j][2 * i] = widened_pair(word[i] << 4, signs << 8);
            a[j][2 * i + 1] = widened_pair(word[i] >> 4, signs);
        }
    }
}

// What sums of a thread's four rows are worth. They are asked for before anything is multiplied: memory is slow.
__device__ void load_scales(float (&scale)[4], const Problem& p, int item, int tile, int lane) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int n = item * kOutputs + tile % kEach * 32 + 8 * j + row_of(lane / 4);
        const bool is_scaled = TYPE == FP8 && n < p.num_outputs;
        scale[j] = is_scaled ? p.scales[tile / kEach * p.num_outputs + n] : 1;
    }
}

// ---- x ------------------------------------------------------------------------------------------------------

// Columns 4 i and 4 i + 2 of eight, or those behind them
__device__ unsigned every_other(const uint4& eight, int i, int behind) {
    return __byte_perm(i ? eight.z : eight.x, i ? eight.w : eight.y, behind ? 0x7632 : 0x5410);
}

// Of 8 rows of x that g has, so that lanes which load at once meet in no bank
__device__ int column_of(int g) { return TYPE == FP8 ? g / 2 + g % 2 * 4 : g; }

// A group's columns of x for a weight of float8, as b of two products
__device__ void load_arranged(unsigned (&b)[4], const char* stage, int group, int lane) {
    const int row = column_of(lane / 4), piece = (group % 2 * 4 + lane % 4) ^ row;
    const uint4 eight = *(const uint4*)(stage + (group / 2 * ROWS + row) * 128 + piece * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = every_other(eight, i / 2, i % 2);
}

// A group's columns of a row, by 16 bytes
struct Pieces {
    uint4* row;
    int first, swizzle;

    __device__ Pieces(char* stage, int index) {
        const int group = index / ROWS;
        row = (uint4*)(stage + (group / 2 * ROWS + index % ROWS) * 128);
        first = group % 2 * 4, swizzle = index % 8;
    }
    __device__ uint4& operator[](int i) const { return row[(first + i) ^ swizzle]; }
};

// A step's x, put into that order where it is. A thread loads all it has to before it stores the first.
__device__ void arrange(char* stage, int thread) {
    constexpr int kAll = ROWS * GROUPS, kApart = kArranges ? 32 * kArrangers : kAll, kUnits = kAll / kApart;
    uint4 from[kUnits][4];
#pragma unroll
    for (int unit = 0; unit < kUnits; unit++)
#pragma unroll
        for (int t = 0; t < 4; t++) from[unit][t] = Pieces(stage, unit * kApart + thread)[t];
#pragma unroll
    for (int unit = 0; unit < kUnits; unit++) {
        const uint4(&four)[4] = from[unit];
#pragma unroll
        for (int i = 0; i < 4; i++)
            Pieces(stage, unit * kApart + thread)[i] = {
                every_other(four[0], i / 2, i % 2), every_other(four[1], i / 2, i % 2),
                every_other(four[2], i / 2, i % 2), every_other(four[3], i / 2, i % 2)};
    }
}

__device__ bool is_arranger() {
    return kArranges && threadIdx.x >= 32 * kAskers && threadIdx.x < 32 * kLoaders;
}

// All x of a program, step by step as it comes, for tensor cores that take it from shared memory
template <typename Shared>
__device__ void arrange_all(Shared& shared, int num_steps) {
    for (int step = 0; step < num_steps; step++) {
        const int slot = step % STAGES;
        wait(shared.x_came[slot], step / STAGES & 1);
        arrange(shared.stages[slot], threadIdx.x - 32 * kAskers);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (is_first_lane()) arrive(shared.full[slot]);
    }
}
