/* The heap: malloc with a count, a ban and injected failures. Called by every room; jansson's
 * memory comes through here too.
 *
 * Pointers are plain malloc pointers, so memory that crossed a library boundary can be freed by
 * either side. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

typedef struct heap_faults {
    atomic_long fail_after, count;
} heap_faults;

static heap_faults own_faults = {.fail_after = -1};
static heap_faults *faults = &own_faults;
static _Thread_local unsigned heap_forbidden;

#ifdef NBI_FAULTS
/* In builds with a sanitizer another process may make allocations fail: it shares the two counters
 * in the file NIBBLE_FAULT_FILE. */
__attribute__((constructor)) static void share_faults(void)
{
    const char *path = getenv("NIBBLE_FAULT_FILE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *shared = mmap(NULL, sizeof *faults, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared != MAP_FAILED) faults = shared;
}
#endif

void nbi_heap_forbid(void)
{
    heap_forbidden++;
}

void nbi_heap_allow(void)
{
    NB_ASSERT(heap_forbidden > 0);
    heap_forbidden--;
}

void nbi_heap_fail_after(long n)
{
    atomic_store(&faults->fail_after, n < 0 ? -1 : n);
}

long nbi_heap_count(void)
{
    return atomic_load(&faults->count);
}

/* Every allocation passes here first; false: this one is to fail. */
static bool heap_enter(void)
{
#ifndef NDEBUG
    NB_ASSERT(heap_forbidden == 0);
#endif
    atomic_fetch_add_explicit(&faults->count, 1, memory_order_relaxed);
    if (atomic_load_explicit(&faults->fail_after, memory_order_relaxed) < 0) return true;
    /* Counts down through 0, the one that fails, to -1, which is "off" again. */
    return atomic_fetch_sub(&faults->fail_after, 1) != 0;
}

void *nbi_malloc(size_t bytes)
{
    return heap_enter() ? malloc(bytes ? bytes : 1) : NULL;
}

void *nbi_calloc(size_t n, size_t bytes)
{
    if (!heap_enter()) return NULL;
    return n && bytes ? calloc(n, bytes) : calloc(1, 1);
}

void *nbi_realloc(void *p, size_t bytes)
{
    return heap_enter() ? realloc(p, bytes ? bytes : 1) : NULL;
}

void nbi_free(void *p)
{
    free(p);
}

void nb_free(void *pointer)
{
    nbi_free(pointer);
}

char *nbi_strndup(const char *s, size_t n)
{
    if (n == SIZE_MAX) return NULL;
    char *copy = nbi_malloc(n + 1);
    if (!copy) return NULL;
    memcpy(copy, s, n);
    copy[n] = '\0';
    return copy;
}

char *nbi_strdup(const char *s)
{
    return nbi_strndup(s, strlen(s));
}

void *nbi_malloc_aligned(size_t bytes, size_t align)
{
    NB_ASSERT(align >= sizeof(void *) && (align & (align - 1)) == 0);
    void *p = NULL;
    if (!heap_enter() || posix_memalign(&p, align, bytes ? bytes : 1) != 0) return NULL;
    return p;
}

void nbi_free_aligned(void *p)
{
    free(p);
}

/* What is mapped for `bytes`: whole pages; 0 on overflow. */
static size_t pages_bytes(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes == 0) return page;
    return bytes > SIZE_MAX - page ? 0 : (bytes + page - 1) / page * page;
}

bool nbi_pages_commit(void *p, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    if (madvise(p, pages_bytes(bytes), MADV_POPULATE_WRITE) == 0) return true;
    if (errno != EINVAL) return false;
#endif
    volatile char *at = p; /* a kernel without it: every page is written as it is */
    for (size_t i = 0; i < bytes; i += 4096) {
        const char same = at[i];
        at[i] = same;
    }
    return true;
}

void *nbi_pages_alloc(size_t bytes)
{
    size_t size = pages_bytes(bytes);
    if (!heap_enter() || size == 0) return NULL;
    /* Huge pages need their own alignment: map more and give the ends back. */
    size_t slack = size >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : 0;
    if (size > SIZE_MAX - slack) return NULL;
    char *p = mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (slack) {
        size_t front = (HUGE_PAGE_BYTES - (uintptr_t)p % HUGE_PAGE_BYTES) % HUGE_PAGE_BYTES;
        if (front) munmap(p, front);
        if (slack > front) munmap(p + front + size, slack - front);
        p += front;
        madvise(p, size, MADV_HUGEPAGE); /* advice: a refusal costs speed only */
    }
    return p;
}

void nbi_pages_free(void *p, size_t bytes)
{
    if (p) munmap(p, pages_bytes(bytes));
}
