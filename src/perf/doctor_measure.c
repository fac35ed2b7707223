/* Read rate of memory and of a file; copies of GPUs. */
#include "perf/doctor_measure.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread.h"
#include "perf/bandwidth.h"

#define MEMORY_BYTES (1ull << 30)
#define PASSES       3
#define BLOCK        ((size_t)4 << 20)
#define FILE_MIN     ((uint64_t)64 << 20) /* less says more about caches than about the disk */
#define FILE_MAX     ((uint64_t)4 << 30)
#define FILE_NS      2000000000u
#define FILE_THREADS 4u

static void measure_memory(nbi_facts *f)
{
    nbi_measured_facts *m = &f->measured;
    nbi_bandwidth *b = NULL;
    nb_error err;
    uint64_t bytes = MEMORY_BYTES;
    if (f->memory.group_bytes && f->memory.group_bytes / 4 < bytes)
        bytes = f->memory.group_bytes / 4;
    if (nbi_bandwidth_open_memory(&b, bytes, 0, &err) != NB_OK) {
        m->memory_why = nbi_reader_text(&f->reader, "%s", err.text);
        return;
    }
    for (int i = 0; i < PASSES; i++) {
        const double rate = nbi_bandwidth_pass(b, bytes);
        if (rate > m->memory_rate) m->memory_rate = rate;
    }
    m->threads = nbi_bandwidth_threads(b);
    nbi_bandwidth_close(&b);
}

/* ---------------------------------------------------------------- a file */

typedef struct reading {
    int fd;
    uint64_t started_ns, bytes;
    uint8_t *blocks; /* [FILE_THREADS][BLOCK] */
    _Atomic uint64_t done;
    _Atomic bool failed;
} reading;

static void read_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    reading *r = arg;
    for (uint32_t i = begin; i < end; i++) {
        if (r->failed || nbi_now_ns() - r->started_ns > FILE_NS) return;
        const ssize_t n = pread(r->fd, r->blocks + thread * BLOCK, BLOCK, (off_t)(i * BLOCK));
        if (n < 0)
            r->failed = true;
        else
            r->done += (uint64_t)n;
    }
}

/* Past the page cache, by four threads, up to two seconds. */
static const char *read_blocks(nbi_facts *f, reading *r, nbi_pool *pool)
{
    nbi_measured_facts *m = &f->measured;
    r->started_ns = nbi_now_ns();
    nbi_pool_run(pool, read_task, r, (uint32_t)(r->bytes / BLOCK), 1);
    const uint64_t ns = nbi_now_ns() - r->started_ns;
    if (r->failed || !r->done) return "the file cannot be read past the page cache";
    m->file_rate = (double)r->done / ((double)(ns ? ns : 1) * 1e-9);
    m->file_bytes = r->done;
    return NULL;
}

static const char *measure_file(nbi_facts *f, const char *path)
{
    struct stat st;
    nb_error err;
    nbi_pool *pool = NULL;
    reading r = {.fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT | O_NONBLOCK)};
    if (r.fd < 0) return "the file cannot be opened past the page cache (O_DIRECT)";
    const char *why = NULL;
    if (fstat(r.fd, &st) != 0 || !S_ISREG(st.st_mode))
        why = "not a regular file";
    else if ((uint64_t)st.st_size < FILE_MIN)
        why = "less than 64 MiB: give a larger file with --file";
    else if (!(r.blocks = nbi_malloc_aligned(FILE_THREADS * BLOCK, 4096)) ||
             nbi_pool_create(&pool, FILE_THREADS, &err) != NB_OK)
        why = "out of memory";
    if (!why) {
        r.bytes = (uint64_t)st.st_size < FILE_MAX ? (uint64_t)st.st_size : FILE_MAX;
        why = read_blocks(f, &r, pool);
    }
    nbi_pool_destroy(&pool);
    nbi_free_aligned(r.blocks);
    close(r.fd);
    return why;
}

static void measure_transfers(nbi_facts *f)
{
    nbi_measured_facts *m = &f->measured;
    nb_error err;
    if (nbi_transfers_measure(&m->transfers, &err) != NB_OK)
        m->gpu_why = nbi_reader_text(&f->reader, "%s", err.text);
}

void nbi_doctor_measure(nbi_facts *f, const nbi_doctor_options *o)
{
    nbi_measured_facts *m = &f->measured;
    const char *never = !f->live ? "a recorded machine" : !o->measure ? "--no-measure" : NULL;
    m->memory_why = m->file_why = never;
    m->gpu_why = m->transfers.n ? NULL : never;
    if (never) return;
    measure_memory(f);
    const nbi_storage_facts *s = &f->storage;
    if (o->file)
        m->file_why = measure_file(f, o->file);
    else if (s->path && s->largest)
        m->file_why = measure_file(f, nbi_reader_text(&f->reader, "%s/%s", s->path, s->largest));
    else
        m->file_why = "no --model and no --file";
    measure_transfers(f);
}
