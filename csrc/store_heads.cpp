// store_heads: q, rotated; the key and value of slot[n] of stream[n] become k[n], rotated too, and v[n]
// store_kv: k[n] and v[n] as they are
// Threads share out stretches of tokens: of one stream and of keys that lie side by side, in lines that no
// other stretch writes. Of two tokens at one slot, the later one stays.
#include "pools.h"
#include "rotation.h"

namespace infini::INFINI_LEVEL {
namespace {

template <class T, class From>
void store_key(T* group, int64_t stride, int64_t lane, const From* k, int64_t dim) {
    for (int64_t first = 0; first < dim; first += kRun) {
        T rounded[kRun];
        const int64_t count = smaller(kRun, dim - first);
        map([](vf v) { return v; }, count, rounded, k + first);
        for (int64_t i = 0; i < count; ++i) group[(first + i) * stride + lane] = rounded[i];
    }
}

template <class From>
void store_key(q8* group, int64_t, int64_t lane, const From* k, int64_t dim) {
    uint8_t* run = &group->byte;
    for (int64_t first = 0; first < dim; first += kRun, run += kLanes * Q8_0::kBytes) {
        uint8_t block[Q8_0::kBytes];
        quantize_row<Q8_0>(block, k + first, kRun);
        memcpy(run + lane * sizeof(f16), block, sizeof(f16));
        for (int i = 0; i < kRun; ++i) run[kLanes * sizeof(f16) + i * kLanes + lane] = block[sizeof(f16) + i];
    }
}

template <class T, class From>
void store_value(T* row, const From* v, int64_t dim) {
    if constexpr (std::is_same_v<T, q8>)
        quantize_row<Q8_0>(&row->byte, v, dim);
    else
        map([](vf x) { return x; }, dim, row, v);
}

// Where each stretch begins, and behind the last one the number of tokens
struct Stretches {
    int64_t count = 0;
    int64_t* begins;

    explicit Stretches(const StoreHeads& a) {
        const int64_t num_tokens = a.k.shape[0], groups = a.keys.shape[2], block_size = a.values.shape[2];
        begins = static_cast<int64_t*>(scratch(Scratch::shared, (2 * num_tokens + 1) * sizeof(int64_t)));
        int64_t* places = begins + num_tokens + 1;
        bool are_apart = true;
        for (int64_t n = 0; n < num_tokens; ++n) {
            const int64_t stream = index_at(a.streams.data, a.streams.dtype, n),
                          slot = index_at(a.slots.data, a.slots.dtype, n),
                          block = table_entry(a.tables, stream, slot / block_size),
                          place = block * groups + slot % block_size / kLanes;
            if (count && place == places[count - 1]) continue;
            for (int64_t i = 0; i < count; ++i) are_apart &= places[i] != place;
            places[count] = place, begins[count++] = n;
        }
        if (!are_apart) count = 1;  // as few threads can tell who comes later
        begins[count] = num_tokens;
    }
};

template <class T, class From>
struct Storing {
    const StoreHeads& a;
    const int64_t dim = a.k.shape[2], half = dim / 2, num_heads = a.q.data ? a.q.shape[1] : 0,
                  num_kv_heads = a.k.shape[1], block_size = a.values.shape[2];
    const Rotate<From> rotate = rotation<From>(a.interleaved);

    static From* head(const Tensor& t, int64_t n, int64_t h) {
        return static_cast<From*>(t.data) + n * t.stride[0] + h * t.stride[1];
    }

    // What a token's heads are rotated by
    const From* angles(const Tensor& table, int64_t n) const {
        return static_cast<const From*>(table.data) + index_at(a.positions.data, a.positions.dtype, n) * half;
    }

    void rotate_head(From* y, const From* x, int64_t n) const {
        rotate(y, x, angles(a.sin, n), angles(a.cos, n), half);
    }

    // A token's key and value of head g, and its queries of the heads that share it
    void store_token(int64_t n, int64_t g) const {
        const int64_t slot = index_at(a.slots.data, a.slots.dtype, n), place = slot % block_size,
                      stream = index_at(a.streams.data, a.streams.dtype, n),
                      block = table_entry(a.tables, stream, slot / block_size);
        T* keys = static_cast<T*>(a.keys.data) + block * a.keys.stride[0] + g * a.keys.stride[1] +
                  place / kLanes * a.keys.stride[2];
        T* values = static_cast<T*>(a.values.data) + block * a.values.stride[0] + g * a.values.stride[1] +
                    place * a.values.stride[2];
        ask_for_lines(keys);
        for (int64_t h = num_heads * g / num_kv_heads; h < num_heads * (g + 1) / num_kv_heads; ++h)
            rotate_head(head(a.y, n, h), head(a.q, n, h), n);
        From rotated[kMaxDim];
        const From* k = head(a.k, n, g);
        if (a.sin.data) rotate_head(rotated, k, n), k = rotated;
        store_key(keys, a.keys.stride[3], place % kLanes, k, dim);
        store_value(values, head(a.v, n, g), dim);
    }

    // Of keys side by side one is written to every line.
    void ask_for_lines(const T* keys) const {
        constexpr int64_t kLine = 64;
        for (int64_t i = 0; i < dim * kLanes * static_cast<int64_t>(sizeof(T)); i += kLine)
            __builtin_prefetch(reinterpret_cast<const char*>(keys) + i, 1);
    }

    void run() const {
        const Stretches stretches(a);
        const int64_t tokens = (a.k.shape[0] + stretches.count - 1) / stretches.count;
        parallel_for(stretches.count * num_kv_heads, kStoredGrainElements / (tokens * dim) + 1,
                     [&](int64_t begin, int64_t end) {
                         for (int64_t i = begin; i < end; ++i) {
                             const int64_t* bounds = stretches.begins + i / num_kv_heads;
                             for (int64_t n = bounds[0]; n < bounds[1]; ++n) store_token(n, i % num_kv_heads);
                         }
                     });
    }
};

}  // namespace

int64_t store_heads(const StoreHeads& a) {
    if (const int64_t bad = first_bad_token(a, 1); bad != kOk) return bad;
    for (int64_t n = 0; a.sin.data && n < a.k.shape[0]; ++n) {
        const int64_t position = index_at(a.positions.data, a.positions.dtype, n);
        if (position < 0 || position >= a.sin.shape[0]) return a.k.shape[0] + n;
    }
    if (num_elements(a.k) == 0) return kOk;
    with_pool_type(a.keys.dtype, [&](auto to) {
        with_type(a.k.dtype, [&](auto from) { Storing<decltype(to), decltype(from)>{a}.run(); });
    });
    return kOk;
}

int64_t store_kv(const StoreKv& a) {
    StoreHeads heads{};
    heads.k = a.k, heads.v = a.v, heads.keys = a.keys, heads.values = a.values;
    heads.tables = a.tables, heads.streams = a.streams, heads.slots = a.slots;
    return store_heads(heads);
}

}  // namespace infini::INFINI_LEVEL
