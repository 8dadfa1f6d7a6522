// What suits a level: sizes and distances found by measuring. None of them changes a bit of any result.
#pragma once
#include "vec.h"

namespace infini::INFINI_LEVEL {

#if defined(INFINI_AVX512) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

// Every op
constexpr int64_t kGrainElements = 4096;  // that are worth waking a thread for
constexpr int64_t kRowsElements = 1024;   // the same of rows, which other threads may have written
constexpr int64_t kPieceElements = 4096;  // of a contiguous tensor, handed to a thread at a time

// Dense products (matmul.cpp)
constexpr int kDenseTileRows = 3;                                 // of x, whose sums with
constexpr int kDenseTileOutputs = kVectorRegisters / 4;           // so many of weight stay in registers
constexpr int kDenseRowsInPlace = 4;                              // of weight, which lie apart
constexpr int kDenseRowsAtOnce = kVectorRegisters == 32 ? 6 : 3;  // of x that meet those
constexpr int kDenseFewRows = 4 * kDenseRowsAtOnce;               // up to which they are met where they lie
constexpr int kDenseStripOutputs = W == 16 ? 128 : 64;            // whose totals are near
constexpr int kDenseBandRows = W == 16 ? 192 : 96;                // of x

// Dense products in AMX tiles (amx_linear.h)
constexpr int kTileBandRows = 256;              // of x
constexpr int kTileStripOutputs = 512;          // whose totals are kept
constexpr int kTileLoneRows = 4;                // of weight that a lone row of x meets at a time
constexpr int64_t kTileLoneElements = 1 << 14;  // of a lone row of x at hand

// Packed products (packed.cpp, dots_*.h)
constexpr int kPackedChunkElements = W == 4 ? 1024 : 288;  // of K, read from a panel of weight rows at a time
#if (defined(INFINI_AVX512) || defined(INFINI_AVX2)) && !defined(__AMX_INT8__)
constexpr bool kPagesInTurn = true;  // of weight that few rows are to meet later
#else
constexpr bool kPagesInTurn = false;
#endif
constexpr int kPackedPrefetchBytes = W == 4 ? 512 : 8192;  // of weight
constexpr int kPackedBandRows = W == 16 ? 256 : 128;       // of x at most, which share a chunk of weight
constexpr int kPackedFewestBandRows = 64;                  // where threads have bands of their own
template <int P>                                           // of x, whose dots and totals stay in registers
constexpr int kPackedTileRows = W < 16   ? 2
                                : P == 2 ? 4
                                         : 8;
constexpr int kShortTileRows = 8;             // the same where x has 16 bits, whose totals are in memory
constexpr int kTilePanels = W == 16 ? 2 : 1;  // of weight, which those meet together
constexpr bool kTilesAsk = W == 16;           // for the weight that comes next; else who reads a chunk does
constexpr int kPackedFewTileRows = W == 16 ? 4 : W == 8 ? 1 : 2;  // which meet weights straight from memory
#if defined(INFINI_NEON)
constexpr int kPackedFewSums = 8;  // of theirs, in registers
#else
constexpr int kPackedFewSums = 16;
#endif
#if defined(INFINI_I8MM)
constexpr bool kPairsRows = true;  // of x, two of which meet two of weight in one instruction
#else
constexpr bool kPairsRows = false;
#endif
constexpr int kRowBlock = W == 4 ? 2 : 16;      // of x at most, whose spans lie side by side
constexpr int64_t kRoundedGrainElements = 256;  // of x, worth a thread to round them
constexpr int64_t kRoundedLoneElements = 1536;  // the same of a lone row
constexpr int kRoundedRun = 16;                 // spans of a row of x, before those of the next row
#if defined(__AMX_INT8__)
constexpr int kPackedPanels = 2;                     // of weight, which a block of x meets while it is near
constexpr int kPackedNearRows = 48;                  // up to which they meet fewer panels
template <int kPlanes>                               // of x that have dots of their own
constexpr int kPassedRows = kPlanes == 2 ? 64 : 96;  // from which weights stay in tiles
constexpr int kPackedNearPanels = 1;
constexpr int kPackedFewestTileRows = 8;  // of a block of x that is worth a tile
constexpr int kPackedFewRows = 7;         // up to which weights are met straight from memory
#else
constexpr int kPackedPanels = W == 16 ? 4 : 1;
constexpr int kPackedNearRows = 64;
constexpr int kPackedNearPanels = kTilePanels;
constexpr int kPackedFewRows = W == 8 ? 3 : kPackedFewTileRows;
#endif

// Mixtures of experts (experts.cpp)
constexpr int64_t kExpertsTokens = 512;  // whose rows lie in memory at once
constexpr int64_t kExpertsUnitRows = 8;  // of an expert, whose products take as long as those of fewer
constexpr int64_t kExpertsLoneElements = 16384;  // of an expert's rows, which each thread rounds for itself

// Attention (attention.cpp): queries that share what is loaded of keys and values, their sums in registers
#if defined(INFINI_AVX512)
constexpr int kAttentionQueries = 8;
#elif defined(INFINI_NEON)
constexpr int kAttentionQueries = 4;
#else
constexpr int kAttentionQueries = 2;
#endif
constexpr int kAttentionSums = kVectorRegisters / 2;  // running sums in registers
constexpr int kAttentionNarrowQueries =
    2 * kAttentionQueries;                        // up to which halves and codes are converted as read
constexpr int64_t kAttentionRunTokens = 64;       // of a prompt, which read keys and values together
constexpr int kAttentionLoneRows = 4;             // that are summed in vectors where more are in tiles
constexpr int64_t kAttentionMaxSplitTokens = 16;  // which share out the keys of long streams
constexpr int64_t kStoredGrainElements = 128;     // worth a thread: each key is in lines of its own

}  // namespace infini::INFINI_LEVEL
