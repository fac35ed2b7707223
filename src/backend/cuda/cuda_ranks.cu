/* Ranks on devices (cuda_ranks.h): choice of the exchange, and the staged form. Callers: the
 * backend's table. */
#include "backend/cuda/cuda_ranks.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
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

/* --disable-single-batch-overlap: launches of an exchange, and the one behind it. */
static void begin_apart(nbi_cuda *c)
{
    if (c->apart_sums) c->rt.n_apart = UINT32_MAX;
}

static void end_apart(nbi_cuda *c)
{
    if (c->apart_sums) c->rt.n_apart = 1;
}

void nbi_cuda_sum_ranks(nbi_backend *b, const nbi_sum_ranks_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_ASSERT(c->ranks);
    if (!a->n) return;
    const nbi_cuda_ranks *r = c->ranks;
    begin_apart(c);
    if (r->use_nccl && (!r->one_shot || a->n >= r->nccl_from))
        nbi_cuda_nccl_sum(c, &r->nccl, a->x, a->n);
    else if (r->one_shot)
        nbi_cuda_peers_sum(c, &r->peers, a->x, a->n);
    else
        staged_sum(c, a->x, a->n);
    end_apart(c);
}

/* Blocks of ranks that share a GPU might not be there together. More than two ranks would want more
 * registers than products have, or wait for one after the other. */
const nbi_peer_view *nbi_cuda_peers_of_norms(const nbi_cuda *c, size_t n)
{
    const nbi_cuda_ranks *r = c->ranks;
    NB_ASSERT(r);
    if (!r->norms_sum || !r->one_shot || r->link.size != 2 || c->apart_sums) return NULL;
    if (r->use_nccl && n >= r->nccl_from) return NULL;
    return NBI_EMULATED || c->ranks_per_device == 1 ? &r->peers.norms : NULL;
}

void nbi_cuda_join_ranks(nbi_backend *b, const nbi_join_ranks_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_ASSERT(c->ranks);
    if (!a->n_rows) return;
    const nbi_cuda_ranks *r = c->ranks;
    const size_t n = static_cast<size_t>(a->n_rows) * a->in_stride;
    begin_apart(c);
    if (r->use_nccl && (!r->one_shot || n >= r->nccl_from))
        nbi_cuda_nccl_join(c, &r->nccl, a);
    else if (r->one_shot)
        nbi_cuda_peers_join(c, &r->peers, a);
    else
        staged_join(c, a);
    end_apart(c);
}

nb_status nbi_cuda_ranks_status(nbi_cuda *c, nb_error *err)
{
    const nbi_cuda_ranks *r = c->ranks;
    if (!r) return NB_OK;
    if (r->status != NB_OK) return nbi_fail(err, r->status, "%s", r->why.text);
    if (!*c->rt.stop) return NB_OK;
    NB_TRY(r->link.lost(r->link.user, err));
    if (r->nccl.failed[0]) return nbi_fail(err, NB_INTERNAL, "%s", r->nccl.failed);
    return nbi_fail(err, NB_INTERNAL, "cuda: a sum over ranks was given up");
}

/* ---------------------------------------------------------------- joining */

/* Asked while the host waits. What waits within NCCL does not look at rt.stop. */
static bool is_lost(void *user)
{
    nbi_cuda *c = static_cast<nbi_cuda *>(user);
    nbi_cuda_ranks *r = c->ranks;
    const bool gone = r->link.lost(r->link.user, NULL) != NB_OK || nbi_cuda_nccl_failed(&r->nccl);
    if (gone || (c->rt.until_ns && nbi_now_ns() > c->rt.until_ns)) nbi_cuda_nccl_abort(c, &r->nccl);
    return gone;
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

static void by_peers(nbi_cuda *c, float *x, size_t n)
{
    nbi_cuda_peers_sum(c, &c->ranks->peers, x, n);
}

static void by_nccl(nbi_cuda *c, float *x, size_t n)
{
    nbi_cuda_nccl_sum(c, &c->ranks->nccl, x, n);
}

/* Behind a failure that is nobody's death another form may be tried. */
static nb_status goes_on_without(nbi_cuda *c, nb_error *err)
{
    NB_TRY(c->ranks->link.lost(c->ranks->link.user, err));
    *c->rt.stop = 0;
    c->rt.error[0] = '\0';
    return NB_OK;
}

static nb_status open_peers(nbi_cuda *c, nb_error *why, nb_error *err)
{
    nbi_cuda_ranks *r = c->ranks;
    nb_status st = nbi_cuda_peers_open(c, &r->peers, &r->link, why);
    if (st == NB_OK) st = nbi_cuda_prove_sums(c, by_peers, why);
    r->one_shot = st == NB_OK;
    if (r->one_shot) return NB_OK;
    nbi_cuda_peers_close(c, &r->peers);
    return goes_on_without(c, err);
}

static nb_status open_nccl(nbi_cuda *c, bool slices, nb_error *why, nb_error *err)
{
    nbi_cuda_ranks *r = c->ranks;
    nb_status st = nbi_cuda_nccl_open(c, &r->nccl, &r->link, slices, why);
    if (st == NB_OK) st = nbi_cuda_prove_sums(c, by_nccl, why);
    r->use_nccl = st == NB_OK;
    if (r->use_nccl) return NB_OK;
    nbi_cuda_nccl_close(c, &r->nccl);
    return goes_on_without(c, err);
}

static const char *const exchanges[] = {"auto", "one-shot",    "one-shot-norms",
                                        "nccl", "nccl-slices", "staged"};

/* Opens what the name allows; a form that was asked for by its own name has to be there. */
static nb_status choose(nbi_cuda *c, nb_error *one_shot_why, nb_error *nccl_why, nb_error *err)
{
    nbi_cuda_ranks *r = c->ranks;
    const char *name = c->exchange;
    const bool any = !strcmp(name, "auto"), slices = !strcmp(name, "nccl-slices");
    bool known = false;
    for (const char *k : exchanges) known = known || !strcmp(name, k);
    if (!known)
        return nbi_fail(err, NB_INVALID,
                        "--gpu-exchange is \"%s\"; expected auto, one-shot, nccl or staged", name);
    r->norms_sum = !strcmp(name, "one-shot-norms");
    if (any || r->norms_sum || !strcmp(name, "one-shot")) {
        NB_TRY(open_peers(c, one_shot_why, err));
        if (!r->one_shot && !any)
            return nbi_fail(err, NB_UNSUPPORTED, "--gpu-exchange %s: %s", name, one_shot_why->text);
    }
    if (any || slices || !strcmp(name, "nccl")) {
        NB_TRY(open_nccl(c, slices, nccl_why, err));
        if (!r->use_nccl && !any)
            return nbi_fail(err, NB_UNSUPPORTED, "--gpu-exchange %s: %s", name, nccl_why->text);
    }
    return NB_OK;
}

/* The bound between the two, and what sums take. */
static nb_status measure(nbi_cuda *c, nbi_exchange_times *t, nb_error *err)
{
    nbi_cuda_ranks *r = c->ranks;
    *t = {{3072, 6144, 12288, 24576, 98304, 393216, 1572864, 6291456}, {}, {}};
    if (NBI_EMULATED) /* it takes long, and says nothing */
        for (uint32_t i = 0; i < NBI_EXCHANGE_SIZES; i++) t->values[i] = 256 * (i + 1);
    r->nccl_from = SIZE_MAX;
    if (!r->one_shot && !r->use_nccl) return NB_OK;
    NB_TRY(
        nbi_cuda_time_sums(c, r->one_shot ? by_peers : NULL, r->use_nccl ? by_nccl : NULL, t, err));
    if (r->one_shot && r->use_nccl) r->nccl_from = nbi_exchange_nccl_from(t);
    return NB_OK;
}

/* One line of rank 0: what is used, and why not something else. */
static void tell(const nbi_cuda *c, const nbi_exchange_times *t, const nb_error *one_shot_why,
                 const nb_error *nccl_why)
{
    const nbi_cuda_ranks *r = c->ranks;
    char times[400], what[96] = "";
    size_t at = 0;
    nbi_exchange_describe(t, times, sizeof times);
    if (!r->one_shot && !r->use_nccl) {
        const bool why = one_shot_why->text[0] || nccl_why->text[0];
        nbi_log(NB_LOG_WARN, "sums over ranks go through the host, which is slow%s%s%s%s%s",
                why ? ": " : "", one_shot_why->text, nccl_why->text[0] ? "; " : "", nccl_why->text,
                why ? " (nibble doctor looks at how GPUs reach each other)" : "");
        return;
    }
    if (r->one_shot) at += (size_t)snprintf(what, sizeof what, "one-shot between GPUs");
    if (r->use_nccl)
        at += (size_t)snprintf(what + at, sizeof what - at, "%sNCCL %s", at ? ", " : "",
                               r->nccl.api->version);
    if (r->one_shot && r->use_nccl && r->nccl_from == SIZE_MAX)
        snprintf(what + at, sizeof what - at, " for none");
    else if (r->one_shot && r->use_nccl)
        snprintf(what + at, sizeof what - at, " from %zu KB on",
                 r->nccl_from * sizeof(float) / 1024);
    nbi_log(NB_LOG_INFO, "sums over %u ranks: %s: %s%s%s", r->link.size, what, times,
            nccl_why->text[0] ? "; " : "", nccl_why->text);
}

static nb_status prepare(nbi_cuda *c, const nbi_rank_link *link, nb_error *err)
{
    nbi_cuda_ranks *r = static_cast<nbi_cuda_ranks *>(nbi_calloc(1, sizeof *r));
    if (!r) return nbi_fail(err, NB_NO_MEMORY, "cuda: out of memory");
    c->ranks = r;
    r->link = *link;
    r->host = static_cast<float *>(
        nbi_rt_alloc_host(&c->rt, link->size * NBI_STAGED_VALUES * sizeof *r->host));
    if (r->host && nbi_rt_waits_for_ranks(&c->rt, is_lost, c)) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY, "cuda: cannot pin memory for sums over ranks");
}

nb_status nbi_cuda_join(nbi_backend *b, const nbi_rank_link *link, nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nb_error own = {}, one_shot_why = {}, nccl_why = {};
    nbi_exchange_times times;
    size_t free_bytes = 0, total = 0;
    NB_ASSERT(!c->ranks && link->size > 1 && link->size <= NBI_DEVICE_RANKS_MAX);
    nb_status st = prepare(c, link, &own);
    NB_TRY(link->agree(link->user, st, &own, err));
    st = check_devices(c, &own);
    NB_TRY(link->agree(link->user, st, &own, err));
    NB_TRY(choose(c, &one_shot_why, &nccl_why, err));
    if (!c->ranks->one_shot && !c->ranks->use_nccl)
        c->graphs = c->rt.dependent = false; /* the host takes part */
    NB_TRY(measure(c, &times, err));
    if (!link->rank) tell(c, &times, &one_shot_why, &nccl_why);
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
    nbi_cuda_nccl_close(c, &r->nccl);
    nbi_cuda_peers_close(c, &r->peers);
    nbi_rt_free_host(&c->rt, r->host);
    nbi_rt_waits_for_ranks(&c->rt, NULL, NULL);
    nbi_free(r);
    c->ranks = NULL;
}
