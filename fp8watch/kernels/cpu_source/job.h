/* What is asked for, what is kept of a tile, and what is kept of many.
 *
 * `struct row` (one record, generated from the table of fields) comes from row.h.
 */
#ifndef FP8WATCH_JOB_H
#define FP8WATCH_JOB_H

#include "row.h"
#include "vector.h"

#define STREAM_BYTES (8 << 20) /* an output of this size does not stay in the caches anyway */
#define NARROW 16              /* tiles of fewer columns go down the columns */
#define MAX_STRETCH 1024

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
    int32_t mark_bytes, dtype, format, power_2, guard, bound, stats, kind, threads;
    float eps;
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
};

#define GROUP 16  /* a multiple of every VL */

/* Amax (as bits) and scale of a group of tiles, side by side for vectors. */
struct group {
    int32_t amax[GROUP], low[GROUP]; /* low: smallest magnitude, where nothing comes out */
    float scale[GROUP], scale_inv[GROUP], ratio[GROUP];
    int some_vanished; /* a tile has counts of its own; else every element is non-zero and none vanished */
};

#define DEPTH_LANES (4 * VB)

/* The record of a part of the operand, with what orders its coordinates. */
struct fold {
    struct row row;
    int64_t worst, noisiest, off_scale, first_nonfinite;  /* linear places; −1: nowhere */
    float badness;
    int64_t vector_nonzero;       /* elements whose depth was counted by vectors */
    int64_t vector_depth[31];     /* and how many of them lie in each bucket but the last */
    int depth_fill, depth_adds;
    uint8_t depth_buffer[DEPTH_LANES];
    uint8_t depth_count[32][VB];
};

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
