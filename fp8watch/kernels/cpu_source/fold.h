/* Tiles folded into one record, and records merged: what `fp8watch_agent.record.merge_rows` means.
 *
 * Coordinates are kept as linear places until the end, so that of two equals the first in row-major order wins
 * whatever the order in which tiles come.
 */
#ifndef FP8WATCH_FOLD_H
#define FP8WATCH_FOLD_H

#include "depth.h"

static void fold_init(struct fold *f, int stats) {
    memset(f, 0, stats == ALL_STATS ? sizeof *f : offsetof(struct fold, depth_fours));
    f->row = EMPTY_ROW;
    f->worst = f->noisiest = f->off_scale = f->first_nonfinite = -1;
}

/* NaN, once there, stays. */
INLINE float max_or_nan(float a, float b) { return a != a || a >= b ? a : b; }
INLINE float min_or_nan(float a, float b) { return a != a || a <= b ? a : b; }
INLINE int earlier(int64_t a, int64_t b) { return a >= 0 && (b < 0 || a < b); }

/* The scale invariant of one tile: folds its ratio, and returns how far outside it is, 0 inside. */
INLINE float fold_ratio(const struct job *job, struct fold *f, const struct tile *t) {
    const float slack = 4 * 1.1920928955078125e-07f; /* 4 float32 ulps of 1 */
    int usable = t->scale_inv > 0 && t->scale_inv < INFINITY;
    if (!usable) return INFINITY;
    /* quotient Inf: a zero tile, or the scale was clamped to the input type; 0: a sentinel tile */
    if (!(t->quotient < INFINITY && t->quotient > 0) || (job->eps > 0 && !(t->amax >= job->eps))) return 0;
    float ratio = t->amax * t->scale / FORMATS[job->format].max_finite;
    f->row.scale_ratio_max = max_or_nan(f->row.scale_ratio_max, ratio);
    f->row.scale_ratio_min = min_or_nan(f->row.scale_ratio_min, ratio);
    if (!job->bound) return 0;
    float low = job->power_2 ? 0.5f : 1.0f;
    int within = job->power_2 ? ratio > 0.5f && ratio <= 1 : ratio >= 1 - slack && ratio <= 1 + slack;
    return within ? 0 : max_or_nan(ratio, low / ratio);
}

static void write_marks(const struct job *job, int64_t place, const struct tile *t, int flags) {
    int64_t m[8] = {t->nonzero, t->saturated, t->underflow, t->nan, t->inf, flags, 0, 0};
    switch (job->mark_bytes) {
    case 1: for (int i = 0; i < 8; i++) ((uint8_t *)job->marks)[place * 8 + i] = (uint8_t)m[i]; break;
    case 2: for (int i = 0; i < 8; i++) ((int16_t *)job->marks)[place * 8 + i] = (int16_t)m[i]; break;
    case 4: for (int i = 0; i < 8; i++) ((int32_t *)job->marks)[place * 8 + i] = (int32_t)m[i]; break;
    default: memcpy((int64_t *)job->marks + place * 8, m, sizeof m);
    }
}

/* Everything light about a tile whose elements were counted. */
static void fold_tile(const struct job *job, struct fold *f, const struct tile *t) {
    struct row *row = &f->row;
    int64_t place = t->i * ceil_div(job->K, job->bk) + t->j;
    int flags = (t->nan ? NAN_FLAG : 0) | (t->inf ? INF_FLAG : 0) | (t->saturated ? SATURATED_FLAG : 0) |
                (t->underflow ? UNDERFLOW_FLAG : 0);
    job->amax[place] = t->amax;
    row->num_tiles++;
    row->num_elements += t->rows * t->columns;
    row->num_nonzero += t->nonzero;
    row->num_saturated += t->saturated;
    row->num_underflow += t->underflow;
    row->num_nan += t->nan;
    row->num_inf += t->inf;
    if (t->amax > row->amax_max || (t->amax == row->amax_max && t->amax > 0 && earlier(place, f->worst))) {
        row->amax_max = t->amax;
        f->worst = place;
    }
    if (t->amax > 0) {
        /* the sum carries into the exponent where the mantissa is 1.75 or more */
        int bucket = ((bits_of(t->amax) + (1 << 21)) >> 23) - AMAX_BUCKET_SHIFT;
        row->amax_hist[bucket < 1 ? 1 : bucket > 63 ? 63 : bucket]++;
        row->amax_min_nonzero = min_or_nan(row->amax_min_nonzero, t->amax);
        if (t->amax < job->eps) {
            row->num_eps_tiles++;
            flags |= EPS_FLAG;
        }
        if (t->amax == INFINITY) {
            row->num_sentinel_tiles++;
            flags |= SENTINEL_FLAG;
        }
    } else {
        row->amax_hist[0]++;
        row->num_zero_tiles++;
        flags |= ZERO_FLAG;
    }
    row->scale_inv_max = max_or_nan(row->scale_inv_max, t->scale_inv);
    row->scale_inv_min = min_or_nan(row->scale_inv_min, t->scale_inv);
    float badness = fold_ratio(job, f, t);
    if (badness > 0) {
        row->num_off_scale_tiles++;
        flags |= OFF_SCALE_FLAG;
        if (badness > f->badness || (badness == f->badness && earlier(place, f->off_scale))) {
            f->badness = badness;
            f->off_scale = place;
        }
    }
    write_marks(job, place, t, flags);
}

/* Everything light about a group of ordinary tiles: none is zero, clamped, off-scale, clipped or not finite. */
static void fold_group(const struct job *job, struct fold *f, const struct tile *tiles, const struct group *g) {
    struct row *row = &f->row;
    const int64_t Kt = ceil_div(job->K, job->bk);
    int32_t bucket[GROUP];
    vi larger = splat_i(0), most = splat_i(bits_of(row->amax_max));
    if (!f->num_groups++) {
        store_i(f->amax_low, splat_i(ABS_MASK)), store_i(f->inv_low, splat_i(ABS_MASK)), store_i(f->ratio_low, splat_i(ABS_MASK));
    }
    vi amax_low = load_i(f->amax_low), inv_high = load_i(f->inv_high), inv_low = load_i(f->inv_low);
    vi ratio_high = load_i(f->ratio_high), ratio_low = load_i(f->ratio_low);
    for (int k = 0; k < GROUP; k += VL) { /* positive numbers order as their bits do */
        vi amax = load_i(g->amax + k), inv = (vi)load_f(g->scale_inv + k), ratio = (vi)load_f(g->ratio + k);
        larger |= amax >= most, amax_low = min_i(amax_low, amax);
        inv_high = max_i(inv_high, inv), inv_low = min_i(inv_low, inv);
        ratio_high = max_i(ratio_high, ratio), ratio_low = min_i(ratio_low, ratio);
        store_i(bucket + k, min_i(max_i(((amax + (1 << 21)) >> 23) - AMAX_BUCKET_SHIFT, splat_i(1)), splat_i(63)));
    }
    store_i(f->amax_low, amax_low), store_i(f->inv_high, inv_high), store_i(f->inv_low, inv_low);
    store_i(f->ratio_high, ratio_high), store_i(f->ratio_low, ratio_low);
    row->num_tiles += GROUP;
    for (int k = 0; k < GROUP; k++) f->buckets[k % 4][bucket[k]]++;
    const int64_t first = tiles[0].i * Kt + tiles[0].j, each = tiles[0].rows * tiles[0].columns;
    if (any_b((vb)larger))
        for (int k = 0; k < GROUP; k++) {
            const float amax = float_of(g->amax[k]);
            const int64_t place = tiles[k].i * Kt + tiles[k].j;
            if (amax < row->amax_max || (amax == row->amax_max && !earlier(place, f->worst))) continue;
            row->amax_max = amax;
            f->worst = place;
        }
    /* side by side, as most are: written at once, bytes of a mark from the lowest on */
    if (job->mark_bytes == 1 && tiles[GROUP - 1].i * Kt + tiles[GROUP - 1].j == first + GROUP - 1) {
        uint64_t mark[GROUP];
        int64_t elements = GROUP * each, nonzero = elements, underflow = 0;
        if (!g->some_vanished && job->K % job->bk == 0) { /* and alike */
            for (int k = 0; k < GROUP; k++) mark[k] = (uint64_t)each;
        } else {
            elements = nonzero = 0;
            for (int k = 0; k < GROUP; k++) {
                const struct tile *t = tiles + k;
                const uint64_t flags = t->underflow ? UNDERFLOW_FLAG : 0;
                mark[k] = (uint64_t)t->nonzero | (uint64_t)t->underflow << 16 | flags << 40;
                nonzero += t->nonzero, underflow += t->underflow, elements += t->rows * t->columns;
            }
        }
        memcpy((uint8_t *)job->marks + first * 8, mark, sizeof mark);
        memcpy(job->amax + first, g->amax, sizeof g->amax);
        row->num_elements += elements, row->num_nonzero += nonzero, row->num_underflow += underflow;
        return;
    }
    for (int k = 0; k < GROUP; k++) {
        const struct tile *t = tiles + k;
        int64_t place = t->i * Kt + t->j;
        job->amax[place] = float_of(g->amax[k]);
        row->num_elements += t->rows * t->columns;
        row->num_nonzero += t->nonzero;
        row->num_underflow += t->underflow;
        int flags = t->underflow ? UNDERFLOW_FLAG : 0;
        if (job->mark_bytes == 1) {
            uint8_t mark[8] = {(uint8_t)t->nonzero, 0, (uint8_t)t->underflow, 0, 0, (uint8_t)flags, 0, 0};
            memcpy((uint8_t *)job->marks + place * 8, mark, sizeof mark);
            continue;
        }
        struct tile counted = *t;
        counted.saturated = counted.nan = counted.inf = 0;
        write_marks(job, place, &counted, flags);
    }
}

/* What groups left lane by lane, into the record; the part of the operand is over. */
static void groups_finish(struct fold *f) {
    struct row *row = &f->row;
    if (!f->num_groups) return;
    row->amax_min_nonzero = min_or_nan(row->amax_min_nonzero, float_of(-max_of_lanes(-load_i(f->amax_low))));
    row->scale_inv_max = max_or_nan(row->scale_inv_max, float_of(max_of_lanes(load_i(f->inv_high))));
    row->scale_inv_min = min_or_nan(row->scale_inv_min, float_of(-max_of_lanes(-load_i(f->inv_low))));
    row->scale_ratio_max = max_or_nan(row->scale_ratio_max, float_of(max_of_lanes(load_i(f->ratio_high))));
    row->scale_ratio_min = min_or_nan(row->scale_ratio_min, float_of(-max_of_lanes(-load_i(f->ratio_low))));
    for (int q = 0; q < 4; q++)
        for (int b = 1; b < 64; b++) row->amax_hist[b] += f->buckets[q][b];
}

INLINE void note_ratio(struct fold *f, int64_t place, double ratio) {
    if (ratio > f->row.tile_noise_ratio_max ||
        (ratio == f->row.tile_noise_ratio_max && ratio > 0 && earlier(place, f->noisiest))) {
        f->row.tile_noise_ratio_max = ratio;
        f->noisiest = place;
    }
}

/* Energies and moments of a tile: signal and noise in units of x², the moments in units of amax. */
static void fold_energies(const struct job *job, struct fold *f, const struct tile *t, double signal, double noise,
                          double shortfall, double moment2, double moment4) {
    int64_t place = t->i * ceil_div(job->K, job->bk) + t->j;
    double ratio = signal > 0 ? noise / signal : 0;
    f->row.signal_energy += signal;
    f->row.noise_energy += noise;
    f->row.gain_energy -= shortfall;
    f->row.tile_noise_ratio_sum += ratio;
    f->row.moment2 += moment2;
    f->row.moment4 += moment4;
    note_ratio(f, place, ratio);
}

/* 1 / unit, a power of two. */
INLINE double inverse_of(float unit) { return float_of((254 << 23) - bits_of(unit)); }

/* As fold_energies, from sums in units of `unit`. */
static void fold_sums(const struct job *job, struct fold *f, const struct tile *t, float unit) {
    double whole = inverse_of(unit), per_unit = whole * whole;
    double peak = (double)t->amax * unit, per_amax = 1.0 / (peak * peak);
    f->vector_nonzero += t->nonzero;
    fold_energies(job, f, t, t->signal * per_unit, t->noise * per_unit, t->shortfall * per_unit, t->signal * per_amax,
                  t->fourth * (per_amax * per_amax));
}

/* The same for a group of tiles, from its lanes. */
static void fold_group_sums(const struct job *job, struct fold *f, const struct tile *tiles, const struct group *g) {
    float sums[4][GROUP];
    double signal[GROUP], noise[GROUP], shortfall[GROUP], ratio[GROUP], moment2[GROUP], moment4[GROUP];
    for (int q = 0; q < 4; q++)
        for (int k = 0; k < GROUP; k += 4)
            sums_of_lanes(g->lanes[q][k], g->lanes[q][k + 1], g->lanes[q][k + 2], g->lanes[q][k + 3], sums[q] + k);
    for (int k = 0; k < GROUP; k++) {
        double whole = inverse_of(g->unit[k]), per_unit = whole * whole;
        double peak = (double)float_of(g->amax[k]) * g->unit[k], per_amax = 1.0 / (peak * peak);
        signal[k] = sums[0][k] * per_unit, noise[k] = sums[1][k] * per_unit, shortfall[k] = sums[3][k] * per_unit;
        ratio[k] = noise[k] / signal[k]; /* a group has no zero tile */
        moment2[k] = sums[0][k] * per_amax, moment4[k] = sums[2][k] * (per_amax * per_amax);
    }
    struct row *row = &f->row;
    for (int k = 0; k < GROUP; k++) {
        f->vector_nonzero += tiles[k].nonzero;
        row->signal_energy += signal[k];
        row->noise_energy += noise[k];
        row->gain_energy -= shortfall[k];
        row->tile_noise_ratio_sum += ratio[k];
        row->moment2 += moment2[k];
        row->moment4 += moment4[k];
        note_ratio(f, tiles[k].i * ceil_div(job->K, job->bk) + tiles[k].j, ratio[k]);
    }
}

/* Bits of `measured` of two records: a group of MEASURED_BY_EVERY_CALL is lost where a record with calls lacks it. */
INLINE int32_t lacking(int32_t bits) {
    int32_t asked = (bits & MEASURED_CALLS ? MEASURED_BY_EVERY_CALL : 0) | (bits & MEASURED_ENERGIES ? MEASURED_WITH_ENERGIES : 0);
    return ~bits & asked;
}
INLINE int32_t merged_bits(int32_t a, int32_t b) { return (a | b) & ~(lacking(a) | lacking(b)); }

/* Sums, extremes and `measured` of two records; coordinates are the callers' business. */
static void merge_values(struct row *a, const struct row *b) { MERGE_FIELDS(a, b) }

/* Merge the record of another part of the same operand. */
static void fold_merge(struct fold *a, const struct fold *b) {
    const struct row *p = &a->row, *q = &b->row;
    if (q->amax_max > p->amax_max || (q->amax_max == p->amax_max && earlier(b->worst, a->worst))) a->worst = b->worst;
    if (q->tile_noise_ratio_max > p->tile_noise_ratio_max ||
        (q->tile_noise_ratio_max == p->tile_noise_ratio_max && earlier(b->noisiest, a->noisiest)))
        a->noisiest = b->noisiest;
    if (b->badness > a->badness || (b->badness == a->badness && earlier(b->off_scale, a->off_scale))) {
        a->badness = b->badness;
        a->off_scale = b->off_scale;
    }
    if (earlier(b->first_nonfinite, a->first_nonfinite)) a->first_nonfinite = b->first_nonfinite;
    merge_values(&a->row, &b->row);
}

INLINE void place_of(int64_t place, int64_t width, int32_t to[2]) {
    to[0] = place < 0 ? -1 : (int32_t)(place / width);
    to[1] = place < 0 ? -1 : (int32_t)(place % width);
}

/* The record of one call: `order` and the call of first_nonfinite stay −1 until it is merged into a slab. */
static void fold_write(const struct job *job, struct fold *f, struct row *row) {
    int64_t Kt = ceil_div(job->K, job->bk);
    place_of(f->worst, Kt, f->row.worst_tile);
    place_of(f->noisiest, Kt, f->row.noise_tile);
    place_of(f->off_scale, Kt, f->row.off_scale_tile);
    place_of(f->first_nonfinite, job->K, f->row.first_nonfinite);
    f->row.num_calls = 1;
    f->row.measured = job->stats == ALL_STATS ? MEASURED_ALL : MEASURED_LIGHT;
    *row = f->row;
}

/* Merge the record of a later call into a slab's row. */
static void row_merge(struct row *into, const struct row *call, int32_t order) {
    if (call->amax_max > into->amax_max) memcpy(into->worst_tile, call->worst_tile, sizeof into->worst_tile);
    if (call->tile_noise_ratio_max > into->tile_noise_ratio_max)
        memcpy(into->noise_tile, call->noise_tile, sizeof into->noise_tile);
    if (into->off_scale_tile[0] < 0) memcpy(into->off_scale_tile, call->off_scale_tile, sizeof into->off_scale_tile);
    if (into->first_nonfinite[0] < 0 && call->first_nonfinite[0] >= 0) {
        memcpy(into->first_nonfinite, call->first_nonfinite, sizeof into->first_nonfinite);
        into->first_nonfinite[2] = order;
    }
    if (into->order < 0) into->order = order;
    merge_values(into, call);
}

#endif
