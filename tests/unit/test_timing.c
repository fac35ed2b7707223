/* Timed steps on the CPU, or in a build with CUDA on that (NBI_TEST_TIMING_CUDA): the bytes they
 * count are the roofline's, times add up to the step, nothing of the result changes. */
#include "cmocka_all.h"

#include <math.h>
#include <string.h>

#include "backend/timing_report.h"
#include "base/json.h"
#include "model/census.h"
#include "model/model.h"
#include "perf/roofline.h"

#define DATA NBI_TEST_SOURCE_DIR "/tests/golden/data/"
#define MLA  DATA "glm52-bf16" /* its indexer keeps 12 positions */
#define FP4  DATA "v32-nvfp4"  /* 10 */
#define GQA  DATA "qwen3-nvfp4"

#ifdef NBI_TEST_TIMING_CUDA
#define DEVICE "cuda"
#else
#define DEVICE "cpu"
#endif

enum { MLA_KEPT = 12, PROMPT = 40, ROWS = 64, KEPT = 8 };

typedef struct rig {
    nbi_backend *b;
    nbi_model *m;
    nbi_kv kv;
    nbi_timing *t;
    int32_t ids[ROWS], pos[ROWS], row_seq[ROWS], fault[ROWS];
    int32_t first[2], len, page, logit;
    nbi_batch batch;
} rig;

static void open_rig(rig *r, const char *dir)
{
    nb_error err = {0};
    const nbi_backend_options bo = {.cpu_level = NBI_CPU_REFERENCE, .n_threads = 1};
    const nbi_model_options mo = {.dir = dir, .moe_runner = "auto"};
    *r = (rig){0};
    if (nbi_backend_open(&r->b, DEVICE, &bo, &err) || nbi_model_open(&r->m, r->b, &mo, &err) ||
        nbi_model_reserve(r->m, ROWS, 1, 1, 64, &err) ||
        nbi_kv_create(&r->kv, r->b, nbi_model_config(r->m), NBI_F32, 1, &err) ||
        nbi_model_timing_create(&r->t, r->m, &err) || nbi_timing_open_clock(r->t, &err))
        fail_msg("%s", err.text);
}

static void close_rig(rig *r)
{
    nbi_timing_destroy(&r->t);
    nbi_kv_destroy(&r->kv, r->b);
    nbi_model_close(&r->m);
    nbi_backend_close(&r->b);
}

/* Rows [from, to) of the one sequence; the logits of the last. */
static const float *step(rig *r, uint32_t from, uint32_t to, bool timed)
{
    static float out[1 << 16];
    nb_error err = {0};
    float *logits;
    const uint32_t rows = to - from, vocab = nbi_model_config(r->m)->vocab;
    assert_true(vocab <= sizeof out / sizeof *out);
    for (uint32_t i = 0; i < rows; i++) {
        r->ids[i] = (int32_t)(((from + i) * 11 + 5) % vocab);
        r->pos[i] = (int32_t)(from + i);
        r->row_seq[i] = r->fault[i] = 0;
    }
    r->first[1] = (int32_t)rows;
    r->len = (int32_t)to;
    r->logit = (int32_t)rows - 1;
    r->batch = (nbi_batch){.n_rows = rows,
                           .n_seqs = 1,
                           .n_logit_rows = 1,
                           .page_stride = 1,
                           .max_len = to,
                           .ids = r->ids,
                           .pos = r->pos,
                           .row_seq = r->row_seq,
                           .seq_first = r->first,
                           .seq_len = &r->len,
                           .page_table = &r->page,
                           .logit_rows = &r->logit,
                           .row_fault = r->fault};
    if (timed) nbi_model_time_begin(r->m, r->t);
    if (nbi_model_forward(r->m, &r->kv, &r->batch, &logits, &err)) fail_msg("%s", err.text);
    if (nbi_model_sync(r->m, &err)) fail_msg("%s", err.text);
    if (timed) nbi_model_time_end(r->m, r->t, rows, rows == 1);
    nbi_model_read_logits(r->m, out, logits, 1);
    return out;
}

static nbi_roofline roofline_of(const char *dir, uint64_t context)
{
    nb_error err = {0};
    nbi_census census;
    nbi_roofline r;
    nbi_roof_options o = {.config = &census.config,
                          .kv_dtype = NBI_F32,
                          .device = {.name = "t", .label = "t", .bandwidth = 1e9},
                          .tp = 1,
                          .ep = 1,
                          .pp = 1,
                          .batch = 1,
                          .context = context,
                          .memory_share = 0.9};
    if (nbi_census_open(&census, dir, false, &err)) fail_msg("%s", err.text);
    nbi_census_fit(&census, false);
    o.module_bytes = census.module_bytes;
    if (nbi_roofline_run(&r, &o, &err)) fail_msg("%s", err.text);
    nbi_census_close(&census);
    return r;
}

static double counted(const nbi_timing_table *t, nbi_part part)
{
    double bytes = 0;
    for (int op = 0; op < NBI_TIMED_OP_COUNT; op++) bytes += t->rows[part][op].bytes;
    return bytes;
}

static void assert_near(const char *what, double a, double b)
{
    if (fabs(a - b) > 1e-6 * fabs(b) + 0.5)
        fail_msg("%s: %.1f bytes counted, the roofline has %.1f", what, a, b);
}

/* A step behind `context` tokens. The roofline's norms are as stored, the operators' F32. */
static void compare(const char *dir, uint32_t context, bool mla)
{
    rig r;
    open_rig(&r, dir);
    step(&r, 0, context, false);
    step(&r, context, context + 1, true);
    const nbi_timing_table *t = nbi_timing_of(r.t, true);
    const nbi_roofline roof = roofline_of(dir, context);
    static const nbi_part same[] = {NBI_PART_INDEXER,  NBI_PART_ROUTER, NBI_PART_ROUTED,
                                    NBI_PART_SHARED,   NBI_PART_DENSE,  NBI_PART_HEAD,
                                    NBI_PART_EMBEDDING};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        assert_near(nbi_timed_part_name(same[i]), counted(t, same[i]), roof.parts[same[i]].bytes);
    assert_true(counted(t, NBI_PART_ROUTED) > 0);
    assert_near("cache write", counted(t, NBI_PART_KV_WRITE), roof.parts[NBI_PART_KV_WRITE].bytes);
    const double read = counted(t, NBI_PART_KV_READ),
                 roof_read = roof.parts[NBI_PART_KV_READ].bytes;
    const double weights = counted(t, NBI_PART_ATTENTION);
    assert_near("attention and cache read", weights + read,
                roof.parts[NBI_PART_ATTENTION].bytes + roof_read);
    if (!mla) assert_near("cache read", read, roof_read);
    /* What `bench` and /metrics hold a step against: all of it but vectors and what is written. */
    const double must = (double)nbi_model_step_bytes(r.m, 1, 1, context, NBI_F32);
    assert_near("step", must,
                roof.step.bytes - roof.parts[NBI_PART_NORM].bytes -
                    roof.parts[NBI_PART_KV_WRITE].bytes);
    assert_true(counted(t, NBI_PART_NORM) > 0);
    assert_true(counted(t, NBI_PART_NORM) <= 2 * roof.parts[NBI_PART_NORM].bytes + 0.5);
    close_rig(&r);
}

static void bytes_are_the_rooflines(void **state)
{
    (void)state;
#ifndef NBI_TEST_TIMING_CUDA /* there a step has the length of its bucket, beyond the few kept */
    for (uint32_t context = MLA_KEPT - 1; context <= MLA_KEPT + 1; context++)
        compare(MLA, context, true);
#endif
    compare(MLA, PROMPT, true);
    compare(FP4, PROMPT, true);
    compare(GQA, PROMPT, false);
}

static void times_add_up(void **state)
{
    (void)state;
    rig r;
    open_rig(&r, MLA);
    step(&r, 0, PROMPT, true);
    for (uint32_t i = 0; i < 3; i++) { /* of a device: at first launched, recorded, replayed */
        step(&r, PROMPT + i, PROMPT + i + 1, true);
        assert_true(nbi_timing_last(r.t)->rows[NBI_PART_ATTENTION][NBI_TIMED_LINEAR].ns > 0);
        assert_true(nbi_timing_last(r.t)->rows[NBI_PART_ROUTED][NBI_TIMED_EXPERTS].ns > 0);
    }
    for (int decode = 0; decode < 2; decode++) {
        const nbi_timing_table *t = nbi_timing_of(r.t, decode);
        uint64_t sum = t->launch_ns + t->host_ns, calls = 0;
        for (int part = 0; part < NBI_TIMED_PART_COUNT; part++) {
            for (int op = 0; op < NBI_TIMED_OP_COUNT; op++) {
                sum += t->rows[part][op].ns;
                calls += t->rows[part][op].calls;
            }
        }
        assert_int_equal(t->steps, decode ? 3 : 1);
        assert_int_equal(t->tokens, decode ? 3 : PROMPT);
        assert_int_equal(sum, t->step_ns);
        assert_true(calls > 20 * t->steps);
        nbi_breakdown b;
        nbi_breakdown_make(&b, r.t, decode, 1e9);
        double ms = 0;
        for (uint32_t i = 0; i < b.n_rows; i++) ms += b.rows[i].ms;
        assert_true(fabs(ms - b.step.ms) < 1e-9 * b.step.ms);
        assert_int_equal(b.n_slowest, NBI_BREAKDOWN_SLOWEST);
        for (uint32_t i = 0; i < b.n_slowest; i++) assert_true(b.slowest[i].why[0]);
        for (uint32_t i = 1; i < b.n_slowest; i++)
            assert_true(b.slowest[i - 1].lost_ms >= b.slowest[i].lost_ms);
    }
    nbi_timing_clear(r.t);
    assert_int_equal(nbi_timing_of(r.t, true)->steps, 0);
    close_rig(&r);
}

static void results_stay(void **state)
{
    (void)state;
    static float plain[1 << 16];
    rig r;
    open_rig(&r, MLA);
    const size_t bytes = nbi_model_config(r.m)->vocab * sizeof(float);
    const nbi_backend_ops *ops = r.b->ops;
    memcpy(plain, step(&r, 0, PROMPT, false), bytes);
    assert_memory_equal(step(&r, 0, PROMPT, true), plain, bytes);
    assert_ptr_equal(r.b->ops, ops);
    assert_null(r.b->timing);
    assert_memory_equal(step(&r, 0, PROMPT, false), plain, bytes);
    assert_int_equal(nbi_timing_of(r.t, false)->steps, 1);
    close_rig(&r);
}

/* The ring keeps the last events; the trace is a JSON object of the Trace Event Format. */
static void events_are_the_last(void **state)
{
    (void)state;
    rig r;
    nb_error err = {0};
    uint64_t lost;
    nbi_buf text = {0};
    json_t *trace;
    open_rig(&r, GQA);
    if (nbi_timing_keep_events(r.t, KEPT, &err)) fail_msg("%s", err.text);
    assert_int_equal(nbi_timing_n_events(r.t, &lost), 0);
    for (uint32_t i = 0; i < 2; i++) step(&r, i, i + 1, true);
    assert_int_equal(nbi_timing_n_events(r.t, &lost), KEPT);
    assert_true(lost > KEPT);
    assert_int_equal(nbi_timing_event(r.t, KEPT - 1)->op, NBI_TIMED_OP_COUNT);
    assert_int_equal(nbi_timing_event(r.t, KEPT - 1)->step, 1);
    for (uint32_t i = 1; i < KEPT - 1; i++) {
        const nbi_timed_event *a = nbi_timing_event(r.t, i - 1), *b = nbi_timing_event(r.t, i);
        assert_true(b->begin_ns >= a->begin_ns + a->ns);
    }
    if (nbi_trace_json(&text, r.t, "a \"model\"", "cpu", NULL)) fail_msg("no trace");
    if (nbi_json_parse(&trace, text.data, text.len, "trace", &err)) fail_msg("%s", err.text);
    assert_int_equal(json_array_size(json_object_get(trace, "traceEvents")), KEPT + 3);
    json_decref(trace);
    nbi_buf_free(&text);
    close_rig(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_the_rooflines),
        cmocka_unit_test(times_add_up),
        cmocka_unit_test(results_stay),
        cmocka_unit_test(events_are_the_last),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
