// y = x @ weight.T + bias + residual, or silu(gate) * up, for 9 to 128 rows of bfloat16 and a weight in tiles, or
// 9 to 64 and float8: see tiled.cuh. Teams are groups of four warps, each of which has a tile. Its codes become
// bfloat16, scaled, in the registers from which the tensor cores take them, while those made before are multiplied.
//
// Given when this is compiled as well: multiply(sums, a, x, adds), 64 rows and 16 columns of the weight times those
// of x. A program has one item.

constexpr bool kMore = ROWS > 64;  // sums take more registers than there are for all threads
static_assert(sizeof(Sums) <= STAGES * kStageBytes);

// Half of a tile's rows each: of rows g and g + 8 the first 16 columns of a group, then the last
struct Values { unsigned of[2][2][4]; };

__device__ unsigned twice(float x) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(both) : "f"(x));
    return both;
}

__device__ unsigned scaled(unsigned codes, unsigned scale, unsigned minimum) {
    unsigned both;
    if (kMinimums)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(codes), "r"(scale), "r"(minimum));
    else
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(codes), "r"(scale));
    return both;
}

__device__ void load_values(Values& a, const char* stage, int tile, int group, unsigned pair, int lane) {
    unsigned codes[4][4];
    float scale[4], minimum[4] = {};
    if (TYPE == FP8) {
        load_float8(codes, stage, tile, group, lane);
    } else {
        load_codes(codes, stage, tile, group, pair, lane);
        load_sides(scale, minimum, stage, tile, group, lane);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const unsigned scales = twice(scale[j]), minimums = twice(minimum[j]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            a.of[j / 2][i / 2][i % 2 * 2 + j % 2] =
                TYPE == FP8 ? codes[j][i] : scaled(codes[j][i], scales, minimums);
    }
}

__device__ void multiply_group(float (&sums)[2][ROWS / 2], const Values& a, long_t x, int adds) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) multiply(sums[half], a.of[half][i], x + 2 * i, adds + i);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// While a group is multiplied the values of the next are made.
__device__ void multiply_steps(float (&sums)[2][ROWS / 2], Shared& shared, int team, int num_steps, int tile,
                               unsigned pair, int lane) {
    Values a[2];
    for (int step = team; step < num_steps; step += TEAMS) {
        const int slot = step % STAGES;
        const char* stage = shared.stages[slot];
        wait(shared.full[slot], step / STAGES & 1);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            load_values(a[group % 2], stage, tile, group, pair, lane);
            const long_t x = operand(stage + group / 2 * ROWS * 128) + group % 2 * 4;
            multiply_group(sums, a[group % 2], x, step - team + group);
            wait_for_products<1>();
            if (group == 0 && step > team && lane == 0) arrive(shared.empty[(step - TEAMS) % STAGES]);
        }
    }
    wait_for_products<0>();
}

__device__ void share(float (&part)[ROWS][kPitch], const float (&sums)[2][ROWS / 2], const float (&scale)[4],
                      bool has_sums, int tile, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++)
            part[i / 4 * 8 + lane % 4 * 2 + i % 2][tile * 32 + half * 16 + i % 4 / 2 * 8 + row_of(lane / 4)] =
                has_sums ? sums[half][i] * scale[2 * half + i % 4 / 2] : 0;
}

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ TensorMap x, const __grid_constant__ Maps maps,
           const __grid_constant__ Problem p, const __grid_constant__ Weight w) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *(Shared*)memory;
    Sums& shared_sums = *(Sums*)memory;  // where steps were
    const Work work(w);
    init(shared);
    if (own_thread() < 0) {
        if (kMore) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (is_arranger())
            arrange_all(shared, work.num_steps);
        else
            load_all(shared, x, maps, work, w.num_items);
    } else {
        if (kMore) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int warp = own_thread() / 32, lane = own_thread() % 32, team = warp / TILES,
                  tile = warp % TILES;
        float sums[2][ROWS / 2];  // if they began with 0, the compiler would let products wait for each other
        float scale[4];
        load_scales(scale, p, work.first, tile, lane);
        multiply_steps(sums, shared, team, work.num_steps, tile, w.pair, lane);
        meet();  // all have multiplied
        share(shared_sums[team], sums, scale, team < work.num_steps, tile, lane);
        meet();
        wait_for_inputs();
        if (SPLITS == 1) finish(shared_sums, p, work.first * kOutputs, 0);
    }
    if (SPLITS > 1) finish_cluster(shared_sums, p, work);
}
