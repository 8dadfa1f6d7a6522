// linear: y[m][n] = sum over k of x[m][k] * weight[n][k] + bias[n], summed in float32; weight dense or in
// blocks. Each pair (m, n) is summed in the same order, which K alone fixes: each chunk of K in sixteen sums
// that take turns, of which every fourth is added to one of four totals, chunk after chunk; then these, then
// the bias. So a row has the same bits alone and among others, whatever the tiles and threads.
//
// A part of y is made at a time: a band of rows of x and a strip of outputs, whose totals lie in memory
// between chunks. x is widened to float32 once for the strip; weights are, 16 rows of a chunk at a time, once
// for the band. Few rows of x meet dense weights where these lie.
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
constexpr int kSums = 16;        // of a chunk of a dot product, on every level
constexpr int kTurns = kSums / W;
constexpr int kTotals = 4;  // to which those of all chunks add up
// Floats of x: the fewer its rows, the longer their span of K
constexpr int64_t kRoom = kDenseBandRows * kChunk;
constexpr int64_t kOutputs = kDenseBandRows * kDenseStripOutputs;

// p[0:length] and zeros up to a multiple of kSums
inline void end_with_zeros(float* p, int64_t length) {
    for (int64_t end = length; end % kSums; ++end) p[end] = 0;
}

// Loaded once, where a compiler would read memory anew for each use
INFINI_INLINE inline vf in_register(vf v) {
#if defined(INFINI_AVX512) || defined(INFINI_AVX2)
    asm("" : "+v"(v));
#endif
    return v;
}

// The totals of C dot products gain a vector of sums each, every fourth lane by itself
template <int C>
INFINI_INLINE inline void add_sums(float* totals, const vf (&s)[C]) {
    constexpr int kAtOnce = W / kTotals;
    unrolled<C / kAtOnce>([&](auto i) INFINI_INLINE {
        const vf* v = s + i * kAtOnce;
        float* at = totals + i * W;
#if defined(INFINI_AVX512)
        const auto halved = [](vf a, vf b) INFINI_INLINE {
            return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
        };
        const vf ab = halved(v[0], v[1]), cd = halved(v[2], v[3]);
        store(at, load(at) + (_mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd)));
#elif defined(INFINI_AVX2)
        const vf low = _mm256_permute2f128_ps(v[0], v[1], 0x20);
        store(at, load(at) + (low + _mm256_permute2f128_ps(v[0], v[1], 0x31)));
#else
        store(at, load(at) + v[0]);
#endif
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

    // The chunk of K from `k` of the rows from `n` on, with zeros at their end
    void read(float* panel, int64_t n, int64_t k, int64_t length) const {
        for (int i = 0; i < kPanel && n + i < num_rows; ++i, panel += kChunk) {
            dequantize(panel, at(n + i, k), length);
            end_with_zeros(panel, length);
        }
    }
};

// The chunk of a panel that is read next, whose lines tiles ask for: some in each of `num_steps`, or in some
struct AskedPanel {
    const uint8_t* row;
    int64_t row_bytes, num_lines, lines_at_once, steps_apart, line = 0, step = 0;

    AskedPanel(const Weight& weight, int64_t n, int64_t k, int64_t num_steps)
        : row(weight.at(n, k)), row_bytes(weight.row_bytes),
          num_lines((kChunk / weight.block.elements * weight.block.bytes + 63) / 64),
          lines_at_once((kPanel * num_lines + num_steps - 1) / num_steps),
          steps_apart(lines_at_once > 1 ? 1 : num_steps / (kPanel * num_lines)) {}

    INFINI_INLINE void ask(int64_t) {
        if (++step < steps_apart) return;
        step = 0;
        for (int64_t i = 0; i < lines_at_once; ++i) ask_for(row + (line + i) * 64);
        line += lines_at_once;
        if (line >= num_lines) row += row_bytes, line = 0;
    }
};

// The chunk of C rows that is read where it lies next, in step with the one before; null where it has been
template <int C, class T>
struct AskedRows {
    const T* rows;
    int64_t stride;

    INFINI_INLINE void ask(int64_t k) const {
        if (rows && k % (64 / static_cast<int64_t>(sizeof(T))) == 0)
            unrolled<C>([&](auto c) INFINI_INLINE { ask_for(rows + c * stride + k); });
    }
};

// R rows of x, zeros to a multiple of kSums, which meet a chunk of C of weight
template <int R, int C, class T>
struct Tile {
    const float* x;
    int64_t x_stride;
    const T* weight;
    int64_t stride, length;

    // What S vectors of sums gain from the vectors of weight that `read` finds at k
    template <int S, class Read>
    INFINI_INLINE void add_vectors(vf (&s)[S][R][C], int64_t k, Read read) const {
        unrolled<S>([&](auto turn) INFINI_INLINE {
            const int64_t at = k + turn * W;
            vf v[R];
            unrolled<R>([&](auto r) INFINI_INLINE { v[r] = load(x + r * x_stride + at); });
            unrolled<C>([&](auto c) INFINI_INLINE {
                const vf w = in_register(read(weight + c * stride + at, at));
                unrolled<R>([&](auto r) INFINI_INLINE { s[turn][r][c] = fma(v[r], w, s[turn][r][c]); });
            });
        });
    }

    // totals += the dot products, S of their vectors at a time; a row of totals is `pitch` floats long
    template <int S, class Asked>
    INFINI_INLINE void add_to(float* totals, int64_t pitch, Asked& asked) const {
        unrolled<R>([&](auto r) { __builtin_prefetch(totals + r * pitch); });
        for (int turn = 0; turn < kTurns; turn += S) {
            vf s[S][R][C] = {};
            int64_t k = 0;
            for (; k + kSums <= length; k += kSums) {
                if (turn == 0) asked.ask(k);
                add_vectors(s, k + turn * W, [](const T* w, int64_t) INFINI_INLINE { return load(w); });
            }
            if (k < length)
                add_vectors(s, k + turn * W, [&](const T* w, int64_t at) {
                    return load_n(w, at < length ? smaller(W, length - at) : 0);
                });
            unrolled<S>([&](auto i) INFINI_INLINE {
                unrolled<R>([&](auto r) INFINI_INLINE { add_sums(totals + r * pitch, s[i][r]); });
            });
        }
    }
};

// A band and a strip, with the span of K that is at hand
struct Part {
    alignas(64) float x[kRoom + kDenseBandRows * kSums], panel[kPanel * kChunk], totals[kOutputs * kTotals];
    int64_t num_rows, span, x_stride, pitch;

    Part(int64_t num_rows, int64_t num_outputs)
        : num_rows(num_rows), span(kRoom / num_rows / kChunk * kChunk), x_stride(span + kSums),
          pitch((num_outputs + kPanel - 1) / kPanel * kPanel * kTotals) {
        memset(totals, 0, num_rows * pitch * sizeof(float));
    }

    // The rows of x from `m` on, from `k` on, side by side whatever lay between them
    template <class T>
    void take(const Tensor& from, int64_t m, int64_t k, int64_t length) {
        for (int64_t r = 0; r < num_rows; ++r) {
            float* row = x + r * x_stride;
            map([](vf v) { return v; }, length, row, Rows{from}.at<const T>(m + r) + k);
            end_with_zeros(row, length);
        }
    }

    // Of the rows of x from `r` on with C of weight: as many as leave the rest even, `most` at most. Returns
    // the row after them.
    template <int most, int C, int R = most, class T, class Asked>
    INFINI_INLINE int64_t add_some(int64_t r, int64_t column, int64_t k, const T* weight, int64_t stride,
                                   int64_t length, Asked& asked) {
        const int64_t left = num_rows - r, num_tiles = (left + most - 1) / most;
        if constexpr (R > 1)
            if (left <= (R - 1) * num_tiles)
                return add_some<most, C, R - 1>(r, column, k, weight, stride, length, asked);
        Tile<R, C, T>{x + r * x_stride + k, x_stride, weight, stride, length}
            .template add_to<R == 1 ? kTurns : 1>(totals + r * pitch + column * kTotals, pitch, asked);
        return r + R;
    }

    // The products with the weight rows from `n` on, where they lie. What the same rows have next is asked
    // for, then what the first chunk of those that follow has.
    template <class T>
    void add_in_place(const Weight& weight, int64_t n, int64_t column, int64_t first, int64_t length) {
        constexpr int C = kDenseRowsInPlace;
        const int64_t stride = weight.row_bytes / static_cast<int64_t>(sizeof(T));
        const T* rows = reinterpret_cast<const T*>(weight.at(n, first));
        for (int64_t c = 0; c < kPanel; c += C, rows += C * stride, column += C)
            for (int64_t k = 0; k < length; k += kChunk) {
                AskedRows<C, T> asked{k + kChunk < length ? rows + k + kChunk : rows + C * stride, stride};
                for (int64_t r = 0; r < num_rows; asked.rows = nullptr)
                    r = add_some<kDenseRowsAtOnce, C>(r, column, k, rows + k, stride,
                                                      smaller(kChunk, length - k), asked);
            }
    }

    // The products with a chunk of a panel, of which C rows stay in the cache while the band passes by
    void add_panel(int64_t column, int64_t k, int64_t length, AskedPanel asked) {
        constexpr int C = kDenseTileOutputs;
        for (int c = 0; c < kPanel; c += C)
            for (int64_t r = 0; r < num_rows;)
                r = add_some<kDenseTileRows, C>(r, column + c, k, panel + c * kChunk, kChunk, length, asked);
    }

    // totals[:][column : column + kPanel] += the products with the weight rows from `n` on
    void add(const Weight& weight, int64_t n, int64_t column, int64_t first, int64_t length) {
        if (num_rows <= kDenseFewRows && weight.is_float() && n + kPanel <= weight.num_rows)
            return with_float(weight.type, [&](auto type) {
                add_in_place<decltype(type)>(weight, n, column, first, length);
            });
        const int64_t num_steps =
            kPanel / kDenseTileOutputs * (num_rows / kDenseTileRows + 1) * (kChunk / kSums);
        for (int64_t k = 0; k < length; k += kChunk) {
            const int64_t at_hand = smaller(kChunk, length - k), next = k + kChunk < length ? k + kChunk : 0;
            weight.read(panel, n, first + k, at_hand);
            add_panel(column, k, at_hand, AskedPanel(weight, next ? n : n + kPanel, first + next, num_steps));
        }
    }

    // y[m : m + num_rows][n : n + count]
    template <class T>
    void finish(const Linear& a, int64_t m, int64_t n, int64_t count) {
        const T* bias = a.bias.data ? static_cast<const T*>(a.bias.data) + n : nullptr;
        for (int64_t r = 0; r < num_rows; ++r) {
            float* row = totals + r * pitch;
            for (int64_t c = 0; c < count; ++c) {
                const float* total = row + c * kTotals;
                row[c] = (total[0] + total[1]) + (total[2] + total[3]);
            }
            write_sums(Rows{a.y}.at<T>(m + r) + n, row, bias, count);
        }
    }
};

template <class T>
void multiply(const Linear& a, const Weight& weight, int64_t m, int64_t num_rows, int64_t n, int64_t count) {
    Part& part = *own_scratch<Part>(num_rows, count);
    for (int64_t first = 0; first < weight.row_length; first += part.span) {
        const int64_t length = smaller(part.span, weight.row_length - first);
        part.take<T>(a.x, m, first, length);
        for (int64_t column = 0; column < count; column += kPanel)
            part.add(weight, n + column, column, first, length);
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
    for (int64_t m = 0; m < num_rows; m += kDenseBandRows) {
        const int64_t band = smaller(kDenseBandRows, num_rows - m);
        const int64_t strip = kOutputs / band / kPanel * kPanel;
        for (int64_t n = begin; n < end; n += strip)
            multiply<T>(a, weight, m, band, n, smaller(strip, end - n));
    }
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
