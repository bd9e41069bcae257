/* The loops over elements with a scale for each column (tiles along the rows). Once for each type of operand, after
 * operand.h.
 *
 * Columns are looked at row by row, a stretch of them at a time: what lies side by side is read side by side.
 */

#if IS_HALF
#define MAGNITUDES vs
#define LOAD_MAGNITUDES(p) (load_s(p) & splat_s(0x7FFF))
#define MAX_MAGNITUDES max_s
#define MIN_MAGNITUDES min_s
#else
#define MAGNITUDES vi
#define LOAD_MAGNITUDES(p) ((vi)LOAD(p) & ABS_MASK)
#define MAX_MAGNITUDES max_i
#define MIN_MAGNITUDES min_i
#endif

/* Bits (as float32) of the largest and the smallest |x| of n columns, a multiple of BLOCK and at most MAX_STRETCH. */
static void NAME(column_extremes)(const T *x, int64_t ld, int64_t rows, int64_t n, int32_t *high, int32_t *low) {
    const int64_t step = VB / (int64_t)sizeof(T);
    T highest[MAX_STRETCH], lowest[MAX_STRETCH];
    for (int64_t i = 0; i < rows; i += COLUMN_ROWS) {
        const int64_t count = least(COLUMN_ROWS, rows - i), to_next = i + COLUMN_ROWS < rows ? COLUMN_ROWS * ld : 0;
        for (int64_t c = 0; c < n; c += step) {
            const T *p = x + i * ld + c;
            MAGNITUDES a = LOAD_MAGNITUDES(p), h = a, l = a;
            if (i) {
                MAGNITUDES before;
                memcpy(&before, highest + c, sizeof before);
                h = MAX_MAGNITUDES(h, before);
                memcpy(&before, lowest + c, sizeof before);
                l = MIN_MAGNITUDES(l, before);
            }
            for (int64_t k = 1; k < count; k++) {
                a = LOAD_MAGNITUDES(p + k * ld);
                h = MAX_MAGNITUDES(h, a);
                l = MIN_MAGNITUDES(l, a);
            }
            if (VB >= 64 || c * (int64_t)sizeof(T) % 64 == 0)
                for (int64_t k = 0; k < count; k++) __builtin_prefetch(p + k * ld + to_next);
            memcpy(highest + c, &h, sizeof h);
            memcpy(lowest + c, &l, sizeof l);
        }
    }
    for (int64_t c = 0; c < n; c += VL) {
        store_i(high + c, (vi)LOAD(highest + c));
        store_i(low + c, (vi)LOAD(lowest + c));
    }
}

#undef MAGNITUDES
#undef LOAD_MAGNITUDES
#undef MAX_MAGNITUDES
#undef MIN_MAGNITUDES

/* Scales of a stretch of columns, and how bfloat16 is rounded where all of them are exact. */
struct NAME(scales) {
    float scale[MAX_STRETCH], scale_inv[MAX_STRETCH];
    int16_t least[MAX_STRETCH], offset[MAX_STRETCH];
    struct short_rounding rounding;
};

/* Ask for what the next stretch will read, into the second cache. */
INLINE void NAME(prefetch_far)(const T *x, int64_t ahead) {
    const char *line = (const char *)(x + ahead);
    for (int64_t b = 0; b < (int64_t)(BLOCK * sizeof(T)); b += 64) __builtin_prefetch(line + b, 0, 2);
}

/* One row of n columns, a multiple of BLOCK, each with its own scale. */
INLINE void NAME(column_codes)(const T *x, int64_t n, uint8_t *out, const struct NAME(scales) *w,
                               const struct rounding *r, int exact, int stream, int64_t ahead) {
    struct smallest smallest = smallest_of_none();
    for (int64_t i = 0; i < n; i += BLOCK) {
        vf s[4];
        const vs lowest[2] = {load_s(w->least + i), load_s(w->least + i + 2 * VL)};
        const vs offset[2] = {load_s(w->offset + i), load_s(w->offset + i + 2 * VL)};
        for (int k = 0; k < 4; k++) s[k] = load_f(w->scale + i + k * VL);
        if (ahead) NAME(prefetch_far)(x + i, ahead);
        vb codes = NAME(exact_codes)(x + i, s, r, &w->rounding, lowest, offset, exact, 1, &smallest);
        if (stream) stream_b(out + i, codes);
        else store_b(out + i, codes);
    }
}

INLINE void NAME(column_values)(const T *x, int64_t n, float *out, const struct NAME(scales) *w,
                                const struct rounding *r, int exact, int stream, int64_t ahead) {
    struct smallest smallest = smallest_of_none();
    for (int64_t i = 0; i < n; i += BLOCK) {
        vf s[4], q[4], v[4];
        const vs lowest[2] = {load_s(w->least + i), load_s(w->least + i + 2 * VL)};
        for (int k = 0; k < 4; k++) {
            s[k] = load_f(w->scale + i + k * VL);
            q[k] = load_f(w->scale_inv + i + k * VL);
        }
        if (ahead) NAME(prefetch_far)(x + i, ahead);
        NAME(exact_values)(x + i, s, q, r, &w->rounding, lowest, exact, 1, v, &smallest);
        for (int k = 0; k < 4; k++)
            if (stream) stream_b((uint8_t *)(out + i + k * VL), (vb)v[k]);
            else store_f(out + i + k * VL, v[k]);
    }
}

/* What comes out of `rows` rows of a stretch. */
static void NAME(columns_out)(struct NAME(scales) *w, const T *x, int64_t ld, int64_t rows, int64_t n, char *out,
                              int64_t out_ld, const struct rounding *r, int exact, int stream, int64_t ahead,
                              int kind) {
    exact = exact && IS_BF16;
    for (int64_t c = 0; c < n && exact; c++) {
        w->rounding = short_rounding_of(r->format, w->scale[c]);
        w->least[c] = w->rounding.least, w->offset[c] = w->rounding.offset;
    }
    for (int64_t k = 0; k < rows; k++)
        if (kind == CODES) NAME(column_codes)(x + k * ld, n, (uint8_t *)out + k * out_ld, w, r, exact, stream, ahead);
        else NAME(column_values)(x + k * ld, n, (float *)out + k * out_ld, w, r, exact, stream, ahead);
}

/* As run_count for VL columns over `rows` rows: lanes of `to` are columns. */
static void NAME(column_count)(const T *x, int64_t ld, int64_t rows, const float *scale, const struct format *f,
                               int32_t *to[3]) {
    vi zero = splat_i(0), gone = zero, clipped = zero;
    vf s = load_f(scale);
    for (int64_t r = 0; r < rows; r++) {
        vi a = (vi)LOAD(x + r * ld) & ABS_MASK;
        vf y = (vf)a * s;
        zero -= a == 0;
        gone -= y <= f->vanishing;
        clipped -= y >= f->midpoint;
    }
    store_i(to[0], zero);
    store_i(to[1], gone);
    store_i(to[2], clipped);
}
