/* One model over several ranks: ranges, what a rank reads and holds, and the logits of every family
 * against one rank. Ranks are threads here (thread_comm.h); the model does not know. */
#include "cmocka_all.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/score.h"
#include "model/split.h"
#include "scratch.h"
#include "thread_comm.h"

#define GOLDEN NBI_TEST_SOURCE_DIR "/tests/golden/data"
#define TINY   NBI_TEST_SOURCE_DIR "/models/glm5-tiny"

/* Sums of parts are rounded once more per rank: norm of the difference over norm of the logits. */
#define BOUND 1e-5

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW true
#else
#define SLOW false
#endif

enum { RANKS_MAX = 8, CHUNK = 48, IDS_MAX = 144 };

typedef struct layout {
    uint32_t tp, ep;
    bool latents;
} layout;

/* ---------------------------------------------------------------- a run */

typedef struct rank_run {
    pthread_t thread;
    const char *dir;
    nbi_comm *comm; /* NULL: alone */
    nbi_shard shard;
    const int32_t *ids;
    uint32_t n_ids, vocab;
    float *logits; /* [n_ids, vocab] */
    uint64_t weight_bytes, planned, page_bytes;
    bool drafts; /* instead: a forward pass, and what the MTP layer makes of it */
    nb_status status;
    nb_error err;
} rank_run;

static nb_status keep(void *user, uint32_t position, const float *logits, nb_error *err)
{
    (void)err;
    rank_run *r = user;
    memcpy(r->logits + (size_t)position * r->vocab, logits, r->vocab * sizeof *logits);
    return NB_OK;
}

static nb_status plan(void *user, const nbi_config *c, uint64_t bytes, nb_error *err)
{
    (void)c, (void)err;
    ((rank_run *)user)->planned = bytes;
    return NB_OK;
}

/* The first CHUNK ids in one pass, then drafts behind all but the last of them; logits of those. */
static nb_status run_draft(rank_run *r, nbi_model *m, nbi_kv *kv)
{
    int32_t pos[CHUNK], zeros[CHUNK] = {0}, rows[CHUNK], fault[CHUNK] = {0}, pages[3] = {0, 1, 2};
    int32_t first[2] = {0, CHUNK}, length[1] = {CHUNK};
    for (int32_t i = 0; i < CHUNK; i++) pos[i] = rows[i] = i;
    nbi_batch batch = {.n_rows = CHUNK,
                       .n_seqs = 1,
                       .n_logit_rows = CHUNK,
                       .page_stride = 3,
                       .max_len = CHUNK,
                       .ids = r->ids,
                       .pos = pos,
                       .row_seq = zeros,
                       .seq_first = first,
                       .seq_len = length,
                       .page_table = pages,
                       .logit_rows = rows,
                       .hidden_rows = rows,
                       .list_rows = rows,
                       .row_fault = fault};
    float *logits;
    assert_true(nbi_model_can_draft(m) && r->n_ids >= CHUNK);
    NB_TRY(nbi_model_forward(m, kv, &batch, &logits, &r->err));
    NB_TRY(nbi_model_sync(m, &r->err));
    batch.ids = r->ids + 1;
    batch.n_rows = batch.n_logit_rows = r->n_ids = CHUNK - 1;
    first[1] = length[0] = CHUNK - 1;
    NB_TRY(nbi_model_draft(m, kv, &batch, false, &logits, &r->err));
    NB_TRY(nbi_model_sync(m, &r->err));
    nbi_model_read_logits(m, r->logits, logits, r->n_ids);
    return NB_OK;
}

static nb_status run_model(rank_run *r, nbi_backend *b, nbi_model **m, nbi_kv *kv)
{
    const nbi_model_options mo = {.dir = r->dir,
                                  .moe_runner = "auto",
                                  .verify_scales = true,
                                  .use_mtp = r->drafts,
                                  .comm = r->comm,
                                  .shard = r->shard,
                                  .plan = plan,
                                  .plan_user = r};
    NB_TRY(nbi_model_open(m, b, &mo, &r->err));
    r->vocab = nbi_model_config(*m)->vocab;
    r->weight_bytes = nbi_model_weight_bytes(*m);
    r->page_bytes = nbi_kv_page_bytes(nbi_model_local(*m), NBI_F32);
    r->logits = calloc((size_t)r->n_ids * r->vocab, sizeof *r->logits);
    NB_TRY(nbi_model_reserve(*m, CHUNK, 1, CHUNK, IDS_MAX, &r->err));
    NB_TRY(nbi_kv_create(kv, b, nbi_model_local(*m), NBI_F32, 3, &r->err));
    if (r->drafts) return run_draft(r, *m, kv);
    return nbi_score_run(*m, kv, r->ids, r->n_ids, CHUNK, keep, r, &r->err);
}

static void *run_rank(void *arg)
{
    rank_run *r = arg;
    nbi_backend *b = NULL;
    nbi_model *m = NULL;
    nbi_kv kv = {0};
    const nbi_backend_options bo = {.cpu_level = NBI_CPU_REFERENCE, .n_threads = 1};
    r->status = nbi_backend_open(&b, "cpu", &bo, &r->err);
    if (r->status == NB_OK) r->status = run_model(r, b, &m, &kv);
    if (b) nbi_kv_destroy(&kv, b);
    nbi_model_close(&m);
    nbi_backend_close(&b);
    nbi_comm_close(&r->comm);
    return NULL;
}

/* All ranks of a job; dirs[rank], or dirs[0] for all with one. */
static void run_job_as(rank_run *ranks, layout l, const char *const *dirs, uint32_t n_dirs,
                       const int32_t *ids, uint32_t n_ids, bool drafts)
{
    nbi_comm *comms[RANKS_MAX] = {0};
    if (l.tp > 1) thread_comm_open(comms, l.tp);
    for (uint32_t r = 0; r < l.tp; r++) {
        ranks[r] = (rank_run){.dir = dirs[r % n_dirs],
                              .comm = comms[r],
                              .ids = ids,
                              .n_ids = n_ids,
                              .drafts = drafts};
        assert_int_equal(nbi_shard_make(&ranks[r].shard, r, l.tp, l.ep, NULL), NB_OK);
        ranks[r].shard.latents = l.latents;
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]), 0);
    }
    for (uint32_t r = 0; r < l.tp; r++) pthread_join(ranks[r].thread, NULL);
}

static void run_job(rank_run *ranks, layout l, const char *const *dirs, uint32_t n_dirs,
                    const int32_t *ids, uint32_t n_ids)
{
    run_job_as(ranks, l, dirs, n_dirs, ids, n_ids, false);
}

static void free_job(rank_run *ranks, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) free(ranks[r].logits);
}

/* The longest of a case's sequences, or the tiny model's own. */
static uint32_t read_ids(const char *dir, int32_t *ids)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tokens.json", dir);
    json_t *all = json_load_file(path, 0, NULL);
    uint32_t n = 0;
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *one = json_array_get(all, i);
        if (json_array_size(one) < n || json_array_size(one) > IDS_MAX) continue;
        n = (uint32_t)json_array_size(one);
        for (uint32_t k = 0; k < n; k++)
            ids[k] = (int32_t)json_integer_value(json_array_get(one, k));
    }
    json_decref(all);
    if (all) return n;
    for (n = 0; n < 24; n++) ids[n] = (int32_t)(1 + n * 37 % 500);
    return n;
}

static uint32_t largest(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* Distance of every position's logits; the token that greedy decoding takes is the same. */
static void compare(const rank_run *got, const rank_run *want, const char *what)
{
    assert_int_equal(got->vocab, want->vocab);
    for (uint32_t t = 0; t < want->n_ids; t++) {
        const float *a = got->logits + (size_t)t * want->vocab,
                    *b = want->logits + (size_t)t * want->vocab;
        double apart = 0, size = 0;
        for (uint32_t i = 0; i < want->vocab; i++) {
            apart += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
            size += (double)b[i] * (double)b[i];
        }
        if (!(sqrt(apart / size) <= BOUND))
            fail_msg("%s: logits of position %u differ by %.3g", what, t, sqrt(apart / size));
        const uint32_t id = largest(a, want->vocab), other = largest(b, want->vocab);
        if (id != other && (double)(b[other] - b[id]) > 2 * BOUND * sqrt(size))
            fail_msg("%s: position %u chooses %u, one rank %u", what, t, id, other);
    }
}

static void compare_job(const rank_run *ranks, layout l, const rank_run *want, const char *dir)
{
    for (uint32_t r = 0; r < l.tp; r++) {
        char what[600];
        snprintf(what, sizeof what, "%s, tp %u, ep %u, rank %u", dir, l.tp, l.ep, r);
        if (ranks[r].status != NB_OK) fail_msg("%s: %s", what, ranks[r].err.text);
        compare(&ranks[r], want, what);
        const size_t bytes = (size_t)want->n_ids * want->vocab * sizeof(float);
        if (memcmp(ranks[r].logits, ranks[0].logits, bytes) != 0)
            fail_msg("%s: other bits than rank 0", what);
    }
}

static void check_dir(const char *dir, const layout *layouts, size_t n)
{
    int32_t ids[IDS_MAX];
    const uint32_t n_ids = read_ids(dir, ids);
    rank_run one[1], ranks[RANKS_MAX];
    run_job(one, (layout){1, 1, false}, &dir, 1, ids, n_ids);
    if (one->status != NB_OK) fail_msg("%s: %s", dir, one->err.text);
    for (size_t i = 0; i < n; i++) {
        run_job(ranks, layouts[i], &dir, 1, ids, n_ids);
        compare_job(ranks, layouts[i], one, dir);
        uint64_t held = 0;
        for (uint32_t r = 0; r < layouts[i].tp; r++) {
            held += ranks[r].weight_bytes;
            assert_true(ranks[r].weight_bytes < one->weight_bytes);
        }
        assert_true(held >= one->weight_bytes); /* what is not split is there several times */
        free_job(ranks, layouts[i].tp);
    }
    free_job(one, 1);
}

static void test_families(void **state)
{
    (void)state;
    /* Ranks without heads (3 over 4), without experts (3 over 4) and with a share of a key head (2
     * over 4) are among these. */
    static const layout layouts[] = {
        {4, 2, false}, {2, 1, false}, {4, 1, false}, {4, 4, false}, {2, 2, false}};
    const size_t n_layouts = SLOW ? 2 : sizeof layouts / sizeof *layouts;
    DIR *d = opendir(GOLDEN);
    assert_non_null(d);
    uint32_t n = 0;
    for (const struct dirent *e = readdir(d); e; e = readdir(d)) {
        char dir[512];
        if (e->d_name[0] == '.') continue;
        snprintf(dir, sizeof dir, "%s/%s", GOLDEN, e->d_name);
        check_dir(dir, layouts, n_layouts);
        n++;
    }
    closedir(d);
    assert_true(n >= 26);
}

static void test_embedded(void **state)
{
    (void)state;
    static const layout layouts[] = {{2, 1, false}, {4, 4, false}, {4, 2, false},
                                     {3, 1, false}, {2, 2, true},  {4, 1, true}};
    check_dir(TINY, layouts, sizeof layouts / sizeof *layouts);
}

/* Latents split by columns: every golden case has the logits of one rank, or is refused by all
 * ranks with the same sentence. */
static void test_latents(void **state)
{
    (void)state;
    static const layout layouts[] = {{2, 1, true}, {4, 2, true}};
    uint32_t done = 0, refused = 0;
    DIR *d = opendir(GOLDEN);
    assert_non_null(d);
    for (const struct dirent *e = readdir(d); e; e = readdir(d)) {
        char dir[512];
        const char *const at = dir;
        int32_t ids[IDS_MAX];
        rank_run one[1], ranks[RANKS_MAX];
        if (e->d_name[0] == '.' || (SLOW && strncmp(e->d_name, "glm5", 4) != 0)) continue;
        snprintf(dir, sizeof dir, "%s/%s", GOLDEN, e->d_name);
        const uint32_t n_ids = read_ids(dir, ids);
        run_job(one, (layout){1, 1, false}, &at, 1, ids, n_ids);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            run_job(ranks, layouts[i], &at, 1, ids, n_ids);
            if (ranks[0].status == NB_UNSUPPORTED) {
                for (uint32_t r = 0; r < layouts[i].tp; r++)
                    assert_string_equal(ranks[r].err.text, ranks[0].err.text);
                assert_non_null(strstr(ranks[0].err.text, "--shard-latents: "));
                refused++;
            } else {
                compare_job(ranks, layouts[i], one, dir);
                done++;
            }
            free_job(ranks, layouts[i].tp);
        }
        free_job(one, 1);
    }
    closedir(d);
    print_message("%u layouts with split latents, %u refused\n", done, refused);
    assert_true(done >= (SLOW ? 4 : 16) && (SLOW || refused >= 8));
}

/* ---------------------------------------------------------------- ranges */

static void test_parts(void **state)
{
    (void)state;
    static const uint32_t heads[8] = {3, 3, 3, 3, 2, 2, 2, 2};
    uint32_t at = 0;
    for (uint32_t r = 0; r < 8; r++) {
        const nbi_range p = nbi_split_part(20, 1, r, 8);
        assert_int_equal(p.first, at);
        assert_int_equal(p.n, heads[r]);
        at += p.n;
    }
    assert_int_equal(at, 20);
    /* Whole units; the last is what is left; ranks without any begin at the end. */
    static const uint32_t partial[4][2] = {{0, 128}, {128, 16}, {144, 0}, {144, 0}};
    for (uint32_t r = 0; r < 4; r++) {
        const nbi_range p = nbi_split_part(144, 128, r, 4);
        assert_int_equal(p.first, partial[r][0]);
        assert_int_equal(p.n, partial[r][1]);
    }
    for (uint32_t n = 0; n < 300; n += 7)
        for (uint32_t unit = 1; unit <= 128; unit *= 2)
            for (uint32_t size = 1; size <= 8; size++) {
                at = 0;
                for (uint32_t r = 0; r < size; r++) {
                    const nbi_range p = nbi_split_part(n, unit, r, size);
                    assert_int_equal(p.first, at);
                    assert_true(p.n % unit == 0 || p.first + p.n == n);
                    at += p.n;
                }
                assert_int_equal(at, n);
            }
}

static void test_columns(void **state)
{
    (void)state;
    const nbi_weight_kind nvfp4[3] = {NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4},
                          fp8[3] = {NBI_WEIGHT_FP8_BLOCK, NBI_WEIGHT_FP8_BLOCK,
                                    NBI_WEIGHT_FP8_BLOCK},
                          mixed[3] = {NBI_WEIGHT_BF16, NBI_WEIGHT_BF16, NBI_WEIGHT_NVFP4};
    /* GLM-5's experts over eight ranks. */
    for (uint32_t r = 0; r < 8; r++) {
        assert_int_equal(nbi_split_inter(2048, nvfp4, r, 8).n, 256);
        assert_int_equal(nbi_split_inter(2048, fp8, r, 8).first, 256 * r);
    }
    assert_int_equal(nbi_split_inter(1536, nvfp4, 7, 8).n, 192);
    assert_int_equal(nbi_split_inter(1408, fp8, 0, 8).n, 256); /* 11 blocks: 2, 2, 2, 1, 1, ... */
    assert_int_equal(nbi_split_inter(1408, fp8, 3, 8).n, 128);
    assert_int_equal(nbi_split_inter(144, fp8, 1, 2).n, 16);
    assert_int_equal(nbi_split_inter(48, mixed, 0, 2).n, 32); /* 16-wide blocks: 2 and 1 */
    assert_int_equal(nbi_split_inter(48, mixed, 1, 2).n, 16);
    assert_int_equal(nbi_split_inter(48, mixed, 3, 4).n, 0);
}

/* ---------------------------------------------------------------- what a rank reads */

/* Ones into what other ranks have of a tensor [n, ...]: all but entries [keep.first, + keep.n). */
static void spoil_but(uint8_t *data, size_t bytes, size_t n, nbi_range keep)
{
    const size_t each = bytes / n;
    memset(data, 0xff, keep.first * each);
    memset(data + (keep.first + keep.n) * each, 0xff, (n - keep.first - keep.n) * each);
}

static bool ends_with(const char *s, const char *end)
{
    const size_t n = strlen(s), k = strlen(end);
    return n >= k && !strcmp(s + n - k, end);
}

/* The file without what only other ranks need. Returns how many tensors lost something. */
static uint32_t spoil_file(uint8_t *file, const nbi_split *s, uint32_t n_heads)
{
    static const nbi_range none = {0, 0};
    uint64_t header;
    memcpy(&header, file, sizeof header);
    json_t *all = json_loadb((const char *)file + 8, header, 0, NULL);
    const char *name;
    json_t *tensor;
    uint32_t n = 0;
    assert_non_null(all);
    json_object_foreach(all, name, tensor)
    {
        const json_t *at = json_object_get(tensor, "data_offsets"),
                     *shape = json_object_get(tensor, "shape");
        if (!at) continue;
        const size_t begin = (size_t)json_integer_value(json_array_get(at, 0)),
                     bytes = (size_t)json_integer_value(json_array_get(at, 1)) - begin,
                     rows = (size_t)json_integer_value(json_array_get(shape, 0));
        uint8_t *data = file + 8 + header + begin;
        if (nbi_split_foreign(s, name)) {
            spoil_but(data, bytes, 1, none);
        } else if (strstr(name, "embed_tokens.weight") || strstr(name, "lm_head.weight")) {
            spoil_but(data, bytes, rows, s->vocab);
        } else if (ends_with(name, "q_b_proj.weight") || ends_with(name, "kv_b_proj.weight")) {
            const uint32_t each = (uint32_t)rows / n_heads;
            spoil_but(data, bytes, rows, (nbi_range){s->heads.first * each, s->heads.n * each});
        } else if (strstr(name, "experts.gate_up_proj") || strstr(name, "experts.down_proj")) {
            if (json_array_size(shape) < 3) continue; /* one scale for all */
            spoil_but(data, bytes, rows, s->experts);
        } else {
            continue;
        }
        n++;
    }
    json_decref(all);
    return n;
}

static uint32_t spoil_copy(const char *from, const char *to, const nbi_split *s, uint32_t n_heads)
{
    DIR *d = opendir(from);
    uint32_t n = 0;
    assert_non_null(d);
    for (const struct dirent *e = readdir(d); e; e = readdir(d)) {
        if (e->d_name[0] == '.' || strstr(e->d_name, ".npy")) continue;
        FILE *f = fopen(scratch_path(from, e->d_name), "rb");
        assert_non_null(f);
        fseek(f, 0, SEEK_END);
        const size_t bytes = (size_t)ftell(f);
        uint8_t *file = malloc(bytes + 1);
        rewind(f);
        assert_int_equal(fread(file, 1, bytes, f), bytes);
        fclose(f);
        if (strstr(e->d_name, ".safetensors") && !strstr(e->d_name, ".json"))
            n += spoil_file(file, s, n_heads);
        scratch_write(to, e->d_name, file, bytes);
        free(file);
    }
    closedir(d);
    return n;
}

/* Every rank has a checkpoint of its own in which what the others have is full of NaN. */
static void check_reads(const char *name, layout l, uint32_t least)
{
    char dir[512];
    const char *const whole = dir;
    snprintf(dir, sizeof dir, "%s/%s", GOLDEN, name);
    int32_t ids[IDS_MAX];
    const uint32_t n_ids = read_ids(dir, ids);
    rank_run one[1], ranks[RANKS_MAX];
    char *dirs[RANKS_MAX];
    run_job(one, (layout){1, 1, false}, &whole, 1, ids, n_ids);
    for (uint32_t r = 0; r < l.tp; r++) {
        nbi_config c;
        nbi_checkpoint *ckpt;
        nbi_shard shard;
        nbi_split s;
        assert_int_equal(nbi_config_load(&c, dir, NULL), NB_OK);
        assert_int_equal(nbi_checkpoint_open(&ckpt, dir, NULL), NB_OK);
        assert_int_equal(nbi_shard_make(&shard, r, l.tp, l.ep, NULL), NB_OK);
        assert_int_equal(nbi_split_make(&s, &shard, &c, ckpt, c.n_layers, NULL), NB_OK);
        dirs[r] = scratch_make();
        assert_true(spoil_copy(dir, dirs[r], &s, c.n_heads) >= least);
        nbi_checkpoint_close(&ckpt);
        nbi_config_free(&c);
    }
    run_job(ranks, l, (const char *const *)dirs, l.tp, ids, n_ids);
    compare_job(ranks, l, one, dir);
    for (uint32_t r = 0; r < l.tp; r++) scratch_remove(dirs[r]);
    free_job(ranks, l.tp);
    free_job(one, 1);
}

static void test_reads(void **state)
{
    (void)state;
    check_reads("glm5-bf16", (layout){2, 2, false}, 20);
    check_reads("glm52-mixed-compressed", (layout){4, 2, false}, 20);
    check_reads("glm5-fused-bf16", (layout){4, 4, false}, 8);
    check_reads("glm5-fused-nvfp4", (layout){2, 2, false}, 6);
    check_reads("qwen3-tied-f32", (layout){2, 2, false}, 1);
}

/* ---------------------------------------------------------------- plans, refusals, failures */

static void test_plan(void **state)
{
    (void)state;
    static const layout layouts[] = {
        {1, 1, false}, {2, 1, false}, {4, 4, false}, {4, 2, false}, {4, 2, true}};
    const char *const dir = TINY;
    int32_t ids[IDS_MAX];
    rank_run ranks[RANKS_MAX];
    uint64_t page = 0;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        run_job(ranks, layouts[i], &dir, 1, ids, read_ids(dir, ids));
        for (uint32_t r = 0; r < layouts[i].tp; r++) {
            assert_int_equal(ranks[r].status, NB_OK);
            const double planned = (double)ranks[r].planned, held = (double)ranks[r].weight_bytes;
            if (!(planned > 0.9 * held && planned < 1.25 * held))
                fail_msg("rank %u of %u: %.0f bytes planned, %.0f held", r, layouts[i].tp, planned,
                         held);
            if (!page) page = ranks[r].page_bytes;
            assert_int_equal(ranks[r].page_bytes, page); /* latents are whole everywhere */
        }
        free_job(ranks, layouts[i].tp);
    }
    /* Key heads are split, and one is shared when there are fewer than ranks. */
    const char *const gqa = GOLDEN "/qwen3-bf16";
    static const uint64_t parts[] = {1, 2, 2};
    for (uint32_t i = 0; i < 3; i++) {
        run_job(ranks, (layout){1u << i, 1, false}, &gqa, 1, ids, read_ids(gqa, ids));
        if (!i) page = ranks[0].page_bytes;
        for (uint32_t r = 0; r < 1u << i; r++)
            assert_int_equal(ranks[r].page_bytes * parts[i], page);
        free_job(ranks, 1u << i);
    }
}

/* A rank that cannot load leaves; the others end with a sentence. */
static void test_a_rank_fails(void **state)
{
    (void)state;
    char *broken = scratch_make();
    const char *const dirs[2] = {TINY, broken};
    int32_t ids[IDS_MAX];
    rank_run ranks[2];
    run_job(ranks, (layout){2, 1, false}, dirs, 2, ids, read_ids(TINY, ids));
    assert_int_equal(ranks[0].status, NB_CLOSED);
    assert_string_equal(ranks[0].err.text, "a rank is gone");
    assert_int_equal(ranks[1].status, NB_NOT_FOUND);
    free_job(ranks, 2);
    scratch_remove(broken);
}

/* The MTP layer is split like any other. */
static void test_drafts(void **state)
{
    (void)state;
    static const char *const cases[] = {"glm5-bf16", "glm52-nvfp4-routed", "glm5-nvfp4-mlp"};
    static const layout layouts[] = {{2, 1, false}, {2, 2, false}, {4, 2, false}, {2, 1, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char dir[512];
        const char *const at = dir;
        snprintf(dir, sizeof dir, "%s/%s", GOLDEN, cases[i]);
        int32_t ids[IDS_MAX];
        const uint32_t n_ids = read_ids(dir, ids);
        rank_run one[1], ranks[RANKS_MAX];
        run_job_as(one, (layout){1, 1, false}, &at, 1, ids, n_ids, true);
        if (one->status != NB_OK) fail_msg("%s: %s", dir, one->err.text);
        for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
            run_job_as(ranks, layouts[k], &at, 1, ids, n_ids, true);
            compare_job(ranks, layouts[k], one, dir);
            free_job(ranks, layouts[k].tp);
        }
        free_job(one, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts),    cmocka_unit_test(test_columns),
        cmocka_unit_test(test_reads),    cmocka_unit_test(test_drafts),
        cmocka_unit_test(test_plan),     cmocka_unit_test(test_a_rank_fails),
        cmocka_unit_test(test_families), cmocka_unit_test(test_embedded),
        cmocka_unit_test(test_latents),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
