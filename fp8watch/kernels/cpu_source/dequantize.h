/* Codes times the scale_inv of their tile: what a backward reads of what its forward kept.
 *
 * A code is moved to its place in a float32 and multiplied once, as the reference does. A subnormal one is read as if it
 * were normal, and what that is too much is taken off again: no float32 on the way is subnormal, which costs a hundred
 * cycles.
 */
#ifndef FP8WATCH_DEQUANTIZE_H
#define FP8WATCH_DEQUANTIZE_H

#include <pthread.h>

#include "job.h"

#define MAX_DEQUANTIZE_THREADS 64
#define DEQUANTIZE_CHUNK (1 << 16) /* elements that a thread takes at once */

/* Of a format: where its digits go, the code of its smallest normal number, and the first that is not finite. */
struct code_layout { int32_t shift, offset, normal, special, least; };

INLINE struct code_layout code_layout_of(int format) {
    const int m = FORMATS[format].mantissa_bits, bias = format ? 15 : 7;
    return (struct code_layout){23 - m, (127 - bias) << 23, 1 << m, format ? 0x7C : 0x7F, bits_of(FORMATS[format].min_normal)};
}

INLINE vf values_of_codes(vi code, struct code_layout f) {
    vi magnitude = code & 0x7F, below = magnitude < f.normal;
    vf value = (vf)((magnitude << f.shift) + f.offset + (below & (1 << 23))) - (vf)(below & f.least);
    return (vf)((vi)value | ((magnitude >= f.special) & EXPONENT_MASK) | ((code & 0x80) << 24));
}

INLINE vi load_codes(const uint8_t *p) {
    vq bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (vi)__builtin_convertvector(bytes, vu);
}

/* n codes with one scale_inv, or with one each. */
INLINE void dequantize_run(const uint8_t *codes, const float *scale_inv, int each, float *out, int64_t n, struct code_layout f) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        store_f(out + i, values_of_codes(load_codes(codes + i), f) * (each ? load_f(scale_inv + i) : splat_f(*scale_inv)));
    if (i == n) return;
    uint8_t rest[VL] = {0};
    float scales[VL] = {0}, values[VL];
    memcpy(rest, codes + i, (size_t)(n - i));
    for (int64_t k = 0; k < n - i; k++) scales[k] = scale_inv[each ? i + k : 0];
    store_f(values, values_of_codes(load_codes(rest), f) * load_f(scales));
    memcpy(out + i, values, (size_t)(n - i) * sizeof *out);
}

#define HELD_COLUMNS 1024

/* What a GEMM reads, values or codes, and the operand: see held.h. */
struct held {
    const void *x;          /* [M, K], rows ld elements apart */
    int64_t ld, M, K, first, step; /* each step-th row from the first on */
    const float *values;    /* [M, K] contiguous, or NULL */
    const uint8_t *codes;   /* [M, K] contiguous, or NULL */
    const float *scale_inv; /* of codes: [Mt, Kt] */
    int64_t bm, bk;
    struct code_layout layout;
    float limit, half, floor;
    int32_t least;          /* bits of the smallest magnitude of a row that is judged */
};

struct dequantize {
    const uint8_t *codes; /* [M, K] contiguous */
    const float *scale_inv;
    float *out;
    int64_t M, K, bm, bk, rows; /* a chunk has so many rows */
    int32_t format;
    int64_t next;
};

static void *dequantize_rows(void *arg) {
    struct dequantize *d = arg;
    const struct code_layout f = code_layout_of(d->format);
    const int64_t K = d->K, bk = d->bk, Kt = ceil_div(K, bk);
    for (;;) {
        const int64_t start = __atomic_fetch_add(&d->next, d->rows, __ATOMIC_RELAXED);
        if (start >= d->M) return NULL;
        for (int64_t r = start; r < least(start + d->rows, d->M); r++) {
            const float *scale_inv = d->scale_inv + r / d->bm * Kt;
            const uint8_t *codes = d->codes + r * K;
            float *out = d->out + r * K;
            if (bk == 1) dequantize_run(codes, scale_inv, 1, out, K, f);
            else
                for (int64_t j = 0; j < Kt; j++)
                    dequantize_run(codes + j * bk, scale_inv + j, 0, out + j * bk, least(bk, K - j * bk), f);
        }
    }
}

static void dequantize(struct dequantize *d, int threads) {
    pthread_t others[MAX_DEQUANTIZE_THREADS];
    int started = 0, wanted;
    d->rows = DEQUANTIZE_CHUNK / d->K + 1, d->next = 0;
    wanted = (int)least(least(threads, ceil_div(d->M, d->rows)), MAX_DEQUANTIZE_THREADS) - 1;
    while (started < wanted && !pthread_create(&others[started], NULL, dequantize_rows, d)) started++;
    dequantize_rows(d); /* without a single thread more, all of it */
    for (int k = 0; k < started; k++) pthread_join(others[k], NULL);
}

#endif
