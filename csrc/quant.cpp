// quantized_embedding: y[i] = dequantized(weight[ids[i]]), in float32
// packed_embedding:    the same of a weight packed 16 rows side by side (blocks.h)
// pack_rows, unpack_rows: blocks to packed blocks and back, without loss
// quantize_rows:       floats to Q8_0 or Q4_0, with ggml's bits; what is not finite leaves such a scale
// find_infinite:       whether a float16 among bytes is no number; 0, or kOk if all are
#include <algorithm>
#include <atomic>
#include <iterator>
#include <type_traits>

#include "quant.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kRows = kPackedRows;

// Bits 0, 4 … 28 of a number, side by side
uint32_t every_fourth(uint32_t bits) {
    bits &= 0x11111111u;
    bits = (bits | bits >> 3) & 0x03030303u;
    bits = (bits | bits >> 6) & 0x000f000fu;
    return (bits | bits >> 12) & 0xffu;
}

// The bits of 32 elements, element 0 lowest, to four bytes: byte i takes those of i, i + 4 … i + 28
uint32_t transposed_bits(uint32_t bits) {
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= every_fourth(bits >> i) << 8 * i;
    return bytes;
}

uint32_t restored_bits(uint32_t bytes) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (bytes >> (i % 4 * 8 + i / 4) & 1) << i;
    return bits;
}

// A piece as a number; by name, since the size of a memcpy that is not known is a call
template <int bytes>
using Piece = std::conditional_t<bytes == 4, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>;

template <class Block>
constexpr int first_byte(int field) {
    int first = 0;
    for (int i = 0; i < field; ++i) first += Block::kFields[i].bytes;
    return first;
}

// body(type of its pieces, whether their bits are transposed, where it begins, its pieces) for each field
template <class Block, class Body>
INFINI_INLINE inline void for_fields(Body&& body) {
    unrolled<static_cast<int>(std::size(Block::kFields))>([&](auto i) INFINI_INLINE {
        constexpr Field field = Block::kFields[i];
        body(Piece<field.piece>{}, std::bool_constant<field.is_transposed>{}, first_byte<Block>(i),
             field.bytes / field.piece);
    });
}

// Of 16 rows, four bytes with integers of four bits at two columns: the lower ones of rows r and r + 8, and
// the upper ones; and those of one row as they were
constexpr uint32_t kLowerHalves = 0x0f0f0f0fu, kUpperSigns = 0x80808080u;

inline void pair_rows(uint32_t* pieces) {
    for (int r = 0; r < kRows / 2; ++r) {
        const uint32_t first = pieces[r], second = pieces[r + kRows / 2];
        pieces[r] = ((first & kLowerHalves) | (second & kLowerHalves) << 4) ^ kUpperSigns;
        pieces[r + kRows / 2] = ((first >> 4 & kLowerHalves) | (second & ~kLowerHalves)) ^ kUpperSigns;
    }
}

uint32_t unpaired_row(const uint8_t* pieces, int64_t r) {
    uint32_t lower, upper;
    const uint8_t* own = pieces + r % (kRows / 2) * sizeof lower;
    memcpy(&lower, own, sizeof lower);
    memcpy(&upper, own + kRows / 2 * sizeof upper, sizeof upper);
    const int shift = r < kRows / 2 ? 0 : 4;
    const auto own_half = [shift](uint32_t both) { return (both ^ kUpperSigns) >> shift & kLowerHalves; };
    return own_half(lower) | own_half(upper) << 4;
}

// Whether a field of pieces of this size has such integers
template <class Block, class Piece>
constexpr bool kIsPaired = kHasRowsInBytes<Block> && sizeof(Piece) == 4;

// A block of each of 16 rows, side by side
template <class Block>
void pack_blocks(uint8_t* __restrict packed, const uint8_t* const* __restrict blocks) {
    for_fields<Block>([&](auto piece, auto is_transposed, int first, int count) INFINI_INLINE {
        uint8_t* to = packed + first * kRows;
        for (int i = 0; i < count; ++i, first += sizeof piece, to += sizeof piece * kRows) {
            decltype(piece) pieces[kRows];
            for (int r = 0; r < kRows; ++r) memcpy(&pieces[r], blocks[r] + first, sizeof piece);
            if constexpr (is_transposed)
                for (auto& bits : pieces) bits = transposed_bits(bits);
            if constexpr (kIsPaired<Block, decltype(piece)>) pair_rows(pieces);
            memcpy(to, pieces, sizeof pieces);
        }
    });
}

// The block at place r among the 16 of a packed one
template <class Block>
void unpack_block(uint8_t* __restrict block, const uint8_t* __restrict packed, int64_t r) {
    for_fields<Block>([&](auto piece, auto is_transposed, int first, int count) INFINI_INLINE {
        const uint8_t* from = packed + first * kRows;
        for (int i = 0; i < count; ++i, first += sizeof piece, from += sizeof piece * kRows) {
            if constexpr (kIsPaired<Block, decltype(piece)>)
                piece = unpaired_row(from, r);
            else
                memcpy(&piece, from + r * sizeof piece, sizeof piece);
            if constexpr (is_transposed) piece = restored_bits(piece);
            memcpy(block + first, &piece, sizeof piece);
        }
    });
}

// 16 rows, those that are missing as zeros
template <class Block>
void pack_panel(uint8_t* packed, const Tensor& blocks, int64_t first_row) {
    static constexpr uint8_t kNothing[Block::kBytes] = {};
    const uint8_t* at[kRows];
    int64_t step[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
        const bool is_there = first_row + r < blocks.shape[0];
        at[r] = is_there ? static_cast<uint8_t*>(blocks.data) + (first_row + r) * blocks.stride[0] : kNothing;
        step[r] = is_there ? Block::kBytes : 0;
    }
    for (int64_t b = 0; b < blocks.shape[1]; b += Block::kBytes) {
        pack_blocks<Block>(packed + b * kRows, at);
        for (int r = 0; r < kRows; ++r) at[r] += step[r];
    }
}

template <class Block>
void unpack_panel(const Tensor& blocks, const uint8_t* packed, int64_t first_row) {
    for (int64_t r = 0; r < kRows && first_row + r < blocks.shape[0]; ++r) {
        uint8_t* row = static_cast<uint8_t*>(blocks.data) + (first_row + r) * blocks.stride[0];
        for (int64_t b = 0; b < blocks.shape[1]; b += Block::kBytes)
            unpack_block<Block>(row + b, packed + b * kRows, r);
    }
}

// body(panel, number of its first row), panels in parallel
template <class Body>
void for_panels(const Pack& a, Body&& body) {
    const int64_t panel_bytes = kRows * a.blocks.shape[1];
    parallel_for(a.packed.shape[0], (4 * kGrainElements) / (panel_bytes + 1) + 1,
                 [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i)
                         body(static_cast<uint8_t*>(a.packed.data) + i * panel_bytes, i * kRows);
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
        for_panels(a,
                   [&](uint8_t* panel, int64_t row) { pack_panel<decltype(block)>(panel, a.blocks, row); });
    });
    return kOk;
}

int64_t unpack_rows(const Unpack& a) {
    with_block(a.type, [&](auto block) {
        for_panels(a,
                   [&](uint8_t* panel, int64_t row) { unpack_panel<decltype(block)>(a.blocks, panel, row); });
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

int64_t find_infinite(const Halves& a) {
    std::atomic<bool> is_found{false};
    const int64_t count = num_elements(a.bytes) / a.step;
    parallel_for(count, (4 * kGrainElements) / a.step + 1, [&](int64_t first, int64_t last) {
        const uint8_t* at = static_cast<const uint8_t*>(a.bytes.data) + first * a.step;
        constexpr uint16_t kExponent = 0x7c00;  // all of it set: infinity or NaN
        bool found = false;
        for (int64_t i = first; i < last; ++i, at += a.step)
            for (int64_t byte = a.begin; byte < a.end; byte += 2) {
                uint16_t bits;
                memcpy(&bits, at + byte, 2);
                found |= (bits & kExponent) == kExponent;
            }
        if (found) is_found = true;
    });
    return is_found ? 0 : kOk;
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
