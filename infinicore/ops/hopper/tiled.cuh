// Several rows of bfloat16 times a weight in tiles, or of float8: how both are loaded, codes, and what becomes of
// sums. few.cu and many.cu multiply, each in its own way; tiled.py launches them.
//
// A program has TILES tiles of the weight and all rows of x. Some warps ask for the weight, another for x, step by
// step, as long as there is room; the weight need not wait for the kernel before this one. The others are TEAMS
// that have steps in turn, of which each warp has a tile.
//
// Where there are too few tiles for all processors, SPLITS programs of a cluster have a part of the columns each,
// and add up what they have.
//
// Given when this is compiled: TYPE (as in tiles.cuh), TILES, TEAMS, ROWS of x (the others are zero), GROUPS of 32
// columns in a step (4 or 8), SPLITS, STAGES (steps that there is room for), and what product.cuh wants.

constexpr int kEach = GATES ? TILES / 2 : TILES;  // tiles that make as many of results
constexpr int kOutputs = 32 * kEach;
// Those that load come first: a warp that comes later is let wait by those before it that have work.
constexpr int kLoaders = 3;  // warps that ask for the weight, as one alone is too slow; one more asks for x
// Of float8 one asks for boxes that are larger, and is fast enough: where x is put into another order (float8.cuh),
// the others do that.
constexpr bool kArranges = TYPE == FP8 && ROWS > 8;
constexpr int kAskers = kArranges ? 1 : kLoaders, kArrangers = kLoaders - kAskers;
constexpr int kFirst = kLoaders + 1, kWarps = TEAMS * TILES;
constexpr int kThreads = 32 * (kFirst + kWarps);
constexpr int kPitch = 32 * TILES + 4;  // of shared sums: lanes that store at once meet in no bank
static_assert(STAGES % TEAMS == 0);     // so that a team has seen all that was in a stage it waits for

// What a step has of a tile, part by part, and where: x, then codes by pieces of all tiles, then what stands beside
constexpr int kPiece = TYPE == FP8 ? 4096 : 2048, kCodes = kParts[0] / 8, kXBytes = GROUPS * 64 * ROWS;
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
    long_t full[STAGES], empty[STAGES], x_came[STAGES];  // the last one where x is put into another order
};

using Sums = float[TEAMS][ROWS][kPitch];

// What a program has to do: items, and in each of them steps
struct Work {
    int rank, begin, num_steps, first, apart;

    __device__ Work(const Weight& w) {
        const int all_steps = (w.num_groups + GROUPS - 1) / GROUPS;
        rank = blockIdx.x % SPLITS, begin = all_steps * rank / SPLITS;
        num_steps = all_steps * (rank + 1) / SPLITS - begin;
        first = blockIdx.x / SPLITS, apart = gridDim.x / SPLITS;
    }
};

__device__ void init(Shared& shared) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            init(shared.full[i], kArranges ? 1 + kArrangers : 2), init(shared.empty[i], TILES),
                init(shared.x_came[i], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

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
// tiles and eights of bytes, those of float8 rows and columns.
__device__ void load_weight(Shared& shared, const Maps& maps, int item, int begin, int step, long_t policy) {
    const int slot = free_slot(shared, step), tile = item * kEach;
    char* stage = shared.stages[slot];
    long_t& full = shared.full[slot];
    arrive_expecting(full, kStepBytes);
#pragma unroll
    for (int i = 0; i < kSizes[0]; i += kPiece)
        load_box(stage + kPlaces[0] + i * TILES, maps.parts[0], (begin * kCodes + i) / (TYPE == FP8 ? 32 : 8),
                 TYPE == FP8 ? tile * 32 : tile, 0, full, policy);
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
    long_t& came = kArranges ? shared.x_came[slot] : shared.full[slot];
    arrive_expecting(came, kXBytes);
    load_box(shared.stages[slot], map, 0, 0, begin / 2, came, read_by_all());
}

// All that the program multiplies, by its first warps
__device__ void load_all(Shared& shared, const TensorMap& x, const Maps& maps, const Work& work,
                         int num_items) {
    const int loader = threadIdx.x / 32;
    if (loader == kLoaders) wait_for_inputs();
    if (!is_first_lane()) return;
    const long_t policy = read_once();
    int step = 0;
    for (int item = work.first; item < num_items; item += work.apart)
        for (int i = 0; i < work.num_steps; i++, step++) {
            if (loader == kLoaders) load_x(shared, x, (work.begin + i) * GROUPS, step);
            if (step % STAGES % kAskers == loader)  // a stage is always the same warp's
                load_weight(shared, maps, item, (work.begin + i) * GROUPS, step, policy);
        }
    let_next_begin();
}

// ---- codes and scales ---------------------------------------------------------------------------------------

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
__device__ unsigned codes_of(unsigned word, unsigned other, int i, unsigned pair) {
    if (TYPE == Q8_0) {
        const unsigned own = i < 2 ? word : other;
        return difference(pair_of(own, i % 2 * 8, 0x007F007F, pair),
                          pair_of(own, i % 2 * 8, 0x00800080, pair));
    }
    return difference(pair_of(word, i * 4, 0x000F000F, pair), TYPE == Q4_0 ? 0x43084308 : 0x43004300);
}

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
        for (int i = 0; i < 4; i++) a[j][i] = codes_of(word[j], other[j], i, pair);
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

// ---- sums ---------------------------------------------------------------------------------------------------

__device__ int own_thread() { return threadIdx.x - 32 * kFirst; }
__device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory"); }

__device__ float2 sum_of_teams(const Sums& sums, int m, int n) {
    float2 sum = {0, 0};
#pragma unroll
    for (int team = 0; team < TEAMS; team++) {
        const float2 part = *(const float2*)&sums[team][m][n];
        sum = {sum.x + part.x, sum.y + part.y};
    }
    return sum;
}

// In the order of the columns
__device__ float2 sum_of_cluster(const Sums& sums, int m, int n) {
    float2 sum = {0, 0};
#pragma unroll
    for (int rank = 0; rank < SPLITS; rank++) {
        float2 part;
        asm volatile(
            "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %2, %3;\n"
            "ld.shared::cluster.v2.f32 {%0, %1}, [there];\n}"
            : "=f"(part.x), "=f"(part.y)
            : "r"(address(&sums[0][m][n])), "r"(rank));
        sum = {sum.x + part.x, sum.y + part.y};
    }
    return sum;
}

__device__ float2 sum_of(const Sums& sums, int m, int n) {
    return SPLITS == 1 ? sum_of_teams(sums, m, n) : sum_of_cluster(sums, m, n);
}

__device__ void gather_teams(Sums& sums, int num_rows) {
    for (int i = own_thread(); i < num_rows * 16 * TILES; i += 32 * kWarps) {
        const int m = i / (16 * TILES), n = i % (16 * TILES) * 2;
        *(float2*)&sums[0][m][n] = sum_of_teams(sums, m, n);
    }
}

// Programs of a cluster finish some pairs of results each.
__device__ void finish(const Sums& sums, const Problem& p, int first, int rank) {
    const int num_pairs = p.num_rows * (kOutputs / 2), end = num_pairs * (rank + 1) / SPLITS;
    for (int i = num_pairs * rank / SPLITS + own_thread(); i < end; i += 32 * kWarps) {
        const int m = i / (kOutputs / 2), n = i % (kOutputs / 2) * 2;
        if (!is_there(p, m, first + n)) continue;
        const float2 own = sum_of(sums, m, n), ups = GATES ? sum_of(sums, m, kOutputs + n) : own;
        *(unsigned*)(p.y + (long long)m * p.num_outputs + first + n) = finished(p, m, first + n, own, ups);
    }
}

// By all warps of a program that is one of a cluster, when its teams have shared their sums
__device__ void finish_cluster(Sums& sums, const Problem& p, const Work& work) {
    const bool multiplies = threadIdx.x >= 32 * kFirst;
    if (multiplies) gather_teams(sums, p.num_rows);
    __syncwarp();
    share_with_cluster();
    if (multiplies) finish(sums, p, work.first * kOutputs, work.rank);
    wait_for_cluster();  // others may still read this program's memory
}
