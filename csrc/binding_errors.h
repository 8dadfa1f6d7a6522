// What a kernel found wrong, from the place that its status names, as an error for Python
#pragma once
#include "binding_arguments.h"

namespace infini {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

[[noreturn]] void refuse_index(const std::string& message) { throw nb::index_error(message.c_str()); }

template <class Args>
void report(const Args&, int64_t) {}

void report_index(const char* what, const Tensor& indices, int64_t at, int64_t limit) {
    const int64_t found = index_at(indices.data, indices.dtype, at);
    const std::string value =
        indices.dtype == DType::u64 ? std::to_string(static_cast<uint64_t>(found)) : text(found);
    refuse_index(std::string(what) + " " + value + " (element " + text(at) + ") is outside [0, " +
                 text(limit) + ")");
}

void report(const Rope& a, int64_t at) { report_index("rope: position", a.positions, at, a.sin.shape[0]); }
void report(const Embedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.weight.shape[0]); }

// Of a token that is nowhere, or that sees a slot which is
template <class Args>
void report_place(const Args& a, int64_t window, int64_t at) {
    const int64_t stream = index_at(a.streams.data, a.streams.dtype, at),
                  slot = index_at(a.slots.data, a.slots.dtype, at), block_size = a.values.shape[2];
    std::string message =
        "token " + text(at) + " is at slot " + text(slot) + " of stream " + text(stream) + ", but ";
    if (!has_slot(a.tables, block_size, stream, slot)) {
        message += "there are block tables of " + text(a.tables.shape[0]) + " streams, each with room for " +
                   text(a.tables.shape[1] * block_size) + " slots";
    } else {
        const int64_t entry =
            first_bad_block(a.tables, stream, blocks_seen(slot, window, block_size), a.keys.shape[0]);
        message += "entry " + text(entry) + " of that stream's block table, of " + text(a.tables.shape[1]) +
                   ", is " + text(entry < 0 ? entry : table_entry(a.tables, stream, entry)) +
                   ", and the pools have " + text(a.keys.shape[0]) + " blocks";
    }
    refuse_index(message);
}

void report(const Experts& a, int64_t at) { report_index("experts: id", a.ids, at, a.num_experts); }
void report(const Attention& a, int64_t at) { report_place(a, a.window, at); }
void report(const StoreKv& a, int64_t at) { report_place(a, 1, at); }
void report(const StoreHeads& a, int64_t at) {
    const int64_t num_tokens = a.k.shape[0];
    if (at < num_tokens) report_place(a, 1, at);
    report_index("rope: position", a.positions, at - num_tokens, a.sin.shape[0]);
}
void report(const QuantizedEmbedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.num_rows); }
void report(const PackedEmbedding& a, int64_t at) { report_index("embedding: id", a.ids, at, a.num_rows); }
void report(const RandomSample& a, int64_t at) {
    if (at == a.logits.shape[0]) refuse("random_sample: every logit is -inf, so there is no token to take");
    refuse("random_sample: logit " + text(at) + " is NaN or +inf; expected finite values or -inf");
}
void report(const Logprobs& a, int64_t at) {
    report_index("logprobs: token", a.tokens, at, a.logits.shape[1]);
}
void report(const AddLora& a, int64_t at) {
    const int64_t adapter = at - a.x.shape[0];
    const std::string message =
        adapter < 0
            ? "adapter " + text(index_at(a.adapters.data, a.adapters.dtype, at)) + " of row " + text(at) +
                  " is not -1, and outside [0, " + text(a.ends.shape[0]) + ")"
            : "end " + text(lora_begin(a.ends, adapter + 1)) + " of adapter " + text(adapter) +
                  " is before the one in front of it, or beyond the " + text(a.a.shape[0]) + " rows of a";
    refuse_index("add_lora: " + message);
}
void report(const AdjustLogits& a, int64_t at) {
    const int64_t length = a.history.shape[0];
    if (at < length) report_index("adjust_logits: token", a.history, at, a.logits.shape[1]);
    const int64_t found = index_at(a.ends.data, a.ends.dtype, at - length);
    refuse_index("adjust_logits: end " + text(found) + " (element " + text(at - length) +
                 ") is before the one in front of it, or beyond the " + text(length) +
                 " tokens of the history");
}

}  // namespace
}  // namespace infini
