/* The loops over elements, once for each type of operand: see typed.h.
 *
 * A run is a stretch of one row within one tile, with one scale: what has a scale for each column is in columns.h. What
 * does not fill BLOCK elements goes through a padded buffer; padding is 0 and changes no maximum, and what it adds to a
 * sum is 0.
 */

static void NAME(pad)(const T *x, int64_t n, T *buffer) {
    memset(buffer, 0, BLOCK * sizeof(T));
    memcpy(buffer, x, (size_t)n * sizeof(T));
}

/* Ask for the memory `ahead` of a block: what comes next is read while this is computed. 0: somebody else asks. */
INLINE void NAME(prefetch)(const T *x, int64_t ahead) {
    if (!ahead) return;
    for (int64_t b = 0; b < (int64_t)(BLOCK * sizeof(T)); b += 64) __builtin_prefetch((const char *)(x + ahead) + b);
}

#if IS_HALF
/* Largest bits of |x| as float32: above EXPONENT_MASK for NaN, equal to it for Inf.
 * Halves of either kind order as their bits do. */
INLINE int32_t NAME(run_amax)(const T *x, int64_t n, int64_t ahead) {
    const vs mask = splat_s(0x7FFF);
    vs m0 = splat_s(0), m1 = m0, v;
    int64_t i = 0;
    T rest[BLOCK];
    for (; i + BLOCK <= n; i += BLOCK) {
        NAME(prefetch)(x + i, ahead);
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
INLINE int32_t NAME(run_extremes)(const T *x, int64_t n, int32_t *low, int64_t ahead) {
    const vs mask = splat_s(0x7FFF);
    vs m0 = splat_s(0), m1 = m0, c0 = m0, c1 = m0, v; /* c: the largest of what |x| lacks to the mask */
    int64_t i = 0;
    T rest[BLOCK];
    while (i < n) {
        const T *p = x + i;
        if (i + BLOCK > n) {
            NAME(pad)(x + i, n - i, rest);
            p = rest;
        } else {
            NAME(prefetch)(p, ahead);
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
INLINE int32_t NAME(run_amax)(const T *x, int64_t n, int64_t ahead) {
    vi m0 = splat_i(0), m1 = m0, m2 = m0, m3 = m0;
    int64_t i = 0;
    T rest[BLOCK];
    for (; i + BLOCK <= n; i += BLOCK) {
        NAME(prefetch)(x + i, ahead);
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
INLINE int32_t NAME(run_extremes)(const T *x, int64_t n, int32_t *low, int64_t ahead) {
    vi h[4], l[4];
    for (int v = 0; v < 4; v++) h[v] = splat_i(0), l[v] = splat_i(ABS_MASK);
    T rest[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        const T *p = x + i;
        if (i + BLOCK > n) {
            NAME(pad)(x + i, n - i, rest);
            p = rest;
        } else {
            NAME(prefetch)(p, ahead);
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
        vf part[LANE_VECTORS];
        float lanes[LANES], total[4];
        const int64_t end = i + LANE_ELEMENTS;
        for (int v = 0; v < LANE_VECTORS; v++) part[v] = splat_f(0);
        for (; i < end && i < n; i += BLOCK) {
            const T *p = x + i;
            if (i + BLOCK > n) {
                NAME(pad)(x + i, n - i, rest);
                p = rest;
            }
            for (int k = 0; k < 4; k++) {
                vf a = LOAD(p + k * VL);
                part[k % LANE_VECTORS] = mul_add(a, a, part[k % LANE_VECTORS]);
            }
        }
        memcpy(lanes, part, sizeof lanes);
        sums_of_lanes(lanes, lanes, lanes, lanes, total);
        sum += total[0];
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

#if IS_BF16
/* Whether a code of two vectors may be subnormal: their magnitude lies below `least`, and is not 0. */
INLINE int NAME(some_subnormal)(const vs x[2], const vs least[2]) {
    vs some = splat_s(0); /* 0 becomes the largest of all */
    for (int k = 0; k < 2; k++) some |= below_s((x[k] & splat_s(0x7FFF)) - splat_s(1), least[k] - splat_s(1));
    return any_b((vb)some);
}
#endif

INLINE vb NAME(block_codes)(const T *x, const vf s[4], const struct rounding *r, int clip,
                            struct smallest *smallest) {
    vf t[4], power;
    vi v[4];
    for (int k = 0; k < 4; k++) {
        v[k] = (vi)LOAD(x + k * VL);
        t[k] = lifted(v[k] & ABS_MASK, s[k], r, clip, &power);
    }
    return codes_of(t, v, r, smallest);
}

INLINE void NAME(block_values)(const T *x, const vf s[4], const vf s_inv[4], const struct rounding *r, int clip,
                               vf out[4], struct smallest *smallest) {
    for (int k = 0; k < 4; k++) {
        vi v = (vi)LOAD(x + k * VL);
        vf power, t = lifted(v & ABS_MASK, s[k], r, clip, &power), grid = lowered(t, power, r);
        smallest->words = min_i(smallest->words, (vi)grid);
        out[k] = (vf)((vi)(grid * s_inv[k]) | (v & ~(vi)splat_i(ABS_MASK)));
    }
}

/* The same; `exact`: nothing is clipped and the scales are powers of two, whose rounding is `q`, and for each element
 * `least` and `offset`. */
INLINE vb NAME(exact_codes)(const T *x, const vf s[4], const struct rounding *r, const struct short_rounding *q,
                            const vs least[2], const vs offset[2], int exact, int clip,
                            struct smallest *smallest) {
#if IS_BF16
    if (exact) {
        const vs v[2] = {load_s(x), load_s(x + 2 * VL)};
        if (likely(!NAME(some_subnormal)(v, least))) return short_codes(v, offset, q, smallest);
    }
#endif
    return NAME(block_codes)(x, s, r, clip, smallest);
}

INLINE void NAME(exact_values)(const T *x, const vf s[4], const vf s_inv[4], const struct rounding *r,
                               const struct short_rounding *q, const vs least[2], int exact, int clip, vf out[4],
                               struct smallest *smallest) {
#if IS_BF16
    if (exact) {
        const vs v[2] = {load_s(x), load_s(x + 2 * VL)};
        if (likely(!NAME(some_subnormal)(v, least))) {
            for (int k = 0; k < 2; k++) smallest->halves = min_s(smallest->halves, v[k] & splat_s(0x7FFF));
            short_values(v[0], q, out);
            short_values(v[1], q, out + 2);
            return;
        }
    }
#endif
    NAME(block_values)(x, s, s_inv, r, clip, out, smallest);
}

/* Codes of a run; returns whether one of them may be 0. `exact` as in exact_codes. */
INLINE int NAME(run_codes)(const T *x, int64_t n, uint8_t *out, float scale, const struct rounding *r, int clip,
                           int exact, int stream, int64_t ahead) {
    const struct short_rounding q = short_rounding_of(r->format, exact ? scale : 1);
    const vs least[2] = {splat_s(q.least), splat_s(q.least)}, offset[2] = {splat_s(q.offset), splat_s(q.offset)};
    const vf s = splat_f(scale), ss[4] = {s, s, s, s};
    struct smallest smallest = smallest_of_none();
    int64_t i = 0;
    if (stream)
        for (; i + BLOCK <= n; i += BLOCK) {
            NAME(prefetch)(x + i, ahead);
            stream_b(out + i, NAME(exact_codes)(x + i, ss, r, &q, least, offset, exact, clip, &smallest));
        }
    else
        for (; i + BLOCK <= n; i += BLOCK) {
            NAME(prefetch)(x + i, ahead);
            store_b(out + i, NAME(exact_codes)(x + i, ss, r, &q, least, offset, exact, clip, &smallest));
        }
    if (i < n) {
        T rest[BLOCK];
        vb c;
        NAME(pad)(x + i, n - i, rest);
        c = NAME(block_codes)(rest, ss, r, clip, &smallest);
        memcpy(out + i, &c, (size_t)(n - i));
    }
    return any_zero(&smallest);
}

/* Dequantised values of a run; returns whether one of its codes may be 0. */
INLINE int NAME(run_values)(const T *x, int64_t n, float *out, float scale, float scale_inv, const struct rounding *r,
                            int clip, int exact, int stream, int64_t ahead) {
    const struct short_rounding q = short_rounding_of(r->format, exact ? scale : 1);
    const vs least[2] = {splat_s(q.least), splat_s(q.least)};
    const vf s = splat_f(scale), p = splat_f(scale_inv), ss[4] = {s, s, s, s}, pp[4] = {p, p, p, p};
    vf v[4];
    struct smallest smallest = smallest_of_none();
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        NAME(prefetch)(x + i, ahead);
        NAME(exact_values)(x + i, ss, pp, r, &q, least, exact, clip, v, &smallest);
        for (int k = 0; k < 4; k++)
            if (stream) stream_b((uint8_t *)(out + i + k * VL), (vb)v[k]);
            else store_f(out + i + k * VL, v[k]);
    }
    if (i < n) {
        T rest[BLOCK];
        NAME(pad)(x + i, n - i, rest);
        NAME(block_values)(rest, ss, pp, r, clip, v, &smallest);
        memcpy(out + i, v, (size_t)(n - i) * 4);
    }
    return any_zero(&smallest);
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
