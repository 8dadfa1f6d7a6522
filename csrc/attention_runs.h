// attention: y[n, h] = sum over j of softmax_j(scale * q[n, h] . keys[s, g, j]) * values[s, g, j], where
//            s = stream[n], g = h / (heads / kv heads), and j runs over the slots up to slot[n] (the last
//            `window` of them). With a soft cap a score is softcap * tanh(score / softcap) before the
//            softmax; with sinks, sinks[h] is one more score in it, which has no value.
//
// Slots are taken in splits of kSplit, counted from the start of the stream. A split's maximum, sum and
// weighted values are found alone, and folded into the result in the order of the splits. So a token's result
// depends on its own keys only: not on the other tokens, on how a prompt was cut up, where blocks lie, nor on
// the threads.
//
// Work is shared out by runs: some tokens of one stream with the query heads of one key head, so that what a
// split holds is read from memory once for all of them. Few tokens over long streams share out their splits.
// What is known of a run after some splits is its kernel's to say. A kernel is a struct with
//     Element               what pools hold
//     kernel(run)           may find its scratch anything: nothing else of the thread is at work
//     most_tokens(p)        of a run
//     num_floats(run)       of what is known after one split, its parts
//     read_queries()        comes before any attend
//     attend(parts, split, found, next)  finds the parts of a split; where `next`, it is far, as that one is
//     start(), fold(parts, split), finish()  nothing is known; a split is; write it
//     parts()               room for those of one split
#pragma once
#include "pools.h"

namespace infini::INFINI_LEVEL {
namespace {

struct Problem {
    const Attention& a;
    int64_t num_tokens, num_heads, num_kv_heads, group, dim, block_size;

    explicit Problem(const Attention& a)
        : a(a), num_tokens(a.q.shape[0]), num_heads(a.q.shape[1]), num_kv_heads(a.keys.shape[1]),
          group(num_heads / num_kv_heads), dim(a.q.shape[2]), block_size(a.values.shape[2]) {}

    int64_t stream(int64_t n) const { return index_at(a.streams.data, a.streams.dtype, n); }
    int64_t slot(int64_t n) const { return index_at(a.slots.data, a.slots.dtype, n); }
    int64_t num_splits(int64_t n) const { return slot(n) / kSplit + 1; }
    int64_t first_split(int64_t n) const { return first_slot(slot(n), a.window) / kSplit; }
    bool sees(int64_t n, int64_t split) const { return split >= first_split(n) && split < num_splits(n); }

    int64_t most_splits() const {
        int64_t most = 0;
        for (int64_t n = 0; n < num_tokens; ++n) most = larger(most, num_splits(n));
        return most;
    }

    // A query as float32: where it lies, or widened into the room
    const float* query(float* room, int64_t n, int64_t h) const {
        const int64_t at = n * a.q.stride[0] + h * a.q.stride[1];
        if (a.q.dtype == DType::f32) return static_cast<const float*>(a.q.data) + at;
        with_type(a.q.dtype, [&](auto type) {
            map([](vf v) { return v; }, dim, room, static_cast<const decltype(type)*>(a.q.data) + at);
        });
        return room;
    }

    // The slots of a split that token n sees, counted from the split's first
    Range visible(int64_t n, int64_t split) const {
        const int64_t start = split * kSplit;
        return {larger(first_slot(slot(n), a.window) - start, 0), smaller(slot(n) + 1 - start, kSplit)};
    }

    // An entry that no token sees may be anything; it then stands for a block whose slots are read for
    // nothing.
    int64_t block_at(int64_t stream, int64_t i) const {
        const int64_t block = i < a.tables.shape[1] ? table_entry(a.tables, stream, i) : 0;
        return block >= 0 && block < a.keys.shape[0] ? block : 0;
    }

    template <class T>
    Split<T> split_of(int64_t stream, int64_t g, int64_t split) const {
        Split<T> found;
        found.key_stride = a.keys.stride[3], found.value_stride = a.values.stride[2];
        const auto *keys = static_cast<const T*>(a.keys.data) + g * a.keys.stride[1],
                   *values = static_cast<const T*>(a.values.data) + g * a.values.stride[1];
        for (int64_t slot = 0; slot < kSplit; slot += block_size) {
            const int64_t block = block_at(stream, (split * kSplit + slot) / block_size);
            for (int64_t i = 0; i < block_size; i += kLanes) {
                const int64_t at = (slot + i) / kLanes;
                found.keys[at] = keys + block * a.keys.stride[0] + i / kLanes * a.keys.stride[2];
                found.values[at] = values + block * a.values.stride[0] + i * a.values.stride[2];
            }
        }
        return found;
    }

    // A head's sink, or none
    float sink(int64_t h) const {
        float sink = -__builtin_inff();
        if (a.sinks.data)
            with_type(a.sinks.dtype, [&](auto type) {
                sink = load_n(static_cast<const decltype(type)*>(a.sinks.data) + h, 1)[0];
            });
        return sink;
    }

    void write(const float* values, float sum, int64_t n, int64_t h) const {
        const vf inverse = splat(1.0f / sum);
        with_type(a.y.dtype, [&](auto type) {
            auto* y = static_cast<decltype(type)*>(a.y.data) + n * a.y.stride[0] + h * a.y.stride[1];
            map([&](vf v) { return v * inverse; }, dim, y, values);
        });
    }
};

// Tokens [begin, end) of one stream, and the query heads of key head g
struct Run {
    const Problem& p;
    int64_t begin, end, g;

    int64_t num_rows() const { return (end - begin) * p.group; }
    int64_t token(int64_t row) const { return begin + row / p.group; }
    int64_t head(int64_t row) const { return g * p.group + row % p.group; }

    // The splits that its tokens see, and maybe some between them
    Range splits() const {
        Range found{p.first_split(begin), 0};
        for (int64_t n = begin; n < end; ++n)
            found = {smaller(found.begin, p.first_split(n)), larger(found.end, p.num_splits(n))};
        return found;
    }

    template <class T>
    Split<T> split(int64_t i) const {
        return p.split_of<T>(p.stream(begin), g, i);
    }
};

// ---- many tokens ------------------------------------------------------------------------------------------

// `after` is the run that follows.
template <class Kernel>
void attend_run(const Run& run, const Run& after) {
    using T = typename Kernel::Element;
    Kernel kernel(run);
    kernel.read_queries();
    kernel.start();
    const Range splits = run.splits();
    Split<T> next = run.split<T>(splits.begin);
    for (int64_t split = splits.begin; split < splits.end; ++split) {
        const Split<T> found = next;
        next = split + 1 < splits.end ? run.split<T>(split + 1) : after.split<T>(after.splits().begin);
        kernel.attend(kernel.parts(), split, found, &next);
        kernel.fold(kernel.parts(), split);
    }
    kernel.finish();
}

// The end of a run that begins here, of at most so many tokens
inline int64_t end_of_run(const Problem& p, int64_t begin, int64_t most) {
    int64_t end = begin + 1;
    while (end < p.num_tokens && end - begin < most && end % most && p.stream(end) == p.stream(begin)) ++end;
    return end;
}

inline int64_t longest_run(const Problem& p, int64_t most) {
    int64_t longest = 1;
    for (int64_t n = 0, end; n < p.num_tokens; n = end) {
        end = end_of_run(p, n, most);
        longest = larger(longest, end - n);
    }
    return longest;
}

// The first piece, the last, the second, the last but one: later tokens see more keys, and so any few pieces
// take as long as others.
inline int64_t from_both_ends(int64_t index, int64_t count) {
    return index % 2 ? count - 1 - index / 2 : index / 2;
}

// Runs are as long as a kernel takes, but each thread shall have four; a piece of work has as many tokens.
template <class Kernel>
void attend_by_tokens(const Problem& p, int64_t most_splits) {
    const int64_t fair = larger(16, p.num_tokens * p.num_kv_heads / (4 * num_threads()));
    const int64_t most = longest_run(p, smaller(Kernel::most_tokens(p), fair)),
                  num_pieces = (p.num_tokens + most - 1) / most,
                  work = most * most_splits * kSplit * p.dim * p.group;  // of a piece, at most
    const auto first_run = [&](int64_t item) -> Run {
        const int64_t begin = from_both_ends(item % num_pieces, num_pieces) * most;
        return {p, begin, end_of_run(p, begin, most), item / num_pieces};
    };
    const int64_t count = num_pieces * p.num_kv_heads;
    parallel_for(count, kGrainElements / work + 1, [&](int64_t item, int64_t last) {
        for (; item < last; ++item) {
            Run run = first_run(item);
            for (const int64_t end = smaller(run.begin + most, p.num_tokens); run.end < end;) {
                const Run after{p, run.end, end_of_run(p, run.end, most), run.g};
                attend_run<Kernel>(run, after);
                run.begin = after.begin, run.end = after.end;
            }
            attend_run<Kernel>(run, item + 1 < count ? first_run(item + 1) : run);
        }
    });
}

// ---- few tokens -------------------------------------------------------------------------------------------

// Some tokens of one stream. For each key head they are a run, and each split of a run is an item of work.
struct Stretch {
    int64_t begin, end;
    Range splits;
    int64_t first_item, first_float, num_floats;  // floats of an item's parts

    int64_t num_splits() const { return splits.end - splits.begin; }
};

template <class Kernel>
struct Items {
    const Problem& p;
    int64_t num_stretches = 0, count = 0, num_floats = 0;
    Stretch stretches[kAttentionMaxSplitTokens];

    // Stretches are as long as leaves every thread something to do.
    Items(const Problem& p, int64_t most_splits) : p(p) {
        const int64_t longest = smaller(
            Kernel::most_tokens(p), p.num_tokens * p.num_kv_heads * most_splits / (2 * num_threads()) + 1);
        for (int64_t n = 0; n < p.num_tokens;) {
            const int64_t begin = n++;
            while (n < p.num_tokens && n - begin < longest && p.stream(n) == p.stream(begin)) ++n;
            add(begin, n);
        }
    }

    void add(int64_t begin, int64_t end) {
        const Run run{p, begin, end, 0};
        const Stretch added{begin, end, run.splits(), count, num_floats, Kernel::num_floats(run)};
        stretches[num_stretches++] = added;
        count += p.num_kv_heads * added.num_splits();
        num_floats += p.num_kv_heads * added.num_splits() * added.num_floats;
    }

    struct Item {
        Run run;
        int64_t split, first_float;
        bool is_last;  // of its run
    };

    Item at(int64_t index) const {
        const Stretch* s = stretches;
        while (s + 1 < stretches + num_stretches && s[1].first_item <= index) ++s;
        const int64_t own = index - s->first_item, split = own % s->num_splits();
        return {{p, s->begin, s->end, own / s->num_splits()},
                s->splits.begin + split,
                s->first_float + own * s->num_floats,
                split + 1 == s->num_splits()};
    }
};

// The items from `index` on that are of one run, up to `last`; returns the next one
template <class Kernel>
int64_t attend_items(const Items<Kernel>& items, int64_t index, int64_t last, float* parts) {
    using T = typename Kernel::Element;
    const auto split_at = [&](int64_t i) {
        const auto item = items.at(i);
        return item.run.template split<T>(item.split);
    };
    const Run run = items.at(index).run;
    Kernel kernel(run);
    kernel.read_queries();
    Split<T> next = split_at(index);
    for (bool is_last = false; !is_last && index < last; ++index) {
        const auto item = items.at(index);
        const Split<T> found = next;
        if (index + 1 < items.count) next = split_at(index + 1);
        kernel.attend(parts + item.first_float, item.split, found, &next);
        is_last = item.is_last;
    }
    return index;
}

// What is known of a run's splits, one after the other
template <class Kernel>
void fold_items(const Items<Kernel>& items, int64_t run, float* parts) {
    const Stretch& s = items.stretches[run / items.p.num_kv_heads];
    int64_t index = s.first_item + run % items.p.num_kv_heads * s.num_splits();
    const Run folded = items.at(index).run;
    Kernel kernel(folded);
    kernel.start();
    for (const int64_t end = index + s.num_splits(); index < end; ++index) {
        const auto item = items.at(index);
        kernel.fold(parts + item.first_float, item.split);
    }
    kernel.finish();
}

// Every split of a run is found by whichever thread is free; then they are folded together in their order.
template <class Kernel>
void attend_by_splits(const Problem& p, int64_t most_splits) {
    const Items<Kernel> items(p, most_splits);
    auto* parts = static_cast<float*>(scratch(Scratch::shared, items.num_floats * sizeof(float)));
    parallel_for(items.count, 1, [&](int64_t first, int64_t last) {
        for (int64_t index = first; index < last;) index = attend_items(items, index, last, parts);
    });
    const int64_t num_runs = items.num_stretches * p.num_kv_heads;
    parallel_for(num_runs, kGrainElements * num_runs / items.num_floats + 1, [&](int64_t run, int64_t end) {
        for (; run < end; ++run) fold_items(items, run, parts);
    });
}

template <class Kernel>
void attend(const Problem& p) {
    const int64_t most_splits = p.most_splits();
    if (p.num_tokens <= kAttentionMaxSplitTokens && most_splits > 1)
        attend_by_splits<Kernel>(p, most_splits);
    else
        attend_by_tokens<Kernel>(p, most_splits);
}

}  // namespace
}  // namespace infini::INFINI_LEVEL
