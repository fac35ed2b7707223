/* Body of the SIMD kernel tables. Included once by cpu_kernels_avx2.c and cpu_kernels_avx512.c,
 * which first define the vector layer: vf (a vector of VW floats), the v_* helpers, the tile height
 * DX and reduce_tile(). Not a header to include anywhere else.
 *
 * Order of reductions. dots: lane-wise over steps of 2 VW values, even positions before odd ones
 * for BF16, then one fixed tree over the lanes (reduce_tile), whatever the place in the tile. mix:
 * j ascending into one accumulator per column. Tiles at an edge repeat their last row and do not
 * store it. */

#define DW      4u                /* rows of the matrix per tile */
#define PAIR    (2 * VW)          /* values per step */
#define DOT_MAX NBI_CPU_WIDTH_MAX /* longest BF16 row: x is repacked on the stack */

#define INLINE  static inline __attribute__((always_inline))

/* ---------------------------------------------------------------- exp */

/* exp(x) within 2 units in the last place; 0 below -104, +inf above 89; NaN stays NaN. Range
 * reduction and polynomial as in Cephes (Moshier), the power of two in two factors so that
 * subnormal results round. */
INLINE vf v_exp(vf x)
{
    x = v_min(v_set1(89.0f), v_max(v_set1(-104.0f), x));
    const vf n = v_round(v_mul(x, v_set1(1.44269504088896341f)));
    vf r = v_fma(n, v_set1(-0.693359375f), x);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    vf p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set1(1.0f));
    return v_scale2(p, n);
}

/* ---------------------------------------------------------------- dots */

/* DX rows of x in the order in which BF16 rows unpack: per step the VW even values, then the odd
 * ones; zero behind the end. */
INLINE void pack_pairs(float *to, const float *x, uint32_t n)
{
    for (uint32_t c = 0; c < n; c += PAIR) {
        const uint32_t left = n - c < PAIR ? n - c : PAIR;
        if (left == PAIR) {
            vf a = v_load(x + c), b = v_load(x + c + VW);
            v_split(&a, &b);
            v_store(to + c, a);
            v_store(to + c + VW, b);
            continue;
        }
        for (uint32_t i = 0; i < VW; i++) {
            to[c + i] = 2 * i < left ? x[c + 2 * i] : 0.0f;
            to[c + VW + i] = 2 * i + 1 < left ? x[c + 2 * i + 1] : 0.0f;
        }
    }
}

/* acc[j][i] += the product of x row i and matrix row w[j][i]. `wide` (one row of x): the tile's DW
 * x DX matrix rows all differ and meet x row 0; otherwise w[j][0] serves all i. */
INLINE void dots_bf16(vf acc[DW][DX], const float *packed, const void *w[DW][DX], uint32_t n,
                      bool wide)
{
    for (uint32_t c = 0; c < n; c += PAIR) {
        const float *x = packed + c;
        for (uint32_t j = 0; j < DW; j++) {
            vf even = v_zero(), odd = v_zero();
            for (uint32_t i = 0; i < DX; i++) {
                if (i == 0 || wide) {
                    const uint16_t *row = (const uint16_t *)w[j][i] + c;
                    const vh h = n - c >= PAIR ? v_load_h(row) : v_load_h_n(row, n - c);
                    even = v_even(h);
                    odd = v_odd(h);
                }
                const float *xi = wide ? x : x + i * DOT_MAX;
                acc[j][i] = v_fma(v_load(xi + VW), odd, v_fma(v_load(xi), even, acc[j][i]));
            }
        }
    }
}

INLINE void dots_f32(vf acc[DW][DX], const float *const *x, const void *w[DW][DX], uint32_t n,
                     bool wide)
{
    for (uint32_t c = 0; c < n; c += VW) {
        const bool whole = n - c >= VW;
        for (uint32_t j = 0; j < DW; j++) {
            vf b = v_zero();
            for (uint32_t i = 0; i < DX; i++) {
                const float *row = (const float *)w[j][i] + c, *xi = x[wide ? 0 : i] + c;
                if (i == 0 || wide) b = whole ? v_load(row) : v_load_n(row, n - c);
                acc[j][i] = v_fma(whole ? v_load(xi) : v_load_n(xi, n - c), b, acc[j][i]);
            }
        }
    }
}

/* One tile; sums[i][j] of x row i and matrix row j, or of matrix row i * DW + j when wide. */
INLINE void dots_tile(float sums[DX][DW], const float *packed, const float *const *x,
                      const void *w[DW][DX], nbi_dtype dtype, uint32_t n, float scale, bool wide)
{
    vf acc[DW][DX];
    for (uint32_t j = 0; j < DW; j++)
        for (uint32_t i = 0; i < DX; i++) acc[j][i] = v_zero();
    if (dtype == NBI_BF16)
        dots_bf16(acc, packed, w, n, wide);
    else
        dots_f32(acc, x, w, n, wide);
    reduce_tile(sums, acc, scale);
}

/* One row of x against all rows: DW * DX of them per tile. */
static void dots_one(float *out, const float *packed, const float *x, const void *const *rows,
                     nbi_dtype dtype, uint32_t n_rows, uint32_t n, float scale)
{
    const float *xs[DX] = {x};
    for (uint32_t j0 = 0; j0 < n_rows; j0 += DW * DX) {
        const uint32_t nj = n_rows - j0 < DW * DX ? n_rows - j0 : DW * DX;
        const void *w[DW][DX];
        for (uint32_t k = 0; k < DW * DX; k++) w[k % DW][k / DW] = rows[j0 + (k < nj ? k : nj - 1)];
        float sums[DX][DW];
        if (dtype == NBI_BF16)
            dots_tile(sums, packed, xs, w, NBI_BF16, n, scale, true);
        else
            dots_tile(sums, packed, xs, w, NBI_F32, n, scale, true);
        memcpy(out + j0, sums, nj * sizeof(float));
    }
}

static void dots(float *out, size_t ldo, const float *x, size_t ldx, uint32_t n_x,
                 const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n, float scale)
{
    _Alignas(64) float packed[DX * DOT_MAX];
    NB_ASSERT(n <= DOT_MAX || dtype == NBI_F32);
    for (uint32_t i0 = 0; i0 < n_x; i0 += DX) {
        const uint32_t ni = n_x - i0 < DX ? n_x - i0 : DX;
        const float *xs[DX];
        for (uint32_t i = 0; i < DX; i++) xs[i] = x + (i0 + (i < ni ? i : ni - 1)) * ldx;
        if (dtype == NBI_BF16)
            for (uint32_t i = 0; i < ni; i++) pack_pairs(packed + i * DOT_MAX, xs[i], n);
        if (ni == 1) {
            dots_one(out + i0 * ldo, packed, xs[0], rows, dtype, n_rows, n, scale);
            continue;
        }
        for (uint32_t i = ni; i < DX && dtype == NBI_BF16; i++)
            memcpy(packed + i * DOT_MAX, packed, (n + PAIR - 1) / PAIR * PAIR * sizeof(float));
        for (uint32_t j0 = 0; j0 < n_rows; j0 += DW) {
            const uint32_t nj = n_rows - j0 < DW ? n_rows - j0 : DW;
            const void *w[DW][DX];
            for (uint32_t j = 0; j < DW; j++) w[j][0] = rows[j0 + (j < nj ? j : nj - 1)];
            float sums[DX][DW];
            if (dtype == NBI_BF16)
                dots_tile(sums, packed, xs, w, NBI_BF16, n, scale, false);
            else
                dots_tile(sums, packed, xs, w, NBI_F32, n, scale, false);
            for (uint32_t i = 0; i < ni; i++)
                memcpy(out + (i0 + i) * ldo + j0, sums[i], nj * sizeof(float));
        }
    }
}

/* ---------------------------------------------------------------- mix */

#define STRIP (2 * PAIR) /* columns per tile: 4 vectors */

/* Columns [c, c + cols) of one row, in even/odd order for BF16. cols == STRIP when `whole`. */
INLINE void mix_load(vf b[4], const void *row, nbi_dtype dtype, uint32_t c, uint32_t cols,
                     bool whole)
{
    if (dtype == NBI_BF16) {
        const uint16_t *h = (const uint16_t *)row + c;
        const vh lo = whole ? v_load_h(h) : v_load_h_n(h, cols);
        const vh hi =
            whole ? v_load_h(h + PAIR) : v_load_h_n(h + PAIR, cols > PAIR ? cols - PAIR : 0);
        b[0] = v_even(lo);
        b[1] = v_odd(lo);
        b[2] = v_even(hi);
        b[3] = v_odd(hi);
        return;
    }
    const float *f = (const float *)row + c;
    for (uint32_t k = 0; k < 4; k++) {
        const uint32_t left = cols > k * VW ? cols - k * VW : 0;
        b[k] = whole || left >= VW ? v_load(f + k * VW) : v_load_n(f + k * VW, left);
    }
}

/* Sums of the tile between memory (natural order, `buf` when not whole) and registers. */
INLINE void mix_open(vf acc[4], const float *o, nbi_dtype dtype)
{
    for (uint32_t k = 0; k < 4; k++) acc[k] = v_load(o + k * VW);
    if (dtype == NBI_BF16) {
        v_split(&acc[0], &acc[1]);
        v_split(&acc[2], &acc[3]);
    }
}

INLINE void mix_close(float *o, vf acc[4], nbi_dtype dtype)
{
    if (dtype == NBI_BF16) {
        v_join(&acc[0], &acc[1]);
        v_join(&acc[2], &acc[3]);
    }
    for (uint32_t k = 0; k < 4; k++) v_store(o + k * VW, acc[k]);
}

INLINE void mix_tile(float *const *o, const float *const *p, const void *const *rows,
                     nbi_dtype dtype, uint32_t n_rows, uint32_t c, uint32_t cols, bool whole,
                     uint32_t height)
{
    vf acc[DX][4];
    for (uint32_t i = 0; i < height; i++) mix_open(acc[i], o[i], dtype);
    for (uint32_t j = 0; j < n_rows; j++) {
        vf b[4];
        mix_load(b, rows[j], dtype, c, cols, whole);
        for (uint32_t i = 0; i < height; i++) {
            const vf a = v_set1(p[i][j]);
            for (uint32_t k = 0; k < 4; k++) acc[i][k] = v_fma(a, b[k], acc[i][k]);
        }
    }
    for (uint32_t i = height; i-- > 0;) mix_close(o[i], acc[i], dtype);
}

INLINE void mix_typed(float *out, size_t ldo, const float *p, size_t ldp, uint32_t n_p,
                      const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n)
{
    _Alignas(64) float buf[DX][STRIP]; /* edge tiles: rows that repeat and columns that lack */
    for (uint32_t i0 = 0; i0 < n_p; i0 += DX) {
        const uint32_t ni = n_p - i0 < DX ? n_p - i0 : DX;
        const float *ps[DX];
        for (uint32_t i = 0; i < DX; i++) ps[i] = p + (i0 + (i < ni ? i : ni - 1)) * ldp;
        for (uint32_t c = 0; c < n; c += STRIP) {
            const uint32_t cols = n - c < STRIP ? n - c : STRIP;
            const bool edge = ni < DX || cols < STRIP;
            float *os[DX];
            for (uint32_t i = 0; i < DX; i++) {
                float *o = out + (i0 + (i < ni ? i : ni - 1)) * ldo + c;
                if (edge) {
                    memset(buf[i], 0, sizeof buf[i]);
                    memcpy(buf[i], o, cols * sizeof *o);
                }
                os[i] = edge ? buf[i] : o;
            }
            if (cols == STRIP && ni == 1)
                mix_tile(os, ps, rows, dtype, n_rows, c, STRIP, true, 1);
            else if (cols == STRIP)
                mix_tile(os, ps, rows, dtype, n_rows, c, STRIP, true, DX);
            else
                mix_tile(os, ps, rows, dtype, n_rows, c, cols, false, DX);
            if (edge)
                for (uint32_t i = 0; i < ni; i++)
                    memcpy(out + (i0 + i) * ldo + c, buf[i], cols * sizeof(float));
        }
    }
}

static void mix(float *out, size_t ldo, const float *p, size_t ldp, uint32_t n_p,
                const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n)
{
    if (dtype == NBI_BF16)
        mix_typed(out, ldo, p, ldp, n_p, rows, NBI_BF16, n_rows, n);
    else
        mix_typed(out, ldo, p, ldp, n_p, rows, NBI_F32, n_rows, n);
}

/* ---------------------------------------------------------------- vectors */

/* Calls STEP(i, load, store) for whole vectors, then for the rest with masked loads and stores. */
#define FOR_VECTORS(n, STEP)                        \
    do {                                            \
        uint32_t i = 0;                             \
        for (; i + VW <= (n); i += VW) STEP(WHOLE); \
        if (i < (n)) STEP(REST);                    \
    } while (0)
#define LOAD_WHOLE(p)     v_load((p) + i)
#define LOAD_REST(p)      v_load_n((p) + i, n - i)
#define STORE_WHOLE(p, v) v_store((p) + i, v)
#define STORE_REST(p, v)  v_store_n((p) + i, v, n - i)

static float max_of(const float *x, uint32_t n)
{
    vf m = v_set1(-INFINITY);
    uint32_t i = 0;
    for (; i + VW <= n; i += VW) m = v_max(v_load(x + i), m); /* second operand when NaN */
    float top = v_hmax(m);
    for (; i < n; i++)
        if (x[i] > top) top = x[i];
    return top;
}

static float exp_sum(float *x, uint32_t n, float max)
{
    const vf m = v_set1(max);
    vf sum = v_zero();
    uint32_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf e = v_exp(v_sub(v_load(x + i), m));
        v_store(x + i, e);
        sum = v_add(sum, e);
    }
    if (i < n) {
        const vf e = v_exp(v_sub(v_load_n(x + i, n - i), m));
        v_store_n(x + i, e, n - i);
        sum = v_add(sum, v_keep_n(e, n - i));
    }
    return v_hsum(sum);
}

static double log_sum(const float *x, uint32_t n, float max)
{
    const vf m = v_set1(max);
    double sum = 0;
    /* Float sums of 64 vectors at most, then double: keeps 24 bits over any vocabulary. */
    for (uint32_t i0 = 0; i0 < n; i0 += 64 * VW) {
        const uint32_t end = n - i0 < 64 * VW ? n : i0 + 64 * VW;
        vf part = v_zero();
        uint32_t i = i0;
        for (; i + VW <= end; i += VW) part = v_add(part, v_exp(v_sub(v_load(x + i), m)));
        if (i < end)
            part = v_add(part, v_keep_n(v_exp(v_sub(v_load_n(x + i, end - i), m)), end - i));
        sum += (double)v_hsum(part);
    }
    return sum;
}

static void exp_to(float *out, const float *x, uint32_t n, float scale, float max)
{
    const vf m = v_set1(max), s = v_set1(scale);
#define STEP(kind) STORE_##kind(out, v_exp(v_mul(v_sub(LOAD_##kind(x), m), s)))
    FOR_VECTORS(n, STEP);
#undef STEP
}

static void relu_add(float *acc, const float *s, uint32_t n, float w)
{
    const vf weight = v_set1(w), zero = v_zero();
    /* v_max gives its second operand when one is NaN: NaN scores stay visible. */
#define STEP(kind) STORE_##kind(acc, v_fma(weight, v_max(zero, LOAD_##kind(s)), LOAD_##kind(acc)))
    FOR_VECTORS(n, STEP);
#undef STEP
}

static float add_squares(float *x, const float *delta, uint32_t n)
{
    vf sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    uint32_t i = 0;
    for (uint32_t k = 0; i < n; i += VW, k++) {
        const bool whole = n - i >= VW;
        vf v = whole ? v_load(x + i) : v_load_n(x + i, n - i);
        if (delta) {
            v = v_add(v, whole ? v_load(delta + i) : v_load_n(delta + i, n - i));
            if (whole)
                v_store(x + i, v);
            else
                v_store_n(x + i, v, n - i);
        }
        sum[k % 4] = v_fma(v, v, sum[k % 4]);
    }
    return v_hsum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
}

static void scale_weight(float *out, const float *x, const float *weight, float scale, uint32_t n)
{
    const vf s = v_set1(scale);
#define STEP(kind) STORE_##kind(out, v_mul(v_mul(LOAD_##kind(x), s), LOAD_##kind(weight)))
    FOR_VECTORS(n, STEP);
#undef STEP
}

static void swiglu(float *out, const float *gate, const float *up, uint32_t n)
{
    const vf one = v_set1(1.0f), zero = v_zero();
#define STEP(kind)                                                   \
    do {                                                             \
        const vf g = LOAD_##kind(gate);                              \
        const vf silu = v_div(g, v_add(one, v_exp(v_sub(zero, g)))); \
        STORE_##kind(out, v_mul(silu, LOAD_##kind(up)));             \
    } while (0)
    FOR_VECTORS(n, STEP);
#undef STEP
}

#define KERNEL_TABLE                                                                    \
    {                                                                                   \
        .max_group = NBI_CPU_GROUP_MAX, .dots = dots, .mix = mix, .max = max_of,        \
        .exp_sum = exp_sum, .log_sum = log_sum, .exp_to = exp_to, .relu_add = relu_add, \
        .add_squares = add_squares, .scale_weight = scale_weight, .swiglu = swiglu      \
    }
