// linear over bfloat16 weights in AMX tile registers, and for one row of x in vectors, with the same bits. x
// is taken as one bfloat16 if that is what it is, else as two, high + low, which keep 16 bits of it.
//
// K comes in spans of 16 lines of 32 values. A product of two rows is summed from span to span, in a span
// over its 16 pairs: pair j stands for the values 2j and 2j + 1 of every line, each summed line after line,
// then the two added, for the high plane and for the low. That is what a tile does with the pair of 16 rows;
// and lanes of a vector are pairs.
#pragma once
#include <type_traits>

#include "amx_bf16.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kSpan = kSide * kLine;       // of K
constexpr int kTileSize = kSide * kLine;   // values in a tile
constexpr int kTotalSize = kSide * kSide;  // sums in a tile
constexpr int kTogether = 4;               // tiles of weight that a tile of x meets while it is near,
constexpr int kPairs = 8;                  // in so many pairs at a time, which stay in the nearest cache

// How many values of bfloat16 stand for one of T
template <class T>
constexpr int kPlanes = std::is_same_v<T, bf16> ? 1 : 2;

// One plane of the 32 values from p on: the nearest bfloat16, or the one nearest to what is left. Of what is
// not finite, nothing is left.
template <class T>
inline __m512i plane_of(const T* p, int plane) {
    if constexpr (std::is_same_v<T, bf16>) {
        return _mm512_loadu_si512(p);
    } else {
        const auto rounded = [](vf a, vf b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); };
        const auto rest = [](vf v, __m256i high) {
            const __m512 d = v - (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
            return _mm512_maskz_mov_ps(
                _mm512_cmp_ps_mask(_mm512_abs_ps(d), _mm512_set1_ps(INFINITY), _CMP_LT_OQ), d);
        };
        const vf first = load(p), second = load(p + W);
        const __m512i high = rounded(first, second);
        if (plane == 0) return high;
        return rounded(rest(first, _mm512_castsi512_si256(high)),
                       rest(second, _mm512_extracti64x4_epi64(high, 1)));
    }
}

// ---- one row of x -----------------------------------------------------------------------------------------

// The two values of each pair as float32
inline vf first_of(__m512i pairs) { return (vf)_mm512_slli_epi32(pairs, 16); }
inline vf second_of(__m512i pairs) {
    return (vf)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
}

// sums[span][plane][0:R][pair]: those of a row of x, [line][plane][first or second][pair], with R of weight
template <int P, int R>
void sum_lines(float* sums, const float* x, const uint8_t* w, int64_t stride, int64_t num_lines) {
    for (int64_t line = 0; line < num_lines; sums += P * kTotalSize) {
        vf first[R][P] = {}, second[R][P] = {};
        for (const int64_t end = smaller(line + kSide, num_lines); line < end;
             ++line, x += P * 2 * kSide, w += 2 * kLine)
            unrolled<R>([&](auto r) INFINI_INLINE {
                ask_for(w + (R + r) * stride);  // which comes next
                const __m512i pairs = _mm512_loadu_si512(w + r * stride);
                unrolled<P>([&](auto p) INFINI_INLINE {
                    first[r][p] = fma(load(x + 2 * kSide * p), first_of(pairs), first[r][p]);
                    second[r][p] = fma(load(x + 2 * kSide * p + kSide), second_of(pairs), second[r][p]);
                });
            });
        unrolled<R>([&](auto r) INFINI_INLINE {
            unrolled<P>([&](auto p) INFINI_INLINE {
                store(sums + p * kTotalSize + r * kSide, first[r][p] + second[r][p]);
            });
        });
    }
}

// total[0:16] += the sums of 16 rows, span after span, pair after pair
template <int P>
void add_sums(float* total, const float* sums, int64_t num_spans) {
    vf t = load(total);
    for (int64_t span = 0; span < num_spans; ++span, sums += P * kTotalSize) {
        __m512i v[P][kSide];
        for (int p = 0; p < P; ++p) {
            for (int r = 0; r < kSide; ++r) v[p][r] = (__m512i)load(sums + p * kTotalSize + r * kSide);
            transpose(v[p]);
        }
        for (int pair = 0; pair < kSide; ++pair)
            for (int p = 0; p < P; ++p) t += (vf)v[p][pair];
    }
    store(total, t);
}

// Rows of bfloat16 that fill lines
struct TileWeight {
    const uint8_t* data;
    int64_t row_bytes, num_rows, row_length;
};

// total[0:count] += the products of a row of x with the weight rows from `n` on
template <class T>
void add_alone(float* total, const T* row, const TileWeight& weight, int64_t n, int64_t count) {
    constexpr int P = kPlanes<T>;
    const FlushToZero flushed;
    struct Room {
        alignas(64) float x[kTileLoneElements * P], sums[kTileLoneElements / kSpan * P * kTotalSize];
    };
    auto& [x, sums] = *own_scratch<Room>();
    memset(sums, 0, sizeof sums);  // rows of weight beyond the last count as zeros
    for (int64_t k = 0; k < weight.row_length; k += kTileLoneElements) {
        const int64_t num_lines = smaller(kTileLoneElements, weight.row_length - k) / kLine,
                      stride = weight.row_bytes;
        for (int64_t i = 0; i < num_lines * P; ++i) {
            const __m512i pairs = plane_of(row + k + i / P * kLine, static_cast<int>(i % P));
            store(x + 2 * kSide * i, first_of(pairs)), store(x + 2 * kSide * i + kSide, second_of(pairs));
        }
        for (int64_t c = 0; c < count; c += kSide) {
            const uint8_t* w = weight.data + (n + c) * stride + 2 * k;
            const int64_t num_rows = smaller(kSide, count - c);
            int64_t r = 0;
            for (; r + kTileLoneRows <= num_rows; r += kTileLoneRows)
                sum_lines<P, kTileLoneRows>(sums + r * kSide, x, w + r * stride, stride, num_lines);
            for (; r < num_rows; ++r) sum_lines<P, 1>(sums + r * kSide, x, w + r * stride, stride, num_lines);
            add_sums<P>(total + c, sums, (num_lines + kSide - 1) / kSide);
        }
    }
}

// An infinite weight makes NaN of a value in two parts, of which one may be zero: what is NaN is summed again
// with values that are whole.
template <class T>
void sum_whole(float* sums, const T* row, const TileWeight& weight, int64_t n, int64_t count) {
    if constexpr (kPlanes<T> == 1) return;
    for (int64_t i = 0; i < count; ++i) {
        if (sums[i] == sums[i]) continue;
        const auto* w = reinterpret_cast<const bf16*>(weight.data + (n + i) * weight.row_bytes);
        vf s{};
        for (int64_t k = 0; k < weight.row_length; k += W) s = fma(load(row + k), load(w + k), s);
        sums[i] = sum(s);
    }
}

template <class T>
void multiply_alone(const Linear& a, const TileWeight& weight, int64_t n, int64_t count) {
    alignas(64) float total[kTileStripOutputs] = {};
    const T* row = Rows{a.x}.at<const T>(0);
    add_alone(total, row, weight, n, count);
    sum_whole(total, row, weight, n, count);
    write_sums(Rows{a.y}.at<T>(0) + n, total, a.bias.data ? static_cast<const T*>(a.bias.data) + n : nullptr,
               count);
}

// ---- several rows of x ------------------------------------------------------------------------------------

// 16 rows of 8 values: v[i] has row i, then row 8 + i
INFINI_INLINE inline void transpose_half(__m512i* v) {
    __m512i u[8];
    interleave<8>(u, v);
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    unrolled<4>([&](auto j) INFINI_INLINE {
        v[j] = _mm512_permutex2var_epi64(u[j], even, u[4 + j]);
        v[4 + j] = _mm512_permutex2var_epi64(u[j], odd, u[4 + j]);
    });
}

// total[tile][row][0:16] += the products of a block of x, [pair][plane][row][line], with `count` tiles of
// weight, [pair][tile][line][row]
template <int P, int count>
void add_pairs(float* total, const uint16_t* x, const uint16_t* w) {
    unrolled<count>([&](auto i) INFINI_INLINE { load_tile<i>(total + i * kTotalSize); });
    for (int pair = 0; pair < kPairs; ++pair, x += P * kTileSize, w += kTogether * kTileSize) {
        load_tile<4>(x);
        if constexpr (P == 2) load_tile<5>(x + kTileSize);
        unrolled<count>([&](auto i) INFINI_INLINE {
            load_tile<6>(w + i * kTileSize);
            add_product<i, 4, 6, Terms::pairs>();
            if constexpr (P == 2) add_product<i, 5, 6, Terms::pairs>();
        });
    }
    unrolled<count>([&](auto i) INFINI_INLINE { store_tile<i>(total + i * kTotalSize); });
}

// A band of rows of x and a strip of outputs
template <class T>
struct TilePart {
    static constexpr int P = kPlanes<T>;
    static constexpr int kColumns = kTogether * kSide;

    alignas(64) uint16_t x[kTileBandRows * kSpan * P];       // of a span, [block][pair][plane][row][line][2]
    alignas(64) uint16_t w[kTogether * kPairs * kTileSize];  // [pair][tile][line][row][2]
    alignas(64) float total[kTileBandRows * kTileStripOutputs];  // [column / 64][block][tile][row][16]
    const Linear& a;
    const TileWeight& weight;
    int64_t m, num_rows, n, count, num_blocks;

    TilePart(const Linear& a, const TileWeight& weight, int64_t m, int64_t num_rows, int64_t n, int64_t count)
        : a(a), weight(weight), m(m), num_rows(num_rows), n(n), count(count),
          num_blocks((num_rows + kSide - 1) / kSide) {
        memset(total, 0,
               (count + kColumns - 1) / kColumns * num_blocks * kTogether * kTotalSize * sizeof(float));
    }

    // A block's rows beyond the last are zero, and so are the lines beyond the last of K.
    void take(int64_t k, int64_t num_lines) {
        const int64_t padded_rows = num_blocks > 1 ? num_blocks * kSide : num_rows;
        for (int64_t r = 0; r < padded_rows; ++r)
            for (int plane = 0; plane < P; ++plane) {
                const T* row = r < num_rows ? Rows{a.x}.at<const T>(m + r) + k : nullptr;
                __m512i v[kSide];
                for (int line = 0; line < kSide; ++line)
                    v[line] = row && line < num_lines ? plane_of(row + line * kLine, plane) : __m512i{};
                transpose(v);
                uint16_t* to = x + (r / kSide * kSide * P + plane) * kTileSize + r % kSide * kLine;
                unrolled<kSide>(
                    [&](auto pair) INFINI_INLINE { _mm512_store_si512(to + pair * P * kTileSize, v[pair]); });
            }
    }

    // Half the pairs of a line of 16 weight rows; those beyond the last are zero
    void read_line(uint16_t* to, const uint8_t* from, int64_t rows_left) const {
        const auto row = [&](int i) INFINI_INLINE {
            return i < rows_left
                       ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * weight.row_bytes))
                       : __m256i{};
        };
        __m512i v[kPairs];
        unrolled<kPairs>([&](auto i) INFINI_INLINE {
            v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(row(i)), row(kPairs + i), 1);
        });
        transpose_half(v);
        unrolled<kPairs>(
            [&](auto pair) INFINI_INLINE { _mm512_store_si512(to + pair * kTogether * kTileSize, v[pair]); });
    }

    void read(int64_t row, int tiles, int64_t k, int64_t num_lines, int first_pair) {
        for (int tile = 0; tile < tiles; ++tile, row += kSide)
            for (int64_t line = 0; line < kSide; ++line) {
                uint16_t* to = w + tile * kTileSize + line * kLine;
                const uint8_t* from =
                    weight.data + row * weight.row_bytes + 2 * (k + line * kLine + 2 * first_pair);
                if (line < num_lines)
                    read_line(to, from, weight.num_rows - row);
                else
                    for (int pair = 0; pair < kPairs; ++pair)
                        memset(to + pair * kTogether * kTileSize, 0, 2 * kLine);
            }
    }

    void add(int64_t column, int64_t k, int64_t num_lines) {
        const int tiles = static_cast<int>(smaller(kTogether, (count - column + kSide - 1) / kSide));
        float* to = total + column / kColumns * num_blocks * kTogether * kTotalSize;
        const auto add = tiles == 1   ? add_pairs<P, 1>
                         : tiles == 2 ? add_pairs<P, 2>
                         : tiles == 3 ? add_pairs<P, 3>
                                      : add_pairs<P, 4>;
        for (int pair = 0; pair < kSide; pair += kPairs) {
            read(n + column, tiles, k, num_lines, pair);
            for (int64_t block = 0; block < num_blocks; ++block)
                add(to + block * kTogether * kTotalSize, x + (block * kSide + pair) * P * kTileSize, w);
        }
    }

    void write() {
        const T* bias = a.bias.data ? static_cast<const T*>(a.bias.data) + n : nullptr;
        for (int64_t r = 0; r < num_rows; ++r)
            for (int64_t c = 0; c < count; c += kSide) {
                T* y = Rows{a.y}.at<T>(m + r) + n + c;
                const int64_t tile =
                    (c / kColumns * num_blocks + r / kSide) * kTogether + c / kSide % kTogether;
                float* sums = total + tile * kTotalSize + r % kSide * kSide;
                const int64_t width = smaller(kSide, count - c);
                sum_whole(sums, Rows{a.x}.at<const T>(m + r), weight, n + c, width);
                write_sums(y, sums, bias ? bias + c : nullptr, width);
            }
    }

    void run() {
        for (int64_t k = 0; k < weight.row_length; k += kSpan) {
            const int64_t num_lines = smaller(kSpan, weight.row_length - k) / kLine;
            take(k, num_lines);
            for (int64_t column = 0; column < count; column += kColumns) add(column, k, num_lines);
        }
        write();
    }
};

template <class T>
void multiply_tiles(const Linear& a, const TileWeight& weight, int64_t n, int64_t count) {
    const int64_t num_rows = Rows{a.x}.count();
    if (num_rows == 1) return multiply_alone<T>(a, weight, n, count);
    configure_tiles(TileConfig(static_cast<uint8_t>(smaller(num_rows, kSide)), 64));
    for (int64_t m = 0; m < num_rows; m += kTileBandRows)
        own_scratch<TilePart<T>>(a, weight, m, smaller(kTileBandRows, num_rows - m), n, count)->run();
    release_tiles();
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
