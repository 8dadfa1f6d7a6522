// quantized_embedding: y[i] = dequantized(weight[ids[i]]), in float32
// packed_embedding:    the same of a weight packed 16 rows side by side (quant.h)
// pack_rows, unpack_rows: blocks to packed blocks and back, byte for byte
#include "quant.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kRows = kPackedRows;

// move(offset in the row's block, offset in the packed block, length) for each piece of row r
template <class Block, class Move>
inline void for_pieces(int64_t r, Move&& move) {
    int start = 0;
    for (const Field& field : Block::kFields) {
        for (int i = 0; i < field.bytes; i += field.piece) move(start + i, (start + i) * kRows + r * field.piece, field.piece);
        start += field.bytes;
    }
}

// body(number of the row, row, panel, row within it), panels in parallel
template <class Body>
void for_packed_rows(const Pack& a, Body&& body) {
    const int64_t row_bytes = a.blocks.shape[1];
    parallel_for(a.packed.shape[0], (4 * kGrain) / (kRows * row_bytes + 1) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin * kRows; n < end * kRows; ++n)
            body(n, static_cast<uint8_t*>(a.blocks.data) + n * a.blocks.stride[0],
                 static_cast<uint8_t*>(a.packed.data) + n / kRows * kRows * row_bytes, n % kRows);
    });
}

template <class Look>
int64_t embed(const QuantizedEmbedding& a, int64_t row_length, Look&& look) {
    const int64_t num_ids = num_elements(a.ids);
    for (int64_t i = 0; i < num_ids; ++i) {
        const int64_t id = index_at(a.ids.data, a.ids.dtype, i);
        if (id < 0 || id >= a.num_rows) return i;
    }
    parallel_for(num_ids, kGrain / (row_length + 1) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            look(static_cast<float*>(a.y.data) + i * row_length, index_at(a.ids.data, a.ids.dtype, i));
    });
    return kOk;
}

}  // namespace

int64_t pack_rows(const Pack& a) {
    with_block(a.type, [&](auto block) {
        using Block = decltype(block);
        for_packed_rows(a, [&](int64_t n, const uint8_t* row, uint8_t* panel, int64_t r) {
            const uint8_t nothing[Block::kBytes] = {};
            for (int64_t b = 0; b < a.blocks.shape[1]; b += Block::kBytes)
                for_pieces<Block>(r, [&](int from, int to, int size) {
                    memcpy(panel + b * kRows + to, (n < a.blocks.shape[0] ? row + b : nothing) + from, size);
                });
        });
    });
    return kOk;
}

int64_t unpack_rows(const Pack& a) {
    with_block(a.type, [&](auto block) {
        using Block = decltype(block);
        for_packed_rows(a, [&](int64_t n, uint8_t* row, const uint8_t* panel, int64_t r) {
            if (n >= a.blocks.shape[0]) return;
            for (int64_t b = 0; b < a.blocks.shape[1]; b += Block::kBytes)
                for_pieces<Block>(r, [&](int to, int from, int size) { memcpy(row + b + to, panel + b * kRows + from, size); });
        });
    });
    return kOk;
}

int64_t quantized_embedding(const QuantizedEmbedding& a) {
    const BlockSize size = block_size(a.type);
    const int64_t row_length = a.weight.shape[1] / size.bytes * size.elements;
    const Dequantize dequantize = dequantizer(a.type);
    return embed(a, row_length, [&](float* y, int64_t id) {
        dequantize(y, static_cast<const uint8_t*>(a.weight.data) + id * a.weight.stride[0], row_length);
    });
}

int64_t packed_embedding(const QuantizedEmbedding& a) {
    const BlockSize size = block_size(a.type);
    const int64_t num_blocks = a.weight.shape[1] / (size.bytes * kRows);
    int64_t status = kOk;
    with_block(a.type, [&](auto block) {
        using Block = decltype(block);
        status = embed(a, num_blocks * Block::kElements, [&](float* y, int64_t id) {
            const uint8_t* panel = static_cast<const uint8_t*>(a.weight.data) + id / kRows * a.weight.shape[1];
            for (int64_t b = 0; b < num_blocks; ++b, panel += Block::kBytes * kRows) {
                uint8_t own[Block::kBytes];
                for_pieces<Block>(id % kRows, [&](int to, int from, int size) { memcpy(own + to, panel + from, size); });
                dequantize_blocks<Block>(y + b * Block::kElements, own, Block::kElements);
            }
        });
    });
    return status;
}

}  // namespace infini::INFINI_LEVEL
