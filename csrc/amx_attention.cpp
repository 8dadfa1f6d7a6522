// Attention of models in bfloat16, over pools of it, in AMX tile registers. A tile of 16 rows, each the query
// of one token's head, meets 16 keys, or 16 columns of 32 values; rows know nothing of each other. Weights
// are rounded to bfloat16, as what comes in is and what goes out. What is computed, and how it is shared out,
// attention_runs.h says.
//
// Tiles multiply pairs: of the head size, two that follow each other; of slots, the first of one group and of
// the next, and so on. A tile sums the first ones of 16 pairs and the second ones, each by itself, and then
// adds both. Keys and values of a split are put in pairs (amx_attend_pairs.h) and met by all tiles; few rows
// need none, and are summed in the same order (amx_attend_few.h). Scores are logarithms to base 2.
#include "amx_attend_few.h"
#include "amx_attend_pairs.h"

namespace infini::INFINI_BASE {
int64_t attention(const Attention& a);
}

namespace infini::INFINI_LEVEL {
namespace {

static_assert(W == kSide && kLanes == kSide);
constexpr int kPairs = kSplit / kLine;    // of groups
constexpr int64_t kTileStates = 1 << 16;  // floats of one run's states
constexpr float kLog2e = 1.44269504f;
constexpr float kLeast = -0x1p126f;  // that is taken off a score, so that minus infinity stays what it is

// ---- a run ------------------------------------------------------------------------------------------------

// One number of each of 16 rows, from as many lanes
template <class F>
vf reduce_rows(vf (&rows)[kSide], F f) {
    transpose(reinterpret_cast<__m512i*>(rows));
    for (int half = kSide / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) rows[i] = f(rows[i], rows[i + half]);
    return rows[0];
}

// What is known of 16 rows after some keys: the largest score of each, the sum of 2^(score - max), and values
// weighted by that.
struct TileState {
    float* data;  // [16] [16] [16][D]

    float* tops() const { return data; }
    float* sums() const { return data + kSide; }
    float* values() const { return data + 2 * kSide; }
};

// The slots of a split that the rows of a tile see, {0, 0} where that is none
struct Seen { Range rows[kSide], any; };

inline Range both(Range a, Range b) {
    if (a.end == 0) return b;
    if (b.end == 0) return a;
    return {smaller(a.begin, b.begin), larger(a.end, b.end)};
}

// What a thread works with
struct TileRoom {
    alignas(64) uint32_t keys[kMaxDim * kSplit / 2], values[kMaxDim * kSplit / 2];  // of a split
    alignas(64) float scores[kSide][kSplit];
    alignas(64) uint32_t weights[kPairs][kTileWords];
    alignas(64) float plain[kSide][kSplit];  // weights of rows that go through vectors
    alignas(64) float tops[kSide];           // what is taken off a row's scores
    vf totals[kSide];                        // of a row's weights
    alignas(64) float states[kTileStates], parts[kTileStates];
    alignas(64) uint32_t queries[kTileStates / 2];
    float query[kMaxDim], lone_queries[kAttentionLoneRows][kMaxDim];
};

struct TileKernel {
    using Element = bf16;
    const Run& run;
    const Problem& p = run.p;
    const int64_t count = run.num_rows(), num_tiles = (count + kSide - 1) / kSide, depth = p.dim / kLine;
    const int rows = static_cast<int>(smaller(count, kSide));                              // of a tile
    const float cap = p.a.softcap * kLog2e, factor = cap > 0 ? 1.0f : p.a.scale * kLog2e;  // of a score
    const FlushToZero flushed;
    TileRoom& room = *own_scratch<TileRoom>();
    bool is_spoilt = false;  // by values that are not finite, which pairs then leave out

    explicit TileKernel(const Run& run) : run(run) {
        if (!is_few()) configure_tiles(TileConfig(static_cast<uint8_t>(rows), 64));
    }
    ~TileKernel() {
        if (!is_few()) release_tiles();
    }
    TileKernel(const TileKernel&) = delete;

    static int64_t state_size(const Problem& p) { return kSide * (2 + p.dim); }
    static int64_t num_floats(const Run& run) {
        return (run.num_rows() + kSide - 1) / kSide * state_size(run.p);
    }
    static int64_t most_tokens(const Problem& p) {
        return smaller(kAttentionRunTokens, larger(1, kTileStates / state_size(p) * kSide / p.group));
    }

    float* parts() const { return room.parts; }
    TileState of(float* states, int64_t tile) const { return {states + tile * state_size(p)}; }

    // Few rows need no tiles.
    bool is_few() const { return count <= kAttentionLoneRows; }

    // [tile][of D / 32][row][of D]
    uint32_t* queries(int64_t tile) const { return room.queries + tile * depth * kTileWords; }

    void read_queries() {
        for (int64_t i = 0; is_few() && i < count; ++i)
            p.query(room.lone_queries[i], run.token(i), run.head(i));
        if (is_few()) return;
        memset(queries(num_tiles - 1), 0, depth * kTileWords * sizeof(uint32_t));
        for (int64_t i = 0; i < count; ++i) {
            const auto* from = static_cast<const bf16*>(p.a.q.data) + run.token(i) * p.a.q.stride[0] +
                               run.head(i) * p.a.q.stride[1];
            uint32_t* to = queries(i / kSide) + i % kSide * kSide;
            for (int64_t k = 0; k < depth; ++k)
                _mm512_store_si512(to + k * kTileWords, _mm512_loadu_si512(from + k * kLine));
        }
    }

    // ---- what is known

    void start() {
        for (int64_t tile = 0; tile < num_tiles; ++tile) forget(of(room.states, tile));
    }

    void forget(TileState state) const {
        store(state.tops(), splat(-__builtin_inff()));
        memset(state.sums(), 0, (state_size(p) - kSide) * sizeof(float));
    }

    void fold(float* parts, int64_t) {
        for (int64_t tile = 0; tile < num_tiles; ++tile) fold_tile(of(room.states, tile), of(parts, tile));
    }

    void fold_tile(TileState all, TileState part) const {
        const vf top = max(load(all.tops()), load(part.tops())), least = max(splat(kLeast), top);
        alignas(64) float kept[kSide], added[kSide];
        store(kept, exp2(load(all.tops()) - least));
        store(added, exp2(load(part.tops()) - least));
        store(all.tops(), top);
        store(all.sums(), fma(load(all.sums()), load(kept), load(part.sums()) * load(added)));
        for (int row = 0; row < rows; ++row)
            for (int64_t i = row * p.dim; i < (row + 1) * p.dim; i += W)
                store(all.values() + i,
                      fma(load(all.values() + i), splat(kept[row]), load(part.values() + i) * added[row]));
    }

    void finish() {
        for (int64_t i = 0; i < count; ++i) {
            const TileState state = of(room.states, i / kSide);
            const int64_t row = i % kSide;
            const float sunk = exp2(splat(p.sink(run.head(i)) * kLog2e - state.tops()[row]))[0];
            const float* values = state.values() + row * p.dim;
            for (int64_t d = 0; !is_few() && d < p.dim; d += kLine) reorder(room.query + d, values + d);
            p.write(is_few() ? values : room.query, state.sums()[row] + sunk, run.token(i), run.head(i));
        }
    }

    // ---- a split

    // Rows beyond the last see what that sees.
    Seen seen_by(int64_t tile, int64_t split) const {
        Seen found{};
        for (int row = 0; row < rows; ++row) {
            const int64_t n = run.token(smaller(tile * kSide + row, count - 1));
            if (p.sees(n, split)) found.rows[row] = p.visible(n, split);
            found.any = both(found.any, found.rows[row]);
        }
        return found;
    }

    void attend(float* parts, int64_t split, const Split<bf16>& found, const Split<bf16>* next) {
        Range any{0, 0};
        for (int64_t n = run.begin; n < run.end; ++n)
            if (p.sees(n, split)) any = both(any, p.visible(n, split));
        is_spoilt = false;
        if (!is_few()) read_pairs(found, any, *next);
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const TileState part = of(parts, tile);
            const Seen seen = seen_by(tile, split);
            if (seen.any.end == 0) {
                forget(part);
                continue;
            }
            score(tile, seen, found);
            weigh(part, seen, found, *next);
            if (!is_finite(part)) {
                score_again(part, tile, seen, found);
                leave_out_infinite(room.values, kSplit / 2 * p.dim);
                is_spoilt = true;
                weigh(part, seen, found, *next);
            }
            if (is_spoilt) add_infinite(part, seen, found);
        }
    }

    // All pairs of which any row sees a slot. Values that no row sees are zero.
    void read_pairs(const Split<bf16>& found, Range any, const Split<bf16>& next) {
        const auto [first, last] = pairs_of(any);
        for (int64_t group = 2 * first; group < 2 * last; ++group, stay_awake())
            pair_keys(room.keys + group * depth * kTileWords, found.keys[group], found.key_stride, p.dim,
                      found.values[group]);
        for (int64_t pair = first; pair < last; ++pair, stay_awake()) read_values(found, any, pair, next);
    }

    // The value of a slot that is in the range
    static const bf16* value_of(const Split<bf16>& found, Range any, int64_t slot) {
        if (slot < any.begin || slot >= any.end) return nullptr;
        return found.values[slot / kLanes] + slot % kLanes * found.value_stride;
    }

    void read_values(const Split<bf16>& found, Range any, int64_t pair, const Split<bf16>& next) {
        for (int64_t j = 0; j < kSide; ++j)
            pair_values(room.values + (pair * kSide + j) * p.dim, value_of(found, any, pair * kLine + j),
                        value_of(found, any, pair * kLine + kSide + j), p.dim,
                        next.keys[2 * pair] + j * p.dim, next.keys[2 * pair + 1] + j * p.dim);
    }

    // ---- scores

    void score(int64_t tile, const Seen& seen, const Split<bf16>& found) {
        const int64_t first = 2 * pairs_of(seen.any).begin, last = 2 * pairs_of(seen.any).end;
        if (is_few())
            FewRows{rows, p.dim, seen.any, found}.score(room.scores, room.lone_queries);
        else
            for (int64_t group = first; group < last; group += kTogether) {
                const Words keys{room.keys + group * depth * kTileWords, 64, depth * kTileWords, kTileWords};
                const Sums to{&room.scores[0][group * kLanes], sizeof room.scores[0]};
                if (last - group >= kTogether)
                    multiply<kTogether>(to, queries(tile), keys, depth);
                else
                    multiply<2>(to, queries(tile), keys, depth);
            }
        for (int row = 0; row < rows; ++row) {
            if (cap > 0)
                map([&](vf s) { return cap * tanh(s * (p.a.scale / p.a.softcap)); }, (last - first) * kLanes,
                    room.scores[row] + first * kLanes, room.scores[row] + first * kLanes);
            hide(row, seen);
        }
    }

    // What a row does not see counts for nothing.
    void hide(int row, const Seen& seen) {
        const Range own = seen.rows[row];
        const auto hide_group = [&](int64_t group) {
            const int64_t begin = larger(0, own.begin - group * kLanes),
                          end = larger(0, smaller(kLanes, own.end - group * kLanes));
            const unsigned is_seen = begin < end ? (1u << end) - (1u << begin) : 0;
            _mm512_mask_store_ps(room.scores[row] + group * kLanes, static_cast<__mmask16>(~is_seen),
                                 splat(-__builtin_inff()));
        };
        const int64_t first = 2 * pairs_of(seen.any).begin, last = 2 * pairs_of(seen.any).end;
        for (int64_t group = first; group < last && group * kLanes < own.begin; ++group) hide_group(group);
        for (int64_t group = larger(own.end / kLanes, first); group < last; ++group) hide_group(group);
    }

    // ---- weights and values

    void weigh(TileState part, const Seen& seen, const Split<bf16>& found, const Split<bf16>& next) {
        find_tops(part, seen);
        if (is_few())
            add_few(part, {rows, p.dim, seen.any, found}, next);
        else
            for (int64_t column = 0; column < p.dim; column += kTogether * kSide)
                if (p.dim - column >= kTogether * kSide)
                    add_columns<kTogether>(part, seen, column);
                else
                    add_columns<2>(part, seen, column);
        store_totals(part);
    }

    void add_few(TileState part, const FewRows& few, const Split<bf16>& next) {
        for (int64_t pair = pairs_of(few.slots).begin; pair < pairs_of(few.slots).end; ++pair)
            weigh_pair(pair);
        few.add(part.values(), room.plain, is_spoilt, next);
    }

    void find_tops(TileState part, const Seen& seen) {
        const auto [first, last] = pairs_of(seen.any);
        vf lanes[kSide];
        for (vf& lane : lanes) lane = splat(-__builtin_inff());
        for (int row = 0; row < rows; ++row) {
            for (int64_t j = first * kLine; j < last * kLine; j += W)
                lanes[row] = max(lanes[row], load(room.scores[row] + j));
            if (!is_few()) stay_awake();
        }
        const vf tops = factor * reduce(
                                     lanes, [](vf a, vf b) { return max(a, b); },
                                     [](vf lane) { return _mm512_reduce_max_ps(lane); });
        store(part.tops(), tops);
        store(room.tops, max(splat(kLeast), tops));
        for (vf& total : room.totals) total = vf{};
    }

    void store_totals(TileState part) const {
        store(part.sums(),
              reduce(room.totals, [](vf a, vf b) { return a + b; }, [](vf total) { return sum(total); }));
    }

    // One number of each row from its lanes, by a function of two vectors, or of one where rows are few
    template <class F, class G>
    vf reduce(vf (&lanes)[kSide], F of_two, G of_one) const {
        if (!is_few()) return reduce_rows(lanes, of_two);
        vf found = lanes[kSide - 1];
        for (int row = 0; row < rows; ++row) found[row] = of_one(lanes[row]);
        return found;
    }

    // The scores of a pair of groups become weights.
    INFINI_INLINE void weigh_pair(int64_t pair) {
        for (int row = 0; row < rows; ++row) {
            const float* score = room.scores[row] + pair * kLine;
            const vf least = splat(room.tops[row]);
            const vf a = rounded(exp2(load(score) * factor - least)),
                     b = rounded(exp2(load(score + W) * factor - least));
            room.totals[row] += a + b;
            if (is_few())
                store(room.plain[row] + pair * kLine, a), store(room.plain[row] + pair * kLine + W, b);
            else
                _mm512_store_si512(room.weights[pair] + row * kSide, paired(a, b));
        }
    }

    // N tiles of columns. With the first of them, a pair is weighed while tiles multiply the one before.
    template <int N>
    void add_columns(TileState part, const Seen& seen, int64_t column) {
        const auto [first, last] = pairs_of(seen.any);
        const Words values{room.values + column, p.dim * 4, kSide, kSide * p.dim};
        clear_sums<N>();
        if (column == 0) weigh_pair(first);
        for (int64_t pair = first; pair < last; ++pair) {
            if (column == 0 && pair + 1 < last) weigh_pair(pair + 1);
            add_tiles<N>(room.weights[pair], values, values.data + pair * values.below);
        }
        store_sums<N>({part.values() + column, p.dim * 4});
    }

    // ---- what is not finite

    // A number that is not finite makes NaN of a row, or of all.
    bool is_finite(TileState part) const {
        vf total = load(part.sums());
        for (int64_t i = 0; i < rows * p.dim; i += W) total += load(part.values() + i) * 0.0f;
        return _mm512_cmpunord_ps_mask(total, total) == 0;
    }

    // Scores that are NaN, because one part of a number may be zero and a key infinite, found by numbers that
    // are whole
    void score_again(TileState part, int64_t tile, const Seen& seen, const Split<bf16>& found) {
        const auto [first, last] = pairs_of(seen.any);
        for (int row = 0; row < rows && tile * kSide + row < count; ++row) {
            if (part.sums()[row] == part.sums()[row]) continue;
            const int64_t i = tile * kSide + row;
            const float* q = p.query(room.query, run.token(i), run.head(i));
            for (int64_t group = 2 * first; group < 2 * last; ++group) {
                float* scores = room.scores[row] + group * kLanes;
                const vf before = load(scores);
                store(scores,
                      select(before == before, before, whole_scores(q, found.keys[group], found.key_stride)));
            }
        }
    }

    vf whole_scores(const float* q, const bf16* keys, int64_t stride) const {
        vf sum{};
        for (int64_t d = 0; d < p.dim; ++d) sum = fma(splat(q[d]), load(keys + d * stride), sum);
        return cap > 0 ? cap * tanh(sum * (p.a.scale / p.a.softcap)) : sum;
    }

    // Values that were left out, for the rows that see them
    void add_infinite(TileState part, const Seen& seen, const Split<bf16>& found) {
        for (int64_t slot = seen.any.begin; slot < seen.any.end; ++slot) {
            const bf16* value = found.values[slot / kLanes] + slot % kLanes * found.value_stride;
            for (int row = 0; row < rows; ++row)
                if (slot >= seen.rows[row].begin && slot < seen.rows[row].end) {
                    const float weight = exp2(splat(room.scores[row][slot] * factor - room.tops[row]))[0];
                    add_infinite(part.values() + row * p.dim, value, weight);
                }
        }
    }

    void add_infinite(float* to, const bf16* value, float weight) const {
        for (int64_t d = 0; d < p.dim; ++d) {
            const float v = load_n(value + d, 1)[0];
            if (v - v != 0) to[is_few() ? d : place_of(d)] += weight * v;
        }
    }
};

// What only depends on the model: others go through vectors.
bool suits_tiles(const Attention& a) {
    return a.keys.dtype == DType::bf16 && a.q.dtype == DType::bf16 && a.q.shape[2] % kLine == 0 &&
           a.scale > 0;
}

}  // namespace

int64_t attention(const Attention& a) {
    if (!suits_tiles(a)) return INFINI_BASE::attention(a);
    if (const int64_t bad = first_bad_token(a, a.window); bad != kOk) return bad;
    if (num_elements(a.q) == 0) return kOk;
    const Problem p(a);
    attend<TileKernel>(p);
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
