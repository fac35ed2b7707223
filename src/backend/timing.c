/* The timed table. Callers: bench, engine/profile.c, model/timed_runner.c. */
#include "backend/timing.h"

#include <math.h>
#include <string.h>

#include "backend/kv_shape.h"
#include "base/clock.h"

#define MARKS   16384u /* of one step: two per launch */
#define PASSES  16u    /* of one step; two more marks each, behind the others */
#define WAITING 16u    /* operators that one launch may do */

/* One operator call. */
typedef struct call {
    const char *name;
    double bytes;
    double shared; /* of them a shared expert's, whose part of the time goes by bytes */
    uint16_t layer;
    uint8_t part, op;
    bool in_pass;
} call;

/* Device clock: what marks[first] and marks[first + 1] enclose. */
typedef struct span {
    call what;
    uint32_t first;
} span;

struct nbi_timing {
    nbi_backend *b;
    const nbi_backend_ops *ops; /* the backend's own */
    const nbi_backend_clock *clock;
    nbi_backend_ops timed;
    nbi_timing_table tables[2]; /* [decode] */
    nbi_timing_table step;      /* of the step under way */

    /* the step under way */
    uint64_t begin_ns, pass_begin_ns, pass_ns, in_pass_ns, outside_ns;
    bool in_pass, drafting;
    uint32_t n_rows, layer;
    uint8_t linear_part;    /* of the last linear layer */
    double kv_tokens;       /* in the caches before this pass */
    const nbi_batch *batch; /* host form */

    /* the call under way */
    uint64_t call_ns, launches;
    call waiting[WAITING];
    uint32_t n_waiting;

    span *spans; /* [MARKS / 2] with a device clock */
    uint32_t n_spans, n_marks, n_passes;

    uint32_t n_experts, top_k, n_layers;
    const uint64_t *expert_bytes, *shared_bytes;
    const void *runner;

    nbi_timed_event *events; /* [max_events] */
    uint32_t max_events;
    uint64_t n_events; /* ever */
    uint32_t n_steps;
};

const char *nbi_timed_op_name(nbi_timed_op op)
{
    static const char *const names[] = {
#define X(suffix, name) name,
        NBI_TIMED_OP_LIST(X)
#undef X
    };
    return op < NBI_TIMED_OP_COUNT ? names[op] : "step";
}

const char *nbi_timed_part_name(uint32_t part)
{
    static const char *const names[NBI_TIMED_PART_COUNT] = {
#define X(suffix, name) name,
        NBI_PART_LIST(X)
#undef X
            [NBI_TIMED_SAMPLING] = "sampling",
        [NBI_TIMED_DRAFTING] = "drafting"};
    return part < NBI_TIMED_PART_COUNT ? names[part] : "step";
}

/* ---------------------------------------------------------------- a call */

static void keep(nbi_timing *t, const nbi_timed_event *event)
{
    if (!t->max_events) return;
    t->events[t->n_events++ % t->max_events] = *event;
}

static void count_bytes(nbi_timed_row *row, double bytes)
{
    row->calls++;
    row->bytes += bytes;
}

static void count(nbi_timing *t, const call *c)
{
    count_bytes(&t->step.rows[c->part][c->op], c->bytes - c->shared);
    if (c->shared > 0) count_bytes(&t->step.rows[NBI_PART_SHARED][c->op], c->shared);
}

static void count_ns(nbi_timed_row *row, uint64_t ns)
{
    row->ns += ns;
    if (ns > row->max_ns) row->max_ns = ns;
}

static void count_time(nbi_timing *t, const call *c, uint64_t begin_ns, uint64_t ns)
{
    const uint64_t shared = c->shared > 0 ? (uint64_t)((double)ns * c->shared / c->bytes) : 0;
    count_ns(&t->step.rows[c->part][c->op], ns - shared);
    if (c->shared > 0) count_ns(&t->step.rows[NBI_PART_SHARED][c->op], shared);
    *(c->in_pass ? &t->in_pass_ns : &t->outside_ns) += ns;
    keep(t, &(nbi_timed_event){.name = c->name,
                               .begin_ns = begin_ns,
                               .ns = ns,
                               .bytes = c->bytes,
                               .step = t->n_steps,
                               .layer = c->layer,
                               .part = c->part,
                               .op = c->op});
}

static void call_begin(nbi_timing *t)
{
    if (!t->clock) {
        t->call_ns = nbi_now_ns();
        return;
    }
    bool waits;
    t->launches = t->clock->launches(t->b, &waits);
    if (t->n_marks + 2 <= MARKS) t->clock->mark(t->b, t->n_marks);
}

/* A launch was made: by the calls that waited for it, and this one unless it waits itself now. */
static void launched(nbi_timing *t, const call *c, bool waits)
{
    const call *most = waits && t->n_waiting ? &t->waiting[0] : c;
    for (uint32_t i = 0; i < t->n_waiting; i++)
        if (t->waiting[i].bytes > most->bytes) most = &t->waiting[i];
    if (t->n_marks + 2 <= MARKS) {
        t->clock->mark(t->b, t->n_marks + 1);
        t->spans[t->n_spans++] = (span){.what = *most, .first = t->n_marks};
        t->n_marks += 2;
    }
    t->n_waiting = 0;
}

/* shared: of the bytes those of a shared expert. */
static void call_end_shared(nbi_timing *t, nbi_timed_op op, uint32_t part, double bytes,
                            double shared, const char *name)
{
    const call c = {.name = name ? name : nbi_timed_op_name(op),
                    .bytes = t->drafting ? 0 : bytes,
                    .shared = t->drafting ? 0 : shared,
                    .layer = (uint16_t)t->layer,
                    .part = (uint8_t)(t->drafting ? NBI_TIMED_DRAFTING : part),
                    .op = (uint8_t)op,
                    .in_pass = t->in_pass};
    count(t, &c);
    if (!t->clock) {
        count_time(t, &c, t->call_ns, nbi_now_ns() - t->call_ns);
        return;
    }
    bool waits;
    if (t->clock->launches(t->b, &waits) != t->launches) launched(t, &c, waits);
    if (waits && t->n_waiting < WAITING) t->waiting[t->n_waiting++] = c;
}

static void call_end(nbi_timing *t, nbi_timed_op op, uint32_t part, double bytes, const char *name)
{
    call_end_shared(t, op, part, bytes, 0, name);
}

/* ---------------------------------------------------------------- operators */

/* Tokens that the cache of a sequence held before this pass. */
static uint32_t cached(const nbi_batch *host, uint32_t s)
{
    return (uint32_t)(host->seq_len[s] - (host->seq_first[s + 1] - host->seq_first[s]));
}

/* Of a position. */
static double latent_bytes(const nbi_kv_layer *cache, uint32_t kv_lora, uint32_t rope)
{
    const nbi_kv_shape s = nbi_kv_latent_shape(cache->dtype, kv_lora, rope);
    return nbi_kv_position_bytes(&s);
}

static double head_bytes(const nbi_kv_layer *cache, uint32_t n_heads, uint32_t dim)
{
    const nbi_kv_shape s = nbi_kv_head_shape(cache->dtype, n_heads, dim);
    return nbi_kv_position_bytes(&s);
}

static double weight_bytes(const nbi_weight *w)
{
    return (double)nbi_matrix_bytes(&w->host);
}

/* Of the cache that attention with a selection of topk positions reads. */
static double selected_tokens(const nbi_timing *t, const int32_t *select, uint32_t topk)
{
    if (!select) return t->kv_tokens;
    double sum = 0;
    for (uint32_t s = 0; s < t->batch->n_seqs; s++) {
        const uint32_t held = cached(t->batch, s);
        sum += held < topk ? held : topk;
    }
    return sum;
}

/* A tied head is the embedding's matrix. */
static uint32_t linear_part(nbi_timing *t, const nbi_linear_args *a)
{
    t->linear_part = a->w->part == NBI_PART_EMBEDDING ? NBI_PART_HEAD : a->w->part;
    return t->linear_part;
}

static uint32_t norm_part(nbi_timing *t, const nbi_rmsnorm_args *a)
{
    if (a->row_fault) t->layer = a->layer; /* those of the residual; others are within a layer */
    return NBI_PART_NORM;
}

static double mla_attend_bytes(const nbi_timing *t, const nbi_mla_attend_args *a)
{
    return weight_bytes(a->kv_b) + selected_tokens(t, a->select, a->select_stride) *
                                       latent_bytes(a->cache, a->kv_lora, a->rope_dim);
}

/* Operator `op` with arguments `a`; `part_of`, `bytes` and `called` are expressions of `t` and `a`.
 */
#define TIMED(op, OP, part_of, bytes, called)                        \
    static void timed_##op(nbi_backend *b, const nbi_##op##_args *a) \
    {                                                                \
        nbi_timing *t = b->timing;                                   \
        const uint32_t part = (part_of);                             \
        call_begin(t);                                               \
        t->ops->op(b, a);                                            \
        call_end(t, NBI_TIMED_##OP, part, (bytes), (called));        \
    }

TIMED(embed, EMBED, NBI_PART_EMBEDDING, t->n_rows *(double)nbi_matrix_row_bytes(&a->table->host),
      NULL)
TIMED(rope_table, ROPE_TABLE, NBI_PART_NORM, 0, NULL)
TIMED(rmsnorm, RMSNORM, norm_part(t, a), sizeof(float) * (double)a->width, NULL)
TIMED(linear, LINEAR, linear_part(t, a), weight_bytes(a->w), a->w->host.name)
TIMED(swiglu, SWIGLU, t->linear_part, 0, NULL)
TIMED(mla_append, MLA_APPEND, NBI_PART_KV_WRITE,
      (double)t->n_rows *latent_bytes(a->cache, a->kv_lora, a->rope_dim), NULL)
TIMED(mla_attend, MLA_ATTEND, NBI_PART_KV_READ, mla_attend_bytes(t, a), NULL)
TIMED(gqa_append, GQA_APPEND, NBI_PART_KV_WRITE,
      2.0 * t->n_rows * head_bytes(a->cache, a->n_kv_heads, a->head_dim), NULL)
TIMED(gqa_attend, GQA_ATTEND, NBI_PART_KV_READ,
      2.0 * t->kv_tokens * head_bytes(a->cache, a->n_kv_heads, a->head_dim), NULL)
TIMED(index_append, INDEX_APPEND, NBI_PART_KV_WRITE,
      (double)t->n_rows *head_bytes(a->cache, 1, a->index_dim), NULL)
TIMED(index_select, INDEX_SELECT, NBI_PART_KV_READ,
      t->kv_tokens *head_bytes(a->cache, 1, a->index_dim), NULL)
TIMED(index_reuse, INDEX_REUSE, NBI_PART_INDEXER, 0, NULL)
TIMED(route, ROUTE, NBI_PART_ROUTER, 0, NULL)
TIMED(gather, GATHER, NBI_PART_HEAD, 0, NULL)
TIMED(add, ADD, NBI_PART_SHARED, 0, NULL)
TIMED(sample, SAMPLE, NBI_TIMED_SAMPLING, 0, NULL)
#undef TIMED

void nbi_timing_experts(nbi_timing *t, uint32_t n_experts, uint32_t top_k,
                        const uint64_t *expert_bytes, const uint64_t *shared_bytes,
                        uint32_t n_layers, const void *runner)
{
    t->runner = runner;
    t->n_experts = n_experts;
    t->top_k = top_k;
    t->expert_bytes = expert_bytes;
    t->shared_bytes = shared_bytes;
    t->n_layers = n_layers;
}

const void *nbi_timing_experts_begin(nbi_timing *t)
{
    call_begin(t);
    return t->runner;
}

void nbi_timing_experts_end(nbi_timing *t, uint32_t n_rows)
{
    double bytes = 0, shared = 0;
    if (t->n_experts && t->layer < t->n_layers) {
        const double missed = 1 - (double)t->top_k / t->n_experts;
        bytes = t->n_experts * (1 - pow(missed, n_rows)) * (double)t->expert_bytes[t->layer];
        shared = (double)t->shared_bytes[t->layer];
    }
    call_end_shared(t, NBI_TIMED_EXPERTS, NBI_PART_ROUTED, bytes + shared, shared, NULL);
}

/* A transport may launch nothing that the device's counter sees: its marks are made in any case. */
void nbi_timing_collective_begin(nbi_timing *t)
{
    call_begin(t);
}

void nbi_timing_collective_end(nbi_timing *t, nbi_timed_op op, double bytes)
{
    if (t->clock) t->launches = UINT64_MAX;
    call_end(t, op, NBI_PART_COLLECTIVES, bytes, NULL);
}

/* ---------------------------------------------------------------- passes and steps */

static bool timed_step_begin(nbi_backend *b, const nbi_batch *host, uint32_t pass,
                             const nbi_batch **device)
{
    nbi_timing *t = b->timing;
    t->pass_begin_ns = nbi_now_ns();
    if (t->clock && t->n_passes < PASSES) t->clock->mark(b, MARKS + 2 * t->n_passes);
    t->in_pass = true;
    t->drafting = pass != 0;
    t->n_rows = host->n_rows;
    t->layer = 0;
    t->batch = host;
    t->kv_tokens = 0;
    for (uint32_t s = 0; s < host->n_seqs; s++) t->kv_tokens += cached(host, s);
    return t->ops->step_begin(b, host, pass, device);
}

static nb_status timed_step_end(nbi_backend *b, nb_error *err)
{
    nbi_timing *t = b->timing;
    call_begin(t); /* what still waits is done in here */
    const nb_status st = t->ops->step_end(b, err);
    const call none = {.name = "end", .part = NBI_PART_NORM, .op = NBI_TIMED_RMSNORM};
    if (t->clock && t->n_waiting) launched(t, &none, true);
    if (!t->clock)
        t->pass_ns += nbi_now_ns() - t->pass_begin_ns;
    else if (t->n_passes < PASSES)
        t->clock->mark(b, MARKS + 2 * t->n_passes++ + 1);
    t->in_pass = false;
    return st;
}

void nbi_timing_step_begin(nbi_timing *t)
{
    NB_ASSERT(!t->b->timing && (!t->clock || t->spans));
    memset(&t->step, 0, sizeof t->step);
    t->pass_ns = t->in_pass_ns = t->outside_ns = 0;
    t->n_spans = t->n_marks = t->n_passes = t->n_waiting = 0;
    t->in_pass = t->drafting = false;
    t->b->timing = t;
    t->b->ops = &t->timed;
    if (t->clock) t->clock->on(t->b, true);
    t->begin_ns = nbi_now_ns();
    if (t->clock) t->clock->mark(t->b, t->n_marks++);
}

static void add_table(nbi_timing_table *to, const nbi_timing_table *from)
{
    for (int part = 0; part < NBI_TIMED_PART_COUNT; part++) {
        for (int op = 0; op < NBI_TIMED_OP_COUNT; op++) {
            const nbi_timed_row *a = &from->rows[part][op];
            nbi_timed_row *b = &to->rows[part][op];
            b->calls += a->calls;
            b->ns += a->ns;
            b->bytes += a->bytes;
            if (a->max_ns > b->max_ns) b->max_ns = a->max_ns;
        }
    }
    to->steps++;
    to->tokens += from->tokens;
    to->step_ns += from->step_ns;
    to->launch_ns += from->launch_ns;
    to->host_ns += from->host_ns;
}

static uint64_t less(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* What the device's clock says of the step. */
static void read_clock(nbi_timing *t)
{
    const nbi_backend_clock *clock = t->clock;
    nb_error ignored; /* of the device: the next call that is not timed meets it, too */
    if (t->ops->sync(t->b, &ignored) != NB_OK) return;
    for (uint32_t i = 0; i < t->n_spans; i++) {
        const span *s = &t->spans[i];
        const uint64_t begin = t->begin_ns + clock->ns(t->b, 0, s->first);
        count_time(t, &s->what, begin, clock->ns(t->b, s->first, s->first + 1));
    }
    for (uint32_t i = 0; i < t->n_passes; i++)
        t->pass_ns += clock->ns(t->b, MARKS + 2 * i, MARKS + 2 * i + 1);
}

void nbi_timing_step_cancel(nbi_timing *t)
{
    NB_ASSERT(t->b->timing == t);
    t->b->ops = t->ops;
    t->b->timing = NULL;
    if (t->clock) t->clock->on(t->b, false);
}

void nbi_timing_step_end(nbi_timing *t, uint32_t n_rows, bool decode)
{
    const uint64_t end_ns = nbi_now_ns();
    nbi_timing_step_cancel(t);
    if (t->clock) read_clock(t);
    t->step.tokens = n_rows;
    t->step.step_ns = end_ns - t->begin_ns;
    t->step.launch_ns = less(t->pass_ns, t->in_pass_ns);
    t->step.host_ns = less(t->step.step_ns, t->pass_ns + t->outside_ns);
    add_table(&t->tables[decode], &t->step);
    keep(t, &(nbi_timed_event){.name = decode ? "decode step" : "prefill step",
                               .begin_ns = t->begin_ns,
                               .ns = t->step.step_ns,
                               .step = t->n_steps,
                               .rows = n_rows,
                               .op = NBI_TIMED_OP_COUNT});
    t->n_steps++;
}

/* ---------------------------------------------------------------- life */

static void fill_table(nbi_timing *t)
{
    nbi_backend_ops *o = &t->timed;
    *o = *t->ops;
    o->step_begin = timed_step_begin;
    o->step_end = timed_step_end;
#define TAKE(op) o->op = timed_##op
    TAKE(embed), TAKE(rope_table), TAKE(rmsnorm), TAKE(linear), TAKE(swiglu);
    TAKE(mla_append), TAKE(mla_attend), TAKE(gqa_append), TAKE(gqa_attend);
    TAKE(index_append), TAKE(index_select), TAKE(index_reuse);
    TAKE(route), TAKE(gather), TAKE(add), TAKE(sample);
#undef TAKE
}

nb_status nbi_timing_create(nbi_timing **out, nbi_backend *b, nb_error *err)
{
    nbi_timing *t = nbi_calloc(1, sizeof *t);
    if (!t) return nbi_fail(err, NB_NO_MEMORY, "timing: out of memory");
    t->b = b;
    t->ops = b->ops;
    t->clock = b->ops->clock;
    fill_table(t);
    *out = t;
    return NB_OK;
}

nb_status nbi_timing_open_clock(nbi_timing *t, nb_error *err)
{
    if (!t->clock || t->spans) return NB_OK;
    span *spans = nbi_calloc(MARKS / 2, sizeof *spans);
    if (!spans) return nbi_fail(err, NB_NO_MEMORY, "timing: out of memory");
    const nb_status st = t->clock->open(t->b, MARKS + 2 * PASSES, err);
    if (st == NB_OK)
        t->spans = spans;
    else
        nbi_free(spans);
    return st;
}

void nbi_timing_destroy(nbi_timing **t)
{
    if (!*t) return;
    NB_ASSERT(!(*t)->b->timing);
    nbi_free((*t)->events);
    nbi_free((*t)->spans);
    nbi_free(*t);
    *t = NULL;
}

nb_status nbi_timing_keep_events(nbi_timing *t, uint32_t n, nb_error *err)
{
    nbi_timed_event *events = n ? nbi_calloc(n, sizeof *events) : NULL;
    if (n && !events) return nbi_fail(err, NB_NO_MEMORY, "timing: no memory for %u events", n);
    nbi_free(t->events);
    t->events = events;
    t->max_events = n;
    t->n_events = 0;
    t->n_steps = 0;
    return NB_OK;
}

void nbi_timing_clear(nbi_timing *t)
{
    memset(t->tables, 0, sizeof t->tables);
    t->n_events = 0;
    t->n_steps = 0;
}

const nbi_timing_table *nbi_timing_of(const nbi_timing *t, bool decode)
{
    return &t->tables[decode];
}

const nbi_timing_table *nbi_timing_last(const nbi_timing *t)
{
    return &t->step;
}

uint32_t nbi_timing_n_events(const nbi_timing *t, uint64_t *lost)
{
    *lost = t->n_events > t->max_events ? t->n_events - t->max_events : 0;
    return (uint32_t)(t->n_events - *lost);
}

const nbi_timed_event *nbi_timing_event(const nbi_timing *t, uint32_t i)
{
    const uint64_t lost = t->n_events > t->max_events ? t->n_events - t->max_events : 0;
    return &t->events[(lost + i) % t->max_events];
}

bool nbi_timing_on_device(const nbi_timing *t)
{
    return t->clock != NULL;
}

bool nbi_timing_is_light(const nbi_timing *t)
{
    return !t->clock || t->clock->light(t->b);
}
