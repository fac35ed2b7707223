/* Routing on the CUDA backend: the tests of the CPU's. */
#include "cuda/gpu_util.h"
#include "kernel/route_util.h"

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

static void route(const nbi_route_args *host)
{
    nbi_route_args a = *host;
    const size_t out = (size_t)a.n_rows * a.top_k;
    gpu_buffer logits = gpu_floats(backend, a.logits, (size_t)a.n_rows * a.n_experts);
    gpu_buffer bias = gpu_poisoned(backend, a.n_experts * sizeof(float));
    gpu_buffer ids = gpu_poisoned(backend, out * sizeof(int32_t));
    gpu_buffer weights = gpu_poisoned(backend, out * sizeof(float));
    if (a.bias) backend->ops->upload(backend, bias.p, a.bias, a.n_experts * sizeof(float));
    a.logits = logits.p;
    a.bias = a.bias ? bias.p : NULL;
    a.ids = ids.p;
    a.weights = weights.p;
    backend->ops->route(backend, &a);
    int32_t *got_ids = gpu_read(&ids);
    float *got_weights = gpu_read(&weights);
    memcpy(host->ids, got_ids, out * sizeof *got_ids);
    memcpy(host->weights, got_weights, out * sizeof *got_weights);
    free(got_ids);
    free(got_weights);
    gpu_free(&logits);
    gpu_free(&bias);
    gpu_free(&ids);
    gpu_free(&weights);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    return route_test(route, open_gpu, close_gpu);
}
