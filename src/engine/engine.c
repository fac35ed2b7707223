/* Opening an engine: options, memory plan, the thread; and the small read-only calls. */
#include "engine/engine.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "comm/device_ranks.h"
#include "model/gate.h"

void nb_engine_options_default(nb_engine_options *o)
{
    *o = (nb_engine_options){.device = "auto",
                             .moe_runner = "auto",
                             .cpu_level = "auto",
                             .activations = "weight-only",
                             .kv_dtype = "auto",
                             .max_running = 64,
                             .chunk_size = 512,
                             .memory_fraction = 0.9,
                             .max_queued = 1024,
                             .decode_steps = 1};
}

/* ---------------------------------------------------------------- options */

static nb_status check_options(const nb_engine_options *o, nb_error *err)
{
    if (!o->model_dir || !o->model_dir[0])
        return nbi_fail(err, NB_INVALID, "model_dir is empty; expected a folder with config.json");
    if (!o->max_running || o->max_running > 4096) {
        return nbi_fail(err, NB_INVALID,
                        "max_running (--max-running-requests) is %u; expected 1 to 4096",
                        o->max_running);
    }
    if (!o->chunk_size || o->chunk_size > 65536) {
        return nbi_fail(err, NB_INVALID,
                        "chunk_size (--chunked-prefill-size) is %u; expected 1 to 65536",
                        o->chunk_size);
    }
    if (!(o->memory_fraction >= 0 && o->memory_fraction <= 1)) {
        return nbi_fail(err, NB_INVALID,
                        "memory_fraction (--mem-fraction-static) is %g; expected 0 < f <= 1",
                        o->memory_fraction);
    }
    if (o->max_queued > 1000000) {
        return nbi_fail(err, NB_INVALID,
                        "max_queued (--max-queued-requests) is %u; expected 1 to 1000000",
                        o->max_queued);
    }
    if (o->decode_steps > 1000) {
        return nbi_fail(err, NB_INVALID,
                        "decode_steps (--num-continuous-decode-steps) is %u; expected 1 to 1000",
                        o->decode_steps);
    }
    if (o->n_threads > 1024)
        return nbi_fail(err, NB_INVALID, "n_threads (--threads) is %u; expected at most 1024",
                        o->n_threads);
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
    return nbi_fail(err, NB_INVALID,
                    "schedule_policy (--schedule-policy) is \"%s\"; expected fcfs or lpm", name);
}

static nb_status copy_options(nb_engine *e, const nb_engine_options *o, nb_error *err)
{
    NB_TRY(check_options(o, err));
    e->options = *o;
    e->options.model_dir = keep_string(e, o->model_dir, "");
    e->options.device = keep_string(e, o->device, "auto");
    e->options.moe_runner = keep_string(e, o->moe_runner, "auto");
    if (o->tune_file) e->options.tune_file = keep_string(e, o->tune_file, "");
    e->options.cpu_level = keep_string(e, o->cpu_level, "auto");
    e->options.activations = keep_string(e, o->activations, "weight-only");
    e->options.kv_dtype = keep_string(e, o->kv_dtype, "auto");
    e->options.attention = keep_string(e, o->attention, "auto");
    e->options.prefill_attention = keep_string(e, o->prefill_attention, "auto");
    e->options.decode_attention = keep_string(e, o->decode_attention, "auto");
    e->options.dsa_prefill = keep_string(e, o->dsa_prefill, "auto");
    e->options.dsa_decode = keep_string(e, o->dsa_decode, "auto");
    e->options.mla_prefill = keep_string(e, o->mla_prefill, "auto");
    e->options.overlap_schedule = keep_string(e, o->overlap_schedule, "auto");
    e->options.gpu_exchange = keep_string(e, o->gpu_exchange, "auto");
    e->options.speculative_algorithm = keep_string(e, o->speculative_algorithm, "none");
    e->model_name = last_part(e, o->model_dir);
    if (!e->model_name || !e->options.kv_dtype)
        return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    NB_TRY(parse_policy(&e->lpm, o->schedule_policy, err));
    e->max_running = o->max_running;
    e->chunk_size = o->chunk_size;
    e->max_queued = o->max_queued ? o->max_queued : 1024;
    e->decode_steps = o->decode_steps ? o->decode_steps : 1;
    e->first_deadline_ns = UINT64_MAX;
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

/* ---------------------------------------------------------------- open */

static nb_status open_backend(nb_engine *e, nbi_kv_asked *asked, nb_error *err)
{
    nbi_dtype kv_dtype;
    nbi_backend_options bo = {.n_threads = e->options.n_threads,
                              .disable_graphs = e->options.disable_cuda_graph,
                              .ranks_per_device = e->options.ranks_per_gpu,
                              .exchange = e->options.gpu_exchange,
                              .apart_sums = e->options.disable_single_batch_overlap};
    nbi_comm_device(e->options.ranks, &bo);
    NB_TRY(nbi_cpu_level_parse(&bo.cpu_level, e->options.cpu_level, err));
    NB_TRY(parse_activations(&bo.w4a4, e->options.activations, err));
    NB_TRY(nbi_kv_dtype_parse(&kv_dtype, e->options.kv_dtype, err)); /* before weights are read */
    asked->level = bo.cpu_level;
    return nbi_backend_open(&e->backend, e->options.device, &bo, err);
}

/* Drafting is asked for by name; a checkpoint without an MTP layer serves without it. */
static nb_status parse_drafting(nb_engine *e, nb_error *err)
{
    const char *name = e->options.speculative_algorithm;
    uint32_t steps = e->options.speculative_num_steps ? e->options.speculative_num_steps : 3;
    if (!strcmp(name, "none")) return NB_OK;
    if (strcmp(name, "mtp") && strcmp(name, "NEXTN") && strcmp(name, "EAGLE"))
        return nbi_fail(err, NB_INVALID,
                        "speculative_algorithm (--speculative-algorithm) is \"%s\"; expected none "
                        "or mtp (NEXTN and EAGLE mean the same)",
                        name);
    if (steps > NBI_DRAFTS_MAX)
        return nbi_fail(err, NB_INVALID,
                        "speculative_num_steps (--speculative-num-steps) is %u; expected 1 to %u",
                        steps, NBI_DRAFTS_MAX);
    e->n_draft_steps = steps;
    return NB_OK;
}

/* On a device that works while the host goes on, overlap gains the host's work of a step. Elsewhere
 * the events only come a step later. */
static nb_status parse_overlap(nb_engine *e, nb_error *err)
{
    const char *name = e->options.overlap_schedule;
    e->overlaps = !strcmp(name, "on") || e->backend->ops->asynchronous;
    if (!strcmp(name, "off")) e->overlaps = false;
    if (!strcmp(name, "on") || !strcmp(name, "off") || !strcmp(name, "auto")) return NB_OK;
    return nbi_fail(err, NB_INVALID, "overlap_schedule is \"%s\"; expected auto, on or off", name);
}

static nb_status open_model(nb_engine *e, nb_error *err)
{
    NB_TRY(parse_drafting(e, err));
    NB_TRY(parse_overlap(e, err));
    const nbi_attention_names attention = {.backend = e->options.attention,
                                           .prefill = e->options.prefill_attention,
                                           .decode = e->options.decode_attention,
                                           .mla_prefill = e->options.mla_prefill,
                                           .mla_block = e->options.mla_prefill_block,
                                           .unshared = e->options.disable_prefix_cache,
                                           .sparse_prefill = e->options.dsa_prefill,
                                           .sparse_decode = e->options.dsa_decode};
    nbi_model_options mo = {.dir = e->options.model_dir,
                            .attention = &attention,
                            .moe_runner = e->options.moe_runner,
                            .tune_file = e->options.tune_file,
                            .progress = e->options.progress,
                            .progress_user = e->options.progress_user,
                            .verify_scales = true,
                            .comm = e->options.ranks,
                            .plan = nbi_engine_check_weights,
                            .plan_user = e};
    mo.oea_k0 = e->options.oea_k0;
    mo.use_mtp = e->n_draft_steps > 0;
    if (mo.comm)
        NB_TRY(nbi_shard_make(&mo.shard, nbi_comm_rank(mo.comm), nbi_comm_size(mo.comm),
                              e->options.ep_size, err));
    mo.shard.latents = mo.comm && e->options.shard_latents;
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

static void keep_check(void *user, const nbi_gate_result *r)
{
    nb_engine *e = user;
    nbi_gate_result *all = nbi_realloc(e->checks, (e->n_checks + 1) * sizeof *all);
    if (!all) return; /* they are for people to read */
    all[e->n_checks++] = *r;
    e->checks = all;
}

bool nb_engine_get_check(const nb_engine *e, uint32_t i, nb_check_result *out)
{
    if (i >= e->n_checks) return false;
    const nbi_gate_result *r = &e->checks[i];
    *out = (nb_check_result){.kind = r->kind,
                             .path = r->path,
                             .where = r->where,
                             .why = r->why,
                             .chosen = r->chosen,
                             .supported = r->supported,
                             .compared = r->supported && !r->not_run,
                             .error = r->error,
                             .bound = r->bound};
    return true;
}

/* The short form of `nibble check`: what is wrong is not served. */
static nb_status check_kernels(nb_engine *e, nbi_dtype kv_dtype, nb_error *err)
{
    const uint64_t begin = nbi_now_ns();
    NB_TRY(nbi_gate_run(e->model,
                        &(nbi_gate_options){.brief = true,
                                            .kv_dtype = kv_dtype,
                                            .max_seqs = e->max_running,
                                            .max_context = e->max_context,
                                            .each = keep_check,
                                            .user = e},
                        err));
    nbi_log(NB_LOG_INFO, "check: linear layers, attention and experts are right on %s (%.0f ms)",
            e->backend->description, 1e-6 * (double)(nbi_now_ns() - begin));
    return NB_OK;
}

/* Another rank is gone: what runs here ends, whatever it waits for. */
static void hear_of_loss(void *user, const nb_error *why)
{
    nbi_engine_break(user, why);
}

static nb_status open_parts(nb_engine *e, const nb_engine_options *o, nb_error *err)
{
    nbi_kv_asked asked = {0};
    nbi_dtype kv_dtype;
    NB_TRY(copy_options(e, o, err));
    NB_TRY(open_backend(e, &asked, err));
    NB_TRY(open_model(e, err));
    asked.algo = nbi_model_kv_algo(e->model);
    NB_TRY(nbi_kv_dtype_choose(&kv_dtype, e->options.kv_dtype, &asked, err));
    NB_TRY(open_tokenizer(e, err));
    NB_TRY(nbi_engine_reserve(e, kv_dtype, err));
    NB_TRY(nbi_profile_init(e, err));
    nbi_profile_measure(e);
    if (e->options.check_kernels) NB_TRY(check_kernels(e, kv_dtype, err));
    if (e->options.ranks) NB_TRY(nbi_comm_agree(e->options.ranks, NB_OK, NULL, err));
    if (nbi_ranks_lead(e)) nbi_comm_on_lost(e->options.ranks, hear_of_loss, e);
    nbi_engine_start_commit(e); /* beside the check it would take its processors */
    return NB_OK;
}

nb_status nb_engine_open(nb_engine **out, const nb_engine_options *o, nb_error *err)
{
    nb_engine *e = nbi_calloc(1, sizeof *e);
    if (!e) return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    pthread_mutex_init(&e->lock, NULL);
    pthread_mutex_init(&e->step_lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&e->work, &attr);
    pthread_condattr_destroy(&attr);
    atomic_init(&e->seed_counter, nbi_now_ns());
    nbi_meter_init(e);
    nb_status st = open_parts(e, o, err);
    if (st != NB_OK) {
        if (o->ranks && err) nbi_comm_fail(o->ranks, err->text);
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
    nbi_engine_hand_out(e);
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
    e->waiting_tokens = 0;
    pthread_mutex_unlock(&e->lock);
    while (r) {
        nb_request *next = r->next;
        uint32_t n;
        nb_request *const *members = nbi_request_members(&r, &n);
        for (uint32_t i = 0; i < n; i++) {
            nbi_request_end(members[i], finish, why);
            nbi_meter_end(e, members[i]);
            nbi_request_unref(members[i]);
        }
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
    nbi_engine_stop_commit(e);
    if (e->running) end_all(e, NB_FINISH_CANCELLED, NULL);
    if (nbi_ranks_lead(e)) nbi_comm_on_lost(e->options.ranks, NULL, NULL);
    nbi_ranks_end(e);
    nbi_free(e->order);
    nbi_free(e->running);
    nbi_free(e->turns);
    nbi_free(e->checks);
    nbi_free(e->owed);
    nbi_step_batch_destroy(&e->batch);
    nbi_step_batch_destroy(&e->drafting);
    nbi_prefix_deinit(&e->prefix);
    nbi_kvpool_deinit(&e->pool);
    if (e->kv.layers) nbi_kv_destroy(&e->kv, e->backend);
    nbi_tokenizer_close(&e->tokenizer);
    nbi_profile_deinit(e);
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

void nbi_engine_break(nb_engine *e, const nb_error *why)
{
    pthread_mutex_lock(&e->lock);
    bool first = !e->has_failed;
    if (first) snprintf(e->failure, sizeof e->failure, "the engine has failed: %s", why->text);
    e->has_failed = e->kick = true;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (first) nbi_log(NB_LOG_ERROR, "%s", e->failure);
    if (first && e->options.ranks) nbi_comm_fail(e->options.ranks, why->text);
}

static void fail_engine(nb_engine *e, const nb_error *why)
{
    nbi_engine_break(e, why);
    end_all(e, NB_FINISH_ERROR, e->failure);
}

nb_status nb_engine_step(nb_engine *e, bool *worked, nb_error *err)
{
    nb_error why = {0};
    *worked = false;
    if (nb_engine_failure(e)) {
        end_all(e, NB_FINISH_ERROR, e->failure);
        return nbi_fail(err, NB_CLOSED, "%s", e->failure);
    }
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

/* Until a step may have something to do that the last one had not, whoever waits in the queue.
 * Called with the lock held. */
static void wait_for_work(nb_engine *e)
{
    while (!e->kick && !atomic_load(&e->stopping)) {
        uint64_t until = e->first_deadline_ns;
        for (uint32_t i = 0; i < e->n_running; i++) {
            uint64_t deadline = e->running[i]->deadline_ns;
            if (deadline && deadline < until) until = deadline;
        }
        if (until == UINT64_MAX) {
            pthread_cond_wait(&e->work, &e->lock);
            continue;
        }
        struct timespec at = nbi_timespec(until);
        if (pthread_cond_timedwait(&e->work, &e->lock, &at) == ETIMEDOUT) return;
    }
}

/* Steps while there is work, sleeps otherwise. A step without work although requests run or wait
 * means that the readers of those that run are behind: a read wakes us. */
static void *thread_main(void *arg)
{
    nb_engine *e = arg;
    bool worked = true;
    while (!atomic_load(&e->stopping)) {
        pthread_mutex_lock(&e->lock);
        if (!worked) wait_for_work(e);
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
                             .kv_dtype = nbi_kv_dtype_name(e->kv.dtype),
                             .moe_choice_source = nbi_model_moe_source(e->model),
                             .n_layers = c->n_layers,
                             .vocab_size = c->vocab,
                             .max_context = e->max_context,
                             .kv_tokens = (uint64_t)e->pool.n_pages * NBI_PAGE_TOKENS,
                             .weight_bytes = nbi_model_weight_bytes(e->model),
                             .kv_bytes = e->kv.bytes,
                             .workspace_bytes = e->workspace_bytes,
                             .request_bytes = e->request_bytes_max,
                             .tree_bytes = e->tree_bytes,
                             .batch_bytes = e->batch_bytes,
                             .available_bytes = e->available_bytes,
                             .max_running = e->max_running,
                             .max_queued = e->max_queued,
                             .eos_ids = c->eos,
                             .n_eos = c->n_eos,
                             .has_tokenizer = e->tokenizer != NULL};
    static_assert(NBI_MOE_BUCKETS <= NB_MOE_CHOICES_MAX, "every bucket is a choice");
    const nbi_moe_table *t = nbi_model_moe_table(e->model);
    info->n_moe_choices = t->n;
    for (uint32_t i = 0; i < t->n; i++)
        info->moe_choices[i] =
            (nb_moe_choice){.max_rows = t->buckets[i].rows, .runner = t->buckets[i].runner->name};
}

void nb_engine_get_stats(nb_engine *e, nb_engine_stats *stats)
{
    pthread_mutex_lock(&e->lock);
    *stats = e->stats;
    stats->n_waiting = e->n_waiting;
    stats->waiting_tokens = e->waiting_tokens;
    stats->read_bandwidth = (double)atomic_load(&e->read_bandwidth);
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
