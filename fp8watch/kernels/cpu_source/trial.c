/* How fast the kernel is with vectors of VB bytes: compiled for each width that the processor has, before the library.
 *
 * Only what is timed is in it, so that it compiles in a second: float32 along the rows with counts, codes and values.
 */
#include <time.h>

#include "dequantize.h"
#include "slow.h"

#define SUFFIX f32
#define T float
#define LOAD(p) load_f(p)
#define IS_HALF 0
#define IS_BF16 0
#include "typed.h"

#define TRIAL_ROWS 128 /* with all results 640 KiB: what is timed is arithmetic, not memory */
#define TRIAL_COLUMNS 512
#define TRIAL_ELEMENTS (TRIAL_ROWS * TRIAL_COLUMNS)
#define TRIAL_TILES (TRIAL_ELEMENTS / 128)
#define TRIAL_MIN_TURNS 3
#define ALIGNED __attribute__((aligned(64))) /* as torch allocates */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Nanoseconds of the fastest of the turns that duration_ns has room for, codes and values together. The minimum: others
 * use the processor, too. */
int fp8watch_trial(int duration_ns) {
    ALIGNED static float x[TRIAL_ELEMENTS], values[TRIAL_ELEMENTS], scale_inv[TRIAL_TILES], amax[TRIAL_TILES];
    ALIGNED static uint8_t codes[TRIAL_ELEMENTS], marks[TRIAL_TILES * 8];
    static struct fold f;
    struct row row;
    uint32_t bits = 1;
    for (int i = 0; i < TRIAL_ELEMENTS; i++) {
        bits = bits * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)bits * 4.656612873077393e-10f + 0.001f;
    }
    struct job job = {x, TRIAL_COLUMNS, TRIAL_ROWS, TRIAL_COLUMNS, 1, 128, NULL, codes, scale_inv, amax, marks, &row,
                      1, FLOAT32, 0, 1, 1, 1, LIGHT_STATS, CODES, 1, 0};
    struct job dequantised = job;
    dequantised.out = values, dequantised.kind = VALUES;
    const int64_t num_tiles = TRIAL_COLUMNS / 128, start = now_ns();
    int64_t fastest[2] = {INT32_MAX / 2, INT32_MAX / 2}, before = start;
    fold_init(&f, LIGHT_STATS);
    for (int turn = 0; turn < TRIAL_MIN_TURNS || before - start < duration_ns; turn++)
        for (int kind = CODES; kind <= VALUES; kind++) {
            if (kind == CODES) rows_of_f32(&job, &f, 0, TRIAL_ROWS, 0, num_tiles, CODES, 1, LIGHT_STATS);
            else rows_of_f32(&dequantised, &f, 0, TRIAL_ROWS, 0, num_tiles, VALUES, 1, LIGHT_STATS);
            int64_t after = now_ns();
            fastest[kind] = least(fastest[kind], after - before);
            before = after;
        }
    return (int)(fastest[CODES] + fastest[VALUES]);
}
