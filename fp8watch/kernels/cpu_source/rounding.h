/* From float32 and bfloat16 to the codes of a format, and to the values that they stand for: vectors at a time. */
#ifndef FP8WATCH_ROUNDING_H
#define FP8WATCH_ROUNDING_H

#include "vector.h"

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
    const struct format *format;
    vf scale_limit, lift, minus_lift;
    vi min_normal;
    int mantissa_bits, code_offset;
};

INLINE struct rounding rounding_of(const struct format *f) {
    struct rounding r;
    float lift = (float)(1 << (23 - f->mantissa_bits));
    r.format = f;
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

/* The smallest of what came out of a run, lane by lane, as bytes, words and halves that are not negative: whether any of it
 * is 0 is asked once, at its end. */
struct smallest { vb bytes; vi words; vs halves; };
INLINE struct smallest smallest_of_none(void) { return (struct smallest){splat_b(0xFF), splat_i(ABS_MASK), splat_s(0x7FFF)}; }
INLINE int any_zero(const struct smallest *s) {
    return any_b((vb)(s->bytes == 0) | (vb)(s->words == 0) | (vb)(s->halves == 0));
}

/* Codes of four vectors: lifted products, and the elements for their signs. */
INLINE vb codes_of(const vf t[4], const vi x[4], const struct rounding *r, struct smallest *least) {
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
    least->bytes = min_b(least->bytes, (vb)code);
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
    least->bytes = min_b(least->bytes, (vb)code);
    __m512i s = _mm512_packs_epi16(_mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]),
                                   _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]));
    code = _mm512_or_si512(code, _mm512_and_si512(s, _mm512_set1_epi8((char)0x80)));
    return (vb)_mm512_permutexvar_epi32(LANES_IN_ORDER, code);
#else
    vi c[4];
    for (int i = 0; i < 4; i++) {
        vi bits = (vi)t[i];
        c[i] = (bits >> (23 - r->mantissa_bits)) + (bits & 0xFF) - r->code_offset;
        least->words = min_i(least->words, c[i]);
        c[i] |= (vi)((vu)x[i] >> 24) & 0x80;
    }
    return pack_bytes(c[0], c[1], c[2], c[3]);
#endif
}

/* Rounding of bfloat16 by its own bits, where the scale is a power of two and the code a normal number or 0: the scale
 * moves the exponent, and the mantissa is rounded by an addition, ties to even. */
struct short_rounding {
    int drop;       /* bits of the mantissa */
    int16_t half, offset, least;
};

/* Shift right by `drop`, which is 1 … 15. The upper half of a product is quicker than a shift by a variable. */
INLINE vs shift_down(vs v, int drop) {
#if AVX2_WIDTH
    return (vs)_mm256_mulhi_epi16((__m256i)v, _mm256_set1_epi16((int16_t)(1 << (16 - drop))));
#elif AVX512_WIDTH
    return (vs)_mm512_mulhi_epi16((__m512i)v, _mm512_set1_epi16((int16_t)(1 << (16 - drop))));
#else
    return v >> drop;
#endif
}

INLINE struct short_rounding short_rounding_of(const struct format *f, float scale) {
    struct short_rounding r;
    int32_t exponent, least;
    memcpy(&exponent, &scale, 4);
    memcpy(&least, &f->min_normal, 4);
    r.drop = 7 - f->mantissa_bits;
    r.half = (int16_t)((1 << (r.drop - 1)) - 1);
    r.least = (int16_t)((least >> 16) - (exponent >> 16) + (127 << 7)); /* the smallest |x| of a normal code */
    r.offset = (int16_t)((1 << 7) - r.least + r.half);
    return r;
}

/* Sum that wraps: lanes of what is not finite are computed like the others, and thrown away. */
INLINE vs add_s(vs a, vs b) { return (vs)((vw)a + (vw)b); }

/* |x|, and 1 more where rounding up is to win a tie */
INLINE vs short_even(vs magnitude, const struct short_rounding *r) {
    return add_s(magnitude, shift_down(magnitude, r->drop) & splat_s(1));
}

/* Codes of two vectors of bfloat16. Negative codes are those of 0. */
INLINE vb short_codes(const vs x[2], const vs offset[2], const struct short_rounding *r, struct smallest *least) {
    vs c[2];
    for (int k = 0; k < 2; k++) c[k] = shift_down(add_s(short_even(x[k] & splat_s(0x7FFF), r), offset[k]), r->drop);
#if AVX2_WIDTH
    __m256i code = _mm256_packus_epi16((__m256i)c[0], (__m256i)c[1]);
    least->bytes = min_b(least->bytes, (vb)code);
    __m256i s = _mm256_packs_epi16((__m256i)x[0], (__m256i)x[1]); /* saturating packs keep the sign bit */
    code = _mm256_or_si256(code, _mm256_and_si256(s, _mm256_set1_epi8((char)0x80)));
    return (vb)_mm256_permute4x64_epi64(code, 0xD8);
#elif AVX512_WIDTH
    __m512i code = _mm512_packus_epi16((__m512i)c[0], (__m512i)c[1]);
    least->bytes = min_b(least->bytes, (vb)code);
    __m512i s = _mm512_packs_epi16((__m512i)x[0], (__m512i)x[1]);
    code = _mm512_or_si512(code, _mm512_and_si512(s, _mm512_set1_epi8((char)0x80)));
    return (vb)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), code);
#else
    union { vb all; vhb part[2]; } u;
    for (int k = 0; k < 2; k++) {
        vs code = c[k] & ~(c[k] < 0);
        least->halves = min_s(least->halves, code);
        code |= (vs)((vw)x[k] >> 8) & 0x80;
        u.part[k] = __builtin_convertvector((vw)code, vhb);
    }
    return u.all;
#endif
}

/* Values of a vector of bfloat16, as float32 in order. */
INLINE void short_values(vs x, const struct short_rounding *r, vf out[2]) {
    vs v = add_s(short_even(x & splat_s(0x7FFF), r), splat_s(r->half)) & splat_s((int16_t)-(1 << r->drop));
    v |= x & splat_s((int16_t)0x8000);
#if AVX2_WIDTH
    __m256i q = _mm256_permute4x64_epi64((__m256i)v, 0xD8), none = _mm256_setzero_si256();
    out[0] = (vf)_mm256_unpacklo_epi16(none, q);
    out[1] = (vf)_mm256_unpackhi_epi16(none, q);
#elif AVX512_WIDTH
    __m512i q = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), (__m512i)v);
    const __m512i none = _mm512_setzero_si512();
    out[0] = (vf)_mm512_unpacklo_epi16(none, q);
    out[1] = (vf)_mm512_unpackhi_epi16(none, q);
#else
    union { vs all; vh part[2]; } u;
    u.all = v;
    for (int k = 0; k < 2; k++) out[k] = (vf)(__builtin_convertvector(u.part[k], vu) << 16);
#endif
}

#endif
