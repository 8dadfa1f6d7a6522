// packed_linear: y = x Wᵀ + bias in float32, over weights packed 16 rows side by side (quant.h), of up to three weights
//                the columns one after another; + residual; or, of two weights, silu(first) * second.
//   y[m][n] = sum over groups g of x_scale[m][g] * (scale[n][g] * dot[m][n][g] + minimum[n][g] * sum[m][g])
// The activations of a group of 32 are rounded to x_scale * q with q of 8 or 16 bits; sum is the sum of its q, and dot
// the integer dot product of q with the weight's fields. 16 bits are two planes of bytes, q = 256 * high + low.
// Integers are exact in any order and the float32 sum runs over the groups from first to last, so a row has the same
// bits alone and among others, whatever the tiles and threads.
#include "quant.h"
#include "rows.h"

#if defined(__AMX_INT8__)
#define INFINI_AMX
#endif

// Ahead of register allocation, GCC's scheduler moves so many loads up that tiles of sums are spilled.
#if defined(__GNUC__) && !defined(__clang__)
#define INFINI_NOT_SCHEDULED __attribute__((optimize("no-schedule-insns")))
#else
#define INFINI_NOT_SCHEDULED
#endif

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kRows = kPackedRows;          // weight rows side by side
constexpr int kParts = kRows / W;           // vectors that hold a value for each of them
constexpr int kChunk = 256;                 // of K, read from a panel of weight rows at a time
constexpr int kBand = W == 16 ? 256 : 128;  // rows of x that share a chunk
#if defined(INFINI_AMX)
constexpr int kPanels = 2;  // of weight multiplied together, so that rows of x come from the nearest cache half the time
#else
constexpr int kPanels = 1;
#endif
constexpr int kAhead = W == 4 ? 512 : 4096;  // bytes of weight asked for ahead of their use
#if defined(INFINI_AVX512)
constexpr int kTile = 8;  // planes of x multiplied at a time, so that their sums stay in registers
#else
constexpr int kTile = 4;
#endif

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Integers below 2^22 and floats, without a conversion: the bits of kShift + i are those of kShift, plus i.
constexpr float kShift = 0x1.8p23f;
constexpr int32_t kShiftBits = 0x4b400000;

// ---- activations, in blocks of rows: the groups of a block one after another, each with all rows of the block --------

constexpr int kGroup = 32, kSumLength = 16;
constexpr int kSums = kGroup / kSumLength;
constexpr int64_t kLongestAlone = 16384;  // a single row that every thread rounds for itself, sooner than it could be handed over

struct Activations {
    int64_t num_rows, num_groups;
    int num_planes, log_rows;  // of a block
    int8_t* q;                 // [block][group][row][plane][32]
    float* scale;              // [block][group][row]
    int32_t* sums;             // [block][group][row][plane][2], each of 16 bytes

    Activations(const PackedLinear& a, void* room)
        : num_rows(Rows{a.x}.count()), num_groups(a.x.shape[a.x.ndim - 1] / kGroup), num_planes(a.num_planes), log_rows(0) {
        while (1 << log_rows < kRowBlock && 1 << log_rows < num_rows) ++log_rows;
        const int64_t count = (((num_rows - 1) >> log_rows) + 1) * num_groups << log_rows;
        q = static_cast<int8_t*>(room);
        scale = reinterpret_cast<float*>(q + count * num_planes * kGroup);
        sums = reinterpret_cast<int32_t*>(scale + count);
    }

    int64_t at(int64_t group, int64_t row) const {
        return (((row >> log_rows) * num_groups + group) << log_rows) + (row & ((1 << log_rows) - 1));
    }
};

// Of floats without their signs, the order is that of their bits, with infinity and NaN on top.
float largest_magnitude(const float* x) {
    vu largest{};
    for (int i = 0; i < kGroup; i += W) {
        const vu magnitude = as_bits(load(x + i)) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const uint32_t most = max(largest);
    float magnitude;
    memcpy(&magnitude, &most, sizeof most);
    return magnitude;
}

// The nearest integers to x * inverse, ties to even
void round_values(int32_t* __restrict v, const float* __restrict x, float inverse) {
    for (int i = 0; i < kGroup; i += W) {
        const vi rounded = (vi)as_bits(load(x + i) * inverse + kShift) - kShiftBits;
        memcpy(v + i, &rounded, sizeof rounded);
    }
}

// v = 256 * high + low. Low bytes run from -127 to 127, so that every kernel can negate them.
void split_planes(int32_t* __restrict high, int32_t* __restrict low, const int32_t* __restrict v) {
    for (int i = 0; i < kGroup; ++i) {
        high[i] = (v[i] + 128) >> 8;
        const int32_t rest = v[i] - high[i] * 256;
        low[i] = rest < -127 ? -127 : rest;
    }
}

void store_plane(const Activations& to, int64_t at, int plane, const int32_t* __restrict v) {
    const int64_t place = at * to.num_planes + plane;
    int8_t* __restrict q = to.q + place * kGroup;
    for (int i = 0; i < kGroup; ++i) q[i] = static_cast<int8_t>(v[i]);
    for (int half = 0; half < kSums; ++half) {
        int32_t sum = 0;
        for (int i = 0; i < kSumLength; ++i) sum += v[half * kSumLength + i];
        to.sums[place * kSums + half] = sum;
    }
}

void round_group(const Activations& to, int64_t at, const float* x, float inverse) {
    alignas(64) int32_t v[kGroup], high[kGroup], low[kGroup];
    round_values(v, x, inverse);
    if (to.num_planes == 1) return store_plane(to, at, 0, v);
    split_planes(high, low, v);
    store_plane(to, at, 0, high);
    store_plane(to, at, 1, low);
}

// Infinity less itself is NaN: what is not finite makes every product of its row NaN.
void round_row(const Activations& to, int64_t row, const float* x) {
    const float most = to.num_planes == 2 ? 127 * 256.0f : 127.0f;
    constexpr int kBatch = 8;  // groups whose divisions overlap
    for (int64_t first = 0; first < to.num_groups; first += kBatch) {
        const int64_t last = smaller(first + kBatch, to.num_groups);
        float inverse[kBatch];
        for (int64_t g = first; g < last; ++g) {
            const float largest = largest_magnitude(x + g * kGroup);
            inverse[g - first] = largest >= 0x1p-100f ? most / largest : 0.0f;
            to.scale[to.at(g, row)] = largest / most + (largest - largest);
        }
        for (int64_t g = first; g < last; ++g) round_group(to, to.at(g, row), x + g * kGroup, inverse[g - first]);
    }
}

void round_rows(const Activations& to, const Tensor& x) {
    for_rows(x, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) round_row(to, r, Rows{x}.at<const float>(r));
    });
}

// ---- integer dot products of one row of x with 16 of weight ---------------------------------------------------------

typedef uint8_t vb __attribute__((vector_size(W * 4)));

// Four fields of each of the 16 rows
struct Quad {
    vb part[kParts];

    explicit Quad(const uint8_t* p) {
        for (int i = 0; i < kParts; ++i) memcpy(&part[i], p + i * sizeof(vb), sizeof(vb));
    }

    Quad low_nibbles() const {
        Quad q = *this;
        for (int i = 0; i < kParts; ++i) q.part[i] &= 15;
        return q;
    }
    Quad high_nibbles() const {
        Quad q = *this;
        for (int i = 0; i < kParts; ++i) q.part[i] >>= 4;
        return q;
    }
};

// 16 activations of a plane
struct Sixteen {
#if defined(INFINI_NEON)
    int8x16_t q;
    explicit Sixteen(const int8_t* p) : q(vld1q_s8(p)) {}
#else
    const int8_t* q;
    explicit Sixteen(const int8_t* p) : q(p) {}
#endif
};

// VNNI multiplies unsigned with signed bytes: signed fields are moved up by this much, and the sums back down.
#if defined(INFINI_AVX512)
constexpr int kBias = 128;
#else
constexpr int kBias = 0;
#endif

#if !defined(INFINI_NEON) && !defined(INFINI_AVX512) && !defined(INFINI_AVX2)
__attribute__((noinline)) void add_fours(vi* sums, const vb* fields, const int8_t* four) {
    int32_t sum[kRows];
    int8_t field[kRows * 4];
    memcpy(sum, sums, sizeof sum);
    memcpy(field, fields, sizeof field);
    for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < 4; ++j) sum[i] += field[4 * i + j] * four[j];
    memcpy(sums, sum, sizeof sum);
}
#endif

struct Dots {
    vi part[kParts];  // plus kShiftBits

    INFINI_INLINE void start(int32_t first) { for (int i = 0; i < kParts; ++i) part[i] = vi{} + (kShiftBits + first); }
    INFINI_INLINE vf value(int i) const { return (vf)part[i] - kShift; }

    // Of the 16 activations, `quad` names four.
    template <int quad>
    INFINI_INLINE void add(std::integral_constant<int, quad>, const Quad& w, const Sixteen& x) {
#if defined(INFINI_NEON)
        for (int i = 0; i < kParts; ++i) part[i] = vdotq_laneq_s32(part[i], vreinterpretq_s8_u8(w.part[i]), x.q, quad);
#else
        int32_t four;
        memcpy(&four, x.q + 4 * quad, 4);
#if defined(INFINI_AVX512)
        part[0] = (vi)_mm512_dpbusd_epi32((__m512i)part[0], (__m512i)w.part[0], _mm512_set1_epi32(four));
#elif defined(INFINI_AVX2)
        // Unsigned times signed bytes, pairs added in 16 bits: 2 * 127 * 127 fits.
        const __m256i v = _mm256_set1_epi32(four);
        for (int i = 0; i < kParts; ++i) {
            const __m256i q = (__m256i)w.part[i];
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(v, q));
            part[i] += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        }
#else
        add_fours(part, w.part, x.q + 4 * quad);
#endif
#endif
    }
};

// The same with one plane of x or two
template <int P>
struct PlaneDots {
    Dots high, low;  // of one plane, the low one alone

    INFINI_INLINE static int32_t sum(const int32_t* sums, int group) { return group == kSumLength ? sums[0] : sums[0] + sums[1]; }

    // `offset` is what the fields stand above the integers they mean.
    INFINI_INLINE void start(int offset, const int32_t* sums, int group) {
        if constexpr (P == 2) high.start(-offset * sum(sums, group));
        low.start(-offset * sum(sums + (P - 1) * kSums, group));
    }

    template <class Quarter>
    INFINI_INLINE void add(Quarter quad, const Quad& w, const int8_t* q) {
        if constexpr (P == 2) high.add(quad, w, Sixteen(q));
        low.add(quad, w, Sixteen(q + (P - 1) * kGroup));
    }

    INFINI_INLINE vf value(int i) const {
        if constexpr (P == 2) return fma(high.value(i), splat(256.0f), low.value(i));
        return low.value(i);
    }

    INFINI_INLINE static float sum_value(const int32_t* sums, int group) {
        const int32_t low = sum(sums + (P - 1) * kSums, group);
        return static_cast<float>(P == 2 ? 256 * sum(sums, group) + low : low);
    }
};

// What 16 weight rows have come to for one row of x
struct Totals {
    vf part[kParts];

    INFINI_INLINE explicit Totals(const float* y) { for (int i = 0; i < kParts; ++i) part[i] = load(y + i * W); }
    INFINI_INLINE void store_to(float* y) const { for (int i = 0; i < kParts; ++i) store(y + i * W, part[i]); }

    template <int P>
    INFINI_INLINE void add(const PlaneDots<P>& dots, const float* scale, float x_scale) {
        for (int i = 0; i < kParts; ++i) part[i] = fma(dots.value(i), load(scale + i * W) * x_scale, part[i]);
    }
    INFINI_INLINE void add_minimum(const float* minimum, float x_sum) {
        for (int i = 0; i < kParts; ++i) part[i] = fma(load(minimum + i * W), splat(x_sum), part[i]);
    }
};

// ---- several rows of x, against a chunk of weight unpacked to bytes --------------------------------------------------

template <class Block>
inline void prefetch(const uint8_t* packed) {
    for (int line = 0; line < Block::kBytes * kRows; line += 64) __builtin_prefetch(packed + kAhead + line);
}

struct Chunk {
    alignas(64) int8_t q[kChunk * kRows];              // [K / 4][16][4]
    alignas(64) float scale[kChunk], minimum[kChunk];  // [groups][16], groups of 16 or 32

    // Fields come out signed, less their offset and plus `bias`.
    template <class Block>
    void read(const uint8_t* packed, int64_t length, int bias) {
        constexpr int kGroups = Block::kElements / Block::kGroup;
        for (int64_t b = 0; b < length / Block::kElements; ++b, packed += Block::kBytes * kRows) {
            prefetch<Block>(packed);
            Block::template fields<kRows>(q + b * Block::kElements * kRows, packed);
            Block::template scales<kRows>(scale + b * kGroups * kRows, minimum + b * kGroups * kRows, packed);
        }
        const int8_t moved = static_cast<int8_t>(bias - Block::kOffset);
        if (moved) for (int64_t i = 0; i < length * kRows; ++i) q[i] = static_cast<int8_t>(q[i] + moved);
    }
};

// body(packed, first of K, length) for the chunks of a panel
template <class Block, class Body>
inline void for_chunks(int64_t row_length, const uint8_t* packed, Body&& body) {
    for (int64_t k = 0; k < row_length; k += kChunk, packed += kChunk / Block::kElements * Block::kBytes * kRows)
        body(packed, k, smaller(kChunk, row_length - k));
}

// M rows of x: a list rather than an array, which GCC would keep in memory. each(f) calls f(dots, row's index).
template <int P, int M>
struct Tile {
    Tile<P, M - 1> rest;
    PlaneDots<P> last;

    template <class F>
    INFINI_INLINE void each(F&& f) {
        rest.each(f);
        f(last, M - 1);
    }
};

template <int P>
struct Tile<P, 0> {
    template <class F>
    INFINI_INLINE void each(F&&) {}
};

// total[r][0:16] += the products of M rows of x from `row` on with a chunk of weight, whose first group of K is `first`
template <int P, int G, bool kHasMinimum, int M>
INFINI_NOT_SCHEDULED void add_tile(float* __restrict total, const Chunk& chunk, const Activations& x, int64_t first, int64_t num_groups, int64_t row) {
    const int64_t at = x.at(first, row), step = 1 << x.log_rows;
    const uint8_t* __restrict w = reinterpret_cast<const uint8_t*>(chunk.q);
    const int8_t* __restrict q = x.q + at * P * kGroup;
    const int32_t* __restrict sums = x.sums + at * P * kSums;
    const float *__restrict x_scale = x.scale + at, *__restrict scale = chunk.scale, *__restrict minimum = chunk.minimum;
    for (; num_groups > 0; --num_groups, q += step * P * kGroup, sums += step * P * kSums, x_scale += step)
        for (int half = 0; half < kGroup / G; ++half, scale += kRows, minimum += kRows) {
            Tile<P, M> tile;
            tile.each([&](auto& dots, int m) INFINI_INLINE { dots.start(kBias, sums + m * P * kSums + half, G); });
            for (int k = half * G; k < half * G + G; k += 16, w += 16 * kRows)
                unrolled<4>([&](auto quad) INFINI_INLINE {
                    const Quad fields(w + 4 * kRows * quad);
                    tile.each([&](auto& dots, int m) INFINI_INLINE { dots.add(quad, fields, q + m * P * kGroup + k); });
                });
            tile.each([&](auto& dots, int m) INFINI_INLINE {
                Totals totals(total + m * kRows);
                totals.add(dots, scale, x_scale[m]);
                if (kHasMinimum) totals.add_minimum(minimum, x_scale[m] * dots.sum_value(sums + m * P * kSums + half, G));
                totals.store_to(total + m * kRows);
            });
        }
}

template <int P, int G, bool kHasMinimum, int M>
void add_tiles(float* total, const Chunk& chunk, const Activations& x, int64_t first, int64_t num_groups, int64_t row, int64_t num_rows) {
    int64_t r = 0;
    for (; r + M <= num_rows; r += M) add_tile<P, G, kHasMinimum, M>(total + r * kRows, chunk, x, first, num_groups, row + r);
    if constexpr (M > 1)
        add_tiles<P, G, kHasMinimum, M / 2>(total + r * kRows, chunk, x, first, num_groups, row + r, num_rows - r);
}

#if defined(INFINI_AMX)
// ---- 16 rows of x at a time, in tile registers: products in 0 to 3, planes of x in 4 and 5, weight in 6 and 7 ---------

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16];
    uint8_t num_rows[16];

    constexpr explicit TileConfig(uint8_t group)
        : row_bytes{64, 64, 64, 64, group, group, 64, 64},
          num_rows{16, 16, 16, 16, 16, 16, static_cast<uint8_t>(group / 4), static_cast<uint8_t>(group / 4)} {}
};

template <int G>
constexpr TileConfig kTileConfig{G};

// In assembly, because the compiler's own functions do not say what memory they read.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }

#define INFINI_MULTIPLY(weight, x, product, p)                                                       \
    asm volatile("tilezero %%tmm" #product "\n tileloadd (%0,%1,1), %%tmm" #x                         \
                 "\n tdpbssd %%tmm" #weight ", %%tmm" #x ", %%tmm" #product ::"r"(p), "r"(stride) : "memory")
#define INFINI_LOAD(tile, p) asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(p), "r"(64L) : "memory")
#define INFINI_STORE(tile, p) asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(p), "r"(64L) : "memory")

// The dots of a group, in one of two slots: a group's are scaled while the next one's are made, since what leaves tile
// registers takes a while to arrive.
template <int slot, int P>
INFINI_INLINE inline void multiply_group(int32_t (*dots)[kRowBlock][kRows], const int8_t* w, const int8_t* q) {
    constexpr int64_t stride = P * kGroup;
    if constexpr (slot == 0) {
        INFINI_LOAD(6, w);
        INFINI_MULTIPLY(6, 4, 0, q);
        if constexpr (P == 2) INFINI_MULTIPLY(6, 5, 1, q + kGroup);
        INFINI_STORE(0, dots[0]);
        if constexpr (P == 2) INFINI_STORE(1, dots[1]);
    } else {
        INFINI_LOAD(7, w);
        INFINI_MULTIPLY(7, 4, 2, q);
        if constexpr (P == 2) INFINI_MULTIPLY(7, 5, 3, q + kGroup);
        INFINI_STORE(2, dots[0]);
        if constexpr (P == 2) INFINI_STORE(3, dots[1]);
    }
}

// total[0:16][0:16] += the products of a block of x with a chunk of weight, as add_tile does it
template <int P, int G, bool kHasMinimum>
void add_block(float* total, const Chunk& chunk, const Activations& x, int64_t first, int64_t num_groups, int64_t row) {
    constexpr int kSplit = kGroup / G;  // weight groups to a group of x
    const int64_t at = x.at(first, row);
    alignas(64) int32_t dots[2][2][kRowBlock][kRows];
    vf t[kRowBlock];
    unrolled<kRowBlock>([&](auto r) INFINI_INLINE { t[r] = load(total + r * kRows); });
    const auto multiply = [&](auto slot, int64_t g) INFINI_INLINE {
        const int8_t* q = x.q + (at + g / kSplit * kRowBlock) * P * kGroup + g % kSplit * G;
        multiply_group<slot, P>(dots[slot], chunk.q + g * G * kRows, q);
    };
    const auto scale = [&](auto slot, int64_t g) INFINI_INLINE {
        const float* x_scale = x.scale + at + g / kSplit * kRowBlock;
        const int32_t* sums = x.sums + (at + g / kSplit * kRowBlock) * P * kSums + g % kSplit;
        const vf w_scale = load(chunk.scale + g * kRows), minimum = load(chunk.minimum + g * kRows);
        unrolled<kRowBlock>([&](auto r) INFINI_INLINE {
            const auto value = [&](int plane) INFINI_INLINE { return (vf)_mm512_cvtepi32_ps(_mm512_load_si512(dots[slot][plane][r])); };
            const vf v = P == 2 ? fma(value(0), splat(256.0f), value(1)) : value(0);
            t[r] = fma(v, w_scale * x_scale[r], t[r]);
            if (kHasMinimum) t[r] = fma(minimum, splat(x_scale[r] * PlaneDots<P>::sum_value(sums + r * P * kSums, G)), t[r]);
        });
    };
    constexpr std::integral_constant<int, 0> even;
    constexpr std::integral_constant<int, 1> odd;
    const int64_t last = num_groups * kSplit - 1;
    multiply(even, 0);
    for (int64_t g = 0; g <= last; g += 2) {
        if (g < last) multiply(odd, g + 1);
        scale(even, g);
        if (g + 1 < last) multiply(even, g + 2);
        if (g < last) scale(odd, g + 1);
    }
    unrolled<kRowBlock>([&](auto r) INFINI_INLINE { store(total + r * kRows, t[r]); });
}

template <class Block, int P>
void add_blocks(float* total, const uint8_t* packed, int num_panels, const Activations& x, int64_t first_row, int64_t num_rows) {
    Chunk chunks[kPanels];
    const int64_t row_length = x.num_groups * kGroup, panel_bytes = row_length / Block::kElements * Block::kBytes * kRows;
    configure_tiles(kTileConfig<Block::kGroup>);
    for_chunks<Block>(row_length, packed, [&](const uint8_t* p, int64_t k, int64_t length) {
        for (int i = 0; i < num_panels; ++i) chunks[i].template read<Block>(p + i * panel_bytes, length, 0);
        for (int64_t r = 0; r < num_rows; r += kRowBlock)
            for (int i = 0; i < num_panels; ++i)
                add_block<P, Block::kGroup, Block::kHasMinimum>(total + (i * kBand + r) * kRows, chunks[i], x, k / kGroup,
                                                                length / kGroup, first_row + r);
    });
    release_tiles();
}
#endif

template <class Block, int P>
void add_rows(float* total, const uint8_t* packed, const Activations& x, int64_t first_row, int64_t num_rows) {
    Chunk chunk;
    for_chunks<Block>(x.num_groups * kGroup, packed, [&](const uint8_t* p, int64_t k, int64_t length) {
        chunk.template read<Block>(p, length, kBias);
        add_tiles<P, Block::kGroup, Block::kHasMinimum, kTile / P>(total, chunk, x, k / kGroup, length / kGroup, first_row, num_rows);
    });
}

// ---- one row of x, against fields of four or eight bits straight from memory -----------------------------------------

// What the fields of a type stand above the integers they mean, as Dots::add takes them
template <class Block>
constexpr int kOffset = kBias && Block::kIsSigned ? kBias : Block::kOffset;

template <class Block>
INFINI_INLINE inline Quad bytes(const uint8_t* w) {
    Quad q(w);
    if constexpr (kBias && Block::kIsSigned) for (int i = 0; i < kParts; ++i) q.part[i] ^= kBias;
    return q;
}

// total[0:16] += the products of a row of x with 16 of weight. Of a run of fields of four bits, the first half is in low
// nibbles, the second in high ones: halves of one group, or two groups.
template <class Block, int P>
void add_row(float* total, const uint8_t* packed, const Activations& x, int64_t row) {
    constexpr int kHalf = Block::kRun / 2, kGroups = Block::kElements / kGroup;
    constexpr bool kIsOneGroup = Block::kRun == kGroup;
    Totals totals(total);
    int64_t g = 0;
    for (; g < x.num_groups; packed += Block::kBytes * kRows) {
        alignas(64) float scale[kGroups * kRows], minimum[kGroups * kRows];
        Block::template scales<kRows>(scale, minimum, packed);
        prefetch<Block>(packed);
        const uint8_t* w = packed + Block::kData * kRows;
        for (int i = 0; i < kGroups; i += kIsOneGroup ? 1 : 2, g += kIsOneGroup ? 1 : 2) {
            const int64_t first = x.at(g, row), second = x.at(kIsOneGroup ? g : g + 1, row);
            const int8_t *q = x.q + first * P * kGroup, *rest = kIsOneGroup ? q + kHalf : x.q + second * P * kGroup;
            PlaneDots<P> lower, other;
            PlaneDots<P>& upper = kIsOneGroup ? lower : other;
            lower.start(kOffset<Block>, x.sums + first * P * kSums, kGroup);
            if (!kIsOneGroup) upper.start(kOffset<Block>, x.sums + second * P * kSums, kGroup);
            for (int k = 0; k < kHalf; k += 16, w += 16 * kRows)
                unrolled<4>([&](auto quad) INFINI_INLINE {
                    const uint8_t* fields = w + 4 * kRows * quad;
                    lower.add(quad, Block::kBits == 4 ? Quad(fields).low_nibbles() : bytes<Block>(fields), q + k);
                    upper.add(quad, Block::kBits == 4 ? Quad(fields).high_nibbles() : bytes<Block>(fields + kHalf * kRows), rest + k);
                });
            if (Block::kBits == 8) w += kHalf * kRows;
            const auto finish = [&](const PlaneDots<P>& dots, int group, int64_t at) INFINI_INLINE {
                totals.add(dots, scale + group * kRows, x.scale[at]);
                const float sum = dots.sum_value(x.sums + at * P * kSums, kGroup);
                if constexpr (Block::kHasMinimum) totals.add_minimum(minimum + group * kRows, x.scale[at] * sum);
            };
            finish(lower, i, first);
            if (!kIsOneGroup) finish(upper, i + 1, second);
        }
    }
    totals.store_to(total);
}

// ---- products -------------------------------------------------------------------------------------------------------

// total[panel][row][0:16] of num_panels panels that follow one another
template <class Block, int P>
void add_products(float* total, const uint8_t* packed, int num_panels, const Activations& x, int64_t row, int64_t num_rows) {
#if defined(INFINI_AMX)
    if (1 << x.log_rows == kRowBlock) return add_blocks<Block, P>(total, packed, num_panels, x, row, num_rows);
#endif
    const int64_t panel_bytes = x.num_groups * kGroup / Block::kElements * Block::kBytes * kRows;
    for (int i = 0; i < num_panels; ++i, total += kBand * kRows, packed += panel_bytes) {
        if constexpr (Block::kBits != 0)
            if (num_rows == 1) {
                add_row<Block, P>(total, packed, x, row);
                continue;
            }
        add_rows<Block, P>(total, packed, x, row, num_rows);
    }
}

// Panels of one weight that are multiplied together
struct Strip {
    int weight, num_panels;
    int64_t row, column;  // the first row of the weight, and the first column of y
};

struct Problem {
    const PackedLinear& a;
    Activations x;

    static int64_t num_panels(int64_t num_rows) { return (num_rows + kRows - 1) / kRows; }
    int64_t num_strips(int weight) const { return (num_panels(a.num_rows[weight]) + kPanels - 1) / kPanels; }

    int64_t num_strips() const {
        int64_t count = num_strips(0);
        for (int i = 1; i < a.count && !a.is_gated; ++i) count += num_strips(i);
        return count;
    }

    Strip strip(int64_t index) const {
        int weight = 0;
        int64_t column = 0;
        for (; index >= num_strips(weight); ++weight) index -= num_strips(weight), column += a.num_rows[weight];
        const int64_t row = index * kPanels * kRows;
        return {weight, static_cast<int>(smaller(kPanels, num_panels(a.num_rows[weight] - row))), row, column + row};
    }

    // total[panel][row][0:16] of one weight, with its bias
    void multiply(float* total, int weight, const Strip& s, int64_t m, int64_t num_rows) const {
        const int64_t padded_rows = (num_rows + kRowBlock - 1) / kRowBlock * kRowBlock;
        for (int i = 0; i < s.num_panels; ++i) memset(total + i * kBand * kRows, 0, padded_rows * kRows * sizeof(float));
        const uint8_t* packed = static_cast<const uint8_t*>(a.weight[weight].data) + s.row / kRows * a.weight[weight].shape[1];
        with_block(a.type[weight], [&](auto block) {
            using Block = decltype(block);
            if (a.num_planes == 2) add_products<Block, 2>(total, packed, s.num_panels, x, m, num_rows);
            else add_products<Block, 1>(total, packed, s.num_panels, x, m, num_rows);
        });
        if (!a.bias[weight].data) return;
        const float* bias = static_cast<const float*>(a.bias[weight].data) + s.row;
        for (int64_t c = 0; c < smaller(s.num_panels * kRows, a.num_rows[weight] - s.row); ++c)
            for (int64_t r = 0; r < num_rows; ++r) total[(c / kRows * kBand + r) * kRows + c % kRows] += bias[c];
    }

    void write(const Strip& s, const float* total, int64_t m, int64_t num_rows) const {
        for (int64_t r = 0; r < num_rows; ++r)
            for (int i = 0; i < s.num_panels; ++i) {
                const float* t = total + (i * kBand + r) * kRows;
                float* y = Rows{a.y}.at<float>(m + r) + s.column + i * kRows;
                const float* residual = a.residual.data ? Rows{a.residual}.at<float>(m + r) + s.column + i * kRows : nullptr;
                const int64_t width = smaller(kRows, a.num_rows[s.weight] - s.row - i * kRows);
                for (int64_t c = 0; c < width; ++c) y[c] = residual ? residual[c] + t[c] : t[c];
            }
    }

    void run(const Strip& s, int64_t m, int64_t num_rows) const {
        alignas(64) float total[kPanels * kBand * kRows], up[kPanels * kBand * kRows];
        multiply(total, s.weight, s, m, num_rows);
        if (a.is_gated) {
            multiply(up, 1, s, m, num_rows);
            for (int64_t at = 0; at < s.num_panels * kBand * kRows; at += kBand * kRows)
                map([](vf gate, vf up) { return gate * sigmoid(gate) * up; }, num_rows * kRows, total + at, total + at, up + at);
        }
        write(s, total, m, num_rows);
    }
};

}  // namespace

int64_t packed_linear(const PackedLinear& a) {
    if (a.y.data == a.x.data && num_elements(a.y)) return 0;  // every value of x is needed until the end
    const Activations shared(a, a.workspace.data);
    const int64_t row_length = shared.num_groups * kGroup, grain = kGrain / (kRows * (row_length + 1)) + 1;
    const bool is_alone = shared.num_rows == 1 && row_length <= kLongestAlone;
    if (!is_alone) round_rows(shared, a.x);
    parallel_for(Problem{a, shared}.num_strips(), grain, [&](int64_t begin, int64_t end) {
        alignas(64) float room[kLongestAlone / kGroup * (1 + 10 * 2)];
        const Problem problem{a, is_alone ? Activations(a, room) : shared};
        if (is_alone) round_row(problem.x, 0, Rows{a.x}.at<const float>(0));
        for (int64_t m = 0; m < shared.num_rows; m += kBand)
            for (int64_t i = begin; i < end; ++i) problem.run(problem.strip(i), m, smaller(kBand, shared.num_rows - m));
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
