// y = x @ weight.T + bias + residual, or silu(gate) * up, for 2 to 8 rows of bfloat16 and a weight in tiles
// (infinicore/tiles.py). few.py launches it.
//
// A program has TILES tiles of the weight and all rows of x. One warp asks for the weight, another for x, step by
// step, as long as there is room; the weight need not wait for the kernel before this one. The others are TEAMS
// that have steps in turn, of which each warp has a tile. Its codes become bfloat16, which they are exactly, in
// the registers from which the tensor cores take them, and the sums of a group of 32 columns are scaled.
//
// Where there are too few tiles for all processors, SPLITS programs of a cluster have a part of the columns each,
// and add up what they have.
//
// Given when this is compiled: TYPE (ggml's number), TILES, TEAMS, GROUPS of 32 columns in a step (at most 8),
// SPLITS, STAGES (steps that there is room for), GATES, HAS_BIAS, ADDS (a residual).

constexpr int kEach = GATES ? TILES / 2 : TILES;  // tiles that make as many of results
constexpr int kOutputs = 32 * kEach;
constexpr int kRows = 8;  // of x, as many as the tensor cores take at once
// Those that load come first: a warp that comes later is let wait by those before it that have work.
constexpr int kLoaders = 3;  // warps that ask for the weight, as one alone is too slow; one more asks for x
constexpr int kFirst = kLoaders + 1, kWarps = TEAMS * TILES;
constexpr int kThreads = 32 * (kFirst + kWarps);
constexpr int kPitch = 32 * TILES + 4;  // of shared sums: lanes that store at once meet in no bank
static_assert(STAGES % TEAMS == 0);     // so that a team has seen all that was in a stage it waits for

// What a step has of a tile, part by part, and where: x, then codes by pieces of all tiles, then what stands beside
constexpr int kPiece = 2048, kCodes = kParts[0] / 8, kXBytes = GROUPS * 64 * kRows;
__device__ constexpr int size_of(int part) { return part < 3 ? kParts[part] * GROUPS / 8 : kParts[part]; }
__device__ constexpr int place_of(int part) {
    return part == 0 ? kXBytes : (place_of(part - 1) + size_of(part - 1) * TILES + 127) / 128 * 128;
}
__device__ constexpr int kSizes[] = {size_of(0), size_of(1), size_of(2), size_of(3), size_of(4)};
__device__ constexpr int kPlaces[] = {place_of(0), place_of(1), place_of(2), place_of(3), place_of(4)};
constexpr int kStageBytes = (place_of(5) + 1023) / 1024 * 1024;
constexpr int kStepBytes = TILES * (size_of(0) + size_of(1) + size_of(2) + size_of(3) + size_of(4));

struct Weight {
    int num_groups, num_items;
    unsigned pair;  // of 128 in bfloat16: no constant, since one instruction takes one, and that is a mask
};

struct Maps { TensorMap parts[5]; };

struct Shared {
    char stages[STAGES][kStageBytes];
    float parts[TEAMS][kRows][kPitch];
    long_t full[STAGES], empty[STAGES];
};

// ---- loading ------------------------------------------------------------------------------------------------

// A box whose first is at i, j, k
__device__ void load_box(char* to, const TensorMap& map, int i, int j, int k, long_t& barrier,
                         long_t policy) {
    const unsigned target = address(to), at = address(&barrier);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;"
        :
        : "r"(target), "l"(&map), "r"(i), "r"(j), "r"(k), "r"(at), "l"(policy)
        : "memory");
}

// Of all tiles at once, a box each: to ask for each tile by itself takes longer than it takes to come. Maps count
// eights of bytes.
__device__ void load_weight(Shared& shared, const Maps& maps, int item, int begin, int step, long_t policy) {
    const int slot = free_slot(shared, step), tile = item * kEach;
    char* stage = shared.stages[slot];
    long_t& full = shared.full[slot];
    arrive_expecting(full, kStepBytes);
#pragma unroll
    for (int i = 0; i < kSizes[0]; i += kPiece)
        load_box(stage + kPlaces[0] + i * TILES, maps.parts[0], (begin * kCodes + i) / 8, tile, 0, full,
                 policy);
#pragma unroll
    for (int part = 1; part < 5; part++) {
        if (kParts[part] == 0) continue;
        const int first = part < 3 ? begin * (kParts[part] / 8) : begin / 8 * kParts[part];
        load_box(stage + kPlaces[part], maps.parts[part], first / 8, tile, 0, full, policy);
    }
}

// Pieces of 64 columns of all rows; those beyond x are zero.
__device__ void load_x(Shared& shared, const TensorMap& map, int begin, int step) {
    const int slot = free_slot(shared, step);
    arrive_expecting(shared.full[slot], kXBytes);
    load_box(shared.stages[slot], map, 0, 0, begin / 2, shared.full[slot], read_by_all());
}

// ---- multiplying --------------------------------------------------------------------------------------------

// Two codes as the last bits of two bfloat16
__device__ unsigned pair_of(unsigned word, int shift, unsigned mask, unsigned pair) {
    return (word >> shift & mask) | pair;
}

__device__ unsigned difference(unsigned a, unsigned b) {
    unsigned both;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

// Codes 2 i and 2 i + 1 of a row's words. The sign of a byte is the last bit of the exponent of what is taken off.
__device__ unsigned values_of(unsigned word, unsigned other, int i, unsigned pair) {
    if (TYPE == Q8_0) {
        const unsigned own = i < 2 ? word : other;
        return difference(pair_of(own, i % 2 * 8, 0x007F007F, pair),
                          pair_of(own, i % 2 * 8, 0x00800080, pair));
    }
    return difference(pair_of(word, i * 4, 0x000F000F, pair), TYPE == Q4_0 ? 0x43084308 : 0x43004300);
}

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
    const int row = lane % 8, piece = group % 2 * 4 + lane / 8;
    const char* at = stage + (group / 2 * kRows + row) * 128 + (piece ^ row) * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address(at)));
}

// Scales of a thread's four rows in a group, and minimums where there are any
__device__ void load_sides(float (&scale)[4], float (&minimum)[4], const char* stage, int tile, int group,
                           int lane) {
    const int index = group * 8 + lane / 4;
    const char *scales = stage + kPlaces[1] + tile * kSizes[1],
               *minimums = stage + kPlaces[2] + tile * kSizes[2];
    if (TYPE == Q4_K) {
        const int of_block = tile * kOfBlocks + lane / 4 * 8;
        four_halves(scale, stage + kPlaces[3] + of_block),
            four_halves(minimum, stage + kPlaces[4] + of_block);
        times_bytes(scale, scales + index * 4), times_bytes(minimum, minimums + index * 4);
#pragma unroll
        for (int j = 0; j < 4; j++) minimum[j] = -minimum[j];
    } else {
        four_halves(scale, scales + index * 8);
        if (TYPE == Q4_1) four_halves(minimum, minimums + index * 8);
    }
}

struct Totals {
    float of[2][4] = {};  // rows g and g + 8, or g + 16 and g + 24, each with columns 2 t and 2 t + 1

    // Of a half, each times what it is worth in its row
    __device__ void add(int half, const float (&c)[4], const float (&scale)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) of[half][i] = fmaf(c[i], scale[2 * half + i / 2], of[half][i]);
    }
};

// A thread's codes of its four rows in a group, two to a word
__device__ void load_codes(unsigned (&a)[4][4], const char* stage, int tile, int group, unsigned pair,
                           int lane) {
    const char* codes = stage + kXBytes + (group * kCodes / kPiece * TILES + tile) * kPiece;
    const uint4* words = (const uint4*)(codes + group * kCodes % kPiece) + lane;
    const uint4 u = words[0], v = words[TYPE == Q8_0 ? 32 : 0];
    const unsigned word[4] = {u.x, u.y, u.z, u.w}, other[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[j][i] = values_of(word[j], other[j], i, pair);
}

__device__ void add_group(Totals& totals, const char* stage, int tile, int group, unsigned pair, int lane) {
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
        const unsigned (&near)[4] = a[2 * half], (&far)[4] = a[2 * half + 1];
        float c[4] = {};
        multiply(c, near[0], far[0], near[1], far[1], b[0], b[1]);
        multiply(c, near[2], far[2], near[3], far[3], b[2], b[3]);
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

// ---- sums ---------------------------------------------------------------------------------------------------

__device__ int own_thread() { return threadIdx.x - 32 * kFirst; }
__device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory"); }

__device__ void share(float (&part)[kRows][kPitch], const Totals& totals, int tile, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            part[lane % 4 * 2 + i % 2][tile * 32 + half * 16 + i / 2 * 8 + lane / 4] = totals.of[half][i];
}

__device__ float2 sum_of_teams(const Shared& shared, int m, int n) {
    float2 sum = {0, 0};
#pragma unroll
    for (int team = 0; team < TEAMS; team++) {
        const float2 part = *(const float2*)&shared.parts[team][m][n];
        sum = {sum.x + part.x, sum.y + part.y};
    }
    return sum;
}

// In the order of the columns
__device__ float2 sum_of_cluster(const Shared& shared, int m, int n) {
    float2 sum = {0, 0};
#pragma unroll
    for (int rank = 0; rank < SPLITS; rank++) {
        float2 part;
        asm volatile(
            "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %2, %3;\n"
            "ld.shared::cluster.v2.f32 {%0, %1}, [there];\n}"
            : "=f"(part.x), "=f"(part.y)
            : "r"(address(&shared.parts[0][m][n])), "r"(rank));
        sum = {sum.x + part.x, sum.y + part.y};
    }
    return sum;
}

__device__ float2 sum_of(const Shared& shared, int m, int n) {
    return SPLITS == 1 ? sum_of_teams(shared, m, n) : sum_of_cluster(shared, m, n);
}

// Programs of a cluster finish some pairs of results each.
__device__ void finish(const Shared& shared, const Problem& p, int first, int rank) {
    const int num_pairs = p.num_rows * (kOutputs / 2), end = num_pairs * (rank + 1) / SPLITS;
    for (int i = num_pairs * rank / SPLITS + own_thread(); i < end; i += 32 * kWarps) {
        const int m = i / (kOutputs / 2), n = i % (kOutputs / 2) * 2;
        if (!is_there(p, m, first + n)) continue;
        const float2 sums = sum_of(shared, m, n), ups = GATES ? sum_of(shared, m, kOutputs + n) : sums;
        *(unsigned*)(p.y + (long long)m * p.num_outputs + first + n) = finished(p, m, first + n, sums, ups);
    }
}

__device__ void gather_teams(Shared& shared, int num_rows) {
    for (int i = own_thread(); i < num_rows * 16 * TILES; i += 32 * kWarps) {
        const int m = i / (16 * TILES), n = i % (16 * TILES) * 2;
        *(float2*)&shared.parts[0][m][n] = sum_of_teams(shared, m, n);
    }
}

// ---- the kernel ---------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ TensorMap x, const __grid_constant__ Maps maps,
           const __grid_constant__ Problem p, const __grid_constant__ Weight w) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *(Shared*)memory;
    const int warp = (int)threadIdx.x / 32 - kFirst, lane = threadIdx.x % 32, rank = blockIdx.x % SPLITS;
    const int all_steps = (w.num_groups + GROUPS - 1) / GROUPS;
    const int begin = all_steps * rank / SPLITS, num_steps = all_steps * (rank + 1) / SPLITS - begin;
    const int own = blockIdx.x / SPLITS, apart = gridDim.x / SPLITS;  // this program's items

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init(shared.full[i], 2), init(shared.empty[i], TILES);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp < -1) {
        if (lane == 0) {
            const long_t policy = read_once();
            int step = 0;
            for (int item = own; item < w.num_items; item += apart)
                for (int i = 0; i < num_steps; i++, step++)
                    if (step % STAGES % kLoaders == warp + kFirst)  // a stage is always the same warp's
                        load_weight(shared, maps, item, (begin + i) * GROUPS, step, policy);
            let_next_begin();
        }
    } else if (warp == -1) {
        wait_for_inputs();
        if (lane == 0)
            for (int item = own, step = 0; item < w.num_items; item += apart)
                for (int i = 0; i < num_steps; i++) load_x(shared, x, (begin + i) * GROUPS, step++);
    } else {
        const int team = warp / TILES, tile = warp % TILES;
        int step = team;
        for (int item = own, before = 0; item < w.num_items; item += apart, before += num_steps) {
            Totals totals;
            for (; step < before + num_steps; step += TEAMS) {
                const int slot = step % STAGES;
                wait(shared.full[slot], step / STAGES & 1);
                add_step(totals, shared.stages[slot], tile, w.num_groups - (begin + step - before) * GROUPS,
                         w.pair, lane);
                __syncwarp();
                if (lane == 0) arrive(shared.empty[slot]);
            }
            if (before) meet();  // others may still read the sums of the item before
            share(shared.parts[team], totals, tile, lane);
            meet();
            wait_for_inputs();
            if (SPLITS == 1) finish(shared, p, item * kOutputs, 0);
        }
        if (SPLITS > 1) gather_teams(shared, p.num_rows);
    }
    if (SPLITS > 1) {
        __syncwarp();
        share_with_cluster();
        if (warp >= 0) finish(shared, p, own * kOutputs, rank);
        wait_for_cluster();  // others may still read this program's memory
    }
}
