/* Σ bits(i)·(2i + 1) modulo 2^64 over all elements: what `fp8watch.sketch.weight_hash` means, in one pass.
 *
 * Of a stretch with the first place b the sum is Σ bits·(2b + 1) + 2·Σ bits·j, where j counts from 0. A stretch is short
 * enough for j to have 32 bits, so that the products are of 32 bits by 32, of which a processor does several at once.
 */
#ifndef FP8WATCH_HASH_H
#define FP8WATCH_HASH_H

#include <stdint.h>

#define HASHED_TOGETHER 4096

#define HASH_OF(NAME, ELEMENT, WIDE)                                                                                   \
    static uint64_t NAME(const ELEMENT *x, int64_t n) {                                                                \
        uint64_t total = 0;                                                                                            \
        for (int64_t b = 0; b < n; b += HASHED_TOGETHER) {                                                             \
            const int32_t m = (int32_t)(n - b < HASHED_TOGETHER ? n - b : HASHED_TOGETHER);                            \
            uint64_t plain = 0, placed = 0;                                                                            \
            for (int32_t j = 0; j < m; j++) plain += (uint64_t)(int64_t)x[b + j];                                      \
            for (int32_t j = 0; j < m; j++) placed += (uint64_t)((int64_t)(WIDE)x[b + j] * (int64_t)j);                \
            total += plain * (2 * (uint64_t)b + 1) + 2 * placed;                                                       \
        }                                                                                                              \
        return total;                                                                                                  \
    }

HASH_OF(hash_8, uint8_t, int32_t)
HASH_OF(hash_16, int16_t, int32_t)
HASH_OF(hash_32, int32_t, int32_t)
#undef HASH_OF

/* Elements of 8 bytes, whose products have no wider type: modulo 2^64 as the rest. */
static uint64_t hash_64(const uint64_t *x, int64_t n) {
    uint64_t total = 0;
    for (int64_t i = 0; i < n; i++) total += x[i] * (2 * (uint64_t)i + 1);
    return total;
}

#endif
