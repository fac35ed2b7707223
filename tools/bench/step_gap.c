/* Microseconds of the engine's thread between the results of a step and the launch of the next one:
 * what a GPU waits for. The backend's table is exchanged for one that looks at the clock.
 *
 *     cc -std=gnu11 -O2 -Iinclude -Isrc tools/bench/step_gap.c build/release/libnibble_core.a \
 *        -ljansson -lpcre2-8 -lutf8proc -lm -ldl -lpthread $(python3-config --ldflags --embed) -o
 * step_gap step_gap MODEL on|off REQUESTS [STEPS] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/engine.h"

static const nbi_backend_ops *ops;
static uint64_t synced_ns;
static double gaps[1 << 16];
static atomic_uint n_gaps;

static nb_status timed_sync(nbi_backend *b, nb_error *err)
{
    const nb_status st = ops->sync(b, err);
    synced_ns = nbi_now_ns();
    return st;
}

static bool timed_begin(nbi_backend *b, const nbi_batch *host, uint32_t pass,
                        const nbi_batch **device)
{
    if (synced_ns && n_gaps < sizeof gaps / sizeof *gaps)
        gaps[n_gaps++] = 1e-3 * (double)(nbi_now_ns() - synced_ns);
    return ops->step_begin(b, host, pass, device);
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    const uint32_t n = argc > 3 ? (uint32_t)atoi(argv[3]) : 1;
    const uint32_t steps = argc > 4 ? (uint32_t)atoi(argv[4]) : 200;
    nb_engine_options o;
    nb_engine *e = NULL;
    nb_error err = {0};
    nb_request **r = calloc(n, sizeof *r);
    nb_engine_options_default(&o);
    if (argc > 2) o.overlap_schedule = argv[2];
    o.model_dir = argc > 1 ? argv[1] : "";
    o.max_running = n;
    o.n_threads = 1;
    o.max_context = steps + 100;
    o.kv_tokens = (uint64_t)n * (steps + 164);
    if (!r || nb_engine_open(&e, &o, &err) != NB_OK) return fprintf(stderr, "%s\n", err.text), 1;
    ops = e->backend->ops;
    nbi_backend_ops timed = *ops;
    timed.sync = timed_sync;
    timed.step_begin = timed_begin;
    e->backend->ops = &timed;
    for (uint32_t i = 0; i < n; i++) {
        const int32_t prompt[] = {300, 301 + (int32_t)i, 7};
        nb_request_options q = {.prompt = prompt, .n_prompt = 3};
        nb_sampling_default(e, &q.sampling);
        q.sampling.max_tokens = steps + 50;
        q.sampling.ignore_eos = true;
        if (nb_request_submit(&r[i], e, &q, &err) != NB_OK)
            return fprintf(stderr, "%s\n", err.text), 1;
    }
    if (nb_engine_start(e, &err) != NB_OK) return fprintf(stderr, "%s\n", err.text), 1;
    for (nb_event event; n_gaps < steps + 40; usleep(300))
        for (uint32_t i = 0; i < n; i++)
            while (nb_request_read(r[i], &event, 0, NULL) == NB_OK) {}
    for (uint32_t i = 0; i < n; i++) nb_request_close(&r[i]);
    nb_engine_close(&e);
    qsort(gaps + 40, steps, sizeof *gaps, compare); /* behind the prompts */
    printf("%u requests, overlap %s: median %.1f us, nine in ten below %.1f\n", n,
           argc > 2 ? argv[2] : "auto", gaps[40 + steps / 2], gaps[40 + steps * 9 / 10]);
    free(r);
    return 0;
}
