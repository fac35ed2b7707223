/* Ranks on devices (cuda_ranks.h): choice of the exchange, and the staged form. Callers: the
 * backend's table. */
#include "backend/cuda/cuda_ranks.h"

#include <string.h>

#include "base/log.h"

/* ---------------------------------------------------------------- staged */

static bool goes_on(const nbi_cuda *c)
{
    return c->ranks->status == NB_OK && !c->rt.error[0];
}

static void staged_sum(nbi_cuda *c, float *x, size_t n)
{
    nbi_cuda_ranks *r = c->ranks;
    for (size_t at = 0; at < n && goes_on(c); at += NBI_STAGED_VALUES) {
        const size_t m = n - at < NBI_STAGED_VALUES ? n - at : NBI_STAGED_VALUES;
        nbi_rt_download(&c->rt, r->host, x + at, m * sizeof *x);
        if (!nbi_rt_sync(&c->rt)) return;
        r->status = r->link.sum(r->link.user, r->host, m, &r->why);
        nbi_rt_upload(&c->rt, x + at, r->host, m * sizeof *x);
        nbi_rt_sync(&c->rt);
    }
}

/* Columns [at, at + m) of one row of every rank's part. */
static void staged_piece(nbi_cuda *c, const nbi_join_ranks_args *a, uint32_t row, uint32_t at,
                         uint32_t m)
{
    nbi_cuda_ranks *r = c->ranks;
    float *own = reinterpret_cast<float *>(c->stage[0]);
    nbi_rt_download(&c->rt, own, a->in + static_cast<size_t>(row) * a->in_stride + at,
                    m * sizeof *own);
    if (!nbi_rt_sync(&c->rt)) return;
    r->status = r->link.gather(r->link.user, r->host, own, m * sizeof *own, &r->why);
    for (uint32_t k = 0; k < r->link.size; k++) {
        const uint32_t n = a->first[k + 1] - a->first[k];
        if (at >= n) continue;
        nbi_rt_upload(&c->rt, a->out + static_cast<size_t>(row) * a->width + a->first[k] + at,
                      r->host + static_cast<size_t>(k) * m,
                      (n - at < m ? n - at : m) * sizeof *own);
    }
    nbi_rt_sync(&c->rt);
}

static void staged_join(nbi_cuda *c, const nbi_join_ranks_args *a)
{
    for (uint32_t row = 0; row < a->n_rows; row++)
        for (uint32_t at = 0; at < a->in_stride && goes_on(c); at += NBI_STAGED_VALUES)
            staged_piece(c, a, row, at,
                         a->in_stride - at < NBI_STAGED_VALUES ? a->in_stride - at
                                                               : NBI_STAGED_VALUES);
}

/* ---------------------------------------------------------------- operators */

void nbi_cuda_sum_ranks(nbi_backend *b, const nbi_sum_ranks_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_ASSERT(c->ranks);
    if (!a->n) return;
    if (c->ranks->one_shot)
        nbi_cuda_peers_sum(c, &c->ranks->peers, a->x, a->n);
    else
        staged_sum(c, a->x, a->n);
}

void nbi_cuda_join_ranks(nbi_backend *b, const nbi_join_ranks_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_ASSERT(c->ranks);
    if (!a->n_rows) return;
    if (c->ranks->one_shot)
        nbi_cuda_peers_join(c, &c->ranks->peers, a);
    else
        staged_join(c, a);
}

nb_status nbi_cuda_ranks_status(nbi_cuda *c, nb_error *err)
{
    const nbi_cuda_ranks *r = c->ranks;
    if (!r) return NB_OK;
    if (r->status != NB_OK) return nbi_fail(err, r->status, "%s", r->why.text);
    if (!*c->rt.stop) return NB_OK;
    NB_TRY(r->link.lost(r->link.user, err));
    return nbi_fail(err, NB_INTERNAL, "cuda: a sum over ranks was given up");
}

/* ---------------------------------------------------------------- joining */

static bool is_lost(void *user)
{
    const nbi_rank_link *link = static_cast<const nbi_rank_link *>(user);
    return link->lost(link->user, NULL) != NB_OK;
}

/* So many ranks to a device as were asked for, not more. */
static nb_status check_devices(nbi_cuda *c, nb_error *err)
{
    struct device {
        nbi_rt_device_id id;
        uint32_t host;
    };
    const nbi_rank_link *link = &c->ranks->link;
    device own = {nbi_rt_device(&c->rt), link->host}, all[NBI_DEVICE_RANKS_MAX];
    uint32_t same = 0;
    NB_TRY(link->gather(link->user, all, &own, sizeof own, err));
    for (uint32_t r = 0; r < link->size; r++) same += !memcmp(&all[r], &own, sizeof own);
    if (same <= c->ranks_per_device) return NB_OK;
    return nbi_fail(err, NB_INVALID,
                    "%u ranks have the GPU %s; expected at most %u (--ranks-per-gpu)", same,
                    own.id.text, c->ranks_per_device);
}

static nb_status choose(nbi_cuda *c, nb_error *err)
{
    nbi_cuda_ranks *r = c->ranks;
    nb_error why = {};
    const bool any = !strcmp(c->exchange, "auto");
    if (any || !strcmp(c->exchange, "one-shot")) {
        const nb_status st = nbi_cuda_peers_open(c, &r->peers, &r->link, &why);
        r->one_shot = st == NB_OK;
        if (!r->one_shot) {
            nbi_cuda_peers_close(c, &r->peers);
            NB_TRY(r->link.lost(r->link.user, err));
            *c->rt.stop = 0;
        }
        if (!r->one_shot && !any) return nbi_fail(err, st, "--gpu-exchange one-shot: %s", why.text);
    } else if (strcmp(c->exchange, "staged")) {
        return nbi_fail(err, NB_INVALID,
                        "--gpu-exchange is \"%s\"; expected auto, one-shot or staged", c->exchange);
    }
    if (r->one_shot || r->link.rank) return NB_OK;
    nbi_log(NB_LOG_WARN, "sums over ranks go through the host, which is slow%s%s%s",
            why.text[0] ? ": " : "", why.text,
            why.text[0] ? " (nibble doctor looks at how GPUs reach each other)" : "");
    return NB_OK;
}

static nb_status prepare(nbi_cuda *c, const nbi_rank_link *link, nb_error *err)
{
    nbi_cuda_ranks *r = static_cast<nbi_cuda_ranks *>(nbi_calloc(1, sizeof *r));
    if (!r) return nbi_fail(err, NB_NO_MEMORY, "cuda: out of memory");
    c->ranks = r;
    r->link = *link;
    r->host = static_cast<float *>(
        nbi_rt_alloc_host(&c->rt, link->size * NBI_STAGED_VALUES * sizeof *r->host));
    if (r->host && nbi_rt_waits_for_ranks(&c->rt, is_lost, &r->link)) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY, "cuda: cannot pin memory for sums over ranks");
}

nb_status nbi_cuda_join(nbi_backend *b, const nbi_rank_link *link, nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nb_error own = {};
    size_t free_bytes = 0, total = 0;
    NB_ASSERT(!c->ranks && link->size > 1 && link->size <= NBI_DEVICE_RANKS_MAX);
    nb_status st = prepare(c, link, &own);
    NB_TRY(link->agree(link->user, st, &own, err));
    st = check_devices(c, &own);
    NB_TRY(link->agree(link->user, st, &own, err));
    NB_TRY(choose(c, err));
    if (!c->ranks->one_shot) c->graphs = c->rt.dependent = false; /* the host takes part */
    if (c->ranks->one_shot && !link->rank)
        nbi_log(NB_LOG_INFO, "sums over %u ranks: one-shot between GPUs, 24 KB in %.1f us",
                link->size, static_cast<double>(c->ranks->peers.latency_us));
    /* all have taken what they need, and nobody goes on before all have looked */
    NB_TRY(link->agree(link->user, NB_OK, NULL, err));
    if (!nbi_rt_memory(&c->rt, &free_bytes, &total))
        st = nbi_fail(&own, NB_INTERNAL, "cuda: %s", c->rt.error);
    c->base.memory_bytes = free_bytes / c->ranks_per_device;
    return link->agree(link->user, st, &own, err);
}

void nbi_cuda_leave(nbi_cuda *c)
{
    nbi_cuda_ranks *r = c->ranks;
    if (!r) return;
    nbi_cuda_peers_close(c, &r->peers);
    nbi_rt_free_host(&c->rt, r->host);
    nbi_rt_waits_for_ranks(&c->rt, NULL, NULL);
    nbi_free(r);
    c->ranks = NULL;
}
