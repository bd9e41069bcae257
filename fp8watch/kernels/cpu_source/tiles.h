/* Tiles along their rows: once for each type of operand, after full.h.
 *
 * A group of tiles is looked at twice while it lies in the first cache: for the amax, then for the codes. Statistics
 * are counted on the way where that costs nothing; what is rare (a zero code, a clip) is counted in a second look at
 * the tile that has it.
 */

/* Sums of lanes to those of the tile. */
static void NAME(lanes_flush)(struct tile *t, float sums[4][LANES], int64_t *held) {
    float total[4];
    sums_of_lanes(sums[0], sums[1], sums[2], sums[3], total);
    t->signal += total[0], t->noise += total[1], t->fourth += total[2], t->shortfall += total[3];
    *held = 0;
}

/* Quantise one tile whose amax is known, along its rows. */
static __attribute__((noinline)) void NAME(tile_rows)(const struct job *job, struct fold *f, struct tile *t, int64_t ld,
                                                      int64_t out_ld, const struct rounding *r, int kind, int stats,
                                                      int stream, int64_t ahead) {
    const struct format *fmt = &FORMATS[job->format];
    const T *x = (const T *)t->x;
    if (!t->finite || !is_finite(t->scale) || !(t->scale >= 0)) {
        slow_tile(job, f, t, ld, out_ld, 1, stats == ALL_STATS);
        if (stats) fold_tile(job, f, t);
        return;
    }
    int vanished = 0;
    const int clip = t->amax * t->scale > fmt->max_finite;
    const int full = stats == ALL_STATS && t->amax > 0 && vector_energies(t);
    const int exact = exact_scale(t, fmt), size = kind == CODES ? 1 : 4;
    float unit = 1;
    if (full) {
        float sums[4][LANES], *const lanes[4] = {sums[0], sums[1], sums[2], sums[3]};
        int64_t held = 0;
        unit = exact ? t->scale : unit_of(t->amax);
        t->signal = t->noise = t->fourth = t->shortfall = 0;
        for (int64_t i = 0; i < t->rows; i++)
            for (int64_t c = 0, n; c < t->columns; c += n) {
                char *out = t->out + (i * out_ld + c) * size;
                n = least(t->columns - c, LANE_ELEMENTS);
                if (held + n > LANE_ELEMENTS) NAME(lanes_flush)(t, sums, &held);
                vanished |= NAME(run_full)(x + i * ld + c, n, out, t, unit, r, stream, ahead, f, lanes, held == 0, kind,
                                           exact);
                held += n;
            }
        NAME(lanes_flush)(t, sums, &held);
    }
    for (int64_t i = 0; i < t->rows && !full && kind != NOTHING; i++) {
        const T *from = x + i * ld;
        char *out = t->out + i * out_ld * size;
        if (kind == CODES)
            vanished |= NAME(run_codes)(from, t->columns, (uint8_t *)out, t->scale, r, clip, exact, stream, ahead);
        else
            vanished |= NAME(run_values)(from, t->columns, (float *)out, t->scale, t->scale_inv, r, clip, exact, stream,
                                         ahead);
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
    if (full) {
        fold_sums(job, f, t, unit);
    } else {
        struct tile again = *t;
        slow_tile(job, f, &again, ld, out_ld, 0, 1);
    }
}

/* The amax of a tile, and its scale. */
static void NAME(tile_begin)(const struct job *job, struct tile *t, int32_t bits, int64_t ld) {
    t->finite = bits < EXPONENT_MASK;
    t->amax = bits <= EXPONENT_MASK ? float_of(bits) : amax_without_nan(job, t, ld);
    tile_scale(job, t);
    job->scale_inv[t->i * ceil_div(job->K, job->bk) + t->j] = t->scale_inv;
}

/* Quantise a group of ordinary tiles of one row each: their scales are there, and nothing can be clipped. */
INLINE void NAME(group_rows)(const struct job *job, struct fold *f, struct tile *tiles, struct group *g,
                             const struct rounding *r, int kind, int counted, int stats, int stream, int64_t ahead) {
    const int64_t Kt = ceil_div(job->K, job->bk);
    g->some_vanished = 0;
    for (int k = 0; k < GROUP; k++) {
        struct tile *t = tiles + k;
        const T *x = (const T *)t->x;
        const int64_t second = first_asks(kind, stats, k) ? 0 : ahead;
        const int exact = job->power_2; /* an ordinary tile's product is never clipped */
        const float scale = g->scale[k], scale_inv = g->scale_inv[k];
        int vanished = 0;
        if (stats == ALL_STATS) {
            float *const lanes[4] = {g->lanes[0][k], g->lanes[1][k], g->lanes[2][k], g->lanes[3][k]};
            t->amax = float_of(g->amax[k]), t->scale = scale, t->scale_inv = scale_inv;
            g->unit[k] = exact ? scale : unit_of(t->amax);
            vanished = NAME(run_full)(x, t->columns, t->out, t, g->unit[k], r, stream, second, f, lanes, 1, kind, exact);
        } else if (kind == CODES) {
            vanished = NAME(run_codes)(x, t->columns, (uint8_t *)t->out, scale, r, 0, exact, stream, second);
        } else if (kind == VALUES) {
            vanished = NAME(run_values)(x, t->columns, (float *)t->out, scale, scale_inv, r, 0, exact, stream, second);
        }
        if (kind == NOTHING) vanished = float_of(g->low[k]) * scale <= FORMATS[job->format].vanishing;
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
    }
    if (counted) fold_group(job, f, tiles, g);
    if (stats == ALL_STATS) fold_group_sums(job, f, tiles, g);
}

/* Tiles [i0, i1) × [j0, j1), along their rows. */
INLINE void NAME(rows_of)(const struct job *job, struct fold *f, int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                          int kind, int counted, int stats) {
    const struct rounding r = rounding_of(&FORMATS[job->format]);
    const int64_t ld = job->ld, K = job->K, size = kind == CODES ? 1 : kind == VALUES ? 4 : 0;
    const int group = job->bm == 1 && (stats < ALL_STATS || job->bk <= LANE_ELEMENTS) ? GROUP : 1;
    /* where the next group is, mostly */
    const int64_t ahead = j1 - j0 >= group ? group * job->bk : ceil_div(group, j1 - j0) * ld;
    const int stream = kind != NOTHING && job->M * K * size >= STREAM_BYTES && job->bk % VB == 0 && K % VB == 0 &&
                       (uintptr_t)job->out % VB == 0;
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
            int32_t bits = 0, low = ABS_MASK;
            const int64_t first = first_asks(kind, stats, n) ? ahead : 0;
            if (kind == NOTHING && job->seen) {
                int64_t place = (i - job->seen->row) * job->seen->num_tiles + j - j0;
                bits = job->seen->row_high[place], low = job->seen->row_low[place];
            } else if (kind == NOTHING && t->rows > 1) {
                bits = NAME(tile_extremes)((const T *)t->x, ld, t->rows, t->columns, &low);
            } else if (kind == NOTHING) {
                bits = NAME(run_extremes)((const T *)t->x, t->columns, &low, first);
            } else {
                for (int64_t k = 0; k < t->rows; k++) {
                    int32_t b = NAME(run_amax)((const T *)t->x + k * ld, t->columns, first);
                    bits = b > bits ? b : bits;
                }
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
