/* Extremes of a panel in both directions from one look, once for each type of operand: include after operand.h.
 *
 * What is measured and not written needs of most tiles their largest and smallest magnitude alone. A panel is a row of
 * columnwise tiles: its columns' extremes stay in registers down all of its rows, and those of the rowwise tiles are
 * folded on the way. What a rare tile needs more (counts of what vanishes, NaN) reads it again.
 */

/* VECTORS of columns down `rows` rows; of each row into the vectors at `high` and `low`, which `first` says are empty. */
#define STRIP(VECTORS)                                                                                                  \
    {                                                                                                                   \
        vi ch[VECTORS], cl[VECTORS];                                                                                    \
        for (int k = 0; k < VECTORS; k++) ch[k] = splat_i(0), cl[k] = splat_i(ABS_MASK);                                \
        for (int64_t r = 0; r < rows; r++) {                                                                            \
            vi h = first ? splat_i(0) : high[r], l = first ? splat_i(ABS_MASK) : low[r];                                \
            for (int k = 0; k < VECTORS; k++) {                                                                         \
                vi a = (vi)LOAD(x + r * ld + c + k * VL) & ABS_MASK;                                                    \
                ch[k] = max_i(ch[k], a), cl[k] = min_i(cl[k], a);                                                       \
                h = max_i(h, a), l = min_i(l, a);                                                                       \
            }                                                                                                           \
            high[r] = h, low[r] = l;                                                                                    \
        }                                                                                                               \
        for (int k = 0; k < VECTORS; k++) {                                                                             \
            store_i(to->column_high + c + k * VL, ch[k]);                                                               \
            store_i(to->column_low + c + k * VL, cl[k]);                                                                \
        }                                                                                                               \
        c += VECTORS * VL;                                                                                              \
    }

/* Extremes of `rows` × `columns` elements: of tiles of 1 × bk, and of each column. Columns fill vectors. */
static __attribute__((noinline)) void NAME(panel_extremes)(const T *x, int64_t ld, int64_t rows, int64_t columns, int64_t bk, struct extremes *to) {
    vi high[PANEL_TILES], low[PANEL_TILES];
    const int64_t num_tiles = ceil_div(columns, bk);
    for (int64_t j = 0; j < num_tiles; j++) {
        const int64_t end = least((j + 1) * bk, columns);
        int first = 1;
        for (int64_t c = j * bk; c < end; first = 0)
            if (c + BLOCK <= end) STRIP(4)
            else STRIP(1)
        for (int64_t r = 0; r < rows; r++) {
            to->row_high[r * num_tiles + j] = max_of_lanes(high[r]);
            to->row_low[r * num_tiles + j] = -max_of_lanes(-low[r]);
        }
    }
}
#undef STRIP

/* The same of one tile of many rows; a row that does not fill its blocks has 0, as in run_extremes. */
INLINE int32_t NAME(tile_extremes)(const T *x, int64_t ld, int64_t rows, int64_t columns, int32_t *low) {
    int32_t high = 0, h, l;
    *low = ABS_MASK;
    if (columns % BLOCK) {
        for (int64_t r = 0; r < rows; r++) {
            h = NAME(run_extremes)(x + r * ld, columns, &l, 0);
            high = h > high ? h : high;
            *low = l < *low ? l : *low;
        }
        return high;
    }
    vi hh[4], ll[4];
    for (int k = 0; k < 4; k++) hh[k] = splat_i(0), ll[k] = splat_i(ABS_MASK);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += BLOCK)
            for (int k = 0; k < 4; k++) {
                vi a = (vi)LOAD(x + r * ld + c + k * VL) & ABS_MASK;
                hh[k] = max_i(hh[k], a), ll[k] = min_i(ll[k], a);
            }
    *low = -max_of_lanes(-min_i(min_i(ll[0], ll[1]), min_i(ll[2], ll[3])));
    return max_of_lanes(max_i(max_i(hh[0], hh[1]), max_i(hh[2], hh[3])));
}
