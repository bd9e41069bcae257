/* A GEMM's output held against its operands by three matrix-vector products: include after typed.h and `enter`. */

struct matrix {
    const float *at;
    int64_t to_row, to_column; /* elements from one to the next: one of both is 1 */
};

/* y[rows] = matrix [rows, columns] · x, of a matrix that lies row by row or column by column; of rows `first`, `first` + `step` …
 * at least. */
static void times_vector(const struct matrix *m, int64_t rows, int64_t columns, const float *x, int64_t first, int64_t step, float *y) {
    if (m->to_column == 1) {
        for (int64_t i = first; i < rows; i += step) y[i] = dot_f32(m->at + i * m->to_row, x, columns);
        return;
    }
    memset(y, 0, (size_t)rows * sizeof *y);
    for (int64_t k = 0; k < columns; k++) {
        const float *column = m->at + k * m->to_column;
        const vf by = splat_f(x[k]);
        int64_t i = 0;
        for (; i + VL <= rows; i += VL) store_f(y + i, mul_add(load_f(column + i), by, load_f(y + i)));
        for (; i < rows; i++) y[i] += column[i] * x[k];
    }
}

/* Whether rows of the output [M, N] of a GEMM are a [M, K] · b [K, N] + bias, as far as their products with signs [N] tell: see
 * product.h. 0 as well without memory. */
int fp8watch_product_holds(const void *output, int64_t ld, int32_t dtype, const float *a, int64_t a_to_row, int64_t a_to_column,
                           const float *b, int64_t b_to_row, int64_t b_to_column, const float *bias, const float *signs,
                           int64_t M, int64_t K, int64_t N, int64_t first, int64_t step, double allowed) {
    struct mode mode = enter();
    const struct matrix left = {a, a_to_row, a_to_column}, by = {b, b_to_row, b_to_column};
    float *of_b = malloc((size_t)(K + M) * sizeof *of_b), *right = of_b + K;
    int holds = 0;
    if (of_b) {
        times_vector(&by, K, N, signs, 0, 1, of_b);
        times_vector(&left, M, K, of_b, first, step, right);
        const float added = bias ? dot_f32(bias, signs, N) : 0;
        for (int64_t r = first; r < M; r += step) right[r] += added;
        holds = dtype == FLOAT32 ? rows_product_f32(output, ld, signs, right, M, N, first, step, allowed)
              : dtype == BFLOAT16 ? rows_product_bf16(output, ld, signs, right, M, N, first, step, allowed)
                                  : rows_product_f16(output, ld, signs, right, M, N, first, step, allowed);
    }
    free(of_b);
    leave(mode);
    return holds;
}
