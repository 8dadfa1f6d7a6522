// add_lora: y = base + (x aᵀ) b, each row by the rows of a [R, in] and b [R, out] that are its adapter's;
// rows without an adapter, which is -1, stay as they are.
// A sum runs over the elements of a row of x, then over the adapter's rows, in one order, whatever rows stand
// beside it: neighbours of the same adapter share what is loaded of a and b, and nothing else.
#include "lora.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kTogether = kVectorRegisters / 8;  // rows of x
constexpr int kRanks = 4;                        // rows of a that meet them at a time
constexpr int kColumns = 2;                      // vectors of an output that are summed at a time
constexpr int64_t kPiece = 1024;                 // outputs of a row that a thread takes at a time

int64_t adapter_of(const AddLora& a, int64_t row) { return index_at(a.adapters.data, a.adapters.dtype, row); }

int64_t rank_of(const AddLora& a, int64_t adapter) {
    return adapter < 0 ? 0 : lora_begin(a.ends, adapter + 1) - lora_begin(a.ends, adapter);
}

// The first row whose adapter there is not, or after all rows the first end that is out of place
int64_t first_wrong(const AddLora& a) {
    const int64_t num_rows = a.x.shape[0], num_adapters = a.ends.shape[0];
    for (int64_t i = 0; i < num_adapters; ++i) {
        const int64_t end = lora_begin(a.ends, i + 1);
        if (end < lora_begin(a.ends, i) || end > a.a.shape[0]) return num_rows + i;
    }
    for (int64_t row = 0; row < num_rows; ++row)
        if (adapter_of(a, row) < -1 || adapter_of(a, row) >= num_adapters) return row;
    return kOk;
}

int64_t largest_rank(const AddLora& a) {
    int64_t largest = 0;
    for (int64_t row = 0; row < a.x.shape[0]; ++row) {
        const int64_t rank = rank_of(a, adapter_of(a, row));
        largest = rank > largest ? rank : largest;
    }
    return largest;
}

// Calls body(count, first row) for runs of kTogether rows of one adapter, and for single ones
template <class Body>
void for_neighbours(const AddLora& a, int64_t group, Body&& body) {
    const int64_t begin = group * kTogether, end = smaller(begin + kTogether, a.x.shape[0]);
    bool is_whole = end - begin == kTogether;
    for (int64_t row = begin + 1; row < end; ++row)
        is_whole = is_whole && adapter_of(a, row) == adapter_of(a, begin);
    if (is_whole) return body(std::integral_constant<int, kTogether>{}, begin);
    for (int64_t row = begin; row < end; ++row) body(std::integral_constant<int, 1>{}, row);
}

// dots[r * stride + j] = x[r] · a[j]
template <int R, int J, class T>
void dot_rows(float* dots, int64_t stride, const T* x, int64_t x_stride, const T* a, int64_t a_stride,
              int64_t n) {
    vf sums[R][J] = {};
    const auto add = [&](int64_t i, auto vector_at) {
        vf rows[R];
        for (int r = 0; r < R; ++r) rows[r] = vector_at(x + r * x_stride + i);
        for (int j = 0; j < J; ++j) {
            const vf weights = vector_at(a + j * a_stride + i);
            for (int r = 0; r < R; ++r) sums[r][j] = fma(rows[r], weights, sums[r][j]);
        }
    };
    int64_t i = 0;
    for (; i + W <= n; i += W) add(i, [](const T* p) { return load(p); });
    if (i < n) add(i, [&](const T* p) { return load_n(p, n - i); });
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < J; ++j) dots[r * stride + j] = sum(sums[r][j]);
}

template <int R, class T>
void dot_group(const AddLora& a, float* dots, int64_t stride, int64_t row, int64_t first_rank) {
    const int64_t adapter = adapter_of(a, row), end = smaller(first_rank + kRanks, rank_of(a, adapter));
    const T* x = static_cast<const T*>(a.x.data) + row * a.x.stride[0];
    const T* weights = static_cast<const T*>(a.a.data) + lora_begin(a.ends, adapter) * a.a.stride[0];
    const auto dot = [&](auto count, int64_t rank) {
        dot_rows<R, decltype(count)::value>(dots + row * stride + rank, stride, x, a.x.stride[0],
                                            weights + rank * a.a.stride[0], a.a.stride[0], a.x.shape[1]);
    };
    if (end - first_rank == kRanks) return dot(std::integral_constant<int, kRanks>{}, first_rank);
    for (int64_t rank = first_rank; rank < end; ++rank) dot(std::integral_constant<int, 1>{}, rank);
}

// y = base + Σ dots[j] b[j] over `size` outputs, of which a last vector may be a part
template <int R, int V, class T>
void add_columns(T* y, int64_t y_stride, const T* base, int64_t base_stride, const float* dots,
                 int64_t dots_stride, const T* b, int64_t b_stride, int64_t rank, int64_t size) {
    const auto vector_at = [&](const T* p, int v) {
        return size < V * W ? load_n(p, size) : load(p + v * W);
    };
    vf sums[R][V] = {};
    for (int64_t j = 0; j < rank; ++j)
        for (int v = 0; v < V; ++v) {
            const vf weights = vector_at(b + j * b_stride, v);
            for (int r = 0; r < R; ++r)
                sums[r][v] = fma(splat(dots[r * dots_stride + j]), weights, sums[r][v]);
        }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            const vf total = vector_at(base + r * base_stride, v) + sums[r][v];
            if (size < V * W)
                store_n(y + r * y_stride, total, size);
            else
                store(y + r * y_stride + v * W, total);
        }
}

template <int R, class T>
void add_group(const AddLora& a, const float* dots, int64_t stride, int64_t row, int64_t begin, int64_t end) {
    const int64_t adapter = adapter_of(a, row), rank = rank_of(a, adapter);
    T* y = static_cast<T*>(a.y.data) + row * a.y.stride[0];
    const T* base = static_cast<const T*>(a.base.data) + row * a.base.stride[0];
    if (rank == 0) {
        for (int r = 0; r < R && a.y.data != a.base.data; ++r)
            memcpy(y + r * a.y.stride[0] + begin, base + r * a.base.stride[0] + begin,
                   (end - begin) * sizeof(T));
        return;
    }
    const T* b = static_cast<const T*>(a.b.data) + lora_begin(a.ends, adapter) * a.b.stride[0];
    const auto add = [&](auto count, int64_t at, int64_t size) {
        add_columns<R, decltype(count)::value>(y + at, a.y.stride[0], base + at, a.base.stride[0],
                                               dots + row * stride, stride, b + at, a.b.stride[0], rank,
                                               size);
    };
    int64_t at = begin;
    for (; at + kColumns * W <= end; at += kColumns * W)
        add(std::integral_constant<int, kColumns>{}, at, kColumns * W);
    for (; at < end; at += W) add(std::integral_constant<int, 1>{}, at, smaller(W, end - at));
}

}  // namespace

int64_t add_lora(const AddLora& a) {
    if (const int64_t wrong = first_wrong(a); wrong != kOk) return wrong;
    const int64_t num_groups = (a.x.shape[0] + kTogether - 1) / kTogether, rank = largest_rank(a);
    const int64_t num_parts = (rank + kRanks - 1) / kRanks, num_pieces = (a.y.shape[1] + kPiece - 1) / kPiece;
    auto* dots = static_cast<float*>(scratch(Scratch::shared, a.x.shape[0] * rank * sizeof(float)));
    with_type(a.x.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t grain = kGrainElements / (kTogether * kRanks * (a.x.shape[1] + 1)) + 1;
        parallel_for(num_groups * num_parts, grain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                for_neighbours(a, i / num_parts, [&](auto count, int64_t row) {
                    dot_group<decltype(count)::value, T>(a, dots, rank, row, i % num_parts * kRanks);
                });
        });
        parallel_for(num_groups * num_pieces, kGrainElements / (kTogether * kPiece) + 1,
                     [&](int64_t begin, int64_t end) {
                         for (int64_t i = begin; i < end; ++i) {
                             const int64_t first = i % num_pieces * kPiece;
                             for_neighbours(a, i / num_pieces, [&](auto count, int64_t row) {
                                 add_group<decltype(count)::value, T>(a, dots, rank, row, first,
                                                                      smaller(first + kPiece, a.y.shape[1]));
                             });
                         }
                     });
    });
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
