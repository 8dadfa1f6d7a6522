// y = x @ weight.T + bias + residual, or silu(gate) * up, for up to 128 rows of 16 bits. rows.py launches it.
// Where rows have scales, 16 bits are two columns of float8.
//
// A program has TILE rows of the weight and all rows of x. One warp asks for the weight, another for x, step by
// step, as long as there is room; groups of four warps multiply, each 64 rows of x. The weight need not wait
// for the kernel before this one, so memory is busy while that one ends. Where there are too few tiles for all
// processors, SPLITS programs of a cluster have a part of the columns each, and add up what they have.
//
// Given when this is compiled: TILE, SPLITS, GROUPS, STAGES (steps that there is room for), SCALES, GATES, HAS_BIAS,
// ADDS (a residual), IS_BFLOAT16, and multiply(sums, x, weight, adds): 64 rows and 16 columns of x times those
// of the weight.

constexpr int kRows = 64 * GROUPS;
constexpr int kStep = 64;  // columns: 128 bytes, which is as far as memory is swizzled
constexpr int kOutputs = GATES ? TILE / 2 : TILE;
constexpr int kSums = TILE / 2;       // of a thread
constexpr int kLoaders = 4 * GROUPS;  // the first of two warps that load
constexpr int kThreads = 128 * GROUPS + 64;
constexpr int kWeightBytes = TILE * kStep * 2, kStageBytes = kWeightBytes + kRows * kStep * 2;
constexpr int kPitch = (TILE + 31) / 32 * 32 + 8;  // of shared sums: lanes that store at once meet in no bank
static_assert(SPLITS == 1 || kRows * kPitch * 4 <= STAGES * kStageBytes);

struct Shared {
    char stages[STAGES][kStageBytes];
    long_t full[STAGES], empty[STAGES];
};

// ---- loading ------------------------------------------------------------------------------------------------

// What a gate lets through lies `gap` rows behind it.
__device__ void load_weight(Shared& shared, const TensorMap& map, int step, int column, int row, int gap) {
    const int slot = free_slot(shared, step);
    char* to = shared.stages[slot];
    arrive_expecting(shared.full[slot], kWeightBytes);
    load(to, map, column, row, shared.full[slot], read_once());
    if (GATES) load(to + kWeightBytes / 2, map, column, row + gap, shared.full[slot], read_once());
}

// Rows beyond those of x stay what they are: nobody reads their sums.
__device__ void load_x(Shared& shared, const TensorMap& map, int step, int column, int num_rows) {
    const int slot = free_slot(shared, step);
    arrive_expecting(shared.full[slot], num_rows * kStep * 2);
    load(shared.stages[slot] + kWeightBytes, map, column, 0, shared.full[slot], read_by_all());
}

// ---- multiplying --------------------------------------------------------------------------------------------

// While the columns of one step are multiplied, those of the step before make room.
__device__ void multiply_steps(float (&sums)[kSums], Shared& shared, int first, int num_steps) {
    const int group = threadIdx.x / 128;
    for (int i = 0; i < num_steps; i++) {
        const int step = first + i, slot = step % STAGES;
        wait(shared.full[slot], step / STAGES & 1);
        const long_t weight = operand(shared.stages[slot]);
        const long_t x = operand(shared.stages[slot] + kWeightBytes + group * 64 * kStep * 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < kStep / 16; k++) multiply(sums, x + 2 * k, weight + 2 * k, i + k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_for_products<1>();
        if (i > 0 && is_first_lane()) arrive(shared.empty[(step - 1) % STAGES]);
    }
    wait_for_products<0>();
    if (is_first_lane()) arrive(shared.empty[(first + num_steps - 1) % STAGES]);
}

// ---- what comes after a product -----------------------------------------------------------------------------

__device__ void store(const Problem& p, int m, int n, uint2 four) {
    if (is_there(p, m, n)) *(uint2*)(p.y + (long long)m * p.num_outputs + n) = four;
}

// ---- a program's own sums -----------------------------------------------------------------------------------

// Of a thread's sums those at 4 i + 2 j are of row 8 j and columns 8 i and 8 i + 1, counted from these.
__device__ int own_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }
__device__ int own_column() { return threadIdx.x % 4 * 2; }
__device__ float2 pair_of(const float (&sums)[kSums], int i, int j) {
    return {sums[4 * i + 2 * j], sums[4 * i + 2 * j + 1]};
}

// Lanes that stand side by side give each other two of four values, so that 32 bytes are written as a whole.
__device__ void store_sums(const Problem& p, int first, const float (&sums)[kSums]) {
    const int is_odd = threadIdx.x % 2, column = first + threadIdx.x % 4 / 2 * 4 + is_odd * 8;
    constexpr int kUp = GATES ? TILE / 16 : 0;
#pragma unroll
    for (int i = 0; i < kOutputs / 8; i += 2)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int m = own_row() + 8 * j, n = first + own_column() + 8 * i;
            const unsigned left = finished(p, m, n, pair_of(sums, i, j), pair_of(sums, kUp + i, j));
            const unsigned right =
                finished(p, m, n + 8, pair_of(sums, i + 1, j), pair_of(sums, kUp + i + 1, j));
            const unsigned other = __shfl_xor_sync(~0u, is_odd ? left : right, 1);
            store(p, m, column + 8 * i, is_odd ? uint2{other, right} : uint2{left, other});
        }
}

// ---- sums of a cluster --------------------------------------------------------------------------------------

__device__ void share_sums(float* shared, const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < TILE / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            *(float2*)(shared + (own_row() + 8 * j) * kPitch + own_column() + 8 * i) = pair_of(sums, i, j);
}

// Volatile keeps it behind the barrier. It names no memory, so that several can be on their way. What is not
// stored is not read: nobody would wait for it, and the program it is read from might have ended.
__device__ float4 shared_four(const float* own, int rank, bool is_stored) {
    float4 four = {0, 0, 0, 0};
    asm volatile(
        "{\n.reg .u32 there;\n.reg .pred stored;\nsetp.ne.b32 stored, %6, 0;\n"
        "mapa.shared::cluster.u32 there, %4, %5;\n"
        "@stored ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
        : "+f"(four.x), "+f"(four.y), "+f"(four.z), "+f"(four.w)
        : "r"(address(own)), "r"(rank), "r"((int)is_stored));
    return four;
}

// Programs of a cluster finish some rows each, whose parts they add in the order of the columns. A thread reads
// all it has to before it stores the first.
__device__ void store_shared(const Problem& p, int first, int rank, const float* shared) {
    constexpr int kFours = kRows / SPLITS * TILE / 4, kRounds = (kFours + kThreads - 1) / kThreads;
    int m[kRounds], n[kRounds];
    float4 parts[kRounds][SPLITS];
    uint2 values[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
        const int i = min(round * kThreads + (int)threadIdx.x, kFours - 1);
        m[round] = rank * (kRows / SPLITS) + i / (TILE / 4), n[round] = i % (TILE / 4) * 4;
        const bool is_stored = is_there(p, m[round], first + n[round]);
#pragma unroll
        for (int other = 0; other < SPLITS; other++)
            parts[round][other] = shared_four(shared + m[round] * kPitch + n[round], other, is_stored);
    }
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
        float2 left = {0, 0}, right = {0, 0};
#pragma unroll
        for (int other = 0; other < SPLITS; other++) {
            const float4 part = parts[round][other];
            left = {left.x + part.x, left.y + part.y}, right = {right.x + part.z, right.y + part.w};
        }
        values[round].x = finished(p, m[round], first + n[round], left, left);
        values[round].y = finished(p, m[round], first + n[round] + 2, right, right);
    }
#pragma unroll
    for (int round = 0; round < kRounds; round++) store(p, m[round], first + n[round], values[round]);
}

// ---- the kernel ---------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const Problem p) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *(Shared*)memory;
    const int warp = threadIdx.x / 32, rank = blockIdx.x % SPLITS;
    const int num_tiles = (p.num_outputs + kOutputs - 1) / kOutputs;
    const int all_steps = (p.num_columns + kStep - 1) / kStep;
    const int begin = all_steps * rank / SPLITS, num_steps = all_steps * (rank + 1) / SPLITS - begin;
    const int own = blockIdx.x / SPLITS, apart = gridDim.x / SPLITS;  // this program's tiles

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init(shared.full[i], 2), init(shared.empty[i], 4 * GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == kLoaders) {
        if (is_first_lane()) {
            for (int tile = own, step = 0; tile < num_tiles; tile += apart)
                for (int i = 0; i < num_steps; i++)
                    load_weight(shared, weight, step++, (begin + i) * kStep, tile * kOutputs, p.num_outputs);
            let_next_begin();
        }
    } else if (warp == kLoaders + 1) {
        wait_for_inputs();
        if (is_first_lane())
            for (int tile = own, step = 0; tile < num_tiles; tile += apart)
                for (int i = 0; i < num_steps; i++)
                    load_x(shared, x, step++, (begin + i) * kStep, p.num_rows);
    } else {
        float sums[kSums];
        for (int tile = own, step = 0; tile < num_tiles; tile += apart, step += num_steps) {
            multiply_steps(sums, shared, step, num_steps);
            wait_for_inputs();
            if (SPLITS == 1) store_sums(p, tile * kOutputs, sums);
        }
        if (SPLITS > 1) {
            asm volatile("bar.sync 1, %0;" ::"n"(128 * GROUPS) : "memory");  // all have multiplied
            share_sums((float*)memory, sums);
        }
    }
    if (SPLITS > 1) {
        __syncwarp();
        share_with_cluster();
        wait_for_inputs();
        store_shared(p, own * kOutputs, rank, (float*)memory);
        wait_for_cluster();  // others may still read this program's memory
    }
}
