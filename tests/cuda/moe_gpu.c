#include "cuda/moe_gpu.h"

const nbi_limits gpu_moe_limits = {.max_rows = 320,
                                   .max_seqs = 8,
                                   .max_context = 1024,
                                   .max_logit_rows = 8,
                                   .n_heads = 1,
                                   .n_kv_heads = 1,
                                   .head_dim = 64,
                                   .max_linear_cols = 4096,
                                   .max_linear_rows = 4096,
                                   .vocab = 1000};

gpu_moe gpu_moe_prepare(nbi_backend *b, const char *name, const moe_layer *l)
{
    gpu_moe p = {.b = b, .l = l};
    nb_error err = {0};
    if (nbi_moe_runner_choose(&p.ops, name, b, &l->e.shape, &err) != NB_OK ||
        p.ops->prepare(b, &p.layer, &l->e, &err) != NB_OK)
        fail_msg("%s", err.text);
    return p;
}

void gpu_moe_release(gpu_moe *p)
{
    p->ops->release(p->b, &p->layer);
    assert_null(p->layer);
}

float *gpu_moe_run(const gpu_moe *p, const float *x, const int32_t *ids, const float *weights,
                   uint32_t n)
{
    const nbi_moe_shape *s = &p->l->e.shape;
    gpu_buffer gx = gpu_floats(p->b, x, (size_t)n * s->hidden);
    gpu_buffer gi = gpu_bytes(p->b, ids, (size_t)n * s->top_k * sizeof *ids);
    gpu_buffer gw = gpu_floats(p->b, weights, (size_t)n * s->top_k);
    gpu_buffer ws = gpu_poisoned(p->b, p->ops->workspace_bytes(p->b, s, n));
    gpu_buffer out = gpu_poisoned(p->b, (size_t)n * s->hidden * sizeof(float));
    p->ops->run(
        p->b, p->layer,
        &(nbi_moe_args){
            .out = out.p, .x = gx.p, .ids = gi.p, .weights = gw.p, .n_rows = n, .workspace = ws.p});
    float *got = gpu_read(&out);
    free(gpu_read(&ws)); /* its guards */
    gpu_free(&gx);
    gpu_free(&gi);
    gpu_free(&gw);
    gpu_free(&ws);
    gpu_free(&out);
    return got;
}

gpu_moe_batch gpu_moe_batch_make(const moe_layer *l, uint32_t n)
{
    const nbi_moe_shape *s = &l->e.shape;
    gpu_moe_batch b = {.x = op_floats((size_t)n * s->hidden),
                       .weights = op_floats((size_t)n * s->top_k),
                       .ids = op_alloc((size_t)n * s->top_k * sizeof *b.ids),
                       .n = n};
    op_fill(b.x, (size_t)n * s->hidden, 1);
    moe_routing(l, b.ids, b.weights, n);
    return b;
}

void gpu_moe_batch_free(gpu_moe_batch *b)
{
    op_free(b->x);
    op_free(b->weights);
    op_free(b->ids);
}

void gpu_moe_check(const gpu_moe *p, const gpu_moe_batch *b, const float *out, double bound)
{
    const nbi_moe_shape *s = &p->l->e.shape;
    double *want = malloc(s->hidden * sizeof *want);
    for (uint32_t t = 0; t < b->n; t++) {
        moe_oracle_row(p->l, b->x + (size_t)t * s->hidden, b->ids + t * s->top_k,
                       b->weights + t * s->top_k, want);
        OP_ASSERT_ERROR(op_error(out + (size_t)t * s->hidden, want, s->hidden), bound,
                        "runner %s, %s/%s, [%u, %u], row %u of %u", p->ops->name,
                        nbi_weight_kind_name(s->kind_gate_up), nbi_weight_kind_name(s->kind_down),
                        s->inter, s->hidden, t, b->n);
    }
    free(want);
}
