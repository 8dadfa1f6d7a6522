// experts: y[t] = sum over slots s of shares[t][s] * (h down[e]ᵀ + bias), e = ids[t][s]
//          where h = gated(x[t] gate[e]ᵀ + bias, x[t] up[e]ᵀ + bias)
//   silu:       gated(g, u) = g * sigmoid(g) * u
//   swiglu_oai: gated(g, u) = g' * sigmoid(1.702 g') * (u' + 1), g' at most 7 and u' within -7 and 7
// Pairs of a token and a slot are put in the order of their experts. What an expert is given then are rows of
// one product, which reads its weight once, and experts that nobody chose are not read. All products of a
// kind are one region, whose threads share the outputs of all experts. Products give a row the same bits
// alone and among others, and the sum runs over the slots from first to last, so experts do so too.
#include "experts.h"

#include "products.h"
#include "rounding.h"

namespace infini::INFINI_LEVEL {
namespace {

// Positions in the order of experts that are one expert's
struct Group { int64_t expert, first, count; };

// A level's own, zeros at first: of std::vector the linker keeps one for all levels, whichever it meets.
template <class T>
class List {
public:
    explicit List(int64_t room) : items_(new T[room]()) {}
    List(const List&) = delete;
    ~List() { delete[] items_; }

    void add(const T& item) { items_[size_++] = item; }
    int64_t size() const { return size_; }
    T& operator[](int64_t i) { return items_[i]; }
    const T& operator[](int64_t i) const { return items_[i]; }
    const T* begin() const { return items_; }
    const T* end() const { return items_ + size_; }

private:
    T* items_;
    int64_t size_ = 0;
};

struct Order {
    int64_t num_pairs;
    List<int32_t> position;  // of each pair
    List<int32_t> token;     // at each position
    List<Group> groups;      // of experts that were chosen

    Order(const Experts& a, int64_t first_token, int64_t num_tokens)
        : num_pairs(num_tokens * a.ids.shape[1]), position(num_pairs), token(num_pairs),
          groups(a.num_experts) {
        const int64_t k = a.ids.shape[1];
        const auto expert = [&](int64_t pair) {
            return index_at(a.ids.data, a.ids.dtype, first_token * k + pair);
        };
        List<int32_t> next(a.num_experts);
        for (int64_t pair = 0; pair < num_pairs; ++pair) ++next[expert(pair)];
        int32_t first = 0;
        for (int64_t e = 0; e < a.num_experts; ++e) {
            const int32_t count = next[e];
            if (count) groups.add({e, first, count});
            next[e] = first, first += count;
        }
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
            position[pair] = next[expert(pair)]++;
            token[position[pair]] = static_cast<int32_t>(first_token + pair / k);
        }
    }
};

Tensor matrix(const void* data, int64_t num_rows, int64_t length, int64_t stride, DType dtype) {
    return {const_cast<void*>(data), {num_rows, length}, {stride, 1}, 2, dtype};
}

// One of an expert's weights, of all experts
struct Projection {
    const Tensor &weight, &bias;
    BlockType type;
    int activation_bits;  // of a packed weight, else 0
    Rounding rounding;
    int64_t num_outputs, row_length;

    Projection(const Experts& a, int which, int64_t num_outputs, int64_t row_length)
        : weight(a.weight[which]), bias(a.bias[which]), type(a.type[which]),
          activation_bits(a.activation_bits[which]), rounding(rounding_of(type, activation_bits, kWholes)),
          num_outputs(num_outputs), row_length(row_length) {}

    bool is_packed() const { return activation_bits != 0; }

    // Whether both take x rounded alike, or as it is
    bool takes_as(const Projection& other) const {
        return is_packed() == other.is_packed() && (!is_packed() || rounding == other.rounding);
    }

    Tensor weight_of(int64_t expert) const {
        Tensor t = weight;
        t.shape[0] = is_packed() ? num_outputs / kPackedRows : num_outputs;
        t.data = static_cast<char*>(t.data) + expert * t.shape[0] * t.stride[0] * item_size(t.dtype);
        return t;
    }

    Tensor bias_of(int64_t expert) const {
        Tensor t = bias;
        if (t.data) t.data = static_cast<char*>(t.data) + expert * num_outputs * item_size(t.dtype);
        return t;
    }
};

// The rows that experts are given, in their order: those that `index` names, or one after the other
struct Given {
    int64_t length, stride;  // in elements
    DType dtype;
    const int32_t* index;
    const char* data = nullptr;

    const char* at(int64_t position) const {
        return data + (index ? index[position] : position) * stride * item_size(dtype);
    }

    // From one row of a group to the next, if they lie evenly
    int64_t step(const Group& g) const {
        return index && g.count > 1 ? index[g.first + 1] - index[g.first] : 1;
    }

    bool is_even(const Group& g) const {
        for (int64_t i = 2; index && i < g.count; ++i)
            if (index[g.first + i] != index[g.first] + i * step(g)) return false;
        return true;
    }
};

constexpr int64_t kLine = 64;
int64_t whole_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Given rows as kernels take them. For a packed weight they are rounded: those of a group that has few, by
// every thread for itself; others beforehand. For another weight they are gathered where they lie unevenly.
class Input {
public:
    Input(const Order& order, const Given& given, const Projection& p)
        : order_(order), given_(given), is_packed_(p.is_packed()), rounding_(p.rounding),
          offset_(order.groups.size()) {
        for (const Group& g : order.groups) {
            const bool is_ready =
                is_packed_ ? g.count * given.length <= kExpertsLoneElements : given.is_even(g);
            offset_.add(is_ready ? kNone : num_bytes_);
            if (is_ready) continue;
            num_bytes_ += whole_lines(is_packed_ ? empty(g).num_bytes()
                                                 : g.count * given.length * item_size(given.dtype));
        }
    }

    int64_t num_bytes() const { return num_bytes_; }

    void prepare(const void* data, char* room) {
        given_.data = static_cast<const char*>(data), room_ = room;
        if (num_bytes_ == 0) return;
        if (is_packed_) return round_all();
        parallel_for(
            order_.num_pairs, kGrainElements / (given_.length + 1) + 1, [&](int64_t begin, int64_t end) {
                for (int64_t i = 0; i < order_.groups.size(); ++i) {
                    const Group& g = order_.groups[i];
                    if (offset_[i] != kNone)
                        put(i, begin < g.first ? 0 : begin - g.first, smaller(end - g.first, g.count));
                }
            });
    }

    // Where the thread has rounded the very rows last, they are at hand.
    Activations rounded(int64_t i, bool are_at_hand) const {
        const Group& g = order_.groups[i];
        Activations x = empty(g);
        x.put_into(offset_[i] != kNone ? room_ + offset_[i] : scratch(Scratch::own, x.num_bytes()));
        if (offset_[i] == kNone && !are_at_hand) round(x, g, 0, x.num_parts());
        return x;
    }

    Tensor rows(int64_t i) const {
        const Group& g = order_.groups[i];
        if (offset_[i] != kNone)
            return matrix(room_ + offset_[i], g.count, given_.length, given_.length, given_.dtype);
        return matrix(given_.at(g.first), g.count, given_.length, given_.stride * given_.step(g),
                      given_.dtype);
    }

private:
    static constexpr int64_t kNone = -1;

    Activations empty(const Group& g) const { return {g.count, given_.length, rounding_}; }

    void put(int64_t i, int64_t begin, int64_t end) const {
        const Group& g = order_.groups[i];
        const int64_t row_bytes = given_.length * item_size(given_.dtype);
        for (int64_t r = begin; r < end; ++r)
            memcpy(room_ + offset_[i] + r * row_bytes, given_.at(g.first + r), row_bytes);
    }

    void round(const Activations& x, const Group& g, int64_t begin, int64_t end) const {
        const auto row_at = [&](int64_t r) { return reinterpret_cast<const float*>(given_.at(g.first + r)); };
        round_parts(x, row_at, begin, end);
    }

    // The parts of all groups that have room, one after the other
    void round_all() const {
        int64_t count = 0;
        for (int64_t i = 0; i < order_.groups.size(); ++i)
            if (offset_[i] != kNone) count += empty(order_.groups[i]).num_parts();
        const int64_t grain = kRoundedGrainElements / (rounding_.span * kRowBlock) + 1;
        parallel_for(count, grain, [&](int64_t begin, int64_t end) {
            for (int64_t i = 0; i < order_.groups.size() && end > 0; ++i) {
                if (offset_[i] == kNone) continue;
                Activations x = empty(order_.groups[i]);
                x.put_into(room_ + offset_[i]);
                round(x, order_.groups[i], begin > 0 ? begin : 0, smaller(end, x.num_parts()));
                begin -= x.num_parts(), end -= x.num_parts();
            }
        });
    }

    const Order& order_;
    Given given_;
    bool is_packed_;  // the weight, for which rows are rounded
    Rounding rounding_;
    List<int64_t> offset_;  // of each group in the room
    int64_t num_bytes_ = 0;
    char* room_ = nullptr;
};

// body(group, begin, end, is_first) for outputs of all groups, in parallel. A piece of them counts once for
// every few rows of its group, so that threads have equal work however tokens chose.
template <class Body>
void for_outputs(const Order& order, const Projection& p, Body&& body) {
    const int64_t num_pieces = (p.num_outputs + kPieceOutputs - 1) / kPieceOutputs;
    const auto units = [](const Group& g) { return (g.count + kExpertsUnitRows - 1) / kExpertsUnitRows; };
    int64_t count = 0;
    for (const Group& g : order.groups) count += units(g) * num_pieces;
    const int64_t grain = kGrainElements / (kPieceOutputs * (p.row_length + 1)) + 1;
    parallel_for(count, grain, [&](int64_t begin, int64_t end, bool is_first) {
        int64_t start = 0;
        for (int64_t i = 0; i < order.groups.size() && start < end; ++i) {
            const int64_t each = units(order.groups[i]);
            // The first piece that begins at `unit` or after it
            const auto piece = [&](int64_t unit) {
                return unit <= start ? 0 : smaller((unit - start + each - 1) / each, num_pieces);
            };
            const int64_t from = piece(begin) * kPieceOutputs,
                          to = smaller(piece(end) * kPieceOutputs, p.num_outputs);
            if (from < to) body(i, from, to, is_first), is_first = false;
            start += each * num_pieces;
        }
    });
}

vf gated(Gating how, vf gate, vf up) {
    if (how == Gating::silu) return gate * sigmoid(gate) * up;
    const vf most = splat(7.0f), g = min(most, gate), u = max(-most, min(most, up));
    return g * sigmoid(1.702f * g) * (u + 1.0f);
}

// Some tokens with all their slots
class Mixture {
public:
    Mixture(const Experts& a, int64_t first_token, int64_t num_tokens)
        : a_(a), first_token_(first_token), num_tokens_(num_tokens), hidden_(a.x.shape[1]),
          inner_(a.intermediate_size), order_(a, first_token, num_tokens), gate_(a, 0, inner_, hidden_),
          up_(a, 1, inner_, hidden_), down_(a, 2, hidden_, inner_), is_shared_(gate_.takes_as(up_)),
          tokens_(order_, given_tokens(), gate_), tokens_of_up_(order_, given_tokens(), up_),
          states_(order_, {inner_, inner_, a.x.dtype, nullptr}, down_) {}

    void run() {
        take_room();
        for_outputs(order_, gate_, [&](int64_t i, int64_t begin, int64_t end, bool is_first) {
            make_states(i, begin, end, is_first);
        });
        states_.prepare(gates_, room_of_states_);
        for_outputs(order_, down_, [&](int64_t i, int64_t begin, int64_t end, bool) {
            multiply(down_, products_, states_, i, false, begin, end);
        });
        with_type(a_.x.dtype, [&](auto type) { add_up<decltype(type)>(); });
    }

private:
    Given given_tokens() const { return {hidden_, a_.x.stride[0], a_.x.dtype, order_.token.begin()}; }

    // Memory for a row of each pair, in the order of experts, and for rows as kernels take them
    void take_room() {
        const int64_t item = item_size(a_.x.dtype), num_pairs = order_.num_pairs,
                      inner_bytes = whole_lines(num_pairs * inner_ * item),
                      hidden_bytes = whole_lines(num_pairs * hidden_ * item),
                      other_bytes = is_shared_ ? 0 : tokens_of_up_.num_bytes();
        gates_ = static_cast<char*>(scratch(Scratch::shared, 2 * inner_bytes + hidden_bytes + other_bytes +
                                                                 tokens_.num_bytes() + states_.num_bytes()));
        ups_ = gates_ + inner_bytes, products_ = ups_ + inner_bytes;
        room_of_states_ = products_ + hidden_bytes;
        char* room = room_of_states_ + states_.num_bytes();
        tokens_.prepare(a_.x.data, room);
        if (!is_shared_) tokens_of_up_.prepare(a_.x.data, room + tokens_.num_bytes());
    }

    // Whether all experts are given the same rows, rounded alike: one token, which chose none of them twice
    bool have_one_row() const {
        return num_tokens_ == 1 && is_shared_ && order_.groups.size() == order_.num_pairs;
    }

    // gated(gate, up) takes the place of gate.
    void make_states(int64_t i, int64_t begin, int64_t end, bool is_first) const {
        multiply(gate_, gates_, tokens_, i, have_one_row() && !is_first, begin, end);
        multiply(up_, ups_, is_shared_ ? tokens_ : tokens_of_up_, i, is_shared_, begin, end);
        with_type(a_.x.dtype, [&](auto type) {
            using T = decltype(type);
            const Group& g = order_.groups[i];
            for (int64_t row = g.first; row < g.first + g.count; ++row) {
                T* gate = reinterpret_cast<T*>(gates_) + row * inner_ + begin;
                const T* up = reinterpret_cast<const T*>(ups_) + row * inner_ + begin;
                map([&](vf g, vf u) { return gated(a_.gating, g, u); }, end - begin, gate, gate, up);
            }
        });
    }

    // y[:][begin : end] of a group
    void multiply(const Projection& p, char* y, const Input& x, int64_t i, bool are_at_hand, int64_t begin,
                  int64_t end) const {
        const Group& g = order_.groups[i];
        const Tensor rows = matrix(y + g.first * p.num_outputs * item_size(a_.x.dtype), g.count,
                                   p.num_outputs, p.num_outputs, a_.x.dtype);
        if (p.is_packed()) {
            PackedLinear a{};
            a.y = rows, a.weight[0] = p.weight_of(g.expert), a.bias[0] = p.bias_of(g.expert);
            a.type[0] = p.type, a.num_rows[0] = p.num_outputs, a.count = 1,
            a.activation_bits = p.activation_bits;
            return multiply_outputs(a, x.rounded(i, are_at_hand), begin, end);
        }
        multiply_outputs(Linear{rows, x.rows(i), p.weight_of(g.expert), p.bias_of(g.expert), p.type}, begin,
                         end);
    }

    // y[token] = the products of its slots, each times its share
    template <class T>
    void add_up() const {
        const int64_t k = a_.ids.shape[1], num_parts = (hidden_ + kPieceElements - 1) / kPieceElements;
        const int64_t grain = kGrainElements / (k * smaller(hidden_, kPieceElements) + 1) + 1;
        parallel_for(num_tokens_ * num_parts, grain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t token = i / num_parts, from = i % num_parts * kPieceElements;
                add_slots(Rows{a_.y}.at<T>(first_token_ + token),
                          Rows{a_.shares}.at<const float>(first_token_ + token),
                          order_.position.begin() + token * k, from, smaller(from + kPieceElements, hidden_));
            }
        });
    }

    template <class T>
    void add_slots(T* y, const float* shares, const int32_t* positions, int64_t begin, int64_t end) const {
        const int64_t k = a_.ids.shape[1];
        const T* products = reinterpret_cast<const T*>(products_);
        for (int64_t c = begin; c < end; c += W) {
            const int64_t width = smaller(W, end - c);
            vf total{};
            for (int64_t s = 0; s < k; ++s) {
                const T* row = products + positions[s] * hidden_ + c;
                total = fma(splat(shares[s]), width == W ? load(row) : load_n(row, width), total);
            }
            width == W ? store(y + c, total) : store_n(y + c, total, width);
        }
    }

    const Experts& a_;
    int64_t first_token_, num_tokens_, hidden_, inner_;
    Order order_;
    Projection gate_, up_, down_;
    bool is_shared_;  // whether gate and up take the same rows
    Input tokens_, tokens_of_up_, states_;
    char *gates_ = nullptr, *ups_ = nullptr, *products_ = nullptr, *room_of_states_ = nullptr;
};

}  // namespace

int64_t experts(const Experts& a) {
    const int64_t num_tokens = a.x.shape[0];
    for (int64_t i = 0; i < num_tokens * a.ids.shape[1]; ++i) {
        const int64_t id = index_at(a.ids.data, a.ids.dtype, i);
        if (id < 0 || id >= a.num_experts) return i;
    }
    for (int64_t first = 0; first < num_tokens; first += kExpertsTokens)
        Mixture(a, first, smaller(kExpertsTokens, num_tokens - first)).run();
    return kOk;
}

}  // namespace infini::INFINI_LEVEL
