// What products of several rows have in common: how they are loaded and read, and what comes after a product.
//
// Given when this is compiled: STAGES, SCALES (of rows of x and of the weight), GATES, HAS_BIAS, ADDS (a residual),
// IS_BFLOAT16.

struct alignas(64) TensorMap { char bytes[128]; };

__device__ bool is_first_lane() { return threadIdx.x % 32 == 0; }

// The slot of a step, when what was there has been multiplied
template <typename Shared>
__device__ int free_slot(Shared& shared, int step) {
    if (step >= STAGES) wait(shared.empty[step % STAGES], (step / STAGES - 1) & 1);
    return step % STAGES;
}

// Columns and rows of a matrix, whose pieces of 16 bytes are swizzled among 8 rows
__device__ void load(char* to, const TensorMap& map, int column, int row, long_t& barrier, long_t policy) {
    const unsigned target = address(to), at = address(&barrier);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        :
        : "r"(target), "l"(&map), "r"(column), "r"(row), "r"(at), "l"(policy)
        : "memory");
}

// What the tensor cores read: rows of 128 bytes, whose pieces of 16 are swizzled among 8 rows
__device__ long_t operand(const char* rows) {
    return (address(rows) & 0x3FFFF) >> 4 | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

template <int LEFT>
__device__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

struct Problem {
    half_t* y;
    const half_t *bias, *residual;
    const float *x_scales, *scales;
    long long residual_stride;
    int num_rows, num_outputs, num_columns;
};

__device__ float widened(unsigned value) {
#if IS_BFLOAT16
    return __uint_as_float(value << 16);
#else
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((half_t)value));
    return wide;
#endif
}

__device__ unsigned narrowed(float2 pair) {
    unsigned both;
#if IS_BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(pair.y), "f"(pair.x));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(pair.y), "f"(pair.x));
#endif
    return both;
}

// Two sums with two values, where there are any
__device__ float2 added(float2 sums, const half_t* values, bool are_there) {
    const unsigned both = are_there ? *(const unsigned*)values : 0;
    return {sums.x + widened(both & 0xFFFF), sums.y + widened(both >> 16)};
}

// Sums of row m and outputs n and n + 1, times what they are worth
__device__ float2 rescaled(const Problem& p, int m, int n, float2 sums, bool are_there) {
    const float own = are_there ? p.x_scales[m] : 0;
    const float2 both = are_there ? *(const float2*)(p.scales + n) : float2{0, 0};
    return {sums.x * own * both.x, sums.y * own * both.y};
}

__device__ float gated(float gate, float up) { return __fdividef(gate, 1 + __expf(-gate)) * up; }

// Outputs n and n + 1 of row m. There is no branch, which would keep sums from overlapping each other.
__device__ unsigned finished(const Problem& p, int m, int n, float2 sums, float2 ups) {
    const bool are_outputs = n < p.num_outputs, are_there = are_outputs && m < p.num_rows;
    if (SCALES) sums = rescaled(p, m, n, sums, are_there);
    if (SCALES && GATES) ups = rescaled(p, m, p.num_outputs + n, ups, are_there);
    if (HAS_BIAS) sums = added(sums, p.bias + n, are_outputs);
    if (HAS_BIAS && GATES) ups = added(ups, p.bias + p.num_outputs + n, are_outputs);
    if (GATES) sums = {gated(sums.x, ups.x), gated(sums.y, ups.y)};
    if (ADDS) sums = added(sums, p.residual + m * p.residual_stride + n, are_there);
    return narrowed(sums);
}

__device__ bool is_there(const Problem& p, int m, int n) { return m < p.num_rows && n < p.num_outputs; }
