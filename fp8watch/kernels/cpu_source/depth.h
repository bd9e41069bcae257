/* How many octaves elements lie below the amax of their tile, counted for many vectors at a time.
 *
 * An element is one bit: bit k of its lane for depth k. Vectors of such bits are added by carry-save adders (bit by
 * bit, without carries between bits): 2^l vectors cost 2^l − 1 additions of a few instructions, whatever the depths.
 */
#ifndef FP8WATCH_DEPTH_H
#define FP8WATCH_DEPTH_H

#include "job.h"

/* Planes to counts of each depth. */
static void depth_drain(struct fold *f) {
    int levels = DEPTH_FIRST_HELD + 1;
    while (f->depth_carries >> (levels - DEPTH_FIRST_HELD)) levels++;
    for (int k = 0; k < 31; k++) {
        vi count = splat_i(0);
        for (int l = 0; l < levels; l++)
            count += ((load_i(f->depth_plane[l]) >> k & 1) + (load_i(f->depth_held[l]) >> k & 1)) << l;
        f->vector_depth[k] += sum_of_counts(count);
    }
    memset(f->depth_plane, 0, sizeof f->depth_plane);
    memset(f->depth_held, 0, sizeof f->depth_held);
    f->depth_carries = 0;
}

/* Add the sixteen vectors of weight 4 that were put aside. */
static __attribute__((noinline)) void depth_add(struct fold *f) {
    vi v[DEPTH_FOURS];
    int level = 2;
    memcpy(v, f->depth_fours, sizeof v);
    for (int n = DEPTH_FOURS / 2; n; n /= 2, level++) { /* up to DEPTH_FIRST_HELD */
        vi sum = load_i(f->depth_plane[level]);
        for (int i = 0; i < n; i++) v[i] = carry_save(&sum, v[2 * i], v[2 * i + 1]);
        store_i(f->depth_plane[level], sum);
    }
    for (int n = f->depth_carries++; n & 1; n >>= 1, level++) {
        vi sum = load_i(f->depth_plane[level]);
        v[0] = carry_save(&sum, load_i(f->depth_held[level]), v[0]);
        store_i(f->depth_plane[level], sum);
        store_i(f->depth_held[level], splat_i(0));
    }
    store_i(f->depth_held[level], v[0]);
    f->depth_fill = 0;
    if (f->depth_carries == DEPTH_CARRIES) depth_drain(f);
}

/* The planes of ones and twos while elements are counted: in registers. */
struct depth { vi ones, twos; };
INLINE struct depth depth_take(const struct fold *f) {
    struct depth d = {load_i(f->depth_plane[0]), load_i(f->depth_plane[1])};
    return d;
}
INLINE void depth_put(struct fold *f, const struct depth *d) {
    store_i(f->depth_plane[0], d->ones);
    store_i(f->depth_plane[1], d->twos);
}

/* Count four vectors of depths, 0 … 255. From 31 on nothing is counted: the last bucket is what is left of the total. */
INLINE void depth_count(struct fold *f, struct depth *d, const vi depth[4]) {
    vi two = carry_save(&d->ones, one_hot(depth[0]), one_hot(depth[1]));
    vi other = carry_save(&d->ones, one_hot(depth[2]), one_hot(depth[3]));
    store_i(f->depth_fours[f->depth_fill], carry_save(&d->twos, two, other));
    if (++f->depth_fill == DEPTH_FOURS) {
        depth_put(f, d); /* a drain counts and clears them, too */
        depth_add(f);
        *d = depth_take(f);
    }
}

static void depth_finish(struct fold *f) {
    if (!f->vector_nonzero) return;
    if (f->depth_fill) {
        memset(f->depth_fours[f->depth_fill], 0, (DEPTH_FOURS - (size_t)f->depth_fill) * sizeof f->depth_fours[0]);
        depth_add(f);
    }
    depth_drain(f);
    int64_t deepest = f->vector_nonzero;
    for (int k = 0; k < 31; k++) {
        f->row.depth_hist[k] += f->vector_depth[k];
        deepest -= f->vector_depth[k];
    }
    f->row.depth_hist[31] += deepest;
}

#endif
