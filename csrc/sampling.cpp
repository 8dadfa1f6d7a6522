// random_sample: with w[i] = exp((logits[i] - max) / temperature), put the tokens in falling order of logits
// (equal ones: lower id first), keep the first topk (0: all), of these the fewest whose weight reaches
// topp of theirs, and take the first kept token at which the running weight passes random_val of the kept
// weight. temperature 0 takes the first token of the order. O(vocabulary): only the buckets in which a set or
// the walk ends get sorted. Threads share out the pieces of a row, whose bounds its length alone fixes.
// sample: the same for each row, once weights below min_p are 0. A row from which nothing can be drawn gets
// -1.
// logprobs: logits[i] - max - log(sum(exp(logits - max))) of the given token, with its rank, and of the
// num_top largest logits, with their ids.
// adjust_logits: each row after the penalties of the tokens before it, -inf where a token is not allowed.
// There a row is read by one thread, in an order that its length alone fixes.
#include "sampling.h"

#include "falling.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr float kLargest = 0x1.fffffep127f;

// The largest of a row, and whether all are less than infinity
template <class T>
bool are_good(const T* logits, int64_t n, float* largest) {
    constexpr int kAtOnce = 4;  // which hide the latency of a maximum
    vf tops[kAtOnce];
    vi is_good[kAtOnce];
    for (int j = 0; j < kAtOnce; ++j) tops[j] = splat(-__builtin_inff()), is_good[j] = vi{} - 1;
    const auto look = [&](int j, vf v) INFINI_INLINE {
        tops[j] = max(tops[j], v);
        is_good[j] &= v <= splat(kLargest);
    };
    int64_t i = 0;
    for (; i + kAtOnce * W <= n; i += kAtOnce * W)
        for (int j = 0; j < kAtOnce; ++j) look(j, load(logits + i + j * W));
    for (; i < n; i += W) look(0, vector_at(logits, i, n, -__builtin_inff()));
    *largest = max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    return bits_of(is_good[0] & is_good[1] & is_good[2] & is_good[3]) == bits_of(vi{} - 1);
}

// The first place of a row where is_there(vector) has a lane, or n
template <class T, class F>
int64_t first_where(const T* logits, int64_t n, F&& is_there) {
    for (int64_t i = 0; i < n; i += W)
        if (const uint32_t lanes = bits_of(is_there(vector_at(logits, i, n, -__builtin_inff()))))
            return i + __builtin_ctz(lanes);
    return n;
}

// How a token is drawn from a row
struct Draw {
    double random_val, topp, temperature;
    float min_p;
    int64_t topk;

    // Weights are defined for no other temperature.
    bool is_sound() const { return temperature >= 0 && temperature <= kLargest; }
    // What is less than a normal float32 may be 0 where there is a division by it.
    bool is_greedy() const { return temperature < 0x1p-126 || topk == 1 || random_val == 0; }
};

// Of tokens that weigh `sum`
template <class T>
int64_t draw_of(FallingWeights<T>& falling, double sum, const Draw& how) {
    Taken kept{falling.n, sum};
    if (how.topk > 0 && how.topk < kept.count) kept = falling.take(how.topk, [](double) { return false; });
    if (how.topp < 1)
        kept = falling.take(kept.count, [wanted = how.topp * kept.weight](double w) { return w >= wanted; });
    // Rounding may leave what all weigh short of the target.
    return falling.last_of(
        falling.take(kept.count, [target = how.random_val * kept.weight](double w) { return w > target; }));
}

constexpr int64_t kPiece = 4096;  // logits of a row, so that threads share out a lone one

struct Piece {
    float top;
    bool is_good;
    double sum;
    Level level;  // the highest, whose tokens lie where the piece begins
};

// A row that a token is drawn from: its pieces are looked at, then, where it is not greedy, they are weighed.
template <class T>
struct DrawnRow {
    const T* logits;
    const int64_t n;
    const Draw how;
    float* weights;
    int32_t* found;
    Piece* pieces;

    int64_t num_pieces() const { return (n + kPiece - 1) / kPiece; }
    int64_t size(int64_t i) const { return smaller(kPiece, n - i * kPiece); }

    void look(int64_t i) const { pieces[i].is_good = are_good(logits + i * kPiece, size(i), &pieces[i].top); }

    float top() const {
        float top = -__builtin_inff();
        for (int64_t i = 0; i < num_pieces(); ++i) top = pieces[i].top > top ? pieces[i].top : top;
        return top;
    }

    bool is_weighed() const { return how.is_sound() && !how.is_greedy(); }

    void weigh(int64_t i) const {
        const double inverse = 1 / how.temperature;  // a normal number, so that -inf stays what it is
        const vf top = splat(this->top()),
                 scale = splat(static_cast<float>(inverse > 0x1p-126 ? inverse : 0x1p-126));
        const vf least = splat(how.min_p < 1 ? how.min_p : 1);  // the largest logit is always kept
        const auto weight_of = [&](vf v) {
            const vf weight = exp((v - top) * scale);
            return select(weight < least, vf{}, weight);
        };
        const int64_t begin = i * kPiece;
        map(weight_of, size(i), weights + begin, logits + begin);
        pieces[i].sum = sum_in_doubles(weights + begin, size(i), 0, [](vf weight) { return weight; });
        pieces[i].level = find_level(found + begin, weights, begin, begin + size(i), kHighest);
    }

    // The first bad logit (NaN or +inf), n when every logit is -inf, else kOk; *best is the first largest
    int64_t find_best(int64_t* best) const {
        const auto first = [&](int64_t i, auto&& is_there) {
            return i * kPiece + first_where(logits + i * kPiece, size(i), is_there);
        };
        const vf highest = splat(top());
        for (int64_t i = 0; i < num_pieces(); ++i)
            if (!pieces[i].is_good) return first(i, [](vf v) { return ~(v <= splat(kLargest)); });
        if (highest[0] == -__builtin_inff()) return n;
        int64_t i = 0;
        while (pieces[i].top != highest[0]) ++i;
        *best = first(i, [&](vf v) { return v == highest; });
        return kOk;
    }

    // As find_best, with the token that is drawn
    int64_t draw(int64_t* token) const {
        const int64_t status = find_best(token);
        if (status != kOk || !is_weighed()) return status;
        auto* order = static_cast<int32_t*>(scratch(Scratch::own, n * sizeof(int32_t)));
        double sum = 0;
        Level level;
        for (int64_t i = 0; i < num_pieces(); ++i) {
            const auto [count, rest] = pieces[i].level;
            memmove(found + level.count, found + i * kPiece, count * sizeof(int32_t));
            level = {level.count + count, level.rest > rest ? level.rest : rest};
            sum += pieces[i].sum;
        }
        FallingWeights<T> falling(weights, logits, n, found, order);
        falling.add_level(level);
        *token = draw_of(falling, sum, how);
        return kOk;
    }
};

template <class T>
struct Given {
    const T* logits;
    Draw how;
};

// Room for rows of n logits each
template <class T>
struct Rooms {
    const int64_t n, num_pieces = (n + kPiece - 1) / kPiece;
    const int64_t row_bytes = num_pieces * (sizeof(Piece) + kPiece * (sizeof(float) + sizeof(int32_t)));
    uint8_t* const begin;

    Rooms(int64_t n, int64_t num_rows)
        : n(n), begin(static_cast<uint8_t*>(scratch(Scratch::shared, num_rows * row_bytes))) {}

    DrawnRow<T> row(int64_t i, Given<T> given) const {
        auto* pieces = reinterpret_cast<Piece*>(begin + i * row_bytes);
        auto* weights = reinterpret_cast<float*>(pieces + num_pieces);
        return {given.logits, n, given.how, weights, reinterpret_cast<int32_t*>(weights + n), pieces};
    }
};

// The token and status of each row, told(i, status, token), as row_at(i) draws it
template <class RowAt, class Told>
void draw_together(int64_t num_rows, int64_t num_pieces, RowAt&& row_at, Told&& told) {
    const auto each_piece = [&](auto&& body) {
        parallel_for(num_rows * num_pieces, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) body(row_at(i / num_pieces), i % num_pieces);
        });
    };
    each_piece([](const auto& row, int64_t i) { row.look(i); });
    bool are_weighed = false;
    for (int64_t i = 0; i < num_rows; ++i) are_weighed |= row_at(i).is_weighed();
    if (are_weighed)
        each_piece([](const auto& row, int64_t i) {
            if (row.is_weighed()) row.weigh(i);
        });
    parallel_for(num_rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            int64_t token = -1;
            const int64_t status = row_at(i).draw(&token);
            told(i, status, token);
        }
    });
}

// told(i, status, token) of rows of n logits each, where given(i) has those and how the token is drawn; at
// most as many rows together as there are threads, since each takes twice the room of its logits
template <class T, class GivenAt, class Told>
void draw_rows(int64_t num_rows, int64_t n, GivenAt&& given, Told&& told) {
    const int64_t most = smaller(num_rows, num_threads());
    const Rooms<T> rooms(n, most);
    for (int64_t first = 0; first < num_rows; first += most)
        draw_together(
            smaller(most, num_rows - first), rooms.num_pieces,
            [&](int64_t i) { return rooms.row(i, given(first + i)); },
            [&](int64_t i, int64_t status, int64_t token) { told(first + i, status, token); });
}

// ---- logprobs ---------------------------------------------------------------------------------------------

template <class T>
int64_t count_larger(const T* logits, int64_t n, float value) {
    vi counts{};
    for (int64_t i = 0; i < n; i += W) {
        const vf v = vector_at(logits, i, n, -__builtin_inff());
        counts -= v > splat(value);  // where it holds, a lane is -1
    }
    int64_t total = 0;
    for (int i = 0; i < W; ++i) total += counts[i];
    return total;
}

// The `count` largest logits in falling order
template <class T>
void find_largest(int32_t* found, int64_t count, const T* logits, int64_t n) {
    const FallingOrder<T> falling{logits};
    for (int64_t i = 0; i < count; ++i) found[i] = static_cast<int32_t>(i);
    falling.make_heap(found, count);
    for (int64_t i = count; count && i < n; i += W) {
        const vf v = vector_at(logits, i, n, -__builtin_inff());
        for (uint32_t left = bits_of(v > splat(number(logits + found[0]))); left; left &= left - 1) {
            const auto token = static_cast<int32_t>(i + __builtin_ctz(left));
            if (!falling.goes_before(token, found[0])) continue;  // no more
            found[0] = token;
            falling.sift_down(found, 0, count);
        }
    }
    falling.sort_heap(found, count);
}

// A row without probabilities has no ids, and a token of -1 no rank.
template <class T>
void logprobs_row(int64_t* ids, float* values, const T* logits, int64_t n, int64_t token, int64_t num_top) {
    for (int64_t i = 0; i <= num_top; ++i) ids[i] = -1, values[i] = __builtin_nanf("");
    float top;
    if (!are_good(logits, n, &top) || top == -__builtin_inff()) return;
    const double log_sum =
        log(sum_in_doubles(logits, n, -__builtin_inff(), [&](vf v) { return exp(v - top); }));
    const auto logprob = [&](int64_t id) {
        return static_cast<float>(static_cast<double>(number(logits + id)) - top - log_sum);
    };
    if (token >= 0) ids[0] = 1 + count_larger(logits, n, number(logits + token)), values[0] = logprob(token);
    auto* largest = static_cast<int32_t*>(scratch(Scratch::own, num_top * sizeof(int32_t)));
    find_largest(largest, num_top, logits, n);
    for (int64_t i = 0; i < num_top; ++i) ids[1 + i] = largest[i], values[1 + i] = logprob(largest[i]);
}

// ---- adjust_logits ----------------------------------------------------------------------------------------

// The tokens of row r: the prompt's from `begin`, those drawn since from `prompt_end`
struct Span { int64_t begin, prompt_end, end; };

Span span_of(const AdjustLogits& a, int64_t r) {
    const auto* ends = static_cast<const int64_t*>(a.ends.data);
    return {r ? ends[2 * r - 1] : 0, ends[2 * r], ends[2 * r + 1]};
}

// The first bad token, or the first bad end, counted on from the length of the history; else kOk
int64_t find_bad(const AdjustLogits& a) {
    const int64_t length = a.history.shape[0], num_rows = a.logits.shape[0];
    const auto *ends = static_cast<const int64_t*>(a.ends.data),
               *history = static_cast<const int64_t*>(a.history.data);
    int64_t begin = 0;
    for (int64_t i = 0; i < 2 * num_rows; begin = ends[i++])
        if (ends[i] < begin || ends[i] > length) return length + i;
    for (int64_t i = 0; i < begin; ++i)
        if (history[i] < 0 || history[i] >= a.logits.shape[1]) return i;
    return kOk;
}

// What is counted of a token, for which the memory is zero before and after: 1 once it was seen, and 1 more
// each time it was drawn
void punish(float* y, int32_t* seen, const int64_t* history, Span tokens, const float* penalties) {
    const float repetition = penalties[0], presence = penalties[1], frequency = penalties[2];
    if (repetition == 1 && presence == 0 && frequency == 0) return;
    for (int64_t i = tokens.begin; i < tokens.prompt_end; ++i) seen[history[i]] = 1;
    for (int64_t i = tokens.prompt_end; i < tokens.end; ++i) seen[history[i]] += seen[history[i]] ? 1 : 2;
    for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        const int64_t id = history[i];
        if (!seen[id]) continue;
        const float count = static_cast<float>(seen[id] - 1);
        y[id] = y[id] < 0 ? y[id] * repetition : y[id] / repetition;
        if (count > 0) y[id] -= presence + frequency * count;
        seen[id] = 0;
    }
}

void forbid(float* y, const int32_t* allowed, int64_t n) {
    constexpr int64_t kBits = 32;
    for (int64_t begin = 0; begin < n; begin += kBits) {
        const auto word = static_cast<uint32_t>(allowed[begin / kBits]);
        if (word == ~uint32_t{}) continue;
        const int64_t count = smaller(kBits, n - begin);
        for (int64_t i = 0; i < count; ++i)
            if (!(word >> i & 1)) y[begin + i] = -__builtin_inff();
    }
}

template <class T>
void adjust_rows(const AdjustLogits& a) {
    const Rows y{a.y}, logits{a.logits}, penalties{a.penalties}, allowed{a.allowed};
    const int64_t n = logits.length();
    for_rows(a.logits, [&](int64_t begin, int64_t end) {
        auto* seen = static_cast<int32_t*>(scratch(Scratch::own, n * sizeof(int32_t)));
        memset(seen, 0, n * sizeof(int32_t));
        for (int64_t r = begin; r < end; ++r) {
            float* row = y.at<float>(r);
            if (a.y.data != a.logits.data) map([](vf v) { return v; }, n, row, logits.at<T>(r));
            punish(row, seen, static_cast<const int64_t*>(a.history.data), span_of(a, r),
                   penalties.at<float>(r));
            if (a.allowed.data) forbid(row, allowed.at<int32_t>(r), n);
        }
    });
}

}  // namespace

int64_t random_sample(const RandomSample& a) {
    int64_t status = kOk, token = 0;
    with_type(a.logits.dtype, [&](auto type) {
        using T = decltype(type);
        const Draw how{a.random_val, a.topp, a.temperature, 0, a.topk};
        draw_rows<T>(
            1, a.logits.shape[0],
            [&](int64_t) { return Given<T>{static_cast<const T*>(a.logits.data), how}; },
            [&](int64_t, int64_t found, int64_t drawn) { status = found, token = drawn; });
    });
    if (status != kOk) return status;
    if (a.y.dtype == DType::i64)
        *static_cast<int64_t*>(a.y.data) = token;
    else
        *static_cast<int32_t*>(a.y.data) = static_cast<int32_t>(token);
    return kOk;
}

int64_t sample(const Sample& a) {
    const Rows logits{a.logits}, settings{a.settings};
    const auto* uniforms = static_cast<const double*>(a.uniforms.data);
    const auto* top_k = static_cast<const int64_t*>(a.top_k.data);
    auto* y = static_cast<int64_t*>(a.y.data);
    with_type(a.logits.dtype, [&](auto type) {
        using T = decltype(type);
        const auto given = [&](int64_t r) {
            const float* s = settings.at<float>(r);
            return Given<T>{logits.at<T>(r), {uniforms[r], s[1], s[0], s[2], top_k[r]}};
        };
        draw_rows<T>(logits.count(), logits.length(), given, [&](int64_t r, int64_t status, int64_t token) {
            y[r] = status == kOk && given(r).how.is_sound() ? token : -1;
        });
    });
    return kOk;
}

int64_t logprobs(const Logprobs& a) {
    const Rows ids{a.ids}, values{a.values}, logits{a.logits};
    const auto* tokens = static_cast<const int64_t*>(a.tokens.data);
    for (int64_t r = 0; r < logits.count(); ++r)
        if (tokens[r] < -1 || tokens[r] >= logits.length()) return r;
    with_type(a.logits.dtype, [&](auto type) {
        for_rows(a.logits, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r)
                logprobs_row(ids.at<int64_t>(r), values.at<float>(r), logits.at<decltype(type)>(r),
                             logits.length(), tokens[r], a.num_top);
        });
    });
    return kOk;
}

int64_t adjust_logits(const AdjustLogits& a) {
    if (const int64_t status = find_bad(a); status != kOk) return status;
    with_type(a.logits.dtype, [&](auto type) { adjust_rows<decltype(type)>(a); });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
