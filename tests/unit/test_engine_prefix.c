/* The prefix tree against a plain list of what was inserted, also with a hash that collides all the
 * time. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "engine/prefix.h"

#define PAGES   200
#define LENGTH  6 /* pages of a prompt at most */
#define WAITERS 7

static uint32_t rng = 12345;

static uint32_t draw(uint32_t n)
{
    rng = rng * 1664525u + 1013904223u;
    return (rng >> 8) % n;
}

/* Prompts with few distinct pages, so that beginnings repeat. */
static uint32_t draw_prompt(int32_t *tokens)
{
    uint32_t n = 1 + draw(LENGTH);
    for (uint32_t p = 0; p < n; p++) {
        int32_t kind = (int32_t)draw(3);
        for (uint32_t i = 0; i < NBI_PAGE_TOKENS; i++)
            tokens[p * NBI_PAGE_TOKENS + i] = kind * 1000 + (int32_t)(i % 7);
    }
    return n;
}

/* How many of n pages are of the expanded form; rarely any but none and all, so that forms
 * repeat. */
static uint32_t draw_expanded(uint32_t n)
{
    const uint32_t kind = draw(4);
    return kind == 0 ? 0 : kind == 1 ? draw(n + 1) : n;
}

/* What page holds, told by the test itself: tokens of the page and of all before it. */
typedef struct content {
    int32_t tokens[LENGTH * NBI_PAGE_TOKENS];
    uint32_t n;        /* pages, this one included */
    uint32_t expanded; /* of them, from the front */
    uint64_t salt;
} content;

static content held[PAGES];

static void check_page(int32_t page, const int32_t *tokens, uint32_t n, uint32_t expanded,
                       uint64_t salt)
{
    assert_int_equal(held[page].salt, salt);
    assert_int_equal(held[page].expanded, expanded < n ? expanded : n);
    assert_int_equal(held[page].n, n);
    assert_memory_equal(held[page].tokens, tokens, n * NBI_PAGE_TOKENS * sizeof(int32_t));
}

/* One request: match, take pages for the rest, insert, release. Returns pages found. */
static uint32_t one_request(nbi_prefix *p, int32_t *free_pages, uint32_t *n_free)
{
    int32_t tokens[LENGTH * NBI_PAGE_TOKENS], pages[LENGTH];
    uint32_t n = draw_prompt(tokens);
    const uint64_t salt = draw(4) == 0;
    nbi_prefix_place place = {0};
    const uint32_t expanded = draw_expanded(n),
                   peeked = nbi_prefix_peek(p, &place, tokens, n, expanded, salt);
    uint32_t found = nbi_prefix_match(p, tokens, n, expanded, salt, pages);
    assert_int_equal(found, peeked);
    for (uint32_t i = 0; i < found; i++) check_page(pages[i], tokens, i + 1, expanded, salt);
    for (uint32_t i = found; i < n; i++) {
        int32_t page = *n_free ? free_pages[--*n_free] : nbi_prefix_evict(p);
        assert_true(page >= 0);
        held[page].n = i + 1;
        held[page].salt = salt;
        held[page].expanded = expanded < i + 1 ? expanded : i + 1;
        memcpy(held[page].tokens, tokens, (i + 1) * NBI_PAGE_TOKENS * sizeof(int32_t));
        pages[i] = nbi_prefix_insert(p, i ? pages[i - 1] : NBI_PREFIX_ROOT, page,
                                     tokens + i * NBI_PAGE_TOKENS, i < expanded, salt);
        assert_int_equal(pages[i], page);
    }
    for (uint32_t i = n; i-- > 0;) nbi_prefix_release(p, pages[i]);
    return found;
}

/* Prompts that wait while the tree changes. */
typedef struct waiter {
    int32_t tokens[LENGTH * NBI_PAGE_TOKENS];
    uint32_t n, expanded;
    uint64_t salt;
    nbi_prefix_place place;
} waiter;

static void draw_waiter(waiter *w)
{
    *w = (waiter){0};
    w->n = draw_prompt(w->tokens);
    w->expanded = draw_expanded(w->n);
    w->salt = draw(2);
}

/* What is remembered is what is there. */
static void check_waiter(nbi_prefix *p, waiter *w)
{
    nbi_prefix_place fresh = {0};
    uint32_t found = nbi_prefix_peek(p, &fresh, w->tokens, w->n, w->expanded, w->salt);
    assert_int_equal(nbi_prefix_peek(p, &w->place, w->tokens, w->n, w->expanded, w->salt), found);
    uint64_t lookups = p->n_lookups;
    assert_int_equal(nbi_prefix_peek(p, &w->place, w->tokens, w->n, w->expanded, w->salt), found);
    assert_int_equal(p->n_lookups, lookups);
}

static void run(uint32_t hash_bits)
{
    waiter waiters[WAITERS];
    nbi_prefix p;
    int32_t free_pages[PAGES];
    uint32_t n_free = PAGES, found = 0;
    assert_int_equal(nbi_prefix_init(&p, PAGES, hash_bits, NULL), NB_OK);
    for (uint32_t i = 0; i < PAGES; i++) free_pages[i] = (int32_t)i;
    for (int k = 0; k < WAITERS; k++) draw_waiter(&waiters[k]);
    for (int i = 0; i < 2000; i++) {
        found += one_request(&p, free_pages, &n_free);
        check_waiter(&p, &waiters[i % WAITERS]);
        if (i % 50 == 0) draw_waiter(&waiters[draw(WAITERS)]);
    }
    assert_true(found > 1000);
    assert_int_equal(n_free + p.n_cached, PAGES);
    while (nbi_prefix_evict(&p) >= 0) n_free++;
    assert_int_equal(n_free, PAGES);
    nbi_prefix_deinit(&p);
}

static void pages_hold_what_they_say(void **state)
{
    (void)state;
    run(64);
}

/* C65 */
static void collisions_change_nothing(void **state)
{
    (void)state;
    run(8);
    run(1);
}

static void twins_become_one(void **state)
{
    (void)state;
    nbi_prefix p;
    int32_t tokens[NBI_PAGE_TOKENS] = {1, 2, 3}, page;
    assert_int_equal(nbi_prefix_init(&p, 4, 64, NULL), NB_OK);
    assert_int_equal(nbi_prefix_insert(&p, NBI_PREFIX_ROOT, 0, tokens, false, 0), 0);
    assert_int_equal(nbi_prefix_insert(&p, NBI_PREFIX_ROOT, 1, tokens, false, 0),
                     0); /* computed twice */
    assert_int_equal(nbi_prefix_evict(&p), -1);
    nbi_prefix_release(&p, 0);
    assert_int_equal(nbi_prefix_evict(&p), -1);
    nbi_prefix_release(&p, 0);
    assert_int_equal(nbi_prefix_match(&p, tokens, 1, 0, 0, &page), 1);
    nbi_prefix_release(&p, page);
    assert_int_equal(nbi_prefix_evict(&p), 0);
    assert_int_equal(nbi_prefix_match(&p, tokens, 1, 0, 0, &page), 0);
    nbi_prefix_deinit(&p);
}

/* The same tokens in two forms are two nodes, and so is what lies behind them. */
static void forms_are_told_apart(void **state)
{
    (void)state;
    nbi_prefix p;
    int32_t tokens[2 * NBI_PAGE_TOKENS] = {1, 2, 3}, pages[2];
    const int32_t *second = tokens + NBI_PAGE_TOKENS;
    for (uint32_t bits = 1; bits <= 64; bits += 63) {
        assert_int_equal(nbi_prefix_init(&p, 8, bits, NULL), NB_OK);
        assert_int_equal(nbi_prefix_insert(&p, NBI_PREFIX_ROOT, 0, tokens, false, 0), 0);
        assert_int_equal(nbi_prefix_match(&p, tokens, 1, 1, 0, pages), 0);
        assert_int_equal(nbi_prefix_insert(&p, NBI_PREFIX_ROOT, 1, tokens, true, 0), 1);
        assert_int_equal(nbi_prefix_insert(&p, 0, 2, second, false, 0), 2);
        assert_int_equal(nbi_prefix_insert(&p, 1, 3, second, false, 0), 3);
        assert_int_equal(nbi_prefix_insert(&p, 1, 4, second, true, 0), 4);
        for (int32_t expanded = 0; expanded < 3; expanded++) {
            assert_int_equal(nbi_prefix_match(&p, tokens, 2, (uint32_t)expanded, 0, pages), 2);
            assert_int_equal(pages[0], expanded > 0);
            assert_int_equal(pages[1], 2 + expanded);
        }
        nbi_prefix_deinit(&p);
    }
}

/* The same tokens of another salt are another tree, also where all hashes collide. */
static void salts_are_told_apart(void **state)
{
    (void)state;
    nbi_prefix p;
    int32_t tokens[2 * NBI_PAGE_TOKENS] = {1, 2, 3}, pages[2];
    const int32_t *second = tokens + NBI_PAGE_TOKENS;
    for (uint32_t bits = 1; bits <= 64; bits += 63) {
        assert_int_equal(nbi_prefix_init(&p, 8, bits, NULL), NB_OK);
        assert_int_equal(nbi_prefix_insert(&p, NBI_PREFIX_ROOT, 0, tokens, false, 7), 0);
        assert_int_equal(nbi_prefix_match(&p, tokens, 2, 0, 0, pages), 0);
        assert_int_equal(nbi_prefix_insert(&p, NBI_PREFIX_ROOT, 1, tokens, false, 0), 1);
        assert_int_equal(nbi_prefix_insert(&p, 0, 2, second, false, 7), 2);
        assert_int_equal(nbi_prefix_match(&p, tokens, 2, 0, 7, pages), 2);
        assert_int_equal(pages[0], 0);
        assert_int_equal(pages[1], 2);
        assert_int_equal(nbi_prefix_match(&p, tokens, 2, 0, 0, pages), 1);
        assert_int_equal(pages[0], 1);
        assert_int_equal(nbi_prefix_match(&p, tokens, 2, 0, 8, pages), 0);
        nbi_prefix_deinit(&p);
    }
}

/* While the tree stays as it is nothing is looked up; a page that comes costs one step, a page on
 * the way that goes all of them. */
static void waiting_costs_few_lookups(void **state)
{
    (void)state;
    nbi_prefix p;
    nbi_prefix_place place = {0};
    int32_t tokens[4 * NBI_PAGE_TOKENS] = {1, 2, 3}, other[NBI_PAGE_TOKENS] = {4};
    assert_int_equal(nbi_prefix_init(&p, 8, 64, NULL), NB_OK);
    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(nbi_prefix_insert(&p, i - 1, i, tokens + i * NBI_PAGE_TOKENS, false, 0),
                         i);
    assert_int_equal(nbi_prefix_peek(&p, &place, tokens, 4, 0, 0), 3);
    assert_int_equal(p.n_lookups, 4);
    for (int i = 0; i < 5; i++) assert_int_equal(nbi_prefix_peek(&p, &place, tokens, 4, 0, 0), 3);
    assert_int_equal(p.n_lookups, 4);
    assert_int_equal(nbi_prefix_insert(&p, NBI_PREFIX_ROOT, 3, other, false, 0), 3);
    assert_int_equal(nbi_prefix_peek(&p, &place, tokens, 4, 0, 0), 3);
    assert_int_equal(p.n_lookups, 5);
    assert_int_equal(nbi_prefix_insert(&p, 2, 4, tokens + (size_t)3 * NBI_PAGE_TOKENS, false, 0),
                     4);
    assert_int_equal(nbi_prefix_peek(&p, &place, tokens, 4, 0, 0), 4);
    assert_int_equal(p.n_lookups, 6);
    assert_int_equal(nbi_prefix_peek(&p, &place, tokens, 2, 0, 0), 2); /* a shorter way: anew */
    assert_int_equal(p.n_lookups, 8);
    assert_int_equal(nbi_prefix_peek(&p, &place, tokens, 4, 0, 0), 4);
    assert_int_equal(p.n_lookups, 10);
    for (int32_t i = 4; i >= 0; i--)
        if (i != 3) nbi_prefix_release(&p, i);
    assert_int_equal(nbi_prefix_evict(&p), 4);
    assert_int_equal(nbi_prefix_peek(&p, &place, tokens, 4, 0, 0), 3);
    assert_int_equal(p.n_lookups, 14);
    nbi_prefix_deinit(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_hold_what_they_say), cmocka_unit_test(collisions_change_nothing),
        cmocka_unit_test(twins_become_one),         cmocka_unit_test(forms_are_told_apart),
        cmocka_unit_test(salts_are_told_apart),     cmocka_unit_test(waiting_costs_few_lookups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
