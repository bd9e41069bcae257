/* Everything that is made once for each type of operand: include with SUFFIX, T, LOAD(p), IS_HALF and IS_BF16 defined,
 * and TO_FLOAT(h) for halves.
 */

#include "operand.h"
#include "extremes.h"
#include "full.h"
#include "columns.h"
#include "tiles.h"
#include "stretches.h"
#include "held.h"
#include "product.h"

/* Tiles [i0, i1) × [j0, j1), each way with its own code for each kind of output and each level of statistics. */
static int NAME(tiles)(const struct job *job, struct fold *f, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    const int kind = job->kind, stats = job->stats;
    if (job->bk < NARROW && job->bm > 1) {
        int status = 0;
        for (int64_t i = i0; i < i1 && !status; i++)
            status = NAME(columns)(job, f, i, j0 * job->bk, least(j1 * job->bk, job->K), kind, stats);
        return status;
    }
    if (kind == NOTHING) {
        NAME(rows_of)(job, f, i0, i1, j0, j1, NOTHING, 1, stats);
    } else if (kind == CODES) {
        if (stats) NAME(rows_of)(job, f, i0, i1, j0, j1, CODES, 1, stats);
        else NAME(rows_of)(job, f, i0, i1, j0, j1, CODES, 0, NO_STATS);
    } else {
        if (stats) NAME(rows_of)(job, f, i0, i1, j0, j1, VALUES, 1, stats);
        else NAME(rows_of)(job, f, i0, i1, j0, j1, VALUES, 0, NO_STATS);
    }
    return 0;
}
