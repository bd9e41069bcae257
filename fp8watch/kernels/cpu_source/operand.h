/* The loops over elements, once for each type of operand: include with T, LOAD(p) and NAME(name) defined.
 *
 * A run is a stretch of one row, within one tile or over many. Along runs there are two ways: `NAME(run_…)` with one
 * scale for the run (tiles wide enough for vectors), `NAME(column_…)` with a scale for each column (tiles along the
 * rows). What does not fill BLOCK elements goes through a padded buffer; padding is 0 and changes no maximum, and what
 * it adds to a sum is 0.
 */

static void NAME(pad)(const T *x, int64_t n, T *buffer) {
    memset(buffer, 0, BLOCK * sizeof(T));
    memcpy(buffer, x, (size_t)n * sizeof(T));
}

#if IS_HALF
/* Largest bits of |x| as float32: above EXPONENT_MASK for NaN, equal to it for Inf.
 * Halves of either kind order as their bits do. */
INLINE int32_t NAME(run_amax)(const T *x, int64_t n) {
    const vs mask = splat_s(0x7FFF);
    vs m0 = splat_s(0), m1 = m0, v;
    int64_t i = 0;
    T rest[BLOCK];
    for (; i + BLOCK <= n; i += BLOCK) {
        memcpy(&v, x + i, sizeof v);
        m0 = max_s(m0, v & mask);
        memcpy(&v, x + i + 2 * VL, sizeof v);
        m1 = max_s(m1, v & mask);
    }
    if (i < n) {
        NAME(pad)(x + i, n - i, rest);
        memcpy(&v, rest, sizeof v);
        m0 = max_s(m0, v & mask);
        memcpy(&v, rest + 2 * VL, sizeof v);
        m1 = max_s(m1, v & mask);
    }
    return bits_of(TO_FLOAT((uint16_t)max_of_halves(max_s(m0, m1))));
}

/* As run_amax, with the bits of the smallest |x| as well; a run that does not fill its blocks has 0. */
INLINE int32_t NAME(run_extremes)(const T *x, int64_t n, int32_t *low) {
    const vs mask = splat_s(0x7FFF);
    vs m0 = splat_s(0), m1 = m0, c0 = m0, c1 = m0, v; /* c: the largest of what |x| lacks to the mask */
    int64_t i = 0;
    T rest[BLOCK];
    while (i < n) {
        const T *p = x + i;
        if (i + BLOCK > n) {
            NAME(pad)(x + i, n - i, rest);
            p = rest;
        }
        memcpy(&v, p, sizeof v);
        m0 = max_s(m0, v & mask);
        c0 = max_s(c0, ~v & mask);
        memcpy(&v, p + 2 * VL, sizeof v);
        m1 = max_s(m1, v & mask);
        c1 = max_s(c1, ~v & mask);
        i += BLOCK;
    }
    *low = bits_of(TO_FLOAT((uint16_t)(0x7FFF - max_of_halves(max_s(c0, c1)))));
    return bits_of(TO_FLOAT((uint16_t)max_of_halves(max_s(m0, m1))));
}
#else
/* Largest bits of |x|: above EXPONENT_MASK for NaN, equal to it for Inf. */
INLINE int32_t NAME(run_amax)(const T *x, int64_t n) {
    vi m0 = splat_i(0), m1 = m0, m2 = m0, m3 = m0;
    int64_t i = 0;
    T rest[BLOCK];
    for (; i + BLOCK <= n; i += BLOCK) {
        m0 = max_i(m0, (vi)LOAD(x + i) & ABS_MASK);
        m1 = max_i(m1, (vi)LOAD(x + i + VL) & ABS_MASK);
        m2 = max_i(m2, (vi)LOAD(x + i + 2 * VL) & ABS_MASK);
        m3 = max_i(m3, (vi)LOAD(x + i + 3 * VL) & ABS_MASK);
    }
    if (i < n) {
        NAME(pad)(x + i, n - i, rest);
        for (int v = 0; v < 4; v++) m0 = max_i(m0, (vi)LOAD(rest + v * VL) & ABS_MASK);
    }
    return max_of_lanes(max_i(max_i(m0, m1), max_i(m2, m3)));
}

/* As run_amax, with the bits of the smallest |x| as well; a run that does not fill its blocks has 0. */
INLINE int32_t NAME(run_extremes)(const T *x, int64_t n, int32_t *low) {
    vi h[4], l[4];
    for (int v = 0; v < 4; v++) h[v] = splat_i(0), l[v] = splat_i(ABS_MASK);
    T rest[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        const T *p = x + i;
        if (i + BLOCK > n) {
            NAME(pad)(x + i, n - i, rest);
            p = rest;
        }
        for (int v = 0; v < 4; v++) {
            vi a = (vi)LOAD(p + v * VL) & ABS_MASK;
            h[v] = max_i(h[v], a);
            l[v] = min_i(l[v], a);
        }
    }
    *low = -max_of_lanes(-min_i(min_i(l[0], l[1]), min_i(l[2], l[3])));
    return max_of_lanes(max_i(max_i(h[0], h[1]), max_i(h[2], h[3])));
}

#endif

/* Σ x² of finite elements: float32 lanes for a few hundred at a time, summed in float64. */
static double NAME(run_energy)(const T *x, int64_t n) {
    double sum = 0;
    T rest[BLOCK];
    for (int64_t i = 0; i < n;) {
        vf part = splat_f(0);
        for (int k = 0; k < 8 && i < n; k++, i += BLOCK) {
            const T *p = x + i;
            if (i + BLOCK > n) {
                NAME(pad)(x + i, n - i, rest);
                p = rest;
            }
            for (int v = 0; v < 4; v++) {
                vf a = LOAD(p + v * VL);
                part = mul_add(a, a, part);
            }
        }
        sum += sum_of_lanes(part);
    }
    if (sum < INFINITY) return sum;
    sum = 0; /* squares beyond float32 */
    for (int64_t i = 0; i < n; i++) {
        memset(rest, 0, sizeof rest);
        rest[0] = x[i];
        vf a = LOAD(rest);
        sum += (double)a[0] * a[0];
    }
    return sum;
}

INLINE vb NAME(block_codes)(const T *x, const vf s[4], const struct rounding *r, int clip, vb *zero) {
    vf t[4], power;
    vi v[4];
    for (int k = 0; k < 4; k++) {
        v[k] = (vi)LOAD(x + k * VL);
        t[k] = lifted(v[k] & ABS_MASK, s[k], r, clip, &power);
    }
    return codes_of(t, v, r, zero);
}

INLINE void NAME(block_values)(const T *x, const vf s[4], const vf s_inv[4], const struct rounding *r, int clip, vf out[4], vb *zero) {
    for (int k = 0; k < 4; k++) {
        vi v = (vi)LOAD(x + k * VL);
        vf power, t = lifted(v & ABS_MASK, s[k], r, clip, &power), grid = lowered(t, power, r);
        *zero |= (vb)((vi)grid == 0);
        out[k] = (vf)((vi)(grid * s_inv[k]) | (v & ~(vi)splat_i(ABS_MASK)));
    }
}

/* Ask for the memory `ahead` of a block: what comes next is read while this is computed. */
INLINE void NAME(prefetch)(const T *x, int64_t ahead) {
    for (int64_t b = 0; b < (int64_t)(BLOCK * sizeof(T)); b += 64) __builtin_prefetch((const char *)(x + ahead) + b);
}

/* Codes of a run; returns whether one of them may be 0. */
INLINE int NAME(run_codes)(const T *x, int64_t n, uint8_t *out, float scale, const struct rounding *r, int clip, int stream, int64_t ahead) {
    vf s = splat_f(scale), ss[4] = {s, s, s, s};
    vb zero = splat_b(0);
    int64_t i = 0;
    if (stream)
        for (; i + BLOCK <= n; i += BLOCK) {
            NAME(prefetch)(x + i, ahead);
            stream_b(out + i, NAME(block_codes)(x + i, ss, r, clip, &zero));
        }
    else
        for (; i + BLOCK <= n; i += BLOCK) {
            NAME(prefetch)(x + i, ahead);
            store_b(out + i, NAME(block_codes)(x + i, ss, r, clip, &zero));
        }
    if (i < n) {
        T rest[BLOCK];
        vb c;
        NAME(pad)(x + i, n - i, rest);
        c = NAME(block_codes)(rest, ss, r, clip, &zero);
        memcpy(out + i, &c, (size_t)(n - i));
    }
    return any_b(zero);
}

/* Dequantised values of a run; returns whether one of its codes may be 0. */
INLINE int NAME(run_values)(const T *x, int64_t n, float *out, float scale, float scale_inv, const struct rounding *r, int clip, int stream, int64_t ahead) {
    vf s = splat_f(scale), q = splat_f(scale_inv), ss[4] = {s, s, s, s}, qq[4] = {q, q, q, q}, v[4];
    vb zero = splat_b(0);
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        NAME(prefetch)(x + i, ahead);
        NAME(block_values)(x + i, ss, qq, r, clip, v, &zero);
        for (int k = 0; k < 4; k++)
            if (stream) stream_b((uint8_t *)(out + i + k * VL), (vb)v[k]);
            else store_f(out + i + k * VL, v[k]);
    }
    if (i < n) {
        T rest[BLOCK];
        NAME(pad)(x + i, n - i, rest);
        NAME(block_values)(rest, ss, qq, r, clip, v, &zero);
        memcpy(out + i, v, (size_t)(n - i) * 4);
    }
    return any_b(zero);
}

/* Exact zeros, vanished and clipped products of a run of finite elements, added to `to`. */
static void NAME(run_count)(const T *x, int64_t n, float scale, const struct format *f, int64_t to[3]) {
    vi zero = splat_i(0), gone = zero, clipped = zero;
    vf s = splat_f(scale);
    int64_t i = 0, padding = 0;
    T rest[BLOCK];
    const T *p = x;
    while (i < n) {
        if (i + BLOCK > n) {
            NAME(pad)(x + i, n - i, rest);
            padding = BLOCK - (n - i);
            p = rest;
        } else {
            p = x + i;
        }
        for (int k = 0; k < 4; k++) {
            vi a = (vi)LOAD(p + k * VL) & ABS_MASK;
            vf y = (vf)a * s;
            zero -= a == 0;
            gone -= y <= f->vanishing;
            clipped -= y >= f->midpoint;
        }
        i += BLOCK;
    }
    to[0] += sum_of_counts(zero) - padding;
    to[1] += sum_of_counts(gone) - padding;
    to[2] += sum_of_counts(clipped);
}

struct NAME(heavy_block) { vf signal, noise, fourth; };

/* Energies and depths of four vectors, in units of `unit`; `mask` is 0 for what does not count. */
INLINE void NAME(block_heavy)(const T *const x[4], const vf s[4], const vf s_inv[4], const vf unit[4], const vi amax[4],
                              const vi mask[4], const struct rounding *r, struct NAME(heavy_block) *sum, int per_vector,
                              uint8_t *depth) {
    vi d[4];
    for (int k = 0; k < 4; k++) {
        struct NAME(heavy_block) *to = sum + (per_vector ? k & 1 : 0);
        vi a = (vi)LOAD(x[k]) & mask[k];
        vf power, t = lifted(a, s[k], r, 1, &power);
        vf error = ((vf)a - lowered(t, power, r) * s_inv[k]) * unit[k], share = (vf)a * unit[k], square = share * share;
        to->signal += square;
        to->noise = mul_add(error, error, to->noise);
        to->fourth = mul_add(square, square, to->fourth);
        /* for two normal numbers the difference of their bits, shifted, is floor(log2) of their quotient */
        d[k] = (amax[k] - a) >> 23;
    }
    store_b(depth, pack_bytes(d[0], d[1], d[2], d[3]));
}

/* Sums of a run in float32 lanes, of at most a few hundred elements, added to the tile's in float64. */
static __attribute__((noinline)) void NAME(run_heavy)(const T *x, int64_t n, struct tile *tile, float unit, const struct rounding *r, struct fold *fold) {
    vf s = splat_f(tile->scale), q = splat_f(tile->scale_inv), u = splat_f(unit), zero = splat_f(0);
    vi a = splat_i(bits_of(tile->amax)), m = splat_i(ABS_MASK);
    vf ss[4] = {s, s, s, s}, qq[4] = {q, q, q, q}, uu[4] = {u, u, u, u};
    vi aa[4] = {a, a, a, a}, mm[4] = {m, m, m, m};
    T rest[BLOCK];
    for (int64_t i = 0; i < n;) {
        struct NAME(heavy_block) sum = {zero, zero, zero};
        for (int k = 0; k < 4 && i < n; k++, i += BLOCK) {
            const T *p = x + i;
            if (i + BLOCK > n) {
                NAME(pad)(x + i, n - i, rest);
                p = rest;
            }
            const T *const from[4] = {p, p + VL, p + 2 * VL, p + 3 * VL};
            NAME(block_heavy)(from, ss, qq, uu, aa, mm, r, &sum, 0, depth_slot(fold));
        }
        tile->signal += sum_of_lanes(sum.signal);
        tile->noise += sum_of_lanes(sum.noise);
        tile->fourth += sum_of_lanes(sum.fourth);
    }
}

/* Columns: the maximum of |x| down `rows` rows, and the minimum, for n columns (a multiple of BLOCK). */
static void NAME(column_extremes)(const T *x, int64_t ld, int64_t rows, int64_t n, int32_t *high, int32_t *low) {
    for (int64_t c = 0; c < n; c += BLOCK) {
        vi h[4], l[4];
        for (int k = 0; k < 4; k++) h[k] = splat_i(0), l[k] = splat_i(ABS_MASK);
        for (int64_t r = 0; r < rows; r++)
            for (int k = 0; k < 4; k++) {
                vi a = (vi)LOAD(x + r * ld + c + k * VL) & ABS_MASK;
                h[k] = max_i(h[k], a);
                l[k] = min_i(l[k], a);
            }
        for (int k = 0; k < 4; k++) {
            store_i(high + c + k * VL, h[k]);
            store_i(low + c + k * VL, l[k]);
        }
    }
}

/* One row of n columns, a multiple of BLOCK, each with its own scale. */
static void NAME(column_codes)(const T *x, int64_t n, uint8_t *out, const float *scale, const struct rounding *r) {
    vb zero = splat_b(0);
    for (int64_t i = 0; i < n; i += BLOCK) {
        vf s[4];
        for (int k = 0; k < 4; k++) s[k] = load_f(scale + i + k * VL);
        store_b(out + i, NAME(block_codes)(x + i, s, r, 1, &zero));
    }
}

static void NAME(column_values)(const T *x, int64_t n, float *out, const float *scale, const float *scale_inv, const struct rounding *r) {
    vb zero = splat_b(0);
    for (int64_t i = 0; i < n; i += BLOCK) {
        vf s[4], q[4], v[4];
        for (int k = 0; k < 4; k++) {
            s[k] = load_f(scale + i + k * VL);
            q[k] = load_f(scale_inv + i + k * VL);
        }
        NAME(block_values)(x + i, s, q, r, 1, v, &zero);
        for (int k = 0; k < 4; k++) store_f(out + i + k * VL, v[k]);
    }
}

/* As run_count for VL columns over `rows` rows: lanes of `to` are columns. */
static void NAME(column_count)(const T *x, int64_t ld, int64_t rows, const float *scale, const struct format *f, int32_t *to[3]) {
    vi zero = splat_i(0), gone = zero, clipped = zero;
    vf s = load_f(scale);
    for (int64_t r = 0; r < rows; r++) {
        vi a = (vi)LOAD(x + r * ld) & ABS_MASK;
        vf y = (vf)a * s;
        zero -= a == 0;
        gone -= y <= f->vanishing;
        clipped -= y >= f->midpoint;
    }
    store_i(to[0], zero);
    store_i(to[1], gone);
    store_i(to[2], clipped);
}

/* Sums of 2·VL columns over `rows` rows, by column, and their depths. */
static void NAME(column_heavy)(const T *x, int64_t ld, int64_t rows, const float *scale, const float *scale_inv, const float *unit,
                               const int32_t *amax, const int32_t *mask, const struct rounding *r, struct fold *fold,
                               double *signal, double *noise, double *fourth) {
    vf ss[4], qq[4], uu[4];
    vi aa[4], mm[4], off[4], nothing = splat_i(0);
    const T zeros[BLOCK] = {0};
    for (int k = 0; k < 4; k++) {
        ss[k] = load_f(scale + (k & 1) * VL);
        qq[k] = load_f(scale_inv + (k & 1) * VL);
        uu[k] = load_f(unit + (k & 1) * VL);
        aa[k] = load_i(amax + (k & 1) * VL);
        mm[k] = load_i(mask + (k & 1) * VL);
        off[k] = splat_i(0x7F000000); /* deeper than any bucket */
    }
    for (int64_t r0 = 0; r0 < rows;) {
        struct NAME(heavy_block) sum[2];
        memset(sum, 0, sizeof sum);
        for (int k = 0; k < 16 && r0 < rows; k++, r0 += 2) {
            const T *p = x + r0 * ld;
            const T *const from[4] = {p, p + VL, r0 + 1 < rows ? p + ld : zeros, r0 + 1 < rows ? p + ld + VL : zeros};
            if (r0 + 1 == rows) {
                mm[2] = mm[3] = nothing;
                aa[2] = off[2];
                aa[3] = off[3];
            }
            NAME(block_heavy)(from, ss, qq, uu, aa, mm, r, sum, 1, depth_slot(fold));
        }
        for (int v = 0; v < 2; v++) {
            float s[VL], n[VL], f[VL];
            store_f(s, sum[v].signal);
            store_f(n, sum[v].noise);
            store_f(f, sum[v].fourth);
            for (int c = 0; c < VL; c++) {
                signal[v * VL + c] += s[c];
                noise[v * VL + c] += n[c];
                fourth[v * VL + c] += f[c];
            }
        }
    }
}
