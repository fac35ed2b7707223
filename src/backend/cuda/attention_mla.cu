/* Multi-head latent attention in the absorbed form: append to the latent cache; absorb the queries
 * by W_UK, attend over the latents, expand by W_UV. Callers: the backend's table.
 *
 * kv_b lies row-major on the device. A row's products with it are cut over kv_b's sides alone, so
 * that they do not depend on how many rows there are. */
#include <string.h>

#include "backend/cuda/attend.h"
#include "backend/cuda/indexer.h"
#include "backend/cuda/mla_many.h"
#include "base/numfmt.h"

#define THREADS   NBI_MLA_THREADS
#define WARPS     NBI_MLA_WARPS
#define GROUP_MAX 512u /* rows that go through absorb, attend, expand together */

/* ---------------------------------------------------------------- append */

/* Block (0, t) appends the latent, the others turn pairs of the queries. */
static __global__ void mla_append_kernel(nbi_mla_rows a)
{
    const size_t t = blockIdx.y;
    if (blockIdx.x == 0) return nbi_mla_append_latent(a, t, false);
    nbi_wait_before();
    nbi_let_next();
    const uint32_t half = a.rope_dim / 2, pair = (blockIdx.x - 1) * THREADS + threadIdx.x;
    if (pair >= a.n_heads * half) return;
    const uint32_t h = pair / half, i = pair % half;
    float *q = a.q + (t * a.n_heads + h) * (a.nope + a.rope_dim) + a.nope;
    uint32_t iu, iv;
    nbi_rope_pair(a.rope, i, &iu, &iv);
    float u = q[iu], v = q[iv];
    nbi_rope_turn(a.rope, t, i, &u, &v);
    q[iu] = u;
    q[iv] = v;
}

static nbi_mla_rows append_of(const nbi_cuda_waiting *w)
{
    const nbi_mla_append_args *args = &w->mla;
    const nbi_batch *batch = args->batch;
    return {.q = static_cast<float *>(args->q),
            .kv = static_cast<const float *>(args->kv),
            .norm = args->kv_norm,
            .eps = args->eps,
            .n_heads = args->n_heads,
            .nope = args->nope_dim,
            .rope_dim = args->rope_dim,
            .lora = args->kv_lora,
            .kv_stride = args->kv_stride,
            .rope = nbi_rope_of(&w->rope),
            .latent = w->cache.latent,
            .bf16 = w->cache.dtype != NBI_F32,
            .codes = w->cache.dtype == NBI_F8_E4M3,
            .shape = nbi_kv_latent_shape(w->cache.dtype, args->kv_lora, args->rope_dim),
            .pos = batch->pos,
            .row_seq = batch->row_seq,
            .page_table = batch->page_table,
            .page_stride = batch->page_stride};
}

void nbi_cuda_mla_append_now(nbi_cuda *c)
{
    const nbi_mla_rows a = append_of(&c->waiting);
    const uint32_t pairs = a.n_heads * (a.rope_dim / 2), T = c->waiting.mla.batch->n_rows;
    nbi_launch(&c->rt, dim3(1 + nbi_ceil_div(pairs, THREADS), T), dim3(THREADS), 0,
               mla_append_kernel, a);
}

/* Waits for the attention behind it. */
void nbi_cuda_mla_append(nbi_backend *b, const nbi_mla_append_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_ASSERT(args->rope->dim == args->rope_dim && args->rope_dim % 2 == 0);
    nbi_cuda_products_now(c);
    nbi_cuda_append_now(c);
    if (!args->batch->n_rows) return;
    c->waiting.what = NBI_CUDA_WAITS_MLA;
    c->waiting.mla = *args;
    c->waiting.rope = *args->rope;
    c->waiting.cache = *args->cache;
}

/* ---------------------------------------------------------------- kv_b */

bool nbi_cuda_is_kv_b(const nbi_matrix *m)
{
    static const char end[] = "kv_b_proj";
    const size_t n = m->name ? strlen(m->name) : 0, k = sizeof end - 1;
    return n >= k && strcmp(m->name + n - k, end) == 0;
}

/* Row r as it lies on the device; x has room for a row of floats. */
static void kv_b_row(const nbi_matrix *m, uint32_t r, bool bf16, float *x, char *out)
{
    if (m->kind == NBI_WEIGHT_BF16) {
        const uint64_t bytes = nbi_matrix_row_bytes(m);
        memcpy(out, static_cast<const char *>(m->data) + r * bytes, bytes);
        return;
    }
    nbi_matrix one = *m;
    if (bf16) one.global_scale = 1; /* NVFP4 */
    nbi_matrix_row(&one, r, x);
    if (!bf16) {
        memcpy(out, x, m->cols * sizeof *x);
        return;
    }
    for (uint32_t i = 0; i < m->cols; i++) {
        const uint16_t h = nbi_f32_bf16(x[i]);
        memcpy(out + i * sizeof h, &h, sizeof h);
    }
}

/* Rows in pieces to the device. */
static bool kv_b_upload(nbi_cuda *c, nbi_cuda_kv_b *w, const nbi_matrix *m, size_t row)
{
    const size_t piece = NBI_CUDA_STAGE_BYTES / row ? NBI_CUDA_STAGE_BYTES / row : 1;
    float *x = static_cast<float *>(nbi_malloc(m->cols * sizeof *x));
    char *rows = static_cast<char *>(nbi_malloc(piece * row));
    for (size_t at = 0; x && rows && at < m->rows; at += piece) {
        const size_t n = m->rows - at < piece ? m->rows - at : piece;
        for (size_t i = 0; i < n; i++) kv_b_row(m, (uint32_t)(at + i), w->bf16, x, rows + i * row);
        nbi_cuda_upload(c, static_cast<char *>(w->data) + at * row, rows, n * row);
    }
    const bool done = x && rows;
    nbi_free(x);
    nbi_free(rows);
    return done;
}

nb_status nbi_cuda_kv_b_prepare(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_kv_b *w = static_cast<nbi_cuda_kv_b *>(nbi_calloc(1, sizeof *w));
    if (!w) return nbi_fail(err, NB_NO_MEMORY, "cuda: out of memory for \"%s\"", m->name);
    w->head.host = *m;
    w->bf16 = m->kind == NBI_WEIGHT_BF16 || m->kind == NBI_WEIGHT_NVFP4;
    w->scale = m->kind == NBI_WEIGHT_NVFP4 ? m->global_scale : 1;
    const size_t row = (size_t)m->cols * (w->bf16 ? 2 : 4), bytes = m->rows * row;
    w->head.device_bytes = bytes;
    w->data = nbi_rt_alloc(&c->rt, bytes);
    if (!w->data || !kv_b_upload(c, w, m, row)) {
        nbi_weight *broken = &w->head;
        nbi_cuda_kv_b_release(b, &broken);
        return nbi_fail(err, NB_NO_MEMORY, "cuda: no device memory for the %zu bytes of \"%s\"",
                        bytes, m->name);
    }
    *out = &w->head;
    return NB_OK;
}

void nbi_cuda_kv_b_release(nbi_backend *b, nbi_weight **w)
{
    if (!w || !*w) return;
    nbi_cuda_kv_b *k = reinterpret_cast<nbi_cuda_kv_b *>(*w);
    nbi_rt_free(&nbi_cuda_of(b)->rt, k->data);
    nbi_free(k);
    *w = NULL;
}

/* ---------------------------------------------------------------- products with kv_b */

#define TILE_ROWS 4u   /* rows of the batch that share what is read of kv_b */
#define COLUMNS   256u /* of W_UK per block: 8 per lane */
#define OUTPUTS   32u  /* of W_UV per block: 4 per warp */

/* Eight values of a row of kv_b from column i on; 0 behind the end. */
template <bool BF16>
NBI_DEV void load_eight(const void *w, size_t row, uint32_t lora, uint32_t i, float out[8])
{
    const size_t at = row * lora + i;
    if (BF16 && lora % 8 == 0 && i < lora) {
        const nbi_u32x4 x =
            *reinterpret_cast<const nbi_u32x4 *>(static_cast<const uint16_t *>(w) + at);
        for (int j = 0; j < 4; j++) {
            out[2 * j] = nbi_bf16_lo(x.v[j]);
            out[2 * j + 1] = nbi_bf16_hi(x.v[j]);
        }
        return;
    }
    for (uint32_t j = 0; j < 8; j++) out[j] = i + j < lora ? nbi_kv_load<BF16>(w, at + j) : 0;
}

/* ql = qn . W_UK for one head, COLUMNS columns and TILE_ROWS rows: every warp sums an eighth of
 * the nope rows, the sums are added in order. */
template <bool BF16> static __global__ void absorb_kernel(nbi_mla_product a)
{
    __shared__ float sums[WARPS][TILE_ROWS][COLUMNS];
    nbi_wait_before();
    nbi_let_next();
    const uint32_t h = blockIdx.x, col0 = blockIdx.y * COLUMNS, r0 = blockIdx.z * TILE_ROWS;
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = nbi_lane(), tid = threadIdx.x;
    const uint32_t n = a.n_rows - r0 < TILE_ROWS ? a.n_rows - r0 : TILE_ROWS;
    const uint32_t head = a.nope + a.rope_dim, width = a.lora + a.rope_dim;
    const float *x = a.x + ((size_t)r0 * a.n_heads + h) * head;
    float *y = a.y + ((size_t)r0 * a.n_heads + h) * width;
    const size_t x_row = (size_t)a.n_heads * head, y_row = (size_t)a.n_heads * width;
    const uint32_t part = (a.nope + WARPS - 1) / WARPS, begin = warp * part;
    const uint32_t end = begin + part < a.nope ? begin + part : a.nope;
    float acc[TILE_ROWS][8] = {};
    for (uint32_t i = begin; i < end; i++) {
        float w[8];
        load_eight<BF16>(a.w, (size_t)h * (a.nope + a.v) + i, a.lora, col0 + lane * 8, w);
#pragma unroll
        for (uint32_t r = 0; r < TILE_ROWS; r++) {
            const float q = r < n ? x[r * x_row + i] : 0;
#pragma unroll
            for (uint32_t j = 0; j < 8; j++) acc[r][j] = fmaf(w[j], q, acc[r][j]);
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < TILE_ROWS; r++)
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) sums[warp][r][lane * 8 + j] = acc[r][j];
    __syncthreads();
    for (uint32_t r = 0; r < n && col0 + tid < a.lora; r++) {
        float sum = 0;
        for (uint32_t w = 0; w < WARPS; w++) sum += sums[w][r][tid];
        y[r * y_row + col0 + tid] = sum * a.scale;
    }
    if (col0) return;
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t i = tid; i < a.rope_dim; i += THREADS)
            y[r * y_row + a.lora + i] = x[r * x_row + a.nope + i];
}

/* out = W_UV . ol for one head, OUTPUTS values and TILE_ROWS rows: a warp per value. */
template <bool BF16> static __global__ void expand_kernel(nbi_mla_product a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t h = blockIdx.x, d0 = blockIdx.y * OUTPUTS, r0 = blockIdx.z * TILE_ROWS;
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = nbi_lane();
    const uint32_t n = a.n_rows - r0 < TILE_ROWS ? a.n_rows - r0 : TILE_ROWS;
    const uint32_t width = a.lora + a.rope_dim;
    float *x = nbi_shared<float>(); /* [TILE_ROWS][lora, to a multiple of 8] */
    const uint32_t stride = (a.lora + 7) / 8 * 8;
    for (uint32_t r = 0; r < TILE_ROWS; r++)
        for (uint32_t i = threadIdx.x; i < stride; i += THREADS)
            x[r * stride + i] =
                r < n && i < a.lora ? a.x[((size_t)(r0 + r) * a.n_heads + h) * width + i] : 0;
    __syncthreads();
    for (uint32_t d = d0 + warp; d < d0 + OUTPUTS && d < a.v; d += WARPS) {
        float acc[TILE_ROWS] = {};
        for (uint32_t i = lane * 8; i < a.lora; i += NBI_WARP * 8) {
            float w[8];
            load_eight<BF16>(a.w, (size_t)h * (a.nope + a.v) + a.nope + d, a.lora, i, w);
#pragma unroll
            for (uint32_t r = 0; r < TILE_ROWS; r++)
#pragma unroll
                for (uint32_t j = 0; j < 8; j++) acc[r] = fmaf(w[j], x[r * stride + i + j], acc[r]);
        }
#pragma unroll
        for (uint32_t r = 0; r < TILE_ROWS; r++) {
            const float sum = nbi_warp_sum(acc[r]) * a.scale;
            if (lane == 0 && r < n) a.y[((size_t)(r0 + r) * a.n_heads + h) * a.v + d] = sum;
        }
    }
}

/* ---------------------------------------------------------------- products by matrix units */

/* Columns of W_UK per block, 16 per warp. With 20 heads multiprocessors are left where blocks of
 * attention, which need all of one, begin at once. */
#define ABSORB 128u

/* APPEND: the last blocks append a latent each. */
template <int NT, bool APPEND>
static __global__ void __launch_bounds__(ABSORB * 2)
    absorb_mma_kernel(nbi_mla_product a, nbi_mla_rows append, uint32_t products)
{
    const uint32_t r0 = blockIdx.y * 8 * NT;
    if (!APPEND || blockIdx.x < products)
        return nbi_mla_absorb<NT, APPEND, ABSORB>(a, append, blockIdx.x % a.n_heads,
                                                  blockIdx.x / a.n_heads * ABSORB, r0);
    const uint32_t row = r0 + blockIdx.x - products;
    if (row < a.n_rows) return nbi_mla_append_latent(append, row, NT == 1);
    nbi_wait_before();
}

template <bool APPEND>
static __global__ void __launch_bounds__(NBI_MLA_MANY_THREADS)
    absorb_many_kernel(nbi_mla_product a, nbi_mla_rows append)
{
    if (APPEND && blockIdx.y + 1 == gridDim.y) {
        for (uint32_t i = blockIdx.x; i < NBI_MLA_MANY_ROWS; i += gridDim.x)
            if (blockIdx.z * NBI_MLA_MANY_ROWS + i < a.n_rows)
                nbi_mla_append_latent(append, blockIdx.z * NBI_MLA_MANY_ROWS + i, false);
        nbi_wait_before(); /* without a row, too */
        return;
    }
    nbi_mla_absorb_many<APPEND>(a, append, blockIdx.x, blockIdx.y * NBI_MLA_MANY_COLUMNS,
                                blockIdx.z * NBI_MLA_MANY_ROWS);
}

static __global__ void __launch_bounds__(NBI_MLA_MANY_THREADS) expand_many_kernel(nbi_mla_product a)
{
    nbi_mla_expand_many(a, blockIdx.x, blockIdx.y * NBI_MLA_MANY_OUTPUTS,
                        blockIdx.z * NBI_MLA_MANY_ROWS);
}

#define EXPAND_OUTPUTS 64u /* of W_UV per block, for few rows: 16 per warp */
#define EXPAND_MANY    128u
#define EXPAND_PAIRS   4u /* of k-steps that are loaded ahead */

/* 128 columns of the lane's two rows of W_UV: of every 32, lane t has eight from 8t on. */
struct expand_weights {
    nbi_u32x4 row[2][EXPAND_PAIRS];
};

NBI_DEV expand_weights load_expand(const uint16_t *w, uint32_t lora, uint32_t m, uint32_t most,
                                   uint32_t col)
{
    expand_weights x;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
#pragma unroll
        for (uint32_t p = 0; p < EXPAND_PAIRS; p++) {
            const uint32_t c = col + 32 * p;
            x.row[i][p] = {{0, 0, 0, 0}};
            if (m + 8 * i < most && c < lora)
                x.row[i][p] = *reinterpret_cast<const nbi_u32x4 *>(w + (size_t)(m + 8 * i) * lora +
                                                                   c + nbi_lane() % 4 * 8);
        }
    return x;
}

/* out = W_UV . ol for one head, EXPAND_MANY values and 8 NT rows. */
template <int NT>
static __global__ void __launch_bounds__(EXPAND_MANY * 2) expand_mma_kernel(nbi_mla_product a)
{
    const uint32_t h = blockIdx.x, r0 = blockIdx.z * 8 * NT, lane = nbi_lane();
    const uint32_t m0 = blockIdx.y * EXPAND_MANY + threadIdx.x / NBI_WARP * 16;
    const uint16_t *w =
        static_cast<const uint16_t *>(a.w) + ((size_t)h * (a.nope + a.v) + a.nope) * a.lora;
    expand_weights now = load_expand(w, a.lora, m0 + lane / 4, a.v, 0);
    nbi_wait_before();
    nbi_let_next();
    const uint32_t n = a.n_rows - r0 < 8 * NT ? a.n_rows - r0 : 8 * NT;
    const uint32_t stride = a.lora + NBI_MLA_EXPAND_PAD, width = a.lora + a.rope_dim;
    uint16_t *hi = nbi_shared<uint16_t>(), *lo = hi + 8 * NT * stride;
    nbi_mla_halves<NT, EXPAND_MANY / 16>(a.x + ((size_t)r0 * a.n_heads + h) * width,
                                         (size_t)a.n_heads * width, n, a.lora, stride, hi, lo);
    __syncthreads();
    float d[NBI_MLA_SUMS][NT][4] = {};
    for (uint32_t col = 0; col < a.lora; col += 32 * EXPAND_PAIRS) {
        const expand_weights x = now;
        now = load_expand(w, a.lora, m0 + lane / 4, a.v, col + 32 * EXPAND_PAIRS);
#pragma unroll
        for (uint32_t p = 0; p < EXPAND_PAIRS; p++) {
            if (col + 32 * p >= a.lora) break;
#pragma unroll
            for (uint32_t j = 0; j < NT; j++) {
                const uint32_t at = (8 * j + lane / 4) * stride + col + 32 * p + lane % 4 * 8;
                const nbi_u32x4 u = *reinterpret_cast<nbi_u32x4 *>(hi + at);
                const nbi_u32x4 v = *reinterpret_cast<nbi_u32x4 *>(lo + at);
#pragma unroll
                for (uint32_t i = 0; i < 4; i += 2) {
                    const uint32_t f[4] = {x.row[0][p].v[i], x.row[1][p].v[i], x.row[0][p].v[i + 1],
                                           x.row[1][p].v[i + 1]};
                    nbi_mma_bf16(d[p % NBI_MLA_SUMS][j], f, u.v + i);
                    nbi_mma_bf16(d[p % NBI_MLA_SUMS][j], f, v.v + i);
                }
            }
        }
    }
    nbi_mla_store<NT>(d, a.y + ((size_t)r0 * a.n_heads + h) * a.v, (size_t)a.n_heads * a.v, n, m0,
                      a.v, a.scale);
}

#define MERGE 16u /* splits whose values are asked for at once */

/* Values c, c + 1 of a head of a row with n positions, from its splits, as merge_kernel makes
 * them; row and head are one for the warp. */
NBI_DEV nbi_f32x2 merge_pair(const nbi_cuda_attend &s, uint32_t splits, uint32_t r, uint32_t n,
                             uint32_t h, uint32_t c)
{
    const uint32_t split = nbi_attend_split(n), lane = (uint32_t)nbi_lane();
    const uint32_t all = (n + split - 1) / split;
    const size_t step = (size_t)s.n_heads * (s.v_width + 2);
    const float *from = nbi_attend_partial(s, splits, r, 0, h);
    float o[2] = {0, 0}, m = -INFINITY, l = 0;
    for (uint32_t s0 = 0; s0 < all; s0 += MERGE) {
        const uint32_t many = all - s0 < MERGE ? all - s0 : MERGE;
        nbi_f32x2 x[MERGE], ml = {{-INFINITY, 0}};
        if (lane < many)
            ml = *reinterpret_cast<const nbi_f32x2 *>(from + (s0 + lane) * step + s.v_width);
#pragma unroll
        for (uint32_t i = 0; i < MERGE; i++)
            x[i] = *reinterpret_cast<const nbi_f32x2 *>(from + (i < many ? s0 + i : s0) * step + c);
        float top;
        const nbi_attend_fold own = nbi_attend_lane_fold(ml.v[0], m, nbi_attend_scale(s), &top);
        m = __shfl_sync(NBI_FULL_MASK, top, NBI_WARP - 1);
#pragma unroll
        for (uint32_t i = 0; i < MERGE; i++) {
            const nbi_attend_fold f = {__shfl_sync(NBI_FULL_MASK, own.keep, (int)i),
                                       __shfl_sync(NBI_FULL_MASK, own.add, (int)i)};
            const float more = __shfl_sync(NBI_FULL_MASK, ml.v[1], (int)i);
            if (i >= many) continue;
            l = nbi_attend_merged(f, l, more);
            o[0] = nbi_attend_merged(f, o[0], x[i].v[0]);
            o[1] = nbi_attend_merged(f, o[1], x[i].v[1]);
        }
    }
    const float inv = 1.0f / l;
    return {{n ? o[0] * inv : 0, n ? o[1] * inv : 0}};
}

#define EXPAND_THREADS 256u /* half of them only load */

static size_t expand_shared(uint32_t lora)
{
    return (EXPAND_OUTPUTS + 2 * 8) * (lora + NBI_MLA_EXPAND_PAD) * sizeof(uint16_t);
}

/* The same with the block's part of W_UV in shared memory, all of it asked for while the kernel
 * before still runs: for up to 8 rows. SPLITS: x is still in the splits of s. */
template <bool SPLITS>
static __global__ void expand_few_kernel(nbi_mla_product a, nbi_cuda_attend s, uint32_t splits)
{
    const uint32_t h = blockIdx.x, block0 = blockIdx.y * EXPAND_OUTPUTS, lane = nbi_lane();
    const uint32_t stride = a.lora + NBI_MLA_EXPAND_PAD, width = a.lora + a.rope_dim, n = a.n_rows;
    const uint16_t *from =
        static_cast<const uint16_t *>(a.w) + ((size_t)h * (a.nope + a.v) + a.nope) * a.lora;
    uint16_t *w = nbi_shared<uint16_t>(), *hi = w + EXPAND_OUTPUTS * stride, *lo = hi + 8 * stride;
    for (uint32_t i = threadIdx.x; i < EXPAND_OUTPUTS * (a.lora / 8); i += EXPAND_THREADS) {
        const uint32_t row = i / (a.lora / 8), c = i % (a.lora / 8) * 8;
        const bool take = block0 + row < a.v;
        nbi_copy_async(w + row * stride + c,
                       take ? from + (size_t)(block0 + row) * a.lora + c : from, take);
    }
    nbi_copy_commit();
    __shared__ uint32_t lengths[8];
    if (SPLITS && threadIdx.x < n) lengths[threadIdx.x] = nbi_attend_length(s, threadIdx.x);
    for (uint32_t i = threadIdx.x; i < (8 - n) * stride / 2; i += EXPAND_THREADS) {
        reinterpret_cast<uint32_t *>(hi + n * stride)[i] = 0;
        reinterpret_cast<uint32_t *>(lo + n * stride)[i] = 0;
    }
    if (SPLITS) __syncthreads();
    nbi_wait_before();
    nbi_let_next();
    if (SPLITS) {
        uint32_t c = 2 * threadIdx.x;
        for (uint32_t r = 0; r < n; c += 2 * EXPAND_THREADS) {
            for (; c >= a.lora; c -= a.lora) r++;
            if (r >= n) break;
            const nbi_f32x2 x = merge_pair(s, splits, r, lengths[r], h, c);
            nbi_halves(x.v[0], x.v[1], reinterpret_cast<uint32_t *>(hi + r * stride + c),
                       reinterpret_cast<uint32_t *>(lo + r * stride + c));
        }
    } else {
        nbi_mla_halves<1, EXPAND_THREADS / NBI_WARP>(
            a.x + (size_t)h * width, (size_t)a.n_heads * width, n, a.lora, stride, hi, lo);
    }
    nbi_copy_wait<0>();
    __syncthreads();
    const uint32_t own = threadIdx.x / NBI_WARP * 16;
    if (own >= EXPAND_OUTPUTS) return;
    float d[NBI_MLA_SUMS][1][4] = {};
    const auto step = [&](float(&sum)[4], uint32_t c) {
        const uint16_t *at = w + (own + lane / 4) * stride + c;
        const nbi_u32x4 w0 = *reinterpret_cast<const nbi_u32x4 *>(at);
        const nbi_u32x4 w1 = *reinterpret_cast<const nbi_u32x4 *>(at + 8 * stride);
        const nbi_u32x4 u = *reinterpret_cast<nbi_u32x4 *>(hi + lane / 4 * stride + c);
        const nbi_u32x4 v = *reinterpret_cast<nbi_u32x4 *>(lo + lane / 4 * stride + c);
#pragma unroll
        for (uint32_t i = 0; i < 4; i += 2) {
            const uint32_t f[4] = {w0.v[i], w1.v[i], w0.v[i + 1], w1.v[i + 1]};
            nbi_mma_bf16(sum, f, u.v + i);
            nbi_mma_bf16(sum, f, v.v + i);
        }
    };
    uint32_t c = lane % 4 * 8;
    for (; c + 32 * (NBI_MLA_SUMS - 1) < a.lora; c += 32 * NBI_MLA_SUMS)
#pragma unroll
        for (uint32_t p = 0; p < NBI_MLA_SUMS; p++) step(d[p][0], c + 32 * p);
            /* what is left: with checks no step would begin before the last */
#pragma unroll
    for (uint32_t p = 0; p < NBI_MLA_SUMS; p++)
        if (c + 32 * p < a.lora) step(d[p][0], c + 32 * p);
    nbi_mla_store<1>(d, a.y + (size_t)h * a.v, (size_t)a.n_heads * a.v, n, block0 + own, a.v,
                     a.scale);
}

/* Shape and types decide, never the batch. A float cache is for those who want float32 products. */
static bool by_mma(const nbi_cuda *c, const nbi_cuda_kv_b *w, const nbi_mla_product *a)
{
    return w->bf16 && a->halves && a->nope % 16 == 0 && a->lora % 32 == 0 && a->nope &&
           a->lora <= 1024 && nbi_mla_absorb_shared<1>(a->nope, ABSORB) <= c->rt.shared_max;
}

/* Whether blocks of 64 rows, `parts` for a head, would fill the device: the bits are the same. */
static bool are_many(const nbi_cuda *c, const nbi_mla_product *a, uint32_t parts, size_t shared)
{
    const uint32_t groups = nbi_ceil_div(a->n_rows, NBI_MLA_MANY_ROWS);
    return a->n_rows > NBI_MLA_MANY_ROWS / 2 && shared <= c->rt.shared_max &&
           a->n_heads * parts * groups >= (uint32_t)c->rt.n_sms * 3 / 4;
}

static bool launch_absorb_many(nbi_cuda *c, const nbi_mla_product *a, const nbi_mla_rows *append)
{
    const uint32_t parts = nbi_ceil_div(a->lora, NBI_MLA_MANY_COLUMNS);
    const size_t shared = nbi_mla_absorb_many_shared(a->nope);
    if (!are_many(c, a, parts, shared)) return false;
    const dim3 grid(a->n_heads, parts + !!append, nbi_ceil_div(a->n_rows, NBI_MLA_MANY_ROWS));
    nbi_launch(&c->rt, grid, dim3(NBI_MLA_MANY_THREADS), shared,
               append ? absorb_many_kernel<true> : absorb_many_kernel<false>, *a,
               append ? *append : nbi_mla_rows{});
    return true;
}

static bool launch_expand_many(nbi_cuda *c, const nbi_mla_product *a)
{
    const uint32_t parts = nbi_ceil_div(a->v, NBI_MLA_MANY_OUTPUTS);
    const size_t shared = nbi_mla_expand_many_shared(a->lora);
    if (!are_many(c, a, parts, shared)) return false;
    const dim3 grid(a->n_heads, parts, nbi_ceil_div(a->n_rows, NBI_MLA_MANY_ROWS));
    nbi_launch(&c->rt, grid, dim3(NBI_MLA_MANY_THREADS), shared, expand_many_kernel, *a);
    return true;
}

template <int NT>
static void launch_absorb_mma(nbi_cuda *c, const nbi_mla_product *a, const nbi_mla_rows *append)
{
    const uint32_t products = a->n_heads * nbi_ceil_div(a->lora, ABSORB), most = 8 * NT,
                   rows = a->n_rows < most ? a->n_rows : most;
    const dim3 grid(products + (append ? rows : 0), nbi_ceil_div(a->n_rows, most));
    nbi_launch(&c->rt, grid, dim3(2 * ABSORB), nbi_mla_absorb_shared<NT>(a->nope, ABSORB),
               append ? absorb_mma_kernel<NT, true> : absorb_mma_kernel<NT, false>, *a,
               append ? *append : nbi_mla_rows{}, products);
}

template <int NT> static void launch_expand_mma(nbi_cuda *c, const nbi_mla_product *a)
{
    nbi_launch(
        &c->rt, dim3(a->n_heads, nbi_ceil_div(a->v, EXPAND_MANY), nbi_ceil_div(a->n_rows, 8 * NT)),
        dim3(EXPAND_MANY * 2), 2 * 8 * NT * (a->lora + NBI_MLA_EXPAND_PAD) * sizeof(uint16_t),
        expand_mma_kernel<NT>, *a);
}

/* append: only where by_mma(). */
static void absorb(nbi_cuda *c, const nbi_cuda_kv_b *w, const nbi_mla_product *a,
                   const nbi_mla_rows *append)
{
    if (by_mma(c, w, a)) {
        if (launch_absorb_many(c, a, append)) return;
        if (a->n_rows > 8 && nbi_mla_absorb_shared<4>(a->nope, ABSORB) <= c->rt.shared_max)
            launch_absorb_mma<4>(c, a, append);
        else
            launch_absorb_mma<1>(c, a, append);
        return;
    }
    NB_ASSERT(!append);
    const dim3 grid(a->n_heads, nbi_ceil_div(a->lora, COLUMNS), nbi_ceil_div(a->n_rows, TILE_ROWS));
    nbi_launch(&c->rt, grid, dim3(THREADS), 0, w->bf16 ? absorb_kernel<true> : absorb_kernel<false>,
               *a);
}

/* splits: what attention left to merge. */
static void expand(nbi_cuda *c, const nbi_cuda_kv_b *w, const nbi_mla_product *a,
                   const nbi_cuda_attend *attend, uint32_t splits)
{
    const bool mma = by_mma(c, w, a);
    if (mma && a->n_rows <= 8 && expand_shared(a->lora) <= c->rt.shared_max) {
        nbi_launch(&c->rt, dim3(a->n_heads, nbi_ceil_div(a->v, EXPAND_OUTPUTS)),
                   dim3(EXPAND_THREADS), expand_shared(a->lora),
                   splits ? expand_few_kernel<true> : expand_few_kernel<false>, *a, *attend,
                   splits);
        return;
    }
    if (splits) nbi_cuda_attend_merge(c, attend, splits);
    if (mma) {
        if (launch_expand_many(c, a)) return;
        if (a->n_rows > 8 && 2 * 32 * (a->lora + NBI_MLA_EXPAND_PAD) * 2 <= c->rt.shared_max)
            launch_expand_mma<4>(c, a);
        else
            launch_expand_mma<1>(c, a);
        return;
    }
    const dim3 grid(a->n_heads, nbi_ceil_div(a->v, OUTPUTS), nbi_ceil_div(a->n_rows, TILE_ROWS));
    nbi_launch(&c->rt, grid, dim3(THREADS),
               TILE_ROWS * (size_t)((a->lora + 7) / 8 * 8) * sizeof(float),
               w->bf16 ? expand_kernel<true> : expand_kernel<false>, *a);
}

/* ---------------------------------------------------------------- attend */

/* Rows of one pass: what fits in the scratch, at most GROUP_MAX. */
static size_t row_bytes(uint32_t n_heads, uint32_t width)
{
    return (size_t)n_heads * width * sizeof(float);
}

size_t nbi_cuda_mla_scratch(const nbi_limits *l)
{
    const size_t rows = l->max_rows < GROUP_MAX ? l->max_rows : GROUP_MAX;
    return rows * row_bytes(l->n_heads, l->kv_lora + l->rope_dim) + 256;
}

static nbi_cuda_attend attend_args(const nbi_mla_attend_args *args)
{
    const nbi_batch *batch = args->batch;
    const size_t width = args->kv_lora + args->rope_dim;
    const nbi_kv_shape shape =
        nbi_kv_latent_shape(args->cache->dtype, args->kv_lora, args->rope_dim);
    const size_t slot = shape.slot / (nbi_dtype_bits(args->cache->dtype) / 8);
    return {.q = NULL,
            .out = NULL,
            .k = args->cache->latent,
            .v = args->cache->latent,
            .bf16 = args->cache->dtype != NBI_F32,
            .codes = args->cache->dtype == NBI_F8_E4M3,
            .shape = shape,
            .q_row = args->n_heads * width,
            .q_head = width,
            .out_row = args->n_heads * width,
            .out_head = width,
            .kv_page = NBI_PAGE_TOKENS * slot,
            .kv_head = 0,
            .kv_slot = slot,
            .n_heads = args->n_heads,
            .n_kv = 1,
            .k_width = (uint32_t)width,
            .v_width = args->kv_lora,
            .scale = args->scale,
            .select = NULL,
            .select_stride = args->select_stride,
            .first = 0,
            .n_rows = 0,
            .n_seqs = batch->n_seqs,
            .max_len = args->select && args->select_stride < batch->max_len ? args->select_stride
                                                                            : batch->max_len,
            .pos = batch->pos,
            .row_seq = batch->row_seq,
            .seq_first = batch->seq_first,
            .page_table = batch->page_table,
            .page_stride = batch->page_stride,
            .partial = NULL,
            .partial_bytes = 0};
}

/* Whether what waits is the append of this very call, and absorbing can do it. */
static bool goes_along(const nbi_cuda *c, const nbi_mla_attend_args *args,
                       const nbi_mla_product *in)
{
    const nbi_cuda_waiting *w = &c->waiting;
    return w->what == NBI_CUDA_WAITS_MLA && w->mla.q == args->q && w->mla.batch == args->batch &&
           w->mla.n_heads == args->n_heads && w->mla.nope_dim == args->nope_dim &&
           w->mla.rope_dim == args->rope_dim && w->mla.kv_lora == args->kv_lora &&
           w->cache.latent == args->cache->latent && in->n_rows == args->batch->n_rows &&
           by_mma(c, reinterpret_cast<const nbi_cuda_kv_b *>(args->kv_b), in);
}

/* Absorbs, attends and expands rows [first, first + n). */
static void attend_rows(nbi_cuda *c, const nbi_mla_attend_args *args, uint32_t first, uint32_t n)
{
    const nbi_cuda_kv_b *w = reinterpret_cast<const nbi_cuda_kv_b *>(args->kv_b);
    const uint32_t H = args->n_heads, head = args->nope_dim + args->rope_dim;
    float *x = static_cast<float *>(c->scratch);
    const nbi_mla_product in = {.x = static_cast<const float *>(args->q) + (size_t)first * H * head,
                                .y = x,
                                .w = w->data,
                                .scale = w->scale,
                                .n_rows = n,
                                .n_heads = H,
                                .nope = args->nope_dim,
                                .rope_dim = args->rope_dim,
                                .v = args->v_dim,
                                .lora = args->kv_lora,
                                .halves = args->cache->dtype != NBI_F32};
    nbi_mla_product out = in;
    out.x = x;
    out.y = static_cast<float *>(args->out) + (size_t)first * H * args->v_dim;
    const size_t used = (n * row_bytes(H, args->kv_lora + args->rope_dim) + 255) / 256 * 256;
    if (goes_along(c, args, &in)) {
        const nbi_mla_rows append = append_of(&c->waiting);
        c->waiting.what = NBI_CUDA_WAITS_NOT;
        if (!nbi_index_absorb(c, &in, &append, args->batch, used)) {
            nbi_cuda_index_now(c);
            absorb(c, w, &in, &append);
        }
    } else {
        nbi_cuda_flush(c);
        absorb(c, w, &in, NULL);
    }

    nbi_cuda_attend a = attend_args(args);
    a.q = a.out = x; /* a head's sums replace its query once nobody reads it any more */
    a.first = first;
    a.n_rows = n;
    if (args->select) a.select = args->select + (size_t)first * args->select_stride;
    a.partial = reinterpret_cast<float *>(static_cast<char *>(c->scratch) + used);
    a.partial_bytes = c->scratch_bytes - used;
    const uint32_t splits = nbi_cuda_attend_run(c, &a);
    expand(c, w, &out, &a, splits);
}

void nbi_cuda_mla_attend(nbi_backend *b, const nbi_mla_attend_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_ASSERT(args->kv_b->host.rows == args->n_heads * (args->nope_dim + args->v_dim) &&
              args->kv_b->host.cols == args->kv_lora);
    for (uint32_t first = 0; first < args->batch->n_rows; first += GROUP_MAX) {
        const uint32_t left = args->batch->n_rows - first;
        attend_rows(c, args, first, left < GROUP_MAX ? left : GROUP_MAX);
    }
}
