/* One row's norm, router, choice of experts and experts asked for one after the other and done in
 * two launches (moe_routed.cu), against each of them done by itself: the same bits in all that is
 * left in memory. */
#include "cuda/gpu_util.h"
#include "moe_util.h"

static const nbi_limits limits = {.max_rows = 8,
                                  .max_seqs = 1,
                                  .max_context = 64,
                                  .max_logit_rows = 1,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .head_dim = 64,
                                  .max_linear_cols = 2304,
                                  .max_linear_rows = 2304,
                                  .vocab = 64};

typedef struct routed_case {
    nbi_weight_kind kind;
    uint32_t hidden, inter, experts, top_k;
    bool softmax, bias, delta, shared;
    enum { PLAIN, ZEROS, NOT_FINITE } x; /* zeros: all experts tie */
    bool two;                            /* launches, when nothing is asked for in between */
} routed_case;

typedef struct routed_input {
    float *x, *delta, *weight, *bias;
    nbi_weight *router;
} routed_input;

enum { OUT, NORMED, SUM, LOGITS, WEIGHTS, IDS, FAULT, N_RESULTS };

typedef struct routed_result {
    void *of[N_RESULTS];
    size_t bytes[N_RESULTS];
    uint64_t launches;
} routed_result;

static uint64_t launches(nbi_backend *b)
{
    bool waits;
    return b->ops->clock->launches(b, &waits);
}

static routed_result run(nbi_backend *b, const routed_case *c, const routed_input *in,
                         const nbi_moe_runner_ops *ops, nbi_moe_layer *layer,
                         const nbi_moe_shape *shape, bool apart)
{
    const uint32_t D = c->hidden, E = c->experts;
    const int32_t none = 0;
    gpu_buffer x = gpu_floats(b, in->x, D), delta = gpu_floats(b, in->delta, D);
    gpu_buffer weight = gpu_floats(b, in->weight, D), bias = gpu_floats(b, in->bias, E);
    gpu_buffer ws = gpu_poisoned(b, ops->workspace_bytes(b, shape, 1));
    routed_result r = {.bytes = {D * sizeof(float), D * sizeof(float), D * sizeof(float),
                                 E * sizeof(float), c->top_k * sizeof(float),
                                 c->top_k * sizeof(int32_t), sizeof none}};
    gpu_buffer to[N_RESULTS];
    for (int i = 0; i < FAULT; i++) to[i] = gpu_poisoned(b, r.bytes[i]);
    to[FAULT] = gpu_bytes(b, &none, sizeof none);
    gpu_sync(b);
    const uint64_t before = launches(b);
    b->ops->rmsnorm(b, &(nbi_rmsnorm_args){.out = to[NORMED].p,
                                           .x = x.p,
                                           .x_out = to[SUM].p,
                                           .delta = c->delta ? delta.p : NULL,
                                           .weight = weight.p,
                                           .eps = 1e-5f,
                                           .n_rows = 1,
                                           .width = D,
                                           .x_stride = D,
                                           .out_stride = D,
                                           .row_fault = to[FAULT].p,
                                           .where = NBI_WHERE_POST_NORM});
    if (apart) gpu_sync(b);
    b->ops->linear(b, &(nbi_linear_args){.y = to[LOGITS].p,
                                         .x = to[NORMED].p,
                                         .w = in->router,
                                         .n_rows = 1,
                                         .x_stride = D,
                                         .y_stride = E,
                                         .y_f32 = true,
                                         .x_exact = true});
    if (apart) gpu_sync(b);
    b->ops->route(b, &(nbi_route_args){.ids = to[IDS].p,
                                       .weights = to[WEIGHTS].p,
                                       .logits = to[LOGITS].p,
                                       .bias = c->bias ? bias.p : NULL,
                                       .n_rows = 1,
                                       .n_experts = E,
                                       .top_k = c->top_k,
                                       .n_group = 1,
                                       .topk_group = 1,
                                       .softmax = c->softmax,
                                       .norm_topk = true,
                                       .routed_scale = 2.5f});
    if (apart) gpu_sync(b);
    ops->run(b, layer,
             &(nbi_moe_args){.out = to[OUT].p,
                             .x = to[NORMED].p,
                             .ids = to[IDS].p,
                             .weights = to[WEIGHTS].p,
                             .n_rows = 1,
                             .workspace = ws.p});
    gpu_sync(b);
    r.launches = launches(b) - before;
    for (int i = 0; i < N_RESULTS; i++) r.of[i] = gpu_read(&to[i]);
    gpu_buffer *all[] = {&x, &delta, &weight, &bias, &ws};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(all[i]);
    for (int i = 0; i < N_RESULTS; i++) gpu_free(&to[i]);
    return r;
}

static void free_result(routed_result *r)
{
    for (int i = 0; i < N_RESULTS; i++) free(r->of[i]);
}

static void check(nbi_backend *b, const routed_case *c, const char *runner)
{
    const uint32_t D = c->hidden, E = c->experts;
    routed_input in = {op_floats(D), op_floats(D), op_floats(D), op_floats(E), NULL};
    nb_error err = {0};
    mat router;
    moe_layer l;
    const nbi_moe_runner_ops *ops;
    nbi_moe_layer *layer;
    mat_make(&router, NBI_WEIGHT_BF16, E, D, false);
    moe_make(&l, c->kind, c->kind, E + c->shared, c->top_k, D, c->inter, false);
    if (c->shared) moe_share_last(&l);
    if (b->ops->weight_prepare(b, &in.router, &router.m, &err) != NB_OK ||
        nbi_moe_runner_choose(&ops, runner, b, &l.e.shape, &err) != NB_OK ||
        ops->prepare(b, &layer, &l.e, &err) != NB_OK)
        fail_msg("%s", err.text);
    op_fill(in.x, D, 3);
    op_fill(in.delta, D, 3);
    op_fill(in.weight, D, 1);
    op_fill(in.bias, E, 0.1f);
    for (uint32_t i = 0; c->x == ZEROS && i < D; i++) in.x[i] = in.delta[i] = 0;
    if (c->x == NOT_FINITE) in.x[7] = NAN;
    routed_result want = run(b, c, &in, ops, layer, &l.e.shape, true);
    for (int again = 0; again < 3; again++) { /* the counter grows */
        routed_result got = run(b, c, &in, ops, layer, &l.e.shape, false);
        for (int i = 0; i < N_RESULTS; i++)
            if (i != SUM || c->delta) assert_memory_equal(got.of[i], want.of[i], want.bytes[i]);
        if (c->two) assert_int_equal(got.launches, 2);
        free_result(&got);
    }
    if (c->x == NOT_FINITE)
        assert_int_equal(*(const int32_t *)want.of[FAULT], 1 + NBI_WHERE_POST_NORM);
    free_result(&want);
    ops->release(b, &layer);
    b->ops->weight_release(b, &in.router);
    moe_free(&l);
    mat_free(&router);
    op_free(in.x);
    op_free(in.delta);
    op_free(in.weight);
    op_free(in.bias);
}

static void test_routed(void **state)
{
    (void)state;
    static const routed_case cases[] = {
        {NBI_WEIGHT_NVFP4, 512, 64, 128, 8, true, false, true, false, PLAIN, true},
        {NBI_WEIGHT_NVFP4, 2304, 208, 48, 1, false, true, true, false, PLAIN, true},
        {NBI_WEIGHT_NVFP4, 256, 64, 100, 7, false, true, false, false, PLAIN, true},
        {NBI_WEIGHT_NVFP4, 256, 64, 64, 4, false, true, true, true, PLAIN, true},
        {NBI_WEIGHT_NVFP4, 256, 48, 72, 8, true, false, true, false, ZEROS, true},
        {NBI_WEIGHT_NVFP4, 256, 64, 64, 6, true, false, true, true, NOT_FINITE, true},
        {NBI_WEIGHT_FP8_BLOCK, 512, 64, 128, 8, false, true, true, false, PLAIN, true},
        {NBI_WEIGHT_BF16, 256, 16, 9, 3, true, false, true, false, PLAIN, true},
        {NBI_WEIGHT_BF16, 320, 64, 32, 4, true, false, true, false, PLAIN, false},
        {NBI_WEIGHT_NVFP4, 256, 16, 128, 2, true, false, true, false, PLAIN, false},
    };
    static const char *const runners[] = {"cuda", "cuda_stream", "cuda_gemv"};
    nbi_backend *b = gpu_open(&limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t r = 0; r < 3; r++) {
            routed_case c = cases[i];
            if (r == 2) c.two = false; /* has no launch for all of it */
            check(b, &c, runners[r]);
        }
    }
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_routed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
