/* The operator y = x W^T + bias: which kernel. Callers: the backend's table. */
#include "backend/cuda/cuda_linear.h"
#include "backend/cuda/indexer.h"
#include "backend/cuda/router.h"
#include "backend/cuda/split_linear.h"
#include "backend/cuda/stream_linear.h"

size_t nbi_cuda_linear_scratch(const nbi_cuda *c, const nbi_limits *limits)
{
    const size_t many = nbi_linear_many_scratch(limits->max_rows, limits->max_linear_cols);
    const size_t split = nbi_cuda_split_scratch(c, limits);
    return many > split ? many : split;
}

static void run(nbi_cuda *c, const nbi_linear_args *a)
{
    const nbi_cuda_packed *w = nbi_cuda_packed_of(a->w);
    nbi_linear_call call = {};
    call.w = *w;
    call.y = static_cast<float *>(a->y);
    call.x = static_cast<const float *>(a->x);
    call.bias = a->bias;
    call.n_tokens = a->n_rows;
    call.x_stride = a->x_stride;
    call.y_stride = a->y_stride;
    call.fast = nbi_x_fast(a->x, a->x_stride, w->cols);
    if (a->x_exact || w->kind == NBI_WEIGHT_F32) {
        nbi_linear_exact(c, &call);
        return;
    }
    if (c->base.w4a4 && w->kind == NBI_WEIGHT_NVFP4 && a->w->host.input_scale > 0)
        call.input_scale = a->w->host.input_scale;
    if (a->n_rows <= NBI_LINEAR_FEW)
        nbi_linear_few(c, &call);
    else
        nbi_linear_many(c, &call);
}

static void do_pending(nbi_cuda *c, const nbi_add_args *add)
{
    const uint32_t n = c->n_pending;
    const bool norm = c->norm_pending, router = c->router_pending, swiglu = c->swiglu_pending;
    const bool route = c->route_pending;
    const nbi_peer_view *peers = norm ? c->norm_peers : NULL;
    c->n_pending = 0;
    c->norm_pending = c->router_pending = c->route_pending = c->swiglu_pending = false;
    if (c->sum_pending) {
        c->sum_pending = false;
        nbi_cuda_sum_ranks(&c->base, &c->sum);
    }
    if (route) return nbi_cuda_router(c, &c->norm, &c->router, &c->route, peers);
    const nbi_stream_around around = {norm ? &c->norm : NULL, peers, swiglu ? &c->swiglu : NULL,
                                      add};
    if (n && !norm && !swiglu && nbi_cuda_split_fits(c, c->pending, n))
        nbi_cuda_split_linear(c, c->pending, n, add);
    else if (n)
        nbi_cuda_stream_linear(c, c->pending, n, &around);
    else if (norm)
        nbi_cuda_rmsnorm(c, &c->norm, peers);
    else if (swiglu)
        nbi_cuda_swiglu(&c->base, &c->swiglu);
    if (router) run(c, &c->router);
}

void nbi_cuda_products_now(nbi_cuda *c)
{
    do_pending(c, NULL);
}

void nbi_cuda_weigh_now(nbi_cuda *c)
{
    if (!c->index.weighs) return;
    c->index.weighs = false;
    run(c, &c->index.weigh);
}

void nbi_cuda_flush(nbi_cuda *c)
{
    do_pending(c, NULL);
    nbi_cuda_append_now(c);
    nbi_cuda_index_now(c);
}

/* Behind a norm and its router's product: all three at once, and of one row with the experts. */
void nbi_cuda_route_now(nbi_backend *b, const nbi_route_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    if (c->router_pending && nbi_cuda_router_fits(&c->router, a)) {
        c->route = *a;
        c->route_pending = true;
        if (a->n_rows > 1) nbi_cuda_flush(c);
        return;
    }
    nbi_cuda_flush(c);
    nbi_cuda_route(b, a);
}

/* A sum that only a norm wants waits for it. */
void nbi_cuda_sum_ranks_later(nbi_backend *b, const nbi_sum_ranks_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_flush(c);
    if (a->once && a->n && nbi_cuda_peers_of_norms(c, a->n)) {
        c->sum = *a;
        c->sum_pending = true;
        return;
    }
    nbi_cuda_sum_ranks(b, a);
}

/* A norm of few rows waits for the products of what it makes. */
void nbi_cuda_rmsnorm_later(nbi_backend *b, const nbi_rmsnorm_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const bool sums = c->sum_pending && nbi_cuda_norm_sums(c, a, &c->sum);
    if (sums) c->sum_pending = false;
    nbi_cuda_flush(c);
    const nbi_peer_view *peers = sums ? nbi_cuda_peers_of_norms(c, c->sum.n) : NULL;
    if (!nbi_cuda_norm_waits(c, a)) {
        nbi_cuda_rmsnorm(c, a, peers);
        return;
    }
    c->norm = *a;
    c->norm_peers = peers;
    c->norm_pending = true;
}

/* silu(gate) * up waits for the product of it. */
void nbi_cuda_swiglu_later(nbi_backend *b, const nbi_swiglu_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_flush(c);
    if (!nbi_cuda_swiglu_waits(c, a)) {
        nbi_cuda_swiglu(b, a);
        return;
    }
    c->swiglu = *a;
    c->swiglu_pending = true;
}

/* Behind a product of which nothing else is wanted: together. */
void nbi_cuda_add_now(nbi_backend *b, const nbi_add_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    if (c->n_pending == 1 && !c->norm_pending && !c->index.weighs &&
        nbi_cuda_add_behind(&c->pending[0], c->swiglu_pending ? &c->swiglu : NULL, a)) {
        do_pending(c, a);
        return;
    }
    nbi_cuda_flush(c);
    nbi_cuda_add(b, a);
}

/* Whether one launch, or a pair, can do them. */
static bool fit_together(const nbi_cuda *c, const nbi_linear_args *calls, uint32_t n)
{
    const bool apart = !c->norm_pending && !c->swiglu_pending;
    return nbi_cuda_stream_fits(c, calls, n) || (apart && nbi_cuda_split_fits(c, calls, n));
}

/* Layers of the same x (q, k and v; gate and up) come one after the other: they wait for the next
 * call that is something else, and become one launch. */
void nbi_cuda_linear(nbi_backend *b, const nbi_linear_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    if (c->waiting.what != NBI_CUDA_WAITS_NOT || c->index.appends || c->index.weighs ||
        c->index.selects || c->sum_pending)
        nbi_cuda_flush(c);
    if (!a->n_rows || !nbi_cuda_packed_of(a->w)->rows) return;
    if (c->n_pending && !c->router_pending && nbi_index_row_weighs(a)) {
        c->index.weigh = *a;
        c->index.weighs = true;
        return;
    }
    const bool apart = (c->norm_pending && !nbi_cuda_norm_before(&c->norm, a)) ||
                       (c->swiglu_pending && !nbi_cuda_swiglu_before(&c->swiglu, a));
    if (c->norm_pending && !apart && !c->router_pending && !c->n_pending &&
        nbi_cuda_router_waits(c, &c->norm, a)) {
        c->router = *a;
        c->router_pending = true;
        return;
    }
    if (c->router_pending) nbi_cuda_flush(c);
    if (!apart && c->n_pending < NBI_CUDA_PENDING) {
        c->pending[c->n_pending] = *a;
        if (fit_together(c, c->pending, c->n_pending + 1)) {
            c->n_pending++;
            return;
        }
    }
    nbi_cuda_flush(c);
    c->pending[0] = *a;
    if (fit_together(c, a, 1))
        c->n_pending = 1;
    else
        run(c, a);
}
