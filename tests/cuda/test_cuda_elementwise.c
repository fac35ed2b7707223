/* Operators that touch every value once, on the CUDA backend against float64. */
#include "cuda/gpu_util.h"

static const nbi_limits limits = {.max_rows = 64,
                                  .max_seqs = 8,
                                  .max_context = 1024,
                                  .max_logit_rows = 8,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .head_dim = 64,
                                  .max_linear_cols = 4096,
                                  .max_linear_rows = 4096,
                                  .vocab = 1000};

static void check_swiglu(nbi_backend *b, uint32_t T, uint32_t width, uint32_t in, uint32_t out)
{
    float *gate = op_floats((size_t)T * in), *up = op_floats((size_t)T * in);
    op_fill(gate, (size_t)T * in, 3);
    op_fill(up, (size_t)T * in, 1);
    gpu_buffer g = gpu_floats(b, gate, (size_t)T * in), u = gpu_floats(b, up, (size_t)T * in);
    gpu_buffer y = gpu_poisoned(b, (size_t)T * out * sizeof(float));
    b->ops->swiglu(b, &(nbi_swiglu_args){.out = y.p,
                                         .gate = g.p,
                                         .up = u.p,
                                         .n_rows = T,
                                         .width = width,
                                         .in_stride = in,
                                         .out_stride = out});
    float *got = gpu_read(&y);
    for (uint32_t t = 0; t < T; t++) {
        for (uint32_t i = 0; i < width; i++) {
            const double x = (double)gate[(size_t)t * in + i];
            const double want = x / (1 + exp(-x)) * (double)up[(size_t)t * in + i];
            assert_true(fabs((double)got[(size_t)t * out + i] - want) <= 1e-6 * (fabs(want) + 1));
        }
        for (uint32_t i = width; i < out; i++) assert_true(isnan(got[(size_t)t * out + i]));
    }
    free(got);
    gpu_free(&g);
    gpu_free(&u);
    gpu_free(&y);
    op_free(gate);
    op_free(up);
}

static void test_swiglu(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&limits);
    check_swiglu(b, 1, 1, 1, 1);
    check_swiglu(b, 3, 255, 257, 256);
    check_swiglu(b, 5, 768, 768, 768);
    check_swiglu(b, 64, 33, 40, 35);
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_swiglu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
