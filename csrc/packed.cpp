// packed_linear: y = x Wᵀ + bias in float32, over weights packed 16 rows side by side (blocks.h); of up to
//                three weights the columns one after another; + residual; or, of two, gate(first) * second,
//                the gate being silu or gelu_tanh, which, rounded as x is, a third then multiplies.
//   y[m][n] = sum over groups g of x_scale[m][g] * (scale[n][g] * dot[m][n][g] + minimum[n][g] * sum[m][g])
// The activations of a group of 32 are rounded to x_scale * q (rounding.h); sum is the sum of its q, and dot
// the integer dot product of q with the weight's fields (dots.h, amx_packed.h). Blocks of 256, whose groups
// are scaled by whole numbers, are summed as such where it pays: all of a block in tile registers
// (amx_whole.h), 64 values with AVX-512 (dots_shorts.h), whose activations share an x_scale (dots_whole.h).
// Integers are exact in any order and the float32 sum runs over the groups, spans or blocks from first to
// last, so a row has the same bits alone and among others, whatever the tiles and threads.
// The words: a panel is 16 rows of weight side by side; a strip, panels of one weight that are multiplied
// together; a band, rows of x that meet them. A block is what GGUF cuts a row of weight into; a chunk, blocks
// of a panel, unpacked; a group, weights that share a scale; a span, values of x that do (256, 64, or a
// group's 32). A plane is one byte of each rounded value; a block of rows, up to 16 of x whose groups lie
// side by side (Activations); a tile, rows of x whose sums are in registers.
// count_products: `rounds` of what such products stand on, on every thread (peak.h); returns how many
//                 products those were.
#include "dots_chunk.h"
#include "dots_direct.h"
#include "products.h"

#if defined(INFINI_I8MM)
#include "dots_pairs.h"
#endif

#if defined(__AMX_INT8__)
#define INFINI_AMX
#include "amx_packed.h"
#include "amx_whole.h"
#elif defined(INFINI_AVX512)
#define INFINI_SHORTS
#include "dots_shorts.h"
#endif
#include "peak.h"

namespace infini::INFINI_LEVEL {
namespace {

// What some kernels add to: of a panel, with the rows that fill up a block
inline void clear(float* total, int64_t num_rows) {
    memset(total, 0, (num_rows + kRowBlock - 1) / kRowBlock * kRowBlock * kRows * sizeof(float));
}

// total[row][0:16] of one panel, straight from memory or by pairs of rows
template <class Block, int P>
void multiply_panel(float* total, const uint8_t* packed, const Activations& x, int64_t row,
                    int64_t num_rows) {
    if constexpr (kIsWhole<Block, P>) {
        clear(total, num_rows);
        add_few_whole_rows<Block, P, kPackedFewTileRows>(total, packed, x, row, num_rows);
#if defined(INFINI_I8MM)
    } else if (x.has_pairs()) {
        clear(total, num_rows);
        add_paired_rows<Block, P>(total, packed, x, row, num_rows);
#endif
    } else {
        multiply_few_rows<Block, P, kPairsRows ? 1 : kPackedFewTileRows>(total, packed, x, row, num_rows);
    }
}

#if defined(INFINI_AMX)
// total[panel][row][0:16], R rows at a time, in tiles
template <class Block, int P, int R>
void multiply_in_tiles(float* total, const uint8_t* packed, int num_panels, const Activations& x, int64_t row,
                       int64_t num_rows) {
    for (int i = 0; i < num_panels; ++i) clear(total + i * kPackedBandRows * kRows, num_rows);
    if constexpr (kIsWhole<Block, P>)
        add_whole_blocks<Block, P, R>(total, packed, num_panels, x, row, num_rows);
    else
        add_blocks<Block, P, R>(total, packed, num_panels, x, row, num_rows);
}
#endif

// Rows of x in a tile register, 1 where vectors multiply
template <class Block, int P>
int rows_in_tiles([[maybe_unused]] const Activations& x, [[maybe_unused]] int64_t num_rows) {
#if defined(INFINI_AMX)
    constexpr int kFew = kIsWhole<Block, P> ? kPackedFewTileRows : kPackedFewRows;
    const int rows = 1 << x.log_rows;
    if (num_rows > kFew && suits_tiles<Block, P>(x) && rows >= kPackedFewestTileRows) return rows;
#endif
    return 1;
}

// total[panel][row][0:16] of num_panels panels that follow one another
template <class Block, int P>
void multiply_panels(float* total, const uint8_t* packed, int num_panels, const Activations& x, int64_t row,
                     int64_t num_rows) {
#if defined(INFINI_AMX)
    const int in_tiles = rows_in_tiles<Block, P>(x, num_rows);
    if (in_tiles == kRowBlock)
        return multiply_in_tiles<Block, P, kRowBlock>(total, packed, num_panels, x, row, num_rows);
    if (in_tiles == kPackedFewestTileRows)
        return multiply_in_tiles<Block, P, kPackedFewestTileRows>(total, packed, num_panels, x, row,
                                                                  num_rows);
#endif
#if defined(INFINI_SHORTS)
    if constexpr (kIsWhole<Block, P>)
        if (x.has_shorts()) return multiply_shorts<Block>(total, packed, num_panels, x, row, num_rows);
#endif
    if constexpr (!kPairsRows && !kIsWhole<Block, P>)
        if (num_rows > kPackedFewRows)
            return multiply_rows<Block, P>(total, packed, num_panels, x, row, num_rows);
    const int64_t panel_bytes = x.num_groups * kGroup / Block::kElements * Block::kBytes * kRows;
    for (int i = 0; i < num_panels; ++i, total += kPackedBandRows * kRows, packed += panel_bytes)
        multiply_panel<Block, P>(total, packed, x, row, num_rows);
}

// Panels of one weight that are multiplied together
struct Strip {
    int weight, num_panels;
    int64_t row, column;  // the first row of the weight, and the first column of y
};

// Rows of a band, where all threads share out a product: so few that two threads have each, for the more
// threads have read a line, the longer it takes to be written again. Each band unpacks the whole weight.
inline int64_t shared_band_rows(int64_t num_rows) {
    const int64_t fair = (2 * num_rows / num_threads() + kRowBlock - 1) / kRowBlock * kRowBlock;
    return smaller(larger(fair, kPackedFewestBandRows), kPackedBandRows);
}

// Panels of a strip at most, where a gate's make whole spans of what the next product takes
constexpr int kStripPanels = larger(kPackedPanels, kWholeSpan == kMostGatedSpan ? 4 : 2);

struct Problem {
    const PackedLinear& a;
    const Activations& x;
    const int64_t band_rows;
    const Activations* gated;  // what a gate gives, rounded; without, y is
    const int64_t width;       // panels of a strip
    int64_t num_strips[kPackedWeights], all_strips = 0;

    Problem(const PackedLinear& a, const Activations& x, int64_t band_rows,
            const Activations* gated = nullptr)
        : a(a), x(x), band_rows(band_rows), gated(gated),
          width(larger(gated ? gated->span() / kRows : 1, usual_width(x.num_rows))) {
        for (int i = 0; i < a.count; ++i) num_strips[i] = (num_panels(a.num_rows[i]) + width - 1) / width;
        for (int i = 0; i < (a.gate == Gate::none ? a.count : 1); ++i) all_strips += num_strips[i];
    }

    static int64_t usual_width(int64_t num_rows) {
        return num_rows <= kPackedFewRows    ? 1
               : num_rows <= kPackedNearRows ? kPackedNearPanels
                                             : kPackedPanels;
    }

    static int64_t num_panels(int64_t num_rows) { return (num_rows + kRows - 1) / kRows; }

    Strip strip(int64_t index) const {
        int weight = 0;
        int64_t column = 0;
        for (; index >= num_strips[weight]; ++weight)
            index -= num_strips[weight], column += a.num_rows[weight];
        const int64_t row = index * width * kRows;
        return {weight, static_cast<int>(smaller(width, num_panels(a.num_rows[weight] - row))), row,
                column + row};
    }

    // total[panel][row][0:16] of one weight, with its bias
    void multiply(float* total, int weight, const Strip& s, int64_t m, int64_t num_rows) const {
        const int64_t panel_bytes = a.weight[weight].shape[1];
        const uint8_t* packed =
            static_cast<const uint8_t*>(a.weight[weight].data) + s.row / kRows * panel_bytes;
        if (x.num_groups == 0)  // nothing is multiplied
            memset(total, 0, s.num_panels * kPackedBandRows * kRows * sizeof(float));
        for (int i = 0; x.num_groups > 0 && i < s.num_panels; i += kPackedPanels)
            multiply_some(total + i * kPackedBandRows * kRows, a.type[weight], packed + i * panel_bytes,
                          static_cast<int>(smaller(kPackedPanels, s.num_panels - i)), m, num_rows);
        if (!a.bias[weight].data) return;
        const float* bias = static_cast<const float*>(a.bias[weight].data) + s.row;
        for (int64_t c = 0; c < smaller(s.num_panels * kRows, a.num_rows[weight] - s.row); ++c)
            for (int64_t r = 0; r < num_rows; ++r)
                total[(c / kRows * kPackedBandRows + r) * kRows + c % kRows] += bias[c];
    }

    void multiply_some(float* total, BlockType type, const uint8_t* packed, int count, int64_t m,
                       int64_t num_rows) const {
        with_block(type, [&](auto block) {
            using Block = decltype(block);
            if (x.num_planes == 2)
                multiply_panels<Block, 2>(total, packed, count, x, m, num_rows);
            else
                multiply_panels<Block, 1>(total, packed, count, x, m, num_rows);
        });
    }

    // Spans of value(total) are rounded.
    template <class Value>
    void round(const Strip& s, const float* total, int64_t m, int64_t num_rows, Value value) const {
        const int64_t begin = s.column / gated->span(), end = begin + s.num_panels * kRows / gated->span(),
                      last = m + num_rows == x.num_rows ? gated->filled_rows() : m + num_rows;
        float row[kStripPanels * kRows];
        for (int64_t r = m; r < m + num_rows; ++r, total += kRows) {
            for (int i = 0; i < s.num_panels; ++i)
                write_row(row + i * kRows, nullptr, total + i * kPackedBandRows * kRows, value);
            round_spans(*gated, r, row, begin, end);
        }
        for (int64_t r = m + num_rows; r < last; ++r) clear_spans(*gated, r, begin, end);
    }

    // y = value(total) + residual, which may be y itself; value(t) is that of a vector of totals
    template <class Value>
    void write(const Strip& s, const float* total, int64_t m, int64_t num_rows, Value value) const {
        for (int64_t r = 0; r < num_rows; ++r, total += kRows) {
            float* y = Rows{a.y}.at<float>(m + r) + s.column;
            const float* residual = a.residual.data ? Rows{a.residual}.at<float>(m + r) + s.column : nullptr;
            const float* t = total;
            int64_t left = smaller(s.num_panels * kRows, a.num_rows[s.weight] - s.row);
            for (; left >= kRows; left -= kRows, t += kPackedBandRows * kRows, y += kRows) {
                write_row(y, residual, t, value);
                if (residual) residual += kRows;
            }
            if (left > 0) write_part(y, residual, t, left, value);
        }
    }

    template <class Value>
    static INFINI_INLINE void write_row(float* y, const float* residual, const float* t, Value value) {
        for (int c = 0; c < kRows; c += W)
            store(y + c, residual ? load(residual + c) + value(t + c) : value(t + c));
    }

    template <class Value>
    static __attribute__((noinline)) void write_part(float* y, const float* residual, const float* t,
                                                     int64_t length, Value value) {
        float part[kRows], added[kRows] = {};
        if (residual) memcpy(added, residual, length * sizeof(float));
        write_row(part, residual ? added : nullptr, t, value);
        memcpy(y, part, length * sizeof(float));
    }

    void run(const Strip& s, int64_t band) const {
        const int64_t m = band * band_rows, num_rows = smaller(band_rows, x.num_rows - m);
        constexpr int kTotal = kStripPanels * kPackedBandRows * kRows;
        alignas(64) float total[2 * kTotal];
        multiply(total, s.weight, s, m, num_rows);
        if (a.gate == Gate::none) return write(s, total, m, num_rows, [](const float* t) { return load(t); });
        multiply(total + kTotal, 1, s, m, num_rows);
        const auto finish = [&](auto gate) {
            const auto value = [gate](const float* t) { return gate(load(t)) * load(t + kTotal); };
            gated ? round(s, total, m, num_rows, value) : write(s, total, m, num_rows, value);
        };
        if (a.gate == Gate::silu)
            finish([](vf x) { return x * sigmoid(x); });
        else
            finish([](vf x) { return gelu_tanh(x); });
    }

    int64_t num_bands() const { return (x.num_rows + band_rows - 1) / band_rows; }

    // Pieces of work are the strips of one band of rows after those of another, so that a thread has few
    // bands, which others have written, to read.
    void run_pieces(int64_t begin, int64_t end) const {
        while (begin < end) {
            const int64_t band = begin / all_strips, stop = smaller(end, (band + 1) * all_strips);
            for (; begin < stop; ++begin) run(strip(begin - band * all_strips), band);
        }
    }
};

}  // namespace

void multiply_outputs(const PackedLinear& a, const Activations& x, int64_t begin, int64_t end) {
    const Problem problem(a, x, kPackedBandRows);
    for (int64_t band = 0; band < problem.num_bands(); ++band)
        for (int64_t row = begin; row < end; row += problem.width * kRows) {
            const int64_t num_panels = smaller(problem.width, Problem::num_panels(end - row));
            problem.run({0, static_cast<int>(num_panels), row, row}, band);
        }
}

namespace {

template <class Block, int P>
void want(Activations& x, int64_t band_rows) {
    const int64_t last_rows = (x.num_rows - 1) % band_rows + 1;
    x.has_sums |= rows_in_tiles<Block, P>(x, last_rows) == 1;
    x.has_totals |= Block::kHasMinimum;
    x.has_halves |= Block::kHasMinimum && Block::kGroup < kGroup;
}

// What the first weights multiply, with what their products take of it
Activations rounded_for(const PackedLinear& a, int64_t num_rows, int64_t length, int64_t band_rows) {
    Activations x(num_rows, length, rounding_of(a.type[0], a.activation_bits, kWholes));
    x.has_sums = x.has_totals = x.has_halves = false;
    for (int i = 0; i < a.num_first(); ++i)
        with_block(a.type[i], [&](auto block) {
            using Block = decltype(block);
            x.num_planes == 2 ? want<Block, 2>(x, band_rows) : want<Block, 1>(x, band_rows);
        });
    return x;
}

void share_out(const Problem& problem) {
    const Activations& x = problem.x;
    const int64_t row_length = x.num_groups * kGroup, grain = kGrainElements / (kRows * (row_length + 1)) + 1;
    parallel_for(problem.num_bands() * problem.all_strips, grain, [&](int64_t begin, int64_t end) {
        if (x.num_rows == 1) x.prefetch();
        problem.run_pieces(begin, end);
    });
}

// The product of what a gate gives with the third weight
PackedLinear last_of(const PackedLinear& a) {
    PackedLinear last = a;
    last.weight[0] = a.weight[2], last.bias[0] = a.bias[2];
    last.type[0] = a.type[2], last.num_rows[0] = a.num_rows[2];
    last.count = 1, last.activation_bits = a.gated_bits, last.gate = Gate::none;
    return last;
}

// Of two products a gate gives what the third weight multiplies.
void multiply_gated(const PackedLinear& a, int64_t num_rows, int64_t band_rows) {
    const PackedLinear last = last_of(a);
    Activations x = rounded_for(a, num_rows, Rows{a.x}.length(), band_rows),
                gated = rounded_for(last, num_rows, a.num_rows[0], band_rows);
    const int64_t at = (x.num_bytes() + kPage - 1) / kPage * kPage;
    char* room = static_cast<char*>(scratch(Scratch::shared, at + gated.num_bytes()));
    x.put_into(room), gated.put_into(room + at);
    round_rows(x, a.x);
    share_out({a, x, band_rows, &gated});
    share_out({last, gated, band_rows});
}

}  // namespace

int64_t packed_linear(const PackedLinear& a) {
    const int64_t num_rows = Rows{a.x}.count(), band_rows = shared_band_rows(num_rows);
    if (a.has_last()) return multiply_gated(a, num_rows, band_rows), kOk;
    Activations x = rounded_for(a, num_rows, Rows{a.x}.length(), band_rows);
    x.put_into(scratch(Scratch::shared, x.num_bytes()));
    round_rows(x, a.x);
    share_out({a, x, band_rows});
    return kOk;
}

int64_t count_products(const CountProducts& a) {
    parallel_for(num_threads(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) multiply_at_hand(a.rounds);
    });
    return a.rounds * num_threads() * kProductsOfRound;
}

}  // namespace infini::INFINI_LEVEL
