/* The same number of bytes of each of many tensors, read one behind another or held against what was read before: what
 * `fp8watch.session.standing_elements` means, in one call.
 */
#ifndef FP8WATCH_STANDING_H
#define FP8WATCH_STANDING_H

#include <stdint.h>
#include <string.h>

INLINE const char *piece_at(const uint64_t *at, int64_t i) { return (const char *)(uintptr_t)at[i]; }

/* Copies `bytes` from each of n addresses. */
static void gather(const uint64_t *at, int64_t n, int64_t bytes, char *into) {
    for (int64_t i = 0; i < n; i++) memcpy(into + i * bytes, piece_at(at, i), (size_t)bytes);
}

/* Number of the first of n addresses at which other bytes lie than `kept` has of it; n where there is none. */
static int64_t first_other(const uint64_t *at, int64_t n, int64_t bytes, const char *kept) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(kept + i * bytes, piece_at(at, i), (size_t)bytes)) return i;
    return n;
}

#endif
