/* Rows of a step held against what is broken and against the bands of their sites: what `fp8watch.session.jumps` and
 * `fp8watch.session.event_follow` mean, in one pass over the rows.
 */
#ifndef FP8WATCH_JUMPS_H
#define FP8WATCH_JUMPS_H

#include <math.h>

#include "job.h"

#define NUM_BANDS 4

/* As of `Bands`: window and learning in steps, spreads that are allowed, and those that are learned. */
struct band_rule { float learned_steps, window_steps, spreads, learned_spreads; };

#define ANY_BROKEN 1
#define IS_WRONG 2
#define ANY_ABSENT 4
#define ROWS_AHEAD 4 /* each is read by somebody right after this, and lies in no near cache */

/* Which rows hold what is not finite or break an invariant, and bits: whether any does, whether an output or a quantiser is
 * wrong, whether any row was not measured. */
static int32_t glance(const struct row *rows, int64_t n, uint8_t *broken) {
    int32_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        const struct row *r = rows + i;
        if (i + ROWS_AHEAD < n)
            for (size_t at = 0; at < sizeof *r; at += 64) __builtin_prefetch((const char *)(r + ROWS_AHEAD) + at);
        const int is_broken = r->num_nan > 0 || r->num_inf > 0 || r->num_off_scale_tiles > 0 || r->num_sentinel_tiles > 0;
        broken[i] = (uint8_t)is_broken;
        if (is_broken) found |= ANY_BROKEN;
        if (!r->measured) found |= ANY_ABSENT;
        if (r->num_nonfinite_outputs || r->num_nan_codes || r->num_off_grid || r->num_zeroed_tiles || r->num_wrong_scales)
            found |= IS_WRONG;
    }
    return found;
}

/* Judges one number against its band, then learns it. */
static float band_see(float value, int there, float floor, const struct band_rule *rule, float *middle, float *spread, float *count) {
    const float known = there ? 1.0f : 0.0f, had = *count;
    const float away = there ? value - *middle : 0.0f, size = fabsf(away);
    const float wide = rule->spreads * *spread, allowed = wide > floor ? wide : floor;
    const float score = had >= rule->learned_steps ? size / allowed : 0.0f;
    const float limit = had >= rule->learned_steps / 2 ? allowed * (rule->learned_spreads / rule->spreads) : INFINITY;
    const float seen = had + 1 < rule->window_steps ? had + 1 : rule->window_steps, rate = known / seen;
    if (had > 0) *spread += rate * ((size < limit ? size : limit) - *spread);
    *middle += rate * (away < -limit ? -limit : away > limit ? limit : away);
    *count += known;
    return score;
}

INLINE float share(int64_t part, int64_t of) { return (float)((double)part / (double)(of > 1 ? of : 1)); }

/* What is judged of one row: amax, and three shares with a foot each, in octaves. */
static void judged(const struct row *r, float least, float most, const float *feet, float *values) {
    const float amax = r->amax_max;
    values[0] = log2f(amax < least ? least : amax > most ? most : amax);
    values[1] = log2f(share(r->num_underflow, r->num_nonzero) + feet[1]);
    values[2] = log2f(share(r->num_saturated, r->num_nonzero) + feet[2]);
    values[3] = log2f(share((int64_t)r->num_zero_tiles + r->num_eps_tiles, r->num_tiles) + feet[3]);
}

#endif
