/* Choosing tokens. Callers: the backend's table.
 *
 * Per call, over blocks of 2,048 logits of a row:
 *   scan     largest logits, the sum of the log-probabilities, their top list; faults
 *   change   (rows with lists) repetition, bias and bans in place; then the scan again, with the
 * mask bins     (rows that draw) tokens by their distance from the largest: numbers and masses
 *   collect  (rows that draw) tokens of the bins in which a boundary or the draw may lie
 *   finish   one block a row: sorts those, walks them, writes the result
 * A call of greedy rows without lists is scan and finish. Rows go in rounds of ROUND; what the host
 * hands in lies in pinned memory, and only when that is full does a call wait more than once.
 *
 * Non-finite rule, as on the CPU: NaN or +inf anywhere, or no finite logit among the allowed ids,
 * is a fault: id -1, log-probabilities -9999. -inf alone is a mask. */
#include <string.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/sample_device.h"
#include "backend/sample_random.h"

#define THREADS     NBI_SAMPLE_THREADS
#define VALUES      NBI_SAMPLE_VALUES
#define BINS        NBI_SAMPLE_BINS
#define ROUND       64u /* rows of one round */
#define LOGPROB_MIN (-9999.0f)
#define VOCAB_MAX   (1u << 22) /* masses of that many tokens add up below 2^63 */

/* What the scan leaves of a chunk. */
struct scanned {
    nbi_mass best;  /* key of the largest allowed logit; BROKEN */
    uint32_t least; /* order of the smallest finite allowed logit, inverted; 0: none */
    float max, sum; /* of all logits: largest, and sum of exp(x - max) */
};

/* Everything on the device, and the shapes of a call. Arrays are of one round, except `out`. */
struct view {
    float *logits;
    const nbi_sample_request *rows;
    const uint32_t *words; /* staged lists: adjustments, banned ids, masks */
    float *untouched;      /* [words] of each adjustment */
    scanned *chunks;       /* [row][n_chunks] */
    float *wanted;         /* [row][TOP_MAX] the model's own logits of the wanted ids */
    nbi_mass *tops;        /* [row][n_chunks][TOP_MAX] keys, descending; 0 behind the last */
    nbi_sample_bins *bins; /* [row] */
    nbi_mass *lists;       /* [row][vocab] */
    nbi_sample_out *out;   /* [row] */
    uint32_t vocab, n_valid, n_chunks;
    bool vec; /* rows start at multiples of 16 bytes */
};

struct sampler {
    uint32_t vocab, max_rows;
    view v;      /* device memory */
    char *block; /* all of it */
    /* pinned */
    nbi_sample_request *requests; /* [max_rows] */
    uint32_t *words;              /* [max_words] lists */
    nbi_sample_out *outs;         /* [max_rows] */
    size_t max_words, n_words;    /* words in use: on their way until the next wait */
    nbi_sample_out *owed_out;     /* host [n_owed]: where outs go behind the wait; NULL: nowhere */
    int32_t *owed_fault;
    uint32_t n_owed;
};

/* ---------------------------------------------------------------- scan */

/* Id of a thread's j-th value of a chunk: pieces of four next to each other. */
static NBI_DEV uint32_t id_of(uint32_t j)
{
    return blockIdx.x * NBI_SAMPLE_CHUNK + j / 4 * 4 * THREADS + threadIdx.x * 4 + j % 4;
}

static NBI_DEV void load_values(const view &v, const float *row, float x[VALUES])
{
#pragma unroll
    for (uint32_t j = 0; j < VALUES; j += 4) {
        const uint32_t id = id_of(j);
        nbi_f32x4 four = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        if (v.vec && id + 4 <= v.vocab)
            four = *reinterpret_cast<const nbi_f32x4 *>(row + id);
        else
            for (uint32_t k = 0; k < 4; k++)
                if (id + k < v.vocab) four.v[k] = row[id + k];
        for (uint32_t k = 0; k < 4; k++) x[j + k] = four.v[k];
    }
}

static NBI_DEV float *row_logits(const view &v)
{
    return v.logits + static_cast<size_t>(blockIdx.y) * v.vocab;
}

/* Keys of the chunk's n_top largest logits, by taking the largest again and again. */
static NBI_DEV void top_of_chunk(const view &v, const float x[VALUES], uint32_t n_top)
{
    const size_t chunk = static_cast<size_t>(blockIdx.y) * v.n_chunks + blockIdx.x;
    nbi_mass last = NBI_SAMPLE_BROKEN;
    for (uint32_t i = 0; i < n_top; i++) {
        nbi_mass best = 0;
#pragma unroll
        for (uint32_t j = 0; j < VALUES; j++) {
            const nbi_mass key = id_of(j) < v.n_valid ? nbi_sample_key(x[j], id_of(j)) : 0;
            if (key < last && key > best) best = key;
        }
        last = nbi_block_best(best);
        if (threadIdx.x == 0) v.tops[chunk * NBI_SAMPLE_TOP_MAX + i] = last;
    }
}

/* Sum of exp(x - max) over the chunk, in a fixed tree. */
static NBI_DEV float sum_of_chunk(const float x[VALUES], float max)
{
    __shared__ float warps[NBI_SAMPLE_WARPS];
    float sum = 0;
    if (!nbi_finite(max)) return 0;
#pragma unroll
    for (uint32_t j = 0; j < VALUES; j++) sum += expf(x[j] - max);
    sum = nbi_warp_sum(sum);
    if (nbi_lane() == 0) warps[threadIdx.x / NBI_WARP] = sum;
    __syncthreads();
    sum = 0;
    for (uint32_t w = 0; w < NBI_SAMPLE_WARPS; w++) sum += warps[w];
    return sum;
}

/* Ids that may be chosen: below n_valid, and in the mask, which is written into the logits. */
static NBI_DEV uint32_t allow(const view &v, const nbi_sample_request &r, float *row,
                              float x[VALUES])
{
    uint32_t allowed = 0;
#pragma unroll
    for (uint32_t j = 0; j < VALUES; j++) {
        const uint32_t id = id_of(j);
        if (id >= v.n_valid) continue;
        allowed |= 1u << j;
        if (!r.has_mask || (v.words[r.mask + id / 32] >> id % 32 & 1u)) continue;
        x[j] = -INFINITY;
        row[id] = -INFINITY;
    }
    return allowed;
}

/* again: of rows whose logits were changed, only what may be chosen. */
static __global__ void __launch_bounds__(THREADS) scan_kernel(const view v, bool again)
{
    nbi_wait_before();
    nbi_let_next();
    const nbi_sample_request r = v.rows[blockIdx.y];
    if (again && !r.lists) return;
    float *row = row_logits(v), x[VALUES];
    load_values(v, row, x);
    uint32_t allowed = 0;
    if (again)
        allowed = allow(v, r, row, x);
    else
        for (uint32_t j = 0; j < VALUES; j++)
            if (id_of(j) < v.n_valid) allowed |= 1u << j;
    nbi_mass best = 0, all = 0;
    uint32_t least = 0, bad = 0;
#pragma unroll
    for (uint32_t j = 0; j < VALUES; j++) {
        const nbi_mass key = nbi_sample_key(x[j], id_of(j));
        bad |= !(x[j] < INFINITY);
        all = key > all ? key : all;
        if (!(allowed >> j & 1u)) continue;
        best = key > best ? key : best;
        const uint32_t small = ~nbi_order(x[j]);
        if (nbi_finite(x[j]) && small > least) least = small;
    }
    scanned *chunk = &v.chunks[static_cast<size_t>(blockIdx.y) * v.n_chunks + blockIdx.x];
    best = nbi_block_best(bad ? NBI_SAMPLE_BROKEN : best);
    least = static_cast<uint32_t>(nbi_block_best(static_cast<nbi_mass>(least) << 32) >> 32);
    if (again) {
        if (threadIdx.x == 0 && chunk->best != NBI_SAMPLE_BROKEN)
            chunk->best = best, chunk->least = least;
        return;
    }
    for (uint32_t i = threadIdx.x; i < r.n_wanted; i += THREADS) { /* before masks are written */
        const uint32_t id = static_cast<uint32_t>(r.wanted[i]);
        if (id / NBI_SAMPLE_CHUNK == blockIdx.x)
            v.wanted[blockIdx.y * NBI_SAMPLE_TOP_MAX + i] = row[id];
    }
    const float max = nbi_sample_logit(nbi_block_best(all));
    const float sum = r.logprob ? sum_of_chunk(x, max) : 0.0f;
    if (threadIdx.x == 0) *chunk = {best, least, max, sum};
    if (r.n_top) top_of_chunk(v, x, r.n_top);
    if (blockIdx.x > 0 || r.mode != NBI_SAMPLE_DRAW) return;
    uint32_t *bins = reinterpret_cast<uint32_t *>(&v.bins[blockIdx.y]);
    for (uint32_t i = threadIdx.x; i < sizeof *v.bins / sizeof *bins; i += THREADS) bins[i] = 0;
}

/* ---------------------------------------------------------------- change */

/* What the request asks for beyond the model's own distribution. */
static __global__ void __launch_bounds__(THREADS) change_kernel(const view v)
{
    nbi_wait_before();
    nbi_let_next();
    const nbi_sample_request r = v.rows[blockIdx.y];
    if (!r.lists) return;
    float *row = row_logits(v);
    for (uint32_t i = threadIdx.x; i < r.n_adjust; i += THREADS) {
        const uint32_t *a = v.words + r.adjust + 3 * i, id = a[0];
        if (id >= v.n_valid) continue;
        const float x = row[id], repetition = nbi_float(a[1]), bias = nbi_float(a[2]);
        v.untouched[r.adjust + 3 * i] = x;
        /* two roundings, as the contract's two steps have */
        row[id] = (x > 0 ? x / repetition : fmaf(x, repetition, 0.0f)) + bias;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < r.n_banned; i += THREADS)
        if (v.words[r.banned + i] < v.n_valid) row[v.words[r.banned + i]] = -INFINITY;
}

/* ---------------------------------------------------------------- bins, collect */

struct row_range {
    nbi_mass best;
    float max, min;
    bool fault;
};

static NBI_DEV row_range range_of_row(const view &v)
{
    const scanned *chunks = v.chunks + static_cast<size_t>(blockIdx.y) * v.n_chunks;
    nbi_mass best = 0, least = 0;
    for (uint32_t c = threadIdx.x; c < v.n_chunks; c += THREADS) {
        best = chunks[c].best > best ? chunks[c].best : best;
        least = chunks[c].least > least ? chunks[c].least : least;
    }
    best = nbi_block_best(best);
    least = nbi_block_best(least << 32) >> 32;
    const float max = nbi_sample_logit(best);
    return {best, max, nbi_unorder(~static_cast<uint32_t>(least)),
            best == NBI_SAMPLE_BROKEN || !least || !nbi_finite(max)};
}

/* A block's tokens are at most 2^11 of mass 2^40: halves of 20 and 21 bits add up in 32 bits. */
static __global__ void __launch_bounds__(THREADS) bins_kernel(const view v)
{
    __shared__ uint32_t count[BINS], low[BINS], high[BINS];
    nbi_wait_before();
    nbi_let_next();
    const nbi_sample_request r = v.rows[blockIdx.y];
    if (r.mode != NBI_SAMPLE_DRAW) return;
    for (uint32_t b = threadIdx.x; b < BINS; b += THREADS) count[b] = low[b] = high[b] = 0;
    const row_range range = range_of_row(v); /* and a barrier */
    if (range.fault) return;
    const nbi_sample_scale scale = nbi_sample_scale_of(range.max, range.min, r.inv_t);
    float x[VALUES];
    load_values(v, row_logits(v), x);
    nbi_mass min_p_mass = 0, total;
#pragma unroll
    for (uint32_t j = 0; j < VALUES; j++) {
        const float p = nbi_sample_p(scale, x[j]);
        const nbi_mass m = id_of(j) < v.n_valid ? nbi_sample_mass(p) : 0;
        if (!m) continue;
        const uint32_t b = nbi_sample_bin(scale, x[j]);
        atomicAdd(&count[b], 1u);
        atomicAdd(&low[b], static_cast<uint32_t>(m) & 0xfffffu);
        atomicAdd(&high[b], static_cast<uint32_t>(m >> 20));
        if (p >= r.min_p) min_p_mass += m;
    }
    nbi_block_scan(min_p_mass, &total); /* and a barrier */
    nbi_sample_bins *bins = &v.bins[blockIdx.y];
    if (threadIdx.x == 0 && total) atomicAdd(&bins->min_p_mass, total);
    for (uint32_t b = threadIdx.x; b < BINS; b += THREADS) {
        if (!count[b]) continue;
        atomicAdd(&bins->count[b], count[b]);
        atomicAdd(&bins->mass[b], (static_cast<nbi_mass>(high[b]) << 20) + low[b]);
    }
}

static __global__ void __launch_bounds__(THREADS) collect_kernel(const view v)
{
    __shared__ nbi_sample_sums sums;
    nbi_wait_before();
    nbi_let_next();
    const nbi_sample_request r = v.rows[blockIdx.y];
    if (r.mode != NBI_SAMPLE_DRAW) return;
    const row_range range = range_of_row(v);
    if (range.fault) return;
    nbi_sample_bins *bins = &v.bins[blockIdx.y];
    const nbi_sample_plan plan = nbi_sample_make_plan(&sums, bins, r);
    const nbi_sample_scale scale = nbi_sample_scale_of(range.max, range.min, r.inv_t);
    nbi_mass *list = v.lists + static_cast<size_t>(blockIdx.y) * v.vocab;
    float x[VALUES];
    load_values(v, row_logits(v), x);
#pragma unroll
    for (uint32_t j = 0; j < VALUES; j++) {
        const bool take = id_of(j) < v.n_valid && nbi_sample_mass(nbi_sample_p(scale, x[j])) &&
                          nbi_sample_listed(plan, nbi_sample_bin(scale, x[j]));
        const unsigned lanes = __ballot_sync(NBI_FULL_MASK, take);
        if (!lanes) continue;
        uint32_t at = 0;
        if (nbi_lane() == 0) at = atomicAdd(&bins->n_listed, static_cast<uint32_t>(__popc(lanes)));
        at = __shfl_sync(NBI_FULL_MASK, at, 0);
        at += static_cast<uint32_t>(__popc(lanes & ((1u << nbi_lane()) - 1u)));
        if (take) list[at] = nbi_sample_key(x[j], id_of(j));
    }
}

/* ---------------------------------------------------------------- finish */

/* Where the tokens of each bin begin in the sorted list. */
static NBI_DEV void add_listed(nbi_sample_sums *s, const nbi_sample_plan &plan)
{
    const uint32_t b = 2 * threadIdx.x;
    const uint32_t c0 = nbi_sample_listed(plan, b) ? s->count[b + 1] - s->count[b] : 0;
    const uint32_t c1 = nbi_sample_listed(plan, b + 1) ? s->count[b + 2] - s->count[b + 1] : 0;
    nbi_mass total;
    const uint32_t before =
        static_cast<uint32_t>(nbi_block_scan(static_cast<nbi_mass>(c0) + c1, &total));
    s->listed[b] = before;
    s->listed[b + 1] = before + c0;
    if (b + 2 == BINS) s->listed[BINS] = before + c0 + c1;
    __syncthreads();
}

/* Cuts as in the plan, now to the token; then the draw. */
static NBI_DEV int32_t draw(const view &v, const nbi_sample_request &r, const row_range &range,
                            nbi_sample_sums *s, nbi_mass *shared)
{
    const nbi_sample_bins *bins = &v.bins[blockIdx.y];
    const nbi_sample_plan plan = nbi_sample_make_plan(s, bins, r);
    const nbi_sample_scale scale = nbi_sample_scale_of(range.max, range.min, r.inv_t);
    add_listed(s, plan);
    const uint32_t n = bins->n_listed;
    nbi_mass *keys = v.lists + static_cast<size_t>(blockIdx.y) * v.vocab;
    if (n <= NBI_SAMPLE_SORT) {
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) shared[i] = keys[i];
        keys = shared;
        __syncthreads();
    }
    nbi_sample_sort(keys, n);
    nbi_mass mass = s->mass[BINS];
    if (plan.k != NBI_SAMPLE_NO_BIN) {
        const uint32_t first = s->listed[plan.k], more = r.top_k - s->count[plan.k];
        nbi_sample_find(s, keys, first, first + more, s->mass[plan.k], {INFINITY, false}, scale,
                        &mass); /* to the end */
    } else if (r.top_k && r.top_k < s->count[BINS]) {
        mass = s->mass[nbi_sample_kth_bin(s, r.top_k) + 1];
    }
    if (r.top_p < 1.0f)
        nbi_sample_find(s, keys, s->listed[plan.p[0]], s->listed[plan.p[1] + 1], s->mass[plan.p[0]],
                        {static_cast<double>(r.top_p) * static_cast<double>(mass), false}, scale,
                        &mass);
    if (r.min_p > 0.0f && bins->min_p_mass < mass) mass = bins->min_p_mass;
    const uint32_t at = nbi_sample_find(s, keys, s->listed[plan.draw[0]],
                                        s->listed[plan.draw[1] + 1], s->mass[plan.draw[0]],
                                        {r.u * static_cast<double>(mass), true}, scale, &mass);
    return static_cast<int32_t>(nbi_sample_id(keys[at]));
}

/* log of the sum of exp over all logits, in a fixed tree. */
static NBI_DEV double log_sum(const view &v)
{
    __shared__ double warps[NBI_SAMPLE_WARPS];
    const scanned *chunks = v.chunks + static_cast<size_t>(blockIdx.y) * v.n_chunks;
    nbi_mass best = 0;
    for (uint32_t c = threadIdx.x; c < v.n_chunks; c += THREADS) {
        const nbi_mass key = nbi_sample_key(chunks[c].max, 0);
        best = key > best ? key : best;
    }
    const double max = static_cast<double>(nbi_sample_logit(nbi_block_best(best)));
    double sum = 0;
    for (uint32_t c = threadIdx.x; c < v.n_chunks; c += THREADS)
        if (nbi_finite(chunks[c].max))
            sum +=
                static_cast<double>(chunks[c].sum) * exp(static_cast<double>(chunks[c].max) - max);
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(NBI_FULL_MASK, sum, d);
    if (nbi_lane() == 0) warps[threadIdx.x / NBI_WARP] = sum;
    __syncthreads();
    sum = 0;
    for (uint32_t w = 0; w < NBI_SAMPLE_WARPS; w++) sum += warps[w];
    return max + log(sum);
}

static NBI_DEV float clamp_logprob(double x)
{
    return x > static_cast<double>(LOGPROB_MIN) ? static_cast<float>(x) : LOGPROB_MIN;
}

static NBI_DEV void top_list(const view &v, nbi_sample_out *out, uint32_t n_top, double lse)
{
    const nbi_mass *tops =
        v.tops + static_cast<size_t>(blockIdx.y) * v.n_chunks * NBI_SAMPLE_TOP_MAX;
    nbi_mass last = NBI_SAMPLE_BROKEN;
    for (uint32_t i = 0; i < n_top; i++) {
        nbi_mass best = 0;
        for (uint32_t k = threadIdx.x; k < v.n_chunks * n_top; k += THREADS) {
            const nbi_mass key = tops[k / n_top * NBI_SAMPLE_TOP_MAX + k % n_top];
            if (key < last && key > best) best = key;
        }
        last = nbi_block_best(best);
        if (threadIdx.x) continue;
        out->top_ids[i] = last ? static_cast<int32_t>(nbi_sample_id(last)) : -1;
        out->top_logprobs[i] =
            last ? clamp_logprob(static_cast<double>(nbi_sample_logit(last)) - lse) : LOGPROB_MIN;
    }
}

/* The model's own logit of a chosen id. */
static NBI_DEV float untouched(const view &v, const nbi_sample_request &r, uint32_t id)
{
    __shared__ float own;
    if (threadIdx.x == 0) own = row_logits(v)[id];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < r.n_adjust; i += THREADS)
        if (v.words[r.adjust + 3 * i] == id) own = v.untouched[r.adjust + 3 * i];
    __syncthreads();
    return own;
}

static __global__ void __launch_bounds__(THREADS, 2) finish_kernel(const view v)
{
    __shared__ nbi_sample_sums sums;
    __shared__ nbi_mass keys[NBI_SAMPLE_SORT];
    nbi_wait_before();
    nbi_let_next();
    const nbi_sample_request r = v.rows[blockIdx.y];
    nbi_sample_out *out = &v.out[blockIdx.y];
    const row_range range = range_of_row(v);
    if (threadIdx.x < NBI_SAMPLE_TOP_MAX) {
        out->top_ids[threadIdx.x] = -1;
        out->top_logprobs[threadIdx.x] = LOGPROB_MIN;
    }
    const bool broken = range.best == NBI_SAMPLE_BROKEN;
    if (r.mode == NBI_SAMPLE_FORCED ? broken : range.fault) {
        if (threadIdx.x == 0) out->id = -1, out->logprob = LOGPROB_MIN;
        return;
    }
    int32_t id = r.forced_id;
    if (r.mode == NBI_SAMPLE_GREEDY) id = static_cast<int32_t>(nbi_sample_id(range.best));
    if (r.mode == NBI_SAMPLE_DRAW) id = draw(v, r, range, &sums, keys);
    float logprob = LOGPROB_MIN;
    if (r.logprob) {
        __syncthreads(); /* entries behind the list are written */
        const double lse = log_sum(v);
        top_list(v, out, r.n_top, lse);
        for (uint32_t i = threadIdx.x; i < r.n_wanted; i += THREADS) {
            const float x = v.wanted[blockIdx.y * NBI_SAMPLE_TOP_MAX + i];
            out->top_ids[i] = r.wanted[i];
            out->top_logprobs[i] = clamp_logprob(static_cast<double>(x) - lse);
        }
        logprob =
            clamp_logprob(static_cast<double>(untouched(v, r, static_cast<uint32_t>(id))) - lse);
    }
    if (threadIdx.x == 0) out->id = id, out->logprob = logprob;
}

/* ---------------------------------------------------------------- memory */

static uint32_t mask_words(uint32_t vocab)
{
    return nbi_ceil_div(vocab, 32);
}

/* Room for the lists of a round with a mask in every row, and for any one row. Longer lists of
 * banned ids become part of a mask. */
static size_t list_words(uint32_t vocab, size_t rows)
{
    return 3 * static_cast<size_t>(vocab) + 2 * mask_words(vocab) * rows;
}

/* Carves the device's block: sizes with base NULL. */
static size_t carve(view *v, const nbi_limits *limits, char *base)
{
    const uint32_t n_chunks = nbi_ceil_div(limits->vocab, NBI_SAMPLE_CHUNK);
    const size_t rows = limits->max_logit_rows < ROUND ? limits->max_logit_rows : ROUND;
    const size_t chunks = rows * n_chunks;
    nbi_plan p = {};
    const size_t requests = nbi_plan_add(&p, limits->max_logit_rows * sizeof(nbi_sample_request));
    const size_t n_words = list_words(limits->vocab, rows);
    const size_t words = nbi_plan_add(&p, n_words * sizeof(uint32_t));
    const size_t own = nbi_plan_add(&p, n_words * sizeof(uint32_t));
    const size_t scans = nbi_plan_add(&p, chunks * sizeof(scanned));
    const size_t tops = nbi_plan_add(&p, chunks * NBI_SAMPLE_TOP_MAX * sizeof(nbi_mass));
    const size_t wanted = nbi_plan_add(&p, rows * NBI_SAMPLE_TOP_MAX * sizeof(float));
    const size_t bins = nbi_plan_add(&p, rows * sizeof(nbi_sample_bins));
    const size_t lists = nbi_plan_add(&p, rows * limits->vocab * sizeof(nbi_mass));
    const size_t outs = nbi_plan_add(&p, limits->max_logit_rows * sizeof(nbi_sample_out));
    if (!base) return p.bytes;
    v->rows = reinterpret_cast<nbi_sample_request *>(base + requests);
    v->words = reinterpret_cast<uint32_t *>(base + words);
    v->untouched = reinterpret_cast<float *>(base + own);
    v->chunks = reinterpret_cast<scanned *>(base + scans);
    v->tops = reinterpret_cast<nbi_mass *>(base + tops);
    v->wanted = reinterpret_cast<float *>(base + wanted);
    v->bins = reinterpret_cast<nbi_sample_bins *>(base + bins);
    v->lists = reinterpret_cast<nbi_mass *>(base + lists);
    v->out = reinterpret_cast<nbi_sample_out *>(base + outs);
    return p.bytes;
}

size_t nbi_cuda_sampler_bytes(const nbi_limits *limits)
{
    return carve(NULL, limits, NULL);
}

void nbi_cuda_sampler_close(nbi_cuda *c)
{
    sampler *s = static_cast<sampler *>(c->sampler);
    if (!s) return;
    nbi_rt_free(&c->rt, s->block);
    nbi_rt_free_host(&c->rt, s->requests);
    nbi_rt_free_host(&c->rt, s->words);
    nbi_rt_free_host(&c->rt, s->outs);
    nbi_free(s);
    c->sampler = NULL;
}

nb_status nbi_cuda_sampler_open(nbi_cuda *c, const nbi_limits *limits, nb_error *err)
{
    NB_ASSERT(limits->vocab <= VOCAB_MAX);
    sampler *s = static_cast<sampler *>(nbi_calloc(1, sizeof *s));
    if (!s) return nbi_fail(err, NB_NO_MEMORY, "cuda: out of memory");
    c->sampler = s;
    const size_t R = limits->max_logit_rows, bytes = nbi_cuda_sampler_bytes(limits);
    s->vocab = limits->vocab;
    s->max_rows = limits->max_logit_rows;
    s->max_words = list_words(limits->vocab, R < ROUND ? R : ROUND);
    s->block = static_cast<char *>(nbi_rt_alloc(&c->rt, bytes));
    s->requests = static_cast<nbi_sample_request *>(
        nbi_rt_alloc_host(&c->rt, R * sizeof(nbi_sample_request)));
    s->words = static_cast<uint32_t *>(nbi_rt_alloc_host(&c->rt, s->max_words * sizeof(uint32_t)));
    s->outs = static_cast<nbi_sample_out *>(nbi_rt_alloc_host(&c->rt, R * sizeof(nbi_sample_out)));
    if (!s->block || !s->requests || !s->words || !s->outs) {
        nbi_cuda_sampler_close(c);
        return nbi_fail(err, NB_NO_MEMORY, "cuda: no device memory for %zu bytes of the sampler",
                        bytes);
    }
    carve(&s->v, limits, s->block);
    return NB_OK;
}

/* ---------------------------------------------------------------- what the host hands in */

static uint32_t *place_words(sampler *s, size_t n, uint32_t *at)
{
    *at = static_cast<uint32_t>(s->n_words);
    s->n_words += n;
    NB_ASSERT(s->n_words <= s->max_words);
    return s->words + *at;
}

/* The mask without the banned ids, when those are more than a mask takes. */
static bool bans_are_mask(const sampler *s, const nbi_sample_row *row)
{
    return row->n_banned > mask_words(s->vocab);
}

static void place_mask(sampler *s, const nbi_sample_row *row, nbi_sample_request *r)
{
    const size_t n = mask_words(s->vocab);
    uint32_t *mask = place_words(s, n, &r->mask);
    r->has_mask = true;
    if (row->mask)
        memcpy(mask, row->mask, n * sizeof *mask);
    else
        memset(mask, 0xff, n * sizeof *mask);
    for (uint32_t i = 0; bans_are_mask(s, row) && i < row->n_banned; i++) {
        const uint32_t id = static_cast<uint32_t>(row->banned[i]);
        if (id < s->vocab) mask[id / 32] &= ~(1u << id % 32);
    }
}

static void place_lists(sampler *s, const nbi_sample_row *row, nbi_sample_request *r)
{
    r->n_adjust = row->n_adjust;
    uint32_t *to = place_words(s, 3 * static_cast<size_t>(row->n_adjust), &r->adjust);
    for (uint32_t i = 0; i < row->n_adjust; i++, to += 3) {
        const nbi_sample_adjust *a = &row->adjust[i];
        to[0] = static_cast<uint32_t>(a->id);
        memcpy(to + 1, &a->repetition, sizeof *to);
        memcpy(to + 2, &a->bias, sizeof *to);
    }
    if (!bans_are_mask(s, row)) {
        r->n_banned = row->n_banned;
        to = place_words(s, row->n_banned, &r->banned);
        if (row->n_banned) memcpy(to, row->banned, row->n_banned * sizeof *to);
    }
    if (row->mask || bans_are_mask(s, row)) place_mask(s, row, r);
    r->lists = r->n_adjust || r->n_banned || r->has_mask;
}

static size_t words_of(const sampler *s, const nbi_sample_row *row)
{
    if (row->forced) return 0;
    NB_ASSERT(row->n_adjust <= s->vocab);
    const size_t mask = mask_words(s->vocab);
    return 3 * static_cast<size_t>(row->n_adjust) + (bans_are_mask(s, row) ? mask : row->n_banned) +
           (row->mask ? mask : 0);
}

static void place_row(sampler *s, const nbi_sample_row *row, nbi_sample_request *r)
{
    *r = {};
    r->logprob = row->n_logprobs >= 0;
    r->n_wanted = r->logprob ? row->n_wanted : 0;
    for (uint32_t i = 0; i < r->n_wanted; i++) r->wanted[i] = row->wanted[i];
    if (row->n_logprobs > 0 && !r->n_wanted)
        r->n_top = row->n_logprobs < NBI_SAMPLE_TOP_MAX ? static_cast<uint32_t>(row->n_logprobs)
                                                        : NBI_SAMPLE_TOP_MAX;
    r->forced_id = row->forced_id;
    r->mode = row->forced                           ? NBI_SAMPLE_FORCED
              : row->temperature < NBI_GREEDY_BELOW ? NBI_SAMPLE_GREEDY
                                                    : NBI_SAMPLE_DRAW;
    if (row->forced) return; /* its logits stay as they are */
    place_lists(s, row, r);
    if (r->mode == NBI_SAMPLE_GREEDY) return;
    r->inv_t = 1.0f / row->temperature;
    r->top_p = row->top_p;
    r->min_p = row->min_p;
    r->top_k = row->top_k > 0 ? static_cast<uint32_t>(row->top_k) : 0;
    r->u = nbi_sample_uniform(row->seed, row->counter);
}

/* ---------------------------------------------------------------- a call */

static void launch_round(nbi_cuda *c, const view &v, const nbi_sample_request *r, uint32_t n)
{
    bool lists = false, draws = false;
    for (uint32_t i = 0; i < n; i++) {
        lists = lists || r[i].lists;
        draws = draws || r[i].mode == NBI_SAMPLE_DRAW;
    }
    const dim3 chunks(v.n_chunks, n), rows(1, n), block(THREADS);
    nbi_launch(&c->rt, chunks, block, 0, scan_kernel, v, false);
    if (lists) {
        nbi_launch(&c->rt, rows, block, 0, change_kernel, v);
        nbi_launch(&c->rt, chunks, block, 0, scan_kernel, v, true);
    }
    if (draws) {
        nbi_launch(&c->rt, chunks, block, 0, bins_kernel, v);
        nbi_launch(&c->rt, chunks, block, 0, collect_kernel, v);
    }
    nbi_launch(&c->rt, rows, block, 0, finish_kernel, v);
}

/* The next rows whose lists have room, ROUND at most: their number, 0 when a wait must make room.
 */
static uint32_t run_round(nbi_cuda *c, sampler *s, const nbi_sample_args *a, uint32_t first)
{
    const size_t words = s->n_words;
    uint32_t n = 0;
    while (n < ROUND && first + n < a->n_rows &&
           s->n_words + words_of(s, &a->rows[first + n]) <= s->max_words) {
        place_row(s, &a->rows[first + n], &s->requests[first + n]);
        n++;
    }
    if (!n) return 0;
    view v = s->v;
    v.rows += first;
    v.out += first;
    v.logits = a->logits + static_cast<size_t>(first) * a->vocab;
    v.vocab = a->vocab;
    v.n_valid = a->n_valid < a->vocab ? a->n_valid : a->vocab;
    v.n_chunks = nbi_ceil_div(a->vocab, NBI_SAMPLE_CHUNK);
    v.vec = a->vocab % 4 == 0 && (reinterpret_cast<uintptr_t>(a->logits) & 15u) == 0;
    nbi_rt_upload(&c->rt, const_cast<nbi_sample_request *>(v.rows), s->requests + first,
                  n * sizeof *v.rows);
    nbi_rt_upload(&c->rt, const_cast<uint32_t *>(v.words) + words, s->words + words,
                  (s->n_words - words) * sizeof(uint32_t));
    launch_round(c, v, s->requests + first, n);
    return n;
}

void nbi_cuda_sample(nbi_backend *b, const nbi_sample_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    sampler *s = static_cast<sampler *>(c->sampler);
    NB_ASSERT(s && a->n_rows <= s->max_rows && a->vocab <= s->vocab);
    if (s->owed_out) nbi_cuda_sample_settle(c, nbi_rt_sync(&c->rt));
    s->n_words = 0;
    for (uint32_t first = 0; first < a->n_rows;) {
        const uint32_t n = run_round(c, s, a, first);
        if (n == 0) {
            nbi_rt_sync(&c->rt);
            s->n_words = 0;
        }
        first += n;
    }
    nbi_rt_download(&c->rt, s->outs, s->v.out, a->n_rows * sizeof *s->outs);
    s->owed_out = a->out;
    s->owed_fault = a->row_fault;
    s->n_owed = a->n_rows;
}

void nbi_cuda_sample_settle(nbi_cuda *c, bool fine)
{
    sampler *s = static_cast<sampler *>(c->sampler);
    if (!s || !s->owed_out) return;
    for (uint32_t r = 0; r < s->n_owed; r++) {
        if (!fine) s->outs[r].id = -1;
        s->owed_out[r] = s->outs[r];
        if (s->outs[r].id < 0 && s->owed_fault && s->owed_fault[r] == 0)
            s->owed_fault[r] = 1 + static_cast<int32_t>(NBI_WHERE_LOGITS);
    }
    s->owed_out = NULL;
}
