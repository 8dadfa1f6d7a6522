// One vector type per level, `vf` (W floats), with loads and stores from every floating dtype, and the few
// functions kernels need on it. Everything lives in the level's namespace: code compiled for one level is
// never linked into another. The tail of a row goes through load_n/store_n and the same arithmetic as its
// body.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "tensor.h"
// The portable level is plain C++ on every machine, so that it is tested wherever the tests run.
#if defined(INFINI_PORTABLE)
#elif defined(__AVX512F__)
#define INFINI_AVX512
#include <immintrin.h>
#elif defined(__AVX2__)
#define INFINI_AVX2
#include <immintrin.h>
#elif defined(__aarch64__)
#define INFINI_NEON
#include <arm_neon.h>
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define INFINI_I8MM
#endif
#endif

// For code built of small pieces, whose values stay in registers only if every piece is inlined
#if defined(INFINI_PORTABLE)
#define INFINI_INLINE
#else
#define INFINI_INLINE __attribute__((always_inline))
#endif

namespace infini::INFINI_LEVEL {

#if defined(INFINI_AVX512)
constexpr int W = 16;
#elif defined(INFINI_AVX2)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

inline vf splat(float x) { return x - vf{}; }
inline vf as_float(vu x) { return (vf)x; }  // the same bits
inline vu as_bits(vf x) { return (vu)x; }
inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }

// The smaller and larger of two; where one is NaN, `x`
#if defined(INFINI_AVX512)
inline vf min(vf limit, vf x) { return _mm512_min_ps(limit, x); }
inline vf max(vf limit, vf x) { return _mm512_max_ps(limit, x); }
#elif defined(INFINI_AVX2)
inline vf min(vf limit, vf x) { return _mm256_min_ps(limit, x); }
inline vf max(vf limit, vf x) { return _mm256_max_ps(limit, x); }
#elif defined(INFINI_NEON)
inline vf min(vf limit, vf x) { return vminq_f32(limit, x); }
inline vf max(vf limit, vf x) { return vmaxq_f32(limit, x); }
#else
inline vf min(vf limit, vf x) { return select(limit < x, limit, x); }
inline vf max(vf limit, vf x) { return select(limit > x, limit, x); }
#endif

// a * b + c, fused where the level has it
inline vf fma(vf a, vf b, vf c) {
#if defined(INFINI_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(INFINI_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(INFINI_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// ---- loads and stores -------------------------------------------------------------------------------------

inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

// Rounds to the nearest bfloat16, ties to even, left in the upper half of each lane; NaN stays NaN
inline vu round_to_bf16(vf v) {
    const vu u = as_bits(v);
    const vu rounded = u + ((u >> 16 & 1u) + 0x7fffu);
    return as_bits(select(v == v, as_float(rounded), as_float(u | 0x400000u)));
}

#if defined(INFINI_AVX512)
inline vf load(const bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store(bf16* p, vf v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)round_to_bf16(v), 16)));
}
#elif defined(INFINI_AVX2)
inline vf load(const bf16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void store(bf16* p, vf v) {
    const __m256i u = _mm256_srli_epi32((__m256i)round_to_bf16(v), 16);
    _mm_storeu_si128((__m128i*)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1)));
}
#elif defined(INFINI_NEON)
// Zeros below the bits, by zip, which has two pipes where a widening shift has one
inline vf load(const bf16* p) {
    return (vf)vzip1q_u16(vdupq_n_u16(0), vcombine_u16(vld1_u16(&p->bits), vdup_n_u16(0)));
}
inline void store(bf16* p, vf v) { vst1_u16(&p->bits, vshrn_n_u32(round_to_bf16(v), 16)); }
#else
inline vf load(const bf16* p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return as_float(__builtin_convertvector(h, vu) << 16);
}
inline void store(bf16* p, vf v) {
    const vh h = __builtin_convertvector(round_to_bf16(v) >> 16, vh);
    memcpy(p, &h, sizeof h);
}
#endif

#if defined(INFINI_AVX512)
inline vf load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(f16* p, vf v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(INFINI_AVX2)
inline vf load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(f16* p, vf v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(INFINI_NEON)
inline vf load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline void store(f16* p, vf v) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
#else
// Exponents are moved by a multiplication, which also makes and takes subnormals right.
inline vf load(const f16* p) {
    vh h;
    memcpy(&h, p, sizeof h);
    const vu u = __builtin_convertvector(h, vu);
    const vu sign = (u & 0x8000u) << 16;
    const vf scaled = as_float((u & 0x7fffu) << 13) * 0x1p112f;
    const vi is_special = (u & 0x7c00u) == 0x7c00u;
    return as_float(as_bits(select(is_special, as_float(as_bits(scaled) | 0x7f800000u), scaled)) | sign);
}

inline void store(f16* p, vf v) {
    const vu u = as_bits(v);
    const vu sign = (u >> 16) & 0x8000u;
    const vf magnitude = as_float(u & 0x7fffffffu);
    // Adding 0.5 scaled to the value's last half-precision bit rounds to nearest even in hardware.
    const vu exponent = as_bits(max(splat(0x1p-14f), magnitude)) & 0x7f800000u;
    const vf rounder = as_float(exponent + (13u << 23));
    const vf rounded = (magnitude + rounder) - rounder;
    const vu bits = as_bits(rounded * 0x1p-112f) >> 13;
    const vu finite = as_bits(select(rounded < 65536.0f, as_float(bits), as_float(vu{} + 0x7c00u)));
    const vu half = as_bits(select(v == v, as_float(finite), as_float(vu{} + 0x7e00u))) | sign;
    const vh h = __builtin_convertvector(half, vh);
    memcpy(p, &h, sizeof h);
}
#endif

inline vf load(const int8_t* p) {
#if defined(INFINI_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(INFINI_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(INFINI_NEON)
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes))))));
#else
    vf v;
    for (int i = 0; i < W; ++i) v[i] = p[i];
    return v;
#endif
}

// The float16 at p in every lane
inline vf splat_half(const void* p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
#if defined(INFINI_AVX512)
    return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(bits)));
#elif defined(INFINI_AVX2)
    return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(bits)));
#elif defined(INFINI_NEON)
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)));
#else
    f16 lanes[W];
    for (f16& lane : lanes) lane.bits = bits;
    return load(lanes);
#endif
}

// The first n < W elements; the other lanes read as `fill` and are not written.
template <class T>
inline vf load_n(const T* p, int64_t n, float fill = 0) {
    T buffer[W];
    store(buffer, splat(fill));
    memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}

template <class T>
inline void store_n(T* p, vf v, int64_t n) {
    T buffer[W];
    store(buffer, v);
    memcpy(p, buffer, n * sizeof(T));
}

// v rounded to T and back: what a value is worth once stored
inline vf rounded_to(float, vf v) { return v; }
inline vf rounded_to(bf16, vf v) { return as_float(round_to_bf16(v) & 0xffff0000u); }
inline vf rounded_to(f16, vf v) {
    f16 buffer[W];
    store(buffer, v);
    return load(buffer);
}

// y[0:n] = f(x[0:n]...), four independent vectors at a time to hide the latency of f
template <class F, class T, class... X>
inline void map(F f, int64_t n, T* y, const X*... x) {
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        const vf r[4] = {f(load(x + i)...), f(load(x + i + W)...), f(load(x + i + 2 * W)...),
                         f(load(x + i + 3 * W)...)};
        for (int j = 0; j < 4; ++j) store(y + i + j * W, r[j]);
    }
    for (; i + W <= n; i += W) store(y + i, f(load(x + i)...));
    if (i < n) store_n(y + i, f(load_n(x + i, n - i)...), n - i);
}

// A bit for each lane of a mask, whose lanes are 0 or -1
inline uint32_t bits_of(vi mask) {
#if defined(INFINI_AVX512)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(INFINI_AVX2)
    return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#elif defined(INFINI_NEON)
    return vaddvq_u32((vu)mask & vu{1, 2, 4, 8});
#else
    uint32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= (mask[i] & 1u) << i;
    return bits;
#endif
}

// ---- reductions: the order is fixed by n alone ------------------------------------------------------------

inline float sum(vf v) {
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
}

inline float max(vf v) {
    float best = v[0];
    for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

inline uint32_t max(vu v) {
#if defined(INFINI_AVX512)
    return _mm512_reduce_max_epu32((__m512i)v);
#elif defined(INFINI_NEON)
    return vmaxvq_u32(v);
#else
    uint32_t best = v[0];
    for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// The sum of f over the vectors of x[0:n], in four running sums
template <class T, class F>
inline float sum_of(const T* x, int64_t n, F f) {
    vf s0{}, s1{}, s2{}, s3{};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        s0 = f(s0, load(x + i));
        s1 = f(s1, load(x + i + W));
        s2 = f(s2, load(x + i + 2 * W));
        s3 = f(s3, load(x + i + 3 * W));
    }
    for (; i + W <= n; i += W) s0 = f(s0, load(x + i));
    if (i < n) s1 = f(s1, load_n(x + i, n - i));
    return sum((s0 + s1) + (s2 + s3));
}

// ---- functions --------------------------------------------------------------------------------------------

// e^x within 2 units in the last place for x in [-87, 87]; saturated outside
inline vf exp_saturated(vf x) {
    const vf clamped = min(splat(87.0f), max(splat(-87.0f), x));
    const vf shifter = splat(0x1.8p23f);  // adding it leaves round(v) in the low bits
    const vf shifted = fma(clamped, splat(1.44269504f), shifter);
    const vf n = shifted - shifter;
    vf r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    const vf r2 = r * r;  // the polynomial in three levels rather than six: latency is what exp waits for
    const vf p0 = fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
    const vf p1 = fma(r, splat(8.3334519073e-3f), splat(4.1665795894e-2f));
    const vf p2 = fma(r, splat(1.6666665459e-1f), splat(5.0000001201e-1f));
    const vf p = fma(fma(fma(p0, r2, p1), r2, p2), r2, r) + 1.0f;
    return p * as_float((as_bits(shifted) + 127u) << 23);
}

inline vf exp(vf x) { return select(x < splat(-87.0f), vf{}, exp_saturated(x)); }

// 2^x within 2 units in the last place for x in [-126, 126]; nothing below, saturated above
inline vf exp2(vf x) {
#if defined(INFINI_AVX512)
    const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less its floor
#else
    const vf clamped = min(splat(126.0f), max(splat(-126.0f), x));
    const vf shifter = splat(0x1.8p23f);  // adding it leaves round(v) in the low bits
    const vf shifted = clamped - 0.5f + shifter;
    const vf r = clamped - (shifted - shifter);
#endif
    const vf r2 = r * r;
    const vf p0 = fma(r, splat(1.867130515e-3f), splat(9.017028846e-3f));
    const vf p1 = fma(r, splat(5.579991266e-2f), splat(2.401644439e-1f));
    const vf p = fma(fma(p0, r2, p1), r2, fma(r, splat(6.931512952e-1f), splat(1.0f)));
#if defined(INFINI_AVX512)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ), p, x);
#else
    return select(x < splat(-126.0f), vf{}, p * as_float((as_bits(shifted) + 127u) << 23));
#endif
}

// 1 / x within 2 units in the last place, for |x| in [2^-126, 2^126]
inline vf reciprocal(vf x) {
#if defined(INFINI_AVX512)
    const vf guess = _mm512_rcp14_ps(x);
    return fma(guess, fma(-guess, x, splat(1.0f)), guess);
#elif defined(INFINI_NEON)
    vf guess = vrecpeq_f32(x);
    guess *= vrecpsq_f32(guess, x);
    return guess * vrecpsq_f32(guess, x);
#else
    return 1.0f / x;
#endif
}

// Zero below -87, so that x * sigmoid(x) of minus infinity is NaN, as it is in torch
inline vf sigmoid(vf x) { return select(x < splat(-87.0f), vf{}, reciprocal(1.0f + exp_saturated(-x))); }

// x * (1 + tanh(u)) / 2, u = sqrt(2/pi) * (x + 0.044715 x^3)
inline vf gelu_tanh(vf x) { return x * sigmoid(1.5957691f * fma(0.044715f * x, x * x, x)); }

// tanh(x) within 2 units in the last place: near zero a polynomial, since 1 - 2 / (e^2x + 1) cancels there
inline vf tanh(vf x) {
    const vu sign = as_bits(x) & 0x80000000u;
    const vf magnitude = as_float(as_bits(x) ^ sign), square = x * x;
    const vf p0 = fma(square, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
    const vf p1 = fma(fma(p0, square, splat(-5.37397155531e-2f)), square, splat(1.33314422036e-1f));
    const vf near = fma(magnitude * square, fma(p1, square, splat(-3.33332819422e-1f)), magnitude);
    const vf far = 1.0f - 2.0f * reciprocal(1.0f + exp_saturated(2.0f * magnitude));
    return as_float(as_bits(select(magnitude < splat(0.625f), near, far)) | sign);
}

}  // namespace infini::INFINI_LEVEL
