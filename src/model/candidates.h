/* Of a part of the vocabulary what sampling with top_k needs: its best logits, and its least.
 *
 * A row in which only the k + 1 best logits of each part and the least of each stand, the others
 * -inf, is sampled with top_k = k (k = 0: greedy, one each) to the same token as the whole row, bit
 * for bit: whatever is added up in choosing is of the k best, in the same order, and the sampler's
 * buckets are cut from the largest and the least logit (backend/cpu/sample.c). Callers: forward.c.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_CANDIDATES_MAX 129

typedef struct nbi_candidate {
    int32_t id; /* -1: none */
    float logit;
} nbi_candidate;

/* out[count + 1] := the `count` largest of x[n_valid], ties to the lower id, then the least finite
 * one; ids count from `first`. NaN or +inf in x[n]: out[0] is NaN. n_valid <= n. */
void nbi_candidates_find(nbi_candidate *out, uint32_t count, const float *x, uint32_t n,
                         uint32_t n_valid, int32_t first);

/* row[vocab] := what n candidates say, else -inf. `clear`: of the first part. */
void nbi_candidates_put(float *row, uint32_t vocab, const nbi_candidate *in, uint32_t n,
                        bool clear);

#ifdef __cplusplus
}
#endif
