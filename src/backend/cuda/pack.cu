/* Packing of weights on the device (pack.h).
 *
 * The host copies whole row tiles as the file has them, and a description of each piece, into a
 * pinned piece of memory; one upload and one kernel per piece of memory. A warp packs a row tile:
 * lane (g, t) makes its own fragments. */
#include "backend/cuda/pack.h"

#include <string.h>

#include "backend/cuda/attention.h"

#define PIECES_MAX 256u
#define WARPS      4u

/* Row tiles of one item. Offsets count from the first byte of the batch. */
struct pack_piece {
    uint64_t raw[2], raw_scales[2]; /* of the matrix and of the one interleaved with it */
    char *data, *scales;            /* of the first row tile */
    float *row_scale;
    uint32_t first_tile; /* row tiles of the batch before this piece */
    uint32_t rows, cols, n_kt;
    uint32_t block_row; /* rows of the first row's FP8 block before it */
    float factor[2];    /* row_scale */
    nbi_weight_kind kind;
    bool interleaved;
};

/* ---------------------------------------------------------------- device */

/* The matrix row of rows g (high 0) and g+8 (high 1) of a row tile; false behind the last. */
static NBI_DEV bool source_row(const pack_piece &p, uint32_t rt, uint32_t g, uint32_t high,
                               uint32_t *matrix, uint32_t *row)
{
    *matrix = p.interleaved ? high : 0;
    *row = p.interleaved ? rt * 8 + g : rt * 16 + high * 8 + g;
    return *row < p.rows;
}

/* Four codes, or bytes, or 16-bit values of a row from column c on. */
static NBI_DEV void read_values(uint32_t v[4], const uint8_t *row, uint32_t c, uint32_t cols,
                                uint32_t bits)
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t at = c + i;
        v[i] = 0;
        if (!row || at >= cols) continue;
        if (bits == 4)
            v[i] = row[at / 2] >> (at % 2 * 4) & 15u;
        else if (bits == 8)
            v[i] = row[at];
        else
            v[i] = (uint32_t)row[2 * (size_t)at] | (uint32_t)row[2 * (size_t)at + 1] << 8;
    }
}

/* Bits 14-7 of FP16(scale * 2^7); NaN stays NaN. */
static NBI_DEV uint32_t scale_byte(uint32_t e4m3)
{
    if ((e4m3 & 0x7fu) == 0x7fu) return 0xfcu;
    return (uint32_t)nbi_to_f16(nbi_from_e4m3((uint8_t)(e4m3 & 0x7fu)) * 128.0f) >> 7;
}

static NBI_DEV void pack_nvfp4(const pack_piece &p, const uint8_t *const row[2],
                               const uint8_t *const scale[2], size_t tile, uint32_t kt,
                               uint32_t lane)
{
    const uint32_t g = lane / 4, t = lane % 4;
    nbi_u32x4 words;
    nbi_u32x2 scales = {{0, 0}};
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        const uint32_t c = kt * 64 + w * 16 + 4 * t;
        uint32_t word = 0;
#pragma unroll
        for (uint32_t high = 0; high < 2; high++) {
            uint32_t v[4];
            read_values(v, row[high], c, p.cols, 4);
            const uint32_t s = row[high] && c < p.cols ? scale[high][c / 16] : 0;
            scales.v[high] |= scale_byte(s) << 8 * w;
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                word |= nbi_nvfp4_place(v[i] ^ (s >> 4 & 8u), (int)(high + i / 2 * 2))
                        << 16 * (i % 2);
        }
        words.v[w] = word;
    }
    reinterpret_cast<nbi_u32x4 *>(p.data + tile * 512)[lane] = words;
    if (t == 0) reinterpret_cast<nbi_u32x2 *>(p.scales + tile * 64)[g] = scales;
}

static NBI_DEV void pack_16(const pack_piece &p, const uint8_t *const row[2], size_t tile,
                            uint32_t kt, uint32_t lane)
{
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        nbi_u32x4 words;
#pragma unroll
        for (uint32_t high = 0; high < 2; high++) {
            uint32_t v[4];
            read_values(v, row[high], kt * 64 + w * 16 + lane % 4 * 4, p.cols, 16);
            words.v[high] = v[0] | v[1] << 16;
            words.v[high + 2] = v[2] | v[3] << 16;
        }
        reinterpret_cast<nbi_u32x4 *>(p.data + tile * 2048 + w * 512)[lane] = words;
    }
}

/* nan[high] is set when a code of that row is NaN. */
static NBI_DEV void pack_fp8(const pack_piece &p, const uint8_t *const row[2], size_t tile,
                             uint32_t kt, uint32_t lane, bool nan[2])
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        nbi_u32x4 words = {{0, 0, 0, 0}};
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) { /* k-step 2 half + i / 2, row g + 8 (i % 2) */
            uint32_t v[4];
            const uint32_t w = 2 * half + i / 2, high = i % 2;
            read_values(v, row[high], kt * 64 + w * 16 + lane % 4 * 4, p.cols, 8);
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                const uint32_t s = v[k] >> 7, m = v[k] & 0x7fu;
                nan[high] = nan[high] || m == 0x7fu;
                const uint32_t bits = high ? s << 14 | m : s << 15 | m << 7;
                words.v[i / 2 * 2 + k / 2] |= bits << 16 * (k % 2);
            }
        }
        reinterpret_cast<nbi_u32x4 *>(p.data + tile * 1024 + half * 512)[lane] = words;
    }
}

/* Block scales of the row tile, one chunk per lane at a time. */
static NBI_DEV void pack_block_scales(const pack_piece &p, const char *raw, uint32_t rt,
                                      uint32_t lane)
{
    const uint32_t n = (p.cols + 127u) / 128u;
    for (uint32_t c = lane; c < n; c += NBI_WARP) {
        nbi_f32x2 s = {{0, 0}};
#pragma unroll
        for (uint32_t high = 0; high < 2; high++) {
            uint32_t m, r;
            if (!source_row(p, rt, 0, high, &m, &r)) continue;
            const char *at = raw + p.raw_scales[m];
            s.v[high] =
                reinterpret_cast<const float *>(at)[(p.block_row + r) / 128 * (size_t)n + c];
        }
        reinterpret_cast<nbi_f32x2 *>(p.scales)[(size_t)rt * n + c] = s;
    }
}

static NBI_DEV void pack_row_tile(const pack_piece &p, const char *raw, uint32_t rt, uint32_t lane)
{
    const uint32_t g = lane / 4;
    const bool fp8 = p.kind == NBI_WEIGHT_FP8_BLOCK || p.kind == NBI_WEIGHT_FP8_TENSOR;
    const size_t row_bytes = p.kind == NBI_WEIGHT_NVFP4 ? p.cols / 2
                             : fp8                      ? p.cols
                                                        : 2 * (size_t)p.cols;
    const uint8_t *row[2], *scale[2];
    bool nan[2] = {false, false};
#pragma unroll
    for (uint32_t high = 0; high < 2; high++) {
        uint32_t m, r;
        row[high] = scale[high] = NULL;
        if (!source_row(p, rt, g, high, &m, &r)) continue;
        row[high] = reinterpret_cast<const uint8_t *>(raw + p.raw[m]) + r * row_bytes;
        scale[high] =
            reinterpret_cast<const uint8_t *>(raw + p.raw_scales[m]) + (size_t)r * (p.cols / 16);
    }
    for (uint32_t kt = 0; kt < p.n_kt; kt++) {
        const size_t tile = (size_t)rt * p.n_kt + kt;
        if (p.kind == NBI_WEIGHT_NVFP4)
            pack_nvfp4(p, row, scale, tile, kt, lane);
        else if (fp8)
            pack_fp8(p, row, tile, kt, lane, nan);
        else
            pack_16(p, row, tile, kt, lane);
    }
    if (p.kind == NBI_WEIGHT_FP8_BLOCK) pack_block_scales(p, raw, rt, lane);
#pragma unroll
    for (uint32_t high = 0; high < 2; high++) {
        const unsigned found = __ballot_sync(NBI_FULL_MASK, nan[high]) >> (g * 4) & 15u;
        if (lane % 4 == 0)
            p.row_scale[rt * 16 + high * 8 + g] =
                found ? nbi_float(0x7fc00000u) : p.factor[high && p.interleaved];
    }
}

/* A warp per row tile. pieces[n]: ascending first_tile. */
static __global__ void pack_kernel(const char *raw, const pack_piece *pieces, uint32_t n,
                                   uint32_t n_tiles)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t tile = blockIdx.x * WARPS + threadIdx.x / NBI_WARP;
    if (tile >= n_tiles) return;
    uint32_t lo = 0, hi = n;
    while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (pieces[mid].first_tile <= tile)
            lo = mid;
        else
            hi = mid;
    }
    const pack_piece &p = pieces[lo];
    pack_row_tile(p, raw, tile - p.first_tile, (uint32_t)nbi_lane());
}

/* ---------------------------------------------------------------- host */

/* Rows for pinned memory, side by side there: one thread copies them, others copy others. */
struct copy {
    char *to;
    const char *from;
    size_t n, bytes, stride; /* rows; together at most COPY_BYTES, or one row */
};
#define COPY_BYTES ((size_t)256 << 10)
#define COPIES_MAX (4 * PIECES_MAX + (uint32_t)(NBI_CUDA_STAGE_BYTES / COPY_BYTES))

/* What is gathered in pinned memory for one upload: the descriptions, then the bytes. */
struct pack_batch {
    nbi_cuda *c;
    char *host;
    size_t used, room;
    uint32_t n_pieces, n_tiles, n_copies;
    copy copies[COPIES_MAX];
};

static void copy_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const copy *copies = static_cast<const copy *>(arg);
    for (uint32_t i = begin; i < end; i++)
        for (size_t r = 0; r < copies[i].n; r++)
            memcpy(copies[i].to + r * copies[i].bytes, copies[i].from + r * copies[i].stride,
                   copies[i].bytes);
}

static void flush(pack_batch *b)
{
    if (!b->n_pieces) return;
    nbi_rt *rt = &b->c->rt;
    char *device = b->c->stage_device;
    nbi_pool_run(nbi_cuda_copiers(b->c), copy_task, b->copies, b->n_copies, 1);
    nbi_rt_upload(rt, device, b->host, b->used);
    nbi_launch(rt, dim3(nbi_ceil_div(b->n_tiles, WARPS)), dim3(WARPS * NBI_WARP), 0, pack_kernel,
               device, reinterpret_cast<const pack_piece *>(device), b->n_pieces, b->n_tiles);
    /* The rest of the pinned piece is for the next. */
    b->c->stage_used = (size_t)(b->host - b->c->stage[b->c->stage_now]) + b->used;
    b->n_pieces = b->n_tiles = b->n_copies = 0;
    b->host = NULL;
}

/* A fresh batch with room for at least `bytes` behind its descriptions. */
static void begin(pack_batch *b, size_t bytes)
{
    const size_t head = (PIECES_MAX * sizeof(pack_piece) + 15) / 16 * 16;
    NB_ASSERT(head + bytes <= NBI_CUDA_STAGE_BYTES);
    b->room = NBI_CUDA_STAGE_BYTES - b->c->stage_used;
    if (b->room < head + bytes) b->room = NBI_CUDA_STAGE_BYTES;
    b->host = nbi_cuda_stage(b->c, b->room);
    b->used = head;
}

/* Gives n rows of `bytes`, `stride` apart from src on, a place; they are there when flush() uploads
 * them. */
static uint64_t put(pack_batch *b, const char *src, size_t n, size_t bytes, size_t stride)
{
    const size_t at = b->used;
    if (bytes == stride) {
        bytes *= n;
        n = bytes / COPY_BYTES; /* pieces; what is left of them comes last */
        const size_t left = bytes - n * COPY_BYTES;
        for (size_t i = 0; i < n + (left > 0); i++) {
            NB_ASSERT(b->n_copies < COPIES_MAX);
            b->copies[b->n_copies++] = {b->host + at + i * COPY_BYTES, src + i * COPY_BYTES, 1,
                                        i < n ? COPY_BYTES : left, 0};
        }
        b->used = (at + bytes + 15) / 16 * 16;
        return at;
    }
    const size_t step = COPY_BYTES / bytes ? COPY_BYTES / bytes : 1;
    for (size_t r = 0; r < n; r += step) {
        NB_ASSERT(b->n_copies < COPIES_MAX);
        b->copies[b->n_copies++] = {b->host + at + r * bytes, src + r * stride,
                                    n - r < step ? n - r : step, bytes, stride};
    }
    b->used = (at + n * bytes + 15) / 16 * 16;
    return at;
}

static float factor_of(const nbi_matrix *m)
{
    switch (m->kind) {
    case NBI_WEIGHT_NVFP4: return m->global_scale * 128.0f;
    case NBI_WEIGHT_FP8_TENSOR: return m->global_scale * 256.0f;
    case NBI_WEIGHT_FP8_BLOCK: return 256.0f;
    default: return 1.0f;
    }
}

/* Rows [begin, end) of m into the batch, as raw bytes. */
static void put_rows(pack_batch *b, pack_piece *p, uint32_t i, const nbi_matrix *m, uint32_t row,
                     uint32_t end)
{
    const size_t row_bytes = nbi_matrix_row_bytes(m);
    const char *data = static_cast<const char *>(m->data);
    const char *scales = static_cast<const char *>(m->scales);
    const size_t stride = nbi_matrix_data_stride(m), scale_stride = nbi_matrix_scale_stride(m);
    p->raw[i] = put(b, data + row * stride, end - row, row_bytes, stride);
    p->factor[i] = factor_of(m);
    if (m->kind == NBI_WEIGHT_NVFP4) {
        const size_t n = m->cols / NBI_NVFP4_BLOCK;
        p->raw_scales[i] = put(b, scales + row * scale_stride, end - row, n, scale_stride);
    } else if (m->kind == NBI_WEIGHT_FP8_BLOCK) {
        const size_t n = nbi_ceil_div(m->cols, NBI_FP8_BLOCK) * sizeof(float);
        const uint32_t first = row / NBI_FP8_BLOCK, last = (end - 1) / NBI_FP8_BLOCK;
        p->raw_scales[i] = put(b, scales + first * scale_stride, last - first + 1, n, scale_stride);
    }
}

/* Bytes that n row tiles of an item take in a batch, at most: ends are aligned, and any tile may
 * begin a block of FP8 scales. */
static size_t raw_bytes(const nbi_cuda_pack_item *item, size_t n)
{
    const nbi_matrix *m = item->m;
    size_t tile = NBI_TILE_ROWS * nbi_matrix_row_bytes(m), fixed = 64;
    if (m->kind == NBI_WEIGHT_NVFP4) tile += NBI_TILE_ROWS * (m->cols / NBI_NVFP4_BLOCK);
    if (m->kind == NBI_WEIGHT_FP8_BLOCK) {
        tile += 2 * nbi_ceil_div(m->cols, NBI_FP8_BLOCK) * sizeof(float);
        fixed += 2 * nbi_ceil_div(m->cols, NBI_FP8_BLOCK) * sizeof(float);
    }
    return n * tile + fixed;
}

/* Most rows, a multiple of `height`, that the room left takes; 0: none. */
static uint32_t rows_that_fit(const pack_batch *b, const nbi_cuda_pack_item *item, uint32_t height,
                              uint32_t rows)
{
    const size_t left = b->room - b->used, fixed = raw_bytes(item, 0);
    if (left < raw_bytes(item, 1)) return 0;
    const size_t n = (left - fixed) / (raw_bytes(item, 1) - fixed) * height;
    return n < rows ? (uint32_t)n : rows;
}

static void pack_item(pack_batch *b, const nbi_cuda_pack_item *item)
{
    const nbi_cuda_packed *to = &item->to;
    const uint32_t height = item->up ? NBI_TILE_ROWS / 2 : NBI_TILE_ROWS;
    for (uint32_t row = 0, n; row < item->m->rows; row += n) {
        n = b->host && b->n_pieces < PIECES_MAX
                ? rows_that_fit(b, item, height, item->m->rows - row)
                : 0;
        if (!n) {
            flush(b);
            begin(b, raw_bytes(item, 1));
            n = rows_that_fit(b, item, height, item->m->rows - row);
            NB_ASSERT(n);
        }
        const size_t rt = row / height;
        pack_piece p = {};
        p.data = static_cast<char *>(const_cast<void *>(to->data)) +
                 rt * to->n_kt * nbi_tile_bytes(to->kind);
        p.scales = static_cast<char *>(const_cast<void *>(to->scales));
        if (to->kind == NBI_WEIGHT_NVFP4) p.scales += rt * to->n_kt * 64;
        if (to->kind == NBI_WEIGHT_FP8_BLOCK)
            p.scales += rt * nbi_ceil_div(to->cols, NBI_FP8_BLOCK) * 8;
        p.row_scale = const_cast<float *>(to->row_scale) + rt * NBI_TILE_ROWS;
        p.first_tile = b->n_tiles;
        p.rows = n;
        p.cols = to->cols;
        p.n_kt = to->n_kt;
        p.block_row = row % NBI_FP8_BLOCK;
        p.kind = to->kind;
        p.interleaved = item->up != NULL;
        put_rows(b, &p, 0, item->m, row, row + n);
        if (item->up) put_rows(b, &p, 1, item->up, row, row + n);
        memcpy(b->host + b->n_pieces++ * sizeof p, &p, sizeof p);
        b->n_tiles += nbi_ceil_div(n, height);
    }
}

static void upload_f32(nbi_cuda *c, const nbi_cuda_pack_item *item)
{
    const nbi_matrix *m = item->m;
    const bool strided = nbi_matrix_strided(m);
    const size_t row = nbi_matrix_row_bytes(m), n = strided ? m->rows : 1,
                 bytes = strided ? row : m->rows * row;
    for (size_t r = 0; r < n; r++)
        nbi_cuda_upload(c, static_cast<char *>(const_cast<void *>(item->to.data)) + r * row,
                        static_cast<const char *>(m->data) + r * nbi_matrix_data_stride(m), bytes);
}

void nbi_cuda_pack(nbi_cuda *c, const nbi_cuda_pack_item *items, uint32_t n)
{
    pack_batch b;
    b.c = c;
    b.host = NULL;
    b.used = b.room = 0;
    b.n_pieces = b.n_tiles = b.n_copies = 0;
    for (uint32_t i = 0; i < n; i++) {
        const nbi_cuda_pack_item *item = &items[i];
        NB_ASSERT(item->to.kind == item->m->kind && item->to.rows == item->m->rows &&
                  item->to.cols == item->m->cols && item->to.interleaved == (item->up != NULL));
        if (item->m->kind != NBI_WEIGHT_F32) {
            pack_item(&b, item);
            continue;
        }
        flush(&b);
        upload_f32(c, item);
    }
    flush(&b);
}

/* ---------------------------------------------------------------- rows back */

static __global__ void unpack_rows_kernel(float *out, nbi_cuda_packed p, const int32_t *ids,
                                          uint32_t out_stride)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= p.cols) return;
    out[(size_t)blockIdx.x * out_stride + c] = nbi_tile_row_value(p, (uint32_t)ids[blockIdx.x], c);
}

void nbi_cuda_unpack_rows(nbi_cuda *c, float *out, const nbi_cuda_packed *p, const int32_t *ids,
                          uint32_t n, uint32_t out_stride)
{
    if (!n || !p->cols) return;
    nbi_launch(&c->rt, dim3(n, nbi_ceil_div(p->cols, 256)), dim3(256), 0, unpack_rows_kernel, out,
               *p, ids, out_stride);
}

void nbi_cuda_weight_rows(nbi_backend *b, float *out, const nbi_weight *w, const int32_t *ids,
                          uint32_t n, uint32_t out_stride)
{
    nbi_cuda_unpack_rows(nbi_cuda_of(b), out, nbi_cuda_packed_of(w), ids, n, out_stride);
}

/* ---------------------------------------------------------------- prepared weights */

static nb_status check_matrix(const nbi_matrix *m, const nbi_matrix *up, nb_error *err)
{
    const char *name = m->name ? m->name : "weight";
    if (m->kind <= NBI_WEIGHT_NONE || m->kind >= NBI_WEIGHT_KIND_COUNT || !m->data)
        return nbi_fail(err, NB_INVALID, "%s: not a loaded matrix", name);
    if (m->kind == NBI_WEIGHT_NVFP4 && m->cols % NBI_NVFP4_BLOCK)
        return nbi_fail(err, NB_INVALID, "%s: %u columns, NVFP4 needs a multiple of %u", name,
                        m->cols, NBI_NVFP4_BLOCK);
    if (!up) return NB_OK;
    if (m->kind == NBI_WEIGHT_F32 || up->kind != m->kind || up->rows != m->rows ||
        up->cols != m->cols)
        return nbi_fail(err, NB_INVALID, "%s is %s [%u, %u], %s is %s [%u, %u]: not a pair", name,
                        nbi_weight_kind_name(m->kind), m->rows, m->cols,
                        up->name ? up->name : "the other", nbi_weight_kind_name(up->kind), up->rows,
                        up->cols);
    return NB_OK;
}

nb_status nbi_cuda_weight_prepare_pair(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                       const nbi_matrix *up, nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_TRY(check_matrix(m, up, err));
    nbi_cuda_weight *w = static_cast<nbi_cuda_weight *>(nbi_calloc(1, sizeof *w));
    if (!w) return nbi_fail(err, NB_NO_MEMORY, "%s: no memory", m->name);
    w->head.host = *m;
    w->p = nbi_packed_at(NULL, m->kind, m->rows, m->cols, up != NULL);
    w->head.device_bytes = nbi_packed_bytes(&w->p);
    w->block = nbi_rt_alloc(&c->rt, w->head.device_bytes);
    if (!w->block) {
        const size_t bytes = w->head.device_bytes;
        nbi_free(w);
        return nbi_fail(err, NB_NO_MEMORY, "%s: no device memory for %zu bytes", m->name, bytes);
    }
    w->p = nbi_packed_at(w->block, m->kind, m->rows, m->cols, up != NULL);
    const nbi_cuda_pack_item item = {m, up, w->p};
    nbi_cuda_pack(c, &item, 1);
    *out = &w->head;
    return NB_OK;
}

nb_status nbi_cuda_weight_prepare(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                  nb_error *err)
{
    if (nbi_cuda_is_kv_b(m)) return nbi_cuda_kv_b_prepare(b, out, m, err);
    return nbi_cuda_weight_prepare_pair(b, out, m, NULL, err);
}

void nbi_cuda_weight_release(nbi_backend *b, nbi_weight **w)
{
    if (!w || !*w) return;
    if (nbi_cuda_is_kv_b(&(*w)->host)) {
        nbi_cuda_kv_b_release(b, w);
        return;
    }
    nbi_rt_free(&nbi_cuda_of(b)->rt, reinterpret_cast<nbi_cuda_weight *>(*w)->block);
    nbi_free(*w);
    *w = NULL;
}
