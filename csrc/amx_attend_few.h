// Few rows of attention in bfloat16, in vectors: from keys and values as they lie in memory, and summed in
// the order of tiles, so that a row has the bits it has among many (amx_attention.cpp)
#pragma once
#include "amx_bf16.h"
#include "attention_runs.h"

namespace infini::INFINI_LEVEL {
namespace {

// The pairs of groups in which these slots lie
inline Range pairs_of(Range slots) { return {slots.begin / kLine, (slots.end + kLine - 1) / kLine}; }

// scores[m][0:16 N] = q[m] . the keys of N groups, while as much of `ahead` is asked for
template <int M, int N>
void score_rows(float (*scores)[kSplit], const float* const* q, const bf16* const* keys, int64_t stride,
                int64_t dim, const bf16* const* ahead) {
    vf sums[M][N] = {};
    for (int64_t first = 0; first < dim; first += kLine) {
        vf even[M][N] = {}, odd[M][N] = {};
        for (int64_t d = first; d < first + kLine; d += 2)
            unrolled<N>([&](auto n) INFINI_INLINE {
                ask_for(ahead[n] + d * kLanes);
                const vf a = load(keys[n] + d * stride), b = load(keys[n] + (d + 1) * stride);
                unrolled<M>([&](auto m) INFINI_INLINE {
                    even[m][n] = fma(splat(q[m][d]), a, even[m][n]);
                    odd[m][n] = fma(splat(q[m][d + 1]), b, odd[m][n]);
                });
            });
        unrolled<M>([&](auto m) INFINI_INLINE {
            unrolled<N>([&](auto n) INFINI_INLINE { sums[m][n] += even[m][n] + odd[m][n]; });
        });
    }
    unrolled<M>([&](auto m) INFINI_INLINE {
        unrolled<N>([&](auto n) INFINI_INLINE { store(scores[m] + n * W, sums[m][n]); });
    });
}

// sums[m][n] += weights[m][j] * N vectors of the values of these slots of a group, where `is_spoilt` of those
// that are finite; while as much of `ahead` is asked for, if there is any
template <bool is_spoilt, int M, int N>
INFINI_INLINE inline void add_group(vf (&sums)[M][N], const float (*weights)[kSplit], const bf16* values,
                                    int64_t stride, Range slots, const bf16* ahead, int64_t dim) {
    for (int64_t j = slots.begin; j < slots.end; ++j) {
        for (int64_t d = 0; ahead && d < dim; d += kLine) ask_for(ahead + j % kLanes * dim + d);
        unrolled<N>([&](auto n) INFINI_INLINE {
            vf v = load(values + j % kLanes * stride + n * W);
            if (is_spoilt) v = select(v - v == vf{}, v, vf{});
            unrolled<M>([&](auto m) INFINI_INLINE { sums[m][n] = fma(splat(weights[m][j]), v, sums[m][n]); });
        });
    }
}

struct FewRows {
    int count;
    int64_t dim;
    Range slots;  // of the split, that any of them sees
    const Split<bf16>& found;

    // scores[m] = queries[m] . the keys, by whole pairs of groups
    void score(float (*scores)[kSplit], const float (*queries)[kMaxDim]) const {
        const float* q[kAttentionLoneRows];
        for (int row = 0; row < count; ++row) q[row] = queries[row];
        with_count([&](auto m) {
            constexpr int kMost = m < kAttentionLoneRows ? 4 : 2;  // groups that have room in registers
            const auto score = [&](auto n, int64_t group) {
                score_rows<m, n>(reinterpret_cast<float (*)[kSplit]>(&scores[0][group * kLanes]), q,
                                 found.keys + group, found.key_stride, dim, found.values + group);
            };
            const int64_t last = 2 * pairs_of(slots).end;
            int64_t group = 2 * pairs_of(slots).begin;
            for (; group + kMost <= last; group += kMost) score(std::integral_constant<int, kMost>{}, group);
            if (group < last) score(std::integral_constant<int, 2>{}, group);
        });
    }

    // to[m] = the values, weighted by weights[m]; where `is_spoilt`, those that are finite
    void add(float* to, const float (*weights)[kSplit], bool is_spoilt, const Split<bf16>& next) const {
        constexpr int kTogether = 4;  // vectors of columns
        memset(to, 0, count * dim * sizeof(float));
        with_count([&](auto m) {
            int64_t column = 0;
            for (; column + kTogether * W <= dim; column += kTogether * W)
                add_columns<m, kTogether>(to + column, weights, is_spoilt, column, next);
            if (column < dim) add_columns<m, 2>(to + column, weights, is_spoilt, column, next);
        });
    }

private:
    // Calls f with the number of rows
    template <class F>
    void with_count(F&& f) const {
        unrolled<kAttentionLoneRows>([&](auto m) {
            if (count == m + 1) f(std::integral_constant<int, m + 1>{});
        });
    }

    template <int M, int N>
    void add_columns(float* to, const float (*weights)[kSplit], bool is_spoilt, int64_t column,
                     const Split<bf16>& next) const {
        for (int64_t pair = pairs_of(slots).begin; pair < pairs_of(slots).end; ++pair)
            if (is_spoilt)
                add_pair<true, M, N>(to, weights, pair, column, next);
            else
                add_pair<false, M, N>(to, weights, pair, column, next);
    }

    // N vectors of the values of a pair of groups, as a tile sums them
    template <bool is_spoilt, int M, int N>
    void add_pair(float* to, const float (*weights)[kSplit], int64_t pair, int64_t column,
                  const Split<bf16>& next) const {
        vf sums[2][M][N] = {};
        unrolled<2>([&](auto half) INFINI_INLINE {
            const int64_t group = 2 * pair + half;
            const Range own{larger(slots.begin, group * kLanes), smaller(slots.end, (group + 1) * kLanes)};
            add_group<is_spoilt>(sums[half], weights, found.values[group] + column, found.value_stride, own,
                                 column == 0 ? next.keys[group] : nullptr, dim);
        });
        unrolled<M>([&](auto m) INFINI_INLINE {
            unrolled<N>([&](auto n) INFINI_INLINE {
                float* at = to + m * dim + n * W;
                store(at, load(at) + (sums[0][m][n] + sums[1][m][n]));
            });
        });
    }
};

}  // namespace
}  // namespace infini::INFINI_LEVEL
