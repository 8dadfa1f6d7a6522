// y = x @ weight.T + bias + residual, or silu(gate) * up, for 2 to 8 rows of bfloat16 and a weight in tiles or of
// float8: see tiled.cuh. Codes become bfloat16, which they are exactly, in the registers from which the tensor cores
// take them, and the sums of a group of 32 columns are scaled.

// c + a b of the tensor cores, 16 x 16 times 16 x 8: of a rows g and g + 8 and columns 2 t and 2 t + 8, of b
// column g and the same twos; of c those rows and columns 2 t, 2 t + 1
__device__ void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                         unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A group's columns of x, as b of two products
__device__ void load_columns(unsigned (&b)[4], const char* stage, int group, int lane) {
    if (TYPE == FP8) return load_arranged(b, stage, group, lane);
    const int row = lane % 8, piece = group % 2 * 4 + lane / 8;
    const char* at = stage + (group / 2 * ROWS + row) * 128 + (piece ^ row) * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address(at)));
}

// Half of the rows of a group's codes times its columns of x
__device__ void multiply_half(float (&c)[4], const unsigned (&a)[4][4], int half, const unsigned (&b)[4]) {
    const unsigned (&near)[4] = a[2 * half], (&far)[4] = a[2 * half + 1];
    multiply(c, near[0], far[0], near[1], far[1], b[0], b[1]);
    multiply(c, near[2], far[2], near[3], far[3], b[2], b[3]);
}

struct Totals {
    float of[2][4] = {};  // rows g and g + 8, or g + 16 and g + 24, each with columns 2 t and 2 t + 1

    // Of a half, each times what it is worth in its row
    __device__ void add(int half, const float (&c)[4], const float (&scale)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) of[half][i] = fmaf(c[i], scale[2 * half + i / 2], of[half][i]);
    }
};

// Of float8, which has no scales of groups
__device__ void add_float8(Totals& totals, const char* stage, int tile, int group, int lane) {
    unsigned a[4][4], b[4];
    load_float8(a, stage, tile, group, lane);
    load_columns(b, stage, group, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) multiply_half(totals.of[half], a, half, b);
}

__device__ void add_group(Totals& totals, const char* stage, int tile, int group, unsigned pair, int lane) {
    if (TYPE == FP8) return add_float8(totals, stage, tile, group, lane);
    constexpr unsigned kOnes = 0x3F803F80;
    unsigned a[4][4], b[4];
    float scale[4], minimum[4], sums[4] = {};
    load_codes(a, stage, tile, group, pair, lane);
    load_sides(scale, minimum, stage, tile, group, lane);
    load_columns(b, stage, group, lane);
    if (kMinimums) {
        multiply(sums, kOnes, kOnes, kOnes, kOnes, b[0], b[1]);
        multiply(sums, kOnes, kOnes, kOnes, kOnes, b[2], b[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float c[4] = {};
        multiply_half(c, a, half, b);
        totals.add(half, c, scale);
        if (kMinimums) totals.add(half, sums, minimum);
    }
}

__device__ void add_step(Totals& totals, const char* stage, int tile, int count, unsigned pair, int lane) {
    if (count >= GROUPS) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) add_group(totals, stage, tile, group, pair, lane);
    } else {
        for (int group = 0; group < count; group++) add_group(totals, stage, tile, group, pair, lane);
    }
}

__device__ void share(float (&part)[ROWS][kPitch], const Totals& totals, const float (&scale)[4], int tile,
                      int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            part[column_of(lane % 4 * 2 + i % 2)][tile * 32 + half * 16 + i / 2 * 8 + row_of(lane / 4)] =
                totals.of[half][i] * scale[2 * half + i / 2];
}

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ TensorMap x, const __grid_constant__ Maps maps,
           const __grid_constant__ Problem p, const __grid_constant__ Weight w) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *(Shared*)memory;
    Sums& sums = *(Sums*)(memory + sizeof(Shared));
    const Work work(w);
    init(shared);
    if (own_thread() < 0) {
        load_all(shared, x, maps, work, w.num_items);
    } else {
        const int warp = own_thread() / 32, lane = own_thread() % 32, team = warp / TILES,
                  tile = warp % TILES;
        int step = team;
        for (int item = work.first, before = 0; item < w.num_items;
             item += work.apart, before += work.num_steps) {
            Totals totals;
            float scale[4];
            load_scales(scale, p, item, tile, lane);
            for (; step < before + work.num_steps; step += TEAMS) {
                const int slot = step % STAGES;
                wait(shared.full[slot], step / STAGES & 1);
                add_step(totals, shared.stages[slot], tile,
                         w.num_groups - (work.begin + step - before) * GROUPS, w.pair, lane);
                __syncwarp();
                if (lane == 0) arrive(shared.empty[slot]);
            }
            if (before) meet();  // others may still read the sums of the item before
            share(sums[team], totals, scale, tile, lane);
            meet();
            wait_for_inputs();
            if (SPLITS == 1) finish(sums, p, item * kOutputs, 0);
        }
    }
    if (SPLITS > 1) finish_cluster(sums, p, work);
}
