/* Tables and traces from a timer's sums and events. Callers: bench, engine/profile.c. */
#include "backend/timing_report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"

/* ---------------------------------------------------------------- figures */

/* Bytes of the link have another floor than those of the memory, which is not measured. */
static bool reads_memory(const char *component)
{
    return strcmp(component, nbi_timed_part_name(NBI_PART_COLLECTIVES)) != 0;
}

/* Sums to figures of one step. */
static nbi_breakdown_row row_of(const nbi_breakdown *b, const nbi_timed_row *sum,
                                const char *component, const char *op)
{
    const double n = (double)b->steps;
    nbi_breakdown_row row = {.component = component,
                             .op = op,
                             .calls = (double)sum->calls / n,
                             .ms = 1e-6 * (double)sum->ns / n,
                             .max_ms = 1e-6 * (double)sum->max_ns,
                             .bytes = sum->bytes / n};
    if (b->read_bandwidth > 0 && reads_memory(component))
        row.floor_ms = 1e3 * row.bytes / b->read_bandwidth;
    if (row.ms > 0 && row.floor_ms > 0) row.share_of_floor = row.floor_ms / row.ms;
    if (b->step.ms > 0) row.share_of_step = row.ms / b->step.ms;
    return row;
}

static void add(nbi_timed_row *to, const nbi_timed_row *from)
{
    to->calls += from->calls;
    to->ns += from->ns;
    to->bytes += from->bytes;
    if (from->max_ns > to->max_ns) to->max_ns = from->max_ns;
}

static void list_rows(nbi_breakdown *b, const nbi_timing_table *t)
{
    for (uint32_t part = 0; part < NBI_TIMED_PART_COUNT; part++) {
        const char *component = nbi_timed_part_name(part);
        nbi_timed_row all = {0};
        for (int op = 0; op < NBI_TIMED_OP_COUNT; op++) {
            const nbi_timed_row *r = &t->rows[part][op];
            if (!r->calls && !r->ns) continue;
            add(&all, r);
            if (b->n_ops < NBI_BREAKDOWN_OPS)
                b->ops[b->n_ops++] = row_of(b, r, component, nbi_timed_op_name((nbi_timed_op)op));
        }
        if (all.calls) b->rows[b->n_rows++] = row_of(b, &all, component, NULL);
    }
    const nbi_timed_row launch = {.ns = t->launch_ns}, host = {.ns = t->host_ns};
    b->rows[b->n_rows++] = row_of(b, &launch, "launch gaps", NULL);
    b->rows[b->n_rows++] = row_of(b, &host, "host gaps", NULL);
}

/* What most likely keeps a row from its floor. */
static void explain(char why[NBI_WHY_MAX], const nbi_breakdown *b, const nbi_breakdown_row *r)
{
    const double each_us = r->calls > 0 ? 1e3 * r->ms / r->calls : 0;
    const double each_bytes = r->calls > 0 ? r->bytes / r->calls : 0;
    if (!strcmp(r->component, "launch gaps"))
        snprintf(why, NBI_WHY_MAX,
                 "%.1f us behind each of %.0f operator calls: calling and launching",
                 1e3 * r->ms / (b->step.calls > 0 ? b->step.calls : 1), b->step.calls);
    else if (!strcmp(r->component, "host gaps"))
        snprintf(why, NBI_WHY_MAX, "outside of the passes: forming the batch, handing tokens out");
    else if (!reads_memory(r->component))
        snprintf(why, NBI_WHY_MAX,
                 "%.0f calls of %.1f us for %.0f kB each: the ranks that come later, and the way "
                 "between them",
                 r->calls, each_us, 1e-3 * each_bytes);
    else if (r->share_of_floor >= 0.7)
        snprintf(why, NBI_WHY_MAX, "near its floor: the memory sets the pace");
    else if (r->calls * (double)b->steps >= 8 && r->max_ms > 0.2 * r->ms * (double)b->steps)
        snprintf(why, NBI_WHY_MAX,
                 "uneven: the slowest call took %.0f us, the mean is %.0f us; something else was "
                 "in the way",
                 1e3 * r->max_ms, each_us);
    else if (!(r->bytes > 0))
        snprintf(why, NBI_WHY_MAX,
                 "%.0f calls of %.1f us that read no weights: work on activations", r->calls,
                 each_us);
    else if (each_us < 25)
        snprintf(why, NBI_WHY_MAX,
                 "small: %.0f calls of %.1f us for %.0f kB each; beginning and ending a call "
                 "weighs in",
                 r->calls, each_us, 1e-3 * each_bytes);
    else if (b->tokens >= 4 && r->share_of_floor >= 0.4)
        snprintf(why, NBI_WHY_MAX,
                 "reads %.1f GB/s: operations for %.0f rows take time beside the memory's",
                 r->ms > 0 ? 1e-6 * r->bytes / r->ms : 0, b->tokens);
    else if (b->tokens >= 4 && strcmp(r->component, nbi_timed_part_name(NBI_PART_KV_READ)) != 0)
        snprintf(why, NBI_WHY_MAX,
                 "%.0f rows share what is read: operations set the pace, not the memory",
                 b->tokens);
    else
        snprintf(why, NBI_WHY_MAX,
                 "reads %.1f GB/s: unpacking and operations take longer than the memory",
                 r->ms > 0 ? 1e-6 * r->bytes / r->ms : 0);
}

static void find_slowest(nbi_breakdown *b)
{
    const uint32_t n = b->n_ops + 2;
    for (uint32_t i = 0; i < n; i++) {
        const nbi_breakdown_row *r =
            i < b->n_ops ? &b->ops[i] : &b->rows[b->n_rows - 2 + (i - b->n_ops)];
        const double lost = r->ms - r->floor_ms;
        uint32_t at = b->n_slowest;
        while (at && b->slowest[at - 1].lost_ms < lost) at--;
        if (at == NBI_BREAKDOWN_SLOWEST || lost <= 0) continue;
        if (b->n_slowest < NBI_BREAKDOWN_SLOWEST) b->n_slowest++;
        memmove(&b->slowest[at + 1], &b->slowest[at],
                (b->n_slowest - at - 1) * sizeof b->slowest[0]);
        b->slowest[at].row = *r;
        b->slowest[at].lost_ms = lost;
    }
    for (uint32_t i = 0; i < b->n_slowest; i++) explain(b->slowest[i].why, b, &b->slowest[i].row);
}

void nbi_breakdown_make(nbi_breakdown *out, const nbi_timing *timing, bool decode,
                        double read_bandwidth)
{
    const nbi_timing_table *t = nbi_timing_of(timing, decode);
    memset(out, 0, sizeof *out);
    out->decode = decode;
    out->steps = t->steps;
    out->read_bandwidth = read_bandwidth;
    if (!t->steps) return;
    out->tokens = (double)t->tokens / (double)t->steps;
    nbi_timed_row all = {0};
    for (int part = 0; part < NBI_TIMED_PART_COUNT; part++)
        for (int op = 0; op < NBI_TIMED_OP_COUNT; op++) {
            nbi_timed_row row = t->rows[part][op];
            if (part == NBI_PART_COLLECTIVES) row.bytes = 0;
            add(&all, &row);
        }
    all.ns = t->step_ns;
    out->step = row_of(out, &all, "step", NULL);
    out->step.share_of_step = 1;
    list_rows(out, t);
    find_slowest(out);
}

/* ---------------------------------------------------------------- JSON */

static nb_status row_json(nbi_buf *out, const nbi_breakdown_row *r, const char *extra)
{
    NB_TRY(nbi_buf_addf(out, "{\"component\": \"%s\", ", r->component));
    if (r->op) NB_TRY(nbi_buf_addf(out, "\"operator\": \"%s\", ", r->op));
    return nbi_buf_addf(out,
                        "\"calls\": %.6g, \"ms\": %.9g, \"bytes\": %.15g, \"floor_ms\": %.9g, "
                        "\"share_of_floor\": %.4g, \"share_of_step\": %.6g%s}",
                        r->calls, r->ms, r->bytes, r->floor_ms, r->share_of_floor, r->share_of_step,
                        extra);
}

static nb_status rows_json(nbi_buf *out, const char *name, const nbi_breakdown_row *rows,
                           uint32_t n)
{
    NB_TRY(nbi_buf_addf(out, ", \"%s\": [", name));
    for (uint32_t i = 0; i < n; i++) {
        if (i) NB_TRY(nbi_buf_add(out, ", ", 2));
        NB_TRY(row_json(out, &rows[i], ""));
    }
    return nbi_buf_add(out, "]", 1);
}

nb_status nbi_breakdown_json(nbi_buf *out, const nbi_breakdown *b)
{
    NB_TRY(nbi_buf_addf(out,
                        "{\"stage\": \"%s\", \"steps\": %llu, \"tokens_per_step\": %.6g, "
                        "\"read_bandwidth\": %.6g, \"step\": ",
                        b->decode ? "decode" : "prefill", (unsigned long long)b->steps, b->tokens,
                        b->read_bandwidth));
    NB_TRY(row_json(out, &b->step, ""));
    NB_TRY(rows_json(out, "components", b->rows, b->n_rows));
    NB_TRY(rows_json(out, "operators", b->ops, b->n_ops));
    NB_TRY(nbi_buf_addf(out, ", \"slowest\": ["));
    for (uint32_t i = 0; i < b->n_slowest; i++) {
        char extra[NBI_WHY_MAX + 64];
        snprintf(extra, sizeof extra, ", \"lost_ms\": %.9g, \"reason\": \"%s\"",
                 b->slowest[i].lost_ms, b->slowest[i].why);
        if (i) NB_TRY(nbi_buf_add(out, ", ", 2));
        NB_TRY(row_json(out, &b->slowest[i].row, extra));
    }
    return nbi_buf_add(out, "]}", 2);
}

/* ---------------------------------------------------------------- trace */

/* Tracks: what shows them apart is "tid". On a CPU operators run in the engine's own thread; they
 * have a track of their own all the same, below the steps. */
enum { TRACK_STEPS = 1, TRACK_OPERATORS };

static nb_status track_json(nbi_buf *out, int pid, int tid, const char *what, const char *name)
{
    NB_TRY(nbi_buf_addf(out, "{\"ph\": \"M\", \"name\": \"%s\", \"pid\": %d, \"tid\": %d, ", what,
                        pid, tid));
    NB_TRY(nbi_buf_addf(out, "\"args\": {\"name\": "));
    NB_TRY(nbi_json_quote(out, name, strlen(name)));
    return nbi_buf_addf(out, "}}");
}

static nb_status event_json(nbi_buf *out, const nbi_timed_event *e, int pid)
{
    const bool step = e->op == NBI_TIMED_OP_COUNT;
    NB_TRY(nbi_buf_addf(out, "{\"ph\": \"X\", \"name\": "));
    NB_TRY(nbi_json_quote(out, e->name, strlen(e->name)));
    NB_TRY(nbi_buf_addf(out,
                        ", \"cat\": \"%s\", \"pid\": %d, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f, "
                        "\"args\": {\"step\": %u",
                        step ? "step" : nbi_timed_part_name(e->part), pid,
                        step ? TRACK_STEPS : TRACK_OPERATORS, (double)e->begin_ns * 1e-3,
                        (double)e->ns * 1e-3, e->step));
    if (step) return nbi_buf_addf(out, ", \"rows\": %u}}", e->rows);
    return nbi_buf_addf(out, ", \"layer\": %u, \"operator\": \"%s\", \"bytes\": %.0f}}", e->layer,
                        nbi_timed_op_name((nbi_timed_op)e->op), e->bytes);
}

nb_status nbi_trace_json(nbi_buf *out, const nbi_timing *t, const char *model, const char *device,
                         const nbi_buf *breakdown)
{
    const int pid = (int)getpid();
    uint64_t lost;
    const uint32_t n = nbi_timing_n_events(t, &lost);
    NB_TRY(nbi_buf_addf(out, "{\"displayTimeUnit\": \"ms\", \"otherData\": {\"model\": "));
    NB_TRY(nbi_json_quote(out, model, strlen(model)));
    NB_TRY(nbi_buf_addf(out, ", \"device\": "));
    NB_TRY(nbi_json_quote(out, device, strlen(device)));
    NB_TRY(nbi_buf_addf(out, ", \"events_overwritten\": \"%llu\"},\n", (unsigned long long)lost));
    if (breakdown && breakdown->len) {
        NB_TRY(nbi_buf_addf(out, "\"breakdown\": "));
        NB_TRY(nbi_buf_add(out, breakdown->data, breakdown->len));
        NB_TRY(nbi_buf_addf(out, ",\n"));
    }
    NB_TRY(nbi_buf_addf(out, "\"traceEvents\": [\n"));
    NB_TRY(track_json(out, pid, TRACK_STEPS, "process_name", "nibble"));
    NB_TRY(nbi_buf_addf(out, ",\n"));
    NB_TRY(track_json(out, pid, TRACK_STEPS, "thread_name", "steps"));
    NB_TRY(nbi_buf_addf(out, ",\n"));
    NB_TRY(track_json(out, pid, TRACK_OPERATORS, "thread_name", device));
    for (uint32_t i = 0; i < n; i++) {
        NB_TRY(nbi_buf_addf(out, ",\n"));
        NB_TRY(event_json(out, nbi_timing_event(t, i), pid));
    }
    return nbi_buf_addf(out, "\n]}\n");
}
