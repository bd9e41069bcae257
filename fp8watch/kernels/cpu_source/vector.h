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
#define likely(x) __builtin_expect(!!(x), 1)
#define COLD static __attribute__((noinline, cold))

typedef float vf __attribute__((vector_size(VB)));
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint32_t vu __attribute__((vector_size(VB)));
typedef int16_t vs __attribute__((vector_size(VB)));
typedef uint16_t vw __attribute__((vector_size(VB)));
typedef uint8_t vb __attribute__((vector_size(VB)));
typedef uint8_t vq __attribute__((vector_size(VB / 4)));   /* VL bytes */
typedef uint8_t vhb __attribute__((vector_size(VB / 2)));  /* 2·VL bytes */
typedef uint16_t vh __attribute__((vector_size(VB / 2)));  /* VL halves */

INLINE vf splat_f(float x) { vf v = {0}; return v + x; }
INLINE vi splat_i(int32_t x) { vi v = {0}; return v + x; }
INLINE vb splat_b(uint8_t x) { vb v = {0}; return v + x; }
INLINE vs splat_s(int16_t x) { vs v = {0}; return v + x; }
INLINE vf load_f(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vi load_i(const int32_t *p) { vi v; memcpy(&v, p, sizeof v); return v; }
INLINE vb load_b(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return v; }
INLINE vs load_s(const void *p) { vs v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_s(void *p, vs v) { memcpy(p, &v, sizeof v); }
INLINE void store_f(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE void store_i(int32_t *p, vi v) { memcpy(p, &v, sizeof v); }
INLINE void store_b(uint8_t *p, vb v) { memcpy(p, &v, sizeof v); }

INLINE vi max_i(vi a, vi b) {
#if VB == 16 && defined(__SSE4_1__)
    return (vi)_mm_max_epi32((__m128i)a, (__m128i)b);
#elif AVX2_WIDTH
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif AVX512_WIDTH
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    vi m = a > b;
    return (a & m) | (b & ~m);
#endif
}

INLINE vi min_i(vi a, vi b) {
#if VB == 16 && defined(__SSE4_1__)
    return (vi)_mm_min_epi32((__m128i)a, (__m128i)b);
#elif AVX2_WIDTH
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
#elif VB == 16 && defined(__FMA__)
    return (vf)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#else
    return a * b + c;
#endif
}

/* 1 << d for d of 0 … 30; from 31 on anything without one of those bits */
INLINE vi one_hot(vi d) {
#if AVX2_WIDTH
    return (vi)_mm256_sllv_epi32(_mm256_set1_epi32(1), (__m256i)d);
#elif AVX512_WIDTH
    return (vi)_mm512_sllv_epi32(_mm512_set1_epi32(1), (__m512i)d);
#elif VB == 16 && defined(__AVX2__)
    return (vi)_mm_sllv_epi32(_mm_set1_epi32(1), (__m128i)d);
#else
    return (vi)((vu)splat_i(1) << (vu)min_i(d, splat_i(31)));
#endif
}

/* Add two vectors to one, bit by bit: what is left of each bit's sum stays in *sum, the carries are returned. */
INLINE vi carry_save(vi *sum, vi a, vi b) {
#if AVX512_WIDTH
    const __m512i s = (__m512i)*sum;
    *sum = (vi)_mm512_ternarylogic_epi32(s, (__m512i)a, (__m512i)b, 0x96);
    return (vi)_mm512_ternarylogic_epi32(s, (__m512i)a, (__m512i)b, 0xE8);
#else
    vi either = *sum ^ a, carry = (*sum & a) | (either & b);
    *sum = either ^ b;
    return carry;
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

INLINE vs min_s(vs a, vs b) {
#if AVX2_WIDTH
    return (vs)_mm256_min_epi16((__m256i)a, (__m256i)b);
#elif AVX512_WIDTH
    return (vs)_mm512_min_epi16((__m512i)a, (__m512i)b);
#else
    vs m = a < b;
    return (a & m) | (b & ~m);
#endif
}

INLINE vb min_b(vb a, vb b) {
#if AVX2_WIDTH
    return (vb)_mm256_min_epu8((__m256i)a, (__m256i)b);
#elif AVX512_WIDTH
    return (vb)_mm512_min_epu8((__m512i)a, (__m512i)b);
#elif VB == 16 && defined(__SSE2__)
    return (vb)_mm_min_epu8((__m128i)a, (__m128i)b);
#else
    vb m = (vb)(a < b);
    return (a & m) | (b & ~m);
#endif
}

/* Unsigned halves: not 0 where a lies below the limit. */
INLINE vs below_s(vs a, vs limit) {
#if AVX2_WIDTH
    return (vs)_mm256_subs_epu16((__m256i)limit, (__m256i)a);
#elif AVX512_WIDTH
    return (vs)_mm512_subs_epu16((__m512i)limit, (__m512i)a);
#else
    return (vs)((vw)a < (vw)limit);
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

/* Sums are kept in 16 lanes whatever the width, element i in lane i mod 16, and added in one order: no width changes a
 * bit of them. */
#define LANES 16
#define LANE_VECTORS (LANES / VL)

/* Sums of four times 16 lanes: halves on halves, then neighbours. */
INLINE void sums_of_lanes(const float *a, const float *b, const float *c, const float *d, float out[4]) {
#if defined(__SSE3__)
    const float *from[4] = {a, b, c, d};
    __m128 s[4];
    for (int i = 0; i < 4; i++)
        s[i] = _mm_add_ps(_mm_add_ps(_mm_loadu_ps(from[i]), _mm_loadu_ps(from[i] + 8)),
                          _mm_add_ps(_mm_loadu_ps(from[i] + 4), _mm_loadu_ps(from[i] + 12)));
    _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(s[0], s[1]), _mm_hadd_ps(s[2], s[3])));
#else
    const float *from[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        float s[4];
        for (int l = 0; l < 4; l++) s[l] = (from[i][l] + from[i][l + 8]) + (from[i][l + 4] + from[i][l + 12]);
        out[i] = (s[0] + s[1]) + (s[2] + s[3]);
    }
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
