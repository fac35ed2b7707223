/* The CPU backend from inside: state and the functions its table is made of. Included by
 * backend/cpu and moe/cpu only. */
#pragma once

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_cpu {
    nbi_backend base;    /* first */
    nbi_cpu_level level; /* cap: kernels up to this one are used */
    nbi_pool *pool;
    bool w4a4;
    void *scratch; /* linear's own scratch (converted activations, unpacked tiles), per
                      nbi_cpu_linear_scratch() */
    size_t scratch_bytes;
    void *attention; /* scratch of attention, indexer and sampler, per
                        nbi_cpu_attention_workspace(); one operator at a time */
    size_t attention_bytes;
} nbi_cpu;

static inline nbi_cpu *nbi_cpu_of(nbi_backend *b)
{
    return (nbi_cpu *)b;
}

/* ---- cpu.c */
extern const nbi_backend_ops nbi_cpu_ops;

/* ---- linear.c and its kernels (linear_reference.c, linear_avx2.c, linear_avx512.c, linear_amx.c)
 */
nb_status nbi_cpu_weight_prepare(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                 nb_error *err);
void nbi_cpu_weight_release(nbi_backend *b, nbi_weight **w);
size_t nbi_cpu_linear_scratch(const nbi_cpu *cpu, const nbi_limits *limits);
void nbi_cpu_linear(nbi_backend *b, const nbi_linear_args *a);

/* ---- elementwise.c: embed, rope_table, rmsnorm, swiglu, gather, add */
void nbi_cpu_embed(nbi_backend *b, const nbi_embed_args *a);
void nbi_cpu_rope_table(nbi_backend *b, const nbi_rope_table_args *a);
void nbi_cpu_rmsnorm(nbi_backend *b, const nbi_rmsnorm_args *a);
void nbi_cpu_swiglu(nbi_backend *b, const nbi_swiglu_args *a);
void nbi_cpu_share_experts(nbi_backend *b, const nbi_share_experts_args *a);
void nbi_cpu_own_experts(nbi_backend *b, const nbi_own_experts_args *a);
void nbi_cpu_clear(nbi_backend *b, const nbi_clear_args *a);
void nbi_cpu_gather(nbi_backend *b, const nbi_gather_args *a);
void nbi_cpu_add(nbi_backend *b, const nbi_add_args *a);

/* Widest latent + rope row, GQA head and indexer key; `reserve` refuses more with NB_UNSUPPORTED.
 */
#define NBI_CPU_WIDTH_MAX 1024u

/* ---- attention: mla.c, gqa.c, indexer.c */
void nbi_cpu_mla_append(nbi_backend *b, const nbi_mla_append_args *a);
void nbi_cpu_mla_attend(nbi_backend *b, const nbi_mla_attend_args *a);
void nbi_cpu_gqa_append(nbi_backend *b, const nbi_gqa_append_args *a);
void nbi_cpu_gqa_attend(nbi_backend *b, const nbi_gqa_attend_args *a);
void nbi_cpu_index_append(nbi_backend *b, const nbi_index_append_args *a);
void nbi_cpu_index_select(nbi_backend *b, const nbi_index_select_args *a);
void nbi_cpu_index_reuse(nbi_backend *b, const nbi_index_reuse_args *a);
/* Also covers `sample`. The CPU uses this memory, made by `reserve`, and not the `workspace` member
 * of an operator's arguments. */
size_t nbi_cpu_attention_workspace(const nbi_cpu *cpu, const nbi_limits *limits);

/* ---- route.c, sample.c */
#define NBI_CPU_EXPERTS_MAX 1024u /* n_experts of nbi_cpu_route at most */
void nbi_cpu_route(nbi_backend *b, const nbi_route_args *a);
void nbi_cpu_sample(nbi_backend *b, const nbi_sample_args *a);

#ifdef __cplusplus
}
#endif
