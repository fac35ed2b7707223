/* The CUDA backend: opening, memory, steps, and the table of its operators. Callers: backend.c and
 * tests; everything else goes through the table. */
#include "backend/cuda/cuda_backend.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"

/* ---------------------------------------------------------------- open, memory */

#define COPIERS 8u /* threads that copy weights, at most */

static void cuda_close(nbi_backend **b);

static nb_status open_stages(nbi_cuda *c, nb_error *err)
{
    for (char *&stage : c->stage) {
        stage = static_cast<char *>(nbi_rt_alloc_host(&c->rt, NBI_CUDA_STAGE_BYTES));
        if (!stage)
            return nbi_fail(err, NB_NO_MEMORY, "cuda: cannot pin %zu bytes of host memory",
                            NBI_CUDA_STAGE_BYTES);
    }
    c->stage_device = static_cast<char *>(nbi_rt_alloc(&c->rt, NBI_CUDA_STAGE_BYTES));
    c->arrivals =
        static_cast<uint32_t *>(nbi_rt_alloc(&c->rt, NBI_CUDA_ARRIVALS * sizeof *c->arrivals));
    c->routed = static_cast<nbi_cuda_routed *>(nbi_rt_alloc(&c->rt, sizeof *c->routed));
    if (c->stage_device && c->arrivals && c->routed) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY, "cuda: no device memory for %zu bytes of staging",
                    NBI_CUDA_STAGE_BYTES);
}

static nb_status cuda_open(nbi_backend **out, const nbi_backend_options *opt, nb_error *err)
{
    nbi_cuda *c = static_cast<nbi_cuda *>(nbi_calloc(1, sizeof *c));
    if (!c) return nbi_fail(err, NB_NO_MEMORY, "cuda: out of memory");
    const uint32_t each = opt && opt->ranks_per_device ? opt->ranks_per_device : 1;
    if (!nbi_rt_open(&c->rt, opt ? opt->local_rank / each : 0)) {
        nbi_fail(err, NB_UNSUPPORTED, "device \"cuda\": %s", c->rt.error);
        nbi_free(c);
        return NB_UNSUPPORTED;
    }
    c->base.ops = &nbi_cuda_ops;
    c->base.act_dtype = NBI_F32;
    c->base.w4a4 = opt && opt->w4a4;
    c->graphs = !(opt && opt->disable_graphs);
    c->ranks_per_device = each;
    c->apart_sums = opt && opt->apart_sums;
    snprintf(c->exchange, sizeof c->exchange, "%s", opt && opt->exchange ? opt->exchange : "auto");
    c->rt.dependent = c->graphs && c->rt.sm >= 90;
    size_t free_bytes = 0, total = 0;
    nb_status st = open_stages(c, err);
    if (st == NB_OK && !nbi_rt_memory(&c->rt, &free_bytes, &total))
        st = nbi_fail(err, NB_UNSUPPORTED, "cuda: %s", c->rt.error);
    if (st != NB_OK) {
        nbi_backend *b = &c->base;
        cuda_close(&b);
        return st;
    }
    c->base.memory_bytes = free_bytes;
    c->base.sm = static_cast<uint32_t>(c->rt.sm);
    snprintf(c->base.description, sizeof c->base.description, "cuda (%.40s, sm_%d)", c->rt.name,
             c->rt.sm);
    snprintf(c->base.driver, sizeof c->base.driver, "%s", c->rt.driver);
    *out = &c->base;
    return NB_OK;
}

static void forget_recorded(nbi_cuda *c)
{
    for (nbi_cuda_graph &g : c->recorded) {
        nbi_rt_graph_free(&c->rt, &g.graph);
        g = {};
    }
}

static void release_reserved(nbi_cuda *c)
{
    forget_recorded(c);
    nbi_cuda_sampler_close(c);
    nbi_rt_free(&c->rt, c->scratch);
    nbi_rt_free(&c->rt, c->batch_device);
    nbi_rt_free_host(&c->rt, c->batch_host);
    c->scratch = NULL;
    c->batch_device = c->batch_host = NULL;
    c->owes_faults = false;
    c->scratch_bytes = c->batch_bytes = 0;
}

static void cuda_close(nbi_backend **b)
{
    if (!b || !*b) return;
    nbi_cuda *c = nbi_cuda_of(*b);
    release_reserved(c);
    nbi_cuda_leave(c);
    nbi_pool_destroy(&c->copiers);
    for (char *stage : c->stage) nbi_rt_free_host(&c->rt, stage);
    nbi_rt_free(&c->rt, c->stage_device);
    nbi_rt_free(&c->rt, c->arrivals);
    nbi_rt_free(&c->rt, c->routed);
    nbi_free(c->clock_at);
    nbi_rt_close(&c->rt);
    nbi_free(c);
    *b = NULL;
}

static void *cuda_alloc(nbi_backend *b, size_t bytes)
{
    return nbi_rt_alloc(&nbi_cuda_of(b)->rt, bytes);
}

static void cuda_release(nbi_backend *b, void *p, size_t bytes)
{
    (void)bytes;
    nbi_cuda_flush(nbi_cuda_of(b));
    nbi_rt_free(&nbi_cuda_of(b)->rt, p);
}

char *nbi_cuda_stage(nbi_cuda *c, size_t bytes)
{
    NB_ASSERT(bytes <= NBI_CUDA_STAGE_BYTES);
    if (NBI_CUDA_STAGE_BYTES - c->stage_used < bytes) {
        nbi_rt_mark(&c->rt, c->stage_now);
        c->stage_now = (c->stage_now + 1) % NBI_CUDA_STAGES;
        c->stage_used = 0;
        nbi_rt_wait_mark(&c->rt, c->stage_now);
    }
    char *at = c->stage[c->stage_now] + c->stage_used;
    const size_t end = c->stage_used + (bytes + 15) / 16 * 16;
    c->stage_used = end < NBI_CUDA_STAGE_BYTES ? end : NBI_CUDA_STAGE_BYTES;
    return at;
}

nbi_pool *nbi_cuda_copiers(nbi_cuda *c)
{
    const uint32_t cores = nbi_cores_available(), n = cores < COPIERS ? cores : COPIERS;
    nb_error ignored;
    if (!c->copiers && n > 1 && nbi_pool_create(&c->copiers, n, &ignored) != NB_OK)
        c->copiers = NULL;
    return c->copiers;
}

void nbi_cuda_upload(nbi_cuda *c, void *dst, const void *src, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += NBI_CUDA_STAGE_BYTES) {
        const size_t n = bytes - at < NBI_CUDA_STAGE_BYTES ? bytes - at : NBI_CUDA_STAGE_BYTES;
        char *stage = nbi_cuda_stage(c, n);
        memcpy(stage, static_cast<const char *>(src) + at, n);
        nbi_rt_upload(&c->rt, static_cast<char *>(dst) + at, stage, n);
    }
}

static void cuda_upload(nbi_backend *b, void *dst, const void *src, size_t bytes)
{
    nbi_cuda_flush(nbi_cuda_of(b));
    nbi_cuda_upload(nbi_cuda_of(b), dst, src, bytes);
}

static void cuda_download(nbi_backend *b, void *dst, const void *src, size_t bytes)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_flush(c);
    for (size_t at = 0; at < bytes; at += NBI_CUDA_STAGE_BYTES) {
        const size_t n = bytes - at < NBI_CUDA_STAGE_BYTES ? bytes - at : NBI_CUDA_STAGE_BYTES;
        nbi_rt_sync(&c->rt);
        nbi_rt_download(&c->rt, c->stage[0], static_cast<const char *>(src) + at, n);
        nbi_rt_sync(&c->rt);
        memcpy(static_cast<char *>(dst) + at, c->stage[0], n);
    }
}

static void cuda_copy(nbi_backend *b, void *dst, const void *src, size_t bytes)
{
    nbi_cuda_flush(nbi_cuda_of(b));
    nbi_rt_copy(&nbi_cuda_of(b)->rt, dst, src, bytes);
}

/* ---------------------------------------------------------------- reserve */

/* A batch's arrays in one block, each at a multiple of 16 bytes: sizes with base NULL, lays out
 * otherwise. */
static size_t pack_batch(nbi_batch *out, const nbi_batch *in, char *base)
{
    const size_t T = in->n_rows, S = in->n_seqs, R = in->n_logit_rows;
    const struct {
        const int32_t **at;
        size_t n;
    } parts[] = {{&out->ids, T},
                 {&out->pos, T},
                 {&out->row_seq, T},
                 {&out->hidden_rows, T},
                 {&out->list_rows, T},
                 {&out->shares, T},
                 {&out->logit_rows, R},
                 {&out->seq_first, S + 1},
                 {&out->seq_len, S},
                 {&out->page_table, S * in->page_stride},
                 {const_cast<const int32_t **>(&out->row_fault), T}};
    size_t bytes = 0;
    for (const auto &part : parts) {
        if (base) *part.at = reinterpret_cast<int32_t *>(base + bytes);
        bytes += (part.n * sizeof(int32_t) + 15) / 16 * 16;
    }
    return bytes;
}

static uint32_t len_bucket(const nbi_cuda *c, uint32_t len)
{
    const uint32_t most = nbi_ceil_div(c->limits.max_context, NBI_PAGE_TOKENS) * NBI_PAGE_TOKENS;
    uint32_t bucket = NBI_CUDA_LEN_BUCKET;
    while (bucket < len) bucket *= 2;
    return bucket < most || most < len ? bucket : most;
}

static size_t operator_scratch(const nbi_cuda *c, const nbi_limits *limits)
{
    size_t bytes = 256;
    const size_t attention = nbi_cuda_attention_scratch(c, limits);
    const size_t linear = nbi_cuda_linear_scratch(c, limits);
    if (attention > bytes) bytes = attention;
    if (linear > bytes) bytes = linear;
    return bytes;
}

static size_t batch_block(const nbi_cuda *c, const nbi_limits *limits)
{
    nbi_batch most = {};
    (void)c;
    most.n_rows = limits->max_rows;
    most.n_seqs = limits->max_seqs;
    most.n_logit_rows = limits->max_logit_rows;
    most.page_stride = 2 * nbi_ceil_div(limits->max_context, NBI_PAGE_TOKENS) +
                       NBI_CUDA_LEN_BUCKET / NBI_PAGE_TOKENS;
    nbi_batch unused;
    return pack_batch(&unused, &most, NULL);
}

static size_t cuda_workspace_bytes(const nbi_backend *b, const nbi_limits *limits)
{
    const nbi_cuda *c = nbi_cuda_of(b);
    return operator_scratch(c, limits) + batch_block(c, limits) + nbi_cuda_sampler_bytes(limits);
}

static nb_status cuda_reserve(nbi_backend *b, const nbi_limits *limits, nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    release_reserved(c);
    nbi_pool_destroy(&c->copiers); /* weights are there */
    c->limits = *limits;
    c->scratch_bytes = operator_scratch(c, limits);
    c->batch_bytes = batch_block(c, limits);
    c->scratch = nbi_rt_alloc(&c->rt, c->scratch_bytes);
    c->batch_device = static_cast<char *>(nbi_rt_alloc(&c->rt, c->batch_bytes));
    c->batch_host = static_cast<char *>(nbi_rt_alloc_host(&c->rt, c->batch_bytes));
    if (!c->scratch || !c->batch_device || !c->batch_host) {
        release_reserved(c);
        return nbi_fail(err, NB_NO_MEMORY, "cuda: no device memory for %zu bytes of scratch",
                        c->scratch_bytes + c->batch_bytes);
    }
    const nb_status st = nbi_cuda_sampler_open(c, limits, err);
    if (st != NB_OK) release_reserved(c);
    return st;
}

/* ---------------------------------------------------------------- steps */

/* The batch in the pinned block, and its device form: page tables as wide as the bound needs. */
static size_t place_batch(nbi_cuda *c, const nbi_batch *in)
{
    nbi_batch shape = *in, host;
    shape.max_len = len_bucket(c, in->max_len);
    shape.page_stride = nbi_ceil_div(shape.max_len, NBI_PAGE_TOKENS);
    const size_t bytes = pack_batch(&host, &shape, c->batch_host);
    NB_ASSERT(bytes <= c->batch_bytes);
    const size_t T = in->n_rows, S = in->n_seqs, R = in->n_logit_rows, i32 = sizeof(int32_t);
    memcpy(const_cast<int32_t *>(host.ids), in->ids, T * i32);
    memcpy(const_cast<int32_t *>(host.pos), in->pos, T * i32);
    memcpy(const_cast<int32_t *>(host.row_seq), in->row_seq, T * i32);
    if (in->hidden_rows) memcpy(const_cast<int32_t *>(host.hidden_rows), in->hidden_rows, T * i32);
    if (in->list_rows) memcpy(const_cast<int32_t *>(host.list_rows), in->list_rows, T * i32);
    if (in->shares) memcpy(const_cast<int32_t *>(host.shares), in->shares, T * i32);
    if (R) memcpy(const_cast<int32_t *>(host.logit_rows), in->logit_rows, R * i32);
    memcpy(const_cast<int32_t *>(host.seq_first), in->seq_first, (S + 1) * i32);
    memcpy(const_cast<int32_t *>(host.seq_len), in->seq_len, S * i32);
    const size_t width = in->page_stride < shape.page_stride ? in->page_stride : shape.page_stride;
    for (size_t s = 0; s < S; s++)
        memcpy(const_cast<int32_t *>(host.page_table) + s * shape.page_stride,
               in->page_table + s * in->page_stride, width * i32);
    memcpy(host.row_fault, in->row_fault, T * i32);
    c->batch = shape;
    pack_batch(&c->batch, &shape, c->batch_device);
    return bytes;
}

static nbi_cuda_graph *find_recorded(nbi_cuda *c, const nbi_cuda_key &key)
{
    nbi_cuda_graph *oldest = &c->recorded[0];
    for (nbi_cuda_graph &g : c->recorded) {
        if (g.used && memcmp(&g.key, &key, sizeof key) == 0) return &g;
        if (g.used < oldest->used) oldest = &g;
    }
    nbi_rt_graph_free(&c->rt, &oldest->graph);
    oldest->key = key;
    oldest->used = 0;
    return oldest;
}

/* Waits for the device and hands over what it owes the host. False with a sentence in rt.error. */
static bool settle(nbi_cuda *c)
{
    nbi_cuda_flush(c);
    const bool fine = nbi_rt_sync(&c->rt);
    nbi_cuda_sample_settle(c, fine);
    if (c->owes_faults && fine) {
        const size_t at = reinterpret_cast<char *>(c->batch.row_fault) - c->batch_device;
        memcpy(c->host_batch->row_fault, c->batch_host + at,
               c->host_batch->n_rows * sizeof(int32_t));
    }
    c->owes_faults = false;
    return fine;
}

/* Can launches be stamped? Otherwise a timed step has events around its operators. */
static bool stamps(const nbi_cuda *c)
{
    return c->graphs && c->rt.sm >= 90;
}

/* Where the pass is recorded, or will be now; NULL: it is launched operator by operator. So is the
 * first of its kind: kernels are loaded at their first launch, which is not recorded. */
static nbi_cuda_graph *place_of(nbi_cuda *c, const nbi_batch *host, uint32_t pass)
{
    if (!c->graphs || (c->timed && !stamps(c)) || host->n_rows > NBI_CUDA_GRAPH_ROWS) return NULL;
    const nbi_cuda_key key = {host->n_rows,     host->n_seqs, host->n_logit_rows,
                              c->batch.max_len, pass,         c->rt.stamps};
    nbi_cuda_graph *g = find_recorded(c, key);
    const bool first = g->used == 0;
    g->used = c->n_steps;
    return first ? NULL : g;
}

/* Copies that carry a step in and out are outside of what is recorded: they are of this batch. */
static bool cuda_step_begin(nbi_backend *b, const nbi_batch *host, uint32_t pass,
                            const nbi_batch **device)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_flush(c);             /* not part of the step */
    if (c->owes_faults) settle(c); /* the pinned block is in use */
    const size_t bytes = place_batch(c, host);
    nbi_rt_upload(&c->rt, c->batch_device, c->batch_host, bytes);
    c->host_batch = host;
    *device = &c->batch;
    c->recording = c->replaying = NULL;
    c->n_steps++;
    c->in_step = true;
    c->rt.skips = false;
    nbi_cuda_graph *g = place_of(c, host, pass);
    if (!g) {
        b->passes_launched++;
        return true;
    }
    b->passes_recorded++;
    if (g->graph && c->timed) { /* which operators its launches are of, is counted meanwhile */
        nbi_rt_replay(&c->rt, g->graph);
        c->rt.skips = true;
        return true;
    }
    if (g->graph) {
        c->replaying = g;
        return false;
    }
    c->recording = g;
    nbi_rt_record(&c->rt);
    return true;
}

static nb_status cuda_step_end(nbi_backend *b, nb_error *err)
{
    (void)err; /* errors stick, sync says them */
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_flush(c);
    c->in_step = c->rt.skips = false;
    if (c->recording) c->replaying = c->recording;
    if (c->recording) c->recording->graph = nbi_rt_record_end(&c->rt);
    if (c->replaying && c->replaying->graph) nbi_rt_replay(&c->rt, c->replaying->graph);
    c->recording = c->replaying = NULL;
    const size_t bytes = c->host_batch->n_rows * sizeof(int32_t);
    const size_t at = reinterpret_cast<char *>(c->batch.row_fault) - c->batch_device;
    nbi_rt_download(&c->rt, c->batch_host + at, c->batch.row_fault, bytes);
    c->owes_faults = true;
    return NB_OK;
}

static nb_status cuda_sync(nbi_backend *b, nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const bool fine = settle(c);
    NB_TRY(nbi_cuda_ranks_status(c, err));
    return fine ? NB_OK : nbi_fail(err, NB_INTERNAL, "%s", c->rt.error);
}

/* ---------------------------------------------------------------- the clock */

static nb_status clock_open(nbi_backend *b, uint32_t n_marks, nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    if (!stamps(c) && nbi_rt_clock_open(&c->rt, n_marks)) return NB_OK;
    if (stamps(c) && !c->clock_at)
        c->clock_at = static_cast<uint32_t *>(nbi_calloc(n_marks, sizeof *c->clock_at));
    if (c->clock_at && nbi_rt_stamps_open(&c->rt)) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY, "cuda: no memory for %u marks", n_marks);
}

/* A step that is recorded, or whose launches overlap, stays so where launches can be stamped. */
static void clock_on(nbi_backend *b, bool on)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_flush(c);
    c->timed = on;
    c->rt.stamps = false;
    c->clock_last = 0;
    if (on && stamps(c)) nbi_rt_stamps_clear(&c->rt);
    c->rt.stamps = on && stamps(c);
}

static bool clock_light(const nbi_backend *b)
{
    return stamps(nbi_cuda_of(b));
}

/* Within a step a mark is the launch that comes next, which begins where what was before ends. Two
 * marks without a launch in between are one. */
static void clock_mark(nbi_backend *b, uint32_t i)
{
    nbi_cuda *c = nbi_cuda_of(b);
    if (!stamps(c)) {
        nbi_rt_clock_mark(&c->rt, i);
        return;
    }
    const bool again = !c->in_step && c->rt.n_stamps && c->rt.n_stamps == c->clock_last;
    if (!c->in_step && !again) {
        nbi_rt_stamp(&c->rt);
        c->clock_last = c->rt.n_stamps;
    }
    c->clock_at[i] = c->rt.n_stamps - !c->in_step;
}

static uint64_t clock_launches(const nbi_backend *b, bool *waits)
{
    const nbi_cuda *c = nbi_cuda_of(b);
    *waits = c->n_pending || c->norm_pending || c->router_pending || c->swiglu_pending ||
             c->sum_pending || c->waiting.what != NBI_CUDA_WAITS_NOT || c->index.appends ||
             c->index.weighs || c->index.selects;
    return c->rt.n_calls;
}

static uint64_t clock_ns(nbi_backend *b, uint32_t from, uint32_t to)
{
    nbi_cuda *c = nbi_cuda_of(b);
    if (!stamps(c)) return nbi_rt_clock_ns(&c->rt, from, to);
    const uint64_t begin = nbi_rt_stamp_ns(&c->rt, c->clock_at[from]);
    const uint64_t end = nbi_rt_stamp_ns(&c->rt, c->clock_at[to]);
    return end > begin ? end - begin : 0;
}

static const nbi_backend_clock cuda_clock = {.open = clock_open,
                                             .on = clock_on,
                                             .light = clock_light,
                                             .mark = clock_mark,
                                             .launches = clock_launches,
                                             .ns = clock_ns};

/* ---------------------------------------------------------------- the table */

/* An operator behind the linear layers that wait. */
#define FLUSH(op)                                                       \
    static void flush_##op(nbi_backend *b, const nbi_##op##_args *args) \
    {                                                                   \
        nbi_cuda_flush(nbi_cuda_of(b));                                 \
        nbi_cuda_##op(b, args);                                         \
    }
FLUSH(embed)
FLUSH(rope_table)
FLUSH(gqa_append)
FLUSH(index_reuse)
FLUSH(share_experts)
FLUSH(own_experts)
FLUSH(clear)
FLUSH(gather)
FLUSH(join_ranks)
FLUSH(sample)
#undef FLUSH

const nbi_backend_ops nbi_cuda_ops = {
    .version = 1,
    .size = sizeof(nbi_backend_ops),
    .name = "cuda",
    .mla_expanded = false,
    .asynchronous = true,
    .open = cuda_open,
    .close = cuda_close,
    .alloc = cuda_alloc,
    .commit = NULL,
    .release = cuda_release,
    .upload = cuda_upload,
    .download = cuda_download,
    .copy = cuda_copy,
    .join = nbi_cuda_join,
    .weight_prepare = nbi_cuda_weight_prepare,
    .weight_release = nbi_cuda_weight_release,
    .workspace_bytes = cuda_workspace_bytes,
    .reserve = cuda_reserve,
    .step_begin = cuda_step_begin,
    .step_end = cuda_step_end,
    .embed = flush_embed,
    .rope_table = flush_rope_table,
    .rmsnorm = nbi_cuda_rmsnorm_later,
    .linear = nbi_cuda_linear,
    .swiglu = nbi_cuda_swiglu_later,
    .mla_append = nbi_cuda_mla_append,
    .mla_attend = nbi_cuda_mla_attend, /* may take the append that waits along */
    .gqa_append = flush_gqa_append,
    .gqa_attend = nbi_cuda_gqa_attend, /* the same */
    .index_append = nbi_cuda_index_append,
    .index_select = nbi_cuda_index_select, /* may take what waits of the indexer along */
    .index_reuse = flush_index_reuse,
    .route = nbi_cuda_route_now,
    .share_experts = flush_share_experts,
    .own_experts = flush_own_experts,
    .clear = flush_clear,
    .gather = flush_gather,
    .add = nbi_cuda_add_now,
    .sum_ranks = nbi_cuda_sum_ranks_later,
    .join_ranks = flush_join_ranks,
    .sample = flush_sample,
    .sync = cuda_sync,
    .read_bandwidth = nbi_cuda_read_bandwidth,
    .clock = &cuda_clock,
};
