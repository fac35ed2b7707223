/* See operator_util.h. */
#include "operator_util.h"

bool op_bench;
static uint64_t state;

void op_begin(int argc, char **argv)
{
    uint64_t seed = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bench") == 0) op_bench = true;
        if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = strtoull(argv[i + 1], NULL, 0);
    }
    state = seed;
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
}

/* splitmix64 */
uint64_t op_random(void)
{
    uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint32_t op_below(uint32_t n)
{
    return (uint32_t)(op_random() % n);
}

float op_uniform(float lo, float hi)
{
    return lo + (hi - lo) * (float)(op_random() >> 40) * 0x1p-24f;
}

float op_normal(void)
{
    const double u = ((double)(op_random() >> 11) + 1) * 0x1p-53;
    const double v = (double)(op_random() >> 11) * 0x1p-53;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

void op_fill(float *x, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) x[i] = op_normal() * scale;
}

/* ---------------------------------------------------------------- buffers */

#define BAND   256
#define CANARY 0xA5

typedef struct header {
    size_t bytes;
    unsigned char pad[BAND - sizeof(size_t)];
} header;

void *op_alloc(size_t bytes)
{
    unsigned char *p = NULL;
    if (posix_memalign((void **)&p, 64, sizeof(header) + bytes + BAND)) abort();
    header *h = (header *)(void *)p;
    h->bytes = bytes;
    memset(h->pad, CANARY, sizeof h->pad);
    memset(p + sizeof *h, 0xFF, bytes); /* NaN as float, -1 as int */
    memset(p + sizeof *h + bytes, CANARY, BAND);
    return p + sizeof *h;
}

float *op_floats(size_t n)
{
    return op_alloc(n * sizeof(float));
}

void op_check(const void *p)
{
    const header *h = (const header *)p - 1;
    const unsigned char *after = (const unsigned char *)p + h->bytes;
    for (size_t i = 0; i < sizeof h->pad; i++)
        if (h->pad[i] != CANARY) fail_msg("written in front of a buffer");
    for (size_t i = 0; i < BAND; i++)
        if (after[i] != CANARY) fail_msg("written %zu bytes behind a buffer", i);
}

void op_free(void *p)
{
    if (!p) return;
    op_check(p);
    free((header *)p - 1);
}

/* ---------------------------------------------------------------- backends */

nbi_cpu *op_open(nbi_cpu_level level, uint32_t threads, const nbi_limits *limits)
{
    nb_error err = {0};
    nbi_backend *b = NULL;
    const nbi_backend_options opt = {.cpu_level = level, .n_threads = threads};
    if (nbi_backend_open(&b, "cpu", &opt, &err) != NB_OK) fail_msg("%s", err.text);
    if (limits && b->ops->reserve(b, limits, &err) != NB_OK) fail_msg("%s", err.text);
    return nbi_cpu_of(b);
}

void op_close(nbi_cpu *cpu)
{
    nbi_backend *b = &cpu->base;
    nbi_backend_close(&b);
    assert_null(b);
}

/* ---------------------------------------------------------------- batches */

static void batch_bind(op_batch *o, uint32_t T, uint32_t S, uint32_t stride, uint32_t max_len)
{
    o->b = (nbi_batch){.n_rows = T,
                       .n_seqs = S,
                       .page_stride = stride,
                       .max_len = max_len,
                       .ids = o->ids,
                       .pos = o->pos,
                       .row_seq = o->seq,
                       .seq_first = o->first,
                       .seq_len = o->len,
                       .page_table = o->pages,
                       .row_fault = o->fault};
}

static void batch_alloc(op_batch *o, uint32_t T, uint32_t S, uint32_t stride)
{
    o->pos = op_alloc(T * sizeof(int32_t));
    o->seq = op_alloc(T * sizeof(int32_t));
    o->ids = op_alloc(T * sizeof(int32_t));
    o->fault = op_alloc(T * sizeof(int32_t));
    o->first = op_alloc((S + 1) * sizeof(int32_t));
    o->len = op_alloc(S * sizeof(int32_t));
    o->pages = op_alloc((size_t)S * stride * sizeof(int32_t));
    memset(o->fault, 0, T * sizeof(int32_t));
}

void op_batch_make(op_batch *o, const uint32_t *lengths, const uint32_t *n_rows, uint32_t n_seqs)
{
    uint32_t T = 0, stride = 1, max_len = 0;
    memset(o, 0, sizeof *o);
    for (uint32_t s = 0; s < n_seqs; s++) {
        const uint32_t pages = (lengths[s] + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS;
        T += n_rows[s];
        o->n_pages += pages;
        if (pages > stride) stride = pages;
        if (lengths[s] > max_len) max_len = lengths[s];
    }
    o->n_pages += 2; /* never used */
    batch_alloc(o, T, n_seqs, stride);
    int32_t *perm = malloc(o->n_pages * sizeof *perm);
    for (uint32_t i = 0; i < o->n_pages; i++) perm[i] = (int32_t)i;
    for (uint32_t i = o->n_pages - 1; i > 0; i--) {
        const uint32_t j = op_below(i + 1);
        const int32_t swap = perm[i];
        perm[i] = perm[j];
        perm[j] = swap;
    }
    uint32_t t = 0, next = 0;
    for (uint32_t s = 0; s < n_seqs; s++) {
        o->first[s] = (int32_t)t;
        o->len[s] = (int32_t)lengths[s];
        for (uint32_t p = 0; p * NBI_PAGE_TOKENS < lengths[s]; p++)
            o->pages[s * stride + p] = perm[next++];
        for (uint32_t i = 0; i < n_rows[s]; i++, t++) {
            o->pos[t] = (int32_t)(lengths[s] - n_rows[s] + i);
            o->seq[t] = (int32_t)s;
            o->ids[t] = 0;
        }
    }
    o->first[n_seqs] = (int32_t)t;
    free(perm);
    batch_bind(o, T, n_seqs, stride, max_len);
}

void op_batch_slice(op_batch *o, const op_batch *from, uint32_t begin, uint32_t end)
{
    const uint32_t stride = from->b.page_stride, s = (uint32_t)from->seq[begin];
    memset(o, 0, sizeof *o);
    o->n_pages = from->n_pages;
    batch_alloc(o, end - begin, 1, stride);
    memcpy(o->pages, from->pages + s * stride, stride * sizeof(int32_t));
    for (uint32_t t = begin; t < end; t++) {
        o->pos[t - begin] = from->pos[t];
        o->seq[t - begin] = 0;
        o->ids[t - begin] = from->ids[t];
    }
    o->first[0] = 0;
    o->first[1] = (int32_t)(end - begin);
    o->len[0] = from->pos[end - 1] + 1;
    batch_bind(o, end - begin, 1, stride, (uint32_t)o->len[0]);
}

void op_batch_free(op_batch *o)
{
    op_free(o->pos);
    op_free(o->seq);
    op_free(o->ids);
    op_free(o->fault);
    op_free(o->first);
    op_free(o->len);
    op_free(o->pages);
    memset(o, 0, sizeof *o);
}

void *op_cache(nbi_dtype dtype, const float *x, size_t n)
{
    if (dtype == NBI_F32) {
        float *c = op_floats(n);
        memcpy(c, x, n * sizeof *x);
        return c;
    }
    uint16_t *c = op_alloc(n * sizeof *c);
    for (size_t i = 0; i < n; i++) c[i] = nbi_f32_bf16(x[i]);
    return c;
}

#define GROUP 128u

static size_t scales_of(const op_kv *kv)
{
    return (kv->coded + GROUP - 1) / GROUP;
}

/* Offsets of an E4M3 vector's codes, scales and BF16 values. */
static void find_codes(const op_kv *kv, size_t i, size_t *codes, size_t *scales, size_t *rest)
{
    if (kv->coded == kv->width) {
        const size_t head = 64 * (kv->width + 4 * scales_of(kv)), at = i / 64 * head;
        *codes = at + i % 64 * kv->width;
        *scales = at + 64 * kv->width + i % 64 * 4 * scales_of(kv);
        *rest = SIZE_MAX;
        return;
    }
    const size_t first = (kv->coded + 3) / 4 * 4, second = first + 4 * scales_of(kv);
    const size_t row = (second + 2 * (kv->width - kv->coded) + 15) / 16 * 16;
    *codes = i * row;
    *scales = i * row + first;
    *rest = i * row + second;
}

op_kv op_kv_empty(nbi_dtype dtype, uint32_t n_pages, uint32_t heads, uint32_t width, uint32_t coded)
{
    op_kv kv = {.dtype = dtype, .heads = heads, .width = width, .coded = coded};
    const size_t vectors = (size_t)n_pages * heads * 64;
    kv.n = vectors * width;
    kv.bytes = kv.n * (dtype == NBI_F32 ? 4 : 2);
    if (dtype == NBI_F8_E4M3) {
        size_t codes, scales, rest;
        find_codes(&kv, vectors, &codes, &scales, &rest);
        kv.bytes = codes;
    }
    kv.data = op_alloc(kv.bytes);
    return kv;
}

static void put_codes(const op_kv *kv, size_t i, const float *x)
{
    size_t codes, scales, rest;
    find_codes(kv, i, &codes, &scales, &rest);
    uint8_t *data = kv->data;
    for (uint32_t g = 0; g < kv->coded; g += GROUP) {
        const uint32_t n = kv->coded - g < GROUP ? kv->coded - g : GROUP;
        double most = 0;
        for (uint32_t c = g; c < g + n; c++)
            most = isfinite(x[c]) ? fmax(most, fabs((double)x[c])) : (double)INFINITY;
        int e = -100;
        while (isfinite(most) && most > ldexp(448, e) && e < 119) e++;
        const float scale = isfinite(most) ? ldexpf(1, e) : NAN;
        memcpy(data + scales + g / GROUP * 4, &scale, 4);
        for (uint32_t c = g; c < g + n; c++)
            data[codes + c] = isfinite(most) ? nbi_f32_e4m3(x[c] / scale) : 0;
    }
    for (uint32_t c = kv->coded; c < kv->width; c++) {
        const uint16_t h = nbi_f32_bf16(x[c]);
        memcpy(data + rest + 2 * (c - kv->coded), &h, 2);
    }
}

op_kv op_kv_make(nbi_dtype dtype, uint32_t n_pages, uint32_t heads, uint32_t width, uint32_t coded,
                 const float *x)
{
    op_kv kv = op_kv_empty(dtype, n_pages, heads, width, coded);
    for (size_t i = 0; i < kv.n; i++) {
        if (dtype == NBI_F32) ((float *)kv.data)[i] = x[i];
        if (dtype == NBI_BF16) ((uint16_t *)kv.data)[i] = nbi_f32_bf16(x[i]);
    }
    for (size_t i = 0; dtype == NBI_F8_E4M3 && i < kv.n / width; i++)
        put_codes(&kv, i, x + i * width);
    return kv;
}

double op_kv_at(const op_kv *kv, size_t i, uint32_t c)
{
    if (kv->dtype == NBI_F32) return (double)((const float *)kv->data)[i * kv->width + c];
    if (kv->dtype == NBI_BF16)
        return (double)nbi_bf16_f32(((const uint16_t *)kv->data)[i * kv->width + c]);
    size_t codes, scales, rest;
    find_codes(kv, i, &codes, &scales, &rest);
    const uint8_t *data = kv->data;
    if (c < kv->coded) {
        float scale;
        memcpy(&scale, data + scales + c / GROUP * 4, 4);
        return (double)nbi_e4m3_f32(data[codes + c]) * (double)scale;
    }
    uint16_t h;
    memcpy(&h, data + rest + 2 * (c - kv->coded), 2);
    return (double)nbi_bf16_f32(h);
}

op_kv op_kv_bf16(const op_kv *kv)
{
    float *x = op_floats(kv->n);
    for (size_t i = 0; i < kv->n; i++)
        x[i] = (float)op_kv_at(kv, i / kv->width, (uint32_t)(i % kv->width));
    const uint32_t pages = (uint32_t)(kv->n / kv->width / 64 / kv->heads);
    const op_kv to = op_kv_make(NBI_BF16, pages, kv->heads, kv->width, kv->width, x);
    op_free(x);
    return to;
}

size_t op_slot(const op_batch *b, uint32_t seq, uint32_t pos)
{
    return (size_t)b->pages[seq * b->b.page_stride + pos / NBI_PAGE_TOKENS] * NBI_PAGE_TOKENS +
           pos % NBI_PAGE_TOKENS;
}

double op_error(const float *a, const double *b, size_t n)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = (double)a[i] - b[i];
        diff += d * d;
        norm += b[i] * b[i];
    }
    if (isnan(diff)) return INFINITY;
    if (diff == 0) return 0;
    return sqrt(diff / norm);
}

/* ---------------------------------------------------------------- timing */

typedef struct reading {
    const uint64_t *x;
    uint64_t sum[64];
} reading;

static void read_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    reading *r = arg;
    enum { WORDS = (1 << 20) / 8 };
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (const uint64_t *p = r->x + (size_t)begin * WORDS, *e = r->x + (size_t)end * WORDS; p < e;
         p += 4) {
        a += p[0];
        b += p[1];
        c += p[2];
        d += p[3];
    }
    r->sum[thread % 64] += a + b + c + d;
}

double op_read_bandwidth(nbi_pool *pool)
{
    const size_t bytes = (size_t)512 << 20;
    uint64_t *x = malloc(bytes);
    if (!x) abort();
    memset(x, 1, bytes);
    reading r = {.x = x};
    double best = 0;
    for (int i = 0; i < 5; i++) {
        const uint64_t t0 = nbi_now_ns();
        nbi_pool_run(pool, read_task, &r, (uint32_t)(bytes >> 20), 4);
        const double rate = (double)bytes / ((double)(nbi_now_ns() - t0) * 1e-9);
        if (rate > best) best = rate;
    }
    if (r.sum[0] == 1) printf(" "); /* keeps the sums */
    free(x);
    return best;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double op_time(void (*fn)(void *), void *arg, uint32_t repeats)
{
    double t[64];
    if (repeats > 64) repeats = 64;
    fn(arg);
    for (uint32_t i = 0; i < repeats; i++) {
        const uint64_t t0 = nbi_now_ns();
        fn(arg);
        t[i] = (double)(nbi_now_ns() - t0) * 1e-9;
    }
    qsort(t, repeats, sizeof *t, by_value);
    return t[repeats / 2];
}
