// route: ids[r] are the k experts of a row that are worth most, in falling order, the first of equals
//        first, NaN above all. An expert is worth its logit; where there is a bias or there are groups its
//        score, softmax or sigmoid of the logits, plus the bias, and only the groups count whose two best add
//        up to most. shares[r] are the scores of the chosen; where they are normalised, divided by their sum.
#include <algorithm>

#include "experts.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr float kNothing = -__builtin_inff();
constexpr float kLeastTotal = 1e-20f;  // so that scores that are all zero stay so

bool comes_before(float a, float b) { return a > b || (a != a && b == b); }

// Whatever comes is moved up past those that it comes before; the last one of k falls out.
void choose(int32_t* ids, float* chosen, int64_t k, const float* values, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (count == k && !comes_before(values[i], chosen[k - 1])) continue;
        int64_t at = count < k ? count++ : k - 1;
        for (; at > 0 && comes_before(values[i], chosen[at - 1]); --at)
            chosen[at] = chosen[at - 1], ids[at] = ids[at - 1];
        chosen[at] = values[i], ids[at] = static_cast<int32_t>(i);
    }
}

int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

// Of values that are filled up with minus infinity, which counts for nothing
struct Softmax {
    vf top, total;

    Softmax(const float* values, int64_t n) {
        float largest = values[0];
        for (int64_t i = 1; i < n; ++i)
            if (comes_before(values[i], largest)) largest = values[i];
        top = splat(largest);
        total = splat(sum_of(values, padded(n), [&](vf sum, vf v) { return sum + exp(v - top); }));
    }

    vf operator()(vf v) const { return exp(v - top) / total; }
};

// Nearer than `sigmoid`, by a division: experts are told apart by it.
vf exact_sigmoid(vf v) { return select(v < splat(-87.0f), vf{}, splat(1.0f) / (1.0f + exp_saturated(-v))); }

// What a row needs: logits and worth of experts, sums of groups, those kept; logits of the chosen
struct Room {
    float *row, *worth, *sums, *kept_sums, *chosen;
    int32_t* kept;

    Room(int64_t n, int64_t k) {
        const int64_t size = padded(n), count = 5 * size + padded(k);
        row = static_cast<float*>(scratch(Scratch::own, count * sizeof(float)));
        std::fill(row, row + count, kNothing);
        worth = row + size, sums = worth + size, kept_sums = sums + size, chosen = kept_sums + 2 * size;
        kept = reinterpret_cast<int32_t*>(kept_sums + size);
    }
};

// Minus infinity for all but the groups whose two best add up to most
void keep_groups(const Room& room, int64_t n, int64_t num_groups, int64_t num_kept) {
    const int64_t size = n / num_groups;
    for (int64_t g = 0; g < num_groups; ++g) {
        float best[2];
        int32_t ids[2];
        choose(ids, best, 2, room.worth + g * size, size);
        room.sums[g] = best[0] + best[1];
    }
    choose(room.kept, room.kept_sums, num_kept, room.sums, num_groups);
    for (int64_t g = 0; g < num_groups; ++g)
        if (std::find(room.kept, room.kept + num_kept, g) == room.kept + num_kept)
            std::fill_n(room.worth + g * size, size, kNothing);
}

// What experts are chosen by: unless something is added up, the logits, whose order is that of the scores
const float* find_worth(const Room& room, const Route& a, int64_t n) {
    const float* bias = static_cast<const float*>(a.bias.data);
    if (!bias && a.num_groups == 1) return room.row;
    if (a.scoring == Scoring::softmax)
        map(Softmax(room.row, n), n, room.worth, room.row);
    else
        map(exact_sigmoid, n, room.worth, room.row);
    if (bias) map([](vf score, vf b) { return score + b; }, n, room.worth, room.worth, bias);
    if (a.num_groups > 1) keep_groups(room, n, a.num_groups, a.num_kept);
    return room.worth;
}

// Of the chosen, whose logits these are
void find_shares(float* shares, const Room& room, const Route& a, int64_t k, int64_t n) {
    if (a.scoring == Scoring::softmax) {
        map(a.normalizes ? Softmax(room.chosen, k) : Softmax(room.row, n), k, shares, room.chosen);
        return;
    }
    map(exact_sigmoid, k, shares, room.chosen);
    if (!a.normalizes) return;
    float total = kLeastTotal;
    for (int64_t i = 0; i < k; ++i) total += shares[i];
    map([&](vf score) { return score / splat(total); }, k, shares, shares);
}

template <class T>
void route_row(int32_t* ids, float* shares, const T* logits, const Route& a, int64_t k, int64_t n) {
    const Room room(n, k);
    map([](vf v) { return v; }, n, room.row, logits);
    choose(ids, room.chosen, k, find_worth(room, a, n), n);
    for (int64_t i = 0; i < k; ++i) room.chosen[i] = room.row[ids[i]];
    find_shares(shares, room, a, k, n);
}

}  // namespace

int64_t route(const Route& a) {
    const int64_t k = Rows{a.ids}.length(), n = Rows{a.logits}.length();
    with_type(a.logits.dtype, [&](auto type) {
        using T = decltype(type);
        for_rows(a.logits, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r)
                route_row(Rows{a.ids}.at<int32_t>(r), Rows{a.shares}.at<float>(r),
                          Rows{a.logits}.at<const T>(r), a, k, n);
        });
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
