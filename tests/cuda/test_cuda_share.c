/* Opportunistic expert activation on the CUDA backend: the tests of the CPU's. */
#include "cuda/gpu_util.h"
#include "kernel/share_util.h"

static nbi_backend *backend;

static int open_gpu(void **state)
{
    (void)state;
    const nbi_limits limits = {.max_rows = 64,
                               .max_seqs = 1,
                               .max_context = 64,
                               .max_logit_rows = 1,
                               .max_linear_cols = 64,
                               .max_linear_rows = 64,
                               .vocab = 64};
    backend = gpu_open(&limits);
    return 0;
}

static int close_gpu(void **state)
{
    (void)state;
    gpu_close(backend);
    return 0;
}

static void share(const nbi_share_experts_args *host)
{
    nbi_share_experts_args a = *host;
    nbi_route_args *r = &a.route;
    const size_t out = (size_t)r->n_rows * r->top_k;
    gpu_buffer logits = gpu_floats(backend, r->logits, (size_t)r->n_rows * r->n_experts);
    gpu_buffer bias = gpu_poisoned(backend, r->n_experts * sizeof(float));
    gpu_buffer ids = gpu_poisoned(backend, out * sizeof(int32_t));
    gpu_buffer weights = gpu_poisoned(backend, out * sizeof(float));
    gpu_buffer shares = gpu_bytes(backend, a.shares, r->n_rows * sizeof(int32_t));
    gpu_buffer state = gpu_bytes(backend, a.state, sizeof *a.state);
    if (r->bias) backend->ops->upload(backend, bias.p, r->bias, r->n_experts * sizeof(float));
    r->logits = logits.p;
    r->bias = r->bias ? bias.p : NULL;
    r->ids = ids.p;
    r->weights = weights.p;
    a.shares = shares.p;
    a.state = state.p;
    backend->ops->route(backend, r);
    backend->ops->share_experts(backend, &a);
    int32_t *got_ids = gpu_read(&ids);
    float *got_weights = gpu_read(&weights);
    nbi_share_state *got_state = gpu_read(&state);
    memcpy(host->route.ids, got_ids, out * sizeof *got_ids);
    memcpy(host->route.weights, got_weights, out * sizeof *got_weights);
    *host->state = *got_state;
    free(got_ids);
    free(got_weights);
    free(got_state);
    gpu_buffer *const all[] = {&logits, &bias, &ids, &weights, &shares, &state};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(all[i]);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    return share_test(share, open_gpu, close_gpu);
}
