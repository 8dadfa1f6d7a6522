// packed_linear: y[m][n] = sum over groups g of x_scale[m][g] * (scale[n][g] * dot[m][n][g] + minimum[n][g] * sum[m][g])
//                          + bias[n], in float32, over 16 weight rows packed side by side (quant.h)
// where the activations of a group of 32 are rounded to x_scale * q, q in [-127, 127], sum is the sum of its q, and dot
// the integer dot product of q with the weight's fields. With two planes, what rounding left over is rounded again, in
// steps of x_scale / 254: 16 bits for twice the integer work. Integers are exact in any order and the float32 sum runs
// over the groups from first to last, so a row has the same bits alone and among others, whatever the tiles and threads.
#include "quant.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kRows = kPackedRows;  // weight rows side by side
constexpr int kParts = kRows / W;   // vectors that hold a value for each of them
constexpr int kChunk = 256;         // of K, read from a panel of weight rows at a time
constexpr int kBand = 128;          // rows of x that share a chunk
constexpr int kAhead = 4096;        // bytes of weight asked for ahead of their use
#if defined(INFINI_AVX512)
constexpr int kTile = 8;  // planes of x multiplied at a time, so that their sums stay in registers
#else
constexpr int kTile = 2;
#endif

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Integers below 2^22 and floats, without a conversion: the bits of kShift + i are those of kShift, plus i.
constexpr float kShift = 0x1.8p23f;
constexpr int32_t kShiftBits = 0x4b400000;

// ---- activations, band after band: the groups of a band one after another, each with all rows of the band -----------

constexpr int kGroup = 32, kSumLength = 16;
constexpr int kSums = kGroup / kSumLength;  // of a group's plane
constexpr float kSecondStep = 1.0f / 254;   // half a step of the first plane is 127 of the second

struct Activations {
    int64_t num_rows, num_groups;
    int num_planes;
    int8_t* q;      // [band][group][row][plane][32]
    float* scale;   // [band][group][row]
    int32_t* sums;  // [band][group][row][plane][2], each of 16 q

    Activations(const PackedLinear& a, int64_t num_rows, int64_t row_length)
        : num_rows(num_rows), num_groups(row_length / kGroup), num_planes(a.num_planes),
          q(static_cast<int8_t*>(a.workspace.data)), scale(reinterpret_cast<float*>(q + num_rows * row_length * num_planes)),
          sums(reinterpret_cast<int32_t*>(scale + num_rows * num_groups)) {}

    int64_t at(int64_t group, int64_t row) const {
        const int64_t first = row / kBand * kBand;
        return first * num_groups + group * smaller(kBand, num_rows - first) + row - first;
    }
};

// Of floats without their signs, the order is that of their bits, with infinity and NaN on top.
float largest_magnitude(const float* x) {
    vu largest{};
    for (int i = 0; i < kGroup; i += W) {
        const vu magnitude = as_bits(load(x + i)) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t most = 0;
    for (int i = 0; i < W; ++i) most = largest[i] > most ? largest[i] : most;
    float magnitude;
    memcpy(&magnitude, &most, sizeof most);
    return magnitude;
}

// One plane of a group: q the nearest integers to v, ties to even, and their sums. v keeps what is left over.
void round_plane(int8_t* __restrict q, int32_t* __restrict sums, float* __restrict v) {
    alignas(64) int32_t rounded[kGroup];
    vi lanes[kSums] = {};
    for (int i = 0; i < kGroup; i += W) {
        const vf shifted = load(v + i) + kShift;
        const vi integers = (vi)as_bits(shifted) - kShiftBits;
        memcpy(rounded + i, &integers, sizeof integers);
        lanes[i / kSumLength] += integers;
        store(v + i, load(v + i) - (shifted - kShift));
    }
    for (int half = 0; half < kSums; ++half) {
        sums[half] = 0;
        for (int i = 0; i < W; ++i) sums[half] += lanes[half][i];
    }
    for (int i = 0; i < kGroup; ++i) q[i] = static_cast<int8_t>(rounded[i]);
}

void round_group(const Activations& to, int64_t at, const float* x, float inverse) {
    alignas(64) float v[kGroup];
    for (int i = 0; i < kGroup; ++i) v[i] = x[i] * inverse;
    for (int plane = 0; plane < to.num_planes; ++plane) {
        const int64_t place = at * to.num_planes + plane;
        round_plane(to.q + place * kGroup, to.sums + place * kSums, v);
        for (int i = 0; i < kGroup; ++i) v[i] *= 254.0f;
    }
}

// Infinity less itself is NaN: what is not finite makes every product of its row NaN.
void round_row(const Activations& to, int64_t row, const float* x) {
    constexpr int kBatch = 8;  // groups whose divisions overlap
    for (int64_t first = 0; first < to.num_groups; first += kBatch) {
        const int64_t last = smaller(first + kBatch, to.num_groups);
        float inverse[kBatch];
        for (int64_t g = first; g < last; ++g) {
            const float largest = largest_magnitude(x + g * kGroup);
            inverse[g - first] = largest >= 0x1p-100f ? 127.0f / largest : 0.0f;
            to.scale[to.at(g, row)] = largest / 127.0f + (largest - largest);
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

inline vb load_bytes(const uint8_t* p) {
    vb v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Four fields of each of the 16 rows
struct Quad {
    vb part[kParts];

    explicit Quad(const uint8_t* p) {
        for (int i = 0; i < kParts; ++i) part[i] = load_bytes(p + i * sizeof(vb));
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

template <class Block>
struct Dots {
    vi part[kParts];

    void start(int32_t first) { for (int i = 0; i < kParts; ++i) part[i] = vi{} + first; }

    // Of the 16 activations, `quad` names four.
    template <int quad>
    void add(std::integral_constant<int, quad>, const Quad& w, const Sixteen& x) {
#if defined(INFINI_NEON)
        for (int i = 0; i < kParts; ++i) part[i] = vdotq_laneq_s32(part[i], vreinterpretq_s8_u8(w.part[i]), x.q, quad);
#else
        int32_t four;
        memcpy(&four, x.q + 4 * quad, 4);
#if defined(INFINI_AVX512)
        // Unsigned times signed bytes: signed fields are moved up by 128, which kOffset takes back.
        const __m512i q = (__m512i)(Block::kIsSigned ? w.part[0] ^ 0x80 : w.part[0]);
        part[0] = (vi)_mm512_dpbusd_epi32((__m512i)part[0], q, _mm512_set1_epi32(four));
#elif defined(INFINI_AVX2)
        // Unsigned times signed bytes, pairs added in 16 bits: 2 * 127 * 127 fits.
        const __m256i v = _mm256_set1_epi32(four);
        for (int i = 0; i < kParts; ++i) {
            const __m256i q = (__m256i)w.part[i];
            const __m256i pairs = Block::kIsSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(v, q))
                                                   : _mm256_maddubs_epi16(q, v);
            part[i] += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        }
#else
        for (int i = 0; i < kRows; ++i)
            for (int j = 0; j < 4; ++j) {
                const int8_t field = static_cast<int8_t>(w.part[i / W][i % W * 4 + j]);
                part[i / W][i % W] += field * x.q[4 * quad + j];
            }
#endif
#endif
    }
};

// ---- products -------------------------------------------------------------------------------------------------------

// What the fields of a type stand above the integers they mean, as Dots::add takes them
#if defined(INFINI_AVX512)
template <class Block>
constexpr int kOffset = Block::kIsSigned ? 128 : Block::kOffset;
#else
template <class Block>
constexpr int kOffset = Block::kOffset;
#endif

// 16 activations with both their planes; of one plane, the second is not looked at.
template <int P>
struct Pieces {
    Sixteen first, second;
    explicit Pieces(const int8_t* q) : first(q), second(P == 2 ? q + kGroup : q) {}
};

// The dot products of a group of one row of x with 16 of weight
template <class Block, int P>
struct Group {
    Dots<Block> first, second;  // of each plane, plus kShiftBits

    static int32_t sum(const int32_t* sums) { return Block::kGroup == kSumLength ? sums[0] : sums[0] + sums[1]; }

    void start(const int32_t* sums) {
        first.start(kShiftBits - kOffset<Block> * sum(sums));
        if constexpr (P == 2) second.start(kShiftBits - kOffset<Block> * sum(sums + kSums));
    }

    template <class Quarter>
    void add(Quarter quad, const Quad& w, const Pieces<P>& x) {
        first.add(quad, w, x.first);
        if constexpr (P == 2) second.add(quad, w, x.second);
    }

    vf value(int i) const {
        const vf v = (vf)first.part[i] - kShift;
        if constexpr (P == 1) return v;
        else return fma((vf)second.part[i] - kShift, splat(kSecondStep), v);
    }

    static float sum_value(const int32_t* sums) {
        const float v = static_cast<float>(sum(sums));
        return P == 1 ? v : v + static_cast<float>(sum(sums + kSums)) * kSecondStep;
    }
};

template <class Block, int P>
struct Row {
    Group<Block, P> group;
    vf total[kParts];

    void load_totals(const float* y) { for (int i = 0; i < kParts; ++i) total[i] = load(y + i * W); }
    void store_totals(float* y) const { for (int i = 0; i < kParts; ++i) store(y + i * W, total[i]); }

    void add(const float* scale, const float* minimum, float x_scale, const int32_t* sums) {
        const vf shift = splat(x_scale * group.sum_value(sums));
        for (int i = 0; i < kParts; ++i) {
            total[i] = fma(group.value(i), load(scale + i * W) * x_scale, total[i]);
            if constexpr (Block::kHasMinimum) total[i] = fma(load(minimum + i * W), shift, total[i]);
        }
    }
};

// M rows of x: a list rather than an array, which GCC would keep in memory. each(f) calls f(row, its index).
template <class Block, int P, int M>
struct Tile {
    Tile<Block, P, M - 1> rest;
    Row<Block, P> last;

    template <class F>
    void each(F&& f) {
        rest.each(f);
        f(last, M - 1);
    }
};

template <class Block, int P>
struct Tile<Block, P, 0> {
    template <class F>
    void each(F&&) {}
};

template <class Block>
inline void prefetch(const uint8_t* packed) {
    for (int line = 0; line < Block::kBytes * kRows; line += 64) __builtin_prefetch(packed + kAhead + line);
}

// A chunk of K of 16 weight rows
struct Chunk {
    alignas(64) int8_t q[kChunk * kRows];              // [K / 4][16][4]
    alignas(64) float scale[kChunk], minimum[kChunk];  // [groups][16], groups of 16 or 32

    template <class Block>
    void read(const uint8_t* packed, int64_t length) {
        constexpr int kGroups = Block::kElements / Block::kGroup;
        for (int64_t b = 0; b < length / Block::kElements; ++b, packed += Block::kBytes * kRows) {
            prefetch<Block>(packed);
            Block::template fields<kRows>(q + b * Block::kElements * kRows, packed);
            Block::template scales<kRows>(scale + b * kGroups * kRows, minimum + b * kGroups * kRows, packed);
        }
    }
};

// total[r][0:16] += the products of M rows of x from `row` on with a chunk of weight, whose first group of K is `first`
template <class Block, int P, int M>
void add_tile(float* total, const Chunk& chunk, const Activations& x, int64_t first, int64_t num_groups, int64_t row) {
    constexpr int kSplit = kGroup / Block::kGroup;  // weight groups to a group of x
    Tile<Block, P, M> tile;
    tile.each([&](auto& r, int m) { r.load_totals(total + m * kRows); });
    for (int64_t g = 0; g < num_groups * kSplit; ++g) {
        const int64_t at = x.at(first + g / kSplit, row), half = g % kSplit;
        const uint8_t* w = reinterpret_cast<const uint8_t*>(chunk.q) + g * Block::kGroup * kRows;
        const int8_t* q = x.q + at * P * kGroup + half * Block::kGroup;
        const int32_t* sums = x.sums + at * P * kSums + half;
        tile.each([&](auto& r, int m) { r.group.start(sums + m * P * kSums); });
        for (int k = 0; k < Block::kGroup; k += 16, w += 16 * kRows)
            unrolled<4>([&](auto quad) {
                const Quad fields(w + 4 * kRows * quad);
                tile.each([&](auto& r, int m) { r.group.add(quad, fields, Pieces<P>(q + m * P * kGroup + k)); });
            });
        const float *scale = chunk.scale + g * kRows, *minimum = chunk.minimum + g * kRows;
        tile.each([&](auto& r, int m) { r.add(scale, minimum, x.scale[at + m], sums + m * P * kSums); });
    }
    tile.each([&](auto& r, int m) { r.store_totals(total + m * kRows); });
}

// total[0:16] += the products of one row of x with 16 of weight, whose fields of four or eight bits go straight from
// memory into the dot products. Of a run of elements, the first half is in low nibbles, the second in high ones.
template <class Block, int P>
void add_row(float* total, const uint8_t* packed, const Activations& x, int64_t row) {
    constexpr int kHalf = Block::kRun / 2, kGroups = Block::kElements / kGroup;
    constexpr bool kIsOneGroup = Block::kRun == kGroup;
    Row<Block, P> r;
    r.load_totals(total);
    for (int64_t g = 0; g < x.num_groups; packed += Block::kBytes * kRows) {
        alignas(64) float scale[kGroups * kRows], minimum[kGroups * kRows];
        Block::template scales<kRows>(scale, minimum, packed);
        prefetch<Block>(packed);
        const uint8_t* data = packed + Block::kData * kRows;
        for (int i = 0; i < kGroups; data += Block::kRun * Block::kBits / 8 * kRows)
            unrolled<2>([&](auto half) {
                const int64_t at = x.at(g, row);
                const int32_t* sums = x.sums + at * P * kSums;
                const uint8_t* w = Block::kBits == 4 ? data : data + half * kHalf * kRows;
                if (half == 0 || !kIsOneGroup) r.group.start(sums);
                for (int k = 0; k < kHalf; k += 16, w += 16 * kRows) {
                    const Pieces<P> pieces(x.q + at * P * kGroup + (kIsOneGroup ? half * kHalf : 0) + k);
                    unrolled<4>([&](auto quad) {
                        const Quad fields(w + 4 * kRows * quad);
                        r.group.add(quad, Block::kBits == 8 ? fields : half == 0 ? fields.low_nibbles() : fields.high_nibbles(), pieces);
                    });
                }
                if (half == 0 && kIsOneGroup) return;
                r.add(scale + i * kRows, minimum + i * kRows, x.scale[at], sums);
                ++g, ++i;
            });
    }
    r.store_totals(total);
}

template <class Block, int P>
void add_rows(float* total, const uint8_t* packed, const Activations& x, int64_t first_row, int64_t num_rows) {
    constexpr int M = kTile / P;
    Chunk chunk;
    const int64_t row_length = x.num_groups * kGroup;
    for (int64_t k = 0; k < row_length; k += kChunk, packed += kChunk / Block::kElements * Block::kBytes * kRows) {
        const int64_t length = smaller(kChunk, row_length - k), first = k / kGroup, num_groups = length / kGroup;
        chunk.template read<Block>(packed, length);
        int64_t r = 0;
        for (; r + M <= num_rows; r += M) add_tile<Block, P, M>(total + r * kRows, chunk, x, first, num_groups, first_row + r);
        for (; r < num_rows; ++r) add_tile<Block, P, 1>(total + r * kRows, chunk, x, first, num_groups, first_row + r);
    }
}

// y[m : m + num_rows][n : n + 16]
template <class Block, int P>
void multiply_band(const PackedLinear& a, const Activations& x, int64_t m, int64_t num_rows, int64_t n) {
    float total[kBand * kRows];
    memset(total, 0, num_rows * kRows * sizeof(float));
    const uint8_t* packed = static_cast<const uint8_t*>(a.weight.data) + n / kRows * a.weight.shape[1];
    bool is_done = false;
    if constexpr (Block::kBits != 0)
        if ((is_done = num_rows == 1)) add_row<Block, P>(total, packed, x, m);
    if (!is_done) add_rows<Block, P>(total, packed, x, m, num_rows);
    const float* bias = a.has_bias ? static_cast<const float*>(a.bias.data) + n : nullptr;
    for (int64_t r = 0; r < num_rows; ++r) {
        float* y = Rows{a.y}.at<float>(m + r) + n;
        for (int64_t c = 0; c < smaller(kRows, a.num_rows - n); ++c)
            y[c] = bias ? total[r * kRows + c] + bias[c] : total[r * kRows + c];
    }
}

template <class Block, int P>
void multiply(const PackedLinear& a, const Activations& x) {
    const int64_t grain = kGrain / (kRows * (x.num_groups * kGroup + 1)) + 1;
    parallel_for(a.weight.shape[0], grain, [&](int64_t begin, int64_t end) {
        for (int64_t m = 0; m < x.num_rows; m += kBand)
            for (int64_t p = begin; p < end; ++p) multiply_band<Block, P>(a, x, m, smaller(kBand, x.num_rows - m), p * kRows);
    });
}

}  // namespace

int64_t packed_linear(const PackedLinear& a) {
    if (a.y.data == a.x.data && num_elements(a.y)) return 0;  // every value of x is needed until the end
    const Activations x(a, Rows{a.x}.count(), a.x.shape[a.x.ndim - 1]);
    round_rows(x, a.x);
    with_block(a.type, [&](auto block) {
        a.num_planes == 2 ? multiply<decltype(block), 2>(a, x) : multiply<decltype(block), 1>(a, x);
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
