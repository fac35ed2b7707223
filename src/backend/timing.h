/* Times of what really runs. While a step is timed, the backend's table is exchanged for one that
 * measures every operator call and hands it on; otherwise nothing is there and nothing is paid.
 *
 * Where the backend has no clock of its own (CPU), a call has ended when it returns and the host's
 * clock times it. Where it has (nbi_backend_clock), marks in the device's stream do, and their
 * times are read when the step is over. There an operator may wait for a later call that does both
 * in one launch: the time then goes to the one of them that reads most.
 *
 * Bytes are those of weights and cache that the call must read or write: weights once, the expected
 * number of distinct experts, the cache that the rows see. They are counted per call, and add up to
 * what `nibble roofline` works out for the step. Calls among ranks (comm/comm.h) are the part
 * "collectives"; their bytes are those that a rank gets over the link, and not of the step's. Where
 * one operator does the work of two components, its row has both: MLA's attention reads kv_b and
 * stands under "cache read".
 *
 * One thread at a time. No heap but in create and keep_events. */
#pragma once

#include "backend/backend.h"
#include "backend/parts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Parts of a step that the roofline does not have, behind those that it has. */
enum { NBI_TIMED_SAMPLING = NBI_PART_COUNT, NBI_TIMED_DRAFTING, NBI_TIMED_PART_COUNT };

/* clang-format off */
#define NBI_TIMED_OP_LIST(X)              \
    X(EMBED, "embed")                     \
    X(ROPE_TABLE, "rope_table")           \
    X(RMSNORM, "rmsnorm")                 \
    X(LINEAR, "linear")                   \
    X(SWIGLU, "swiglu")                   \
    X(MLA_APPEND, "mla_append")           \
    X(MLA_ATTEND, "mla_attend")           \
    X(GQA_APPEND, "gqa_append")           \
    X(GQA_ATTEND, "gqa_attend")           \
    X(INDEX_APPEND, "index_append")       \
    X(INDEX_SELECT, "index_select")       \
    X(INDEX_REUSE, "index_reuse")         \
    X(ROUTE, "route")                     \
    X(EXPERTS, "experts")                 \
    X(GATHER, "gather")                   \
    X(ADD, "add")                         \
    X(SAMPLE, "sample")                   \
    X(ALL_REDUCE, "all_reduce")           \
    X(ALL_GATHER, "all_gather")           \
    X(BROADCAST, "broadcast")
/* clang-format on */

typedef enum nbi_timed_op {
#define X(suffix, name) NBI_TIMED_##suffix,
    NBI_TIMED_OP_LIST(X)
#undef X
        NBI_TIMED_OP_COUNT
} nbi_timed_op;

const char *nbi_timed_op_name(nbi_timed_op op);
const char *nbi_timed_part_name(uint32_t part);

typedef struct nbi_timed_row {
    uint64_t calls, ns;
    uint64_t max_ns; /* of one call */
    double bytes;
} nbi_timed_row;

/* Sums over timed steps. step_ns = all rows' ns + launch_ns + host_ns. */
typedef struct nbi_timing_table {
    nbi_timed_row rows[NBI_TIMED_PART_COUNT][NBI_TIMED_OP_COUNT];
    uint64_t steps, tokens; /* rows of the batches */
    uint64_t step_ns;
    uint64_t launch_ns; /* within forward passes, in no operator */
    uint64_t host_ns;   /* outside of them: forming the batch, choosing tokens, handing them out */
} nbi_timing_table;

/* One operator call, or one step. */
typedef struct nbi_timed_event {
    const char *name; /* of the matrix or operator; lives as long as the model */
    uint64_t begin_ns, ns;
    double bytes;
    uint32_t step; /* counted from 0 since keep_events */
    uint32_t rows; /* of the step's batch; 0: an operator */
    uint16_t layer;
    uint8_t part, op;
} nbi_timed_event;

typedef struct nbi_timing nbi_timing;

/* The backend is borrowed and must outlive it. */
nb_status nbi_timing_create(nbi_timing **out, nbi_backend *b, nb_error *err);
void nbi_timing_destroy(nbi_timing **t);

/* Before the first timed step: makes the marks of a device that has a clock, once. */
nb_status nbi_timing_open_clock(nbi_timing *t, nb_error *err);

/* The model's routed experts, which do not go through the backend's table: bytes of one expert of
 * each layer, and of the shared expert that every call does with them, [n_layers]; and the runner
 * behind the timed one. Borrowed. */
void nbi_timing_experts(nbi_timing *t, uint32_t n_experts, uint32_t top_k,
                        const uint64_t *expert_bytes, const uint64_t *shared_bytes,
                        uint32_t n_layers, const void *runner);

/* Keeps the last n events from here on; 0: none. Between steps. */
nb_status nbi_timing_keep_events(nbi_timing *t, uint32_t n, nb_error *err);
/* Forgets sums and events. Between steps. */
void nbi_timing_clear(nbi_timing *t);

/* A timed step: operators called in between, from this thread, are measured. `decode`: every row is
 * a sequence's newest token or a draft behind it; the sums of such steps are kept apart. */
void nbi_timing_step_begin(nbi_timing *t);
void nbi_timing_step_end(nbi_timing *t, uint32_t n_rows, bool decode);

/* Instead of the end: the step had nothing to do and counts nowhere. */
void nbi_timing_step_cancel(nbi_timing *t);
/* The sums of the last step alone. */
const nbi_timing_table *nbi_timing_last(const nbi_timing *t);

/* Around a runner's call; the first returns the runner. */
const void *nbi_timing_experts_begin(nbi_timing *t);
void nbi_timing_experts_end(nbi_timing *t, uint32_t n_rows);

/* Around a call among ranks, of which this one gets so many bytes from others; ALL_REDUCE and what
 * follows it. From the step's thread, within a timed step. */
void nbi_timing_collective_begin(nbi_timing *t);
void nbi_timing_collective_end(nbi_timing *t, nbi_timed_op op, double bytes);

const nbi_timing_table *nbi_timing_of(const nbi_timing *t, bool decode);
/* The i-th of the events kept, oldest first; how many there are, and how many were overwritten. */
uint32_t nbi_timing_n_events(const nbi_timing *t, uint64_t *lost);
const nbi_timed_event *nbi_timing_event(const nbi_timing *t, uint32_t i);
/* Is the time measured by the device's own clock? */
bool nbi_timing_on_device(const nbi_timing *t);
/* Does a timed step take as long as one that is not, but for the timing itself? */
bool nbi_timing_is_light(const nbi_timing *t);

#ifdef __cplusplus
}
#endif
