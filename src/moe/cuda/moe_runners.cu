/* The tables of the CUDA runners. Callers: the registry.
 *
 * All ways of running give a row the same bits, so `cuda` may change between them by the number of
 * rows alone. */
#include <stdio.h>

#include "moe/cuda/moe_cuda.h"

/* Rows up to which streaming every chosen expert's weights once is the whole cost. */
#define GEMV_ROWS 8u

/* Width up to which moe_one.cu is ahead of moe_stream.cu: 2048 18.9 against 20.6 us, 6144 20.6
 * against 14.7. */
#define ONE_HIDDEN 4096u

/* Rows from which moe_rows.cu is ahead of moe_gemv.cu. */
#define ROWS_LEAST 5u

/* Pairs of an expert, on average, from which grouped products are ahead of streamed ones. */
#define ROWS_PAIRS 12u

/* Kernels agree in every bit: tests/cuda/test_cuda_moe.c; of FP4 products test_cuda_fp4.c. */
#define NUMERICS     "cuda"
#define NUMERICS_FP4 "cuda_fp4"

static bool supports_gemv(const nbi_backend *b, const nbi_moe_shape *s, char *why, size_t n)
{
    if (!nbi_moe_cuda_supports(b, s, why, n)) return false;
    if (nbi_moe_gemv_fits(nbi_cuda_of(b), s)) return true;
    snprintf(why, n, "%u experts of width %u per row do not fit into shared memory", s->top_k,
             s->inter);
    return false;
}

static size_t gemv_workspace(const nbi_backend *b, const nbi_moe_shape *s, uint32_t max_rows)
{
    (void)b;
    return nbi_moe_gemv_workspace(s, max_rows);
}

static size_t grouped_workspace(const nbi_backend *b, const nbi_moe_shape *s, uint32_t max_rows)
{
    (void)b;
    return nbi_moe_grouped_workspace(s, max_rows, false);
}

static size_t stream_workspace(const nbi_backend *b, const nbi_moe_shape *s, uint32_t max_rows)
{
    const size_t some = nbi_moe_rows_workspace(s, max_rows), gemv = gemv_workspace(b, s, max_rows);
    return some > gemv ? some : gemv;
}

static size_t most_workspace(const nbi_backend *b, const nbi_moe_shape *s, uint32_t max_rows)
{
    const size_t few = gemv_workspace(b, s, max_rows < GEMV_ROWS ? max_rows : GEMV_ROWS);
    const size_t some = nbi_moe_rows_workspace(s, max_rows);
    const size_t many = grouped_workspace(b, s, max_rows);
    return few > many ? (few > some ? few : some) : many > some ? many : some;
}

static void run_gemv(nbi_backend *b, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_flush(c);
    if (nbi_moe_stream_fits(c, l, a))
        nbi_moe_stream_run(c, l, a);
    else
        nbi_moe_gemv_run(c, l, a);
}

static void run_stream(nbi_backend *b, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const bool one = nbi_moe_one_fits(c, l, a->n_rows);
    if (!one && !nbi_moe_rows_fits(c, l, a->n_rows)) return run_gemv(b, l, a);
    if (one && nbi_moe_routed_fits(c, l, a)) return nbi_moe_routed_run(c, l, a);
    nbi_cuda_flush(c);
    if (one)
        nbi_moe_one_run(c, l, a);
    else
        nbi_moe_rows_run(c, l, a);
}

static void run_grouped(nbi_backend *b, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    nbi_cuda_flush(nbi_cuda_of(b));
    nbi_moe_grouped_run(nbi_cuda_of(b), l, a);
}

static void run_best(nbi_backend *b, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const bool some =
        a->n_rows >= ROWS_LEAST && a->n_rows * l->shape.top_k < ROWS_PAIRS * l->shape.n_experts;
    const bool one = l->shape.hidden <= ONE_HIDDEN && nbi_moe_one_fits(c, l, a->n_rows);
    if (one || (some && nbi_moe_rows_fits(c, l, a->n_rows))) return run_stream(b, l, a);
    if (a->n_rows <= GEMV_ROWS && nbi_moe_gemv_fits(c, &l->shape))
        run_gemv(b, l, a);
    else
        run_grouped(b, l, a);
}

static size_t masked_workspace(const nbi_backend *b, const nbi_moe_shape *s, uint32_t max_rows)
{
    (void)b;
    return nbi_moe_masked_workspace(s, max_rows, false);
}

static void run_masked(nbi_backend *b, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    nbi_cuda_flush(nbi_cuda_of(b));
    nbi_moe_masked_run(nbi_cuda_of(b), l, a);
}

static bool supports_masked(const nbi_backend *b, const nbi_moe_shape *s, char *why, size_t n)
{
    if (!nbi_moe_cuda_supports(b, s, why, n)) return false;
    if (nbi_moe_has_f32(s)) {
        snprintf(why, n, "its products are on the matrix units, which do not take f32 experts");
        return false;
    }
    if (nbi_moe_masked_fits(nbi_cuda_of(b), s)) return true;
    snprintf(why, n, "experts of %u x %u do not fit into shared memory", s->inter, s->hidden);
    return false;
}

static bool supports_grouped(const nbi_backend *b, const nbi_moe_shape *s, char *why, size_t n)
{
    if (!nbi_moe_cuda_supports(b, s, why, n)) return false;
    if (nbi_moe_grouped_fits(nbi_cuda_of(b), s)) return true;
    snprintf(why, n, "experts of %u x %u do not fit into shared memory", s->inter, s->hidden);
    return false;
}

static bool rounds(const nbi_moe_shape *s, char *why, size_t n)
{
    if (s->w4a4) return true;
    snprintf(why, n, "it rounds activations to NVFP4, which --activations w4a4 asks for");
    return false;
}

static bool supports_masked_fp4(const nbi_backend *b, const nbi_moe_shape *s, char *why, size_t n)
{
    return supports_masked(b, s, why, n) && rounds(s, why, n);
}

static bool supports_grouped_fp4(const nbi_backend *b, const nbi_moe_shape *s, char *why, size_t n)
{
    return supports_grouped(b, s, why, n) && rounds(s, why, n);
}

/* Layers that cannot have FP4 products (moe_fp4.cu) have the others. */
static size_t masked_fp4_workspace(const nbi_backend *b, const nbi_moe_shape *s, uint32_t max_rows)
{
    const size_t plain = masked_workspace(b, s, max_rows);
    const size_t fp4 = nbi_moe_masked_workspace(s, max_rows, true);
    return fp4 > plain ? fp4 : plain;
}

static size_t grouped_fp4_workspace(const nbi_backend *b, const nbi_moe_shape *s, uint32_t max_rows)
{
    const size_t plain = grouped_workspace(b, s, max_rows);
    const size_t fp4 = nbi_moe_grouped_workspace(s, max_rows, true);
    return fp4 > plain ? fp4 : plain;
}

const nbi_moe_runner_ops nbi_moe_runner_cuda = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cuda",
    .aliases = NULL,
    .summary = NBI_MOE_CUDA_SUMMARY,
    .numerics = NUMERICS,
    .supports = supports_grouped,
    .prepare = nbi_moe_cuda_prepare,
    .release = nbi_moe_cuda_release,
    .workspace_bytes = most_workspace,
    .run = run_best,
};

const nbi_moe_runner_ops nbi_moe_runner_cuda_gemv = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cuda_gemv",
    .aliases = NULL,
    .summary = NBI_MOE_CUDA_GEMV_SUMMARY,
    .numerics = NUMERICS,
    .supports = supports_gemv,
    .prepare = nbi_moe_cuda_prepare,
    .release = nbi_moe_cuda_release,
    .workspace_bytes = gemv_workspace,
    .run = run_gemv,
};

const nbi_moe_runner_ops nbi_moe_runner_cuda_stream = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cuda_stream",
    .aliases = NULL,
    .summary = NBI_MOE_CUDA_STREAM_SUMMARY,
    .numerics = NUMERICS,
    .supports = supports_gemv,
    .prepare = nbi_moe_cuda_prepare,
    .release = nbi_moe_cuda_release,
    .workspace_bytes = stream_workspace,
    .run = run_stream,
};

const nbi_moe_runner_ops nbi_moe_runner_cuda_grouped = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cuda_grouped",
    .aliases = NULL,
    .summary = NBI_MOE_CUDA_GROUPED_SUMMARY,
    .numerics = NUMERICS,
    .supports = supports_grouped,
    .prepare = nbi_moe_cuda_prepare,
    .release = nbi_moe_cuda_release,
    .workspace_bytes = grouped_workspace,
    .run = run_grouped,
};

const nbi_moe_runner_ops nbi_moe_runner_cuda_masked = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cuda_masked",
    .aliases = NULL,
    .summary = NBI_MOE_CUDA_MASKED_SUMMARY,
    .numerics = NUMERICS,
    .supports = supports_masked,
    .prepare = nbi_moe_cuda_prepare,
    .release = nbi_moe_cuda_release,
    .workspace_bytes = masked_workspace,
    .run = run_masked,
};

const nbi_moe_runner_ops nbi_moe_runner_cuda_masked_fp4 = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cuda_masked_fp4",
    .aliases = NULL,
    .summary = NBI_MOE_CUDA_MASKED_FP4_SUMMARY,
    .numerics = NUMERICS_FP4,
    .supports = supports_masked_fp4,
    .prepare = nbi_moe_fp4_prepare,
    .release = nbi_moe_cuda_release,
    .workspace_bytes = masked_fp4_workspace,
    .run = run_masked,
};

const nbi_moe_runner_ops nbi_moe_runner_cuda_grouped_fp4 = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cuda_grouped_fp4",
    .aliases = NULL,
    .summary = NBI_MOE_CUDA_GROUPED_FP4_SUMMARY,
    .numerics = NUMERICS_FP4,
    .supports = supports_grouped_fp4,
    .prepare = nbi_moe_fp4_prepare,
    .release = nbi_moe_cuda_release,
    .workspace_bytes = grouped_fp4_workspace,
    .run = run_grouped,
};
