/* The host's side of the device (runtime.h) over plain memory. Callers: as runtime.cu. */
#include "backend/cuda/runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

struct nbi_rt_graph {
    std::vector<std::function<void()>> steps;
};

nbi_stamps nbi_stamps_here;
bool nbi_emu_stamped;

uint64_t nbi_emu_ns()
{
    return nbi_now_ns();
}

bool nbi_rt_open(nbi_rt *rt)
{
    *rt = {};
    rt->sm = 90;
    rt->n_sms = 4; /* few: kernels that loop over their work are seen to loop */
    rt->l2_bytes = 1u << 20;
    rt->shared_max = 227u << 10;
    snprintf(rt->name, sizeof rt->name, "emulated on the CPU");
    snprintf(rt->driver, sizeof rt->driver, "none");
    rt->record = new std::vector<std::function<void()>>;
    rt->stream = new std::vector<std::function<void()>>;
    return true;
}

void nbi_rt_later(nbi_rt *rt, const std::function<void()> &step)
{
    (rt->recording ? rt->record : rt->stream)->push_back(step);
}

/* Does what was asked for. */
static void catch_up(nbi_rt *rt)
{
    std::vector<std::function<void()>> steps;
    steps.swap(*rt->stream);
    for (const std::function<void()> &step : steps)
        if (!rt->error[0]) step();
    steps.clear();
    rt->stream->swap(steps); /* keeps its memory */
}

void nbi_rt_close(nbi_rt *rt)
{
    catch_up(rt);
    delete rt->record;
    delete rt->stream;
    rt->record = rt->stream = NULL;
    free(rt->clock);
    rt->clock = NULL;
}

void *nbi_rt_alloc(nbi_rt *rt, size_t bytes)
{
    rt->n_calls++;
    void *p = NULL;
    if (posix_memalign(&p, 256, bytes ? bytes : 1)) return NULL;
    memset(p, 0, bytes);
    return p;
}

void nbi_rt_free(nbi_rt *rt, void *p)
{
    rt->n_calls++;
    catch_up(rt);
    free(p);
}

void *nbi_rt_alloc_host(nbi_rt *rt, size_t bytes)
{
    return nbi_rt_alloc(rt, bytes);
}

void nbi_rt_free_host(nbi_rt *rt, void *p)
{
    nbi_rt_free(rt, p);
}

bool nbi_rt_memory(nbi_rt *rt, size_t *free_bytes, size_t *total_bytes)
{
    (void)rt;
    *free_bytes = *total_bytes = (size_t)8 << 30;
    return true;
}

void nbi_rt_upload(nbi_rt *rt, void *dst, const void *src, size_t bytes)
{
    rt->n_calls++;
    nbi_rt_later(rt, [=] { memcpy(dst, src, bytes); });
}

void nbi_rt_download(nbi_rt *rt, void *dst, const void *src, size_t bytes)
{
    nbi_rt_later(rt, [=] { memcpy(dst, src, bytes); });
}

void nbi_rt_copy(nbi_rt *rt, void *dst, const void *src, size_t bytes)
{
    rt->n_calls++;
    if (rt->skips) return;
    nbi_rt_later(rt, [=] { memcpy(dst, src, bytes); });
}

void nbi_rt_zero(nbi_rt *rt, void *dst, size_t bytes)
{
    rt->n_calls++;
    if (rt->skips) return;
    nbi_rt_later(rt, [=] { memset(dst, 0, bytes); });
}

void nbi_rt_mark(nbi_rt *rt, uint32_t i)
{
    (void)rt, (void)i;
}

void nbi_rt_wait_mark(nbi_rt *rt, uint32_t i)
{
    (void)i;
    catch_up(rt);
}

bool nbi_rt_sync(nbi_rt *rt)
{
    catch_up(rt);
    return !rt->error[0];
}

double nbi_rt_seconds(nbi_rt *rt)
{
    catch_up(rt);
    return (double)nbi_now_ns() * 1e-9;
}

bool nbi_rt_clock_open(nbi_rt *rt, uint32_t n_marks)
{
    if (rt->clock) return rt->n_clock >= n_marks;
    rt->clock = static_cast<uint64_t *>(calloc(n_marks, sizeof *rt->clock));
    rt->n_clock = rt->clock ? n_marks : 0;
    return rt->clock != NULL;
}

void nbi_rt_clock_mark(nbi_rt *rt, uint32_t i)
{
    nbi_rt_later(rt, [=] { rt->clock[i] = nbi_now_ns(); });
}

uint64_t nbi_rt_clock_ns(nbi_rt *rt, uint32_t from, uint32_t to)
{
    return rt->clock[to] - rt->clock[from];
}

static void stamp_kernel()
{
    nbi_wait_before();
}

bool nbi_rt_stamps_open(nbi_rt *rt)
{
    (void)rt;
    return true;
}

void nbi_rt_stamps_clear(nbi_rt *rt)
{
    nbi_rt_later(rt, [] { nbi_stamps_here.n = 0; });
    rt->n_stamps = 0;
}

uint32_t nbi_rt_stamp(nbi_rt *rt)
{
    nbi_launch(rt, dim3(1), dim3(1), 0, stamp_kernel);
    return rt->n_stamps - 1;
}

uint64_t nbi_rt_stamp_ns(nbi_rt *rt, uint32_t i)
{
    catch_up(rt);
    return i < rt->n_stamps && nbi_stamps_here.n == rt->n_stamps && i < NBI_STAMPS
               ? nbi_stamps_here.ns[i]
               : 0;
}

void nbi_rt_record(nbi_rt *rt)
{
    rt->n_calls++;
    rt->record->clear();
    rt->recording = true;
}

nbi_rt_graph *nbi_rt_record_end(nbi_rt *rt)
{
    rt->n_calls++;
    rt->recording = false;
    nbi_rt_graph *g = new nbi_rt_graph;
    g->steps.swap(*rt->record);
    return g;
}

void nbi_rt_replay(nbi_rt *rt, nbi_rt_graph *g)
{
    rt->n_calls++;
    rt->stream->insert(rt->stream->end(), g->steps.begin(), g->steps.end());
}

void nbi_rt_graph_free(nbi_rt *rt, nbi_rt_graph **g)
{
    (void)rt;
    delete *g;
    *g = NULL;
}

void nbi_rt_fail(nbi_rt *rt, const char *what, int code)
{
    if (!rt->error[0]) snprintf(rt->error, sizeof rt->error, "%s: error %d", what, code);
}
