// One row of bfloat16 times a weight in tiles (infinicore/tiles.py), with the norm before it, and the residual,
// the gate or the rotation of heads after it. one.py launches it.
//
// A program has some tiles, one after the other. One warp asks for them, step by step, as long as there is room;
// the weight need not wait for the kernel before this one. The others make bytes of x once, and are TEAMS that
// have steps in turn, of which each warp has a part.
//
// Codes go through the tensor cores as bytes. x becomes integers of two bytes, 32 values at a time. The tensor
// cores take 8 columns: those are the two bytes of 4 groups, of which each has x there and zeros elsewhere. So
// what comes out is a sum of each group, to be scaled in one operation.
//
// A byte with two nibbles is multiplied as it is, and once more with its high nibble cleared: l a + 16 h b is
// l (a - b) + (l + 16 h) b. So values that meet low nibbles have 15 bits of the largest of their group, and those
// that meet high ones 11: all of a bfloat16 that is not less than an eighth of it.
//
// Given when this is compiled: TYPE (ggml's number), TEAMS, WARPS of each, STAGES (steps that there is room for),
// AHEAD (those that may be on their way at once), NORMS, GATES, ROTATES, HAS_BIAS, ADDS (a residual).

constexpr int kTiles = GATES || ROTATES ? 2 : 1;  // of an item: gate and up, or both halves of heads
constexpr int kEach = 2;                          // fours of groups that a warp has of a step
constexpr int kGroups = 4 * kEach * WARPS;        // of 32 values, in a step
constexpr int kWarps = TEAMS * WARPS;             // that multiply
constexpr int kThreads = 32 * kWarps;
constexpr int kLanes = 16;                     // keys that lie side by side in a pool
constexpr int kBits = TYPE == Q8_0 ? 14 : 13;  // below the exponent of a group's largest

// Where each begins, and where the last ends
__device__ constexpr int before(int part) { return part == 0 ? 0 : before(part - 1) + kParts[part - 1]; }
constexpr int kStageBytes = before(5) * kGroups / 8;
// A team that waits for a stage takes it for granted that what was there a round before has arrived: either the
// team itself has had that, or it was asked for so long ago.
static_assert(AHEAD <= STAGES && (STAGES % TEAMS == 0 || STAGES >= TEAMS + AHEAD));

struct Heads {
    const long long *position, *stream, *slot;
    const int* table;
    const half_t *sin, *cos;
    half_t *keys, *values;
    long long sin_stride, cos_stride;
    int length, num_streams, num_table_blocks, num_blocks, num_heads, num_kv_heads, block_size;
};

struct Problem {
    half_t* y;
    const half_t *x, *norm, *bias, *residual;
    const char* weight;
    long long tile_bytes;
    float eps;
    int num_outputs, num_groups, num_items, apart;  // tiles of an item lie so many apart
    Heads heads;
};

struct Shared {
    char stages[STAGES][kStageBytes];
    float parts[2][kWarps][kTiles][32];
    float squares[kWarps];
    long_t full[STAGES], empty[STAGES];
};

// What 4 groups of x are for a warp: each thread's bytes, and of each group what a one is worth, and its sum
struct Chunk {
    uint2 bytes[32];
    float2 sides[4];
};

// ---- the weight, by one thread ------------------------------------------------------------------------------

__device__ int first_tile(const Problem& p, int item) {
    return ROTATES ? item + item / p.apart * p.apart : item;
}

__device__ void load_step(Shared& shared, const Problem& p, const char* tile, int begin, int step,
                          long_t policy) {
    const int slot = step % STAGES, count = min(kGroups, p.num_groups - begin);
    if (step >= STAGES) wait(shared.empty[slot], (step / STAGES - 1) & 1);
    // What is asked for later waits behind these, x too.
    if (step >= AHEAD) wait(shared.full[(step - AHEAD) % STAGES], (step - AHEAD) / STAGES & 1);
    arrive_expecting(shared.full[slot], before(5) * count / 8);
#pragma unroll
    for (int part = 0; part < 5; part++) {
        if (kParts[part] == 0) continue;
        const char* from = tile + (long long)before(part) * p.num_groups / 8 + kParts[part] * begin / 8;
        copy(shared.stages[slot] + before(part) * kGroups / 8, from, kParts[part] * count / 8,
             shared.full[slot], policy);
    }
}

__device__ void load_weight(Shared& shared, const Problem& p) {
    const long_t policy = read_once();
    int step = 0;
    for (int item = blockIdx.x; item < p.num_items; item += gridDim.x)
        for (int i = 0; i < kTiles; i++) {
            const char* tile = p.weight + (first_tile(p, item) + i * p.apart) * p.tile_bytes;
            for (int begin = 0; begin < p.num_groups; begin += kGroups)
                load_step(shared, p, tile, begin, step++, policy);
        }
}

// ---- bytes of x ---------------------------------------------------------------------------------------------

__device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float high(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000); }

// A thread's 8 values of the group that its four threads have: two each from 2 t, 8 + 2 t, ... on
__device__ uint4 load_x(const half_t* x, int group, int lane) {
    const unsigned* at = (const unsigned*)(x + group * 32 + lane % 4 * 2);
    return {at[0], at[4], at[8], at[12]};
}

__device__ void widen(float (&f)[8], uint4 x) {
    f[0] = low(x.x), f[1] = high(x.x), f[2] = low(x.y), f[3] = high(x.y);
    f[4] = low(x.z), f[5] = high(x.z), f[6] = low(x.w), f[7] = high(x.w);
}

// The exponent of the largest of a group, 255 of NaN. The bits of a float that is not negative are in its order,
// NaN's last. What would round to more than 127 times 256 has the next exponent.
__device__ int exponent_of(const float (&f)[8]) {
    int largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, __float_as_int(f[i]) & 0x7FFFFFFF);
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    return max((min(largest, 0x7F800000) + 0x20000) >> 23, 15);
}

__device__ unsigned byte_of_each(int a, int b, int c, int d, unsigned which) {
    return __byte_perm(__byte_perm(a, b, which), __byte_perm(c, d, which), 0x5410);
}

// One byte of each, in the order of the codes
__device__ uint2 bytes_of(const int (&n)[8], unsigned which) {
    if (TYPE == Q8_0)
        return {byte_of_each(n[0], n[2], n[1], n[3], which), byte_of_each(n[4], n[6], n[5], n[7], which)};
    return {byte_of_each(n[0], n[4], n[1], n[5], which), byte_of_each(n[2], n[6], n[3], n[7], which)};
}

// Thread 4 g + t of a warp has a part of group g.
__device__ void make_group(Chunk& chunk, const float (&f)[8], int lane, bool is_there) {
    constexpr float kRounding = 12582912;  // 1.5 * 2^23: what is added to it is rounded, and is its last bits
    const int exponent = exponent_of(f);
    const float factor = __int_as_float((254 + kBits - exponent) << 23);
    int n[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const bool is_high = TYPE != Q8_0 && i & 2;
        n[i] = __float_as_int(fmaf(f[i], is_high ? factor / 16 : factor, kRounding));
        sum += (n[i] - __float_as_int(kRounding)) * (is_high ? 16 : 1);
    }
    if (TYPE != Q8_0) n[0] -= n[2], n[1] -= n[3], n[4] -= n[6], n[5] -= n[7];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (!is_there) return;
    const int column = lane / 4 % 4 * 8 + lane % 4;
    chunk.bytes[column + 4] = bytes_of(n, 0x40);
    for (int i = 0; i < 8; i++)
        n[i] += 128;  // the low byte is signed too, so the high one is that of 128 more
    chunk.bytes[column] = bytes_of(n, 0x51);
    const float one = __int_as_float(exponent == 255 ? 0x7FC00000 : (exponent - kBits) << 23);
    if (lane % 4 == 0) chunk.sides[lane / 4 % 4] = {one, TYPE == Q4_0 ? __int_as_float(-8 * sum) : sum * one};
}

constexpr int kAhead = 4;  // times 8 groups, that a warp loads at once

// Those that a warp has from `first` on; what is not there is zero
__device__ void load_ahead(uint4 (&x)[kAhead], const half_t* from, int first, int num_groups, int lane) {
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
        const int group = first + i * kWarps * 8 + lane / 4;
        x[i] = group < num_groups ? load_x(from, group, lane) : uint4{};
    }
}

// Returns a thread's part of the sum of squares. The norm's weights do not depend on the kernel before.
__device__ float make_bytes(Chunk* chunks, const Problem& p, int warp, int lane) {
    float squares = 0;
    uint4 x[kAhead], norm[kAhead];
    if (NORMS) load_ahead(norm, p.norm, warp * 8, p.num_groups, lane);
    wait_for_inputs();
    for (int first = warp * 8; first < p.num_groups; first += kAhead * kWarps * 8) {
        load_ahead(x, p.x, first, p.num_groups, lane);
        if (NORMS && first >= kAhead * kWarps * 8) load_ahead(norm, p.norm, first, p.num_groups, lane);
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int group = first + i * kWarps * 8 + lane / 4;
            if (first + i * kWarps * 8 >= p.num_groups) break;
            float f[8], n[8];
            widen(f, x[i]);
            if (NORMS) {
                widen(n, norm[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) squares += f[j] * f[j], f[j] *= n[j];
            }
            make_group(chunks[group / 4], f, lane, group < p.num_groups);
        }
    }
    return squares;
}

// ---- products -----------------------------------------------------------------------------------------------

// c + a b of the tensor cores, 16 x 32 times 32 x 8, in bytes: of a rows g and g + 8, of b column g, of both the
// fours t; of c the same rows and columns 2 t, 2 t + 1
__device__ void multiply(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, uint2 b) {
#define MULTIPLY(TYPES)                                                             \
    asm volatile("mma.sync.aligned.m16n8k32.row.col." TYPES                         \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                   \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y))
    if (TYPE == Q8_0)
        MULTIPLY("s32.s8.s8.s32");
    else
        MULTIPLY("s32.u8.s8.s32");
#undef MULTIPLY
}

// Two rows of one group
__device__ void multiply_rows(int (&c)[4], unsigned u, unsigned v, unsigned other_u, unsigned other_v,
                              uint2 b) {
    constexpr unsigned kLow = 0x0F0F0F0F;
    if (TYPE == Q8_0)
        multiply(c, u, v, other_u, other_v, b);
    else
        multiply(c, u & kLow, v & kLow, u, v, b);
}

// Where a thread finds what it has of its warp's first four groups, in bytes from where a step, or x, begins
struct Places {
    int words, halves, bytes, of_block, x, sides;

    __device__ Places(int warp, int lane) {
        const int group = warp % WARPS * 4 * kEach, index = (group + lane % 4) * 8 + lane / 4;
        words = group * kParts[0] / 8 + lane * 16;
        halves = before(1) * kGroups / 8 + index * 8;
        bytes = before(1) * kGroups / 8 + index * 4;
        of_block = before(3) * kGroups / 8 + (group + lane / 4) * 8;  // a warp's groups are a block
        x = group / 4 * sizeof(Chunk) + lane * 8;
        sides = group / 4 * sizeof(Chunk) + sizeof(Chunk::bytes) + lane % 4 * 8;
    }
};

// Scales of the rows in a thread's group, and minimums where there are any
template <int CHUNK>
__device__ void load_sides(float (&scale)[4], float (&minimum)[4], const char* stage, const Places& at) {
    if (TYPE == Q4_K) {
        four_halves(scale, stage + at.of_block), four_halves(minimum, stage + at.of_block + 8 * kGroups);
        times_bytes(scale, stage + at.bytes + CHUNK * 128);
        times_bytes(minimum, stage + at.bytes + CHUNK * 128 + 32 * kGroups);
    } else {
        four_halves(scale, stage + at.halves + CHUNK * 256);
        if (TYPE == Q4_1) four_halves(minimum, stage + at.halves + CHUNK * 256 + 64 * kGroups);
    }
}

// A warp's columns of x in 4 groups: those of others are zero, and stay so.
struct Columns {
    uint2 of_group[4] = {};

    __device__ void load(const char* bytes, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm volatile(
                "{\n.reg .pred own;\nsetp.ne.b32 own, %3, 0;\n@own ld.shared.v2.b32 {%0, %1}, [%2];\n}"
                : "+r"(of_group[i].x), "+r"(of_group[i].y)
                : "r"(address(bytes)), "r"((int)(lane / 8 == i)));
    }
};

// The totals of rows g, g + 8, g + 16 and g + 24, with the products of four groups
template <int CHUNK>
__device__ void add_chunk(float (&totals)[4], Columns& columns, const char* stage, const char* x,
                          const Places& at, int lane) {
    const uint4* words = (const uint4*)(stage + at.words + CHUNK * kParts[0] / 2);
    const float2 sides = *(const float2*)(x + at.sides + CHUNK * sizeof(Chunk));
    const int begin = TYPE == Q4_0 ? __float_as_int(sides.y) : 0;
    int near[4] = {0, begin, 0, begin}, far[4] = {0, begin, 0, begin};
    columns.load(x + at.x + CHUNK * sizeof(Chunk), lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 u = words[i * kParts[0] / 128], v = words[i * kParts[0] / 128 + (TYPE == Q8_0 ? 32 : 0)];
        multiply_rows(near, u.x, u.y, v.x, v.y, columns.of_group[i]);
        multiply_rows(far, u.z, u.w, v.z, v.w, columns.of_group[i]);
    }
    float scale[4], minimum[4];
    load_sides<CHUNK>(scale, minimum, stage, at);
    const int sums[4] = {near[0] * 256 + near[1], near[2] * 256 + near[3], far[0] * 256 + far[1],
                         far[2] * 256 + far[3]};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        totals[j] = fmaf((float)sums[j], scale[j] * sides.x, totals[j]);
        if (kMinimums) totals[j] = fmaf(TYPE == Q4_K ? -minimum[j] : minimum[j], sides.y, totals[j]);
    }
}

// A team's next step
struct Step {
    int slot, parity = 0;
    __device__ void pass() {
        slot += TEAMS;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};

// `passed` is how many steps all teams have had.
__device__ void add_tile(float (&totals)[4], Columns (&columns)[kEach], Step& step, Shared& shared,
                         const char* x, const Places& at, int num_groups, int passed, int warp, int lane) {
    const int own = warp % WARPS * kEach * 4, skipped = (warp / WARPS + TEAMS - passed % TEAMS) % TEAMS;
    for (int begin = skipped * kGroups; begin < num_groups; begin += TEAMS * kGroups) {
        wait(shared.full[step.slot], step.parity);
        if (begin + own < num_groups) {
            const char* from = x + begin * (int)sizeof(Chunk) / 4;
            add_chunk<0>(totals, columns[0], shared.stages[step.slot], from, at, lane);
            add_chunk<1>(totals, columns[1], shared.stages[step.slot], from, at, lane);
        }
        __syncwarp();
        if (lane == 0) arrive(shared.empty[step.slot]);
        step.pass();
    }
}

// ---- what comes after a product -----------------------------------------------------------------------------

__device__ float widened(half_t value) { return __uint_as_float((unsigned)value << 16); }

__device__ half_t narrowed(float value) {
    half_t result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// What of it can be loaded before the sums are there
struct Ahead {
    float residual, sin, cos;
    long long block;
    int place;
};

// Where a token's key belongs: the block is -1 where there is none
__device__ void find_place(Ahead& ahead, const Heads& h) {
    const long long stream = *h.stream, slot = *h.slot;
    const bool is_there = stream >= 0 && stream < h.num_streams && slot >= 0 &&
                          slot < (long long)h.num_table_blocks * h.block_size;
    ahead.place = (int)(slot % h.block_size);
    ahead.block = is_there ? h.table[stream * h.num_table_blocks + slot / h.block_size] : -1;
    if (ahead.block >= h.num_blocks) ahead.block = -1;
}

// By how much a head is rotated at d; NaN where there is no such position
__device__ void find_angle(Ahead& ahead, const Heads& h, int d) {
    const long long position = *h.position;
    const bool is_known = position >= 0 && position < h.length;
    const float lost = is_known ? 0 : __int_as_float(0x7FC00000);
    ahead.sin = widened(h.sin[(is_known ? position : 0) * h.sin_stride + d]) + lost;
    ahead.cos = widened(h.cos[(is_known ? position : 0) * h.cos_stride + d]) + lost;
}

__device__ Ahead look_ahead(const Problem& p, int row) {
    Ahead ahead = {};
    if (ADDS && row < p.num_outputs) ahead.residual = widened(p.residual[row]);
    if (ROTATES) find_place(ahead, p.heads), find_angle(ahead, p.heads, row % (64 * p.apart));
    return ahead;
}

// A value of some head, counted through those of queries, keys and values, to where it belongs
__device__ void put(const Problem& p, const Ahead& to, int head, int d, float value) {
    const Heads& h = p.heads;
    const int size = 64 * p.apart;
    const long long first =
        (to.block * h.num_kv_heads + (head - h.num_heads) % h.num_kv_heads) * h.block_size * size;
    if (head < h.num_heads)
        p.y[head * size + d] = narrowed(value);
    else if (to.block >= 0 && head < h.num_heads + h.num_kv_heads)
        h.keys[first + to.place / kLanes * kLanes * size + d * kLanes + to.place % kLanes] = narrowed(value);
    else if (to.block >= 0)
        h.values[first + (long long)to.place * size + d] = narrowed(value);
}

__device__ void put_rotated(const Problem& p, const Ahead& ahead, int row, float first, float second) {
    const int half = 32 * p.apart, head = row / (2 * half), d = row % (2 * half);
    const bool is_rotated = head < p.heads.num_heads + p.heads.num_kv_heads;
    const float sin = is_rotated ? ahead.sin : 0, cos = is_rotated ? ahead.cos : 1;
    put(p, ahead, head, d, is_rotated ? first * cos - second * sin : first);
    put(p, ahead, head, d + half, is_rotated ? first * sin + second * cos : second);
}

// A row of a tile, or of two
__device__ void finish(const Problem& p, const Ahead& ahead, int row, float first, float second) {
    const int gap = ROTATES ? 32 * p.apart : p.num_outputs;
    if (!ROTATES && row >= p.num_outputs) return;
    if (HAS_BIAS) first += widened(p.bias[row]);
    if (HAS_BIAS && kTiles == 2) second += widened(p.bias[row + gap]);
    if (ROTATES) return put_rotated(p, ahead, row, first, second);
    if (GATES) first = __fdividef(first, 1 + __expf(-first)) * second;
    if (ADDS) first += ahead.residual;
    p.y[row] = narrowed(first);
}

// ---- the kernel ---------------------------------------------------------------------------------------------

__device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Threads of a row have the sums of different groups.
__device__ void share(Shared& shared, float (&totals)[kTiles][4], int turn, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kTiles; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float sum = totals[i][j];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) shared.parts[turn % 2][warp][i][8 * j + lane / 4] = sum;
        }
}

__device__ float total(const Shared& shared, int turn, int tile, int lane) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) sum += shared.parts[turn % 2][warp][tile][lane];
    return sum;
}

__device__ float norm_factor(const Shared& shared, const Problem& p) {
    float squares = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) squares += shared.squares[warp];
    return rsqrtf(squares / (32 * p.num_groups) + p.eps);
}

__device__ float sum_of_warp(float value) {
#pragma unroll
    for (int i = 16; i; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    return value;
}

__device__ void multiply_all(Shared& shared, const Chunk* chunks, const Problem& p, int warp, int lane) {
    Step step = {warp / WARPS};
    Columns columns[kEach];
    const Places at(warp, lane);
    int turn = 0;
    const int num_steps = (p.num_groups + kGroups - 1) / kGroups;  // of a tile
    for (int item = blockIdx.x; item < p.num_items; item += gridDim.x, turn++) {
        const bool is_own = turn % kWarps == warp;  // one warp finishes what all have summed up
        const int row = first_tile(p, item) * 32 + lane;
        Ahead ahead;
        if (is_own) ahead = look_ahead(p, row);
        float totals[kTiles][4] = {};
#pragma unroll
        for (int i = 0; i < kTiles; i++)
            add_tile(totals[i], columns, step, shared, (const char*)chunks, at, p.num_groups,
                     (turn * kTiles + i) * num_steps, warp, lane);
        share(shared, totals, turn, warp, lane);
        meet();
        if (is_own) {
            const float factor = NORMS ? norm_factor(shared, p) : 1;
            finish(p, ahead, row, total(shared, turn, 0, lane) * factor,
                   total(shared, turn, kTiles - 1, lane) * factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 32) kernel(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) char memory[];
    Shared& shared = *(Shared*)memory;
    Chunk* chunks = (Chunk*)(memory + sizeof(Shared));
    // The first loads: a warp that comes later is let wait by those before it that have work.
    const int warp = (int)threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init(shared.full[i], 1), init(shared.empty[i], WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (!ROTATES) let_next_begin();
    }
    __syncthreads();
    if (warp < 0) {
        if (lane == 0) load_weight(shared, p);
    } else {
        const float squares = make_bytes(chunks, p, warp, lane);
        if (ROTATES) let_next_begin();  // which reads keys early that no other may change
        if (NORMS) shared.squares[warp] = sum_of_warp(squares);
        meet();
        multiply_all(shared, chunks, p, warp, lane);
    }
}
