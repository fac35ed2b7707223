/* Caches, weights and float64 oracles of MLA and GQA, written from the contract in backend.h. */
#pragma once

#include "operator_util.h"

typedef struct at_mla_case {
    uint32_t heads, nope, rope, lora, v;
    nbi_dtype cache;
    nbi_weight_kind kind;
    uint32_t topk; /* 0: dense */
} at_mla_case;

typedef struct at_mla {
    at_mla_case c;
    op_batch batch;
    op_kv cache; /* what kv points to */
    nbi_kv_layer kv;
    nbi_weight kv_b;
    float *q, *out, *w; /* w: decoded kv_b */
    void *data, *scales;
    int32_t *select;
    float scale;
    int32_t expanded; /* rows at positions below are in the expanded form; 0 by at_make_mla() */
} at_mla;

typedef struct at_gqa_case {
    uint32_t heads, kv_heads, dim;
    nbi_dtype cache;
} at_gqa_case;

typedef struct at_gqa {
    at_gqa_case c;
    op_batch batch;
    op_kv k, v; /* what kv points to */
    nbi_kv_layer kv;
    float *q, *out, scale;
} at_gqa;

void at_make_mla(at_mla *d, const at_mla_case *c, const uint32_t *lengths, const uint32_t *rows,
                 uint32_t n_seqs);
void at_free_mla(at_mla *d);
void at_oracle_mla(const at_mla *d, uint32_t t, uint32_t h, double *out);
nbi_limits at_mla_limits(const at_mla_case *c, uint32_t rows, uint32_t ctx);
void at_make_gqa(at_gqa *d, const at_gqa_case *c, const uint32_t *lengths, const uint32_t *rows,
                 uint32_t n_seqs);
void at_free_gqa(at_gqa *d);
void at_oracle_gqa(const at_gqa *d, uint32_t t, uint32_t h, double *out);
nbi_limits at_gqa_limits(const at_gqa_case *c, uint32_t rows, uint32_t ctx);
void at_angles(float **cos_out, float **sin_out, const op_batch *b, uint32_t dim);
void at_rotate(double *x, uint32_t dim, bool interleaved, const float *cs, const float *sn);
/* Of values [first, first + n) of a vector. */
double at_cache_error(const op_kv *kv, size_t vector, uint32_t first, const double *want,
                      uint32_t n);
double at_cache_bound(nbi_dtype dtype);
void at_norm(double *x, uint32_t n, const float *w, double eps);
