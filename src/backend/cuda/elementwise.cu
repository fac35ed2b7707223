/* Operators that touch every value once. Callers: the backend's table.
 *
 * A block is one row, or 1024 values of one; sums go over the block's threads in a fixed tree, so
 * that a row's bits depend on its width alone. Four values a thread at a time: as one access of 16
 * bytes where every row starts at a multiple of that, else one by one; the bits are the same. */
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/pack.h"

#define THREADS  256u
#define VEC      4u
#define NORM_MAX 1024u /* threads of a row's norm */
#define ROPE_MAX 256u  /* angles of a row */

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

/* An id behind the table, which no request has, is a fault as NaN is. */
static __global__ void embed_kernel(float *out, const nbi_cuda_packed table, const int32_t *ids,
                                    int32_t *row_fault, int32_t fault, bool vec)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t id = static_cast<uint32_t>(ids[blockIdx.x]);
    const uint32_t i = (blockIdx.y * THREADS + threadIdx.x) * VEC;
    nbi_f32x4 x = {};
    bool bad = id >= table.rows;
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
               embed_kernel, static_cast<float *>(a->out), *table, a->batch->ids,
               a->batch->row_fault, static_cast<int32_t>(1 + NBI_WHERE_EMBED),
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
}

/* ---------------------------------------------------------------- RMSNorm */

struct norm_args {
    float *out, *x;
    const float *delta, *weight;
    float eps;
    uint32_t width, x_stride, out_stride;
    int32_t *row_fault, fault;
    bool x_vec, delta_vec, out_vec, weight_vec; /* rows start at multiples of 16 bytes */
};

/* One group of a row: the addition, and its squares. */
static NBI_DEV nbi_f32x4 norm_take(const norm_args &a, float *x, const float *delta, uint32_t i,
                                   float *squares)
{
    nbi_f32x4 v = load4(x, i, a.width, a.x_vec);
    if (delta) {
        const nbi_f32x4 d = load4(delta, i, a.width, a.delta_vec);
        for (uint32_t k = 0; k < VEC; k++) v.v[k] += d.v[k];
        store4(x, i, a.width, a.x_vec, v);
    }
    for (uint32_t k = 0; k < VEC; k++) *squares = fmaf(v.v[k], v.v[k], *squares);
    return v;
}

static NBI_DEV void norm_give(const norm_args &a, float *out, uint32_t i, float scale, nbi_f32x4 v,
                              const nbi_f32x4 &w)
{
    for (uint32_t k = 0; k < VEC; k++) v.v[k] = v.v[k] * scale * w.v[k];
    store4(out, i, a.width, a.out_vec, v);
}

/* Sum over the block, the same in every thread. */
static NBI_DEV float block_sum(float x)
{
    __shared__ float part[NORM_MAX / NBI_WARP];
    x = nbi_warp_sum(x);
    if (nbi_lane() == 0) part[threadIdx.x / NBI_WARP] = x;
    __syncthreads();
    float sum = 0;
    for (uint32_t w = 0; w < blockDim.x / NBI_WARP; w++) sum += part[w];
    return sum;
}

/* One block a row. A thread keeps its first HAS groups of values, of the first two also the
 * weights; of wider rows it reads the rest again. Weights are the model's and need no wait. */
template <uint32_t HAS>
static __global__ void __launch_bounds__(NORM_MAX) rmsnorm_kernel(const norm_args a)
{
    const uint32_t step = blockDim.x * VEC, first = threadIdx.x * VEC;
    nbi_f32x4 kept[HAS], w[2] = {};
#pragma unroll
    for (uint32_t g = 0; g < 2; g++)
        if (a.out) w[g] = load4(a.weight, first + g * step, a.width, a.weight_vec);
    nbi_wait_before();
    nbi_let_next();
    float *x = a.x + static_cast<size_t>(blockIdx.x) * a.x_stride;
    const float *delta = a.delta;
    if (delta) delta += static_cast<size_t>(blockIdx.x) * a.width;
    float squares = 0;
#pragma unroll
    for (uint32_t g = 0; g < HAS; g++) kept[g] = norm_take(a, x, delta, first + g * step, &squares);
    for (uint32_t i = first + HAS * step; i < a.width; i += step)
        norm_take(a, x, delta, i, &squares);
    squares = block_sum(squares);
    if (threadIdx.x == 0 && a.row_fault && !nbi_finite(squares) && !a.row_fault[blockIdx.x])
        a.row_fault[blockIdx.x] = a.fault;
    if (!a.out) return;
    float *out = a.out + static_cast<size_t>(blockIdx.x) * a.out_stride;
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(a.width) + a.eps);
#pragma unroll
    for (uint32_t g = 0; g < HAS; g++) {
        const uint32_t i = first + g * step;
        norm_give(a, out, i, scale, kept[g],
                  g < 2 ? w[g] : load4(a.weight, i, a.width, a.weight_vec));
    }
    for (uint32_t i = first + HAS * step; i < a.width; i += step)
        norm_give(a, out, i, scale, load4(x, i, a.width, a.x_vec),
                  load4(a.weight, i, a.width, a.weight_vec));
}

/* Two groups a thread, four beyond 8,192 values; few for narrow rows, whose warps would have no
 * work. */
static uint32_t norm_threads(uint32_t width)
{
    const uint32_t n = nbi_ceil_div(width, 2 * VEC * NBI_WARP) * NBI_WARP;
    return n < NORM_MAX ? n : NORM_MAX;
}

void nbi_cuda_rmsnorm(nbi_backend *b, const nbi_rmsnorm_args *a)
{
    if (!a->n_rows || !a->width) return;
    norm_args k = {};
    k.out = static_cast<float *>(a->out);
    k.x = static_cast<float *>(a->x);
    k.delta = static_cast<const float *>(a->delta);
    k.weight = a->weight;
    k.eps = a->eps;
    k.width = a->width;
    k.x_stride = a->x_stride;
    k.out_stride = a->out_stride;
    k.row_fault = a->row_fault;
    k.fault = static_cast<int32_t>(1 + a->layer * NBI_WHERE_COUNT + a->where);
    k.x_vec = aligned16(a->x, a->x_stride);
    k.delta_vec = aligned16(a->delta, a->width);
    k.out_vec = aligned16(a->out, a->out_stride);
    k.weight_vec = aligned16(a->weight, 0);
    nbi_launch(&nbi_cuda_of(b)->rt, dim3(a->n_rows), dim3(norm_threads(a->width)), 0,
               a->width > 2 * VEC * NORM_MAX ? rmsnorm_kernel<4> : rmsnorm_kernel<2>, k);
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
    for (uint32_t k = 0; k < VEC; k++) g.v[k] = g.v[k] / (1.0f + expf(-g.v[k])) * u.v[k];
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
