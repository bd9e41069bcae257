/* Blockwise quantisation with statistics from the same pass: what `fp8watch.kernels.cpu` calls.
 *
 * Raw pointers in, no Python and no torch: compiled at first use on the machine that runs it. Equal to the reference
 * backend bit by bit, which asks of the compiler: no contraction (-ffp-contract=off), no fast-math.
 */
#include <pthread.h>
#include <stdlib.h>

#include "batch.h"
#include "dequantize.h"
#include "hash.h"
#include "jumps.h"
#include "slow.h"
#include "standing.h"

#define MAX_CHUNKS 64
#define CHUNK_ELEMENTS (1 << 16)

#define SUFFIX f32
#define T float
#define LOAD(p) load_f(p)
#define IS_HALF 0
#define IS_BF16 0
#include "typed.h"
#undef SUFFIX
#undef T
#undef LOAD
#undef IS_HALF
#undef IS_BF16

#define IS_HALF 1
#define IS_BF16 1
#define SUFFIX bf16
#define T uint16_t
#define LOAD(p) load_bf16(p)
#define TO_FLOAT(h) float_of((int32_t)((uint32_t)(h) << 16))
#include "typed.h"
#undef SUFFIX
#undef LOAD

#undef IS_BF16
#define IS_BF16 0
#define SUFFIX f16
#define LOAD(p) load_f16(p)
#undef TO_FLOAT
#define TO_FLOAT(h) half_to_float(h)
#include "typed.h"
#undef SUFFIX
#undef T
#undef LOAD

/* The floating-point mode of the calling thread may flush subnormals or round otherwise: not in here. */
struct mode { uint64_t saved; };
#if defined(__SSE2__)
static struct mode enter(void) { struct mode m = {_mm_getcsr()}; _mm_setcsr(0x1F80); return m; }
static void leave(struct mode m) { _mm_setcsr((unsigned)m.saved); }
#elif defined(__aarch64__)
static struct mode enter(void) {
    struct mode m;
    uint64_t zero = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(m.saved));
    __asm__ volatile("msr fpcr, %0" : : "r"(zero));
    return m;
}
static void leave(struct mode m) { __asm__ volatile("msr fpcr, %0" : : "r"(m.saved)); }
#else
static struct mode enter(void) { struct mode m = {0}; return m; }
static void leave(struct mode m) { (void)m; }
#endif

#include "product_holds.h"

static int tiles_of(const struct job *job, struct fold *f, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    switch (job->dtype) {
    case FLOAT32: return tiles_f32(job, f, i0, i1, j0, j1);
    case BFLOAT16: return tiles_bf16(job, f, i0, i1, j0, j1);
    default: return tiles_f16(job, f, i0, i1, j0, j1);
    }
}

static void see_panel(const struct job *job, int64_t row, int64_t rows, int64_t column, int64_t columns,
                      struct extremes *to) {
    const char *x = (const char *)job->x + (row * job->ld + column) * ELEMENT_BYTES[job->dtype];
    to->row = row, to->column = column, to->num_tiles = ceil_div(columns, job->bk);
    switch (job->dtype) {
    case FLOAT32: panel_extremes_f32((const void *)x, job->ld, rows, columns, job->bk, to); break;
    case BFLOAT16: panel_extremes_bf16((const void *)x, job->ld, rows, columns, job->bk, to); break;
    default: panel_extremes_f16((const void *)x, job->ld, rows, columns, job->bk, to);
    }
}

/* One call cut into chunks of tile rows. How it is cut depends on the shape alone, so that sums do not depend on the
 * number of threads; threads take chunks as they come. */
struct work {
    const struct job *jobs[2]; /* rowwise and columnwise, or one */

    int64_t num_rows, num_chunks;
    struct fold *folds[2];
    int next, failed;
};

static void run_chunk(struct work *w, int64_t chunk) {
    int64_t i0 = chunk * w->num_rows / w->num_chunks, i1 = (chunk + 1) * w->num_rows / w->num_chunks;
    for (int64_t i = i0; i < i1; i++) {
        if (!w->jobs[1]) {
            const struct job *job = w->jobs[0];
            if (tiles_of(job, w->folds[0] + chunk, i0, i1, 0, ceil_div(job->K, job->bk))) w->failed = 1;
            return;
        }
        /* both directions: a panel is read from memory for the one and from the cache for the other */
        struct job rowwise = *w->jobs[0], columnwise = *w->jobs[1];
        const int64_t bk = rowwise.bk, step = ceil_div(PANEL_COLUMNS, bk), K = rowwise.K;
        const int64_t r0 = i * columnwise.bm, r1 = least(r0 + columnwise.bm, rowwise.M);
        struct extremes seen;
        if (rowwise.kind == NOTHING && bk % VL == 0 && K % VL == 0 && PANEL_COLUMNS % bk == 0 &&
            columnwise.bm * step <= PANEL_TILES)
            rowwise.seen = columnwise.seen = &seen;
        for (int64_t j = 0; j * bk < K; j += step) {
            const int64_t j1 = least(j + step, ceil_div(K, bk)), c1 = least(j1 * bk, K);
            if (rowwise.seen) see_panel(&rowwise, r0, r1 - r0, j * bk, c1 - j * bk, &seen);
            if (tiles_of(&rowwise, w->folds[0] + chunk, r0, r1, j, j1) ||
                tiles_of(&columnwise, w->folds[1] + chunk, i, i + 1, j * bk, c1))
                w->failed = 1;
        }
    }
}

static void *worker(void *arg) {
    struct work *w = arg;
    struct mode mode = enter();
    for (;;) {
        int chunk = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
        if (chunk >= w->num_chunks) break;
        run_chunk(w, chunk);
    }
    leave(mode);
    return NULL;
}

static int run(struct work *w, int num_jobs) {
    const struct job *job = w->jobs[0];
    w->num_chunks = least(least(w->num_rows, MAX_CHUNKS), job->M * job->K / CHUNK_ELEMENTS + 1);
    if (job->stats < ALL_STATS && job->threads <= 1) w->num_chunks = 1; /* without sums of fractions any cut gives the same */
    for (int k = 0; k < num_jobs; k++) {
        w->folds[k] = malloc((size_t)w->num_chunks * sizeof(struct fold));
        if (!w->folds[k]) w->failed = 1;
        else
            for (int64_t c = 0; c < w->num_chunks; c++) fold_init(w->folds[k] + c, w->jobs[k]->stats);
    }
    if (!w->failed) {
        pthread_t threads[64];
        int started = 0, wanted = (int)least(least(job->threads, w->num_chunks), 64) - 1;
        while (started < wanted && !pthread_create(&threads[started], NULL, worker, w)) started++;
        worker(w); /* without a single thread more, all of it */
        for (int k = 0; k < started; k++) pthread_join(threads[k], NULL);
    }
    for (int k = 0; k < num_jobs; k++) {
        const struct job *one = w->jobs[k];
        if (!w->failed && one->stats) {
            struct fold *f = w->folds[k];
            for (int64_t c = 0; c < w->num_chunks; c++) {
                depth_finish(f + c);
                groups_finish(f + c);
                if (c) fold_merge(f, f + c);
            }
            fold_write(one, f, one->row);
        }
        free(w->folds[k]);
    }
    return w->failed ? -1 : 0;
}

/* Quantise one operand. Returns 0, or −1 without memory. */
int fp8watch_quantize(const struct job *job) {
    struct work w = {{job, NULL}, ceil_div(job->M, job->bm), 0, {NULL, NULL}, 0, 0};
    return run(&w, 1);
}

/* Both directions of one operand from one read: tiles (1, n) and (n, 1). */
int fp8watch_quantize_both(const struct job *rowwise, const struct job *columnwise) {
    struct work w = {{rowwise, columnwise}, ceil_div(columnwise->M, columnwise->bm), 0, {NULL, NULL}, 0, 0};
    return run(&w, 2);
}

/* One operand in one direction or in both, by jobs made once for a site and a shape: what differs from call to call comes
 * beside them. What is measured goes to `piece` (for each direction a row, then marks and amax of its tiles) and from
 * there into the slab's rows, where those are given, as calls `order` and `order` + 1; scale_inv a second time to `kept`,
 * where that is given. */
int fp8watch_operand(const struct job *made, int32_t num, const void *x, int64_t ld, const float *given0, const float *given1,
                     void *out0, void *out1, float *scale_inv0, float *scale_inv1, float *kept0, float *kept1,
                     char *piece, int32_t threads, struct row *into0, struct row *into1, int32_t order) {
    struct job jobs[2];
    struct row *into[2] = {into0, into1};
    const float *given[2] = {given0, given1};
    void *out[2] = {out0, out1};
    float *scale_inv[2] = {scale_inv0, scale_inv1}, *kept[2] = {kept0, kept1};
    for (int k = 0; k < num; k++) {
        struct job *job = jobs + k;
        *job = made[k];
        job->x = x, job->ld = ld, job->given = given[k], job->out = out[k], job->scale_inv = scale_inv[k], job->threads = threads;
        if (!job->stats) continue;
        int64_t tiles = ceil_div(job->M, job->bm) * ceil_div(job->K, job->bk);
        job->row = (struct row *)piece;
        job->marks = piece + sizeof(struct row);
        job->amax = (float *)((char *)job->marks + 8 * job->mark_bytes * tiles);
        piece = (char *)(job->amax + tiles + (tiles & 1)); /* rows hold numbers of eight bytes */
    }
    if (num == 1 ? fp8watch_quantize(jobs) : fp8watch_quantize_both(jobs, jobs + 1)) return -1;
    for (int k = 0; k < num; k++) {
        if (jobs[k].stats && into[k]) row_merge(into[k], jobs[k].row, order++);
        if (kept[k]) memcpy(kept[k], jobs[k].scale_inv, (size_t)(ceil_div(jobs[k].M, jobs[k].bm) * ceil_div(jobs[k].K, jobs[k].bk)) * sizeof(float));
    }
    return 0;
}

void fp8watch_merge(struct row *into, const struct row *call, int32_t order) { row_merge(into, call, order); }

/* Bits of the largest |x| as float32: above those of Inf where one is NaN. n contiguous elements. */
int32_t fp8watch_magnitude(const void *x, int64_t n, int32_t dtype) {
    return dtype == FLOAT32 ? run_amax_f32(x, n, 0) : dtype == BFLOAT16 ? run_amax_bf16(x, n, 0) : run_amax_f16(x, n, 0);
}

/* One look at n contiguous elements as one tile with scale 1, merged into a slab's row: what `Slab.accumulate_probe`
 * means. Returns 1 and changes nothing where an element is not finite. */
int fp8watch_look(const void *x, int64_t n, int32_t dtype, int32_t energy, struct row *into, int32_t order) {
    struct mode mode = enter();
    const int32_t bits = fp8watch_magnitude(x, n, dtype);
    struct row call = EMPTY_ROW;
    if (bits < EXPONENT_MASK) {
        int bucket = ((bits + (1 << 21)) >> 23) - AMAX_BUCKET_SHIFT;
        call.num_elements = n;
        call.num_tiles = call.num_calls = 1;
        call.num_zero_tiles = bits == 0;
        call.amax_hist[bits == 0 ? 0 : bucket < 1 ? 1 : bucket > 63 ? 63 : bucket] = 1;
        call.measured = MEASURED_PROBE;
        if (bits) {
            call.amax_max = call.amax_min_nonzero = float_of(bits);
            call.worst_tile[0] = call.worst_tile[1] = 0;
        }
        if (energy) {
            call.signal_energy = dtype == FLOAT32 ? run_energy_f32(x, n) : dtype == BFLOAT16 ? run_energy_bf16(x, n) : run_energy_f16(x, n);
            call.measured |= MEASURED_ENERGIES;
        }
        row_merge(into, &call, order);
    }
    leave(mode);
    return bits >= EXPONENT_MASK;
}

/* The hash of n contiguous elements of so many bytes, 1, 2, 4 or 8, read as two's complement. */
int64_t fp8watch_hash(const void *x, int64_t n, int32_t bytes) {
    return (int64_t)(bytes == 1 ? hash_8(x, n) : bytes == 2 ? hash_16(x, n) : bytes == 4 ? hash_32(x, n) : hash_64(x, n));
}

int32_t fp8watch_glance(const struct row *rows, int64_t n, uint8_t *broken) { return glance(rows, n, broken); }

/* Rows held against the bands of their sites [NUM_BANDS, n], then learned; of each the largest score. */
void fp8watch_row_jumps(const struct row *rows, int64_t n, const uint8_t *broken, float least, float most, const float *feet,
                        const float *floors, const struct band_rule *rule, float *middle, float *spread, float *count, float *score) {
    for (int64_t i = 0; i < n; i++) {
        float values[NUM_BANDS], highest = 0;
        const int bits = rows[i].measured, sound = !broken[i];
        const int amax = sound && bits & MEASURED_AMAX, counts = sound && (bits & MEASURED_CAST) == MEASURED_COUNTS;
        const int there[NUM_BANDS] = {amax, counts, counts, amax};
        judged(rows + i, least, most, feet, values);
        for (int b = 0; b < NUM_BANDS; b++) {
            const int64_t at = b * n + i;
            const float mine = band_see(values[b], there[b], floors[at], rule, middle + at, spread + at, count + at);
            if (mine > highest) highest = mine;
        }
        score[i] = highest;
    }
}

/* What one pass was given: num tensors, all of them hashed. Rows are held against each other over the tensors that have
 * num_rows of them, and of the first token_rows rows of tensor `tokens` the concentration is taken; 0: neither. A mask is
 * tensor `mask`, or there is none below 0. At most BATCH_ROWS rows. Returns 1 and nothing where a tensor has no memory. */
int fp8watch_batch(const struct integers *inputs, int32_t num, const struct batch_rule *rule, int64_t num_rows, int32_t tokens,
                   int64_t token_rows, int32_t mask, struct batch_found *found) {
    uint64_t hashes[BATCH_ROWS], which = 0;
    memset(hashes, 0, (size_t)num_rows * sizeof *hashes);
    found->hash = 0;
    for (int32_t k = 0; k < num; k++) {
        if (!inputs[k].at) return 1;
        found->hash += hash_integers(inputs + k, rule);
        if (num_rows && inputs[k].rows == num_rows) hash_rows(inputs + k, rule, which++, hashes);
    }
    found->num_distinct = num_rows ? num_distinct(hashes, num_rows, rule->golden) : 0;
    found->squares = token_rows ? sum_of_squares(inputs + tokens, token_rows, 0, 0) : 0;
    found->mask = mask < 0 ? 0 : sum_of(inputs + mask);
    return 0;
}

/* How many of the targets are scored; the first of `found`. Where asked for, the second is Σ count² over their buckets.
 * Returns as above. */
int fp8watch_scored(const struct integers *targets, int64_t ignored, int32_t concentrated, int64_t *found) {
    if (!targets->at) return 1;
    found[0] = num_scored(targets, ignored);
    found[1] = concentrated ? sum_of_squares(targets, targets->rows, 1, ignored) : 0;
    return 0;
}

/* Tokens and labels of equally many rows, the first `rows` of both: see count_shifts. Returns as above. */
int fp8watch_shifts(const struct integers *both, int64_t rows, int64_t ignored, int64_t *found) {
    if (!both[0].at || !both[1].at) return 1;
    count_shifts(both, both + 1, rows, ignored, found);
    return 0;
}

void fp8watch_gather(const uint64_t *at, int64_t n, int64_t bytes, char *into) { gather(at, n, bytes, into); }

int64_t fp8watch_first_other(const uint64_t *at, int64_t n, int64_t bytes, const char *kept) {
    return first_other(at, n, bytes, kept);
}

/* Codes [M, K], contiguous, times the scale_inv of their tile. */
void fp8watch_dequantize(const uint8_t *codes, const float *scale_inv, float *out, int64_t M, int64_t K, int64_t bm,
                         int64_t bk, int32_t format, int32_t threads) {
    struct mode mode = enter();
    struct dequantize work = {codes, scale_inv, out, M, K, bm, bk, 1, format, 0};
    dequantize(&work, threads);
    leave(mode);
}

/* Whether what a GEMM reads of rows of an operand, values or codes, lost no more than rounding takes: see held.h. */
int fp8watch_rows_hold(const void *x, int64_t ld, int32_t dtype, int64_t M, int64_t K, int64_t first, int64_t step,
                       const float *values, const uint8_t *codes, const float *scale_inv, int64_t bm, int64_t bk,
                       int32_t format, float limit, float half, float floor, float smallest) {
    struct mode mode = enter();
    const struct held h = {x, ld, M, K, first, step, values, codes, scale_inv, bm, bk, code_layout_of(format), limit, half, floor, bits_of(smallest)};
    const int holds = dtype == FLOAT32 ? rows_hold_f32(&h) : dtype == BFLOAT16 ? rows_hold_bf16(&h) : rows_hold_f16(&h);
    leave(mode);
    return holds;
}

int64_t fp8watch_abi(int what) {
    return what == 0 ? (int64_t)sizeof(struct job) : what == 1 ? (int64_t)sizeof(struct row) : VB;
}

/* Known answers: every finite code of both formats from the value it stands for, by each way through. 0 when right. */
int fp8watch_check(void) {
    float x[2 * 256], out[2 * 256], scale_inv[256], amax[256];
    uint16_t half[2 * 256];
    uint8_t codes[2 * 256], marks[256 * 8 * 8];
    int64_t one_tile[2] = {1, 256}, narrow[2] = {1, 1};
    for (int format = 0; format < 2; format++) {
        struct row row;
        for (int c = 0; c < 256; c++) codes[c] = codes[256 + c] = (uint8_t)c;
        scale_inv[0] = 1;
        fp8watch_dequantize(codes, scale_inv, x, 2, 256, 2, 256, format, 1);
        for (int c = 0; c < 512; c++)
            if (!is_finite(x[c])) x[c] = 0, codes[c] = 0;
        for (int dtype = 0; dtype < 3; dtype++)
            for (int way = 0; way < 6; way++) {
                const int64_t *tile = way & 1 ? narrow : one_tile;
                float given[256];
                struct job job = {x, 256, 2, 256, 2, tile[1], given, out, scale_inv, amax, marks, &row, 8, dtype, format, 1, 1, 0, ALL_STATS, way / 2, 1, 0};
                for (int c = 0; c < 256; c++) given[c] = 1;
                for (int c = 0; c < 512; c++) {
                    /* every finite value of both formats is one of bfloat16 and of float16, too; E5M2 is float16's upper byte */
                    uint32_t b = (uint32_t)bits_of(x[c]), magnitude = b & ABS_MASK;
                    if (dtype == BFLOAT16) half[c] = (uint16_t)(b >> 16);
                    else if (format == 1) half[c] = (uint16_t)(codes[c] << 8);
                    else half[c] = (uint16_t)((b >> 16 & 0x8000) | (magnitude ? (magnitude - 0x38000000) >> 13 : 0));
                }
                if (dtype != FLOAT32) job.x = half;
                if (fp8watch_quantize(&job)) return 1;
                for (int c = 0; c < 512; c++) {
                    if (job.kind == CODES && ((uint8_t *)out)[c] != codes[c]) return 2;
                    if (job.kind == VALUES && bits_of(out[c]) != bits_of(x[c])) return 3;
                }
                if (row.num_elements != 512 || row.num_underflow || row.num_saturated || row.noise_energy != 0) return 4;
            }
    }
    return 0;
}
