/* The engine's memory: planned from the headers, printed, reserved before the first request. Called
 * by engine.c.
 *
 * Weights are mapped files. The workspace is committed when it is reserved, the KV pages by a
 * thread of their own that begins then and ends after a moment (a second for some 10 GB): a machine
 * that cannot give what was planned shows it at the start and not hours later. What requests take
 * comes from the heap, and never more than was planned for them: a submit beyond it is refused. */
#include <inttypes.h>
#include <stdio.h>

#include "base/log.h"
#include "engine/engine.h"

#define KV_CONTEXTS_DEFAULT 4u /* full contexts the pool holds by default, memory allowing */
#define FRACTION_DEFAULT                                              \
    0.9 /* of what is free: the rest is for the server, the tokenizer \
           and what the system needs */
#define REQUESTS_FRACTION \
    0.05 /* of what is free, for requests, unless the running ones need more */

/* A huge page: the lock of the address space is held for a piece, and whoever maps waits for it. */
#define COMMIT_PIECE ((size_t)2 << 20)

typedef struct memory_plan {
    uint64_t available, weights, workspace, batches, requests, page, tree_page;
    uint64_t left; /* for pages */
    uint32_t n_pages;
} memory_plan;

static uint32_t step_rows(const nb_engine *e)
{
    return e->chunk_size + e->max_running * (1 + e->n_draft_steps);
}

static uint32_t step_logit_rows(const nb_engine *e)
{
    return e->max_running * (1 + e->n_draft_steps) + NBI_PROMPT_LOGIT_ROWS;
}

static double gb(uint64_t bytes)
{
    return (double)bytes / 1e9;
}

static uint64_t memory_available(const nb_engine *e)
{
    double fraction =
        e->options.memory_fraction > 0 ? e->options.memory_fraction : FRACTION_DEFAULT;
    if (e->options.memory_bytes) return e->options.memory_bytes;
    uint64_t device = e->backend->memory_bytes;
    uint32_t sharers = e->options.ranks ? nbi_comm_local_size(e->options.ranks) : 1;
    return (uint64_t)((double)(device ? device : nbi_memory_available() / sharers) * fraction);
}

static nb_status check_weights(const nb_engine *e, uint64_t weight_bytes, nb_error *err)
{
    uint64_t available = memory_available(e);
    if (!available || weight_bytes < available) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY,
                    "%s: the weights take %.2f GB, %.2f GB of memory are available "
                    "(--mem-fraction-static says how much of what is free)",
                    e->options.model_dir, gb(weight_bytes), gb(available));
}

nb_status nbi_engine_check_weights(void *user, const nbi_config *config, uint64_t weight_bytes,
                                   nb_error *err)
{
    const nb_engine *e = user;
    nb_error own = {0};
    (void)config;
    nb_status st = check_weights(e, weight_bytes, &own);
    if (e->options.ranks) return nbi_comm_agree(e->options.ranks, st, &own, err);
    if (st != NB_OK && err) *err = own;
    return st;
}

/* ---------------------------------------------------------------- plan */

/* What all requests together may take: room for every place in the running list and the queue, but
 * not more than a share of the memory, unless the running ones alone need it. */
static uint64_t plan_requests(const nb_engine *e, uint64_t available, uint32_t max_context)
{
    const nb_sampling all = {.frequency_penalty = 1, .repetition_penalty = 1};
    uint32_t vocab = nbi_model_config(e->model)->vocab;
    uint64_t text = (10u + e->n_draft_steps) * (2u * e->max_token_bytes + 64u) + 2048u;
    uint64_t one = nbi_request_bytes(max_context, text);
    uint64_t running = e->max_running * (one + nbi_penalties_bytes(&all, vocab, max_context));
    uint64_t wanted = running + e->max_queued * one;
    uint64_t share = (uint64_t)((double)available * REQUESTS_FRACTION);
    if (!available || wanted <= share) return wanted;
    return share > running ? share : running;
}

static void print_row(const char *what, uint64_t bytes, const char *note)
{
    nbi_log(NB_LOG_INFO, "memory: %-14s %10.1f MB  %s", what, (double)bytes / 1e6, note);
}

static void print_plan(const nb_engine *e, const memory_plan *p)
{
    char note[160];
    uint64_t tokens = (uint64_t)p->n_pages * NBI_PAGE_TOKENS;
    bool device = e->backend->memory_bytes > 0;
    print_row("weights", p->weights, device ? "on the device" : "mapped files");
    snprintf(note, sizeof note, "steps of %u rows: %u prompt tokens, %u running requests",
             step_rows(e), e->chunk_size, e->max_running);
    print_row("workspace", p->workspace, note);
    snprintf(note, sizeof note, "%u pages of %u tokens = %" PRIu64 " tokens, %.1f requests of %u",
             p->n_pages, NBI_PAGE_TOKENS, tokens, (double)tokens / e->max_context, e->max_context);
    print_row("KV pages", p->n_pages * p->page, note);
    print_row("prefix tree", p->n_pages * p->tree_page,
              e->options.disable_prefix_cache ? "off" : "one node per page");
    print_row("batches", p->batches, "");
    snprintf(note, sizeof note, "at most: %u running and %u waiting requests", e->max_running,
             e->max_queued);
    print_row("requests", p->requests, note);
    uint64_t host = p->batches + p->requests + p->n_pages * p->tree_page;
    uint64_t all = p->weights + p->workspace + p->n_pages * p->page + (device ? 0 : host);
    snprintf(note, sizeof note, "of %.1f MB available%s", (double)p->available / 1e6,
             device ? " on the device; the rest is the host's" : "");
    print_row("together", all, p->available ? note : "");
}

static nb_status no_room(const memory_plan *p, uint64_t pages, nb_error *err)
{
    return nbi_fail(
        err, NB_NO_MEMORY,
        "weights %.2f GB + workspace %.2f GB + requests %.2f GB + KV cache %.2f GB exceed the "
        "%.2f GB available; lower --max-total-tokens (64 of them take %" PRIu64
        " bytes), --context-length, --chunked-prefill-size, --max-running-requests or "
        "--max-queued-requests, or raise --mem-fraction-static",
        gb(p->weights), gb(p->workspace), gb(p->requests + p->batches), gb(pages * p->page),
        gb(p->available), p->page);
}

/* Sizes the KV pool into what the rest leaves, and the longest context into the pool. */
static nb_status plan_pages(nb_engine *e, memory_plan *p, uint32_t limit, nb_error *err)
{
    uint64_t each = p->page + (e->backend->memory_bytes ? 0 : p->tree_page);
    uint64_t fit = p->available ? p->left / each : UINT32_MAX;
    uint64_t want =
        e->options.kv_tokens ? e->options.kv_tokens : (uint64_t)KV_CONTEXTS_DEFAULT * limit;
    want = (want + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS;
    if (want > INT32_MAX) {
        return nbi_fail(err, NB_INVALID,
                        "--max-total-tokens: %" PRIu64 " tokens; expected at most %" PRIu64,
                        e->options.kv_tokens, (uint64_t)INT32_MAX * NBI_PAGE_TOKENS);
    }
    if (!fit || (e->options.kv_tokens && want > fit)) return no_room(p, want, err);
    p->n_pages = (uint32_t)(want < fit ? want : fit);
    uint64_t tokens = (uint64_t)p->n_pages * NBI_PAGE_TOKENS;
    e->max_context = tokens < limit ? (uint32_t)tokens : limit;
    if (e->options.max_context <= e->max_context) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY,
                    "max_context is %u, but the KV pool of %" PRIu64
                    " tokens holds no such request; lower --context-length or raise "
                    "--max-total-tokens",
                    e->options.max_context, tokens);
}

static nb_status plan_memory(nb_engine *e, memory_plan *p, nbi_dtype kv_dtype, nb_error *err)
{
    const nbi_config *c = nbi_model_config(e->model);
    uint32_t limit = c->max_positions, rows = step_rows(e), logits = step_logit_rows(e);
    if (e->options.max_context > limit) {
        return nbi_fail(err, NB_INVALID,
                        "max_context (--context-length) is %u; the model's limit is %u",
                        e->options.max_context, limit);
    }
    if (e->options.max_context) limit = e->options.max_context;
    p->available = memory_available(e);
    p->weights = nbi_model_weight_bytes(e->model);
    p->workspace = nbi_model_workspace_bytes(e->model, rows, e->max_running, logits, limit);
    p->batches = nbi_step_batch_bytes(rows, e->max_running, logits, limit);
    if (e->n_draft_steps) p->batches *= 2;
    p->batches += nbi_owed_bytes(e->max_running, logits);
    if (e->options.ranks) p->batches += nbi_ranks_order_bytes(rows, e->max_running, logits, limit);
    bool device = e->backend->memory_bytes > 0;
    p->requests = plan_requests(e, device ? nbi_memory_available() : p->available, limit);
    p->page = nbi_kv_page_bytes(nbi_model_local(e->model), kv_dtype);
    p->tree_page = sizeof(nbi_prefix_node) + 2 * sizeof(int32_t);
    uint64_t fixed = p->weights + p->workspace + (device ? 0 : p->batches + p->requests);
    p->left = p->available > fixed ? p->available - fixed : 0;
    return plan_pages(e, p, limit, err);
}

/* ---------------------------------------------------------------- reserve */

static void commit_all(nb_engine *e)
{
    char *base = e->kv.memory;
    for (size_t at = 0; at < e->kv.bytes && !atomic_load(&e->stopping); at += COMMIT_PIECE) {
        size_t n = e->kv.bytes - at < COMMIT_PIECE ? e->kv.bytes - at : COMMIT_PIECE;
        if (e->commit(e->backend, base + at, n)) continue;
        nb_error why;
        nbi_fail(&why, NB_NO_MEMORY,
                 "the system gives %.2f GB of the %.2f GB for the KV cache; lower "
                 "--max-total-tokens or --mem-fraction-static",
                 gb(at), gb(e->kv.bytes));
        nbi_engine_break(e, &why);
        return;
    }
}

static void *commit_main(void *arg)
{
    nb_engine *e = arg;
    commit_all(e);
    sem_post(&e->commit_done);
    return NULL;
}

/* Detached: a process that ends while it loads joins nobody. */
void nbi_engine_start_commit(nb_engine *e)
{
    pthread_attr_t attr;
    pthread_t thread;
    e->commit = e->backend->ops->commit; /* the table may be exchanged while steps are timed */
    if (!e->commit) return;
    if (sem_init(&e->commit_done, 0, 0) == 0 && pthread_attr_init(&attr) == 0) {
        (void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        e->has_commit_thread = pthread_create(&thread, &attr, commit_main, e) == 0;
        pthread_attr_destroy(&attr);
    }
    if (!e->has_commit_thread) commit_all(e);
}

void nbi_engine_stop_commit(nb_engine *e)
{
    if (!e->has_commit_thread) return;
    while (sem_wait(&e->commit_done) != 0) {} /* EINTR */
    sem_destroy(&e->commit_done);
    e->has_commit_thread = false;
}

/* All ranks have as many pages as the one with the least room. */
static nb_status agree_on_pages(nb_engine *e, memory_plan *p, nb_status st, nb_error *own,
                                nb_error *err)
{
    typedef struct size {
        uint32_t pages, context;
    } size;
    nb_ranks *ranks = e->options.ranks;
    size mine, *all;
    NB_TRY(nbi_comm_agree(ranks, st, own, err));
    mine = (size){p->n_pages, e->max_context};
    all = nbi_calloc(nbi_comm_size(ranks), sizeof *all);
    if (!all) return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    st = nbi_comm_gather(ranks, all, &mine, sizeof mine, err);
    for (uint32_t r = 0; r < nbi_comm_size(ranks) && st == NB_OK; r++) {
        p->n_pages = nbi_min_u32(p->n_pages, all[r].pages);
        e->max_context = nbi_min_u32(e->max_context, all[r].context);
    }
    nbi_free(all);
    return st;
}

nb_status nbi_engine_reserve(nb_engine *e, nbi_dtype kv_dtype, nb_error *err)
{
    memory_plan p = {0};
    if (e->options.ranks) {
        nb_error own = {0};
        nb_status st = plan_memory(e, &p, kv_dtype, &own);
        NB_TRY(agree_on_pages(e, &p, st, &own, err));
    } else {
        NB_TRY(plan_memory(e, &p, kv_dtype, err));
    }
    print_plan(e, &p);
    e->workspace_bytes = p.workspace;
    e->request_bytes_max = p.requests;
    e->tree_bytes = p.n_pages * p.tree_page;
    e->batch_bytes = p.batches;
    e->available_bytes = p.available;
    uint32_t rows = step_rows(e), logits = step_logit_rows(e);
    NB_TRY(nbi_model_reserve(e->model, rows, e->max_running, logits, e->max_context, err));
    NB_TRY(nbi_kv_create(&e->kv, e->backend, nbi_model_local(e->model), kv_dtype, p.n_pages, err));
    NB_TRY(nbi_kvpool_init(&e->pool, p.n_pages, err));
    NB_TRY(nbi_prefix_init(&e->prefix, p.n_pages, 64, err));
    NB_TRY(nbi_step_batch_create(&e->batch, rows, e->max_running, logits, e->max_context, err));
    if (e->n_draft_steps)
        NB_TRY(
            nbi_step_batch_create(&e->drafting, rows, e->max_running, logits, e->max_context, err));
    e->batch.n_valid = e->drafting.n_valid = e->n_valid_ids;
    NB_TRY(nbi_owed_create(e, logits, err));
    NB_TRY(nbi_ranks_init(e, rows, logits, err));
    e->turns = nbi_calloc(NBI_CLIENTS, sizeof *e->turns);
    e->running = nbi_calloc(e->max_running, sizeof *e->running);
    if (!e->running || !e->turns) return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    return NB_OK;
}
