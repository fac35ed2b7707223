/* Heap, plans, arenas and buffers. */
#include "cmocka_all.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "child.h"

static void sizes_that_overflow_are_refused(void **state)
{
    (void)state;
    /* Through volatile: the compiler would warn, rightly. */
    volatile size_t huge = SIZE_MAX;
    assert_null(nbi_malloc(huge));
    assert_null(nbi_calloc(huge / 2, 3));
    assert_null(nbi_strndup("x", huge));
    assert_null(nbi_pages_alloc(huge));
    assert_null(nbi_pages_alloc(huge - 4096));
    assert_null(nbi_malloc_aligned(huge - 64, 64));
}

static void empty_sizes_give_memory(void **state)
{
    (void)state;
    void *p[] = {nbi_malloc(0), nbi_calloc(0, 8), nbi_calloc(8, 0), nbi_realloc(NULL, 0)};
    for (size_t i = 0; i < 4; i++) {
        assert_non_null(p[i]);
        nbi_free(p[i]);
    }
    nb_free(NULL);
    void *pages = nbi_pages_alloc(0);
    assert_non_null(pages);
    nbi_pages_free(pages, 0);
    nbi_pages_free(NULL, 100);
}

static void copies_of_strings(void **state)
{
    (void)state;
    char *a = nbi_strdup("nibble"), *b = nbi_strndup("nibble", 3), *c = nbi_strndup("", 0);
    assert_string_equal(a, "nibble");
    assert_string_equal(b, "nib");
    assert_string_equal(c, "");
    nbi_free(a);
    nbi_free(b);
    nbi_free(c);
}

static void alignment_holds(void **state)
{
    (void)state;
    for (size_t align = 8; align <= 1 << 16; align *= 2) {
        void *p = nbi_malloc_aligned(3, align);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % align, 0);
        nbi_free_aligned(p);
    }
}

static void pages_are_zero_and_writable(void **state)
{
    (void)state;
    const size_t sizes[] = {1, 4096, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 123};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char *p = nbi_pages_alloc(sizes[i]);
        assert_non_null(p);
        for (size_t j = 0; j < sizes[i]; j += 511) {
            assert_int_equal(p[j], 0);
            p[j] = 1;
        }
        p[sizes[i] - 1] = 2;
        if (sizes[i] >= 2 << 20) assert_int_equal((uintptr_t)p % (2 << 20), 0);
        nbi_pages_free(p, sizes[i]);
    }
}

static void nth_allocation_fails_once(void **state)
{
    (void)state;
    for (long n = 0; n < 5; n++) {
        long before = nbi_heap_count();
        nbi_heap_fail_after(n);
        for (long i = 0; i < 7; i++) {
            void *p = i % 2 ? nbi_malloc(8) : nbi_calloc(1, 8);
            assert_true((p == NULL) == (i == n));
            nbi_free(p);
        }
        assert_int_equal(nbi_heap_count() - before, 7);
    }
    nbi_heap_fail_after(0);
    assert_null(nbi_pages_alloc(10));
    nbi_heap_fail_after(0);
    assert_null(nbi_malloc_aligned(10, 64));
    nbi_heap_fail_after(0);
    assert_null(nbi_realloc(NULL, 10));
    nbi_heap_fail_after(1);
    nbi_heap_fail_after(-1);
    for (int i = 0; i < 3; i++) {
        void *p = nbi_malloc(1);
        assert_non_null(p);
        nbi_free(p);
    }
}

enum { BY_MALLOC, BY_CALLOC, BY_REALLOC, BY_ALIGNED, BY_PAGES, BY_ARENA, BY_BUF, WAYS };

static void allocate_while_forbidden(void *arg)
{
    nbi_arena arena = {0};
    nbi_buf buf = {0};
    void *p = NULL;
    nb_status st = NB_OK;
    nbi_heap_forbid();
    nbi_heap_forbid();
    nbi_heap_allow();
    switch (*(int *)arg) {
    case BY_MALLOC: p = nbi_malloc(1); break;
    case BY_CALLOC: p = nbi_calloc(1, 1); break;
    case BY_REALLOC: p = nbi_realloc(NULL, 1); break;
    case BY_ALIGNED: p = nbi_malloc_aligned(1, 64); break;
    case BY_PAGES: p = nbi_pages_alloc(1); break;
    case BY_ARENA: p = nbi_arena_alloc(&arena, 1); break;
    default: st = nbi_buf_add(&buf, "x", 1); break;
    }
    nbi_heap_allow();
    if (!p && st != NB_OK) _exit(1);
}

/* Debug builds abort on each way to the heap; release builds do not look. */
static void forbidden_heap_aborts(void **state)
{
    (void)state;
#ifdef NDEBUG
    const int expected = 0;
#else
    const int expected = SIGABRT;
#endif
    for (int way = 0; way < WAYS; way++) {
        assert_int_equal(child_signal(allocate_while_forbidden, &way), expected);
    }
    nbi_heap_forbid();
    nbi_free(NULL);
    nbi_heap_allow();
    nbi_free(nbi_malloc(1));
}

static void allow_once_too_often(void *arg)
{
    (void)arg;
    nbi_heap_allow();
}

static void unbalanced_allow_aborts(void **state)
{
    (void)state;
    assert_int_equal(child_signal(allow_once_too_often, NULL), SIGABRT);
}

static void plan_is_aligned_and_sums(void **state)
{
    (void)state;
    nbi_plan plan = {0};
    assert_int_equal(nbi_plan_add(&plan, 1), 0);
    assert_int_equal(nbi_plan_add(&plan, 64), 64);
    assert_int_equal(nbi_plan_add(&plan, 0), 128);
    assert_int_equal(nbi_plan_add(&plan, 65), 128);
    assert_int_equal(plan.bytes, 256);
}

static void plan_too_much(void *arg)
{
    nbi_plan plan = {.bytes = 128};
    nbi_plan_add(&plan, *(size_t *)arg);
}

static void plan_overflow_aborts(void **state)
{
    (void)state;
    size_t huge = SIZE_MAX, nearly = SIZE_MAX - 128;
    assert_int_equal(child_signal(plan_too_much, &huge), SIGABRT);
    assert_int_equal(child_signal(plan_too_much, &nearly), SIGABRT);
}

static void arena_objects_are_zeroed_apart_and_aligned(void **state)
{
    (void)state;
    enum { N = 3000 };
    nbi_arena arena = {0};
    unsigned char **p = malloc(N * sizeof *p);
    size_t sum = 0;
    for (size_t i = 0; i < N; i++) {
        size_t n = i % 100 == 99 ? 70000 : i % 41;
        p[i] = nbi_arena_alloc(&arena, n);
        assert_non_null(p[i]);
        assert_int_equal((uintptr_t)p[i] % 16, 0);
        for (size_t j = 0; j < n; j++) assert_int_equal(p[i][j], 0);
        memset(p[i], (int)(i % 251), n);
        sum += ((n ? n : 1) + 15) / 16 * 16;
    }
    assert_int_equal(arena.total_bytes, sum);
    for (size_t i = 0; i < N; i++) {
        size_t n = i % 100 == 99 ? 70000 : i % 41;
        for (size_t j = 0; j < n; j++) assert_int_equal(p[i][j], i % 251);
    }
    free(p);
    nbi_arena_free(&arena);
    assert_null(arena.head);
    assert_int_equal(arena.total_bytes, 0);
    char *s = nbi_arena_strndup(&arena, "abcdef", 4);
    assert_string_equal(s, "abcd");
    nbi_arena_free(&arena);
    nbi_arena_free(&arena);
}

static void arena_keeps_its_maximum(void **state)
{
    (void)state;
    nbi_arena arena = {.max_bytes = 100};
    assert_non_null(nbi_arena_alloc(&arena, 48));
    assert_non_null(nbi_arena_alloc(&arena, 48));
    assert_null(nbi_arena_alloc(&arena, 1));
    assert_null(nbi_arena_alloc(&arena, SIZE_MAX));
    assert_null(nbi_arena_strndup(&arena, "x", SIZE_MAX));
    nbi_arena_free(&arena);
    assert_int_equal(arena.max_bytes, 100);
    nbi_heap_fail_after(0);
    assert_null(nbi_arena_alloc(&arena, 1));
    assert_int_equal(arena.total_bytes, 0);
    assert_non_null(nbi_arena_alloc(&arena, 1));
    nbi_arena_free(&arena);
}

static void buf_grows_and_keeps_a_nul(void **state)
{
    (void)state;
    nbi_buf buf = {0};
    for (int i = 0; i < 5000; i++) {
        assert_int_equal(nbi_buf_addf(&buf, "%d,", i % 10), NB_OK);
        assert_int_equal(strlen(buf.data), buf.len);
    }
    assert_int_equal(buf.len, 10000);
    assert_memory_equal(buf.data + 9980, "0,1,2,3,4,5,6,7,8,9,", 21);
    assert_int_equal(nbi_buf_add(&buf, "a\0b", 3), NB_OK);
    assert_int_equal(buf.data[buf.len], 0);
    size_t cap = buf.cap;
    nbi_buf_clear(&buf);
    assert_int_equal(buf.len, 0);
    assert_int_equal(buf.cap, cap);
    assert_string_equal(buf.data, "");
    assert_int_equal(nbi_buf_add(&buf, NULL, 0), NB_OK);
    nbi_buf_free(&buf);
    nbi_buf_free(&buf);
    nbi_buf_clear(&buf);
}

static void buf_keeps_its_maximum(void **state)
{
    (void)state;
    for (size_t max = 1; max < 300; max++) {
        nbi_buf buf = {.max = max};
        for (size_t i = 0; i < max; i++) assert_int_equal(nbi_buf_add(&buf, "x", 1), NB_OK);
        assert_int_equal(nbi_buf_add(&buf, "y", 1), NB_TOO_LARGE);
        assert_int_equal(nbi_buf_addf(&buf, "%s", "y"), NB_TOO_LARGE);
        assert_int_equal(nbi_buf_reserve(&buf, SIZE_MAX), NB_TOO_LARGE);
        assert_int_equal(buf.len, max);
        assert_int_equal(strspn(buf.data, "x"), max);
        assert_true(buf.cap <= max + 64);
        nbi_buf_free(&buf);
    }
}

static void buf_without_memory_is_unchanged(void **state)
{
    (void)state;
    nbi_buf buf = {0};
    assert_int_equal(nbi_buf_add(&buf, "keep", 4), NB_OK);
    char big[1000];
    memset(big, 'z', sizeof big);
    nbi_heap_fail_after(0);
    assert_int_equal(nbi_buf_add(&buf, big, sizeof big), NB_NO_MEMORY);
    assert_string_equal(buf.data, "keep");
    assert_int_equal(nbi_buf_add(&buf, big, sizeof big), NB_OK);
    assert_int_equal(buf.len, 1004);
    nbi_buf_free(&buf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_that_overflow_are_refused),
        cmocka_unit_test(empty_sizes_give_memory),
        cmocka_unit_test(copies_of_strings),
        cmocka_unit_test(alignment_holds),
        cmocka_unit_test(pages_are_zero_and_writable),
        cmocka_unit_test(nth_allocation_fails_once),
        cmocka_unit_test(forbidden_heap_aborts),
        cmocka_unit_test(unbalanced_allow_aborts),
        cmocka_unit_test(plan_is_aligned_and_sums),
        cmocka_unit_test(plan_overflow_aborts),
        cmocka_unit_test(arena_objects_are_zeroed_apart_and_aligned),
        cmocka_unit_test(arena_keeps_its_maximum),
        cmocka_unit_test(buf_grows_and_keeps_a_nul),
        cmocka_unit_test(buf_keeps_its_maximum),
        cmocka_unit_test(buf_without_memory_is_unchanged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
