/* What the engine counts and times. The bounds are those that vLLM and SGLang use, both where a
 * name is common to them, so that queries written for either give the same figures. */
#include "base/clock.h"
#include "engine/engine.h"

static const double ttft_bounds[] = {.001, .005, .01, .02, .04, .06, .08, .1,  .2,  .25, .4, .5,
                                     .6,   .75,  .8,  1,   2,   2.5, 4,   5,   6,   7.5, 8,  10,
                                     20,   40,   60,  80,  100, 160, 200, 400, 640, 2560};
static const double token_bounds[] = {
    .002, .004, .006, .008, .01, .015, .02, .025, .03, .035, .04, .05, .06, .075, .08, .1, .15, .2,
    .3,   .4,   .5,   .6,   .75, .8,   1,   2,    2.5, 4,    5,   6,   7.5, 8,    10,  20, 40,  80};
static const double request_bounds[] = {
    .1, .2, .3, .4, .5, .6,  .8,  1,   1.5, 2,   2.5, 4,   5,   6,    8,    10,   15,   20,
    30, 40, 50, 60, 80, 100, 120, 200, 240, 400, 480, 600, 960, 1200, 1800, 1920, 2400, 7680};
static const double queue_bounds[] = {
    .001, .005, .01, .02, .05, .1, .2, .3,  .5,  .8,  1,   1.5, 2,   2.5, 3,   4,    5,    10,
    15,   20,   30,  40,  50,  60, 80, 100, 120, 200, 240, 400, 480, 600, 960, 1200, 1920, 7680};
static const double count_bounds[] = {1,     2,      5,      10,     20,     50,    100,
                                      200,   500,    1000,   2000,   5000,   10000, 20000,
                                      50000, 100000, 200000, 500000, 1000000};
static const double step_bounds[] = {.0005, .001, .002, .004, .008, .015, .03, .06, .12,
                                     .25,   .5,   1,    2,    4,    8,    15,  30};
static const double rows_bounds[] = {1,   8,    16,   32,   64,   128,  256,
                                     512, 1024, 2048, 4096, 8192, 16384};

#define BOUNDS(b) b, (uint32_t)(sizeof(b) / sizeof *(b))

static const struct {
    const double *bounds;
    uint32_t n;
} table[NB_HIST_COUNT] = {
    [NB_HIST_TTFT] = {BOUNDS(ttft_bounds)},
    [NB_HIST_INTER_TOKEN] = {BOUNDS(token_bounds)},
    [NB_HIST_E2E] = {BOUNDS(request_bounds)},
    [NB_HIST_QUEUE] = {BOUNDS(queue_bounds)},
    [NB_HIST_PREFILL] = {BOUNDS(request_bounds)},
    [NB_HIST_DECODE] = {BOUNDS(request_bounds)},
    [NB_HIST_INFERENCE] = {BOUNDS(request_bounds)},
    [NB_HIST_TIME_PER_TOKEN] = {BOUNDS(token_bounds)},
    [NB_HIST_PROMPT_TOKENS] = {BOUNDS(count_bounds)},
    [NB_HIST_UNCACHED_TOKENS] = {BOUNDS(count_bounds)},
    [NB_HIST_GENERATION_TOKENS] = {BOUNDS(count_bounds)},
    [NB_HIST_STEP] = {BOUNDS(step_bounds)},
    [NB_HIST_STEP_TOKENS] = {BOUNDS(rows_bounds)},
};

void nbi_meter_init(nb_engine *e)
{
    static const char *const units[] = {
#define X(name, unit) [name] = unit,
        NB_HISTOGRAM_LIST(X)
#undef X
    };
    for (int i = 0; i < NB_HIST_COUNT; i++) {
        double unit = units[i][0] == 's' ? 1e-9 : 1;
        nbi_histogram_init(&e->histograms[i], table[i].bounds, table[i].n, unit);
    }
}

/* ---------------------------------------------------------------- times */

static uint64_t get(const atomic_uint_fast64_t *at)
{
    return atomic_load_explicit(at, memory_order_relaxed);
}

static void set(atomic_uint_fast64_t *at, uint64_t now)
{
    atomic_store_explicit(at, now, memory_order_relaxed);
}

static uint64_t span(uint64_t from, uint64_t to)
{
    return to > from ? to - from : 0;
}

void nbi_meter_submit(nb_request *r, const nb_request_options *o)
{
    uint64_t now = nbi_now_ns();
    r->count_as = o->count;
    set(&r->clock.submitted, now);
    set(&r->clock.arrival, o->arrival_ns && o->arrival_ns < now ? o->arrival_ns : now);
}

void nbi_meter_stamp(nb_engine *e, nb_request *r)
{
    if (!get(&r->clock.first)) set(&r->clock.first, e->now_ns);
    set(&r->clock.last, e->now_ns);
}

void nb_request_get_times(const nb_request *r, nb_request_times *times)
{
    *times = (nb_request_times){.arrival_ns = get(&r->clock.arrival),
                                .submitted_ns = get(&r->clock.submitted),
                                .admitted_ns = get(&r->clock.admitted),
                                .first_token_ns = get(&r->clock.first),
                                .last_token_ns = get(&r->clock.last)};
}

/* ---------------------------------------------------------------- counting */

void nbi_meter_admit(nb_engine *e, nb_request *r)
{
    uint64_t now = nbi_now_ns();
    set(&r->clock.admitted, now);
    if (r->count_as == NB_COUNT_NONE) return;
    nbi_histogram_add(&e->histograms[NB_HIST_QUEUE], span(get(&r->clock.submitted), now), 1);
    e->stats.prefix_hit_tokens += r->n_cached;
    e->stats.prefix_query_tokens += r->n_prompt;
}

static void first_token(nb_engine *e, nb_request *r, uint64_t now)
{
    if (r->count_as == NB_COUNT_NONE) return;
    pthread_mutex_lock(&e->lock);
    e->stats.request_prompt_tokens += r->n_prompt;
    e->stats.request_cached_tokens += atomic_load(&r->cached_tokens);
    pthread_mutex_unlock(&e->lock);
    if (r->count_as == NB_COUNT_PROMPT) return;
    nbi_histogram_add(&e->histograms[NB_HIST_TTFT], span(get(&r->clock.arrival), now), 1);
}

void nbi_meter_flush(nb_engine *e)
{
    if (e->gap_times)
        nbi_histogram_add(&e->histograms[NB_HIST_INTER_TOKEN], e->gap_ns, e->gap_times);
    e->gap_times = 0;
}

void nbi_meter_tokens(nb_engine *e, nb_request *r, uint32_t n)
{
    uint64_t now = e->now_ns;
    uint64_t last = r->metered_ns;
    if (!last) {
        first_token(e, r, now);
        n--;
        last = now;
    }
    r->metered_ns = now;
    if (!n || r->count_as != NB_COUNT_ALL) return;
    uint64_t gap = span(last, now) / n;
    if (gap != e->gap_ns) nbi_meter_flush(e);
    e->gap_ns = gap;
    e->gap_times += n;
}

/* The distributions of whole requests. */
static void observe(nb_engine *e, const nb_request *r)
{
    nbi_histogram *h = e->histograms;
    uint64_t admitted = get(&r->clock.admitted), first = get(&r->clock.first);
    uint64_t last = get(&r->clock.last), decode = span(first, last);
    uint32_t tokens = r->count_as == NB_COUNT_ALL ? r->n_tokens - r->n_prompt : 0;
    nbi_histogram_add(&h[NB_HIST_E2E], span(get(&r->clock.arrival), last), 1);
    nbi_histogram_add(&h[NB_HIST_PREFILL], span(admitted, first), 1);
    nbi_histogram_add(&h[NB_HIST_DECODE], decode, 1);
    nbi_histogram_add(&h[NB_HIST_INFERENCE], span(admitted, last), 1);
    if (tokens > 1) nbi_histogram_add(&h[NB_HIST_TIME_PER_TOKEN], decode / (tokens - 1), 1);
    nbi_histogram_add(&h[NB_HIST_PROMPT_TOKENS], r->n_prompt, 1);
    nbi_histogram_add(&h[NB_HIST_UNCACHED_TOKENS], r->n_prompt - atomic_load(&r->cached_tokens), 1);
    nbi_histogram_add(&h[NB_HIST_GENERATION_TOKENS], tokens, 1);
}

void nbi_meter_end(nb_engine *e, const nb_request *r)
{
    nb_finish finish = r->finish == NB_FINISH_TIMEOUT ? NB_FINISH_ERROR : r->finish;
    if (r->count_as == NB_COUNT_PROMPT && finish == NB_FINISH_STOP) finish = NB_FINISH_LENGTH;
    if (r->count_as == NB_COUNT_NONE) return;
    if (finish == NB_FINISH_STOP || finish == NB_FINISH_LENGTH || finish == NB_FINISH_REPETITION)
        observe(e, r);
    pthread_mutex_lock(&e->lock);
    e->stats.requests_ended[finish]++;
    pthread_mutex_unlock(&e->lock);
}

static uint64_t decode_bytes(const nb_engine *e, const nbi_batch *b)
{
    uint64_t held = 0;
    for (uint32_t s = 0; s < b->n_seqs; s++) held += (uint64_t)b->seq_len[s];
    return nbi_model_step_bytes(e->model, b->n_rows, b->n_seqs, held - b->n_rows, e->kv.dtype);
}

static void count_shared(nb_engine *e)
{
    nbi_oea_counts c;
    nbi_model_oea_counts(e->model, &c);
    pthread_mutex_lock(&e->lock);
    e->stats.oea_layers = c.layers;
    e->stats.oea_experts_before = c.before;
    e->stats.oea_experts_after = c.after;
    pthread_mutex_unlock(&e->lock);
}

void nbi_meter_step(nb_engine *e, uint64_t begin, const nbi_batch *batch)
{
    const uint64_t ns = span(begin, nbi_now_ns());
    nbi_histogram_add(&e->histograms[NB_HIST_STEP], ns, 1);
    nbi_histogram_add(&e->histograms[NB_HIST_STEP_TOKENS], batch->n_rows, 1);
    if (e->options.oea_k0) count_shared(e);
    if (!nbi_batch_decodes(batch)) return;
    const uint64_t bytes = decode_bytes(e, batch);
    pthread_mutex_lock(&e->lock);
    e->stats.decode_steps++;
    e->stats.decode_ns += ns;
    e->stats.decode_bytes += bytes;
    e->stats.passes_recorded = e->backend->passes_recorded;
    e->stats.passes_launched = e->backend->passes_launched;
    pthread_mutex_unlock(&e->lock);
}

void nb_engine_get_histogram(const nb_engine *e, nb_histogram_id id, nb_histogram *out)
{
    nbi_histogram_read(&e->histograms[id], out);
}
