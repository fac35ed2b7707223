/* Shared by the operator tests: seeded numbers, guarded and poisoned buffers, backends of every
 * level, paged batches, timing.
 *
 * The numbers are the same in every run; `--seed N` gives others. `--bench` makes programs time
 * their operators. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu_backend.h"
#include "base/clock.h"
#include "base/numfmt.h"

/* ---- command line and random numbers */
extern bool op_bench;

/* Reads --seed and --bench. */
void op_begin(int argc, char **argv);

uint64_t op_random(void);
uint32_t op_below(uint32_t n);
float op_uniform(float lo, float hi);
float op_normal(void);
void op_fill(float *x, size_t n, float scale); /* normal */

/* ---- buffers between guard bands, filled with NaN */
void *op_alloc(size_t bytes);
float *op_floats(size_t n);
/* Fails the test when a guard band was written to. */
void op_check(const void *p);
void op_free(void *p); /* checks first; NULL is fine */

/* ---- backends */
nbi_cpu *op_open(nbi_cpu_level level, uint32_t threads, const nbi_limits *limits);
void op_close(nbi_cpu *cpu);

/* ---- batches: `n_rows` last positions of every sequence of `lengths`; pages in random order */
typedef struct op_batch {
    nbi_batch b;
    uint32_t n_pages;
    int32_t *pos, *seq, *first, *len, *pages, *fault, *ids;
} op_batch;

void op_batch_make(op_batch *out, const uint32_t *lengths, const uint32_t *n_rows, uint32_t n_seqs);
/* Rows [begin, end) of one sequence of `from` as a batch of their own, same pages. */
void op_batch_slice(op_batch *out, const op_batch *from, uint32_t begin, uint32_t end);
void op_batch_free(op_batch *b);

/* Cache memory of type dtype from floats, and one value of it. */
void *op_cache(nbi_dtype dtype, const float *x, size_t n);

/* A part of a layer's cache, laid out and coded as docs/formats/kv-pages.md says:
 * [pages][heads][64] vectors of `width` values. Of latents the first `coded` are in codes when
 * E4M3, else all are. */
typedef struct op_kv {
    nbi_dtype dtype;
    uint32_t heads, width, coded;
    size_t n, bytes; /* values; of data */
    void *data;      /* guarded; op_free() */
} op_kv;
op_kv op_kv_empty(nbi_dtype dtype, uint32_t n_pages, uint32_t heads, uint32_t width,
                  uint32_t coded);
op_kv op_kv_make(nbi_dtype dtype, uint32_t n_pages, uint32_t heads, uint32_t width, uint32_t coded,
                 const float *x);
/* Vector i of [pages][heads][64], value c. */
double op_kv_at(const op_kv *kv, size_t i, uint32_t c);
/* The same values in BF16, which holds codes times scales exactly. */
op_kv op_kv_bf16(const op_kv *kv);
size_t op_slot(const op_batch *b, uint32_t seq, uint32_t pos); /* page * 64 + offset */

/* ||a - b|| / ||b||, b in double; 0 when both are zero; NaN anywhere gives infinity. */
double op_error(const float *a, const double *b, size_t n);
#define OP_ASSERT_ERROR(err, bound, ...)                                  \
    do {                                                                  \
        const double op_e_ = (err);                                       \
        if (!(op_e_ <= (bound))) {                                        \
            print_error(__VA_ARGS__);                                     \
            print_error(": error %g above %g\n", op_e_, (double)(bound)); \
            fail();                                                       \
        }                                                                 \
    } while (0)

/* ---- timing */
/* Bytes per second that all threads of a pool read from memory larger than the caches. */
double op_read_bandwidth(nbi_pool *pool);
/* Median seconds of `repeats` calls. */
double op_time(void (*fn)(void *), void *arg, uint32_t repeats);
