/* Draft passes whose index lists are shared: what rows of later passes attend to. Through the model
 * alone, on a checkpoint whose indexer keeps four positions. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "model/model.h"
#include "scratch.h"

#define FROM NBI_TEST_SOURCE_DIR "/tests/golden/data/glm52-nvfp4-routed"

enum { SEQS = 4, LONGEST = 40, DRAFTS = 3, ROWS = 128, VOCAB_MAX = 512 };

typedef struct rig {
    nbi_backend *b;
    nbi_model *m;
    nbi_kv kv;
    int32_t ids[ROWS], pos[ROWS], row_seq[ROWS], fault[ROWS], hidden[ROWS], list[ROWS];
    int32_t first[SEQS + 1], len[SEQS], pages[SEQS], logit[SEQS];
    nbi_batch batch;
} rig;

static void open_rig(rig *r, const char *dir)
{
    nb_error err = {0};
    const nbi_backend_options bo = {.cpu_level = NBI_CPU_REFERENCE, .n_threads = 1};
    const nbi_model_options mo = {.dir = dir, .moe_runner = "auto", .use_mtp = true};
    *r = (rig){0};
    if (nbi_backend_open(&r->b, "cpu", &bo, &err) || nbi_model_open(&r->m, r->b, &mo, &err) ||
        nbi_model_reserve(r->m, ROWS, SEQS, SEQS, 64, &err) ||
        nbi_kv_create(&r->kv, r->b, nbi_model_config(r->m), NBI_F32, SEQS, &err))
        fail_msg("%s", err.text);
    assert_true(nbi_model_can_draft(r->m));
    assert_true(nbi_model_config(r->m)->vocab <= VOCAB_MAX);
}

static void close_rig(rig *r)
{
    nbi_kv_destroy(&r->kv, r->b);
    nbi_model_close(&r->m);
    nbi_backend_close(&r->b);
}

static int32_t token(const rig *r, uint32_t seq, uint32_t at)
{
    return (int32_t)((seq * 37 + at * 11 + 5) % nbi_model_config(r->m)->vocab);
}

/* Rows [from[i], to[i]) of sequence seqs[i], whose token at row p is that of p + shift. */
static void fill(rig *r, const uint32_t *seqs, uint32_t n, const uint32_t *from, const uint32_t *to,
                 uint32_t shift)
{
    uint32_t rows = 0, longest = 0;
    for (uint32_t i = 0; i < n; i++) {
        r->first[i] = (int32_t)rows;
        for (uint32_t p = from[i]; p < to[i]; p++, rows++) {
            r->ids[rows] = token(r, seqs[i], p + shift);
            r->pos[rows] = (int32_t)p;
            r->row_seq[rows] = (int32_t)i;
            r->fault[rows] = 0;
        }
        r->len[i] = (int32_t)to[i];
        r->pages[i] = (int32_t)seqs[i];
        r->logit[i] = (int32_t)rows - 1;
        if (to[i] > longest) longest = to[i];
    }
    r->first[n] = (int32_t)rows;
    r->batch = (nbi_batch){.n_rows = rows,
                           .n_seqs = n,
                           .n_logit_rows = n,
                           .page_stride = 1,
                           .max_len = longest,
                           .ids = r->ids,
                           .pos = r->pos,
                           .row_seq = r->row_seq,
                           .seq_first = r->first,
                           .seq_len = r->len,
                           .page_table = r->pages,
                           .logit_rows = r->logit,
                           .hidden_rows = r->hidden,
                           .list_rows = r->list,
                           .row_fault = r->fault};
}

typedef float result[DRAFTS][SEQS][VOCAB_MAX];

static void read_result(rig *r, result out, uint32_t pass, const uint32_t *seqs,
                        const float *logits)
{
    static float all[SEQS * VOCAB_MAX];
    const uint32_t n = r->batch.n_seqs, V = nbi_model_config(r->m)->vocab;
    nbi_model_read_logits(r->m, all, logits, n);
    for (uint32_t i = 0; i < n; i++)
        memcpy(out[pass][seqs[i]], all + (size_t)i * V, V * sizeof(float));
}

/* The prompts, then DRAFTS passes; the tokens of the drafts are given, so that results compare. */
static void draft(rig *r, const uint32_t *lengths, const uint32_t *seqs, uint32_t n, result out)
{
    uint32_t from[SEQS] = {0}, to[SEQS];
    float *logits;
    nb_error err = {0};
    for (uint32_t i = 0; i < n; i++) to[i] = lengths[seqs[i]];
    fill(r, seqs, n, from, to, 0);
    if (nbi_model_forward(r->m, &r->kv, &r->batch, &logits, &err)) fail_msg("%s", err.text);
    fill(r, seqs, n, from, to, 1);
    for (uint32_t t = 0; t < r->batch.n_rows; t++) r->hidden[t] = r->list[t] = (int32_t)t;
    for (uint32_t pass = 0; pass < DRAFTS; pass++) {
        if (nbi_model_draft(r->m, &r->kv, &r->batch, pass > 0, &logits, &err))
            fail_msg("%s", err.text);
        read_result(r, out, pass, seqs, logits);
        int32_t hidden[SEQS], list[SEQS];
        for (uint32_t i = 0; i < n; i++) {
            hidden[i] = r->logit[i];
            list[i] = r->list[r->logit[i]];
            from[i] = to[i]++;
        }
        fill(r, seqs, n, from, to, 1);
        memcpy(r->hidden, hidden, sizeof hidden);
        memcpy(r->list, list, sizeof list);
    }
}

/* Four positions are kept. Prompts of one and two tokens see everything in three passes, one of
 * four has a full list after the first, one of forty has left positions out. */
static const uint32_t lengths[SEQS] = {1, 4, LONGEST, 2}, everyone[SEQS] = {0, 1, 2, 3};

static void neighbours_change_no_bit(void **state)
{
    (void)state;
    static result together, alone;
    rig r;
    open_rig(&r, FROM);
    assert_int_equal(nbi_model_config(r.m)->index_topk, 4);
    assert_true(nbi_model_config(r.m)->index_share_mtp);
    draft(&r, lengths, everyone, SEQS, together);
    for (uint32_t s = 0; s < SEQS; s++) draft(&r, lengths, &everyone[s], 1, alone);
    assert_memory_equal(together, alone, sizeof alone);
    close_rig(&r);
}

/* The checkpoint with the word turned round: passes behind the first choose for themselves. */
static char *not_sharing(void)
{
    static const char *const files[] = {"hf_quant_config.json", "model.safetensors.index.json",
                                        "model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors"};
    char *dir = scratch_make();
    json_t *config = json_load_file(FROM "/config.json", 0, NULL);
    assert_true(json_is_true(json_object_get(config, "index_share_for_mtp_iteration")));
    json_object_set_new(config, "index_share_for_mtp_iteration", json_false());
    assert_int_equal(json_dump_file(config, scratch_path(dir, "config.json"), 0), 0);
    json_decref(config);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char from[400];
        snprintf(from, sizeof from, FROM "/%s", files[i]);
        assert_int_equal(symlink(from, scratch_path(dir, files[i])), 0);
    }
    return dir;
}

static void lists_are_shared_where_the_config_says_so(void **state)
{
    (void)state;
    static result shared, own;
    char *dir = not_sharing();
    rig r;
    open_rig(&r, FROM);
    draft(&r, lengths, everyone, SEQS, shared);
    close_rig(&r);
    open_rig(&r, dir);
    draft(&r, lengths, everyone, SEQS, own);
    close_rig(&r);
    scratch_remove(dir);
    assert_memory_equal(shared[0], own[0], sizeof own[0]);
    for (uint32_t pass = 1; pass < DRAFTS; pass++) {
        assert_memory_equal(shared[pass][0], own[pass][0], sizeof own[pass][0]);
        assert_memory_not_equal(shared[pass][2], own[pass][2], sizeof own[pass][2]);
    }
    assert_memory_equal(shared[1][3], own[1][3], sizeof own[1][3]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(neighbours_change_no_bit),
        cmocka_unit_test(lists_are_shared_where_the_config_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
