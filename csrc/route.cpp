// route: ids[r] are the k largest of logits[r] in falling order, the first of equals first, NaN above all;
//        shares[r] what softmax gives those: of the whole row, or of them alone where shares are normalised.
#include "experts.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

bool comes_before(float a, float b) { return a > b || (a != a && b == b); }

// Whatever comes is moved up past those that it comes before; the last one of k falls out.
void choose(int32_t* ids, float* chosen, int64_t k, const float* logits, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (count == k && !comes_before(logits[i], chosen[k - 1])) continue;
        int64_t at = count < k ? count++ : k - 1;
        for (; at > 0 && comes_before(logits[i], chosen[at - 1]); --at)
            chosen[at] = chosen[at - 1], ids[at] = ids[at - 1];
        chosen[at] = logits[i], ids[at] = static_cast<int32_t>(i);
    }
}

int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

// Of values that are filled up with minus infinity, which counts for nothing
float sum_of_exponentials(const float* values, int64_t n, vf top) {
    return sum_of(values, padded(n), [&](vf sum, vf v) { return sum + exp(v - top); });
}

template <class T>
void route_row(int32_t* ids, float* shares, const T* logits, int64_t k, int64_t n, bool normalizes) {
    float* row = static_cast<float*>(scratch(Scratch::own, (padded(n) + padded(k)) * sizeof(float)));
    float* chosen = row + padded(n);
    for (int64_t i = 0; i < padded(n) + padded(k); ++i) row[i] = -__builtin_inff();
    map([](vf v) { return v; }, n, row, logits);
    choose(ids, chosen, k, row, n);
    const vf top = splat(chosen[0]);
    const vf total =
        splat(normalizes ? sum_of_exponentials(chosen, k, top) : sum_of_exponentials(row, n, top));
    map([&](vf v) { return exp(v - top) / total; }, k, shares, chosen);
}

}  // namespace

int64_t route(const Route& a) {
    const int64_t k = Rows{a.ids}.length(), n = Rows{a.logits}.length();
    with_type(a.logits.dtype, [&](auto type) {
        using T = decltype(type);
        for_rows(a.logits, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r)
                route_row(Rows{a.ids}.at<int32_t>(r), Rows{a.shares}.at<float>(r),
                          Rows{a.logits}.at<const T>(r), k, n, a.normalizes);
        });
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
