/* MLA and GQA against float64 oracles written from the contract in backend.h, for every level of
 * this machine; and the rule that a row's bits depend on the row alone (batch, chunks, threads). */
#include "attention_util.h"

#define LEVELS(level) \
    for (nbi_cpu_level level = NBI_CPU_REFERENCE; level <= nbi_cpu_detect(); level++)

/* float32 accumulation of up to a few thousand terms; the reference sums in double; AMX keeps 16
 * bits of queries and probabilities. */
static double bound(nbi_cpu_level level)
{
    return level == NBI_CPU_REFERENCE ? 1e-6 : level < NBI_CPU_AMX ? 4e-6 : 2e-5;
}

/* The reference is slow: one thread count besides the 1 it is compared with, and no row by row. */
static uint32_t first_threads(nbi_cpu_level level)
{
    return level == NBI_CPU_REFERENCE ? 3 : 1;
}

/* ---------------------------------------------------------------- MLA attend */

static void run_mla(nbi_cpu *cpu, const at_mla *d, const nbi_batch *b, uint32_t first, float *out)
{
    const at_mla_case *c = &d->c;
    int32_t expanded[4];
    nbi_batch batch = *b;
    assert_true(b->n_seqs <= 4 || !d->expanded);
    for (uint32_t s = 0; d->expanded && s < b->n_seqs; s++) expanded[s] = d->expanded;
    if (d->expanded) batch.expanded = expanded;
    const nbi_mla_attend_args a = {
        .out = out,
        .q = d->q + (size_t)first * c->heads * (c->nope + c->rope),
        .kv_b = &d->kv_b,
        .n_heads = c->heads,
        .nope_dim = c->nope,
        .rope_dim = c->rope,
        .kv_lora = c->lora,
        .v_dim = c->v,
        .scale = d->scale,
        .cache = &d->kv,
        .select = d->select ? d->select + (size_t)first * c->topk : NULL,
        .select_stride = c->topk,
        .batch = &batch,
    };
    cpu->base.ops->mla_attend(&cpu->base, &a);
}

static void check_form(const at_mla_case *c, const uint32_t *lengths, const uint32_t *rows,
                       uint32_t n_seqs, int32_t expanded)
{
    at_mla d;
    at_make_mla(&d, c, lengths, rows, n_seqs);
    d.expanded = expanded;
    const uint32_t T = d.batch.b.n_rows;
    nbi_limits limits = at_mla_limits(c, T, d.batch.b.max_len);
    limits.mla_expanded = expanded > 0;
    double *want = malloc((size_t)T * c->heads * c->v * sizeof *want);
    for (uint32_t i = 0; i < T * c->heads; i++)
        at_oracle_mla(&d, i / c->heads, i % c->heads, want + (size_t)i * c->v);
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, &limits);
        memset(d.out, 0xFF, (size_t)T * c->heads * c->v * sizeof(float));
        run_mla(cpu, &d, &d.batch.b, 0, d.out);
        op_check(d.out);
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t h = 0; h < c->heads; h++) {
                const size_t at = ((size_t)t * c->heads + h) * c->v;
                OP_ASSERT_ERROR(
                    op_error(d.out + at, want + at, c->v),
                    bound(level) * (expanded ? 2.5 : 1), /* keys and values are rounded once more */
                    "mla %s heads %u nope %u rope %u lora %u v %u cache %s weight %s topk "
                    "%u expanded %d row %u (pos %d) head %u",
                    nbi_cpu_level_name(level), c->heads, c->nope, c->rope, c->lora, c->v,
                    nbi_dtype_name(c->cache), nbi_weight_kind_name(c->kind), c->topk, expanded, t,
                    d.batch.pos[t], h);
            }
        op_close(cpu);
    }
    free(want);
    at_free_mla(&d);
}

static void check_mla(const at_mla_case *c, const uint32_t *lengths, const uint32_t *rows,
                      uint32_t n_seqs)
{
    check_form(c, lengths, rows, n_seqs, 0);
}

static void test_mla_shapes(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65}, rows[] = {1, 2, 1, 2, 3};
    static const at_mla_case cases[] = {
        {1, 16, 8, 32, 16, NBI_F32, NBI_WEIGHT_F32, 0},
        {3, 20, 8, 32, 24, NBI_BF16, NBI_WEIGHT_BF16, 0},
        {20, 24, 64, 512, 32, NBI_BF16, NBI_WEIGHT_BF16, 0},
        {64, 8, 64, 32, 8, NBI_F32, NBI_WEIGHT_BF16, 0},
        {130, 8, 8, 32, 8, NBI_F32, NBI_WEIGHT_F32, 0},
        {3, 16, 8, 64, 16, NBI_F32, NBI_WEIGHT_NVFP4, 0},
        {2, 100, 8, 160, 50, NBI_BF16, NBI_WEIGHT_FP8_BLOCK, 0},
        {3, 16, 10, 44, 17, NBI_BF16, NBI_WEIGHT_F16, 0},
        {3, 16, 8, 32, 16, NBI_BF16, NBI_WEIGHT_BF16, 16},
        {5, 16, 8, 32, 16, NBI_F32, NBI_WEIGHT_BF16, 2048},
        {3, 16, 8, 300, 16, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0},
        {20, 24, 8, 96, 16, NBI_F8_E4M3, NBI_WEIGHT_NVFP4, 16},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_mla(&cases[i], lengths, rows, 5);
}

static void test_mla_long(void **state)
{
    (void)state;
    const uint32_t one[] = {1000}, two[] = {2};
    check_mla(&(at_mla_case){3, 16, 8, 32, 16, NBI_F32, NBI_WEIGHT_F32, 0}, one, two, 1);
    check_mla(&(at_mla_case){3, 16, 8, 32, 16, NBI_BF16, NBI_WEIGHT_BF16, 700}, one, two, 1);
    const uint32_t longer[] = {17000, 513};
    check_mla(&(at_mla_case){2, 4, 8, 16, 4, NBI_F32, NBI_WEIGHT_F32, 0}, longer, two, 1);
    const uint32_t both[] = {2, 2};
    check_mla(&(at_mla_case){2, 4, 8, 16, 4, NBI_BF16, NBI_WEIGHT_F32, 0}, longer, both, 2);
}

/* The expanded form: random shapes, odd widths, rows of both forms in one sequence. */
static void test_mla_expanded(void **state)
{
    (void)state;
    const uint32_t lengths[] = {65, 1, 300}, rows[] = {65, 1, 60};
    static const at_mla_case cases[] = {
        {1, 16, 8, 32, 16, NBI_F32, NBI_WEIGHT_F32, 0},
        {3, 20, 8, 32, 24, NBI_BF16, NBI_WEIGHT_BF16, 0},
        {2, 128, 64, 512, 128, NBI_BF16, NBI_WEIGHT_BF16, 0},
        {3, 16, 8, 64, 16, NBI_F32, NBI_WEIGHT_NVFP4, 0},
        {2, 100, 8, 160, 50, NBI_BF16, NBI_WEIGHT_FP8_BLOCK, 0},
        {3, 16, 10, 44, 17, NBI_BF16, NBI_WEIGHT_F16, 0},
        {2, 128, 64, 512, 128, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0},
    };
    static const int32_t below[] = {1000, 1000, 256, 64, 270, 1, 280};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_form(&cases[i], lengths, rows, 3, below[i]);
    for (int i = 0; i < 12; i++) {
        const at_mla_case c = {.heads = 1 + op_below(5),
                               .nope = 1 + op_below(200),
                               .rope = 2 + 2 * op_below(33),
                               .lora = 8 + op_below(300),
                               .v = 8 + op_below(193), /* fewer may cancel to nothing */
                               .cache = op_below(2) ? NBI_F32 : NBI_BF16,
                               .kind = op_below(2) ? NBI_WEIGHT_F32 : NBI_WEIGHT_BF16};
        const uint32_t length = 1 + op_below(400), n = 1 + op_below(length < 90 ? length : 90);
        check_form(&c, &length, &n, 1, 1 + (int32_t)op_below(400));
    }
    const uint32_t longer = 2100, few = 70;
    check_form(&(at_mla_case){2, 4, 8, 16, 4, NBI_F32, NBI_WEIGHT_F32, 0}, &longer, &few, 1, 2080);
}

/* One batch, row by row, in chunks, with 1 to 3 threads: the same bits. */
static void test_mla_bits(void **state)
{
    (void)state;
    static const at_mla_case cases[] = {
        {20, 24, 8, 96, 16, NBI_BF16, NBI_WEIGHT_BF16, 0},
        {3, 24, 8, 40, 16, NBI_F32, NBI_WEIGHT_BF16, 0},
        {4, 16, 8, 64, 16, NBI_BF16, NBI_WEIGHT_NVFP4, 100},
        {1, 16, 8, 72, 16, NBI_BF16, NBI_WEIGHT_F32, 0},
        {3, 24, 8, 40, 16, NBI_BF16, NBI_WEIGHT_BF16, 0},
        {1, 70, 8, 72, 16, NBI_F32, NBI_WEIGHT_F32, 0},
        {20, 24, 8, 96, 16, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0},
        {3, 24, 8, 140, 16, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0},
    };
    static const int32_t below[] = {0, 0, 0, 0, 1000, 516, 0, 516};
    const uint32_t lengths[] = {530, 70, 1}, rows[] = {24, 70, 1};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        at_mla d;
        at_make_mla(&d, &cases[i], lengths, rows, 3);
        d.expanded = below[i];
        const uint32_t T = d.batch.b.n_rows;
        const size_t width = (size_t)cases[i].heads * cases[i].v;
        nbi_limits limits = at_mla_limits(&cases[i], T, 530);
        limits.mla_expanded = below[i] > 0;
        float *other = op_floats(T * width);
        LEVELS(level)
        {
            nbi_cpu *cpu = op_open(level, 1, &limits);
            run_mla(cpu, &d, &d.batch.b, 0, d.out);
            op_close(cpu);
            for (uint32_t threads = first_threads(level); threads <= 3; threads++) {
                static const uint32_t chunks[] = {1, 7, 64, 1000};
                cpu = op_open(level, threads, &limits);
                for (size_t k = level == NBI_CPU_REFERENCE; k < 4; k++) {
                    memset(other, 0xFF, T * width * sizeof(float));
                    for (uint32_t t = 0; t < T;) {
                        uint32_t end = t;
                        while (end < T && end - t < chunks[k] && d.batch.seq[end] == d.batch.seq[t])
                            end++;
                        op_batch part;
                        op_batch_slice(&part, &d.batch, t, end);
                        run_mla(cpu, &d, &part.b, t, other + t * width);
                        op_batch_free(&part);
                        t = end;
                    }
                    assert_memory_equal(other, d.out, T * width * sizeof(float));
                }
                op_close(cpu);
            }
        }
        op_free(other);
        at_free_mla(&d);
    }
}

/* ---------------------------------------------------------------- GQA attend */

static void run_gqa(nbi_cpu *cpu, const at_gqa *d, const nbi_batch *b, uint32_t first, float *out)
{
    const nbi_gqa_attend_args a = {.out = out,
                                   .q = d->q + (size_t)first * d->c.heads * d->c.dim,
                                   .n_heads = d->c.heads,
                                   .n_kv_heads = d->c.kv_heads,
                                   .head_dim = d->c.dim,
                                   .scale = d->scale,
                                   .cache = &d->kv,
                                   .batch = b};
    cpu->base.ops->gqa_attend(&cpu->base, &a);
}

static const at_gqa_case gqa_cases[] = {
    {1, 1, 32, NBI_F32},   {3, 1, 96, NBI_BF16},      {8, 1, 128, NBI_BF16},
    {16, 2, 128, NBI_F32}, {6, 6, 32, NBI_BF16},      {9, 3, 20, NBI_F32},
    {70, 1, 8, NBI_BF16},  {16, 1, 128, NBI_F8_E4M3}, {6, 2, 150, NBI_F8_E4M3},
};
#define N_GQA (sizeof gqa_cases / sizeof *gqa_cases)

static void check_gqa(const at_gqa_case *c, const uint32_t *lengths, const uint32_t *rows,
                      uint32_t n_seqs)
{
    at_gqa d;
    at_make_gqa(&d, c, lengths, rows, n_seqs);
    const uint32_t T = d.batch.b.n_rows;
    const nbi_limits limits = at_gqa_limits(c, T, d.batch.b.max_len);
    double *want = malloc((size_t)T * c->heads * c->dim * sizeof *want);
    for (uint32_t i = 0; i < T * c->heads; i++)
        at_oracle_gqa(&d, i / c->heads, i % c->heads, want + (size_t)i * c->dim);
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, &limits);
        memset(d.out, 0xFF, (size_t)T * c->heads * c->dim * sizeof(float));
        run_gqa(cpu, &d, &d.batch.b, 0, d.out);
        op_check(d.out);
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t h = 0; h < c->heads; h++) {
                const size_t at = ((size_t)t * c->heads + h) * c->dim;
                OP_ASSERT_ERROR(op_error(d.out + at, want + at, c->dim), bound(level),
                                "gqa %s heads %u/%u dim %u cache %s row %u pos %d",
                                nbi_cpu_level_name(level), c->heads, c->kv_heads, c->dim,
                                nbi_dtype_name(c->cache), t, d.batch.pos[t]);
            }
        op_close(cpu);
    }
    free(want);
    at_free_gqa(&d);
}

static void test_gqa_shapes(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 1000}, rows[] = {1, 2, 1, 20, 3, 5};
    for (size_t i = 0; i < N_GQA; i++) check_gqa(&gqa_cases[i], lengths, rows, 6);
    const uint32_t longer[] = {16390}, few[] = {8}; /* pieces change their length inside a group */
    check_gqa(&(at_gqa_case){2, 1, 8, NBI_F32}, longer, few, 1);
}

static void test_gqa_bits(void **state)
{
    (void)state;
    const uint32_t lengths[] = {600, 70, 1}, rows[] = {40, 70, 1};
    for (size_t i = 0; i < N_GQA; i++) {
        at_gqa d;
        at_make_gqa(&d, &gqa_cases[i], lengths, rows, 3);
        const uint32_t T = d.batch.b.n_rows;
        const size_t width = (size_t)gqa_cases[i].heads * gqa_cases[i].dim;
        const nbi_limits limits = at_gqa_limits(&gqa_cases[i], T, 600);
        float *other = op_floats(T * width);
        LEVELS(level)
        {
            nbi_cpu *cpu = op_open(level, 1, &limits);
            run_gqa(cpu, &d, &d.batch.b, 0, d.out);
            op_close(cpu);
            for (uint32_t threads = first_threads(level); threads <= 3; threads++) {
                static const uint32_t chunks[] = {1, 7, 64, 1000};
                cpu = op_open(level, threads, &limits);
                for (size_t k = level == NBI_CPU_REFERENCE; k < 4; k++) {
                    memset(other, 0xFF, T * width * sizeof(float));
                    for (uint32_t t = 0; t < T;) {
                        uint32_t end = t;
                        while (end < T && end - t < chunks[k] && d.batch.seq[end] == d.batch.seq[t])
                            end++;
                        op_batch part;
                        op_batch_slice(&part, &d.batch, t, end);
                        run_gqa(cpu, &d, &part.b, t, other + t * width);
                        op_batch_free(&part);
                        t = end;
                    }
                    assert_memory_equal(other, d.out, T * width * sizeof(float));
                }
                op_close(cpu);
            }
        }
        op_free(other);
        at_free_gqa(&d);
    }
}

/* ---------------------------------------------------------------- E4M3 */

/* Codes are read as the BF16 values that they are: the same bits as from a BF16 cache of these. */
static void test_codes_are_bf16(void **state)
{
    (void)state;
    const uint32_t lengths[] = {700, 70, 1}, rows[] = {9, 70, 1};
    at_mla m;
    at_gqa g;
    at_make_mla(&m, &(at_mla_case){20, 24, 10, 300, 16, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0}, lengths,
                rows, 3);
    at_make_gqa(&g, &(at_gqa_case){18, 1, 150, NBI_F8_E4M3}, lengths, rows, 3);
    const uint32_t T = m.batch.b.n_rows;
    const op_kv latent = op_kv_bf16(&m.cache), k = op_kv_bf16(&g.k), v = op_kv_bf16(&g.v);
    const nbi_kv_layer codes[] = {m.kv, g.kv};
    const nbi_kv_layer plain = {.dtype = NBI_BF16, .latent = latent.data, .k = k.data, .v = v.data};
    nbi_limits limits = at_mla_limits(&m.c, T, 700), more = at_gqa_limits(&g.c, T, 700);
    limits.mla_expanded = true;
    float *mla = op_floats((size_t)T * 20 * 16), *gqa = op_floats((size_t)T * 18 * 150);
    LEVELS(level)
    {
        for (int form = 0; form < 3; form++) {
            nbi_cpu *cpu = op_open(level, 2, form == 2 ? &more : &limits);
            m.expanded = form == 1 ? 1000 : 0;
            m.kv = g.kv = plain;
            if (form < 2) run_mla(cpu, &m, &m.batch.b, 0, m.out);
            if (form == 2) run_gqa(cpu, &g, &g.batch.b, 0, g.out);
            m.kv = codes[0];
            g.kv = codes[1];
            if (form < 2) run_mla(cpu, &m, &m.batch.b, 0, mla);
            if (form == 2) run_gqa(cpu, &g, &g.batch.b, 0, gqa);
            if (form < 2) assert_memory_equal(mla, m.out, (size_t)T * 20 * 16 * sizeof *mla);
            if (form == 2) assert_memory_equal(gqa, g.out, (size_t)T * 18 * 150 * sizeof *gqa);
            op_close(cpu);
        }
    }
    op_free(latent.data);
    op_free(k.data);
    op_free(v.data);
    op_free(mla);
    op_free(gqa);
    at_free_mla(&m);
    at_free_gqa(&g);
}

/* ---------------------------------------------------------------- append */

static const nbi_dtype cache_types[] = {NBI_F32, NBI_BF16, NBI_F8_E4M3};

static void check_mla_append(nbi_dtype dtype, bool interleaved)
{
    enum { H = 3, NOPE = 20, ROPE = 8, LORA = 150, STRIDE = LORA + ROPE + 5 };
    const uint32_t lengths[] = {70, 64, 1}, rows[] = {20, 1, 1};
    op_batch b;
    op_batch_make(&b, lengths, rows, 3);
    const uint32_t T = b.b.n_rows;
    float *q = op_floats((size_t)T * H * (NOPE + ROPE)), *kv = op_floats((size_t)T * STRIDE);
    float *norm = op_floats(LORA), *cs, *sn;
    at_angles(&cs, &sn, &b, ROPE);
    op_fill(kv, (size_t)T * STRIDE, 0.01f); /* small: eps shows */
    op_fill(norm, LORA, 1);
    float *q0 = op_floats((size_t)T * H * (NOPE + ROPE));
    op_fill(q0, (size_t)T * H * (NOPE + ROPE), 1);
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, NULL);
        memcpy(q, q0, (size_t)T * H * (NOPE + ROPE) * sizeof(float));
        const op_kv cache = op_kv_empty(dtype, b.n_pages, 1, LORA + ROPE, LORA);
        const nbi_kv_layer layer = {.dtype = dtype, .latent = cache.data};
        const nbi_rope_rows rope = {.cos = cs, .sin = sn, .dim = ROPE, .interleaved = interleaved};
        const nbi_mla_append_args a = {.q = q,
                                       .kv = kv,
                                       .kv_norm = norm,
                                       .eps = 1e-4f,
                                       .n_heads = H,
                                       .nope_dim = NOPE,
                                       .rope_dim = ROPE,
                                       .kv_lora = LORA,
                                       .kv_stride = STRIDE,
                                       .rope = &rope,
                                       .cache = &layer,
                                       .batch = &b.b};
        cpu->base.ops->mla_append(&cpu->base, &a);
        for (uint32_t t = 0; t < T; t++) {
            double want[LORA + ROPE], wq[NOPE + ROPE];
            for (uint32_t i = 0; i < LORA + ROPE; i++) want[i] = (double)kv[t * STRIDE + i];
            at_norm(want, LORA, norm, (double)1e-4f);
            at_rotate(want + LORA, ROPE, interleaved, cs + t * ROPE / 2, sn + t * ROPE / 2);
            const size_t at = op_slot(&b, (uint32_t)b.seq[t], (uint32_t)b.pos[t]);
            OP_ASSERT_ERROR(at_cache_error(&cache, at, 0, want, LORA), at_cache_bound(dtype),
                            "latent row %u", t);
            OP_ASSERT_ERROR(at_cache_error(&cache, at, LORA, want + LORA, ROPE),
                            at_cache_bound(dtype == NBI_F32 ? dtype : NBI_BF16), "rope key row %u",
                            t);
            for (uint32_t h = 0; h < H; h++) {
                const size_t o = ((size_t)t * H + h) * (NOPE + ROPE);
                for (uint32_t i = 0; i < NOPE + ROPE; i++) wq[i] = (double)q0[o + i];
                at_rotate(wq + NOPE, ROPE, interleaved, cs + t * ROPE / 2, sn + t * ROPE / 2);
                OP_ASSERT_ERROR(op_error(q + o, wq, NOPE + ROPE), 1e-6, "q row %u head %u", t, h);
            }
        }
        op_check(q);
        op_check(cache.data);
        op_free(cache.data);
        op_close(cpu);
    }
    op_free(q);
    op_free(q0);
    op_free(kv);
    op_free(norm);
    op_free(cs);
    op_free(sn);
    op_batch_free(&b);
}

static void test_mla_append(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) check_mla_append(cache_types[i / 2], i & 1);
}

/* Values are stored as they came: the very codes and scales. */
static void check_stored(const op_kv *got, const op_batch *b, const float *stored)
{
    const op_kv want =
        op_kv_make(got->dtype, b->n_pages, got->heads, got->width, got->coded, stored);
    for (uint32_t t = 0; t < b->b.n_rows; t++) {
        const size_t slot = op_slot(b, (uint32_t)b->seq[t], (uint32_t)b->pos[t]);
        for (uint32_t i = 0; i < got->heads * got->width; i++) {
            const size_t at = (slot / 64 * got->heads + i / got->width) * 64 + slot % 64;
            assert_true(op_kv_at(&want, at, i % got->width) == op_kv_at(got, at, i % got->width));
        }
    }
    op_free(want.data);
}

static void check_gqa_append(nbi_dtype dtype, bool normed, uint32_t rope_dim)
{
    enum { H = 6, KV = 2, D = 36 };
    const uint32_t lengths[] = {70, 64, 1}, rows[] = {20, 1, 1};
    op_batch b;
    op_batch_make(&b, lengths, rows, 3);
    const uint32_t T = b.b.n_rows;
    float *q0 = op_floats((size_t)T * H * D), *k0 = op_floats((size_t)T * KV * D);
    float *v = op_floats((size_t)T * KV * D), *qn = op_floats(D), *kn = op_floats(D), *cs, *sn;
    at_angles(&cs, &sn, &b, rope_dim);
    op_fill(q0, (size_t)T * H * D, 0.02f);
    op_fill(k0, (size_t)T * KV * D, 0.02f);
    op_fill(v, (size_t)T * KV * D, 1);
    op_fill(qn, D, 1);
    op_fill(kn, D, 1);
    const uint32_t half = rope_dim / 2;
    float *stored = op_floats((size_t)b.n_pages * KV * 64 * D);
    memset(stored, 0, (size_t)b.n_pages * KV * 64 * D * sizeof *stored);
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, NULL);
        float *q = op_cache(NBI_F32, q0, (size_t)T * H * D);
        float *k = op_cache(NBI_F32, k0, (size_t)T * KV * D);
        const op_kv ck = op_kv_empty(dtype, b.n_pages, KV, D, D);
        const op_kv cv = op_kv_empty(dtype, b.n_pages, KV, D, D);
        const nbi_kv_layer layer = {.dtype = dtype, .k = ck.data, .v = cv.data};
        const nbi_rope_rows rope = {.cos = cs, .sin = sn, .dim = rope_dim, .interleaved = false};
        const nbi_gqa_append_args a = {.q = q,
                                       .k = k,
                                       .v = v,
                                       .q_norm = normed ? qn : NULL,
                                       .k_norm = normed ? kn : NULL,
                                       .eps = 1e-4f,
                                       .n_heads = H,
                                       .n_kv_heads = KV,
                                       .head_dim = D,
                                       .rope = &rope,
                                       .cache = &layer,
                                       .batch = &b.b};
        cpu->base.ops->gqa_append(&cpu->base, &a);
        for (uint32_t t = 0; t < T; t++) {
            double want[D];
            for (uint32_t h = 0; h < H + KV; h++) {
                const bool is_q = h < H;
                const float *src =
                    is_q ? q0 + ((size_t)t * H + h) * D : k0 + ((size_t)t * KV + h - H) * D;
                for (uint32_t i = 0; i < D; i++) want[i] = (double)src[i];
                if (normed) at_norm(want, D, is_q ? qn : kn, (double)1e-4f);
                at_rotate(want, rope_dim, false, cs + t * half, sn + t * half);
                const float *got =
                    is_q ? q + ((size_t)t * H + h) * D : k + ((size_t)t * KV + h - H) * D;
                OP_ASSERT_ERROR(op_error(got, want, D), 1e-6, "gqa append row %u head %u", t, h);
                if (is_q) continue;
                const size_t slot = op_slot(&b, (uint32_t)b.seq[t], (uint32_t)b.pos[t]);
                const size_t at = (slot / 64 * KV + h - H) * 64 + slot % 64;
                OP_ASSERT_ERROR(at_cache_error(&ck, at, 0, want, D), at_cache_bound(dtype), "k");
                memcpy(stored + at * D, v + ((size_t)t * KV + h - H) * D, D * sizeof *v);
                for (uint32_t i = 0; i < D; i++) want[i] = (double)stored[at * D + i];
                OP_ASSERT_ERROR(at_cache_error(&cv, at, 0, want, D), at_cache_bound(dtype), "v");
            }
        }
        check_stored(&cv, &b, stored);
        op_check(ck.data);
        op_check(cv.data);
        op_free(q);
        op_free(k);
        op_free(ck.data);
        op_free(cv.data);
        op_close(cpu);
    }
    op_free(stored);
    op_free(q0);
    op_free(k0);
    op_free(v);
    op_free(qn);
    op_free(kn);
    op_free(cs);
    op_free(sn);
    op_batch_free(&b);
}

static void test_gqa_append(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) check_gqa_append(cache_types[i / 4], i & 1, i & 2 ? 36 : 18);
}

/* ---------------------------------------------------------------- speed */

typedef struct bench_run {
    nbi_cpu *cpu;
    at_mla *mla;
    at_gqa *gqa;
} bench_run;

static void bench_once(void *arg)
{
    bench_run *r = arg;
    if (r->mla) run_mla(r->cpu, r->mla, &r->mla->batch.b, 0, r->mla->out);
    if (r->gqa) run_gqa(r->cpu, r->gqa, &r->gqa->batch.b, 0, r->gqa->out);
}

static void bench_mla_form(uint32_t heads, uint32_t ctx, uint32_t rows, nbi_dtype dtype,
                           double bandwidth, bool expanded)
{
    const at_mla_case c = {heads, 192, 64, 512, 256, dtype, NBI_WEIGHT_BF16, 0};
    at_mla d;
    at_make_mla(&d, &c, &ctx, &rows, 1);
    d.expanded = expanded ? INT32_MAX : 0;
    nbi_limits limits = at_mla_limits(&c, rows, ctx);
    limits.mla_expanded = expanded;
    double visible = 0;
    for (uint32_t t = 0; t < rows; t++) visible += d.batch.pos[t] + 1;
    const double gmac = (visible * heads * (expanded ? 512 : 2 * 512 + 64) +
                         (double)(expanded ? ctx : rows) * heads * 512 * (192 + 256)) *
                        1e-9;
    const double bytes = (double)ctx * (dtype == NBI_F8_E4M3 ? 656 : 72 * nbi_dtype_bits(dtype)) +
                         2.0 * heads * 448 * 512;
    LEVELS(level)
    {
        if (level == NBI_CPU_REFERENCE) continue;
        nbi_cpu *cpu = op_open(level, 2, &limits);
        bench_run r = {.cpu = cpu, .mla = &d};
        const double s = op_time(bench_once, &r, 9);
        printf(
            "  mla %-8s %-9s heads %3u ctx %6u rows %4u cache %-4s %9.1f us %6.1f GMAC/s %7.1f MB "
            "%5.1f%% of read bandwidth\n",
            expanded ? "expanded" : "absorbed", nbi_cpu_level_name(level), heads, ctx, rows,
            nbi_dtype_name(dtype), s * 1e6, gmac / s, bytes * 1e-6, 100 * bytes / s / bandwidth);
        op_close(cpu);
    }
    at_free_mla(&d);
}

static void bench_mla(uint32_t heads, uint32_t ctx, uint32_t rows, nbi_dtype dtype,
                      double bandwidth)
{
    bench_mla_form(heads, ctx, rows, dtype, bandwidth, false);
}

/* A chunk of a prompt in both forms, keys and values built with it (docs/models.md). */
static void bench_forms(double bandwidth)
{
    static const uint32_t chunks[] = {128, 512, 2048}, contexts[] = {512, 2048, 4608, 8192};
    for (int r = 0; r < 3; r++)
        for (int c = 0; c < 4; c++)
            for (int form = 0; form < 2 && contexts[c] >= chunks[r]; form++)
                bench_mla_form(20, contexts[c], chunks[r], NBI_BF16, bandwidth, form);
}

static void bench_gqa_type(uint32_t heads, uint32_t kv, uint32_t dim, uint32_t ctx, uint32_t rows,
                           nbi_dtype dtype, double bandwidth)
{
    const at_gqa_case c = {heads, kv, dim, dtype};
    at_gqa d;
    at_make_gqa(&d, &c, &ctx, &rows, 1);
    const nbi_limits limits = at_gqa_limits(&c, rows, ctx);
    double visible = 0;
    for (uint32_t t = 0; t < rows; t++) visible += d.batch.pos[t] + 1;
    const double gmac = visible * heads * 2 * dim * 1e-9;
    const double bytes = (double)ctx * kv * 2 * (dtype == NBI_F8_E4M3 ? dim + 4 : 2 * dim);
    LEVELS(level)
    {
        if (level == NBI_CPU_REFERENCE) continue;
        nbi_cpu *cpu = op_open(level, 2, &limits);
        bench_run r = {.cpu = cpu, .gqa = &d};
        const double s = op_time(bench_once, &r, 9);
        printf("  gqa %-9s heads %2u/%u x %u ctx %6u rows %4u cache %-8s %9.1f us %6.1f GMAC/s "
               "%7.1f MB "
               "%5.1f%% of "
               "read bandwidth\n",
               nbi_cpu_level_name(level), heads, kv, dim, ctx, rows, nbi_dtype_name(dtype), s * 1e6,
               gmac / s, bytes * 1e-6, 100 * bytes / s / bandwidth);
        op_close(cpu);
    }
    at_free_gqa(&d);
}

static void bench_gqa(uint32_t heads, uint32_t kv, uint32_t dim, uint32_t ctx, uint32_t rows,
                      double bandwidth)
{
    bench_gqa_type(heads, kv, dim, ctx, rows, NBI_BF16, bandwidth);
}

/* A cache of codes beside one of BF16 values (docs/performance.md). */
static void bench_codes(double bandwidth)
{
    static const nbi_dtype types[] = {NBI_BF16, NBI_F8_E4M3};
    for (int i = 0; i < 2; i++) {
        bench_mla(20, 16384, 1, types[i], bandwidth);
        bench_mla(20, 512, 512, types[i], bandwidth);
        bench_gqa_type(32, 4, 128, 32768, 1, types[i], bandwidth);
        bench_gqa_type(8, 8, 128, 32768, 1, types[i], bandwidth);
        bench_gqa_type(32, 4, 128, 512, 512, types[i], bandwidth);
    }
}

static void bench(void)
{
    nbi_cpu *cpu = op_open(nbi_cpu_detect(), 2, NULL);
    const double bw = op_read_bandwidth(cpu->pool);
    op_close(cpu);
    printf("read bandwidth, 2 threads: %.1f GB/s\n", bw * 1e-9);
    bench_codes(bw);
    bench_mla(20, 128, 1, NBI_BF16, bw);
    bench_mla(20, 2048, 1, NBI_BF16, bw);
    bench_mla(20, 16384, 1, NBI_BF16, bw);
    bench_mla(20, 2048, 1, NBI_F32, bw);
    bench_mla(64, 2048, 1, NBI_BF16, bw);
    bench_mla(20, 512, 512, NBI_BF16, bw);
    /* The two forms of latent attention, without building keys and values (docs/models.md). */
    const uint32_t heads[] = {4, 20, 64}, contexts[] = {512, 2048, 8192};
    for (int h = 0; h < 3; h++)
        for (int c = 0; c < 3; c++) {
            bench_mla(heads[h], contexts[c], 128, NBI_BF16, bw);
            bench_gqa(heads[h], heads[h], 256, contexts[c], 128, bw);
        }
    bench_mla(20, 4608, 512, NBI_BF16, bw);
    bench_forms(bw);
    bench_gqa(20, 20, 256, 4608, 512, bw);
    bench_gqa(32, 4, 128, 512, 1, bw);
    bench_gqa(32, 4, 128, 32768, 1, bw);
    bench_gqa(32, 4, 128, 512, 512, bw);
    bench_gqa(8, 8, 128, 32768, 1, bw);
    bench_gqa(8, 8, 128, 512, 512, bw);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mla_shapes),     cmocka_unit_test(test_mla_long),
        cmocka_unit_test(test_mla_bits),       cmocka_unit_test(test_mla_expanded),
        cmocka_unit_test(test_gqa_shapes),     cmocka_unit_test(test_gqa_bits),
        cmocka_unit_test(test_mla_append),     cmocka_unit_test(test_gqa_append),
        cmocka_unit_test(test_codes_are_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
