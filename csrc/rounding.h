// Activations rounded to integers for packed_linear: those of a span (rounding_of) become x_scale * q. q has
// 8 bits, or 8 and a few more that make a second plane of bytes: q = radix * high + low, the radix 16
// (12 bits) to 256 (16 bits). Sums are those of groups of 32, or halves of them.
//
// Rows come in blocks: the spans of a block one after another, each with all rows of the block. Where rows
// are multiplied by twos (kPairsRows), 8 bytes of a block's one row are followed by those of the other. Where
// many rows meet whole sums of 64 (dots_shorts.h), q is one integer of 16 bits, of each four the even ones
// first.
#pragma once
#include "blocks.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {

constexpr int kGroup = 32, kSumLength = 16;
constexpr int kSums = kGroup / kSumLength;
constexpr int kTotals = 1 + kSums;

// Integers below 2^22 and floats, without a conversion: the bits of kShift + i are those of kShift, plus i.
constexpr float kShift = 0x1.8p23f;
constexpr int32_t kShiftBits = 0x4b400000;

struct Activations {
    int64_t num_rows, num_groups;
    int log_groups;            // of a span
    int num_planes, log_rows;  // of a block
    int radix;
    // What products are to find beside the integers: lines that others have read take long to be written.
    bool has_sums = true, has_totals = true, has_halves = true;
    // [block][span][row][plane][of a span], or [block][span][row][64] of 16 bits, or of two rows
    // [block][span][plane][4][row][8]
    int8_t* q;
    float* scale;   // [block][span][row]
    int32_t* sums;  // [block][group][plane][2][row], each of 16 bytes
    float* totals;  // [block][group][3][row]: scale times the sum of the group, and of either half

    Activations(int64_t num_rows, int64_t row_length, Rounding rounding)
        : num_rows(num_rows), num_groups(row_length / kGroup), log_groups(0),
          num_planes(num_planes_of(rounding.bits)), log_rows(0), radix(1 << (rounding.bits - 8)) {
        while (kGroup << log_groups < rounding.span) ++log_groups;
        while (1 << log_rows < kRowBlock && 1 << log_rows < num_rows) ++log_rows;
    }

    int64_t filled_rows() const { return (((num_rows - 1) >> log_rows) + 1) << log_rows; }
    int span() const { return kGroup << log_groups; }
    int64_t num_spans() const { return num_groups >> log_groups; }
    int64_t num_parts() const { return (filled_rows() >> log_rows) * num_spans(); }
    int64_t part_elements() const { return static_cast<int64_t>(span()) << log_rows; }

    // Spans of all rows, those that fill up the last block among them, and groups
    int64_t count() const { return num_parts() << log_rows; }
    int64_t group_count() const { return count() << log_groups; }

    int64_t num_bytes() const {
        const int64_t of_a_group = num_planes * (kGroup + kSums * static_cast<int64_t>(sizeof(int32_t))) +
                                   kTotals * static_cast<int64_t>(sizeof(float));
        return group_count() * of_a_group + count() * static_cast<int64_t>(sizeof(float));
    }

    void put_into(void* room) {
        q = static_cast<int8_t*>(room);
        scale = reinterpret_cast<float*>(q + count() * num_planes * span());
        totals = scale + count();
        sums = reinterpret_cast<int32_t*>(totals + kTotals * group_count());
    }

    // What other threads have written comes sooner if it is asked for all at once.
    void prefetch() const {
        for (int64_t i = 0; i < num_bytes(); i += 64) ask_for(q + i);
    }

    int64_t first_at(int64_t group, int64_t row) const {
        return ((row >> log_rows) * num_groups + group) << log_rows;
    }
    // Of all spans, that of a row with this group; those of the next rows follow
    int64_t at(int64_t group, int64_t row) const {
        const int64_t first = (row >> log_rows) * num_spans() + (group >> log_groups);
        return (first << log_rows) + (row & ((1 << log_rows) - 1));
    }
    // The same where a span is a group
    int64_t group_at(int64_t group, int64_t row) const {
        return first_at(group, row) + (row & ((1 << log_rows) - 1));
    }
    // Whether two rows lie in turn
    bool has_pairs() const { return kPairsRows && log_rows == 1; }
    // Whether planes are joined
    bool has_shorts() const {
        return kWholes == Wholes::of_64 && span() == kWholeSpan && num_rows > kPackedFewRows;
    }

    // The first plane of a group; the second is plane_stride() further
    int8_t* q_at(int64_t group, int64_t row) const {
        if (has_pairs()) return q + first_at(group, row) * num_planes * kGroup + (row & 1) * 8;
        return q + at(group, row) * num_planes * span() + (group & ((1 << log_groups) - 1)) * kGroup;
    }

    int plane_stride() const { return has_pairs() ? 2 * kGroup : span(); }

    // The first of a row's sums in a group; the next ones are as many apart as a block has rows
    int32_t* sums_at(int64_t group, int64_t row) const {
        return sums + first_at(group, row) * num_planes * kSums + (row & ((1 << log_rows) - 1));
    }

    // Of a weight group that has `length` of the group's values, those from `half` on; the next row's follows
    float* total_at(int64_t group, int64_t row, int half, int length) const {
        const int which = length == kGroup ? 0 : 1 + half;
        return totals + first_at(group, row) * kTotals + (which << log_rows) + (row & ((1 << log_rows) - 1));
    }
};

namespace {

// Of floats without their signs, the order is that of their bits, with infinity and NaN on top.
inline float largest_magnitude(const float* x, int count) {
    vu largest{};
    for (int i = 0; i < count; i += W) {
        const vu magnitude = as_bits(load(x + i)) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const uint32_t most = max(largest);
    float magnitude;
    memcpy(&magnitude, &most, sizeof most);
    return magnitude;
}

#if !defined(INFINI_AVX512) && !defined(INFINI_AVX2)
// 16 integers as bytes, and their sum. The second eight follow the first, or those of another row.
INFINI_INLINE inline int32_t store_bytes(int8_t* to, const vi* v, [[maybe_unused]] bool is_paired) {
#if defined(INFINI_NEON)
    const auto narrowed = [](vi a, vi b) {
        return vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
    };
    const int8x16_t bytes = vuzp1q_s8(narrowed(v[0], v[1]), narrowed(v[2], v[3]));
    if (is_paired)
        vst1_s8(to, vget_low_s8(bytes)), vst1_s8(to + 16, vget_high_s8(bytes));
    else
        vst1q_s8(to, bytes);
    return vaddlvq_s8(bytes);
#else
    int32_t sum = 0;
    for (int i = 0; i < kSumLength; ++i) sum += to[i] = static_cast<int8_t>(v[i / W][i % W]);
    return sum;
#endif
}
#endif

// The integers of a group, of each plane, as bytes
template <int P>
struct Planes {
    vi of[P][kGroup / W];

#if defined(INFINI_AVX512)
    // Planes are `stride` apart; sums[plane][half].
    INFINI_INLINE void store_to(int8_t* q, int stride, bool, int32_t (&sums)[2 * kSums]) const {
        // Packed bytes come by fours, one of each vector and each plane in turn.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const auto twos = [&](int plane) INFINI_INLINE {
            return _mm512_packs_epi32((__m512i)of[plane][0], (__m512i)of[plane][1]);
        };
        const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(twos(0), twos(P - 1)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm512_castsi512_si256(bytes));
        if constexpr (P == 2)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + stride), _mm512_extracti64x4_epi64(bytes, 1));
        __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
        sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_BADC));
        sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_CDAB));
        const __m128i four = _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, sum));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), four);
    }
#elif defined(INFINI_AVX2)
    INFINI_INLINE void store_to(int8_t* q, int stride, bool, int32_t (&sums)[2 * kSums]) const {
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), above = _mm256_set1_epi8(-128);
        for (int plane = 0; plane < P; ++plane) {
            const vi* v = of[plane];
            const __m256i first = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]),
                          last = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]),
                          bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, last), order);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + plane * stride), bytes);
            const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, above), _mm256_setzero_si256()),
                          sum = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
            sums[plane * kSums] = _mm256_cvtsi256_si32(sum) - kSumLength * 128;
            sums[plane * kSums + 1] = _mm256_extract_epi32(sum, 4) - kSumLength * 128;
        }
    }
#else
    // The same; eight bytes follow those before them, or eight of another row.
    INFINI_INLINE void store_to(int8_t* q, int stride, bool is_paired, int32_t (&sums)[2 * kSums]) const {
        const int length = is_paired ? 2 * kSumLength : kSumLength;
        for (int i = 0; i < P * kSums; ++i)
            sums[i] = store_bytes(q + i / kSums * stride + i % kSums * length,
                                  &of[i / kSums][i % kSums * kSumLength / W], is_paired);
    }
#endif
};

#if defined(INFINI_AVX512)
// Of two vectors of 16 integers packed to 16 bits, which come by fours of one and the other in turn
constexpr struct EvenOnesFirst {
    alignas(64) int16_t of[2 * W];
    constexpr EvenOnesFirst() : of() {
        for (int i = 0; i < 2 * W; ++i) {
            const int four = i / 4, inside = i % 2 * 2 + i % 4 / 2;
            of[i] = static_cast<int16_t>(four % 4 * 8 + four / 4 * 4 + inside);
        }
    }
} kEvenOnesFirst;
#endif

// Where groups of a row go, one after the other
template <int P>
struct GroupPlace {
    const int log_radix, plane_stride;
    const bool is_paired, is_joined, has_sums, has_totals, has_halves;
    const int64_t apart;  // from a row's number to the next row's
    int8_t* q;
    int32_t* sums;
    float* totals;

    GroupPlace(const Activations& to, int64_t group, int64_t row)
        : log_radix(__builtin_ctz(to.radix)), plane_stride(to.plane_stride()), is_paired(to.has_pairs()),
          is_joined(to.has_shorts()), has_sums(to.has_sums), has_totals(to.has_totals),
          has_halves(to.has_halves), apart(1 << to.log_rows), q(to.q_at(group, row)),
          sums(to.sums_at(group, row)), totals(to.total_at(group, row, 0, kGroup)) {}

    // The nearest integers to x * inverse, ties to even, as one plane or as radix * high + low. Low bytes run
    // from -127 to 127, so that every kernel can negate them.
    INFINI_INLINE void round(int8_t* to, const float* x, float inverse, float scale) {
        const int half = (1 << log_radix) / 2;
        Planes<P> planes;
        unrolled<kGroup / W>([&](auto i) INFINI_INLINE {
            const vi v = (vi)as_bits(load(x + i * W) * inverse + kShift) - kShiftBits;
            if constexpr (P == 1) {
                planes.of[0][i] = v;
            } else {
                const vi high = (v + half) >> log_radix, low = v - (high << log_radix);
                planes.of[0][i] = high, planes.of[1][i] = low < -127 ? vi{} - 127 : low;
            }
        });
        int32_t found[kSums];
        is_joined ? store_joined(to, planes, found) : store_planes(to, planes, found);
        if (has_totals) put_totals(found, scale);
    }

    // found[half] is the sum of integers.
    INFINI_INLINE void store_planes(int8_t* to, const Planes<P>& planes, int32_t (&found)[kSums]) {
        int32_t of_plane[2 * kSums];
        planes.store_to(to, plane_stride, is_paired, of_plane);
        for (int i = 0; has_sums && i < P * kSums; ++i, sums += apart) *sums = of_plane[i];
        for (int half = 0; half < kSums; ++half)
            found[half] = P == 1 ? of_plane[half] : (of_plane[half] << log_radix) + of_plane[kSums + half];
    }

    // The same of both planes as one, whose sums nothing else wants
    INFINI_INLINE void store_joined([[maybe_unused]] int8_t* to, [[maybe_unused]] const Planes<P>& planes,
                                    [[maybe_unused]] int32_t (&found)[kSums]) const {
#if defined(INFINI_AVX512)
        const auto joined = [&](int i) INFINI_INLINE {
            return (__m512i)((planes.of[0][i] << log_radix) + planes.of[P - 1][i]);
        };
        const __m512i all = _mm512_permutexvar_epi16(_mm512_load_si512(kEvenOnesFirst.of),
                                                     _mm512_packs_epi32(joined(0), joined(1)));
        _mm512_storeu_si512(to, all);
        const __m512i pairs = _mm512_dpwssd_epi32(_mm512_setzero_si512(), _mm512_set1_epi16(1), all);
        found[0] = _mm512_mask_reduce_add_epi32(0x00ff, pairs);
        found[1] = _mm512_mask_reduce_add_epi32(0xff00, pairs);
#endif
    }

    // Of the whole group, then of either half
    INFINI_INLINE void put_totals(const int32_t (&found)[kSums], float scale) {
        *totals = scale * static_cast<float>(found[0] + found[1]);
        for (int half = 0; has_halves && half < kSums; ++half)
            totals[(1 + half) * apart] = scale * static_cast<float>(found[half]);
        totals += kTotals * apart;
    }
};

// A run of a row's spans, the first of them at x, whose divisions overlap. Infinity less itself is NaN: what
// is not finite makes every product of its row NaN.
template <int P>
void round_spans(const Activations& to, int64_t row, const float* x, int64_t begin, int64_t end) {
    const float most = static_cast<float>(127 * to.radix);
    const int span = to.span();
    const int64_t first = begin << to.log_groups, at = to.at(first, row);
    GroupPlace<P> place(to, first, row);
    float inverse[kRoundedRun];
    float* scale = to.scale + at;
    for (int64_t s = begin; s < end; ++s, scale += place.apart) {
        const float largest = largest_magnitude(x + (s - begin) * span, span);
        inverse[s - begin] = largest >= 0x1p-100f ? most / largest : 0.0f;
        *scale = largest / most + (largest - largest);
    }
    scale = to.scale + at;
    for (int64_t s = begin; s < end; ++s, x += span, scale += place.apart, place.q += place.apart * P * span)
        for (int i = 0; i < span; i += kGroup)
            place.round(place.q + (place.is_joined ? 2 * i : i), x + i, inverse[s - begin], *scale);
}

inline void round_spans(const Activations& to, int64_t row, const float* x, int64_t begin, int64_t end) {
    return to.num_planes == 2 ? round_spans<2>(to, row, x, begin, end)
                              : round_spans<1>(to, row, x, begin, end);
}

// Rows that fill up the last block are scaled by nothing: what lay there before could be numbers so small
// that a product with them takes a hundred times as long as with others.
inline void clear_spans(const Activations& to, int64_t row, int64_t begin, int64_t end) {
    const int num_groups = 1 << to.log_groups;
    for (int64_t g = begin * num_groups; g < end * num_groups; ++g) {
        to.scale[to.at(g, row)] = *to.total_at(g, row, 0, kGroup) = 0;
        for (int half = 0; half < kSums; ++half) *to.total_at(g, row, half, kSumLength) = 0;
    }
}

// Parts of the rows row_at(0), row_at(1) ...: of num_parts(), each is a span of all rows of a block. Those
// have their scales and sums in the same cache lines, which two threads that had a row each would take from
// each other again and again; a thread goes on to the next row while they are near.
template <class RowAt>
inline void round_parts(const Activations& to, RowAt&& row_at, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
        const int64_t block = at / to.num_spans(), first = at % to.num_spans(),
                      last = smaller(smaller(to.num_spans(), first + end - at), first + kRoundedRun);
        for (int64_t row = block << to.log_rows; row < (block + 1) << to.log_rows; ++row)
            if (row < to.num_rows)
                round_spans(to, row, row_at(row) + first * to.span(), first, last);
            else
                clear_spans(to, row, first, last);
        at += last - first;
    }
}

inline void round_rows(const Activations& to, const Tensor& x) {
    const int64_t worth = to.num_rows == 1 ? kRoundedLoneElements : kRoundedGrainElements,
                  grain = worth / to.part_elements() + 1;
    const auto row_at = [&](int64_t row) { return Rows{x}.at<const float>(row); };
    parallel_for(to.num_parts(), grain,
                 [&](int64_t begin, int64_t end) { round_parts(to, row_at, begin, end); });
}

// The sums of a weight group of 16 or 32, of those that sums_at begins with
template <int P>
struct GroupSums {
    int32_t plane[P];

    INFINI_INLINE GroupSums(const int32_t* p, int64_t stride, int half, int group) {
        for (int i = 0; i < P; ++i) {
            plane[i] = p[(i * kSums + half) * stride];
            if (group == kGroup) plane[i] += p[(i * kSums + 1) * stride];
        }
    }
};

}  // namespace
}  // namespace infini::INFINI_LEVEL
