// A token of each row of bfloat16 logits, by counting how often each logit is there. draw.py launches it.
//
// A program has a row. There are fewer finite logits than its memory has room for counts, so that those of a row
// are counted in one go, and what weighs as much stands together: the weights of all tokens before a logit are a
// sum over counts, in float64. Cuts and the drawn token are found from parts to places, by one warp; in the end
// the row is read again for the token that has the logit.

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kOwn = 53;  // places of a thread: an odd number, so that its lanes meet in no bank
constexpr int kPlaces = kThreads * kOwn;  // from the largest logit to -2^42: below it none has a weight
constexpr int kZero = 0x7F7F, kMinusInfinity = 2 * kZero + 1;
constexpr double kLog2e = 1.4426950408889634, kLargest = 3e38;
constexpr float kLeast = 0x1p-120f;    // a smaller weight is none
constexpr float kColdest = 0x1p-126f;  // a lower temperature may be 0 where there is a division by it

struct Problem {
    long long* token;
    const half_t* logits;
    const double* uniforms;
    const float* settings;  // temperature, top_p and min_p of each row
    const long long* top_k;
    long long logit_stride;
    int num_tokens;
};

struct Sum {
    int count;
    double weight;

    __device__ void add(const Sum& other) { count += other.count, weight += other.weight; }
    __device__ Sum of_lane(int lane) const {
        return {__shfl_sync(~0u, count, lane), __shfl_sync(~0u, weight, lane)};
    }
};

struct Shared {
    double weights[kThreads], warp_weights[kWarps];  // of what each has
    int counts[kThreads], warp_counts[kWarps];
    int first, last, place, rank;
    int of[kPlaces];  // how many tokens have its logit
};

// ---- places -------------------------------------------------------------------------------------------------

// Larger logits come first, both zeros are one; +inf and NaN are below 0 or behind -inf
__device__ int order_of(int bits) { return bits & 0x8000 ? bits - 0x8000 + kZero : kZero - bits; }

__device__ int bits_at(int place) { return place > kZero ? 0x8000 + place - kZero : kZero - place; }

__device__ float logit_at(int place) { return __int_as_float(bits_at(place) << 16); }

struct Weights {
    float top, high, low, least;

    __device__ Weights(float top, float temperature, float min_p) : top(top) {
        const double scale = kLog2e / temperature;
        high = (float)fmin(scale, kLargest);
        low = scale < kLargest ? (float)(scale - high) : 0.0f;
        least = fmaxf(fminf(min_p, 1.0f), kLeast);
    }

    // exp((logit - the largest) / temperature)
    __device__ float at(int place) const {
        float weight;
        const float x = logit_at(place) - top;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(fmaf(x, low, x * high)));
        return weight;
    }

    // Of all tokens there, which are none below the least weight
    __device__ Sum sum(int count, float weight) const {
        return weight >= least ? Sum{count, count * (double)weight} : Sum{};
    }
};

// ---- counting -----------------------------------------------------------------------------------------------

// Calls take(bits) for eight logits that lie together
template <typename Take>
__device__ void take_eight(const uint4& eight, Take take) {
    const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; i++) take(pairs[i] & 0xFFFF), take(pairs[i] >> 16);
}

// Whether the row has a largest logit, and no NaN. One without a place is the first, and is drawn.
__device__ bool count_places(Shared& shared, const half_t* row, int num_tokens) {
    int first = kMinusInfinity, last = 0;
#pragma unroll 4
    for (int column = threadIdx.x * 8; column < num_tokens; column += kThreads * 8)
        take_eight(*(const uint4*)(row + column), [&](int bits) {
            const int order = order_of(bits);
            first = min(first, order), last = max(last, order);
            if ((unsigned)order < kPlaces) atomicAdd(&shared.of[order], 1);
        });
    first = __reduce_min_sync(~0u, first), last = __reduce_max_sync(~0u, last);
    if (threadIdx.x % 32 == 0) atomicMin(&shared.first, first), atomicMax(&shared.last, last);
    __syncthreads();
    return shared.first >= 0 && shared.first < kMinusInfinity && shared.last <= kMinusInfinity;
}

__device__ void sum_places(Shared& shared, const Weights& weights) {
    Sum sum{};
    for (int place = threadIdx.x * kOwn; place < (threadIdx.x + 1) * kOwn; place++)
        if (const int count = shared.of[place]) sum.add(weights.sum(count, weights.at(place)));
    shared.counts[threadIdx.x] = sum.count, shared.weights[threadIdx.x] = sum.weight;
    for (int apart = 16; apart > 0; apart /= 2)
        sum.add({__shfl_xor_sync(~0u, sum.count, apart), __shfl_xor_sync(~0u, sum.weight, apart)});
    if (threadIdx.x % 32 == 0)
        shared.warp_counts[threadIdx.x / 32] = sum.count, shared.warp_weights[threadIdx.x / 32] = sum.weight;
    __syncthreads();
}

// ---- where a cut or a token lies, by one warp ----------------------------------------------------------------

struct Goal {
    double wanted;
    bool by_count, passes;

    __device__ bool is_reached(const Sum& sum) const {
        const double value = by_count ? sum.count : sum.weight;
        return passes ? value > wanted : value >= wanted;
    }
};

// What is before, and of lanes up to this one
__device__ Sum up_to(Sum sum, const Sum& before) {
    for (int apart = 1; apart < 32; apart *= 2) {
        const Sum other{__shfl_up_sync(~0u, sum.count, apart), __shfl_up_sync(~0u, sum.weight, apart)};
        if (threadIdx.x % 32 >= apart) sum.add(other);
    }
    sum.add(before);
    return sum;
}

// The first lane that reaches the goal, or the last that has a token, where rounding left none that does
__device__ int reaching(const Goal& goal, const Sum& sum, bool has_any) {
    const unsigned any = __ballot_sync(~0u, has_any);
    const unsigned reached = __ballot_sync(~0u, has_any && goal.is_reached(sum));
    return reached ? __ffs(reached) - 1 : 31 - __clz(any);
}

struct Found {
    int place;
    double weight;  // of a token there
    Sum before;
};

__device__ Sum before_lane(const Sum& sum, int lane, const Sum& before) {
    const Sum left = sum.of_lane(max(lane - 1, 0));
    return lane > 0 ? left : before;
}

// Of a thread's places, two to a lane
__device__ Found find_place(const Shared& shared, const Weights& weights, const Goal& goal, int first,
                            const Sum& before) {
    const int lane = threadIdx.x % 32, near = first + min(2 * lane, kOwn - 1);
    const bool has_two = 2 * lane + 1 < kOwn;
    const float weight = weights.at(near), far_weight = weights.at(near + has_two);
    const Sum own = weights.sum(2 * lane < kOwn ? shared.of[near] : 0, weight);
    Sum both = weights.sum(has_two ? shared.of[near + 1] : 0, far_weight);
    both.add(own);
    const Sum sum = up_to(both, before);
    const int at = reaching(goal, sum, both.count > 0);
    const Sum left = before_lane(sum, at, before);
    Sum midst = own.of_lane(at);
    const bool has_own = midst.count > 0;
    midst.add(left);
    if (has_own && (goal.is_reached(midst) || midst.count == sum.of_lane(at).count))
        return {first + 2 * at, __shfl_sync(~0u, weight, at), left};
    return {first + 2 * at + 1, __shfl_sync(~0u, far_weight, at), midst};
}

// The first place with which all up to it reach the goal. Of warps it is known what is up to each.
__device__ Found find(const Shared& shared, const Weights& weights, const Goal& goal, const Sum& of_warps) {
    const int lane = threadIdx.x % 32, warp = reaching(goal, of_warps, shared.warp_counts[lane] > 0);
    const int own = warp * 32 + lane;
    const Sum before = before_lane(of_warps, warp, {});
    const Sum sum = up_to({shared.counts[own], shared.weights[own]}, before);
    const int thread = reaching(goal, sum, shared.counts[own] > 0);
    return find_place(shared, weights, goal, (warp * 32 + thread) * kOwn, before_lane(sum, thread, before));
}

struct Draw {
    int place, rank;  // of the tokens there, the one with so many before it
};

// What a row's number draws from what top_k and then top_p leave of it
__device__ Draw drawn(const Shared& shared, const Weights& weights, long long top_k, double top_p,
                      double uniform) {
    const int lane = threadIdx.x % 32;
    const Sum sums = up_to({shared.warp_counts[lane], shared.warp_weights[lane]}, {}), all = sums.of_lane(31);
    int last = kPlaces, num_last = 0;  // the last place that is kept, and how many of its tokens
    double kept = all.weight;
    if (0 < top_k && top_k < all.count) {
        const Found cut = find(shared, weights, {(double)top_k, true, false}, sums);
        last = cut.place, num_last = (int)top_k - cut.before.count;
        kept = cut.before.weight + num_last * cut.weight;
    }
    if (top_p < 1) {
        const Found cut = find(shared, weights, {top_p * kept, false, false}, sums);
        const int num_due = max((int)ceil((top_p * kept - cut.before.weight) / cut.weight), 1);
        num_last = cut.place == last ? min(num_due, num_last) : num_due;
        last = cut.place, kept = cut.before.weight + num_last * cut.weight;
    }
    const Found found = find(shared, weights, {uniform * kept, false, true}, sums);
    const int rank = max((int)floor((uniform * kept - found.before.weight) / found.weight), 0);
    if (found.place < last) return {found.place, min(rank, shared.of[found.place] - 1)};
    return {last, min(rank, min(num_last, shared.of[last]) - 1)};
}

// ---- the token ----------------------------------------------------------------------------------------------

// How many of eight logits have a place
__device__ int count_at(const uint4& eight, int place) {
    const unsigned bits = bits_at(place) * 0x10001u, mask = place == kZero ? 0x7FFF7FFF : ~0u;
    const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    unsigned some = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned apart = (pairs[i] ^ bits) & mask;
        some |= (apart - 0x10001u) & ~apart & 0x80008000u;  // not 0 where a half of it is 0
    }
    int count = 0;
    if (some) take_eight(eight, [&](int bits) { count += order_of(bits) == place; });
    return count;
}

// Of a part of the row the token at a place with so many before it, by the warp whose part it is
__device__ int token_of(const half_t* row, int begin, int end, int place, int rank) {
    const int own = begin + threadIdx.x % 32 * 8;
    int found = own, left = 0;  // where 256 columns have it, and how many of them come before
#pragma unroll 4
    for (int column = own; column < end + own - begin; column += 256) {
        const int count = column < end ? count_at(*(const uint4*)(row + column), place) : 0;
        const int all = __reduce_add_sync(~0u, count);
        if (0 <= rank && rank < all) found = column, left = rank;
        rank -= all;
    }
    const int count = found < end ? count_at(*(const uint4*)(row + found), place) : 0;
    left -= up_to({count, 0.0}, {}).count - count;
    int token = -1, i = 0;
    if (0 <= left && left < count)
        take_eight(*(const uint4*)(row + found), [&](int bits) {
            if (order_of(bits) == place && left-- == 0) token = found + i;
            i++;
        });
    return token;
}

// Each warp counts in a part of the row; that which has the token looks for it.
__device__ void store_token(const Problem& p, Shared& shared, const half_t* row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = shared.place;
    const int part = (p.num_tokens + kWarps * 256 - 1) / (kWarps * 256) * 256;
    const int begin = warp * part, end = min(begin + part, p.num_tokens);
    int count = 0, rank = shared.rank;
#pragma unroll 4
    for (int column = begin + lane * 8; column < end; column += 256)
        count += count_at(*(const uint4*)(row + column), place);
    shared.warp_counts[warp] = __reduce_add_sync(~0u, count);
    __syncthreads();
    for (int i = 0; i < warp; i++) rank -= shared.warp_counts[i];
    if (rank < 0 || rank >= shared.warp_counts[warp]) return;
    const int token = token_of(row, begin, end, place, rank);
    if (token >= 0) p.token[blockIdx.x] = token;
}

// ---- the kernel ---------------------------------------------------------------------------------------------

__device__ bool can_draw(float temperature) { return 0 <= temperature && isfinite(temperature); }

extern "C" __global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Problem p) {
    extern __shared__ __align__(16) char memory[];
    Shared& shared = *(Shared*)memory;
    for (int i = threadIdx.x; i < kPlaces; i += kThreads) shared.of[i] = 0;
    if (threadIdx.x == 0) shared.first = kMinusInfinity, shared.last = 0;
    let_next_begin();
    wait_for_inputs();
    __syncthreads();
    const half_t* row = p.logits + blockIdx.x * p.logit_stride;
    const float* settings = p.settings + 3 * blockIdx.x;
    const double uniform = p.uniforms[blockIdx.x];
    const long long top_k = p.top_k[blockIdx.x];
    if (!count_places(shared, row, p.num_tokens) || !can_draw(settings[0])) {
        if (threadIdx.x == 0) p.token[blockIdx.x] = -1;
        return;
    }
    Draw draw{shared.first, 0};
    if (settings[0] >= kColdest && top_k != 1 && uniform != 0 && shared.first < kPlaces) {
        const Weights weights(logit_at(shared.first), settings[0], settings[2]);
        sum_places(shared, weights);
        if (threadIdx.x < 32) draw = drawn(shared, weights, top_k, settings[1], uniform);
    }
    if (threadIdx.x == 0) shared.place = draw.place, shared.rank = draw.rank;
    __syncthreads();
    store_token(p, shared, row);
}
