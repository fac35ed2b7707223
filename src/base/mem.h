/* Heap, arenas and growing buffers. All heap use of nibble goes through here.
 *
 * Between nbi_heap_forbid() and nbi_heap_allow() (counted, per thread) every allocation here aborts
 * in debug builds: the token loop runs inside. nbi_heap_fail_after() makes the n-th following
 * allocation of the process return NULL (fault tests). */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NULL when out of memory or when the product overflows. Memory of nbi_malloc is not initialised.
 */
void *nbi_malloc(size_t bytes);
void *nbi_calloc(size_t n, size_t bytes);
void *nbi_realloc(void *p, size_t bytes);
void nbi_free(void *p);
char *nbi_strdup(const char *s);
char *nbi_strndup(const char *s, size_t n);

/* `align` is a power of two >= 8; freed by nbi_free_aligned(). */
void *nbi_malloc_aligned(size_t bytes, size_t align);
void nbi_free_aligned(void *p);

/* Large zeroed memory from the system (huge pages advised). NULL when refused. Freed with the same
 * size. */
void *nbi_pages_alloc(size_t bytes);
void nbi_pages_free(void *p, size_t bytes);
/* Makes the system back every page now, so that using it later cannot fail. False when it will not.
 */
bool nbi_pages_commit(void *p, size_t bytes);

void nbi_heap_forbid(void);
void nbi_heap_allow(void);
/* n = 0: the next allocation fails; negative: none does. Allocations counted so far in *count when
 * not NULL. */
void nbi_heap_fail_after(long n);
long nbi_heap_count(void);

/* Asks for `bytes` at `at`, which will be read or written soon; any address will do. */
static inline void nbi_prefetch(const void *at, size_t bytes)
{
    for (size_t i = 0; i < bytes + 63; i += 64) __builtin_prefetch((const char *)at + i);
}

/* ---- plan: sizes and offsets of one allocation. The same function sizes and lays out. */
typedef struct nbi_plan {
    size_t bytes; /* running total, multiple of 64 */
} nbi_plan;

/* Reserves `bytes`, 64-byte aligned; returns the offset. Aborts on overflow of size_t. */
size_t nbi_plan_add(nbi_plan *plan, size_t bytes);

/* ---- arena: many small objects with one lifetime. */
typedef struct nbi_arena_block nbi_arena_block;
typedef struct nbi_arena {
    nbi_arena_block *head;
    size_t total_bytes, max_bytes; /* max_bytes 0: no limit */
} nbi_arena;

/* Zeroed, 16-byte aligned; NULL when out of memory or beyond max_bytes. A zeroed nbi_arena is a
 * valid empty arena. */
void *nbi_arena_alloc(nbi_arena *arena, size_t bytes);
char *nbi_arena_strndup(nbi_arena *arena, const char *s, size_t n);
void nbi_arena_free(nbi_arena *arena);

/* ---- growing byte buffer with a maximum. `data` always has a NUL behind its `len` bytes once
 * something was added. */
typedef struct nbi_buf {
    char *data;
    size_t len, cap;
    size_t max; /* bytes; 0 means NBI_BUF_MAX_DEFAULT */
} nbi_buf;
#define NBI_BUF_MAX_DEFAULT ((size_t)1 << 30)

/* NB_TOO_LARGE beyond the maximum, NB_NO_MEMORY; the buffer is then unchanged. */
NBI_MUST_CHECK nb_status nbi_buf_add(nbi_buf *buf, const void *data, size_t n);
NBI_MUST_CHECK nb_status nbi_buf_addf(nbi_buf *buf, const char *fmt, ...) NBI_PRINTF(2, 3);
NBI_MUST_CHECK nb_status nbi_buf_reserve(nbi_buf *buf, size_t extra);
void nbi_buf_clear(nbi_buf *buf); /* keeps the memory */
void nbi_buf_free(nbi_buf *buf);

#ifdef __cplusplus
}
#endif
