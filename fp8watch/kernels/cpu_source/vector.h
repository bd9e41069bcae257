/* Vectors of VB bytes, and the few steps for which the processor's own instructions pay.
 *
 * Everything is written in the vector extensions that gcc and clang share; a width that the processor does not have is
 * lowered by the compiler, so any build is right on any processor. Instructions of one processor family stand behind
 * the macro that says it has them.
 */
#ifndef FP8WATCH_VECTOR_H
#define FP8WATCH_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#ifndef VB
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define VB 64
#elif defined(__AVX2__)
#define VB 32
#else
#define VB 16
#endif
#endif

#define VL (VB / 4)       /* 32-bit lanes of a vector */
#define BLOCK (4 * VL)    /* elements of four vectors: what is packed to one vector of bytes */
#if VB == 32 && defined(__AVX2__)
#define AVX2_WIDTH 1
#elif VB == 64 && defined(__AVX512BW__) && defined(__AVX512VL__)
#define AVX512_WIDTH 1
#endif
#define INLINE static inline __attribute__((always_inline))
#define COLD static __attribute__((noinline, cold))

typedef float vf __attribute__((vector_size(VB)));
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint32_t vu __attribute__((vector_size(VB)));
typedef int16_t vs __attribute__((vector_size(VB)));
typedef uint8_t vb __attribute__((vector_size(VB)));
typedef uint8_t vq __attribute__((vector_size(VB / 4)));   /* VL bytes */
typedef uint16_t vh __attribute__((vector_size(VB / 2)));  /* VL halves */

INLINE vf splat_f(float x) { vf v = {0}; return v + x; }
INLINE vi splat_i(int32_t x) { vi v = {0}; return v + x; }
INLINE vb splat_b(uint8_t x) { vb v = {0}; return v + x; }
INLINE vs splat_s(int16_t x) { vs v = {0}; return v + x; }
INLINE vf load_f(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vi load_i(const int32_t *p) { vi v; memcpy(&v, p, sizeof v); return v; }
INLINE vb load_b(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE void store_i(int32_t *p, vi v) { memcpy(p, &v, sizeof v); }
INLINE void store_b(uint8_t *p, vb v) { memcpy(p, &v, sizeof v); }

INLINE vi max_i(vi a, vi b) {
#if AVX2_WIDTH
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif AVX512_WIDTH
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    vi m = a > b;
    return (a & m) | (b & ~m);
#endif
}

INLINE vi min_i(vi a, vi b) {
#if AVX2_WIDTH
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#elif AVX512_WIDTH
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#else
    vi m = a < b;
    return (a & m) | (b & ~m);
#endif
}

/* a·b + c, for products that are exact or sums in which the last bit does not count */
INLINE vf mul_add(vf a, vf b, vf c) {
#if AVX2_WIDTH && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif AVX512_WIDTH
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE int32_t max_of_lanes(vi v) {
#if AVX2_WIDTH
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
#elif AVX512_WIDTH
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t lane[VL], m;
    memcpy(lane, &v, sizeof v);
    m = lane[0];
    for (int i = 1; i < VL; i++) m = lane[i] > m ? lane[i] : m;
    return m;
#endif
}

INLINE vs max_s(vs a, vs b) {
#if AVX2_WIDTH
    return (vs)_mm256_max_epi16((__m256i)a, (__m256i)b);
#elif AVX512_WIDTH
    return (vs)_mm512_max_epi16((__m512i)a, (__m512i)b);
#else
    vs m = a > b;
    return (a & m) | (b & ~m);
#endif
}

/* of halves that are not negative */
INLINE int16_t max_of_halves(vs v) {
#if AVX2_WIDTH
    __m128i m = _mm_max_epi16(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    /* the smallest of the complements, as unsigned numbers */
    return (int16_t)(0x7FFF - _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7FFF), m))));
#elif AVX512_WIDTH
    __m256i w = _mm256_max_epi16(_mm512_castsi512_si256((__m512i)v), _mm512_extracti64x4_epi64((__m512i)v, 1));
    __m128i m = _mm_max_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    return (int16_t)(0x7FFF - _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7FFF), m))));
#else
    int16_t lane[VB / 2], m;
    memcpy(lane, &v, sizeof v);
    m = lane[0];
    for (int i = 1; i < VB / 2; i++) m = lane[i] > m ? lane[i] : m;
    return m;
#endif
}

INLINE double sum_of_lanes(vf v) {
#if AVX2_WIDTH
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#elif AVX512_WIDTH
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lane[VL];
    memcpy(lane, &v, sizeof v);
    for (int n = VL / 2; n; n /= 2)
        for (int i = 0; i < n; i++) lane[i] += lane[i + n];
    return lane[0];
#endif
}

INLINE int64_t sum_of_counts(vi v) {
    int32_t lane[VL];
    int64_t s = 0;
    memcpy(lane, &v, sizeof v);
    for (int i = 0; i < VL; i++) s += lane[i];
    return s;
}

INLINE int any_b(vb v) {
#if AVX2_WIDTH
    return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#elif AVX512_WIDTH
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#else
    uint64_t word[VB / 8], any = 0;
    memcpy(word, &v, sizeof v);
    for (int i = 0; i < VB / 8; i++) any |= word[i];
    return any != 0;
#endif
}

/* Two bytes an element to float32: bfloat16 is its upper half. */
INLINE vf load_bf16(const uint16_t *p) {
#if AVX2_WIDTH
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
#elif AVX512_WIDTH
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7FFF) << 13, bits;
    float f;
    if (rest >= 0x0F800000) {
        bits = rest + 0x70000000; /* Inf and NaN: the exponent's 31 becomes 255 */
    } else if (rest >= 0x00800000) {
        bits = rest + 0x38000000;
    } else {
        f = (float)(h & 0x7FFF) * 5.9604644775390625e-08f; /* a subnormal half counts 2^-24 */
        memcpy(&bits, &f, 4);
    }
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE vf load_f16(const uint16_t *p) {
#if AVX2_WIDTH && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif AVX512_WIDTH
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    float f[VL];
    for (int i = 0; i < VL; i++) f[i] = half_to_float(p[i]);
    return load_f(f);
#endif
}

#if AVX512_WIDTH
/* packs work within 128 bits: where the 32-bit lanes of what they give belong */
#define LANES_IN_ORDER _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
#endif

/* Four vectors of 32-bit lanes, each 0 … 255, to bytes in order. */
INLINE vb pack_bytes(vi a, vi b, vi c, vi d) {
#if AVX2_WIDTH
    __m256i w = _mm256_packus_epi32((__m256i)a, (__m256i)b), z = _mm256_packus_epi32((__m256i)c, (__m256i)d);
    __m256i m = _mm256_packus_epi16(w, z);
    return (vb)_mm256_permutevar8x32_epi32(m, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#elif AVX512_WIDTH
    __m512i w = _mm512_packus_epi32((__m512i)a, (__m512i)b), z = _mm512_packus_epi32((__m512i)c, (__m512i)d);
    return (vb)_mm512_permutexvar_epi32(LANES_IN_ORDER, _mm512_packus_epi16(w, z));
#else
    union { vb all; vq part[4]; } u;
    u.part[0] = __builtin_convertvector((vu)a, vq);
    u.part[1] = __builtin_convertvector((vu)b, vq);
    u.part[2] = __builtin_convertvector((vu)c, vq);
    u.part[3] = __builtin_convertvector((vu)d, vq);
    return u.all;
#endif
}

#define ABS_MASK 0x7FFFFFFF
#define EXPONENT_MASK 0x7F800000

/* One FP8 format. Source: OCP "8-bit floating point" and NVIDIA, Arm, Intel, arXiv 2209.05433. */
struct format {
    float max_finite;
    float midpoint;     /* |x·scale| from here on is a real clip */
    float min_normal;
    float vanishing;    /* half of the smallest subnormal: up to here a product becomes 0 */
    int mantissa_bits;
    int nan_code;
};
static const struct format FORMATS[2] = {
    {448.0f, 464.0f, 0.015625f, 0.0009765625f, 3, 0x7F},
    {57344.0f, 61440.0f, 6.103515625e-05f, 7.62939453125e-06f, 2, 0x7F},
};

/* How a vector is rounded.
 *
 * For y = m·2^e with e at least the smallest normal exponent, y + 2^e·2^(23 − mantissa bits) is rounded by the
 * processor to exactly the format's mantissa bits, ties to even, and its low bits then count in units of the code.
 */
struct rounding {
    vf scale_limit, lift, minus_lift;
    vi min_normal;
    int mantissa_bits, code_offset;
};

INLINE struct rounding rounding_of(const struct format *f) {
    struct rounding r;
    float lift = (float)(1 << (23 - f->mantissa_bits));
    r.scale_limit = splat_f(f->max_finite);
    r.lift = splat_f(lift);
    r.minus_lift = splat_f(-lift);
    r.min_normal = (vi)splat_f(f->min_normal);
    r.mantissa_bits = f->mantissa_bits;
    int32_t e; /* exponent field of the lifted smallest normal number, whose code is 1 << mantissa bits */
    float lifted = f->min_normal * lift;
    memcpy(&e, &lifted, 4);
    r.code_offset = ((e >> 23) << f->mantissa_bits);
    return r;
}

/* |x|·scale, clipped where that may be needed, and lifted; `power` is 2^e */
INLINE vf lifted(vi magnitude, vf scale, const struct rounding *r, int clip, vf *power) {
    vf y = (vf)magnitude * scale;
    if (clip) y = (vf)min_i((vi)y, (vi)r->scale_limit); /* positive numbers order as their bits do */
    *power = (vf)max_i((vi)y & EXPONENT_MASK, r->min_normal);
    return mul_add(*power, r->lift, y);
}

/* The value on the format's grid that a lifted product stands for. */
INLINE vf lowered(vf t, vf power, const struct rounding *r) { return mul_add(power, r->minus_lift, t); }

/* Codes of four vectors: lifted products, and the elements for their signs. Marks zero codes in *zero. */
INLINE vb codes_of(const vf t[4], const vi x[4], const struct rounding *r, vb *zero) {
#if AVX2_WIDTH
    /* bits of t: exponent << 23 | n with n ≤ 16; 2^(7−m)·n + (exponent << 7) is the code, shifted and offset */
    const int up = 7 - r->mantissa_bits;
    const __m256i weights = _mm256_set1_epi32((1 << 16) | (1 << up));
    const __m256i offset = _mm256_set1_epi16((short)(r->code_offset << up));
    const __m128i down = _mm_cvtsi32_si128(up);
    __m256i a = _mm256_packs_epi32(_mm256_madd_epi16((__m256i)t[0], weights), _mm256_madd_epi16((__m256i)t[1], weights));
    __m256i b = _mm256_packs_epi32(_mm256_madd_epi16((__m256i)t[2], weights), _mm256_madd_epi16((__m256i)t[3], weights));
    a = _mm256_srl_epi16(_mm256_sub_epi16(a, offset), down);
    b = _mm256_srl_epi16(_mm256_sub_epi16(b, offset), down);
    __m256i code = _mm256_packus_epi16(a, b);
    *zero |= (vb)_mm256_cmpeq_epi8(code, _mm256_setzero_si256());
    /* saturating packs keep the sign bit */
    __m256i s = _mm256_packs_epi16(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]),
                                   _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]));
    code = _mm256_or_si256(code, _mm256_and_si256(s, _mm256_set1_epi8((char)0x80)));
    return (vb)_mm256_permutevar8x32_epi32(code, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#elif AVX512_WIDTH
    /* as above, with vectors twice as long */
    const int up = 7 - r->mantissa_bits;
    const __m512i weights = _mm512_set1_epi32((1 << 16) | (1 << up));
    const __m512i offset = _mm512_set1_epi16((short)(r->code_offset << up));
    const __m128i down = _mm_cvtsi32_si128(up);
    __m512i a = _mm512_packs_epi32(_mm512_madd_epi16((__m512i)t[0], weights), _mm512_madd_epi16((__m512i)t[1], weights));
    __m512i b = _mm512_packs_epi32(_mm512_madd_epi16((__m512i)t[2], weights), _mm512_madd_epi16((__m512i)t[3], weights));
    a = _mm512_srl_epi16(_mm512_sub_epi16(a, offset), down);
    b = _mm512_srl_epi16(_mm512_sub_epi16(b, offset), down);
    __m512i code = _mm512_packus_epi16(a, b);
    const __m512i all = _mm512_set1_epi8(-1);
    *zero = (vb)_mm512_mask_mov_epi8((__m512i)*zero, _mm512_cmpeq_epi8_mask(code, _mm512_setzero_si512()), all);
    __m512i s = _mm512_packs_epi16(_mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]),
                                   _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]));
    code = _mm512_or_si512(code, _mm512_and_si512(s, _mm512_set1_epi8((char)0x80)));
    return (vb)_mm512_permutexvar_epi32(LANES_IN_ORDER, code);
#else
    vi c[4], none = splat_i(0);
    for (int i = 0; i < 4; i++) {
        vi bits = (vi)t[i];
        c[i] = (bits >> (23 - r->mantissa_bits)) + (bits & 0xFF) - r->code_offset;
        none |= c[i] == 0;
        c[i] |= (vi)((vu)x[i] >> 24) & 0x80;
    }
    *zero |= (vb)none;
    return pack_bytes(c[0], c[1], c[2], c[3]);
#endif
}

/* Store past the caches, where the result is larger than they are. p is aligned to VB. */
INLINE void stream_b(uint8_t *p, vb v) {
#if AVX2_WIDTH
    _mm256_stream_si256((__m256i *)p, (__m256i)v);
#elif AVX512_WIDTH
    _mm512_stream_si512((__m512i *)p, (__m512i)v);
#elif defined(__SSE2__) && VB == 16
    _mm_stream_si128((__m128i *)p, (__m128i)v);
#else
    store_b(p, v);
#endif
}

INLINE void stream_done(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

#endif
