// linear: y[m][n] = sum over k of x[m][k] * weight[n][k] + bias[n], summed in float32;
// weight dense or in blocks. Each pair (m, n) is summed in the same order, which K alone fixes: within a
// chunk of K in four vectors of W lanes that take turns, those added up, then their lanes, then chunk after
// chunk, then the bias. So a row has the same bits alone and among others, whatever the tiles and threads.
// Four, so that one row of x keeps pace with the memory.
//
// A part of y is made at a time: a band of rows of x and a strip of outputs. float32 is read where it lies;
// half precision and blocks are widened first, the weight 16 rows of a chunk at a time, once for the band.
// Where there are AMX tiles, bfloat16 goes through them, in an order of their own (amx_linear.h).
#include <type_traits>

#include "products.h"
#include "quant.h"
#include "rows.h"

#if defined(__AMX_BF16__)
#define INFINI_AMX
#include "amx_linear.h"
#endif

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kChunk = 512;  // of K; a multiple of every block
constexpr int kPanel = 16;       // weight rows widened side by side
constexpr int kTurns = 4;        // vectors that sum a dot product
// Floats of x: the fewer its rows, the longer their span of K
constexpr int64_t kRoom = kDenseBandRows * kChunk;

typedef float vf4 __attribute__((vector_size(16)));

inline vf added_up(vf a, vf b, vf c, vf d) { return (a + b) + (c + d); }

// The lanes of each added up, all in the same order
inline vf4 lane_sums(vf a, vf b, vf c, vf d) {
#if defined(INFINI_AVX512) || defined(INFINI_AVX2)
#if defined(INFINI_AVX512)
    const auto halved = [](vf v) {
        return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    };
#else
    const auto halved = [](vf v) { return v; };
#endif
    const __m256 ab = _mm256_hadd_ps(halved(a), halved(b)), cd = _mm256_hadd_ps(halved(c), halved(d));
    const __m256 abcd = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
#elif defined(INFINI_NEON)
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
#else
    return vf4{sum(a), sum(b), sum(c), sum(d)};
#endif
}

// total[0:4] += sums, as rows of C
template <int C>
inline void add_to(float* total, int first, vf4 sums) {
    float* at = total + first / C * kDenseStripOutputs + first % C;
    if constexpr (C % 4 == 0) {
        vf4 v;
        memcpy(&v, at, sizeof v);
        v += sums;
        memcpy(at, &v, sizeof v);
    } else {
        for (int i = 0; i < 4; ++i) at[i / C * kDenseStripOutputs + i % C] += sums[i];
    }
}

// Four vectors of a row
template <class T>
INFINI_INLINE inline void load_four(vf* w, const T* p) {
#if defined(INFINI_NEON)
    if constexpr (std::is_same_v<T, bf16>) {
        unrolled<kTurns / 2>([&](auto i) {
            const uint16x8_t bits = vld1q_u16(&p[2 * W * i].bits), zero = vdupq_n_u16(0);
            w[2 * i] = (vf)vzip1q_u16(zero, bits), w[2 * i + 1] = (vf)vzip2q_u16(zero, bits);
        });
        return;
    }
#endif
    unrolled<kTurns>([&](auto i) { w[i] = load(p + W * i); });
}

// The dot product of a row of x, zeros to the end of its last vector, with one of weight
template <class T>
float dot(const float* x, const T* weight, int64_t length) {
    vf s[kTurns] = {};
    int64_t k = 0;
    for (; k + kTurns * W <= length; k += kTurns * W) {
        vf w[kTurns];
        for (size_t line = 0; line < sizeof(T) * kTurns * W; line += 64)
            ask_for(reinterpret_cast<const char*>(weight + k) + kDensePrefetchBytes + line);
        load_four(w, weight + k);
        unrolled<kTurns>([&](auto i) { s[i] = fma(load(x + k + W * i), w[i], s[i]); });
    }
    unrolled<kTurns>([&](auto i) {
        const int64_t at = k + W * i;
        if (at < length) s[i] = fma(load(x + at), load_n(weight + at, smaller(W, length - at)), s[i]);
    });
    const vf sums = added_up(s[0], s[1], s[2], s[3]);
    return lane_sums(sums, sums, sums, sums)[0];
}

// total[r][c] += dot of row r of x with row c of weight
template <int R, int C, class T>
void add_tile(float* total, const float* x, int64_t x_stride, const T* weight, int64_t stride,
              int64_t length) {
    static_assert(R * C % 4 == 0 && (C % 4 == 0 || C == 2));
    vf turns[kTurns][R * C];
    for (int turn = 0; turn < kTurns; ++turn) {
        vf s[R * C] = {}, w[C];
        const auto add = [&](int64_t k) __attribute__((always_inline)) {
            unrolled<R>([&](auto r) {
                const vf v = load(x + r * x_stride + k);
                unrolled<C>([&](auto c) { s[r * C + c] = fma(v, w[c], s[r * C + c]); });
            });
        };
        int64_t k = turn * W;
        for (; k + W <= length; k += kTurns * W) {
            unrolled<C>([&](auto c) { w[c] = load(weight + c * stride + k); });
            add(k);
        }
        if (k < length) {
            unrolled<C>([&](auto c) { w[c] = load_n(weight + c * stride + k, length - k); });
            add(k);
        }
        unrolled<R * C>([&](auto i) { turns[turn][i] = s[i]; });
    }
    const auto sums = [&](int i) { return added_up(turns[0][i], turns[1][i], turns[2][i], turns[3][i]); };
    unrolled<R * C / 4>([&](auto i) {
        add_to<C>(total, 4 * i, lane_sums(sums(4 * i), sums(4 * i + 1), sums(4 * i + 2), sums(4 * i + 3)));
    });
}

// Calls body with a value of a dense weight's element type
template <class Body>
inline void with_float(BlockType type, Body&& body) {
    if (type == BlockType::f32)
        body(float{});
    else if (type == BlockType::bf16)
        body(bf16{});
    else
        body(f16{});
}

struct Weight {
    const uint8_t* data;
    int64_t row_bytes, num_rows, row_length;
    BlockType type;
    BlockSize block;
    Dequantize dequantize;

    explicit Weight(const Linear& a)
        : data(static_cast<const uint8_t*>(a.weight.data)),
          row_bytes(a.weight.stride[0] * item_size(a.weight.dtype)), num_rows(a.weight.shape[0]),
          row_length(a.x.shape[a.x.ndim - 1]), type(a.type), block(block_size(a.type)),
          dequantize(dequantizer(a.type)) {}

    bool is_float() const { return block.elements == 1; }

    const uint8_t* at(int64_t n, int64_t k) const {
        return data + n * row_bytes + k / block.elements * block.bytes;
    }

    // The chunk of K from `k` of the rows from `n` on, zeros to the end of its last vector
    void read(float* panel, int64_t n, int64_t k, int64_t length) const {
        for (int i = 0; i < kPanel && n + i < num_rows; ++i, panel += kChunk) {
            dequantize(panel, at(n + i, k), length);
            for (int64_t end = length; end % W; ++end) panel[end] = 0;
        }
    }
};

// A band and a strip, with the span of K that is at hand
struct Part {
    alignas(64) float room[kRoom], panel[kPanel * kChunk], total[kDenseBandRows * kDenseStripOutputs];
    int64_t num_rows, span;
    const float* x;    // the span of the band's first row,
    int64_t x_stride;  // and from row to row

    explicit Part(int64_t num_rows) : num_rows(num_rows), span(kRoom / num_rows / kChunk * kChunk) {
        memset(total, 0, num_rows * kDenseStripOutputs * sizeof(float));
    }

    // The rows of x from `m` on, from `k` on: where they lie, or widened, with zeros to the end of their last
    // vector
    template <class T>
    void take(const Tensor& from, int64_t m, int64_t k, int64_t length) {
        const Rows rows{from};
        if constexpr (std::is_same_v<T, float>) {
            x = rows.at<const float>(m) + k,
            x_stride = num_rows > 1 ? rows.at<const float>(m + 1) + k - x : 0;
            bool is_even = length % W == 0;
            for (int64_t r = 2; is_even && r < num_rows; ++r)
                is_even = rows.at<const float>(m + r) + k == x + r * x_stride;
            if (is_even) return;
        }
        for (int64_t r = 0; r < num_rows; ++r) {
            float* row = room + r * span;
            map([](vf v) { return v; }, length, row, rows.at<const T>(m + r) + k);
            for (int64_t end = length; end % W; ++end) row[end] = 0;
        }
        x = room, x_stride = span;
    }

    // total[r : r + R][n : n + G] += the products with the chunk of G weight rows, which x has from `k` on
    template <int R, int G, class T>
    void add_rows(int64_t r, int64_t n, int64_t k, const T* rows, int64_t stride, int64_t length) {
        constexpr int C = kDenseSumVectors / R;
        for (int c = 0; c < G; c += C)
            add_tile<R, C>(total + r * kDenseStripOutputs + n + c, x + r * x_stride + k, x_stride,
                           rows + c * stride, stride, length);
    }

    // The same for a panel, of which G rows stay in the cache while the band passes by
    template <int G, class T>
    void add_panel(int64_t n, int64_t k, const T* panel, int64_t stride, int64_t length) {
        for (int c = 0; c < kPanel; c += G) {
            const T* rows = panel + c * stride;
            int64_t r = 0;
            for (; r + 4 <= num_rows; r += 4) add_rows<4, G>(r, n + c, k, rows, stride, length);
            if (r + 2 <= num_rows) add_rows<2, G>(r, n + c, k, rows, stride, length), r += 2;
            if (r < num_rows)
                for (int i = 0; i < G; ++i)
                    total[r * kDenseStripOutputs + n + c + i] +=
                        dot(x + r * x_stride + k, rows + i * stride, length);
        }
    }

    // For one row of x: each weight row from end to end, which is how memory is read fastest
    template <class T>
    void add_whole_rows(const Weight& weight, int64_t n, int64_t count, int64_t first, int64_t length) {
        for (int64_t c = 0; c < count; ++c) {
            const T* row = reinterpret_cast<const T*>(weight.at(n + c, first));
            for (int64_t k = 0; k < length; k += kChunk)
                total[c] += dot(x + k, row + k, smaller(kChunk, length - k));
        }
    }

    template <class T>
    void add_in_place(const Weight& weight, int64_t n, int64_t column, int64_t first, int64_t k,
                      int64_t length) {
        const T* rows = reinterpret_cast<const T*>(weight.at(n, first + k));
        add_panel<kDenseRowsInPlace>(column, k, rows, weight.row_bytes / static_cast<int64_t>(sizeof(T)),
                                     length);
    }

    // total[:][column : column + kPanel] += the products with a chunk of the weight rows from `n` on
    void add(const Weight& weight, int64_t n, int64_t column, int64_t first, int64_t k, int64_t length) {
        if (n + kPanel <= weight.num_rows && is_read_in_place(weight))
            return with_float(weight.type, [&](auto type) {
                add_in_place<decltype(type)>(weight, n, column, first, k, length);
            });
        weight.read(panel, n, first + k, length);
        add_panel<kPanel>(column, k, panel, kChunk, length);
    }

    // Few rows do not pay for a copy. Of float32, many do where weight rows, a page apart, share the same
    // cache lines.
    bool is_read_in_place(const Weight& weight) const {
        if (weight.type == BlockType::f32) return num_rows <= 16 || weight.row_bytes % 4096;
        return num_rows <= 4 && weight.is_float();
    }

    // y[m : m + num_rows][n : n + count]
    template <class T>
    void finish(const Linear& a, int64_t m, int64_t n, int64_t count) const {
        const T* bias = a.bias.data ? static_cast<const T*>(a.bias.data) + n : nullptr;
        for (int64_t r = 0; r < num_rows; ++r)
            write_sums(Rows{a.y}.at<T>(m + r) + n, total + r * kDenseStripOutputs, bias, count);
    }
};

template <class T>
void multiply(const Linear& a, const Weight& weight, int64_t m, int64_t num_rows, int64_t n, int64_t count) {
    Part& part = *own_scratch<Part>(num_rows);
    for (int64_t first = 0; first < weight.row_length; first += part.span) {
        const int64_t length = smaller(part.span, weight.row_length - first);
        part.take<T>(a.x, m, first, length);
        if (num_rows == 1 && weight.is_float()) {
            with_float(weight.type, [&](auto type) {
                part.add_whole_rows<decltype(type)>(weight, n, count, first, length);
            });
            continue;
        }
        for (int64_t column = 0; column < count; column += kPanel)
            for (int64_t k = 0; k < length; k += kChunk)
                part.add(weight, n + column, column, first, k, smaller(kChunk, length - k));
    }
    part.finish<T>(a, m, n, count);
}

// The outputs from `begin` to `end`
template <class T>
void multiply_part(const Linear& a, const Weight& weight, int64_t begin, int64_t end) {
#if defined(INFINI_AMX)
    if (weight.type == BlockType::bf16 && weight.row_length % kLine == 0) {
        const TileWeight tiles{weight.data, weight.row_bytes, weight.num_rows, weight.row_length};
        for (int64_t n = begin; n < end; n += kTileStripOutputs)
            multiply_tiles<T>(a, tiles, n, smaller(kTileStripOutputs, end - n));
        return;
    }
#endif
    const int64_t num_rows = Rows{a.x}.count();
    for (int64_t m = 0; m < num_rows; m += kDenseBandRows)
        for (int64_t n = begin; n < end; n += kDenseStripOutputs)
            multiply<T>(a, weight, m, smaller(kDenseBandRows, num_rows - m), n,
                        smaller(kDenseStripOutputs, end - n));
}

}  // namespace

void multiply_outputs(const Linear& a, int64_t begin, int64_t end) {
    const Weight weight(a);
    with_type(a.x.dtype, [&](auto type) { multiply_part<decltype(type)>(a, weight, begin, end); });
}

namespace {

int64_t product(const Linear& a) {
    if (Rows{a.x}.count() == 0) return kOk;  // which tile registers cannot be told of
    const Weight weight(a);
    const int64_t num_panels = (weight.num_rows + kPanel - 1) / kPanel;
    int64_t grain = kGrainElements / (kPanel * (weight.row_length + 1)) + 1;
    // Of several rows, which are widened for each run of panels anew, runs are no shorter than they must be.
    const int64_t shortest = smaller(kDenseStripOutputs / kPanel, num_panels / num_threads());
    if (Rows{a.x}.count() > 1 && shortest > grain) grain = shortest;
    parallel_for(num_panels, grain, [&](int64_t begin, int64_t end) {
        multiply_outputs(a, begin * kPanel, smaller(end * kPanel, weight.num_rows));
    });
    return kOk;
}

}  // namespace

int64_t linear(const Linear& a) { return product(a); }

int64_t quantized_linear(const QuantizedLinear& a) { return product(a); }

}  // namespace infini::INFINI_LEVEL
