/* Inside of the gate. Private to src/model. */
#pragma once

#include "model/gate.h"
#include "model/layer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_gate {
    nbi_model *m;
    nbi_backend *b;
    const nbi_gate_options *opt;
    nbi_pool *pool; /* for the sums in double; NULL until they are many */
    uint64_t random;
    uint32_t pass; /* of the next step: none is ever repeated from a recording */
    bool failed;
    char failure[NB_ERROR_TEXT_MAX]; /* the first chosen path that is wrong */
} nbi_gate;

/* Memory of the device with what the host wrote, and as much of the host. */
typedef struct nbi_gate_buffer {
    void *device;
    void *host;
    size_t bytes;
} nbi_gate_buffer;

nb_status nbi_gate_buffer_open(nbi_gate *g, nbi_gate_buffer *out, size_t bytes, nb_error *err);
void nbi_gate_buffer_close(nbi_gate *g, nbi_gate_buffer *buffer); /* zeroed is fine */
void nbi_gate_up(nbi_gate *g, const nbi_gate_buffer *buffer);
void nbi_gate_down(nbi_gate *g, const nbi_gate_buffer *buffer);

uint32_t nbi_gate_below(nbi_gate *g, uint32_t n);
float nbi_gate_normal(nbi_gate *g); /* about normal */
void nbi_gate_fill(nbi_gate *g, float *x, size_t n);

static inline uint32_t nbi_gate_least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Rows of a case that wants n: no more than a step was reserved for, which is at least two. */
uint32_t nbi_gate_rows(const nbi_gate *g, uint32_t n);

/* max |got - want| / rms(want); infinite for what is not finite. */
double nbi_gate_error(const float *got, const double *want, size_t n);
double nbi_gate_dot(const float *a, const float *b, uint32_t n);
/* nbi_pool_run() with threads where `sums` multiply-adds are worth them. */
void nbi_gate_each(nbi_gate *g, nbi_task task, void *arg, uint32_t n, uint32_t grain,
                   uint64_t sums);
/* Largest difference allowed: activations are rounded to BF16 or FP16 in front of products, with
 * `w4a4` to NVFP4, where one step of a code is large. */
double nbi_gate_bound(bool w4a4);

/* Decides `ok` and reports. */
void nbi_gate_say(nbi_gate *g, nbi_gate_result *r);

/* gate_time.c: seconds, bytes and rows of one call of a runner with `rows` rows whose routing is
 * spread over the experts, others in every call: the least of `repeats` means. A call that takes a
 * second is its own mean. */
nb_status nbi_gate_time(nbi_gate *g, const nbi_moe_experts *e, const nbi_moe_runner_ops *r,
                        const nbi_moe_layer *layer, uint32_t rows, uint32_t repeats,
                        nbi_gate_result *out, nb_error *err);

/* gate_moe.c, gate_linear.c, gate_mlp.c, gate_attention.c */
nb_status nbi_gate_moe(nbi_gate *g, nb_error *err);
nb_status nbi_gate_linear(nbi_gate *g, nb_error *err);
nb_status nbi_gate_mlp(nbi_gate *g, nb_error *err);
nb_status nbi_gate_attention(nbi_gate *g, nb_error *err);

#ifdef __cplusplus
}
#endif
