// This level's column of the table that isa.cpp chooses from.
#include "kernels.h"

namespace infini::INFINI_LEVEL {

int64_t rms_norm(const RmsNorm&);
int64_t add_rms_norm(const AddRmsNorm&);
int64_t layer_norm(const LayerNorm&);
int64_t rope(const Rope&);
int64_t silu(const Unary&);
int64_t gelu(const Unary&);
int64_t gelu_tanh(const Unary&);
int64_t gelu_fast(const Unary&);
int64_t swiglu(const Binary&);
int64_t add(const Binary&);
int64_t softmax(const Softmax&);
int64_t embedding(const Embedding&);
int64_t random_sample(const RandomSample&);
int64_t attention(const Attention&);
int64_t store_kv(const StoreKv&);
int64_t linear(const Linear&);
int64_t packed_linear(const PackedLinear&);
int64_t quantized_embedding(const QuantizedEmbedding&);
int64_t packed_embedding(const QuantizedEmbedding&);
int64_t pack_rows(const Pack&);
int64_t unpack_rows(const Pack&);
int64_t quantize_rows(const Quantize&);

extern const Kernels kKernels;
const Kernels kKernels = {
    .rms_norm = rms_norm,
    .add_rms_norm = add_rms_norm,
    .layer_norm = layer_norm,
    .rope = rope,
    .silu = silu,
    .gelu = gelu,
    .gelu_tanh = gelu_tanh,
    .gelu_fast = gelu_fast,
    .swiglu = swiglu,
    .add = add,
    .softmax = softmax,
    .embedding = embedding,
    .random_sample = random_sample,
    .attention = attention,
    .store_kv = store_kv,
    .linear = linear,
    .packed_linear = packed_linear,
    .quantized_embedding = quantized_embedding,
    .packed_embedding = packed_embedding,
    .pack_rows = pack_rows,
    .unpack_rows = unpack_rows,
    .quantize_rows = quantize_rows,
};

}  // namespace infini::INFINI_LEVEL
