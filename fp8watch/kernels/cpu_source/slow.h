/* One tile, one element after the other: for NaN and Inf, and for scales and magnitudes at the ends of the range. */
#ifndef FP8WATCH_SLOW_H
#define FP8WATCH_SLOW_H

#include "fold.h"

/* The scale rule. Source: Transformer Engine's compute_scale_from_amax. */
static void tile_scale(const struct job *job, struct tile *t) {
    static const float LARGEST[3] = {3.4028234663852886e38f, 3.3895313892515355e38f, 65504.0f};
    float amax = t->amax < job->eps ? job->eps : t->amax, scale;
    t->quotient = scale = FORMATS[job->format].max_finite / amax;
    if (job->given) {
        scale = job->given[t->i * ceil_div(job->K, job->bk) + t->j];
    } else {
        if (job->force_scale_1) {
            if (scale == INFINITY) scale = LARGEST[job->dtype];
            if (amax == 0 || amax == INFINITY) scale = 1;
        }
        if (job->power_2) scale = float_of(bits_of(scale) & EXPONENT_MASK);
    }
    t->scale = scale;
    t->scale_inv = 1.0f / scale;
}

/* Of an everyday size: float32 sums in units of amax neither over- nor underflow. */
#define LEAST_AMAX 8.0779357e-28f  /* 2^−90 */
#define LARGEST_AMAX 1.329228e36f  /* 2^120 */

/* Whether energies of a tile fit float32 vectors. The ratio to the scale counts as well, and a scale_inv that is Inf
 * makes NaN of a product that vanished. */
INLINE int vector_energies(const struct tile *t) {
    float ratio = t->amax * t->scale;
    return t->amax >= LEAST_AMAX && t->amax <= LARGEST_AMAX && ratio >= 9.094947e-13f && ratio <= 1.0995116e12f &&
           is_finite(t->scale_inv);
}

INLINE float unit_of(float amax) { return float_of((254 - (bits_of(amax) >> 23)) << 23); }

/* Whether the scale is a power of two under which nothing is clipped and nothing near an amax of everyday size vanishes:
 * then products, their roundings and what is taken back from them are exact. */
INLINE int exact_scale(const struct tile *t, const struct format *f) {
    float peak = t->amax * t->scale;
    return (bits_of(t->scale) & ~EXPONENT_MASK) == 0 && peak >= 1 && peak <= f->max_finite && t->amax >= LEAST_AMAX &&
           t->amax <= LARGEST_AMAX;
}

/* The scales of a group of tiles with vectors; 0 unless all of them are ordinary: finite, an amax of an everyday size
 * that eps does not raise, so that no guard of `tile_scale` applies and energies fit float32. */
static int group_scales(const struct job *job, struct group *g) {
    const int32_t eps = bits_of(job->eps), least_amax = eps > bits_of(LEAST_AMAX) ? eps : bits_of(LEAST_AMAX);
    const vi keep = splat_i(job->power_2 ? EXPONENT_MASK : -1);
    const vf largest = splat_f(FORMATS[job->format].max_finite);
    vi odd = splat_i(0);
    for (int k = 0; k < GROUP; k += VL) {
        vi amax = load_i(g->amax + k);
        odd |= (amax < splat_i(least_amax)) | (amax > splat_i(bits_of(LARGEST_AMAX)));
        vf scale = (vf)((vi)(largest / (vf)amax) & keep);
        store_f(g->scale + k, scale);
        store_f(g->scale_inv + k, splat_f(1) / scale);
        store_f(g->ratio + k, (vf)amax * scale / largest);
    }
    return !any_b((vb)odd);
}

/* Largest |x| of a tile that holds NaN: they do not count. */
COLD float amax_without_nan(const struct job *job, const struct tile *t, int64_t ld) {
    float amax = 0;
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < t->columns; c++) {
            float a = fabsf(element(t->x, r * ld + c, job->dtype));
            if (a > amax) amax = a;
        }
    return amax;
}

/* floor(log2(a / b)) for positive numbers: every float32 is a normal float64 */
static int octaves(double a, double b) {
    int64_t p, q;
    memcpy(&p, &a, 8);
    memcpy(&q, &b, 8);
    return (int)((p - q) >> 52);
}

/* Codes or values of a tile, its counts, and with `heavy` its energies; `write` 0 leaves the output alone. */
COLD void slow_tile(const struct job *job, struct fold *f, struct tile *t, int64_t ld, int64_t out_ld, int write,
                    int heavy) {
    const struct format *fmt = &FORMATS[job->format];
    const float lift = (float)(1 << (23 - fmt->mantissa_bits));
    const int offset = (bits_of(fmt->min_normal * lift) >> 23) << fmt->mantissa_bits;
    double signal = 0, noise = 0, shortfall = 0, moment2 = 0, moment4 = 0;
    t->nonzero = t->saturated = t->underflow = t->nan = t->inf = 0;
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < t->columns; c++) {
            float x = element(t->x, r * ld + c, job->dtype), a = fabsf(x), y = fabsf(a * t->scale), grid, value;
            int code, nan = x != x, finite = a < INFINITY, clipped = finite && y >= fmt->midpoint;
            if (y != y) {
                grid = value = NAN;
                code = fmt->nan_code;
            } else {
                if (y > fmt->max_finite) y = fmt->max_finite;
                int32_t e = bits_of(y) & EXPONENT_MASK, least_e = bits_of(fmt->min_normal);
                float power = float_of(e > least_e ? e : least_e), up = y + power * lift;
                grid = up - power * lift;
                code = (bits_of(up) >> (23 - fmt->mantissa_bits)) + (bits_of(up) & 0xFF) - offset;
                if (bits_of(x) < 0) code |= 0x80;
                value = copysignf(grid * t->scale_inv, x);
            }
            if (write && job->kind == CODES) ((uint8_t *)t->out)[r * out_ld + c] = (uint8_t)code;
            if (write && job->kind == VALUES) ((float *)t->out)[r * out_ld + c] = value;
            t->nonzero += x != 0;
            t->saturated += clipped;
            t->underflow += x != 0 && grid == 0;
            t->nan += nan;
            t->inf += a == INFINITY;
            if (!finite) {
                int64_t place = (t->row + r) * job->K + t->column + c;
                if (earlier(place, f->first_nonfinite)) f->first_nonfinite = place;
                continue;
            }
            if (!heavy) continue;
            signal += (double)x * x;
            if (is_finite(value)) {
                float error = x - value; /* in float32, as everywhere: what a far-off scale loses is lost everywhere */
                noise += (double)error * error;
                shortfall += (double)x * error;
            }
            if (a > 0 && t->amax < INFINITY) {
                double share = (double)a / t->amax;
                int depth = octaves(t->amax, a);
                moment2 += share * share;
                moment4 += share * share * share * share;
                f->row.depth_hist[depth > 31 ? 31 : depth]++;
            }
        }
    if (heavy) fold_energies(job, f, t, signal, noise, shortfall, moment2, moment4);
}

#endif
