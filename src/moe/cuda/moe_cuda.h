/* MoE runners on the CUDA backend from inside: prepared experts and the two ways to run them.
 * Private to src/moe/cuda. */
#pragma once

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/tile.h"
#include "moe/runners.h"

#define NBI_MOE_TOP_K_MAX   32u
#define NBI_MOE_EXPERTS_MAX 1024u

/* The same matrix of every expert, packed; expert e lies e * stride bytes behind `first`. Gate and
 * up are one interleaved matrix; in float32 one above the other. */
struct nbi_moe_weights {
    nbi_cuda_packed first;
    size_t stride;
    const float *input_scale; /* [n_experts] NVFP4 activations (w4a4), 0: off; NULL: all off */
};

/* One form for every runner here. */
struct nbi_moe_layer {
    nbi_moe_shape shape;
    uint32_t layer;
    void *block; /* device memory of all experts */
    nbi_moe_weights gate_up, down;
    bool fp4; /* tiles as moe_fp4.h has them, for its products alone */
};

__host__ __device__ inline nbi_cuda_packed nbi_moe_expert(const nbi_moe_weights &w, uint32_t e)
{
    nbi_cuda_packed p = w.first;
    const size_t at = e * w.stride;
    p.data = static_cast<const char *>(p.data) + at;
    p.scales = static_cast<const char *>(p.scales) + at;
    p.row_scale = reinterpret_cast<const float *>(reinterpret_cast<const char *>(p.row_scale) + at);
    return p;
}

/* The experts of rows: those that were chosen for it, then the shared one, with weight 1. A pair is
 * (row, slot), `n` to a row. */
struct nbi_moe_slots {
    const int32_t *ids;   /* [rows][top_k] */
    const float *weights; /* [rows][top_k] */
    uint32_t top_k, n;
    uint32_t n_experts; /* to choose from; the shared one's number */
    nbi_divisor by;     /* n */

    __host__ __device__ nbi_moe_slots from(size_t row) const
    {
        return {ids + row * top_k, weights + row * top_k, top_k, n, n_experts, by};
    }

    /* Place of a pair in the arrays; false: it is the shared expert's. */
    NBI_DEV bool find(uint32_t pair, size_t *at) const
    {
        *at = pair;
        if (n == top_k) return true;
        const uint32_t row = nbi_div(pair, by), slot = pair - row * n;
        *at = (size_t)row * top_k + slot;
        return slot < top_k;
    }

    NBI_DEV int32_t valid(int32_t id) const
    {
        return (uint32_t)id < n_experts ? id : -1;
    }

    /* The expert; -1: none. */
    NBI_DEV int32_t expert(uint32_t pair) const
    {
        size_t at;
        return find(pair, &at) ? valid(ids[at]) : (int32_t)n_experts;
    }

    /* The same past the L1 cache. */
    NBI_DEV int32_t expert_fresh(uint32_t pair) const
    {
        size_t at;
        return find(pair, &at) ? valid(nbi_load_fresh(ids + at)) : (int32_t)n_experts;
    }

    NBI_DEV float weight(uint32_t pair) const
    {
        size_t at;
        return find(pair, &at) ? weights[at] : 1.0f;
    }

    /* Both of the first row, past the L1 cache. */
    NBI_DEV int32_t slot_expert(uint32_t slot) const
    {
        return slot < top_k ? valid(nbi_load_fresh(ids + slot)) : (int32_t)n_experts;
    }

    NBI_DEV float slot_weight(uint32_t slot) const
    {
        if (slot >= top_k) return 1.0f;
        return nbi_float(
            (uint32_t)nbi_load_fresh(reinterpret_cast<const int32_t *>(weights) + slot));
    }
};

static inline nbi_moe_slots nbi_moe_slots_of(const nbi_moe_shape *s, const nbi_moe_args *a)
{
    const uint32_t n = nbi_moe_n_slots(s);
    return {a->ids, a->weights, s->top_k, n, s->n_experts, nbi_divisor_of(n)};
}

NBI_DEV float nbi_moe_input_scale(const nbi_moe_weights &w, uint32_t e)
{
    return w.input_scale ? w.input_scale[e] : 0.0f;
}

NBI_DEV float nbi_moe_swiglu(float gate, float up)
{
    return nbi_swiglu(gate, up);
}

/* launch<KIND>(...) for a kind that nbi_moe_cuda_supports() let through. */
#define NBI_MOE_BY_KIND(kind, launch, ...)                                       \
    switch (kind) {                                                              \
    case NBI_WEIGHT_NVFP4: launch<NBI_WEIGHT_NVFP4>(__VA_ARGS__); break;         \
    case NBI_WEIGHT_BF16: launch<NBI_WEIGHT_BF16>(__VA_ARGS__); break;           \
    case NBI_WEIGHT_F16: launch<NBI_WEIGHT_F16>(__VA_ARGS__); break;             \
    case NBI_WEIGHT_FP8_BLOCK: launch<NBI_WEIGHT_FP8_BLOCK>(__VA_ARGS__); break; \
    default: launch<NBI_WEIGHT_FP8_TENSOR>(__VA_ARGS__); break;                  \
    }

static inline bool nbi_moe_has_f32(const nbi_moe_shape *s)
{
    return s->kind_gate_up == NBI_WEIGHT_F32 || s->kind_down == NBI_WEIGHT_F32;
}

/* moe_prepare.cu */
bool nbi_moe_cuda_supports(const nbi_backend *b, const nbi_moe_shape *shape, char *why,
                           size_t why_bytes);
nb_status nbi_moe_cuda_prepare(nbi_backend *b, nbi_moe_layer **out, const nbi_moe_experts *e,
                               nb_error *err);
void nbi_moe_cuda_release(nbi_backend *b, nbi_moe_layer **layer);

/* moe_gemv.cu */
bool nbi_moe_gemv_fits(const nbi_cuda *c, const nbi_moe_shape *shape); /* into shared memory */
size_t nbi_moe_gemv_workspace(const nbi_moe_shape *shape, uint32_t max_rows);
void nbi_moe_gemv_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);

/* moe_plain.cu: the two halves of gemv for float32 weights */
void nbi_moe_plain_gate_up(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, float *h);
void nbi_moe_plain_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, const float *h);

/* moe_stream.cu: one row, on devices with bulk copies; the workspace is that of moe_gemv.cu. */
bool nbi_moe_stream_fits(const nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);
void nbi_moe_stream_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);

/* moe_one.cu: one row whose weights of a block fit into shared memory */
bool nbi_moe_one_fits(const nbi_cuda *c, const nbi_moe_layer *l, uint32_t n_rows);
void nbi_moe_one_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);

/* moe_routed.cu: one row that fits moe_one.cu, whose router and choice wait in front of it
 * (nbi_cuda.route_pending). */
bool nbi_moe_routed_fits(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);
void nbi_moe_routed_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);

/* moe_rows.cu: from two rows on, on devices with bulk copies, without NVFP4 activations */
bool nbi_moe_rows_fits(const nbi_cuda *c, const nbi_moe_layer *l, uint32_t n_rows);
size_t nbi_moe_rows_workspace(const nbi_moe_shape *shape, uint32_t max_rows);
void nbi_moe_rows_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);

/* moe_fp4.cu: FP4 tiles where all experts are NVFP4 and have input scales, else as above */
nb_status nbi_moe_fp4_prepare(nbi_backend *b, nbi_moe_layer **out, const nbi_moe_experts *e,
                              nb_error *err);

/* moe_masked.cu: not for float32 experts. fp4, here and below: of a layer with FP4 tiles */
bool nbi_moe_masked_fits(const nbi_cuda *c, const nbi_moe_shape *shape);
size_t nbi_moe_masked_workspace(const nbi_moe_shape *shape, uint32_t max_rows, bool fp4);
void nbi_moe_masked_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);

/* moe_grouped.cu */
bool nbi_moe_grouped_fits(const nbi_cuda *c, const nbi_moe_shape *shape);
size_t nbi_moe_grouped_workspace(const nbi_moe_shape *shape, uint32_t max_rows, bool fp4);
void nbi_moe_grouped_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a);
