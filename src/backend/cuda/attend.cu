/* Softmax attention over a paged cache; see attention.h for the rule of reductions. Callers:
 * attention_gqa.cu, attention_mla.cu.
 *
 * plain_kernel takes any shape and all cache types: a block is one head of one row. The shapes of
 * real models in BF16 and E4M3 go to attend_gqa.cu and attend_mla.cu. */
#include "backend/cuda/attend.h"

#define PLAIN_THREADS 128u
#define PARTIAL_BYTES ((size_t)192 << 20)

size_t nbi_cuda_attend_row_bytes(uint32_t n, uint32_t n_heads, uint32_t v_width)
{
    return (size_t)nbi_attend_splits_most(n) * n_heads * (v_width + 2) * sizeof(float);
}

/* Shared: query [k_width], sums [v_width], scores and places in the cache, of values and scales, of
 * a tile. */
static size_t plain_shared(const nbi_cuda_attend *a)
{
    return ((size_t)a->k_width + a->v_width) * sizeof(float) +
           PLAIN_THREADS * (2 * sizeof(size_t) + sizeof(float)) + 8;
}

/* Scores of a tile's n positions into s, their places into `at`. */
template <int TYPE>
NBI_DEV void plain_scores(const nbi_cuda_attend &a, uint32_t r, uint32_t begin, uint32_t n,
                          size_t head_at, const float *q, float *s, size_t *at, size_t *scales)
{
    const uint32_t j = threadIdx.x;
    if (j >= n) return;
    const uint32_t p = nbi_attend_position(a, r, begin + j);
    const size_t place = nbi_attend_place(a, a.row_seq[a.first + r], p) + head_at;
    size_t scale = 0;
    if (TYPE == NBI_CACHE_CODES) scale = nbi_attend_scales(a, a.row_seq[a.first + r], p) + head_at;
    float dot = 0;
    for (uint32_t i = 0; i < a.k_width; i++)
        dot = fmaf(q[i], nbi_kv_value<TYPE>(a.shape, a.k, place, scale, i), dot);
    s[j] = dot * a.scale;
    at[j] = place;
    scales[j] = scale;
}

template <int TYPE> static __global__ void plain_kernel(nbi_cuda_attend a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t r = blockIdx.x, h = blockIdx.y, tid = threadIdx.x;
    size_t *at = nbi_shared<size_t>(), *scales = at + PLAIN_THREADS;
    float *s = reinterpret_cast<float *>(scales + PLAIN_THREADS), *q = s + PLAIN_THREADS;
    float *o = q + a.k_width;
    const uint32_t n = nbi_attend_length(a, r);
    const size_t head_at = h / (a.n_heads / a.n_kv) * a.kv_head;
    for (uint32_t i = tid; i < a.k_width; i += PLAIN_THREADS)
        q[i] = a.q[r * a.q_row + h * a.q_head + i];
    for (uint32_t i = tid; i < a.v_width; i += PLAIN_THREADS) o[i] = 0;
    __syncthreads();
    float m = -INFINITY, l = 0;
    for (uint32_t begin = 0; begin < n; begin += PLAIN_THREADS) {
        const uint32_t many = n - begin < PLAIN_THREADS ? n - begin : PLAIN_THREADS;
        plain_scores<TYPE>(a, r, begin, many, head_at, q, s, at, scales);
        __syncthreads();
        float top = m;
        for (uint32_t j = 0; j < many; j++) top = s[j] > top ? s[j] : top;
        const float keep = expf(m - top), p = tid < many ? expf(s[tid] - top) : 0;
        __syncthreads();
        if (tid < many) s[tid] = p;
        __syncthreads();
        m = top;
        l *= keep;
        for (uint32_t j = 0; j < many; j++) l += s[j];
        for (uint32_t i = tid; i < a.v_width; i += PLAIN_THREADS) {
            float sum = o[i] * keep;
            for (uint32_t j = 0; j < many; j++)
                sum = fmaf(s[j], nbi_kv_value<TYPE>(a.shape, a.v, at[j], scales[j], i), sum);
            o[i] = sum;
        }
        __syncthreads();
    }
    for (uint32_t i = tid; i < a.v_width; i += PLAIN_THREADS)
        a.out[r * a.out_row + h * a.out_head + i] = n ? o[i] / l : 0;
}

/* Splits of a head of a row, in ascending order. */
static __global__ void merge_kernel(nbi_cuda_attend a, uint32_t splits)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t r = blockIdx.x, h = blockIdx.y, i = blockIdx.z * PLAIN_THREADS + threadIdx.x;
    const uint32_t n = nbi_attend_length(a, r);
    const uint32_t split = nbi_attend_split(n), many = (n + split - 1) / split;
    const size_t step = (size_t)a.n_heads * (a.v_width + 2);
    const float *first = nbi_attend_partial(a, splits, r, 0, h);
    if (i >= a.v_width) return;
    float *out = a.out + r * a.out_row + h * a.out_head + i;
    float o = 0, m = -INFINITY, l = 0;
#pragma unroll 8
    for (uint32_t s = 0; s < many; s++) {
        const float *p = first + s * step;
        const nbi_attend_fold f =
            nbi_attend_merge(&m, &l, p[a.v_width], p[a.v_width + 1], nbi_attend_scale(a));
        o = nbi_attend_merged(f, o, p[i]);
    }
    *out = n ? o * (1.0f / l) : 0;
}

void nbi_cuda_attend_merge(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t splits)
{
    nbi_launch(&c->rt, dim3(a->n_rows, a->n_heads, nbi_ceil_div(a->v_width, PLAIN_THREADS)),
               dim3(PLAIN_THREADS), 0, merge_kernel, *a, splits);
}

uint32_t nbi_cuda_attend_run(nbi_cuda *c, const nbi_cuda_attend *a)
{
    uint32_t unmerged = 0;
    if (!a->n_rows || nbi_cuda_attend_gqa(c, a) || nbi_cuda_attend_mla(c, a, &unmerged))
        return unmerged;
    nbi_launch(&c->rt, dim3(a->n_rows, a->n_heads), dim3(PLAIN_THREADS), plain_shared(a),
               a->codes  ? plain_kernel<NBI_CACHE_CODES>
               : a->bf16 ? plain_kernel<NBI_CACHE_BF16>
                         : plain_kernel<NBI_CACHE_F32>,
               *a);
    return 0;
}

void nbi_cuda_append_now(nbi_cuda *c)
{
    const nbi_cuda_waits what = c->waiting.what;
    c->waiting.what = NBI_CUDA_WAITS_NOT;
    if (what == NBI_CUDA_WAITS_GQA) nbi_cuda_gqa_append_now(c);
    if (what == NBI_CUDA_WAITS_MLA) nbi_cuda_mla_append_now(c);
}

/* Partial results of as many rows as go by splits at once; of the longest context for one. */
static size_t partial_scratch(const nbi_limits *l)
{
    const uint32_t width = l->kv_lora > l->head_dim ? l->kv_lora : l->head_dim;
    const size_t row = nbi_cuda_attend_row_bytes(l->max_context, l->n_heads, width);
    const size_t all = l->max_rows * row, most = row > PARTIAL_BYTES ? row : PARTIAL_BYTES;
    return all < most ? all : most;
}

size_t nbi_cuda_attention_scratch(const nbi_cuda *c, const nbi_limits *l)
{
    (void)c;
    const size_t attend = nbi_cuda_mla_scratch(l) + partial_scratch(l);
    const size_t index = nbi_cuda_index_scratch(l);
    return attend > index ? attend : index;
}
