/* Integers of a batch: what `fp8watch.observer.batch_arithmetic` means by a hash, rows that are copies, concentration, and
 * labels beside their tokens. Sums wrap, so all of it is unsigned.
 */
#ifndef FP8WATCH_BATCH_H
#define FP8WATCH_BATCH_H

#include <stdint.h>
#include <string.h>

#include "job.h"

#define BATCH_ROWS 4096 /* whose hashes are held against each other, at most */

/* Integers [rows, columns] of 1, 2, 4 or 8 bytes, those of one byte without a sign; strides in elements. Filled by Python:
 * the order is that of `_integers` in cpu_batch.py. */
struct integers { const char *at; int64_t bytes, rows, columns, row_stride, column_stride; };

/* As of `batch_arithmetic`: the factor of each number, how many of a tensor are hashed, how many of a row at least. */
struct batch_rule { uint64_t golden; int64_t hashed_elements, copied_columns; };

/* What is found: rows that differ, Σ count² over the buckets of the tokens, and the sum of the mask. */
struct batch_found { uint64_t hash; int64_t num_distinct, squares; double mask; };

INLINE uint64_t wide_of(const char *at, int64_t bytes) {
    if (bytes == 8) { uint64_t x; memcpy(&x, at, 8); return x; }
    if (bytes == 4) { int32_t x; memcpy(&x, at, 4); return (uint64_t)(int64_t)x; }
    if (bytes == 2) { int16_t x; memcpy(&x, at, 2); return (uint64_t)(int64_t)x; }
    return *(const unsigned char *)at;
}

/* x ^ x >> 32 of two's complement. */
INLINE uint64_t folded(uint64_t x) { return x ^ (x >> 32 | (0 - (x >> 63)) << 32); }

/* Of n numbers, each times an odd number of its own; the first one's is `odd`. */
static uint64_t hash_run(const char *at, int64_t bytes, int64_t stride, int64_t n, uint64_t odd, uint64_t golden) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++, at += stride, odd += 2) sum += folded(wide_of(at, bytes) * golden) * odd;
    return sum;
}

/* Of at most so many elements, evenly spread; of the first row's where many rows lie apart. */
static uint64_t hash_integers(const struct integers *x, const struct batch_rule *rule) {
    const int64_t n = x->rows * x->columns, most = rule->hashed_elements, column = x->column_stride * x->bytes;
    const int in_line = (x->columns == 1 || x->column_stride == 1) && (x->rows == 1 || x->row_stride == x->columns);
    if (!in_line && n <= most) {
        uint64_t sum = 0;
        for (int64_t i = 0; i < x->rows; i++)
            sum += hash_run(x->at + i * x->row_stride * x->bytes, x->bytes, column, x->columns, (uint64_t)(2 * i * x->columns + 1), rule->golden);
        return sum;
    }
    const int64_t num = in_line ? n : x->columns, step = (num + most - 1) / most;
    return hash_run(x->at, x->bytes, step * (in_line ? x->bytes : column), (num + step - 1) / step, 1, rule->golden);
}

/* Adds to the hash of each row what this tensor, one of several, holds of it. */
static void hash_rows(const struct integers *x, const struct batch_rule *rule, uint64_t which, uint64_t *hashes) {
    int64_t step = x->columns / rule->copied_columns;
    if (step < 1) step = 1;
    for (int64_t i = 0; i < x->rows; i++) {
        const char *at = x->at + i * x->row_stride * x->bytes;
        uint64_t sum = 0, odd = 1;
        for (int64_t j = 0; j < x->columns; j += step, odd += 2)
            sum += (wide_of(at + j * x->column_stride * x->bytes, x->bytes) * rule->golden ^ which) * odd;
        hashes[i] += sum;
    }
}

static int64_t num_distinct(const uint64_t *hashes, int64_t n, uint64_t golden) {
    uint16_t places[2 * BATCH_ROWS]; /* of a hash: one more than the first row that has it; 0 where none has */
    int64_t num = 0;
    uint64_t size = 2;
    int shift = 63;
    for (; size < 2 * (uint64_t)n; size *= 2) shift--;
    memset(places, 0, size * sizeof *places);
    for (int64_t i = 0; i < n; i++) {
        uint64_t place = hashes[i] * golden >> shift;
        while (places[place] && hashes[places[place] - 1] != hashes[i]) place = (place + 1) & (size - 1);
        if (!places[place]) places[place] = (uint16_t)(i + 1), num++;
    }
    return num;
}

/* Σ count² over buckets, of the first rows; numbers that are `ignored` do not count where `skips`. */
static int64_t sum_of_squares(const struct integers *x, int64_t rows, int skips, int64_t ignored) {
    uint32_t counts[BATCH_BUCKETS] = {0};
    int64_t squares = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < x->columns; j++) {
            const uint64_t wide = wide_of(x->at + (i * x->row_stride + j * x->column_stride) * x->bytes, x->bytes);
            if (!skips || wide != (uint64_t)ignored) squares += 2 * (int64_t)counts[wide & (BATCH_BUCKETS - 1)]++ + 1;
        }
    return squares;
}

INLINE int64_t scored_run(const char *at, int64_t bytes, int64_t stride, int64_t n, uint64_t ignored) {
    int64_t num = 0;
    for (int64_t i = 0; i < n; i++) num += wide_of(at + i * stride, bytes) != ignored;
    return num;
}

/* All targets are counted, however many: those of eight bytes side by side, which most are, in vectors. */
static int64_t num_scored(const struct integers *x, int64_t ignored) {
    int64_t num = 0;
    for (int64_t i = 0; i < x->rows; i++) {
        const char *at = x->at + i * x->row_stride * x->bytes;
        num += x->bytes == 8 && x->column_stride == 1
            ? scored_run(at, 8, 8, x->columns, (uint64_t)ignored)
            : scored_run(at, x->bytes, x->column_stride * x->bytes, x->columns, (uint64_t)ignored);
    }
    return num;
}

static double sum_of(const struct integers *x) {
    double sum = 0;
    for (int64_t i = 0; i < x->rows; i++)
        for (int64_t j = 0; j < x->columns; j++)
            sum += (double)(int64_t)wide_of(x->at + (i * x->row_stride + j * x->column_stride) * x->bytes, x->bytes);
    return sum;
}

/* Labels of the first rows that are scored, and of these the ones that are the token so many places further on: one count
 * for each shift. Labels whose row does not reach all of these places are left out. */
static void count_shifts(const struct integers *tokens, const struct integers *labels, int64_t rows, int64_t ignored, int64_t *num) {
    const int64_t width = labels->columns - (BATCH_SHIFTS - 1), step = tokens->column_stride * tokens->bytes;
    memset(num, 0, (1 + BATCH_SHIFTS) * sizeof *num);
    for (int64_t i = 0; i < rows; i++) {
        const char *beside = tokens->at + i * tokens->row_stride * tokens->bytes;
        const char *label = labels->at + (i * labels->row_stride - BATCH_FIRST_SHIFT * labels->column_stride) * labels->bytes;
        for (int64_t j = 0; j < width; j++, beside += step, label += labels->column_stride * labels->bytes) {
            const uint64_t known = wide_of(label, labels->bytes);
            if (known == (uint64_t)ignored) continue;
            num[0]++;
            for (int64_t s = 0; s < BATCH_SHIFTS; s++) num[1 + s] += wide_of(beside + s * step, tokens->bytes) == known;
        }
    }
}

#endif
