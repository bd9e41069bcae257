/* What is asked for, what is kept of a tile, and what is kept of many.
 *
 * `struct row` (one record, generated from the table of fields) comes from row.h.
 */
#ifndef FP8WATCH_JOB_H
#define FP8WATCH_JOB_H

#include "rounding.h"
#include "row.h"

#define STREAM_BYTES (8 << 20) /* an output of this size does not stay in the caches anyway */
#define NARROW 16              /* tiles of fewer columns go down the columns */
#define MAX_STRETCH 1024
#define STRETCH_BYTES 2048     /* of a row: with 128 rows a quarter of a MiB, which second caches hold twice */
#define COLUMN_ROWS 4          /* looked at together */

/* What is made once for each type of operand has the type's SUFFIX to its name. */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, SUFFIX)

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { CODES, VALUES, NOTHING };         /* what comes out: codes, float32 of what they stand for, or statistics alone */
enum { NO_STATS, LIGHT_STATS, ALL_STATS };
enum { NAN_FLAG = 1, INF_FLAG = 2, SENTINEL_FLAG = 4, ZERO_FLAG = 8, EPS_FLAG = 16, OFF_SCALE_FLAG = 32,
       SATURATED_FLAG = 64, UNDERFLOW_FLAG = 128 };

/* Filled by Python: the order and the sizes are those of `_JOB` there. */
struct job {
    const void *x;          /* [M, K], rows ld elements apart */
    int64_t ld, M, K, bm, bk;
    const float *given;     /* scales to use [Mt, Kt], or NULL */
    void *out;              /* [M, K] contiguous: bytes or float32; not read where nothing comes out */
    float *scale_inv;       /* [Mt, Kt] */
    float *amax;            /* [Mt, Kt], with statistics */
    void *marks;            /* integers of mark_bytes [Mt, Kt, 8], with statistics */
    struct row *row;        /* with statistics */
    int32_t mark_bytes, dtype, format, power_2, force_scale_1, bound, stats, kind, threads;
    float eps;
    const struct extremes *seen; /* of the panel that runs now, where both directions were read at once; else NULL */
};

#define PANEL_TILES 512   /* rowwise tiles of a panel, and rows of it */
#define PANEL_COLUMNS 512

/* Bits of the largest and the smallest magnitude in a panel: of rowwise tiles, row by row, and of columns. */
struct extremes {
    int64_t row, column, num_tiles; /* of its first element; rowwise tiles side by side */
    int32_t row_high[PANEL_TILES], row_low[PANEL_TILES], column_high[PANEL_COLUMNS], column_low[PANEL_COLUMNS];
};

/* One tile on its way: rows × columns elements from x, and what was counted in them. */
struct tile {
    const char *x;
    char *out;
    int64_t i, j;           /* place among the tiles */
    int64_t row, column;    /* of its first element */
    int64_t rows, columns;
    float amax;             /* NaN ignored */
    float low;              /* smallest magnitude of finite elements, where nothing comes out */
    int finite;             /* no NaN, no Inf */
    float scale, scale_inv, quotient;
    int64_t nonzero, saturated, underflow, nan, inf;
    double signal, noise, fourth;  /* Σ x², Σ (x − x̂)², Σ x⁴ in units of a power of two near amax */
    double shortfall;              /* Σ x (x − x̂), in the same units */
};

#define GROUP 16  /* a multiple of every VL */

/* Amax (as bits) and scale of a group of tiles, side by side for vectors. */
struct group {
    int32_t amax[GROUP], low[GROUP]; /* low: smallest magnitude, where nothing comes out */
    float scale[GROUP], scale_inv[GROUP], ratio[GROUP];
    int some_vanished; /* a tile has counts of its own; else every element is non-zero and none vanished */
    float unit[GROUP], lanes[4][GROUP][LANES]; /* with all statistics: signal, noise, fourth powers, shortfall in `unit` */
};

#define LANE_ELEMENTS 512 /* so many at most are summed in float32 lanes, then in float64 */
#define DEPTH_LEVELS 24
#define DEPTH_FOURS 16
#define DEPTH_FIRST_HELD 6 /* sixteen times 4 are one of this level */
#ifndef DEPTH_CARRIES
#define DEPTH_CARRIES (1 << 16) /* of that level, until planes are read and begin anew */
#endif

/* The record of a part of the operand, with what orders its coordinates. */
struct fold {
    struct row row;
    int64_t worst, noisiest, off_scale, first_nonfinite;  /* linear places; −1: nowhere */
    float badness;
    /* Of groups of ordinary tiles, lane by lane until `groups_finish`: bits of extremes, and buckets of amax, four tables
     * of them because neighbours fall into the same bucket and would wait for each other. */
    int64_t num_groups;
    int32_t amax_low[VL], inv_high[VL], inv_low[VL], ratio_high[VL], ratio_low[VL], buckets[4][64];
    int64_t vector_nonzero;       /* elements whose depth was counted by vectors */
    int64_t vector_depth[31];     /* and how many of them lie in each bucket but the last */
    /* Depths are counted with one bit an element, and added bit by bit: bit k of a lane of plane l counts 2^l elements
     * of depth k. `held` waits for a second of its level. */
    int depth_fill, depth_carries;
    int32_t depth_fours[DEPTH_FOURS][VL];
    int32_t depth_plane[DEPTH_LEVELS][VL], depth_held[DEPTH_LEVELS][VL];
};

/* Which look at tile n of a group asks for memory ahead, the first (for the amax) or the second. With all statistics the
 * second takes long enough; codes alone take half as long as memory does, so that both must ask; float32 results keep
 * memory busy by being written. */
INLINE int first_asks(int kind, int stats, int n) {
    return stats < ALL_STATS && (kind == NOTHING || (kind == CODES && n % 2));
}

INLINE int32_t bits_of(float f) { int32_t b; memcpy(&b, &f, 4); return b; }
INLINE float float_of(int32_t b) { float f; memcpy(&f, &b, 4); return f; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int is_finite(float f) { return (bits_of(f) & EXPONENT_MASK) != EXPONENT_MASK; }

static const int ELEMENT_BYTES[3] = {4, 2, 2};

INLINE float element(const void *x, int64_t i, int dtype) {
    if (dtype == FLOAT32) return ((const float *)x)[i];
    uint16_t h = ((const uint16_t *)x)[i];
    return dtype == BFLOAT16 ? float_of((int32_t)((uint32_t)h << 16)) : half_to_float(h);
}

#endif
