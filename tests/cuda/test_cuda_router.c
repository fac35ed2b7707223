/* The router of a few rows: a norm, the exact product of what it makes and the choice of experts,
 * asked for one after the other and done at once, against the three done one by one: the same bits
 * in all that is left in memory. */
#include "cuda/gpu_util.h"

typedef struct router_case {
    nbi_weight_kind kind;
    uint32_t n_experts, width, n_rows, top_k, n_group, topk_group;
    bool softmax, delta, bias;
    bool other; /* something else is asked for in between */
} router_case;

typedef struct router_result {
    float *out, *sum, *logits, *weights;
    int32_t *ids, *fault;
} router_result;

typedef struct router_input {
    float *x, *delta, *weight, *bias;
    nbi_weight *w;
} router_input;

static router_result run_router(nbi_backend *b, const router_case *c, const router_input *in,
                                bool apart)
{
    const uint32_t T = c->n_rows, E = c->n_experts, D = c->width;
    const size_t n = (size_t)T * D, picks = (size_t)T * c->top_k;
    const int32_t none[8] = {0};
    gpu_buffer x = gpu_floats(b, in->x, n), delta = gpu_floats(b, in->delta, n);
    gpu_buffer weight = gpu_floats(b, in->weight, D), bias = gpu_floats(b, in->bias, E);
    gpu_buffer out = gpu_poisoned(b, n * sizeof(float)), sum = gpu_poisoned(b, n * sizeof(float));
    gpu_buffer logits = gpu_poisoned(b, (size_t)T * E * sizeof(float));
    gpu_buffer ids = gpu_poisoned(b, picks * sizeof(int32_t));
    gpu_buffer weights = gpu_poisoned(b, picks * sizeof(float));
    gpu_buffer fault = gpu_bytes(b, none, T * sizeof *none), last = gpu_poisoned(b, sizeof(float));
    b->ops->rmsnorm(b, &(nbi_rmsnorm_args){.out = out.p,
                                           .x = x.p,
                                           .x_out = sum.p,
                                           .delta = c->delta ? delta.p : NULL,
                                           .weight = weight.p,
                                           .eps = 1e-5f,
                                           .n_rows = T,
                                           .width = D,
                                           .x_stride = D,
                                           .out_stride = D,
                                           .row_fault = fault.p,
                                           .where = NBI_WHERE_POST_NORM});
    if (apart) gpu_sync(b);
    b->ops->linear(b, &(nbi_linear_args){.y = logits.p,
                                         .x = out.p,
                                         .w = in->w,
                                         .n_rows = T,
                                         .x_stride = D,
                                         .y_stride = E,
                                         .y_f32 = true,
                                         .x_exact = true});
    if (apart) gpu_sync(b);
    if (c->other) b->ops->add(b, &(nbi_add_args){.x = last.p, .y = last.p, .n = 1});
    b->ops->route(b, &(nbi_route_args){.ids = ids.p,
                                       .weights = weights.p,
                                       .logits = logits.p,
                                       .bias = c->bias ? bias.p : NULL,
                                       .n_rows = T,
                                       .n_experts = E,
                                       .top_k = c->top_k,
                                       .n_group = c->n_group,
                                       .topk_group = c->topk_group,
                                       .softmax = c->softmax,
                                       .norm_topk = true,
                                       .routed_scale = 2.5f});
    const router_result r = {gpu_read(&out),     gpu_read(&sum), gpu_read(&logits),
                             gpu_read(&weights), gpu_read(&ids), gpu_read(&fault)};
    gpu_buffer *all[] = {&x,      &delta, &weight,  &bias,  &out, &sum,
                         &logits, &ids,   &weights, &fault, &last};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(all[i]);
    return r;
}

static void free_result(router_result *r)
{
    free(r->out);
    free(r->sum);
    free(r->logits);
    free(r->weights);
    free(r->ids);
    free(r->fault);
}

static void check_router(nbi_backend *b, const router_case *c)
{
    const uint32_t T = c->n_rows, E = c->n_experts, D = c->width;
    const size_t n = (size_t)T * D, picks = (size_t)T * c->top_k;
    router_input in = {op_floats(n), op_floats(n), op_floats(D), op_floats(E), NULL};
    nb_error err;
    mat m;
    mat_make(&m, c->kind, E, D, false);
    if (b->ops->weight_prepare(b, &in.w, &m.m, &err) != NB_OK) fail_msg("%s", err.text);
    op_fill(in.x, n, 3);
    op_fill(in.delta, n, 3);
    op_fill(in.weight, D, 1);
    op_fill(in.bias, E, 0.1f);
    if (T > 2) in.x[2 * D + 7] = NAN;
    router_result want = run_router(b, c, &in, true), got = run_router(b, c, &in, false);
    assert_memory_equal(got.out, want.out, n * sizeof *got.out);
    assert_memory_equal(got.sum, want.sum, n * sizeof *got.sum);
    assert_memory_equal(got.logits, want.logits, (size_t)T * E * sizeof *got.logits);
    assert_memory_equal(got.ids, want.ids, picks * sizeof *got.ids);
    assert_memory_equal(got.weights, want.weights, picks * sizeof *got.weights);
    for (uint32_t t = 0; t < T; t++) {
        assert_int_equal(want.fault[t], t == 2 ? 1 + NBI_WHERE_POST_NORM : 0);
        assert_int_equal(got.fault[t], want.fault[t]);
    }
    free_result(&want);
    free_result(&got);
    b->ops->weight_release(b, &in.w);
    mat_free(&m);
    op_free(in.x);
    op_free(in.delta);
    op_free(in.weight);
    op_free(in.bias);
}

static void test_router(void **state)
{
    (void)state;
    static const router_case cases[] = {
        {NBI_WEIGHT_BF16, 128, 2048, 1, 8, 1, 1, true, true, false, false},
        {NBI_WEIGHT_BF16, 128, 2048, 4, 8, 1, 1, true, true, false, false},
        {NBI_WEIGHT_BF16, 128, 2048, 3, 8, 1, 1, true, true, false, false},
        {NBI_WEIGHT_BF16, 128, 512, 8, 8, 1, 1, true, true, false, false},
        {NBI_WEIGHT_F32, 64, 784, 1, 4, 1, 1, false, true, true, false},
        {NBI_WEIGHT_F32, 160, 1024, 3, 6, 8, 3, false, true, true, false},
        {NBI_WEIGHT_F32, 256, 6144, 1, 8, 8, 4, false, true, true, false},
        {NBI_WEIGHT_BF16, 256, 256, 5, 8, 8, 4, false, false, true, false},
        {NBI_WEIGHT_BF16, 100, 272, 2, 7, 1, 1, false, true, true, false},
        {NBI_WEIGHT_F32, 9, 68, 8, 9, 1, 1, false, true, false, false},
        {NBI_WEIGHT_F32, 9, 67, 3, 2, 1, 1, true, true, false, false},
        {NBI_WEIGHT_FP8_BLOCK, 32, 256, 2, 4, 1, 1, true, true, false, false},
        {NBI_WEIGHT_BF16, 320, 128, 2, 4, 1, 1, true, true, false, false},
        {NBI_WEIGHT_BF16, 64, 128, 2, 4, 1, 1, true, true, false, true},
    };
    const nbi_limits limits = {.max_rows = 8,
                               .max_seqs = 1,
                               .max_context = 64,
                               .max_logit_rows = 1,
                               .max_linear_cols = 6144,
                               .max_linear_rows = 320,
                               .vocab = 64};
    nbi_backend *b = gpu_open(&limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_router(b, &cases[i]);
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_router)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
