/* What a timer (timing.h) has found, as figures, JSON and a trace. */
#pragma once

#include "backend/timing.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_BREAKDOWN_SLOWEST 5u
#define NBI_BREAKDOWN_ROWS    (NBI_TIMED_PART_COUNT + 2u)
#define NBI_BREAKDOWN_OPS     64u
#define NBI_WHY_MAX           160u

/* Per step. A row's floor is its bytes over the read bandwidth. */
typedef struct nbi_breakdown_row {
    const char *component; /* of nbi_timed_part_name(), "launch gaps", "host gaps" */
    const char *op;        /* NULL: all of the component, or a gap */
    double calls, ms, max_ms, bytes;
    double floor_ms;
    double share_of_floor; /* floor_ms / ms; 0 where there are no bytes */
    double share_of_step;
} nbi_breakdown_row;

typedef struct nbi_breakdown {
    bool decode;
    uint64_t steps;
    double tokens;         /* rows of a step */
    double read_bandwidth; /* bytes per second; 0: not known, and there are no floors */
    nbi_breakdown_row step;
    uint32_t n_rows, n_ops;
    nbi_breakdown_row rows[NBI_BREAKDOWN_ROWS]; /* components, then launch gaps and host gaps: their
                                                   times are the step's */
    nbi_breakdown_row ops[NBI_BREAKDOWN_OPS];   /* the same by operator, gaps left out */
    uint32_t n_slowest;
    struct {
        nbi_breakdown_row row; /* of `ops`, or a gap */
        double lost_ms;        /* above its floor */
        char why[NBI_WHY_MAX];
    } slowest[NBI_BREAKDOWN_SLOWEST]; /* most lost time first */
} nbi_breakdown;

void nbi_breakdown_make(nbi_breakdown *out, const nbi_timing *t, bool decode,
                        double read_bandwidth);

/* Appends one JSON object. */
nb_status nbi_breakdown_json(nbi_buf *out, const nbi_breakdown *b);

/* Appends the events kept, as a JSON object in the Trace Event Format that Perfetto and
 * chrome://tracing open: complete events in microseconds, steps on one track and operators on
 * another. "otherData" has `model`, `device` and how many events were overwritten; `breakdown`,
 * when not NULL, is an array of JSON text that becomes a member of the same name. */
nb_status nbi_trace_json(nbi_buf *out, const nbi_timing *t, const char *model, const char *device,
                         const nbi_buf *breakdown);

#ifdef __cplusplus
}
#endif
