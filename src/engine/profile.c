/* Which steps are timed, and what becomes of it: profiles, and sums of every n-th step.
 *
 * Off, a step pays one look at a flag. Whoever starts or stops a profile holds `lock`; the step
 * takes it at its begin and at its end, and in between the timer is the step's alone. */
#include "engine/engine.h"

#include <string.h>

#include "backend/timing_report.h"
#include "base/json.h"

#define EVENTS         ((uint32_t)1 << 17) /* kept: some 150 steps of a large model, 30 MB of JSON */
#define USUAL_INTERVAL 64u
#define READ_BYTES     ((size_t)2 << 30)

static void name_components(nb_component_stats *to)
{
    _Static_assert(NBI_TIMED_PART_COUNT + 2 <= NB_COMPONENTS_MAX, "components");
    for (uint32_t part = 0; part < NBI_TIMED_PART_COUNT; part++)
        to->components[part].name = nbi_timed_part_name(part);
    to->components[NBI_TIMED_PART_COUNT].name = "launch gaps";
    to->components[NBI_TIMED_PART_COUNT + 1].name = "host gaps";
    to->n = NBI_TIMED_PART_COUNT + 2;
}

nb_status nbi_profile_init(nb_engine *e, nb_error *err)
{
    nbi_profile *p = &e->profile;
    NB_TRY(nbi_model_timing_create(&p->timing, e->model, err));
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->idle, NULL);
    name_components(&p->totals);
    p->interval = e->options.timing_interval;
    if (p->interval == NB_TIMING_USUAL)
        p->interval = nbi_timing_is_light(p->timing) ? USUAL_INTERVAL : 0;
    if (p->interval) NB_TRY(nbi_timing_open_clock(p->timing, err));
    atomic_store(&p->wanted, p->interval > 0);
    return NB_OK;
}

void nbi_profile_deinit(nb_engine *e)
{
    if (!e->profile.timing) return;
    nbi_timing_destroy(&e->profile.timing);
    pthread_mutex_destroy(&e->profile.lock);
    pthread_cond_destroy(&e->profile.idle);
}

void nbi_profile_measure(nb_engine *e)
{
    const nbi_backend_ops *ops = e->backend->ops;
    if (!ops->read_bandwidth) return;
    const size_t bytes = e->kv.bytes < READ_BYTES ? e->kv.bytes : READ_BYTES;
    nb_engine_set_read_bandwidth(e, ops->read_bandwidth(e->backend, e->kv.memory, bytes));
}

void nb_engine_set_read_bandwidth(nb_engine *e, double bytes_per_s)
{
    atomic_store(&e->read_bandwidth, bytes_per_s > 0 ? (uint_fast64_t)bytes_per_s : 0);
}

/* ---------------------------------------------------------------- the step */

/* Called with the lock held. */
static bool wants_step(nbi_profile *p)
{
    p->skipped = p->running && p->options.skip_steps;
    if (p->writing || p->skipped) return false;
    return p->running || (p->interval && p->since + 1 >= p->interval);
}

void nbi_profile_step_begin(nb_engine *e)
{
    nbi_profile *p = &e->profile;
    p->skipped = false;
    if (!atomic_load_explicit(&p->wanted, memory_order_relaxed)) return;
    pthread_mutex_lock(&p->lock);
    p->timed = p->in_step = wants_step(p);
    pthread_mutex_unlock(&p->lock);
    if (p->timed) nbi_model_time_begin(e->model, p->timing);
}

/* Adds the last step to the sums of all. Called with the lock held. */
static void add_totals(nbi_profile *p)
{
    const nbi_timing_table *t = nbi_timing_last(p->timing);
    nb_component_stats *to = &p->totals;
    for (uint32_t part = 0; part < NBI_TIMED_PART_COUNT; part++) {
        for (int op = 0; op < NBI_TIMED_OP_COUNT; op++) {
            to->components[part].calls += t->rows[part][op].calls;
            to->components[part].ns += t->rows[part][op].ns;
            if (part != NBI_PART_COLLECTIVES) /* those are not of the memory */
                to->components[part].bytes += t->rows[part][op].bytes;
        }
    }
    to->components[NBI_TIMED_PART_COUNT].ns += t->launch_ns;
    to->components[NBI_TIMED_PART_COUNT + 1].ns += t->host_ns;
    to->steps++;
    to->step_ns += t->step_ns;
}

/* Called with the lock held. */
static void count_step(nbi_profile *p, bool decode)
{
    const uint32_t n = p->options.n_steps;
    if (!p->running) return;
    p->taken[decode]++;
    if (!n) return;
    const bool enough = p->options.by_stage ? p->taken[0] >= n && p->taken[1] >= n
                                            : (uint64_t)p->taken[0] + p->taken[1] >= n;
    if (!enough) return;
    p->running = false;
    p->done = true;
    atomic_store(&p->wanted, p->interval > 0);
}

static void count_skipped(nbi_profile *p)
{
    pthread_mutex_lock(&p->lock);
    if (p->running && p->options.skip_steps) p->options.skip_steps--;
    pthread_mutex_unlock(&p->lock);
    p->skipped = false;
}

void nbi_profile_step_end(nb_engine *e, const nbi_batch *batch)
{
    nbi_profile *p = &e->profile;
    const bool worked = batch->n_rows > 0, decode = nbi_batch_decodes(batch);
    if (worked) p->since = p->timed ? 0 : p->since + 1;
    if (worked && p->skipped) count_skipped(p);
    if (!p->timed) return;
    if (worked)
        nbi_model_time_end(e->model, p->timing, batch->n_rows, decode);
    else
        nbi_model_time_cancel(e->model, p->timing);
    p->timed = false;
    pthread_mutex_lock(&p->lock);
    p->in_step = false;
    if (worked) add_totals(p);
    if (worked) count_step(p, decode);
    pthread_cond_broadcast(&p->idle);
    pthread_mutex_unlock(&p->lock);
}

/* ---------------------------------------------------------------- the user */

/* Takes the lock when nobody else uses the timer. */
static void lock_idle(nbi_profile *p)
{
    pthread_mutex_lock(&p->lock);
    while (p->in_step || p->writing) pthread_cond_wait(&p->idle, &p->lock);
}

nb_status nb_engine_profile_start(nb_engine *e, const nb_profile_options *o, nb_error *err)
{
    nbi_profile *p = &e->profile;
    nb_status st = NB_OK;
    lock_idle(p);
    if (p->running)
        st = nbi_fail(err, NB_BUSY, "a profile runs already: stop it first");
    else
        st = nbi_timing_open_clock(p->timing, err);
    if (st == NB_OK) st = nbi_timing_keep_events(p->timing, EVENTS, err);
    if (st == NB_OK) {
        nbi_timing_clear(p->timing);
        p->options = *o;
        p->taken[0] = p->taken[1] = 0;
        p->running = true;
        p->done = false;
        atomic_store(&p->wanted, true);
    }
    pthread_mutex_unlock(&p->lock);
    return st;
}

bool nb_engine_profile_is_done(nb_engine *e)
{
    pthread_mutex_lock(&e->profile.lock);
    const bool done = e->profile.done;
    pthread_mutex_unlock(&e->profile.lock);
    return done;
}

/* Both stages' tables, as far as there are steps of them. */
static nb_status write_breakdown(nb_engine *e, nbi_buf *out)
{
    const double rate = (double)atomic_load(&e->read_bandwidth);
    bool first = true;
    NB_TRY(nbi_buf_add(out, "[", 1));
    for (int decode = 1; decode >= 0; decode--) {
        nbi_breakdown b;
        nbi_breakdown_make(&b, e->profile.timing, decode, rate);
        if (!b.steps) continue;
        if (!first) NB_TRY(nbi_buf_addf(out, ",\n"));
        first = false;
        NB_TRY(nbi_breakdown_json(out, &b));
    }
    return nbi_buf_add(out, "]", 1);
}

/* Takes the timer of a profile that runs or is done; give_back() gives it back. */
static nb_status take_ended(nbi_profile *p, nb_error *err)
{
    nb_status st = NB_OK;
    lock_idle(p);
    if (!p->running && !p->done) st = nbi_fail(err, NB_NOT_FOUND, "no profile was started");
    p->writing = st == NB_OK;
    p->running = p->done = false;
    atomic_store(&p->wanted, p->interval > 0);
    pthread_mutex_unlock(&p->lock);
    return st;
}

static void give_back(nbi_profile *p)
{
    pthread_mutex_lock(&p->lock);
    (void)nbi_timing_keep_events(p->timing, 0, NULL);
    p->writing = false;
    pthread_cond_broadcast(&p->idle);
    pthread_mutex_unlock(&p->lock);
}

nb_status nb_engine_profile_stop(nb_engine *e, nb_profile *out, nb_error *err)
{
    nbi_buf tables = {0}, trace = {0};
    NB_TRY(take_ended(&e->profile, err));
    nb_status st = write_breakdown(e, &tables); /* steps go on meanwhile, not timed */
    if (st == NB_OK)
        st = nbi_trace_json(&trace, e->profile.timing, e->model_name, e->backend->description,
                            &tables);
    give_back(&e->profile);
    if (st != NB_OK) {
        nbi_buf_free(&tables);
        nbi_buf_free(&trace);
        return nbi_fail(err, st, "no memory for the profile");
    }
    *out = (nb_profile){.trace = trace.data,
                        .n_trace = trace.len,
                        .breakdown = tables.data,
                        .n_breakdown = tables.len};
    return NB_OK;
}

void nb_profile_free(nb_profile *p)
{
    nbi_free(p->trace);
    nbi_free(p->breakdown);
    *p = (nb_profile){0};
}

void nb_engine_get_components(nb_engine *e, nb_component_stats *stats)
{
    pthread_mutex_lock(&e->profile.lock);
    *stats = e->profile.totals;
    pthread_mutex_unlock(&e->profile.lock);
}
