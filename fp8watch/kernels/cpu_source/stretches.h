/* Tiles of few columns, a stretch of the row at a time: once for each type of operand, after columns.h.
 *
 * A stretch is read for the extremes of its columns, and again, from the second cache, for what comes out; meanwhile
 * the next stretch is asked for.
 */

/* Work for a stretch of columns, each with the scale of its tile. */
struct NAME(stretch) {
    int32_t high[MAX_STRETCH], low[MAX_STRETCH], amax[MAX_STRETCH], mask[MAX_STRETCH], count[3][MAX_STRETCH];
    float unit[MAX_STRETCH];
    struct NAME(scales) by;
    double signal[MAX_STRETCH], noise[MAX_STRETCH], fourth[MAX_STRETCH], shortfall[MAX_STRETCH];
    struct tile tiles[MAX_STRETCH];
    struct group groups[MAX_STRETCH / GROUP];
    uint8_t ordinary[MAX_STRETCH / GROUP]; /* groups of columns whose scales were made together */
};

/* Statistics of a group of ordinary columns, each a tile. */
static void NAME(group_columns)(const struct job *job, struct fold *f, struct NAME(stretch) *w, int64_t k, const T *x,
                                int64_t ld, int stats) {
    const struct format *fmt = &FORMATS[job->format];
    struct group *g = w->groups + k / GROUP;
    g->some_vanished = 0;
    for (int64_t v = k; v < k + GROUP; v += VL) {
        if (!any_b((vb)((vf)load_i(w->low + v) * load_f(w->by.scale + v) <= fmt->vanishing))) continue;
        int32_t *to[3] = {w->count[0] + v, w->count[1] + v, w->count[2] + v};
        g->some_vanished = 1;
        NAME(column_count)(x + v, ld, w->tiles[k].rows, w->by.scale + v, fmt, to);
        for (int64_t c = v; c < v + VL; c++) {
            w->tiles[c].nonzero -= w->count[0][c];
            w->tiles[c].underflow = w->count[1][c] - w->count[0][c];
        }
    }
    fold_group(job, f, w->tiles + k, g);
    if (stats < ALL_STATS) return;
    for (int64_t c = k; c < k + GROUP; c++) {
        struct tile *t = w->tiles + c;
        t->amax = float_of(w->high[c]);
        t->signal = w->signal[c], t->noise = w->noise[c], t->fourth = w->fourth[c], t->shortfall = w->shortfall[c];
        fold_sums(job, f, t, w->unit[c]);
    }
}

/* Tiles of row i over `real` columns from `column`; x and out are readable and writable for n, a multiple of BLOCK. */
static void NAME(columns_of)(const struct job *job, struct fold *f, struct NAME(stretch) *w, int64_t i, int64_t column,
                             int64_t real, int64_t n, const T *x, int64_t ld, char *out, int64_t out_ld, int stream,
                             int64_t ahead, int kind, int stats) {
    const struct rounding r = rounding_of(&FORMATS[job->format]);
    const struct format *fmt = &FORMATS[job->format];
    const int64_t bk = job->bk, rows = least(job->bm, job->M - i * job->bm), size = kind == CODES ? 1 : kind == VALUES ? 4 : 0;
    const int64_t num_tiles = ceil_div(real, bk);
    int exact = job->power_2 || job->given; /* until a tile is found that is not */
    for (int64_t c = 0; c < n; c++) w->mask[c] = 0, w->amax[c] = 0x7F000000, w->by.scale[c] = w->by.scale_inv[c] = w->unit[c] = 1;
    if (stats == ALL_STATS) {
        memset(w->signal, 0, sizeof w->signal), memset(w->noise, 0, sizeof w->noise);
        memset(w->fourth, 0, sizeof w->fourth), memset(w->shortfall, 0, sizeof w->shortfall);
    }
    memset(w->ordinary, 0, sizeof w->ordinary);
    if (job->seen) {
        memset(w->high, 0, sizeof w->high), memset(w->low, 0, sizeof w->low); /* padding */
        memcpy(w->high, job->seen->column_high + (column - job->seen->column), (size_t)real * 4);
        memcpy(w->low, job->seen->column_low + (column - job->seen->column), (size_t)real * 4);
    } else {
        NAME(column_extremes)(x, ld, rows, n, w->high, w->low);
    }
    for (int64_t k = 0; k < num_tiles; k++) {
        struct tile *t = w->tiles + k;
        if (bk == 1 && k % GROUP == 0 && k + GROUP <= num_tiles && !job->given) {
            struct group *g = w->groups + k / GROUP;
            memcpy(g->amax, w->high + k, sizeof g->amax);
            if (group_scales(job, g)) {
                memcpy(w->by.scale + k, g->scale, sizeof g->scale);
                memcpy(w->by.scale_inv + k, g->scale_inv, sizeof g->scale_inv);
                memcpy(job->scale_inv + i * job->K + column + k, g->scale_inv, sizeof g->scale_inv);
                for (int64_t c = k; c < k + GROUP; c++) {
                    t = w->tiles + c;
                    t->i = i, t->j = column + c, t->rows = rows, t->columns = 1, t->nonzero = rows, t->underflow = 0;
                    w->mask[c] = ABS_MASK, w->amax[c] = w->high[c], w->unit[c] = unit_of(float_of(w->high[c]));
                }
                w->ordinary[k / GROUP] = 1;
                k += GROUP - 1;
                continue;
            }
        }
        int64_t c0 = k * bk, c1 = least(c0 + bk, real);
        int32_t bits = 0, low = ABS_MASK;
        t->i = i, t->j = column / bk + k, t->row = i * job->bm, t->column = column + c0;
        t->rows = rows, t->columns = c1 - c0;
        t->x = (const char *)(x + c0), t->out = out + c0 * size;
        for (int64_t c = c0; c < c1; c++) {
            bits = w->high[c] > bits ? w->high[c] : bits;
            low = w->low[c] < low ? w->low[c] : low;
        }
        NAME(tile_begin)(job, t, bits, ld);
        if (!t->finite || !is_finite(t->scale) || !(t->scale >= 0)) continue;
        if (t->amax == 0 && is_finite(t->scale_inv)) continue; /* 0, whatever the scale */
        int heavy = stats == ALL_STATS && t->amax > 0 && vector_energies(t);
        if (!exact_scale(t, fmt)) exact = 0;
        for (int64_t c = c0; c < c1; c++) {
            w->by.scale[c] = t->scale, w->by.scale_inv[c] = t->scale_inv;
            w->low[c] = low;
            if (heavy) w->mask[c] = ABS_MASK, w->amax[c] = bits, w->unit[c] = unit_of(t->amax);
        }
    }
    if (kind != NOTHING) NAME(columns_out)(&w->by, x, ld, rows, n, out, out_ld, &r, exact, stream, ahead, kind);
    if (stats == ALL_STATS) {
        if (exact) memcpy(w->unit, w->by.scale, (size_t)n * sizeof w->unit[0]);
        for (int64_t c = 0; c < n; c += BLOCK)
            NAME(column_full)(x + c, ld, rows, w->by.scale + c, w->by.scale_inv + c, w->unit + c, w->amax + c, w->mask + c, &r, f,
                              w->signal + c, w->noise + c, w->fourth + c, w->shortfall + c, exact);
    }
    int64_t counted = -1; /* the vector of columns whose counts are there */
    for (int64_t k = 0; k < num_tiles; k++) {
        struct tile *t = w->tiles + k;
        int64_t c0 = k * bk;
        if (w->ordinary[k / GROUP] && bk == 1) {
            if (stats) NAME(group_columns)(job, f, w, k, x, ld, stats);
            k += GROUP - 1;
            continue;
        }
        if (!t->finite || !is_finite(t->scale) || !(t->scale >= 0)) {
            slow_tile(job, f, t, ld, out_ld, 1, stats == ALL_STATS);
            if (stats) fold_tile(job, f, t);
            continue;
        }
        if (!stats) continue;
        t->nonzero = t->rows * t->columns;
        t->saturated = t->underflow = t->nan = t->inf = 0;
        if (float_of(w->low[c0]) * t->scale <= fmt->vanishing || t->amax * t->scale >= fmt->midpoint)
            for (int64_t c = c0; c < c0 + t->columns; c++) {
                int64_t v = c / VL * VL;
                if (v != counted) {
                    int32_t *to[3] = {w->count[0] + v, w->count[1] + v, w->count[2] + v};
                    NAME(column_count)(x + v, ld, rows, w->by.scale + v, fmt, to);
                    counted = v;
                }
                t->nonzero -= w->count[0][c];
                t->underflow += w->count[1][c] - w->count[0][c];
                t->saturated += w->count[2][c];
            }
        fold_tile(job, f, t);
        if (stats < ALL_STATS || t->amax == 0) continue;
        if (!w->mask[c0]) {
            struct tile again = *t;
            slow_tile(job, f, &again, ld, out_ld, 0, 1);
            continue;
        }
        t->signal = t->noise = t->fourth = t->shortfall = 0;
        for (int64_t c = c0; c < c0 + t->columns; c++)
            t->signal += w->signal[c], t->noise += w->noise[c], t->fourth += w->fourth[c], t->shortfall += w->shortfall[c];
        fold_sums(job, f, t, w->unit[c0]);
    }
}

/* Tiles of row i, columns [c0, c1) with c0 at a tile's edge. Returns 0, or −1 without memory. */
static int NAME(columns)(const struct job *job, struct fold *f, int64_t i, int64_t c0, int64_t c1, int kind,
                         int stats) {
    const int64_t size = kind == CODES ? 1 : kind == VALUES ? 4 : 0, widest = STRETCH_BYTES / (int64_t)sizeof(T);
    const int64_t step = job->bk * BLOCK * (job->bk * BLOCK < widest ? widest / (job->bk * BLOCK) : 1);
    const int64_t row = i * job->bm, rows = least(job->bm, job->M - row);
    const int stream = job->M * job->K * size >= STREAM_BYTES && job->K % VB == 0 && (uintptr_t)job->out % VB == 0;
    struct NAME(stretch) *w = malloc(sizeof *w);
    if (!w) return -1;
    int status = 0;
    for (int64_t c = c0; c < c1 && !status; c += step) {
        int64_t real = least(step, c1 - c), whole = real / BLOCK * BLOCK, ahead = 0;
        if (whole % job->bk) whole -= whole % (job->bk * BLOCK); /* tiles are not cut */
        const T *x = (const T *)job->x + row * job->ld + c;
        char *out = (char *)job->out + (row * job->K + c) * size;
        if (c + 2 * step <= c1) ahead = step;
        else if (c1 - c0 == job->K && row + 2 * job->bm <= job->M) ahead = job->bm * job->ld - (c - c0);
        if (whole) NAME(columns_of)(job, f, w, i, c, whole, whole, x, job->ld, out, job->K, stream && c % VB == 0, ahead, kind, stats);
        if (whole == real) continue;
        /* the rest, fewer columns than vectors have, in a padded copy */
        int64_t rest = real - whole, padded = ceil_div(rest, BLOCK) * BLOCK;
        T *copy = calloc((size_t)(rows * padded), sizeof(T));
        char *result = malloc((size_t)(rows * padded * size + 1));
        if (copy && result) {
            for (int64_t k = 0; k < rows; k++) memcpy(copy + k * padded, x + k * job->ld + whole, (size_t)rest * sizeof(T));
            NAME(columns_of)(job, f, w, i, c + whole, rest, padded, copy, padded, result, padded, 0, 0, kind, stats);
            for (int64_t k = 0; k < rows && kind != NOTHING; k++)
                memcpy(out + (k * job->K + whole) * size, result + k * padded * size, (size_t)(rest * size));
        } else {
            status = -1;
        }
        free(copy);
        free(result);
    }
    if (stream) stream_done();
    free(w);
    return status;
}
