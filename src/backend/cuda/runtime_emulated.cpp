/* The host's side of the device (runtime.h) over plain memory. Callers: as runtime.cu. */
#include "backend/cuda/runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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

/* Any number of devices. */
bool nbi_rt_open(nbi_rt *rt, uint32_t index)
{
    (void)index;
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

/* The runtime whose kernels run in this thread. */
static thread_local nbi_rt *waiting;

/* Does what was asked for. */
static void catch_up(nbi_rt *rt)
{
    std::vector<std::function<void()>> steps;
    steps.swap(*rt->stream);
    waiting = rt;
    for (const std::function<void()> &step : steps)
        if (!rt->error[0]) step();
    waiting = NULL;
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

/* ---------------------------------------------------------------- ranks */

nbi_rt_device_id nbi_rt_device(nbi_rt *rt)
{
    nbi_rt_device_id id = {};
    (void)rt;
    snprintf(id.text, sizeof id.text, "process %d", (int)getpid());
    return id;
}

void *nbi_rt_stream(nbi_rt *rt)
{
    (void)rt;
    return NULL;
}

void nbi_rt_use(const nbi_rt *rt)
{
    (void)rt;
}

/* The thread that would look at the other ranks is the one that runs the kernel. */
void nbi_emu_spin()
{
    sched_yield();
    nbi_rt *rt = waiting;
    if (!rt || !rt->lost) return;
    if (rt->lost(rt->lost_user) || (rt->until_ns && nbi_now_ns() > rt->until_ns)) *rt->stop = 1;
}

bool nbi_rt_waits_for_ranks(nbi_rt *rt, bool (*lost)(void *user), void *user)
{
    if (!lost) {
        nbi_rt_free_host(rt, rt->stop);
        rt->stop = NULL;
    } else if (!rt->stop) {
        rt->stop = static_cast<uint32_t *>(nbi_rt_alloc_host(rt, 64));
        if (!rt->stop) return false;
    }
    rt->lost = lost;
    rt->lost_user = user;
    return true;
}

/* A handle is the process and its file of memory without a name. */
struct shared_place {
    int32_t process, file;
};

static void *map_file(int file, size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return p == MAP_FAILED ? NULL : p;
}

void *nbi_rt_share(nbi_rt *rt, size_t bytes, nbi_rt_handle *handle, char *why, size_t why_bytes)
{
    rt->n_calls++;
    const int file = memfd_create("nibble", MFD_CLOEXEC);
    void *p =
        file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0 ? map_file(file, bytes) : NULL;
    if (!p) {
        snprintf(why, why_bytes, "shared memory of %zu bytes: %s", bytes, strerror(errno));
        if (file >= 0) close(file);
        return NULL;
    }
    const shared_place place = {getpid(), file};
    *handle = {};
    memcpy(handle, &place, sizeof place);
    rt->shared_file = file;
    return p;
}

void nbi_rt_unshare(nbi_rt *rt, void *p, size_t bytes)
{
    catch_up(rt);
    if (!p) return;
    munmap(p, bytes);
    close(rt->shared_file);
}

void *nbi_rt_open_shared(nbi_rt *rt, const nbi_rt_handle *handle, size_t bytes, char *why,
                         size_t why_bytes)
{
    shared_place place;
    char path[64];
    rt->n_calls++;
    memcpy(&place, handle, sizeof place);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)place.process, (int)place.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    void *p = file >= 0 ? map_file(file, bytes) : NULL;
    if (!p) snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
    if (file >= 0) close(file);
    return p;
}

void nbi_rt_close_shared(nbi_rt *rt, void *p, size_t bytes)
{
    rt->n_calls++;
    catch_up(rt);
    if (p) munmap(p, bytes);
}
