/* Rows of what a GEMM reads, held against the operand, once for each type of operand: include after operand.h.
 *
 * What rounding takes of an element is at most `half` of it and at most `floor`: the meaning and the figures are those of
 * `fp8watch.quantize.rounding_bound`, which looks closely where this finds that something does not hold.
 */

/* One vector: the bits of |x|, and where it lost more. */
INLINE void NAME(hold)(vf x, vf reads, const struct held *h, vi *high, vi *off) {
    const vi above = x > h->limit, below = x < -h->limit; /* of NaN neither */
    const vf clipped = (vf)(((vi)splat_f(h->limit) & above) | ((vi)splat_f(-h->limit) & below) | ((vi)x & ~(above | below)));
    const vi size = (vi)clipped & ABS_MASK;
    const vf lost = (vf)((vi)(clipped - reads) & ABS_MASK);
    *high = max_i(*high, size);
    *off |= ~(vi)(lost - (vf)size * h->half <= h->floor);
}

/* 1: no row that can be judged has lost more. */
static int NAME(rows_hold)(const struct held *h) {
    const T *x = h->x;
    const int64_t K = h->K, Kt = ceil_div(K, h->bk);
    float buffer[HELD_COLUMNS], reads[VL] = {0};
    T rest[VL] = {0};
    for (int64_t r = h->first; r < h->M; r += h->step) {
        const T *row = x + r * h->ld;
        vi high = splat_i(0), off = high;
        for (int64_t c = 0, n; c < K; c += n) {
            const float *values = h->values + r * K + c;
            int64_t i = 0;
            n = least(HELD_COLUMNS, K - c);
            if (h->codes) {
                if (h->bk > 1) n = least(n, (c / h->bk + 1) * h->bk - c);
                dequantize_run(h->codes + r * K + c, h->scale_inv + r / h->bm * Kt + c / h->bk, h->bk == 1, buffer, n, h->layout);
                values = buffer;
            }
            for (; i + VL <= n; i += VL) NAME(hold)(LOAD(row + c + i), load_f(values + i), h, &high, &off);
            if (i == n) continue;
            memset(rest, 0, sizeof rest), memset(reads, 0, sizeof reads);
            memcpy(rest, row + c + i, (size_t)(n - i) * sizeof(T));
            memcpy(reads, values + i, (size_t)(n - i) * sizeof *reads);
            NAME(hold)(LOAD(rest), load_f(reads), h, &high, &off);
        }
        const int32_t size = max_of_lanes(high);
        if (size < EXPONENT_MASK && size >= h->least && max_of_lanes(off & 1)) return 0;
    }
    return 1;
}
