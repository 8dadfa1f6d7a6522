// quantized_embedding: y[i] = dequantized(weight[ids[i]]), in float32
// packed_embedding:    the same of a weight packed 16 rows side by side (quant.h)
// pack_rows, unpack_rows: blocks to packed blocks and back, byte for byte
// quantize_rows:       floats to Q8_0 or Q4_0, with ggml's bits; what is not finite leaves such a scale
#include <algorithm>

#include "quant.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kRows = kPackedRows;

// The bits of 32 elements, element 0 lowest, to four bytes: byte i takes those of elements i, i + 4 … i + 28
uint32_t transposed_bits(uint32_t bits) {
    uint32_t bytes = 0;
    for (int i = 0; i < 32; ++i) bytes |= (bits >> i & 1) << (i % 4 * 8 + i / 4);
    return bytes;
}

uint32_t restored_bits(uint32_t bytes) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (bytes >> (i % 4 * 8 + i / 4) & 1) << i;
    return bits;
}

template <class Change>
inline void copy_bits(uint8_t* to, const uint8_t* from, Change&& change) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    bits = change(bits);
    memcpy(to, &bits, 4);
}

// A block into its place r among the 16 of a packed one
template <class Block>
void pack_block(uint8_t* packed, const uint8_t* block, int64_t r) {
    for (const Field& field : Block::kFields) {
        for (int i = 0; i < field.bytes; i += field.piece) {
            uint8_t* to = packed + i * kRows + r * field.piece;
            field.is_transposed ? copy_bits(to, block + i, transposed_bits)
                                : static_cast<void>(memcpy(to, block + i, field.piece));
        }
        packed += field.bytes * kRows, block += field.bytes;
    }
}

template <class Block>
void unpack_block(uint8_t* block, const uint8_t* packed, int64_t r) {
    for (const Field& field : Block::kFields) {
        for (int i = 0; i < field.bytes; i += field.piece) {
            const uint8_t* from = packed + i * kRows + r * field.piece;
            field.is_transposed ? copy_bits(block + i, from, restored_bits)
                                : static_cast<void>(memcpy(block + i, from, field.piece));
        }
        packed += field.bytes * kRows, block += field.bytes;
    }
}

// body(number of the row, row, panel, row within it), panels in parallel
template <class Body>
void for_packed_rows(const Pack& a, Body&& body) {
    const int64_t row_bytes = a.blocks.shape[1];
    parallel_for(a.packed.shape[0], (4 * kGrainElements) / (kRows * row_bytes + 1) + 1,
                 [&](int64_t begin, int64_t end) {
                     for (int64_t n = begin * kRows; n < end * kRows; ++n)
                         body(n, static_cast<uint8_t*>(a.blocks.data) + n * a.blocks.stride[0],
                              static_cast<uint8_t*>(a.packed.data) + n / kRows * kRows * row_bytes,
                              n % kRows);
                 });
}

template <class Look>
int64_t embed(const QuantizedEmbedding& a, int64_t row_length, Look&& look) {
    const int64_t num_ids = num_elements(a.ids);
    for (int64_t i = 0; i < num_ids; ++i) {
        const int64_t id = index_at(a.ids.data, a.ids.dtype, i);
        if (id < 0 || id >= a.num_rows) return i;
    }
    parallel_for(num_ids, kGrainElements / (row_length + 1) + 1, [&](int64_t begin, int64_t end) {
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
                pack_block<Block>(panel + b * kRows, n < a.blocks.shape[0] ? row + b : nothing, r);
        });
    });
    return kOk;
}

int64_t unpack_rows(const Unpack& a) {
    with_block(a.type, [&](auto block) {
        using Block = decltype(block);
        for_packed_rows(a, [&](int64_t n, uint8_t* row, const uint8_t* panel, int64_t r) {
            if (n >= a.blocks.shape[0]) return;
            for (int64_t b = 0; b < a.blocks.shape[1]; b += Block::kBytes)
                unpack_block<Block>(row + b, panel + b * kRows, r);
        });
    });
    return kOk;
}

int64_t quantize_rows(const Quantize& a) {
    for_rows(a.x, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            with_type(a.x.dtype, [&](auto type) {
                uint8_t* blocks = static_cast<uint8_t*>(a.blocks.data) + r * a.blocks.shape[1];
                const auto* x = Rows{a.x}.at<const decltype(type)>(r);
                if (a.type == BlockType::q8_0)
                    quantize_row<Q8_0>(blocks, x, a.x.shape[1]);
                else
                    quantize_row<Q4_0>(blocks, x, a.x.shape[1]);
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

int64_t packed_embedding(const PackedEmbedding& a) {
    const BlockSize size = block_size(a.type);
    const int64_t num_blocks = a.weight.shape[1] / (size.bytes * kRows);
    int64_t status = kOk;
    with_block(a.type, [&](auto block) {
        using Block = decltype(block);
        status = embed(a, num_blocks * Block::kElements, [&](float* y, int64_t id) {
            const uint8_t* panel =
                static_cast<const uint8_t*>(a.weight.data) + id / kRows * a.weight.shape[1];
            for (int64_t b = 0; b < num_blocks; ++b, panel += Block::kBytes * kRows) {
                uint8_t own[Block::kBytes];
                unpack_block<Block>(own, panel, id % kRows);
                dequantize_blocks<Block>(y + b * Block::kElements, own, Block::kElements);
            }
        });
    });
    return status;
}

}  // namespace infini::INFINI_LEVEL
