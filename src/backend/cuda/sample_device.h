/* Parts of the sampler's kernels (sample.cu): block-wide sums and choices, and prefixes of the
 * distribution sorted by descending logit (ties: ascending id).
 *
 * A token is a key: the order of its logit above the inverted id, so that keys are distinct and
 * descend as the sorted distribution does. Its mass is exp((logit - max) / T) as an integer in
 * units of 2^-40: sums of masses do not depend on their order, so blocks add into bins and lists in
 * any order. The rounding of a mass is 2^-41 of the largest token's; what rounds to zero cannot be
 * drawn. A boundary that lies within that, or within the rounding of exp, of a token's edge may
 * fall on the other side than the CPU's sums have it. */
#pragma once

#include "backend/backend.h"
#include "backend/cuda/device.h"

#define NBI_SAMPLE_THREADS 256u
#define NBI_SAMPLE_WARPS   (NBI_SAMPLE_THREADS / NBI_WARP)
#define NBI_SAMPLE_VALUES  8u /* logits of a thread */
#define NBI_SAMPLE_CHUNK   (NBI_SAMPLE_THREADS * NBI_SAMPLE_VALUES)
#define NBI_SAMPLE_BINS    (2u * NBI_SAMPLE_THREADS)
#define NBI_SAMPLE_SORT    2048u /* candidates that are sorted in shared memory */
#define NBI_SAMPLE_NO_BIN  NBI_SAMPLE_BINS
#define NBI_SAMPLE_ONE     0x1p40f /* mass of the largest logit */
#define NBI_SAMPLE_REACH   28.0f   /* exp(-28) < 2^-40: masses beyond are zero */
#define NBI_SAMPLE_BROKEN  (~0ull) /* key of a chunk with NaN or +inf */

typedef unsigned long long nbi_mass; /* 2^-40; also keys: the type that atomics take */

typedef enum nbi_sample_mode { NBI_SAMPLE_GREEDY, NBI_SAMPLE_DRAW, NBI_SAMPLE_FORCED } nbi_mode;

/* What the device knows of a row. */
typedef struct nbi_sample_request {
    nbi_mode mode;
    float inv_t, top_p, min_p;
    uint32_t top_k;    /* 0: off */
    uint32_t n_top;    /* length of the list of log-probabilities */
    bool logprob;      /* log-probabilities are wanted */
    uint32_t n_wanted; /* in place of the list: of these ids */
    int32_t wanted[NBI_SAMPLE_TOP_MAX];
    bool lists; /* logits are changed first */
    double u;   /* in [0, 1) */
    int32_t forced_id;
    uint32_t n_adjust, n_banned;
    uint32_t adjust, banned, mask; /* where in the staged lists, in words */
    bool has_mask;
} nbi_sample_request;

/* A row's tokens by their distance from the largest logit. */
typedef struct nbi_sample_bins {
    nbi_mass mass[NBI_SAMPLE_BINS];
    nbi_mass min_p_mass; /* of tokens with at least min_p of the largest probability */
    uint32_t count[NBI_SAMPLE_BINS];
    uint32_t n_listed;
} nbi_sample_bins;

/* How logits of a row become masses and bins. */
typedef struct nbi_sample_scale {
    float max, inv_t, per_bin;
} nbi_sample_scale;

/* ---------------------------------------------------------------- keys, masses */

NBI_DEV nbi_mass nbi_sample_key(float logit, uint32_t id)
{
    return static_cast<nbi_mass>(nbi_order(logit + 0.0f)) << 32 | (~id & 0xffffffffu); /* -0 is 0 */
}

NBI_DEV float nbi_sample_logit(nbi_mass key)
{
    return nbi_unorder(static_cast<uint32_t>(key >> 32));
}

NBI_DEV uint32_t nbi_sample_id(nbi_mass key)
{
    return ~static_cast<uint32_t>(key);
}

NBI_DEV float nbi_sample_p(const nbi_sample_scale &s, float logit)
{
    return expf((logit - s.max) * s.inv_t);
}

NBI_DEV nbi_mass nbi_sample_mass(float p)
{
    const float units = p * NBI_SAMPLE_ONE;
    return static_cast<nbi_mass>(units < 0x1p23f ? units + 0.5f : units);
}

NBI_DEV uint32_t nbi_sample_bin(const nbi_sample_scale &s, float logit)
{
    const float d = (s.max - logit) * s.inv_t * s.per_bin;
    return d < static_cast<float>(NBI_SAMPLE_BINS - 1) ? static_cast<uint32_t>(d)
                                                       : NBI_SAMPLE_BINS - 1;
}

/* Bins spread over the distances that occur: min is the smallest finite logit. */
NBI_DEV nbi_sample_scale nbi_sample_scale_of(float max, float min, float inv_t)
{
    float range = (max - min) * inv_t;
    if (!(range < NBI_SAMPLE_REACH)) range = NBI_SAMPLE_REACH;
    return {max, inv_t, range > 0 ? static_cast<float>(NBI_SAMPLE_BINS - 1) / range : 0.0f};
}

/* ---------------------------------------------------------------- over a block
 * The result is the same in every thread. Every thread of the block calls. */

NBI_DEV nbi_mass nbi_block_best(nbi_mass key)
{
    __shared__ nbi_mass warps[NBI_SAMPLE_WARPS];
    const uint32_t high = static_cast<uint32_t>(key >> 32), best = nbi_warp_max(high);
    const uint32_t low = nbi_warp_max(high == best ? static_cast<uint32_t>(key) : 0u);
    __syncthreads(); /* the call before has been read */
    if (nbi_lane() == 0) warps[threadIdx.x / NBI_WARP] = static_cast<nbi_mass>(best) << 32 | low;
    __syncthreads();
    key = warps[0];
    for (uint32_t w = 1; w < NBI_SAMPLE_WARPS; w++) key = warps[w] > key ? warps[w] : key;
    return key;
}

/* Sum of the threads before this one; *total of all. */
NBI_DEV nbi_mass nbi_block_scan(nbi_mass x, nbi_mass *total)
{
    __shared__ nbi_mass warps[NBI_SAMPLE_WARPS];
    nbi_mass sum = x;
    for (unsigned d = 1; d < NBI_WARP; d *= 2) {
        const nbi_mass y = __shfl_up_sync(NBI_FULL_MASK, sum, d);
        if (nbi_lane() >= static_cast<int>(d)) sum += y;
    }
    __syncthreads(); /* the call before has been read */
    if (nbi_lane() == NBI_WARP - 1) warps[threadIdx.x / NBI_WARP] = sum;
    __syncthreads();
    nbi_mass before = 0, all = 0;
    for (uint32_t w = 0; w < NBI_SAMPLE_WARPS; w++) {
        if (w == threadIdx.x / NBI_WARP) before = all;
        all += warps[w];
    }
    *total = all;
    return before + sum - x;
}

/* ---------------------------------------------------------------- which bins matter */

/* Does a prefix of this mass reach the target? Masses are at least 1, so a target of zero stands
 * for one token. */
typedef struct nbi_sample_target {
    double mass;
    bool strict; /* beyond it, not just to it */
} nbi_sample_target;

NBI_DEV bool nbi_sample_reached(const nbi_sample_target &t, nbi_mass m)
{
    const double x = static_cast<double>(m);
    return t.strict ? x > t.mass : x >= t.mass && m > 0;
}

/* Sums over the bins, in shared memory: of [0, b). */
typedef struct nbi_sample_sums {
    nbi_mass mass[NBI_SAMPLE_BINS + 1];
    uint32_t count[NBI_SAMPLE_BINS + 1], listed[NBI_SAMPLE_BINS + 1];
    uint32_t bin; /* a search's result */
    uint32_t at;  /* the same in a list */
    nbi_mass at_mass;
} nbi_sample_sums;

/* Bins with a boundary in them: in those, and only there, tokens are sorted. Ranges because masses
 * of cut prefixes are known up to the tokens of their last bin. */
typedef struct nbi_sample_plan {
    uint32_t k;       /* bin of the last of top_k; NO_BIN: the cut is between bins */
    uint32_t p[2];    /* first and last bin in which top_p may end; NO_BIN: off */
    uint32_t draw[2]; /* in which the drawn token may lie */
} nbi_sample_plan;

NBI_DEV bool nbi_sample_listed(const nbi_sample_plan &p, uint32_t bin)
{
    return bin == p.k || (bin >= p.p[0] && bin <= p.p[1]) || (bin >= p.draw[0] && bin <= p.draw[1]);
}

NBI_DEV uint32_t nbi_sample_first_bin(nbi_sample_sums *s, const nbi_sample_target &t)
{
    __syncthreads();
    if (threadIdx.x == 0) s->bin = NBI_SAMPLE_BINS - 1;
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < NBI_SAMPLE_BINS; b += NBI_SAMPLE_THREADS)
        if (nbi_sample_reached(t, s->mass[b + 1]) && !nbi_sample_reached(t, s->mass[b])) s->bin = b;
    __syncthreads();
    return s->bin;
}

NBI_DEV uint32_t nbi_sample_kth_bin(nbi_sample_sums *s, uint32_t k)
{
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < NBI_SAMPLE_BINS; b += NBI_SAMPLE_THREADS)
        if (s->count[b] < k && k <= s->count[b + 1]) s->bin = b;
    __syncthreads();
    return s->bin;
}

NBI_DEV void nbi_sample_add_bins(nbi_sample_sums *s, const nbi_sample_bins *bins)
{
    const uint32_t b = 2 * threadIdx.x;
    const nbi_mass m0 = bins->mass[b], m1 = bins->mass[b + 1];
    const uint32_t c0 = bins->count[b], c1 = bins->count[b + 1];
    nbi_mass total;
    const nbi_mass mass = nbi_block_scan(m0 + m1, &total);
    const uint32_t count =
        static_cast<uint32_t>(nbi_block_scan(static_cast<nbi_mass>(c0) + c1, &total));
    s->mass[b] = mass;
    s->count[b] = count;
    s->mass[b + 1] = mass + m0;
    s->count[b + 1] = count + c0;
    if (b + 2 == NBI_SAMPLE_BINS) {
        s->mass[b + 2] = mass + m0 + m1;
        s->count[b + 2] = count + c0 + c1;
    }
    __syncthreads();
}

/* The same in every block of a row: integers and comparisons in one order. */
NBI_DEV nbi_sample_plan nbi_sample_make_plan(nbi_sample_sums *s, const nbi_sample_bins *bins,
                                             const nbi_sample_request &r)
{
    const uint32_t none = NBI_SAMPLE_NO_BIN;
    nbi_sample_plan p = {none, {none, none}, {none, none}};
    nbi_sample_add_bins(s, bins);
    nbi_mass low = s->mass[NBI_SAMPLE_BINS], high = low; /* of the prefix so far */
    if (r.top_k && r.top_k < s->count[NBI_SAMPLE_BINS]) {
        const uint32_t b = nbi_sample_kth_bin(s, r.top_k);
        const bool whole = s->count[b + 1] == r.top_k;
        low = s->mass[whole ? b + 1 : b];
        high = s->mass[b + 1];
        if (!whole) p.k = b;
    }
    if (r.top_p < 1.0f) {
        const double share = static_cast<double>(r.top_p);
        p.p[0] = nbi_sample_first_bin(s, {share * static_cast<double>(low), false});
        p.p[1] = nbi_sample_first_bin(s, {share * static_cast<double>(high), false});
        low = s->mass[p.p[0]];
        high = s->mass[p.p[1] + 1];
    }
    if (r.min_p > 0.0f) {
        low = low < bins->min_p_mass ? low : bins->min_p_mass;
        high = high < bins->min_p_mass ? high : bins->min_p_mass;
    }
    p.draw[0] = nbi_sample_first_bin(s, {r.u * static_cast<double>(low), true});
    p.draw[1] = nbi_sample_first_bin(s, {r.u * static_cast<double>(high), true});
    return p;
}

/* ---------------------------------------------------------------- lists of candidates */

/* Descending, by a block; keys in shared or device memory. Bitonic; what lies behind n counts as
 * the smallest. */
NBI_DEV void nbi_sample_sort(nbi_mass *keys, uint32_t n)
{
    uint32_t whole = 1;
    while (whole < n) whole *= 2;
    for (uint32_t k = 2; k <= whole; k *= 2)
        for (uint32_t d = k / 2; d > 0; d /= 2) {
            for (uint32_t i = threadIdx.x; i < whole / 2; i += NBI_SAMPLE_THREADS) {
                const uint32_t a = i / d * 2 * d + i % d;
                const uint32_t b = d == k / 2 ? i / d * 2 * d + 2 * d - 1 - i % d : a + d;
                if (b >= n || keys[a] >= keys[b]) continue;
                const nbi_mass swap = keys[a];
                keys[a] = keys[b];
                keys[b] = swap;
            }
            __syncthreads();
        }
}

/* The first of keys [begin, end) at which the running mass, from `base`, reaches the target: its
 * index, and the mass by *mass. The last one when none does. */
NBI_DEV uint32_t nbi_sample_find(nbi_sample_sums *s, const nbi_mass *keys, uint32_t begin,
                                 uint32_t end, nbi_mass base, const nbi_sample_target &t,
                                 const nbi_sample_scale &scale, nbi_mass *mass)
{
    const uint32_t per = (end - begin + NBI_SAMPLE_THREADS - 1) / NBI_SAMPLE_THREADS;
    uint32_t i = begin + threadIdx.x * per;
    const uint32_t stop = i < end && end - i < per ? end : i + per;
    nbi_mass sum = 0, total;
    for (uint32_t k = i; k < stop && k < end; k++)
        sum += nbi_sample_mass(nbi_sample_p(scale, nbi_sample_logit(keys[k])));
    nbi_mass before = base + nbi_block_scan(sum, &total);
    if (threadIdx.x == 0) {
        s->at = end - 1;
        s->at_mass = base + total;
    }
    __syncthreads();
    if (nbi_sample_reached(t, before + sum) && !nbi_sample_reached(t, before)) {
        for (;; i++) {
            before += nbi_sample_mass(nbi_sample_p(scale, nbi_sample_logit(keys[i])));
            if (nbi_sample_reached(t, before)) break;
        }
        s->at = i;
        s->at_mass = before;
    }
    __syncthreads();
    *mass = s->at_mass;
    return s->at;
}
