/* Rows of what a GEMM made, times signs, held against its operands, once for each type of output: include after vector.h.
 *
 * output·r must be a·(b·r): the meaning is that of `fp8watch.layers.random_projection`, which looks closely where this finds
 * more than is allowed, or cannot tell.
 */

/* Elements in one piece, times signs, added up. */
static float NAME(dot)(const T *x, const float *y, int64_t n) {
    vf sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        for (int k = 0; k < 4; k++) sums[k] = mul_add(LOAD(x + i + k * VL), load_f(y + i + k * VL), sums[k]);
    for (; i + VL <= n; i += VL) sums[0] = mul_add(LOAD(x + i), load_f(y + i), sums[0]);
    const vf all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = 0;
    for (int k = 0; k < VL; k++) sum += all[k];
    if (i < n) {
        T rest[VL] = {0};
        float with[VL] = {0};
        memcpy(rest, x + i, (size_t)(n - i) * sizeof(T));
        memcpy(with, y + i, (size_t)(n - i) * sizeof *with);
        const vf last = LOAD(rest) * load_f(with);
        for (int k = 0; k < VL; k++) sum += last[k];
    }
    return sum;
}

/* 1: of the rows together no more than a share `allowed` is off, and all of them is finite and not 0. `right` holds what the
 * operands give, one number for each row of the output. */
static int NAME(rows_product)(const T *output, int64_t ld, const float *signs, const float *right, int64_t M, int64_t N,
                              int64_t first, int64_t step, double allowed) {
    double wrong = 0, size = 0;
    for (int64_t r = first; r < M; r += step) {
        const double off = (double)NAME(dot)(output + r * ld, signs, N) - right[r];
        wrong += off * off, size += (double)right[r] * right[r];
    }
    return wrong <= allowed * allowed * size && size > 0 && size < (double)INFINITY;
}
