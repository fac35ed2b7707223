/* Opening an engine: options, memory plan, the thread; and the small read-only calls. */
#include "engine/engine.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"

#define KV_CONTEXTS_DEFAULT 4u /* full contexts the pool holds by default, memory allowing */
#define MEMORY_SHARE                                                                           \
    0.9 /* of what is free: the rest is for the server, the tokenizer and the page cache's own \
           needs */

void nb_engine_options_default(nb_engine_options *o)
{
    *o = (nb_engine_options){.device = "auto",
                             .moe_runner = "auto",
                             .cpu_level = "auto",
                             .activations = "weight-only",
                             .kv_dtype = "auto",
                             .max_running = 64,
                             .chunk_size = 512};
}

/* ---------------------------------------------------------------- options */

static nb_status check_options(const nb_engine_options *o, nb_error *err)
{
    if (!o->model_dir || !o->model_dir[0])
        return nbi_fail(err, NB_INVALID, "model_dir is empty; expected a folder with config.json");
    if (!o->max_running || o->max_running > 4096) {
        return nbi_fail(err, NB_INVALID, "max_running is %u; expected 1 to 4096", o->max_running);
    }
    if (!o->chunk_size || o->chunk_size > 65536) {
        return nbi_fail(err, NB_INVALID, "chunk_size is %u; expected 1 to 65536", o->chunk_size);
    }
    if (o->n_threads > 1024)
        return nbi_fail(err, NB_INVALID, "n_threads is %u; expected at most 1024", o->n_threads);
    return NB_OK;
}

static const char *keep_string(nb_engine *e, const char *s, const char *fallback)
{
    const char *from = s && s[0] ? s : fallback;
    return nbi_arena_strndup(&e->strings, from, strlen(from));
}

static const char *last_part(nb_engine *e, const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    size_t begin = n;
    while (begin > 0 && path[begin - 1] != '/') begin--;
    return nbi_arena_strndup(&e->strings, path + begin, n - begin);
}

static nb_status parse_policy(bool *lpm, const char *name, nb_error *err)
{
    *lpm = name && !strcmp(name, "lpm");
    if (!name || *lpm || !strcmp(name, "fcfs")) return NB_OK;
    return nbi_fail(err, NB_INVALID, "schedule_policy is \"%s\"; expected fcfs or lpm", name);
}

static nb_status copy_options(nb_engine *e, const nb_engine_options *o, nb_error *err)
{
    NB_TRY(check_options(o, err));
    e->options = *o;
    e->options.model_dir = keep_string(e, o->model_dir, "");
    e->options.device = keep_string(e, o->device, "auto");
    e->options.moe_runner = keep_string(e, o->moe_runner, "auto");
    e->options.cpu_level = keep_string(e, o->cpu_level, "auto");
    e->options.activations = keep_string(e, o->activations, "weight-only");
    e->options.kv_dtype = keep_string(e, o->kv_dtype, "auto");
    e->options.speculative_algorithm = keep_string(e, o->speculative_algorithm, "none");
    e->model_name = last_part(e, o->model_dir);
    if (!e->model_name || !e->options.kv_dtype)
        return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    NB_TRY(parse_policy(&e->lpm, o->schedule_policy, err));
    e->max_running = o->max_running;
    e->chunk_size = o->chunk_size;
    return NB_OK;
}

static nb_status parse_activations(bool *w4a4, const char *name, nb_error *err)
{
    if (!strcmp(name, "weight-only") || !strcmp(name, "w4a4")) {
        *w4a4 = name[1] == '4';
        return NB_OK;
    }
    return nbi_fail(err, NB_INVALID, "activations is \"%s\"; expected weight-only or w4a4", name);
}

static nb_status parse_kv_dtype(nbi_dtype *out, const char *name, nbi_cpu_level level,
                                nb_error *err)
{
    if (!strcmp(name, "auto")) {
        *out = level == NBI_CPU_REFERENCE ? NBI_F32 : NBI_BF16;
    } else if (!strcmp(name, "bf16") || !strcmp(name, "bfloat16")) {
        *out = NBI_BF16;
    } else if (!strcmp(name, "f32") || !strcmp(name, "float32")) {
        *out = NBI_F32;
    } else {
        return nbi_fail(err, NB_INVALID, "kv_dtype is \"%s\"; expected auto, bf16 or f32", name);
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- memory plan */

typedef struct memory_plan {
    uint64_t available, weights, workspace, kv, page;
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

static uint64_t memory_available(const nb_engine *e)
{
    if (e->options.memory_bytes) return e->options.memory_bytes;
    return (uint64_t)((double)nbi_memory_available() * MEMORY_SHARE);
}

/* Called when the headers are read and no weight is: refuses what cannot fit. */
static nb_status check_weights_fit(void *user, const nbi_config *config, uint64_t weight_bytes,
                                   nb_error *err)
{
    const nb_engine *e = user;
    uint64_t available = memory_available(e);
    (void)config;
    if (!available || weight_bytes < available) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY,
                    "%s: the weights take %.2f GB, %.2f GB of memory are available",
                    e->options.model_dir, (double)weight_bytes / 1e9, (double)available / 1e9);
}

static void print_plan(const nb_engine *e, const memory_plan *p)
{
    nbi_log(NB_LOG_INFO,
            "memory: weights %.2f GB (mapped), workspace %.2f GB, KV %.2f GB = %u pages of %u "
            "tokens, %.1f full contexts of %u",
            (double)p->weights / 1e9, (double)p->workspace / 1e9, (double)p->kv / 1e9, p->n_pages,
            NBI_PAGE_TOKENS, (double)p->n_pages * NBI_PAGE_TOKENS / e->max_context, e->max_context);
}

/* Sizes the KV pool into what weights and workspace leave, and the longest context into the pool.
 */
static nb_status plan_memory(nb_engine *e, memory_plan *p, nbi_dtype kv_dtype, nb_error *err)
{
    const nbi_config *c = nbi_model_config(e->model);
    uint32_t limit = c->max_positions;
    if (e->options.max_context > limit) {
        return nbi_fail(err, NB_INVALID, "max_context is %u; the model's limit is %u",
                        e->options.max_context, limit);
    }
    if (e->options.max_context) limit = e->options.max_context;
    p->available = memory_available(e);
    p->weights = nbi_model_weight_bytes(e->model);
    p->workspace = nbi_model_workspace_bytes(e->model, step_rows(e), e->max_running,
                                             step_logit_rows(e), limit);
    p->page = nbi_kv_page_bytes(c, kv_dtype);
    uint64_t left =
        p->available > p->weights + p->workspace ? p->available - p->weights - p->workspace : 0;
    uint64_t fit = p->available ? left / p->page : UINT32_MAX;
    uint64_t want =
        e->options.kv_tokens ? e->options.kv_tokens : (uint64_t)KV_CONTEXTS_DEFAULT * limit;
    want = (want + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS;
    if (!fit || (e->options.kv_tokens && want > fit)) {
        return nbi_fail(err, NB_NO_MEMORY,
                        "weights %.2f GB + workspace %.2f GB + KV cache %.2f GB exceed the %.2f GB "
                        "available; lower the KV tokens (each "
                        "page of 64 takes %" PRIu64
                        " bytes), the chunk size or the number of running requests",
                        (double)p->weights / 1e9, (double)p->workspace / 1e9,
                        (double)(want * p->page) / 1e9, (double)p->available / 1e9, p->page);
    }
    p->n_pages = (uint32_t)(want < fit ? want : fit);
    p->kv = p->n_pages * p->page;
    uint64_t tokens = (uint64_t)p->n_pages * NBI_PAGE_TOKENS;
    e->max_context = tokens < limit ? (uint32_t)tokens : limit;
    if (e->options.max_context > e->max_context) {
        return nbi_fail(err, NB_NO_MEMORY,
                        "max_context is %u, but the KV pool of %" PRIu64
                        " tokens holds no such request",
                        e->options.max_context, tokens);
    }
    print_plan(e, p);
    return NB_OK;
}

/* ---------------------------------------------------------------- open */

static nb_status open_backend(nb_engine *e, nbi_dtype *kv_dtype, nb_error *err)
{
    nbi_backend_options bo = {.n_threads = e->options.n_threads};
    NB_TRY(nbi_cpu_level_parse(&bo.cpu_level, e->options.cpu_level, err));
    NB_TRY(parse_activations(&bo.w4a4, e->options.activations, err));
    NB_TRY(parse_kv_dtype(kv_dtype, e->options.kv_dtype, bo.cpu_level, err));
    return nbi_backend_open(&e->backend, e->options.device, &bo, err);
}

/* Drafting is asked for by name; a checkpoint without an MTP layer serves without it. */
static nb_status parse_drafting(nb_engine *e, nb_error *err)
{
    const char *name = e->options.speculative_algorithm;
    uint32_t steps = e->options.speculative_num_steps ? e->options.speculative_num_steps : 3;
    if (!strcmp(name, "none")) return NB_OK;
    if (strcmp(name, "mtp") && strcmp(name, "NEXTN") && strcmp(name, "EAGLE"))
        return nbi_fail(
            err, NB_INVALID,
            "speculative_algorithm is \"%s\"; expected none or mtp (NEXTN and EAGLE mean the same)",
            name);
    if (steps > NBI_DRAFTS_MAX)
        return nbi_fail(err, NB_INVALID, "speculative_num_steps is %u; expected 1 to %u", steps,
                        NBI_DRAFTS_MAX);
    e->n_draft_steps = steps;
    return NB_OK;
}

static nb_status open_model(nb_engine *e, nb_error *err)
{
    NB_TRY(parse_drafting(e, err));
    nbi_model_options mo = {.dir = e->options.model_dir,
                            .moe_runner = e->options.moe_runner,
                            .progress = e->options.progress,
                            .progress_user = e->options.progress_user,
                            .verify_scales = true,
                            .plan = check_weights_fit,
                            .plan_user = e};
    mo.use_mtp = e->n_draft_steps > 0;
    NB_TRY(nbi_model_open(&e->model, e->backend, &mo, err));
    if (e->n_draft_steps && !nbi_model_can_draft(e->model)) {
        nbi_log(NB_LOG_WARN, "%s has no MTP layer: speculative decoding is off",
                e->options.model_dir);
        e->n_draft_steps = 0;
    }
    return NB_OK;
}

/* A folder without tokenizer.json serves token ids only. */
static nb_status open_tokenizer(nb_engine *e, nb_error *err)
{
    uint32_t vocab = nbi_model_config(e->model)->vocab;
    e->n_valid_ids = vocab;
    char *path = nbi_path_join(e->options.model_dir, "tokenizer.json");
    if (!path) return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    bool there = nbi_file_exists(path);
    nbi_free(path);
    if (!there) {
        nbi_log(NB_LOG_WARN, "%s has no tokenizer.json: token ids only", e->options.model_dir);
        return NB_OK;
    }
    NB_TRY(nbi_tokenizer_open(&e->tokenizer, e->options.model_dir, err));
    uint32_t n = nbi_tokenizer_size(e->tokenizer);
    if (n > vocab) {
        return nbi_fail(err, NB_CORRUPT,
                        "%s: tokenizer.json has ids up to %u, the model's vocabulary ends at %u",
                        e->options.model_dir, n - 1, vocab - 1);
    }
    e->n_valid_ids = n;
    e->max_token_bytes = (uint32_t)nbi_token_bytes_max(e->tokenizer);
    return NB_OK;
}

static nb_status reserve_memory(nb_engine *e, nbi_dtype kv_dtype, nb_error *err)
{
    memory_plan p = {0};
    NB_TRY(plan_memory(e, &p, kv_dtype, err));
    e->workspace_bytes = p.workspace;
    NB_TRY(nbi_model_reserve(e->model, step_rows(e), e->max_running, step_logit_rows(e),
                             e->max_context, err));
    NB_TRY(nbi_kv_create(&e->kv, e->backend, nbi_model_config(e->model), kv_dtype, p.n_pages, err));
    NB_TRY(nbi_kvpool_init(&e->pool, p.n_pages, err));
    NB_TRY(nbi_prefix_init(&e->prefix, p.n_pages, 64, err));
    NB_TRY(nbi_step_batch_create(&e->batch, step_rows(e), e->max_running, step_logit_rows(e),
                                 e->max_context, err));
    if (e->n_draft_steps)
        NB_TRY(nbi_step_batch_create(&e->drafting, step_rows(e), e->max_running, step_logit_rows(e),
                                     e->max_context, err));
    e->running = nbi_calloc(e->max_running, sizeof *e->running);
    return e->running ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
}

static nb_status open_parts(nb_engine *e, const nb_engine_options *o, nb_error *err)
{
    nbi_dtype kv_dtype;
    NB_TRY(copy_options(e, o, err));
    NB_TRY(open_backend(e, &kv_dtype, err));
    NB_TRY(open_model(e, err));
    NB_TRY(open_tokenizer(e, err));
    return reserve_memory(e, kv_dtype, err);
}

nb_status nb_engine_open(nb_engine **out, const nb_engine_options *o, nb_error *err)
{
    nb_engine *e = nbi_calloc(1, sizeof *e);
    if (!e) return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    pthread_mutex_init(&e->lock, NULL);
    pthread_mutex_init(&e->step_lock, NULL);
    pthread_cond_init(&e->work, NULL);
    atomic_init(&e->seed_counter, nbi_now_ns());
    nbi_meter_init(e);
    nb_status st = open_parts(e, o, err);
    if (st != NB_OK) {
        nb_engine_close(&e);
        return st;
    }
    *out = e;
    return NB_OK;
}

/* ---------------------------------------------------------------- close */

/* Ends everything that runs or waits. The step must not be running. */
static void end_all(nb_engine *e, nb_finish finish, const char *why)
{
    for (uint32_t i = 0; i < e->n_running; i++) {
        nbi_request_end(e->running[i], finish, why);
        nbi_meter_end(e, e->running[i]);
        nbi_request_drop_pages(e, e->running[i]);
        nbi_request_unref(e->running[i]);
    }
    e->n_running = 0;
    pthread_mutex_lock(&e->lock);
    nb_request *r = e->waiting_head;
    e->waiting_head = e->waiting_tail = NULL;
    e->n_waiting = 0;
    pthread_mutex_unlock(&e->lock);
    while (r) {
        nb_request *next = r->next;
        nbi_request_end(r, finish, why);
        nbi_meter_end(e, r);
        nbi_request_unref(r);
        r = next;
    }
    nbi_engine_after_step(e);
}

static void stop_thread(nb_engine *e)
{
    pthread_mutex_lock(&e->lock);
    atomic_store(&e->stopping, true);
    pthread_cond_broadcast(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (e->has_thread) pthread_join(e->thread, NULL);
    e->has_thread = false;
}

void nb_engine_close(nb_engine **engine)
{
    nb_engine *e = *engine;
    if (!e) return;
    stop_thread(e);
    if (e->running) end_all(e, NB_FINISH_CANCELLED, NULL);
    nbi_free(e->running);
    nbi_step_batch_destroy(&e->batch);
    nbi_step_batch_destroy(&e->drafting);
    nbi_prefix_deinit(&e->prefix);
    nbi_kvpool_deinit(&e->pool);
    if (e->kv.layers) nbi_kv_destroy(&e->kv, e->backend);
    nbi_tokenizer_close(&e->tokenizer);
    nbi_model_close(&e->model);
    nbi_backend_close(&e->backend);
    nbi_arena_free(&e->strings);
    pthread_mutex_destroy(&e->lock);
    pthread_mutex_destroy(&e->step_lock);
    pthread_cond_destroy(&e->work);
    nbi_free(e);
    *engine = NULL;
}

/* ---------------------------------------------------------------- stepping */

static void fail_engine(nb_engine *e, const nb_error *why)
{
    pthread_mutex_lock(&e->lock);
    snprintf(e->failure, sizeof e->failure, "the engine has failed: %s", why->text);
    e->has_failed = true;
    pthread_mutex_unlock(&e->lock);
    nbi_log(NB_LOG_ERROR, "%s", e->failure);
    end_all(e, NB_FINISH_ERROR, e->failure);
}

nb_status nb_engine_step(nb_engine *e, bool *worked, nb_error *err)
{
    nb_error why = {0};
    *worked = false;
    if (nb_engine_failure(e)) return nbi_fail(err, NB_CLOSED, "%s", e->failure);
    nb_status st = nbi_engine_step_once(e, worked, &why);
    if (st == NB_OK) return NB_OK;
    fail_engine(e, &why);
    return nbi_fail(err, st, "%s", why.text);
}

void nbi_engine_after_step(nb_engine *e)
{
    if (!e->notified) return;
    e->notified = false;
    pthread_mutex_lock(&e->step_lock);
    if (e->after_step) e->after_step(e->after_step_user);
    pthread_mutex_unlock(&e->step_lock);
}

void nb_engine_on_step(nb_engine *e, void (*after)(void *user), void *user)
{
    pthread_mutex_lock(&e->step_lock);
    e->after_step = after;
    e->after_step_user = user;
    pthread_mutex_unlock(&e->step_lock);
}

/* Steps while there is work, sleeps otherwise. A step without work although requests run means
 * their readers are behind: a read wakes us. */
static void *thread_main(void *arg)
{
    nb_engine *e = arg;
    bool worked = true;
    while (!atomic_load(&e->stopping)) {
        pthread_mutex_lock(&e->lock);
        while (!worked && !e->waiting_head && !e->kick && !atomic_load(&e->stopping))
            pthread_cond_wait(&e->work, &e->lock);
        e->kick = false;
        pthread_mutex_unlock(&e->lock);
        if (nb_engine_step(e, &worked, NULL) != NB_OK) break;
    }
    return NULL;
}

nb_status nb_engine_start(nb_engine *e, nb_error *err)
{
    if (e->has_thread) return NB_OK;
    int rc = pthread_create(&e->thread, NULL, thread_main, e);
    if (rc) return nbi_fail(err, NB_INTERNAL, "engine: cannot start a thread: %s", strerror(rc));
    pthread_setname_np(e->thread, "engine");
    e->has_thread = true;
    return NB_OK;
}

/* ---------------------------------------------------------------- facts */

void nb_engine_get_info(const nb_engine *e, nb_engine_info *info)
{
    const nbi_config *c = nbi_model_config(e->model);
    *info = (nb_engine_info){.model_dir = e->options.model_dir,
                             .model_name = e->model_name,
                             .family = nbi_family_name(c->family),
                             .device = e->backend->description,
                             .moe_runner = nbi_model_runner(e->model),
                             .n_layers = c->n_layers,
                             .vocab_size = c->vocab,
                             .max_context = e->max_context,
                             .kv_tokens = (uint64_t)e->pool.n_pages * NBI_PAGE_TOKENS,
                             .weight_bytes = nbi_model_weight_bytes(e->model),
                             .kv_bytes = e->kv.bytes,
                             .workspace_bytes = e->workspace_bytes,
                             .eos_ids = c->eos,
                             .n_eos = c->n_eos,
                             .has_tokenizer = e->tokenizer != NULL};
}

void nb_engine_get_stats(nb_engine *e, nb_engine_stats *stats)
{
    pthread_mutex_lock(&e->lock);
    *stats = e->stats;
    stats->n_waiting = e->n_waiting;
    pthread_mutex_unlock(&e->lock);
}

nb_status nb_engine_flush_cache(nb_engine *e, nb_error *err)
{
    pthread_mutex_lock(&e->lock);
    uint32_t waiting = e->n_waiting, running = e->stats.n_running;
    e->flush = !waiting && !running;
    e->kick = true;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (!waiting && !running) return NB_OK;
    return nbi_fail(err, NB_BUSY, "the cache is in use: %u requests run, %u wait", running,
                    waiting);
}

const char *nb_engine_failure(nb_engine *e)
{
    pthread_mutex_lock(&e->lock);
    const char *why = e->has_failed ? e->failure : NULL;
    pthread_mutex_unlock(&e->lock);
    return why;
}

void nb_sampling_default(const nb_engine *e, nb_sampling *s)
{
    const nbi_config *c = nbi_model_config(e->model);
    *s = (nb_sampling){.temperature = c->gen_temperature,
                       .top_p = c->gen_top_p,
                       .min_p = c->gen_min_p,
                       .top_k = c->gen_top_k,
                       .skip_special = true,
                       .repetition_penalty = 1,
                       .n_logprobs = -1};
}
