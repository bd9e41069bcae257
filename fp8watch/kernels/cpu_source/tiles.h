/* Tiles, once for each type of operand: include with T, LOAD(p) and NAME(name) defined, after operand.h.
 *
 * A group of tiles is looked at twice while it lies in the first cache: for the amax, then for the codes. Statistics
 * are counted on the way where that costs nothing; what is rare (a zero code, a clip) is counted in a second look at
 * the tile that has it.
 */

/* Largest and smallest amax, and ratio to the scale, for which float32 sums in units of amax neither over- nor underflow;
 * a scale_inv that is Inf makes NaN of a product that vanished. */
INLINE int NAME(vector_energies)(const struct tile *t) {
    float ratio = t->amax * t->scale;
    return t->amax >= 8.0779357e-28f && t->amax <= 1.329228e36f && ratio >= 9.094947e-13f && ratio <= 1.0995116e12f &&
           is_finite(t->scale_inv);
}

INLINE float NAME(unit_of)(float amax) { return float_of((254 - (bits_of(amax) >> 23)) << 23); }

static void NAME(fold_heavy)(const struct job *job, struct fold *f, const struct tile *t, float unit) {
    double per_unit = 1.0 / ((double)unit * unit), per_amax = 1.0 / ((double)t->amax * unit * t->amax * unit);
    f->vector_nonzero += t->nonzero;
    fold_energies(job, f, t, t->signal * per_unit, t->noise * per_unit, t->signal * per_amax, t->fourth * per_amax * per_amax);
}

/* Quantise one tile whose amax is known, along its rows. */
static __attribute__((noinline)) void NAME(tile_rows)(const struct job *job, struct fold *f, struct tile *t, int64_t ld, int64_t out_ld,
                            const struct rounding *r, int kind, int stats, int stream, int64_t ahead) {
    const struct format *fmt = &FORMATS[job->format];
    const T *x = (const T *)t->x;
    if (!t->finite || !is_finite(t->scale) || !(t->scale >= 0)) {
        slow_tile(job, f, t, ld, out_ld, 1, stats == ALL_STATS);
        if (stats) fold_tile(job, f, t);
        return;
    }
    int vanished = 0;
    const int clip = t->amax * t->scale > fmt->max_finite;
    for (int64_t i = 0; i < t->rows; i++) {
        if (kind == NOTHING) break;
        if (kind == CODES)
            vanished |= NAME(run_codes)(x + i * ld, t->columns, (uint8_t *)t->out + i * out_ld, t->scale, r, clip, stream, ahead);
        else
            vanished |= NAME(run_values)(x + i * ld, t->columns, (float *)t->out + i * out_ld, t->scale, t->scale_inv, r, clip, stream, ahead);
    }
    if (!stats) return;
    if (kind == NOTHING) vanished = t->low * t->scale <= fmt->vanishing;
    t->nonzero = t->rows * t->columns;
    t->saturated = t->underflow = t->nan = t->inf = 0;
    if (vanished || t->amax * t->scale >= fmt->midpoint) {
        int64_t counts[3] = {0, 0, 0};
        for (int64_t i = 0; i < t->rows; i++) NAME(run_count)(x + i * ld, t->columns, t->scale, fmt, counts);
        t->nonzero -= counts[0];
        t->underflow = counts[1] - counts[0];
        t->saturated = counts[2];
    }
    fold_tile(job, f, t);
    if (stats < ALL_STATS || t->amax == 0) return;
    if (!NAME(vector_energies)(t)) {
        struct tile again = *t;
        slow_tile(job, f, &again, ld, out_ld, 0, 1);
        return;
    }
    float unit = NAME(unit_of)(t->amax);
    t->signal = t->noise = t->fourth = 0;
    for (int64_t i = 0; i < t->rows; i++) NAME(run_heavy)(x + i * ld, t->columns, t, unit, r, f);
    NAME(fold_heavy)(job, f, t, unit);
}

/* The amax of a tile, and its scale. */
static void NAME(tile_begin)(const struct job *job, struct tile *t, int32_t bits, int64_t ld) {
    t->finite = bits < EXPONENT_MASK;
    t->amax = bits <= EXPONENT_MASK ? float_of(bits) : amax_without_nan(job, t, ld);
    tile_scale(job, t);
    job->scale_inv[t->i * ceil_div(job->K, job->bk) + t->j] = t->scale_inv;
}

/* Quantise a group of ordinary tiles of one row each: their scales are there, and nothing can be clipped. */
INLINE void NAME(group_rows)(const struct job *job, struct fold *f, struct tile *tiles, struct group *g, const struct rounding *r,
                             int kind, int counted, int stats, int stream, int64_t ahead) {
    const int64_t Kt = ceil_div(job->K, job->bk);
    g->some_vanished = 0;
    for (int k = 0; k < GROUP; k++) {
        struct tile *t = tiles + k;
        const T *x = (const T *)t->x;
        int vanished;
        if (kind == NOTHING) vanished = float_of(g->low[k]) * g->scale[k] <= FORMATS[job->format].vanishing;
        else if (kind == CODES) vanished = NAME(run_codes)(x, t->columns, (uint8_t *)t->out, g->scale[k], r, 0, stream, ahead);
        else vanished = NAME(run_values)(x, t->columns, (float *)t->out, g->scale[k], g->scale_inv[k], r, 0, stream, ahead);
        job->scale_inv[t->i * Kt + t->j] = g->scale_inv[k];
        if (!counted) continue;
        t->nonzero = t->columns, t->underflow = 0;
        if (vanished) {
            int64_t counts[3] = {0, 0, 0};
            g->some_vanished = 1;
            NAME(run_count)(x, t->columns, g->scale[k], &FORMATS[job->format], counts);
            t->nonzero -= counts[0];
            t->underflow = counts[1] - counts[0];
        }
        if (stats < ALL_STATS) continue;
        t->amax = float_of(g->amax[k]), t->scale = g->scale[k], t->scale_inv = g->scale_inv[k];
        float unit = NAME(unit_of)(t->amax);
        t->signal = t->noise = t->fourth = 0;
        NAME(run_heavy)(x, t->columns, t, unit, r, f);
        NAME(fold_heavy)(job, f, t, unit);
    }
    if (counted) fold_group(job, f, tiles, g);
}

/* Tiles [i0, i1) × [j0, j1), along their rows. */
INLINE void NAME(rows_of)(const struct job *job, struct fold *f, int64_t i0, int64_t i1, int64_t j0, int64_t j1, int kind, int counted, int stats) {
    const struct rounding r = rounding_of(&FORMATS[job->format]);
    const int64_t ld = job->ld, K = job->K, size = kind == CODES ? 1 : kind == VALUES ? 4 : 0;
    const int group = job->bm == 1 ? GROUP : 1;
    const int64_t ahead = group * job->bk; /* where the next group is, mostly */
    const int stream = kind != NOTHING && job->M * K * size >= STREAM_BYTES && job->bk % VB == 0 && K % VB == 0 && (uintptr_t)job->out % VB == 0;
    struct tile tiles[GROUP];
    struct group g;
    int64_t i = i0, j = j0;
    while (i < i1) {
        int n = 0;
        for (; n < group && i < i1; n++) {
            struct tile *t = tiles + n;
            t->i = i, t->j = j, t->row = i * job->bm, t->column = j * job->bk;
            t->rows = least(job->bm, job->M - t->row), t->columns = least(job->bk, K - t->column);
            t->x = (const char *)job->x + (t->row * ld + t->column) * (int64_t)sizeof(T);
            t->out = (char *)job->out + (t->row * K + t->column) * size;
            int32_t bits = 0, low = ABS_MASK, l = ABS_MASK;
            for (int64_t k = 0; k < t->rows; k++) {
                const T *x = (const T *)t->x + k * ld;
                int32_t b = kind == NOTHING ? NAME(run_extremes)(x, t->columns, &l) : NAME(run_amax)(x, t->columns);
                bits = b > bits ? b : bits;
                low = l < low ? l : low;
            }
            g.amax[n] = bits;
            g.low[n] = low;
            t->low = float_of(low);
            if (++j == j1) j = j0, i++;
        }
        if (n == GROUP && !job->given && group_scales(job, &g)) {
            NAME(group_rows)(job, f, tiles, &g, &r, kind, counted, stats, stream, ahead);
            continue;
        }
        for (int k = 0; k < n; k++) NAME(tile_begin)(job, tiles + k, g.amax[k], ld);
        for (int k = 0; k < n; k++) NAME(tile_rows)(job, f, tiles + k, ld, K, &r, kind, stats, stream, ahead);
    }
    if (stream) stream_done();
}

/* Work for a stretch of columns, each with the scale of its tile. */
struct NAME(stretch) {
    int32_t high[MAX_STRETCH], low[MAX_STRETCH], amax[MAX_STRETCH], mask[MAX_STRETCH], count[3][MAX_STRETCH];
    float scale[MAX_STRETCH], scale_inv[MAX_STRETCH], unit[MAX_STRETCH];
    double signal[MAX_STRETCH], noise[MAX_STRETCH], fourth[MAX_STRETCH];
    struct tile tiles[MAX_STRETCH];
    struct group groups[MAX_STRETCH / GROUP];
    uint8_t ordinary[MAX_STRETCH / GROUP]; /* groups of columns whose scales were made together */
};

/* Statistics of a group of ordinary columns, each a tile. */
static void NAME(group_columns)(const struct job *job, struct fold *f, struct NAME(stretch) *w, int64_t k, const T *x, int64_t ld, int stats) {
    const struct format *fmt = &FORMATS[job->format];
    struct group *g = w->groups + k / GROUP;
    g->some_vanished = 0;
    for (int64_t v = k; v < k + GROUP; v += VL) {
        if (!any_b((vb)((vf)load_i(w->low + v) * load_f(w->scale + v) <= fmt->vanishing))) continue;
        int32_t *to[3] = {w->count[0] + v, w->count[1] + v, w->count[2] + v};
        g->some_vanished = 1;
        NAME(column_count)(x + v, ld, w->tiles[k].rows, w->scale + v, fmt, to);
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
        t->signal = w->signal[c], t->noise = w->noise[c], t->fourth = w->fourth[c];
        NAME(fold_heavy)(job, f, t, w->unit[c]);
    }
}

/* Tiles of row i over `real` columns from `column`; x and out are readable and writable for n, a multiple of BLOCK. */
static void NAME(columns_of)(const struct job *job, struct fold *f, struct NAME(stretch) *w, int64_t i, int64_t column, int64_t real,
                             int64_t n, const T *x, int64_t ld, char *out, int64_t out_ld, int kind, int stats) {
    const struct rounding r = rounding_of(&FORMATS[job->format]);
    const struct format *fmt = &FORMATS[job->format];
    const int64_t bk = job->bk, rows = least(job->bm, job->M - i * job->bm), size = kind == CODES ? 1 : kind == VALUES ? 4 : 0;
    const int64_t num_tiles = ceil_div(real, bk);
    for (int64_t c = 0; c < n; c++) w->mask[c] = 0, w->amax[c] = 0x7F000000, w->scale[c] = w->scale_inv[c] = w->unit[c] = 1;
    if (stats == ALL_STATS) memset(w->signal, 0, sizeof w->signal), memset(w->noise, 0, sizeof w->noise), memset(w->fourth, 0, sizeof w->fourth);
    memset(w->ordinary, 0, sizeof w->ordinary);
    NAME(column_extremes)(x, ld, rows, n, w->high, w->low);
    for (int64_t k = 0; k < num_tiles; k++) {
        struct tile *t = w->tiles + k;
        if (bk == 1 && k % GROUP == 0 && k + GROUP <= num_tiles && !job->given) {
            struct group *g = w->groups + k / GROUP;
            memcpy(g->amax, w->high + k, sizeof g->amax);
            if (group_scales(job, g)) {
                memcpy(w->scale + k, g->scale, sizeof g->scale);
                memcpy(w->scale_inv + k, g->scale_inv, sizeof g->scale_inv);
                memcpy(job->scale_inv + i * job->K + column + k, g->scale_inv, sizeof g->scale_inv);
                for (int64_t c = k; c < k + GROUP; c++) {
                    t = w->tiles + c;
                    t->i = i, t->j = column + c, t->rows = rows, t->columns = 1, t->nonzero = rows, t->underflow = 0;
                    w->mask[c] = ABS_MASK, w->amax[c] = w->high[c], w->unit[c] = NAME(unit_of)(float_of(w->high[c]));
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
        int heavy = stats == ALL_STATS && t->amax > 0 && NAME(vector_energies)(t);
        for (int64_t c = c0; c < c1; c++) {
            w->scale[c] = t->scale, w->scale_inv[c] = t->scale_inv;
            w->low[c] = low;
            if (heavy) w->mask[c] = ABS_MASK, w->amax[c] = bits, w->unit[c] = NAME(unit_of)(t->amax);
        }
    }
    for (int64_t k = 0; k < rows && kind != NOTHING; k++)
        if (kind == CODES) NAME(column_codes)(x + k * ld, n, (uint8_t *)out + k * out_ld, w->scale, &r);
        else NAME(column_values)(x + k * ld, n, (float *)out + k * out_ld, w->scale, w->scale_inv, &r);
    if (stats == ALL_STATS)
        for (int64_t c = 0; c < n; c += 2 * VL)
            NAME(column_heavy)(x + c, ld, rows, w->scale + c, w->scale_inv + c, w->unit + c, w->amax + c, w->mask + c, &r, f,
                               w->signal + c, w->noise + c, w->fourth + c);
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
                    NAME(column_count)(x + v, ld, rows, w->scale + v, fmt, to);
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
        t->signal = t->noise = t->fourth = 0;
        for (int64_t c = c0; c < c0 + t->columns; c++) t->signal += w->signal[c], t->noise += w->noise[c], t->fourth += w->fourth[c];
        NAME(fold_heavy)(job, f, t, w->unit[c0]);
    }
}

/* Tiles of row i, columns [c0, c1) with c0 at a tile's edge. Returns 0, or −1 without memory. */
static int NAME(columns)(const struct job *job, struct fold *f, int64_t i, int64_t c0, int64_t c1, int kind, int stats) {
    const int64_t size = kind == CODES ? 1 : kind == VALUES ? 4 : 0, step = job->bk * BLOCK * (job->bk * BLOCK < 512 ? 512 / (job->bk * BLOCK) : 1);
    const int64_t row = i * job->bm, rows = least(job->bm, job->M - row);
    struct NAME(stretch) *w = malloc(sizeof *w);
    if (!w) return -1;
    int status = 0;
    for (int64_t c = c0; c < c1 && !status; c += step) {
        int64_t real = least(step, c1 - c), whole = real / BLOCK * BLOCK;
        if (whole % job->bk) whole -= whole % (job->bk * BLOCK); /* tiles are not cut */
        const T *x = (const T *)job->x + row * job->ld + c;
        char *out = (char *)job->out + (row * job->K + c) * size;
        if (whole) NAME(columns_of)(job, f, w, i, c, whole, whole, x, job->ld, out, job->K, kind, stats);
        if (whole == real) continue;
        /* the rest, fewer columns than vectors have, in a padded copy */
        int64_t rest = real - whole, padded = ceil_div(rest, BLOCK) * BLOCK;
        T *copy = calloc((size_t)(rows * padded), sizeof(T));
        char *result = malloc((size_t)(rows * padded * size + 1));
        if (copy && result) {
            for (int64_t k = 0; k < rows; k++) memcpy(copy + k * padded, x + k * job->ld + whole, (size_t)rest * sizeof(T));
            NAME(columns_of)(job, f, w, i, c + whole, rest, padded, copy, padded, result, padded, kind, stats);
            for (int64_t k = 0; k < rows && kind != NOTHING; k++)
                memcpy(out + (k * job->K + whole) * size, result + k * padded * size, (size_t)(rest * size));
        } else {
            status = -1;
        }
        free(copy);
        free(result);
    }
    free(w);
    return status;
}

/* Tiles [i0, i1) × [j0, j1), each way with its own code for each kind of output and each level of statistics. */
static int NAME(tiles)(const struct job *job, struct fold *f, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const int kind = job->kind, stats = job->stats;
    if (job->bk < NARROW && job->bm > 1) {
        int status = 0;
        for (int64_t i = i0; i < i1 && !status; i++)
            status = NAME(columns)(job, f, i, j0 * job->bk, least(j1 * job->bk, job->K), kind, stats);
        return status;
    }
    if (kind == NOTHING) {
        NAME(rows_of)(job, f, i0, i1, j0, j1, NOTHING, 1, stats);
    } else if (kind == CODES) {
        if (stats) NAME(rows_of)(job, f, i0, i1, j0, j1, CODES, 1, stats);
        else NAME(rows_of)(job, f, i0, i1, j0, j1, CODES, 0, NO_STATS);
    } else {
        if (stats) NAME(rows_of)(job, f, i0, i1, j0, j1, VALUES, 1, stats);
        else NAME(rows_of)(job, f, i0, i1, j0, j1, VALUES, 0, NO_STATS);
    }
    return 0;
}
