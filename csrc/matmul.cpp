// linear: y[m][n] = sum over k of x[m][k] * weight[n][k] + bias[n], in float32; weight in any block type
// Each pair (m, n) is summed in the same order, which K alone fixes: within a chunk of K in W lanes, the lanes added
// up in halves, then chunk after chunk, then the bias. So a row has the same bits alone and among others, whatever
// the tiles and threads.
#include "quant.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kChunk = 64 * W;  // of K, dequantised at a time; a multiple of every block
constexpr int kPanel = 16;          // weight rows dequantised side by side
constexpr int kBand = 128;          // rows of x that share a dequantised chunk

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Running sums of one row of x with four of weight. Named members, as GCC keeps an array of them in memory.
struct Sums {
    vf a{}, b{}, c{}, d{};

    void add(vf x, const Sums& w) {
        a = fma(x, w.a, a);
        b = fma(x, w.b, b);
        c = fma(x, w.c, c);
        d = fma(x, w.d, d);
    }

    // total[0:4] += the lanes of each added up, all in the same order
    void add_to(float* total) const {
#if defined(INFINI_AVX512) || defined(INFINI_AVX2)
        const __m256 ab = _mm256_hadd_ps(halved(a), halved(b)), cd = _mm256_hadd_ps(halved(c), halved(d));
        const __m256 abcd = _mm256_hadd_ps(ab, cd);
        const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
        _mm_storeu_ps(total, _mm_add_ps(_mm_loadu_ps(total), sums));
#elif defined(INFINI_NEON)
        vst1q_f32(total, vaddq_f32(vld1q_f32(total), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))));
#else
        store(total, load(total) + vf{sum(a), sum(b), sum(c), sum(d)});
#endif
    }

#if defined(INFINI_AVX512)
    static __m256 halved(vf v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
#elif defined(INFINI_AVX2)
    static __m256 halved(vf v) { return v; }
#endif
};

inline Sums load_four(const float* weight) {
    return {load(weight), load(weight + kChunk), load(weight + 2 * kChunk), load(weight + 3 * kChunk)};
}

// total[r][0:4] += the dot products of four rows of x with four of weight
void add_four_rows(float* total, const float* const* x, const float* weight, int64_t length) {
    const float *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3];
    Sums s0, s1, s2, s3;
    for (int64_t k = 0; k < length; k += W) {
        const Sums w = load_four(weight + k);
        s0.add(load(x0 + k), w);
        s1.add(load(x1 + k), w);
        s2.add(load(x2 + k), w);
        s3.add(load(x3 + k), w);
    }
    s0.add_to(total);
    s1.add_to(total + kPanel);
    s2.add_to(total + 2 * kPanel);
    s3.add_to(total + 3 * kPanel);
}

// total[0:8] += the dot products of one row of x with eight of weight
void add_one_row(float* total, const float* x, const float* weight, int64_t length) {
    Sums low, high;
    for (int64_t k = 0; k < length; k += W) {
        const vf v = load(x + k);
        low.add(v, load_four(weight + k));
        high.add(v, load_four(weight + 4 * kChunk + k));
    }
    low.add_to(total);
    high.add_to(total + 4);
}

void add_panel(float* total, const float* const* x, int64_t num_rows, const float* panel, int64_t length) {
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4)
        for (int c = 0; c < kPanel; c += 4) add_four_rows(total + r * kPanel + c, x + r, panel + c * kChunk, length);
    for (; r < num_rows; ++r)
        for (int c = 0; c < kPanel; c += 8) add_one_row(total + r * kPanel + c, x[r], panel + c * kChunk, length);
}

// The last elements of a row that fill no vector, with zeros behind them
void add_tail(float* total, const float* const* x, int64_t num_rows, const float* panel, int64_t length) {
    float tail[kBand][W];
    const float* rows[kBand];
    for (int64_t r = 0; r < num_rows; ++r) {
        store(tail[r], load_n(x[r], length));
        rows[r] = tail[r];
    }
    add_panel(total, rows, num_rows, panel, W);
}

struct Weight {
    const uint8_t* data;
    int64_t row_bytes, num_rows, row_length;
    BlockSize block;
    Dequantize dequantize;

    explicit Weight(const Linear& a)
        : data(static_cast<const uint8_t*>(a.weight.data)), row_bytes(a.weight.stride[0] * item_size(a.weight.dtype)),
          num_rows(a.weight.shape[0]), row_length(a.x.shape[a.x.ndim - 1]), block(block_size(a.type)),
          dequantize(dequantizer(a.type)) {}

    // The chunk of K from `first` of the weight rows from `row` on, zeros to the end of its last vector
    void read(float* panel, int64_t row, int64_t first, int64_t length) const {
        const uint8_t* chunk = data + row * row_bytes + first / block.elements * block.bytes;
        for (int i = 0; i < kPanel && row + i < num_rows; ++i, chunk += row_bytes, panel += kChunk) {
            dequantize(panel, chunk, length);
            for (int64_t k = length; k % W; ++k) panel[k] = 0;
        }
    }
};

// y[m : m + num_rows][n : n + kPanel]
void multiply_band(const Linear& a, const Weight& weight, int64_t m, int64_t num_rows, int64_t n) {
    alignas(64) float panel[kPanel * kChunk];
    float total[kBand * kPanel] = {};
    const float* x[kBand];
    for (int64_t k = 0; k < weight.row_length; k += kChunk) {
        const int64_t length = smaller(kChunk, weight.row_length - k), whole = length / W * W;
        weight.read(panel, n, k, length);
        for (int64_t r = 0; r < num_rows; ++r) x[r] = Rows{a.x}.at<const float>(m + r) + k;
        add_panel(total, x, num_rows, panel, whole);
        for (int64_t r = 0; r < num_rows; ++r) x[r] += whole;
        if (whole < length) add_tail(total, x, num_rows, panel + whole, length - whole);
    }
    const float* bias = a.has_bias ? static_cast<const float*>(a.bias.data) + n : nullptr;
    for (int64_t r = 0; r < num_rows; ++r) {
        float* y = Rows{a.y}.at<float>(m + r) + n;
        for (int64_t c = 0; c < smaller(kPanel, weight.num_rows - n); ++c)
            y[c] = bias ? total[r * kPanel + c] + bias[c] : total[r * kPanel + c];
    }
}

}  // namespace

int64_t linear(const Linear& a) {
    if (a.y.data == a.x.data && num_elements(a.y)) return 0;  // every value of x is needed until the end
    const Weight weight(a);
    const int64_t num_rows = Rows{a.x}.count(), num_panels = (weight.num_rows + kPanel - 1) / kPanel;
    const int64_t grain = kGrain / (kPanel * (weight.row_length + 1)) + 1;
    parallel_for(num_panels, grain, [&](int64_t begin, int64_t end) {
        for (int64_t m = 0; m < num_rows; m += kBand)
            for (int64_t p = begin; p < end; ++p) multiply_band(a, weight, m, smaller(kBand, num_rows - m), p * kPanel);
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
