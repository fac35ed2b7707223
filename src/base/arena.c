/* Plans and arenas. Called by loaders and everything with many small objects of one lifetime.
 *
 * Objects lie one behind the other in blocks; the block at the head is the one that still has room.
 * Under AddressSanitizer the bytes between objects are poisoned. */
#include <string.h>

#include "base/mem.h"

#if defined(__SANITIZE_ADDRESS__)
#define ARENA_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA_ASAN 1
#endif
#endif

#ifdef ARENA_ASAN
#include <sanitizer/asan_interface.h>
#define RED_ZONE       16u
#define POISON(p, n)   ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
#define RED_ZONE       0u
#define POISON(p, n)   ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#endif

#define ALIGN     16u
#define BLOCK_MIN ((size_t)4 << 10)
#define BLOCK_MAX ((size_t)1 << 20)

struct nbi_arena_block {
    nbi_arena_block *next;
    size_t used, size; /* bytes of data */
    size_t pad_;       /* keeps data at a multiple of ALIGN */
    unsigned char data[];
};

size_t nbi_plan_add(nbi_plan *plan, size_t bytes)
{
    NB_ASSERT(bytes <= SIZE_MAX - 63);
    size_t rounded = (bytes + 63) & ~(size_t)63;
    NB_ASSERT(plan->bytes <= SIZE_MAX - rounded);
    size_t offset = plan->bytes;
    plan->bytes += rounded;
    return offset;
}

static nbi_arena_block *block_create(size_t size)
{
    if (size > SIZE_MAX - sizeof(nbi_arena_block)) return NULL;
    nbi_arena_block *block = nbi_calloc(1, sizeof *block + size);
    if (!block) return NULL;
    block->size = size;
    POISON(block->data, size);
    return block;
}

/* A block with `need` bytes free. A large object gets a block of its own behind the head, whose
 * room stays in use. */
static nbi_arena_block *block_with(nbi_arena *arena, size_t need)
{
    nbi_arena_block *head = arena->head;
    if (head && head->size - head->used >= need) return head;
    size_t next_size = head ? head->size * 2 : BLOCK_MIN;
    if (next_size < BLOCK_MIN) next_size = BLOCK_MIN;
    if (next_size > BLOCK_MAX) next_size = BLOCK_MAX;
    bool own = head && need > next_size / 2;
    nbi_arena_block *block = block_create(own || need > next_size ? need : next_size);
    if (!block) return NULL;
    if (own) {
        block->next = head->next;
        head->next = block;
    } else {
        block->next = head;
        arena->head = block;
    }
    return block;
}

void *nbi_arena_alloc(nbi_arena *arena, size_t bytes)
{
    if (bytes > SIZE_MAX - ALIGN - RED_ZONE) return NULL;
    size_t rounded = ((bytes ? bytes : 1) + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    if (arena->max_bytes && rounded > arena->max_bytes - arena->total_bytes) return NULL;
    nbi_arena_block *block = block_with(arena, rounded + RED_ZONE);
    if (!block) return NULL;
    void *p = block->data + block->used;
    UNPOISON(p, bytes);
    block->used += rounded + RED_ZONE;
    arena->total_bytes += rounded;
    return p;
}

char *nbi_arena_strndup(nbi_arena *arena, const char *s, size_t n)
{
    if (n == SIZE_MAX) return NULL;
    char *copy = nbi_arena_alloc(arena, n + 1);
    if (copy) memcpy(copy, s, n);
    return copy;
}

void nbi_arena_free(nbi_arena *arena)
{
    nbi_arena_block *block = arena->head;
    while (block) {
        nbi_arena_block *next = block->next;
        UNPOISON(block->data, block->size);
        nbi_free(block);
        block = next;
    }
    arena->head = NULL;
    arena->total_bytes = 0;
}
