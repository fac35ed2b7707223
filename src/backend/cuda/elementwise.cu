/* Operators that touch every value once. Callers: the backend's table.
 *
 * A block is one row, or 1024 values of one; sums go over the block's threads in a fixed tree, so
 * that a row's bits depend on its width alone. Four values a thread at a time: as one access of 16
 * bytes where every row starts at a multiple of that, else one by one; the bits are the same. */
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/norm.h"
#include "backend/cuda/pack.h"

#define THREADS  256u
#define VEC      4u
#define ROPE_MAX 256u /* angles of a row */

static bool aligned16(const void *p, uint32_t stride)
{
    return (reinterpret_cast<uintptr_t>(p) & 15u) == 0 && stride % VEC == 0;
}

/* Values [i, i + 4) of a row of n; zero behind its end. */
static NBI_DEV nbi_f32x4 load4(const float *row, uint32_t i, uint32_t n, bool vec)
{
    nbi_f32x4 r = {};
    if (vec && i + VEC <= n) return *reinterpret_cast<const nbi_f32x4 *>(row + i);
    for (uint32_t k = 0; k < VEC; k++)
        if (i + k < n) r.v[k] = row[i + k];
    return r;
}

static NBI_DEV void store4(float *row, uint32_t i, uint32_t n, bool vec, const nbi_f32x4 &x)
{
    if (vec && i + VEC <= n) {
        *reinterpret_cast<nbi_f32x4 *>(row + i) = x;
        return;
    }
    for (uint32_t k = 0; k < VEC; k++)
        if (i + k < n) row[i + k] = x.v[k];
}

/* ---------------------------------------------------------------- embed */

/* An id outside of the table, which no request has, is a fault as NaN is; with part_of it is
 * another rank's. */
static __global__ void embed_kernel(float *out, const nbi_cuda_packed table, uint32_t first_id,
                                    bool part_of, const int32_t *ids, int32_t *row_fault,
                                    int32_t fault, bool vec)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t id = static_cast<uint32_t>(ids[blockIdx.x]) - first_id;
    const uint32_t i = (blockIdx.y * THREADS + threadIdx.x) * VEC;
    nbi_f32x4 x = {};
    bool bad = id >= table.rows && !part_of;
    for (uint32_t k = 0; k < VEC; k++) {
        if (i + k >= table.cols || id >= table.rows) continue;
        x.v[k] = nbi_tile_row_value(table, id, i + k);
        bad = bad || !nbi_finite(x.v[k]);
    }
    store4(out + static_cast<size_t>(blockIdx.x) * table.cols, i, table.cols, vec, x);
    if (__any_sync(NBI_FULL_MASK, bad) && nbi_lane() == 0 && !row_fault[blockIdx.x])
        row_fault[blockIdx.x] = fault; /* the same from every warp */
}

static dim3 row_grid(uint32_t n_rows, uint32_t width)
{
    return dim3(n_rows, nbi_ceil_div(width, THREADS * VEC));
}

void nbi_cuda_embed(nbi_backend *b, const nbi_embed_args *a)
{
    const nbi_cuda_packed *table = nbi_cuda_packed_of(a->table);
    if (!a->batch->n_rows || !table->cols) return;
    nbi_launch(&nbi_cuda_of(b)->rt, row_grid(a->batch->n_rows, table->cols), dim3(THREADS), 0,
               embed_kernel, static_cast<float *>(a->out), *table, a->first, a->part_of,
               a->batch->ids, a->batch->row_fault, static_cast<int32_t>(1 + NBI_WHERE_EMBED),
               aligned16(a->out, table->cols));
}

/* ---------------------------------------------------------------- rope angles */

struct rope_freq {
    float inv[ROPE_MAX];
};

/* In double: float32 angles are off by up to 0.06 at position 1,000,000. */
static __global__ void rope_kernel(float *cos_out, float *sin_out, const rope_freq freq,
                                   uint32_t n_angles, float factor, const int32_t *pos)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t t = blockIdx.x, i = threadIdx.x;
    if (i >= n_angles) return;
    const double angle = static_cast<double>(pos[t]) * static_cast<double>(freq.inv[i]);
    cos_out[static_cast<size_t>(t) * n_angles + i] = static_cast<float>(cos(angle)) * factor;
    sin_out[static_cast<size_t>(t) * n_angles + i] = static_cast<float>(sin(angle)) * factor;
}

void nbi_cuda_rope_table(nbi_backend *b, const nbi_rope_table_args *a)
{
    const uint32_t n = a->dim / 2;
    NB_ASSERT(n <= ROPE_MAX);
    if (!n || !a->batch->n_rows) return;
    rope_freq freq = {};
    for (uint32_t i = 0; i < n; i++) freq.inv[i] = a->inv_freq[i];
    nbi_launch(&nbi_cuda_of(b)->rt, dim3(a->batch->n_rows),
               dim3(nbi_ceil_div(n, NBI_WARP) * NBI_WARP), 0, rope_kernel, a->cos, a->sin, freq, n,
               a->factor, a->batch->pos);
    nbi_cuda_of(b)->rt.settles = true; /* all layers of the step read it, before their waits too */
}

/* ---------------------------------------------------------------- RMSNorm */

/* One block a row, a warp a chunk. It keeps its first HAS chunks, of the first also the weights; of
 * wider rows it reads the rest again. Weights are the model's and need no wait. RANKS: of rows of
 * one chunk a warp; a block sends its own row and waits for the same one of others. */
template <uint32_t HAS, bool RANKS>
static __global__ void __launch_bounds__(NBI_NORM_WARPS *NBI_WARP)
    rmsnorm_kernel(const nbi_norm_args a)
{
    __shared__ float parts[NBI_NORM_WARPS];
    const uint32_t n_warps = blockDim.x / NBI_WARP, warp = threadIdx.x / NBI_WARP, t = blockIdx.x;
    const uint32_t first = warp * NBI_NORM_COLS, step = n_warps * NBI_NORM_COLS;
    nbi_norm_part kept[HAS], w = {};
    if (a.out) w.load(a.weight, first, a.width, a.vec);
    nbi_wait_before();
    nbi_let_next();
    float *x_out = a.x_out + static_cast<size_t>(t) * a.x_stride;
    float squares = 0;
    const uint32_t epoch = RANKS ? nbi_norm_epoch(a) : 0;
#pragma unroll
    for (uint32_t k = 0; k < HAS; k++) {
        if constexpr (RANKS)
            nbi_norm_swap(&kept[k], a, t, first + k * step, epoch);
        else
            nbi_norm_take<false>(&kept[k], a, t, first + k * step, a.vec, 0);
        if (a.delta) kept[k].store(x_out, first + k * step, a.width, a.vec);
        squares = kept[k].squares(squares);
    }
    for (uint32_t i = first + HAS * step; i < a.width; i += step) {
        nbi_norm_part p;
        nbi_norm_take<false>(&p, a, t, i, a.vec, 0);
        if (a.delta) p.store(x_out, i, a.width, a.vec);
        squares = p.squares(squares);
    }
    squares = nbi_warp_sum(squares);
    if (nbi_lane() == 0) parts[warp] = squares;
    __syncthreads();
    if (RANKS && warp == 0) nbi_norm_count(a, epoch);
    squares = nbi_norm_sum(parts, n_warps);
    if (threadIdx.x == 0) nbi_norm_guard(a, t, squares);
    if (!a.out) return;
    float *out = a.out + static_cast<size_t>(t) * a.out_stride;
    const float by = nbi_norm_factor(a, squares);
#pragma unroll
    for (uint32_t k = 0; k < HAS; k++) {
        if (k) w.load(a.weight, first + k * step, a.width, a.vec);
        kept[k].scale(by, w);
        kept[k].store(out, first + k * step, a.width, a.vec);
    }
    for (uint32_t i = first + HAS * step; i < a.width; i += step) {
        const float *sum = a.delta ? x_out : a.x + static_cast<size_t>(t) * a.x_stride;
        nbi_norm_part p, weight;
        p.load(sum, i, a.width, a.vec);
        weight.load(a.weight, i, a.width, a.vec);
        p.scale(by, weight);
        p.store(out, i, a.width, a.vec);
    }
}

void nbi_cuda_rmsnorm(nbi_cuda *c, const nbi_rmsnorm_args *a, const nbi_peer_view *peers)
{
    if (!a->n_rows || !a->width) return;
    const uint32_t chunks = nbi_ceil_div(a->width, NBI_NORM_COLS);
    const uint32_t warps = chunks < NBI_NORM_WARPS ? chunks : NBI_NORM_WARPS;
    const auto kernel = peers                     ? rmsnorm_kernel<1, true>
                        : chunks > NBI_NORM_WARPS ? rmsnorm_kernel<2, false>
                                                  : rmsnorm_kernel<1, false>;
    nbi_launch(&c->rt, dim3(a->n_rows), dim3(warps * NBI_WARP), 0, kernel, nbi_norm_of(a, peers));
}

/* Whether the norm can take the sum of its delta along: exchanged by packets, in one piece. */
bool nbi_cuda_norm_sums(const nbi_cuda *c, const nbi_rmsnorm_args *a, const nbi_sum_ranks_args *sum)
{
    const size_t n = static_cast<size_t>(a->n_rows) * a->width;
    return a->delta == sum->x && n == sum->n && n <= 2 * NBI_TURN_PACKETS &&
           a->n_rows <= NBI_NORM_EPOCHS && c->rt.n_sms <= static_cast<int>(NBI_NORM_EPOCHS) &&
           a->width <= NBI_NORM_COLS * NBI_NORM_WARPS && nbi_norm_of(a, NULL).vec;
}

/* ---------------------------------------------------------------- SwiGLU */

static __global__ void swiglu_kernel(float *out, const float *gate, const float *up, uint32_t width,
                                     uint32_t in_stride, uint32_t out_stride, bool vec)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t t = blockIdx.x;
    const uint32_t i = (blockIdx.y * THREADS + threadIdx.x) * VEC;
    nbi_f32x4 g = load4(gate + t * in_stride, i, width, vec);
    const nbi_f32x4 u = load4(up + t * in_stride, i, width, vec);
    for (uint32_t k = 0; k < VEC; k++) g.v[k] = nbi_swiglu(g.v[k], u.v[k]);
    store4(out + t * out_stride, i, width, vec, g);
}

void nbi_cuda_swiglu(nbi_backend *b, const nbi_swiglu_args *a)
{
    if (!a->n_rows || !a->width) return;
    const bool vec = aligned16(a->gate, a->in_stride) && aligned16(a->up, a->in_stride) &&
                     aligned16(a->out, a->out_stride);
    nbi_launch(&nbi_cuda_of(b)->rt, row_grid(a->n_rows, a->width), dim3(THREADS), 0, swiglu_kernel,
               static_cast<float *>(a->out), static_cast<const float *>(a->gate),
               static_cast<const float *>(a->up), a->width, a->in_stride, a->out_stride, vec);
}

/* ---------------------------------------------------------------- ranks */

static __global__ void own_experts_kernel(int32_t *ids, size_t n, uint32_t first, uint32_t n_own)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    const uint32_t at = static_cast<uint32_t>(ids[i]) - first;
    ids[i] = ids[i] >= 0 && at < n_own ? static_cast<int32_t>(at) : -1;
}

void nbi_cuda_own_experts(nbi_backend *b, const nbi_own_experts_args *a)
{
    if (!a->n) return;
    nbi_launch(&nbi_cuda_of(b)->rt, dim3(static_cast<uint32_t>((a->n + THREADS - 1) / THREADS)),
               dim3(THREADS), 0, own_experts_kernel, a->ids, a->n, a->first, a->n_own);
}

static __global__ void clear_kernel(uint32_t *p, size_t n)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) p[i] = 0;
}

void nbi_cuda_clear(nbi_backend *b, const nbi_clear_args *a)
{
    const size_t n = a->bytes / sizeof(uint32_t);
    NB_ASSERT(a->bytes % sizeof(uint32_t) == 0);
    if (!n) return;
    nbi_launch(&nbi_cuda_of(b)->rt, dim3(static_cast<uint32_t>((n + THREADS - 1) / THREADS)),
               dim3(THREADS), 0, clear_kernel, static_cast<uint32_t *>(a->p), n);
}

/* ---------------------------------------------------------------- gather, add */

static __global__ void gather_kernel(float *out, const float *x, const int32_t *rows,
                                     uint32_t width, bool vec)
{
    nbi_wait_before();
    nbi_let_next();
    const float *from = x + static_cast<size_t>(rows[blockIdx.x]) * width;
    const uint32_t i = (blockIdx.y * THREADS + threadIdx.x) * VEC;
    store4(out + static_cast<size_t>(blockIdx.x) * width, i, width, vec,
           load4(from, i, width, vec));
}

void nbi_cuda_gather(nbi_backend *b, const nbi_gather_args *a)
{
    if (!a->n || !a->width) return;
    const bool vec = aligned16(a->x, a->width) && aligned16(a->out, a->width);
    nbi_launch(&nbi_cuda_of(b)->rt, row_grid(a->n, a->width), dim3(THREADS), 0, gather_kernel,
               static_cast<float *>(a->out), static_cast<const float *>(a->x), a->rows, a->width,
               vec);
}

static __global__ void add_kernel(float *x, const float *y, size_t n, bool vec)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t first = static_cast<size_t>(blockIdx.x) * THREADS * VEC;
    const uint32_t rest =
        static_cast<uint32_t>(n - first < THREADS * VEC ? n - first : THREADS * VEC);
    const uint32_t i = threadIdx.x * VEC;
    nbi_f32x4 v = load4(x + first, i, rest, vec);
    const nbi_f32x4 d = load4(y + first, i, rest, vec);
    for (uint32_t k = 0; k < VEC; k++) v.v[k] += d.v[k];
    store4(x + first, i, rest, vec, v);
}

void nbi_cuda_add(nbi_backend *b, const nbi_add_args *a)
{
    if (!a->n) return;
    const uint32_t blocks = static_cast<uint32_t>((a->n + THREADS * VEC - 1) / (THREADS * VEC));
    const bool vec = aligned16(a->x, 0) && aligned16(a->y, 0);
    nbi_launch(&nbi_cuda_of(b)->rt, dim3(blocks), dim3(THREADS), 0, add_kernel,
               static_cast<float *>(a->x), static_cast<const float *>(a->y), a->n, vec);
}
