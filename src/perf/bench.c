/* Steps of the model itself: no scheduler, no sampler, no text. What is timed is
 * nbi_model_forward() with logits of the last row of every sequence. */
#include "perf/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "comm/device_ranks.h"
#include "perf/bandwidth.h"

#define DEVICE_BYTES ((size_t)2 << 30) /* read for a device's bandwidth */
#define TRACE_EVENTS (1u << 18)
#define PASS_BYTES   ((uint64_t)1 << 29) /* a read pass: past every cache, about 20 ms at 25 GB/s */

typedef struct bench {
    const nbi_bench_options *opt;
    nbi_backend *b;
    nbi_model *model;
    nbi_bandwidth *bandwidth; /* NULL: the device's own */
    double device_rate;
    nbi_kv kv;
    uint32_t pages_per_seq, max_rows, n_expanded;
    int32_t *ids, *pos, *row_seq, *seq_first, *seq_len, *expanded, *pages, *logit_rows, *fault,
        *shares;
    void *block;
    double *ms, *rate, *timed_ms, *full_ms; /* [repeat] */
    nbi_timing *timing;                     /* NULL: no breakdown */
    bool timed;                             /* steps are */
    bool shares_experts;                    /* rows do */
    nbi_dtype kv_dtype;
    uint64_t random;
} bench;

static uint32_t next_random(bench *b)
{
    b->random = b->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(b->random >> 33);
}

static nb_status check_options(const nbi_bench_options *o, nb_error *err)
{
    const struct {
        const char *name;
        uint64_t value, max;
    } limits[] = {{"--batch", o->batch, 4096},
                  {"--tokens", o->tokens, 1u << 20},
                  {"--chunk-size", o->chunk, 1u << 16},
                  {"--repeat", o->repeat, 10000}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        if (limits[i].value == 0 || limits[i].value > limits[i].max)
            return nbi_fail(err, NB_INVALID, "%s: %llu; expected 1 to %llu", limits[i].name,
                            (unsigned long long)limits[i].value, (unsigned long long)limits[i].max);
    }
    if (o->oea_k0 && o->prefill)
        return nbi_fail(err, NB_INVALID, "--oea-k0: prompts have all their experts; use decode");
    return NB_OK;
}

/* Tokens that the longest sequence will hold. */
static uint64_t longest(const nbi_bench_options *o)
{
    const uint64_t repeats = (uint64_t)o->repeat * (1 + o->breakdown + (o->oea_k0 > 0)) + 1;
    const uint64_t measured = o->prefill ? o->tokens : repeats * o->tokens;
    return o->context + measured;
}

static size_t carve(bench *b, char *base)
{
    nbi_plan plan = {0};
    const uint32_t n = b->opt->batch;
    const struct {
        int32_t **at;
        size_t n;
    } arrays[] = {{&b->ids, b->max_rows},     {&b->pos, b->max_rows},
                  {&b->row_seq, b->max_rows}, {&b->fault, b->max_rows},
                  {&b->shares, b->max_rows},  {&b->seq_first, n + 1u},
                  {&b->seq_len, n},           {&b->expanded, n},
                  {&b->logit_rows, n},        {&b->pages, (size_t)n * b->pages_per_seq}};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        const size_t at = nbi_plan_add(&plan, arrays[i].n * sizeof(int32_t));
        if (base) *arrays[i].at = (int32_t *)(void *)(base + at);
    }
    return plan.bytes;
}

static nb_status open_all(bench *b, nb_error *err)
{
    const nbi_bench_options *o = b->opt;
    nbi_backend_options bo = o->backend;
    nbi_comm_device(o->ranks, &bo);
    NB_TRY(nbi_backend_open(&b->b, o->device ? o->device : "cpu", &bo, err));
    if (!b->b->ops->read_bandwidth)
        NB_TRY(nbi_bandwidth_open(&b->bandwidth, o->dir, o->backend.n_threads, 0, err));
    nbi_model_options mo = {.dir = o->dir,
                            .comm = o->ranks,
                            .attention = &o->attention,
                            .moe_runner = o->moe_runner ? o->moe_runner : "auto",
                            .tune_file = o->tune_file,
                            .oea_k0 = o->oea_k0,
                            .verify_scales = true};
    if (o->ranks)
        NB_TRY(nbi_shard_make(&mo.shard, nbi_comm_rank(o->ranks), nbi_comm_size(o->ranks),
                              o->ep_size, err));
    mo.shard.latents = o->ranks && o->shard_latents;
    NB_TRY(nbi_model_open(&b->model, b->b, &mo, err));
    const nbi_kv_asked asked = {nbi_model_kv_algo(b->model), o->backend.cpu_level};
    NB_TRY(nbi_kv_dtype_choose(&b->kv_dtype, o->kv_dtype, &asked, err));
    const nbi_config *c = nbi_model_config(b->model);
    const uint64_t length = longest(o);
    if (length > c->max_positions)
        return nbi_fail(err, NB_TOO_LARGE, "%llu tokens in a sequence; the model's limit is %u",
                        (unsigned long long)length, c->max_positions);
    /* A step never splits a sequence's decode tokens; prompts go chunk by chunk, one after another.
     */
    b->max_rows = o->chunk > o->batch ? o->chunk : o->batch;
    b->pages_per_seq = (uint32_t)((length + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS);
    NB_TRY(nbi_model_reserve(b->model, b->max_rows, o->batch, o->batch, (uint32_t)length, err));
    NB_TRY(nbi_kv_create(&b->kv, b->b, nbi_model_local(b->model), b->kv_dtype,
                         o->batch * b->pages_per_seq, err));
    b->block = nbi_calloc(1, carve(b, NULL));
    b->ms = nbi_calloc(4 * (size_t)o->repeat, sizeof *b->ms);
    if (!b->block || !b->ms) return nbi_fail(err, NB_NO_MEMORY, "bench: out of memory");
    b->n_expanded = nbi_model_expanded(b->model, o->context + (o->prefill ? o->tokens : 0));
    b->rate = b->ms + o->repeat;
    b->timed_ms = b->rate + o->repeat;
    b->full_ms = b->timed_ms + o->repeat;
    carve(b, b->block);
    for (uint32_t i = 0; i < o->batch * b->pages_per_seq; i++) b->pages[i] = (int32_t)i;
    if (!o->breakdown) return NB_OK;
    NB_TRY(nbi_model_timing_create(&b->timing, b->model, err));
    NB_TRY(nbi_timing_open_clock(b->timing, err));
    return o->trace ? nbi_timing_keep_events(b->timing, TRACE_EVENTS, err) : NB_OK;
}

static nb_status measure_device(bench *b, nb_error *err)
{
    void *memory = b->b->ops->alloc(b->b, DEVICE_BYTES);
    if (!memory)
        return nbi_fail(err, NB_NO_MEMORY, "bench: no device memory to measure the bandwidth with");
    b->device_rate = b->b->ops->read_bandwidth(b->b, memory, DEVICE_BYTES);
    b->b->ops->release(b->b, memory, DEVICE_BYTES);
    return NB_OK;
}

static void close_all(bench *b)
{
    nbi_timing_destroy(&b->timing);
    if (b->kv.layers) nbi_kv_destroy(&b->kv, b->b);
    nbi_model_close(&b->model);
    nbi_backend_close(&b->b);
    nbi_bandwidth_close(&b->bandwidth);
    nbi_free(b->block);
    nbi_free(b->ms);
}

static nb_status forward(bench *b, const nbi_batch *batch, bool decode, nb_error *err)
{
    float *logits = NULL;
    if (b->timed) nbi_model_time_begin(b->model, b->timing);
    nb_status st = nbi_model_forward(b->model, &b->kv, batch, &logits, err);
    if (st == NB_OK) st = nbi_model_sync(b->model, err);
    if (b->timed) nbi_model_time_end(b->model, b->timing, batch->n_rows, decode);
    return st;
}

/* One step: rows [pos, pos + rows) of sequences [seq, seq + n_seqs). */
static nb_status run_step(bench *b, uint32_t seq, uint32_t n_seqs, uint32_t pos, uint32_t rows,
                          nb_error *err)
{
    const uint32_t vocab = nbi_model_config(b->model)->vocab;
    for (uint32_t s = 0; s < n_seqs; s++) {
        b->seq_first[s] = (int32_t)(s * rows);
        b->seq_len[s] = (int32_t)(pos + rows);
        b->logit_rows[s] = (int32_t)(s * rows + rows - 1);
        b->expanded[s] = (int32_t)b->n_expanded;
        for (uint32_t i = 0; i < rows; i++) {
            const uint32_t at = s * rows + i;
            b->ids[at] = (int32_t)(next_random(b) % vocab);
            b->pos[at] = (int32_t)(pos + i);
            b->row_seq[at] = (int32_t)s;
            b->fault[at] = 0;
            b->shares[at] = b->shares_experts;
        }
    }
    b->seq_first[n_seqs] = (int32_t)(n_seqs * rows);
    const nbi_batch batch = {.n_rows = n_seqs * rows,
                             .n_seqs = n_seqs,
                             .n_logit_rows = n_seqs,
                             .page_stride = b->pages_per_seq,
                             .max_len = pos + rows,
                             .ids = b->ids,
                             .pos = b->pos,
                             .row_seq = b->row_seq,
                             .shares = b->shares,
                             .seq_first = b->seq_first,
                             .seq_len = b->seq_len,
                             .expanded = b->expanded,
                             .page_table = b->pages + (size_t)seq * b->pages_per_seq,
                             .logit_rows = b->logit_rows,
                             .row_fault = b->fault};
    NB_TRY(forward(b, &batch, !b->opt->prefill, err));
    for (uint32_t i = 0; i < batch.n_rows; i++) {
        char what[160];
        if (!b->fault[i]) continue;
        nbi_fault_text(b->fault[i], what, sizeof what);
        return nbi_fail(err, NB_NUMERIC, "bench: %s", what);
    }
    return NB_OK;
}

/* Tokens [begin, end) of every sequence, chunk by chunk. */
static nb_status fill(bench *b, uint32_t begin, uint32_t end, nb_error *err)
{
    for (uint32_t s = 0; s < b->opt->batch; s++) {
        for (uint32_t pos = begin; pos < end; pos += b->opt->chunk) {
            const uint32_t rows = end - pos < b->opt->chunk ? end - pos : b->opt->chunk;
            NB_TRY(run_step(b, s, 1, pos, rows, err));
        }
    }
    return NB_OK;
}

/* One repeat; *pos is the length of the sequences, which decode lets grow. */
static nb_status run_repeat(bench *b, uint32_t *pos, double *ms_per_token, nb_error *err)
{
    const nbi_bench_options *o = b->opt;
    const uint64_t start = nbi_now_ns();
    if (o->prefill)
        NB_TRY(fill(b, *pos, *pos + o->tokens, err));
    else
        for (uint32_t i = 0; i < o->tokens; i++) NB_TRY(run_step(b, 0, o->batch, (*pos)++, 1, err));
    *ms_per_token = (double)(nbi_now_ns() - start) * 1e-6 / ((double)o->batch * o->tokens);
    return NB_OK;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, uint32_t n)
{
    qsort(v, n, sizeof *v, compare);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* Bytes of the measured steps over their tokens. */
static uint64_t bytes_per_token(const bench *b)
{
    const nbi_bench_options *o = b->opt;
    if (!o->prefill)
        return nbi_model_token_bytes(b->model, o->batch, o->context + o->tokens / 2, b->kv_dtype) /
               o->batch;
    const uint32_t rows = o->tokens < o->chunk ? o->tokens : o->chunk;
    NB_ASSERT(rows > 0); /* check_options() */
    /* The cache is read once per chunk, not once per row: left out, it is small beside the weights.
     */
    return nbi_model_token_bytes(b->model, rows, 0, b->kv_dtype) / rows;
}

/* The head runs for one row of every prompt chunk. */
static double macs_per_token(const bench *b)
{
    const nbi_config *c = nbi_model_config(b->model);
    const double all = (double)nbi_model_token_macs(b->model), head = (double)c->vocab * c->hidden;
    if (!b->opt->prefill) return all;
    const uint32_t rows = b->opt->tokens < b->opt->chunk ? b->opt->tokens : b->opt->chunk;
    return all - head + head / rows;
}

static void conclude(bench *b, nbi_bench_result *out)
{
    *out = (nbi_bench_result){0};
    const uint32_t n = b->opt->repeat;
    out->bytes_per_token = bytes_per_token(b);
    out->read_bandwidth = median(b->rate, n);
    out->ms_per_token = median(b->ms, n);
    out->ms_per_token_min = b->ms[0];
    out->ms_per_token_max = b->ms[n - 1];
    out->floor_ms = 1e3 * (double)out->bytes_per_token / out->read_bandwidth;
    out->tokens_per_s = 1e3 / out->ms_per_token;
    out->share_of_floor = out->floor_ms / out->ms_per_token;
    out->gmac_per_s = 1e-6 * macs_per_token(b) / out->ms_per_token;
    out->weight_bytes = nbi_model_weight_bytes(b->model);
    out->n_threads = b->bandwidth ? nbi_bandwidth_threads(b->bandwidth) : 0;
    if (b->opt->oea_k0) {
        nbi_oea_counts c;
        nbi_model_oea_counts(b->model, &c);
        const double layers = c.layers ? (double)c.layers : 1;
        out->full_ms_per_token = median(b->full_ms, n);
        out->experts_before = (double)c.before / layers;
        out->experts_after = (double)c.after / layers;
    }
    if (b->timing) {
        out->timed_ms_per_token = median(b->timed_ms, n);
        nbi_breakdown_make(&out->breakdown, b->timing, !b->opt->prefill, out->read_bandwidth);
    }
    snprintf(out->runner, sizeof out->runner, "%s", nbi_model_runner(b->model));
    snprintf(out->device, sizeof out->device, "%s", b->b->description);
}

/* The same with all experts. */
static nb_status run_full(bench *b, uint32_t *pos, double *ms_per_token, nb_error *err)
{
    b->shares_experts = false;
    const nb_status st = run_repeat(b, pos, ms_per_token, err);
    b->shares_experts = true;
    return st;
}

/* The same with every operator timed; events are those of the last one. */
static nb_status run_timed(bench *b, uint32_t *pos, double *ms_per_token, nb_error *err)
{
    if (b->opt->trace) NB_TRY(nbi_timing_keep_events(b->timing, TRACE_EVENTS, err));
    b->timed = true;
    const nb_status st = run_repeat(b, pos, ms_per_token, err);
    b->timed = false;
    return st;
}

static nb_status write_trace(const bench *b, nb_error *err)
{
    nbi_buf text = {0};
    nb_status st = nbi_trace_json(&text, b->timing, b->opt->dir, b->b->description, NULL);
    if (st != NB_OK)
        st = nbi_fail(err, st, "%s: no memory for the trace", b->opt->trace);
    else
        st = nbi_file_write(b->opt->trace, text.data, text.len, err);
    nbi_buf_free(&text);
    return st;
}

static nb_status measure(bench *b, nbi_bench_result *out, nb_error *err)
{
    const nbi_bench_options *o = b->opt;
    uint32_t pos = o->context;
    double unused;
    if (!b->bandwidth) NB_TRY(measure_device(b, err));
    NB_TRY(fill(b, 0, o->context, err));
    b->shares_experts = o->oea_k0 > 0;
    NB_TRY(run_repeat(b, &pos, &unused, err)); /* warm: pages, caches, clocks */
    for (uint32_t i = 0; i < o->repeat; i++) {
        b->rate[i] = b->bandwidth ? nbi_bandwidth_pass(b->bandwidth, PASS_BYTES) : b->device_rate;
        NB_TRY(run_repeat(b, &pos, &b->ms[i], err));
        if (o->oea_k0) NB_TRY(run_full(b, &pos, &b->full_ms[i], err));
        if (b->timing) NB_TRY(run_timed(b, &pos, &b->timed_ms[i], err));
    }
    conclude(b, out);
    return o->breakdown && o->trace ? write_trace(b, err) : NB_OK;
}

nb_status nbi_bench_run(nbi_bench_result *out, const nbi_bench_options *opt, nb_error *err)
{
    NB_TRY(check_options(opt, err));
    bench b = {.opt = opt, .random = opt->seed};
    nb_status st = open_all(&b, err);
    if (st == NB_OK) st = measure(&b, out, err);
    close_all(&b);
    return st;
}
