/* All statistics: energies, moments and depth from the look that makes the codes. Once for each type of operand, after
 * operand.h.
 */

/* Sums of squares, squared errors and fourth powers, and of what is lost of each square. */
struct NAME(sums) { vf signal, noise, fourth, shortfall; };

/* One vector of finite elements: its sums in units of `unit`, its depths, its lifted products.
 *
 * With a power of two as the scale and nothing clipped (`exact`) the scale is the unit, and the products are all that
 * is looked at: x, its rounding and their difference have the same digits before and after a multiplication by it. */
INLINE vf NAME(vector_full)(vi magnitude, vf scale, vf scale_inv, vf unit, vi peak, const struct rounding *r, int exact,
                            struct NAME(sums) *to, vi *depth) {
    vf power, t = lifted(magnitude, scale, r, !exact, &power), grid = lowered(t, power, r), share, error;
    if (exact) {
        share = (vf)magnitude * scale;
        error = share - grid;
    } else {
        share = (vf)magnitude * unit;
        error = ((vf)magnitude - grid * scale_inv) * unit;
    }
    vf square = share * share;
    to->signal += square;
    to->noise = mul_add(error, error, to->noise);
    to->fourth = mul_add(square, square, to->fourth);
    to->shortfall = mul_add(share, error, to->shortfall);
    /* for two normal numbers the difference of their bits, shifted, is floor(log2) of their quotient */
    *depth = (peak - (exact ? (vi)share : magnitude)) >> 23;
    return t;
}

/* What comes out of a run, with all statistics from the same look; returns whether one of its codes may be 0.
 * `lanes`: signal, noise, fourth powers, shortfall; added to, or written where they are `fresh`. */
INLINE int NAME(run_full_as)(const T *x, int64_t n, void *out, const struct tile *tile, float unit,
                             const struct rounding *r, int stream, int64_t ahead, struct fold *f, float *const lanes[4],
                             int fresh, int kind, int exact) {
    const vf s = splat_f(tile->scale), q = splat_f(tile->scale_inv), u = splat_f(unit);
    const vi peak = splat_i(bits_of(exact ? tile->amax * tile->scale : tile->amax));
    struct NAME(sums) sum[LANE_VECTORS];
    struct depth depth = depth_take(f);
    struct smallest smallest = smallest_of_none();
    for (int v = 0; v < LANE_VECTORS; v++) {
        sum[v].signal = fresh ? splat_f(0) : load_f(lanes[0] + v * VL);
        sum[v].noise = fresh ? splat_f(0) : load_f(lanes[1] + v * VL);
        sum[v].fourth = fresh ? splat_f(0) : load_f(lanes[2] + v * VL);
        sum[v].shortfall = fresh ? splat_f(0) : load_f(lanes[3] + v * VL);
    }
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int whole = i + BLOCK <= n;
        T rest[BLOCK];
        const T *p = x + i;
        if (whole) {
            NAME(prefetch)(p, ahead);
        } else {
            NAME(pad)(p, n - i, rest);
            p = rest;
        }
        vf t[4], value[4];
        vi v[4], d[4];
        for (int k = 0; k < 4; k++) {
            v[k] = (vi)LOAD(p + k * VL);
            t[k] = NAME(vector_full)(v[k] & ABS_MASK, s, q, u, peak, r, exact, sum + k % LANE_VECTORS, d + k);
        }
        depth_count(f, &depth, d);
        if (kind == CODES) {
            vb codes = codes_of(t, v, r, &smallest);
            if (!whole) memcpy((uint8_t *)out + i, &codes, (size_t)(n - i));
            else if (stream) stream_b((uint8_t *)out + i, codes);
            else store_b((uint8_t *)out + i, codes);
        }
        if (kind == VALUES) {
            const vf ss[4] = {s, s, s, s}, qq[4] = {q, q, q, q};
            NAME(block_values)(p, ss, qq, r, !exact, value, &smallest);
            if (!whole) memcpy((float *)out + i, value, (size_t)(n - i) * 4);
            for (int k = 0; k < 4 && whole; k++)
                if (stream) stream_b((uint8_t *)((float *)out + i + k * VL), (vb)value[k]);
                else store_f((float *)out + i + k * VL, value[k]);
        }
    }
    for (int v = 0; v < LANE_VECTORS; v++) {
        store_f(lanes[0] + v * VL, sum[v].signal);
        store_f(lanes[1] + v * VL, sum[v].noise);
        store_f(lanes[2] + v * VL, sum[v].fourth);
        store_f(lanes[3] + v * VL, sum[v].shortfall);
    }
    depth_put(f, &depth);
    return any_zero(&smallest);
}

static __attribute__((noinline)) int NAME(run_full)(const T *x, int64_t n, void *out, const struct tile *t, float unit,
                                                    const struct rounding *r, int stream, int64_t ahead, struct fold *f,
                                                    float *const lanes[4], int fresh, int kind, int exact) {
    if (kind == CODES)
        return exact ? NAME(run_full_as)(x, n, out, t, unit, r, stream, ahead, f, lanes, fresh, CODES, 1)
                     : NAME(run_full_as)(x, n, out, t, unit, r, stream, ahead, f, lanes, fresh, CODES, 0);
    if (kind == VALUES)
        return exact ? NAME(run_full_as)(x, n, out, t, unit, r, stream, ahead, f, lanes, fresh, VALUES, 1)
                     : NAME(run_full_as)(x, n, out, t, unit, r, stream, ahead, f, lanes, fresh, VALUES, 0);
    return exact ? NAME(run_full_as)(x, n, out, t, unit, r, stream, ahead, f, lanes, fresh, NOTHING, 1)
                 : NAME(run_full_as)(x, n, out, t, unit, r, stream, ahead, f, lanes, fresh, NOTHING, 0);
}

/* Sums of 4·VL columns over `rows` rows, by column, and their depths; `mask` is 0 for a column that does not count. */
INLINE void NAME(column_full_as)(const T *x, int64_t ld, int64_t rows, const float *scale, const float *scale_inv,
                                 const float *unit, const int32_t *amax, const int32_t *mask, const struct rounding *r,
                                 struct fold *f, double *signal, double *noise, double *fourth,
                                 double *shortfall, int exact) {
    vf s[4], q[4], u[4];
    vi peak[4], m[4], d[4];
    struct depth depth = depth_take(f);
    for (int k = 0; k < 4; k++) {
        s[k] = load_f(scale + k * VL);
        q[k] = load_f(scale_inv + k * VL);
        u[k] = load_f(unit + k * VL);
        peak[k] = load_i(amax + k * VL);
        if (exact) peak[k] = (vi)((vf)peak[k] * s[k]);
        m[k] = load_i(mask + k * VL);
        peak[k] = (peak[k] & m[k]) | (0x7F000000 & ~m[k]); /* deeper than any bucket */
    }
    for (int64_t r0 = 0; r0 < rows; r0 += 32) {
        struct NAME(sums) sum[4];
        const int64_t r1 = least(r0 + 32, rows);
        memset(sum, 0, sizeof sum);
        for (int64_t i = r0; i < r1; i++) {
            for (int k = 0; k < 4; k++)
                NAME(vector_full)((vi)LOAD(x + i * ld + k * VL) & m[k], s[k], q[k], u[k], peak[k], r, exact, sum + k, d + k);
            depth_count(f, &depth, d);
        }
        for (int k = 0; k < 4; k++) {
            float part[4][VL];
            store_f(part[0], sum[k].signal);
            store_f(part[1], sum[k].noise);
            store_f(part[2], sum[k].fourth);
            store_f(part[3], sum[k].shortfall);
            for (int c = 0; c < VL; c++) {
                signal[k * VL + c] += part[0][c];
                noise[k * VL + c] += part[1][c];
                fourth[k * VL + c] += part[2][c];
                shortfall[k * VL + c] += part[3][c];
            }
        }
    }
    depth_put(f, &depth);
}

static void NAME(column_full)(const T *x, int64_t ld, int64_t rows, const float *scale, const float *scale_inv,
                              const float *unit, const int32_t *amax, const int32_t *mask, const struct rounding *r,
                              struct fold *f, double *signal, double *noise, double *fourth,
                                 double *shortfall, int exact) {
    if (exact) NAME(column_full_as)(x, ld, rows, scale, scale_inv, unit, amax, mask, r, f, signal, noise, fourth, shortfall, 1);
    else NAME(column_full_as)(x, ld, rows, scale, scale_inv, unit, amax, mask, r, f, signal, noise, fourth, shortfall, 0);
}
