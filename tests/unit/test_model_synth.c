/* Synthetic checkpoints of every shape, what inspect's census finds in them, and their way through
 * quantize. */
#include "cmocka_all.h"

#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/numfmt.h"
#include "model/census.h"
#include "model/quantize.h"
#include "model/synth.h"
#include "model/synth_parts.h"
#include "scratch.h"

/* Everything small, so that each shape takes milliseconds. */
static const char *const small[] = {
    "hidden_size=64",           "vocab_size=64",         "eos_token_id=1",  "num_attention_heads=4",
    "num_key_value_heads=2",    "q_lora_rank=32",        "kv_lora_rank=32", "intermediate_size=96",
    "moe_intermediate_size=48", "num_experts_per_tok=2", "n_group=1",       "topk_group=1"};

static nbi_synth_result make(const char *like, const char *out, nbi_synth_weights weights, bool mtp,
                             uint64_t seed, uint32_t threads)
{
    nbi_synth_options o = {.like = like,
                           .out_dir = out,
                           .n_layers = 5,
                           .n_experts = 4,
                           .sets = small,
                           .n_sets = sizeof small / sizeof *small,
                           .mtp = mtp,
                           .seed = seed,
                           .weights = weights,
                           .n_threads = threads};
    nbi_synth_result r;
    nb_error err;
    if (nbi_synth(&r, &o, &err) != NB_OK) fail_msg("%s: %s", like, err.text);
    return r;
}

static nbi_census open_census(const char *dir)
{
    nbi_census c;
    nb_error err;
    if (nbi_census_open(&c, dir, true, &err) != NB_OK) fail_msg("%s", err.text);
    return c;
}

/* Every shape in every weight kind is complete, sound, and has nothing that nobody reads. */
static void every_shape(void **state)
{
    (void)state;
    for (size_t i = 0; nbi_synth_shape_name(i); i++)
        for (int w = 0; w < NBI_SYNTH_WEIGHTS_COUNT; w++) {
            char *dir = scratch_make();
            const char *out = scratch_path(dir, "out");
            nbi_synth_result r =
                make(nbi_synth_shape_name(i), out, (nbi_synth_weights)w, w % 2, 3, 1);
            nbi_census c = open_census(out);
            assert_int_equal(c.config.n_layers, 5);
            assert_int_equal(c.config.n_experts, 4);
            assert_int_equal(nbi_checkpoint_count(c.ckpt), r.n_tensors);
            assert_int_equal(nbi_checkpoint_bytes(c.ckpt), r.bytes);
            assert_int_equal(nbi_checkpoint_unused(c.ckpt, 0), r.n_tensors);
            assert_true(c.has_mtp == (w % 2 && c.config.family != NBI_FAMILY_QWEN3_MOE));
            nbi_weight_kind routed = w == NBI_SYNTH_BF16  ? NBI_WEIGHT_BF16
                                     : w == NBI_SYNTH_FP8 ? NBI_WEIGHT_FP8_BLOCK
                                                          : NBI_WEIGHT_NVFP4;
            assert_int_equal(c.cells[NBI_COMPONENT_ROUTED][routed].modules,
                             (uint64_t)c.n_sparse * 4 * 3);
            assert_int_equal(
                c.cells[NBI_COMPONENT_ATTENTION][w == NBI_SYNTH_NVFP4_ALL ? NBI_WEIGHT_NVFP4
                                                 : w == NBI_SYNTH_FP8     ? NBI_WEIGHT_FP8_BLOCK
                                                                          : NBI_WEIGHT_BF16]
                        .modules > 0,
                1);
            assert_int_equal(c.convention, routed == NBI_WEIGHT_NVFP4 ? NBI_CONVENTION_MODELOPT
                                           : routed == NBI_WEIGHT_FP8_BLOCK ? NBI_CONVENTION_FP8
                                                                            : NBI_CONVENTION_NONE);
            assert_int_equal(c.quant.convention, c.convention);
            nbi_census_close(&c);
            scratch_remove(dir);
        }
}

static size_t read_all(const char *dir, char **data)
{
    size_t n;
    nb_error err;
    assert_int_equal(
        nbi_file_read(data, &n, scratch_path(dir, "model.safetensors"), (size_t)1 << 30, &err),
        NB_OK);
    return n;
}

/* The same seed gives the same bytes for any number of threads; another seed gives others. */
static void reproducible(void **state)
{
    char *dir = scratch_make(), *a, *b, *c;
    (void)state;
    make("glm-5.2", scratch_path(dir, "a"), NBI_SYNTH_NVFP4_MLP, true, 7, 1);
    make("glm-5.2", scratch_path(dir, "b"), NBI_SYNTH_NVFP4_MLP, true, 7, 3);
    make("glm-5.2", scratch_path(dir, "c"), NBI_SYNTH_NVFP4_MLP, true, 8, 3);
    size_t n = read_all(scratch_path(dir, "a"), &a);
    assert_int_equal(read_all(scratch_path(dir, "b"), &b), n);
    assert_int_equal(read_all(scratch_path(dir, "c"), &c), n);
    assert_memory_equal(a, b, n);
    assert_int_not_equal(memcmp(a, c, n), 0);
    nbi_free(a);
    nbi_free(b);
    nbi_free(c);
    scratch_remove(dir);
}

/* Rows have length about 1, whatever their kind: a normalised input gives outputs of order one. */
static void unit_rows(void **state)
{
    (void)state;
    for (int w = 0; w < NBI_SYNTH_WEIGHTS_COUNT; w++) {
        char *dir = scratch_make();
        nbi_checkpoint *c = NULL;
        nbi_arena arena = {0};
        nbi_matrix m;
        nb_error err;
        double sum = 0;
        make("qwen3-30b-a3b", scratch_path(dir, "out"), (nbi_synth_weights)w, false, 0, 1);
        assert_int_equal(nbi_checkpoint_open(&c, scratch_path(dir, "out"), &err), NB_OK);
        assert_int_equal(
            nbi_matrix_load(&m, c, &arena, "model.layers.1.mlp.experts.2.gate_proj", 0, 0, &err),
            NB_OK);
        for (uint32_t r = 0; r < m.rows; r++) {
            float row[64];
            nbi_matrix_row(&m, r, row);
            for (uint32_t i = 0; i < m.cols; i++) sum += (double)(row[i] * row[i]);
        }
        sum /= m.rows;
        if (!(sum > 0.8 && sum < 1.25))
            fail_msg("%s: mean square of a row is %g", nbi_synth_weights_name((nbi_synth_weights)w),
                     sum);
        nbi_arena_free(&arena);
        nbi_checkpoint_close(&c);
        scratch_remove(dir);
    }
}

static void sizes(void **state)
{
    char *dir = scratch_make();
    nbi_synth_result r;
    nb_error err;
    (void)state;
    nbi_synth_options o = {.like = "glm-4.7-flash",
                           .out_dir = scratch_path(dir, "out"),
                           .sets = small,
                           .n_sets = sizeof small / sizeof *small,
                           .weights = NBI_SYNTH_NVFP4_MLP,
                           .max_bytes = 2000000,
                           .n_threads = 1,
                           .shard_bytes = 500000};
    assert_int_equal(nbi_synth(&r, &o, &err), NB_OK);
    assert_true(r.bytes <= 2000000 && r.bytes > 1500000 && r.n_layers > 1 && r.n_layers < 47 &&
                r.n_experts == 64);
    nbi_census c = open_census(o.out_dir);
    assert_true(nbi_checkpoint_files(c.ckpt) >= 4);
    nbi_census_close(&c);
    assert_int_equal(nbi_synth(&r, &o, &err), NB_INVALID); /* the folder is there now */
    assert_non_null(strstr(err.text, "already exists"));
    static const struct {
        const char *like, *set, *says;
        uint64_t max_bytes;
    } bad[] = {
        {"glm-6", NULL, "no such shape", 0},
        {"glm-5", "novalue", "KEY=VALUE", 0},
        {"glm-5", "a.b=1", "no object", 0},
        {"glm-5", "hidden_size=0", "hidden_size", 0},
        {"glm-5", "rope_parameters.rope_type=linear", "\"linear\"", 0},
        {"glm-5", NULL, "--max-bytes", 1000000},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        nbi_synth_options b = {.like = bad[i].like,
                               .out_dir = scratch_path(dir, "bad"),
                               .sets = &bad[i].set,
                               .n_sets = bad[i].set != NULL,
                               .max_bytes = bad[i].max_bytes};
        assert_int_equal(nbi_synth(&r, &b, &err),
                         NB_INVALID + (i == 4 ? NB_UNSUPPORTED - NB_INVALID : 0));
        if (!strstr(err.text, bad[i].says))
            fail_msg("\"%s\" does not say \"%s\"", err.text, bad[i].says);
        assert_false(nbi_file_exists(scratch_path(dir, "bad")));
        assert_false(nbi_file_exists(scratch_path(dir, "bad.partial")));
    }
    scratch_remove(dir);
}

/* What one rank of tensor parallelism holds: configurations of the real shapes, and a checkpoint.
 */
static void shards(void **state)
{
    nbi_config c;
    nb_error err;
    json_t *json = NULL;
    (void)state;
    nbi_synth_options o = {.like = "glm-5", .shard_of_tp = 8};
    assert_int_equal(nbi_synth_config(&json, &o, &err), NB_OK);
    assert_int_equal(nbi_config_parse(&c, json, NULL, "glm-5", &err), NB_OK);
    assert_true(c.n_heads == 8 && c.moe_intermediate == 256 && c.intermediate == 1536 &&
                c.vocab == 19360 && c.hidden == 6144 && c.n_experts == 256 && c.q_lora == 2048 &&
                c.kv_lora == 512 && c.index_heads == 32);
    nbi_config_free(&c);
    json_decref(json);
    o = (nbi_synth_options){.like = "qwen3-30b-a3b", .shard_of_tp = 8}; /* 4 key-value heads */
    assert_int_equal(nbi_synth_config(&json, &o, &err), NB_OK);
    assert_int_equal(nbi_config_parse(&c, json, NULL, "qwen3", &err), NB_OK);
    assert_true(c.n_heads == 4 && c.n_kv_heads == 1 && c.moe_intermediate == 96);
    nbi_config_free(&c);
    json_decref(json);
    o = (nbi_synth_options){.like = "glm-4.7-flash", .shard_of_tp = 8}; /* 20 heads */
    assert_int_equal(nbi_synth_config(&json, &o, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "num_attention_heads is 20"));
    o = (nbi_synth_options){.like = "qwen3-30b-a3b", .shard_of_tp = 32}; /* 768 / 32 = 24 */
    assert_int_equal(nbi_synth_config(&json, &o, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "blocks of 16"));

    char *dir = scratch_make();
    nbi_synth_result r;
    const char *sets[sizeof small / sizeof *small + 1];
    memcpy(sets, small, sizeof small);
    sets[sizeof small / sizeof *small] = "moe_intermediate_size=64";
    o = (nbi_synth_options){.like = "glm-4.7-flash",
                            .out_dir = scratch_path(dir, "out"),
                            .sets = sets,
                            .n_sets = sizeof sets / sizeof *sets,
                            .n_layers = 2,
                            .shard_of_tp = 2,
                            .n_threads = 1};
    if (nbi_synth(&r, &o, &err) != NB_OK) fail_msg("%s", err.text);
    nbi_census census = open_census(o.out_dir);
    nbi_census_close(&census);
    scratch_remove(dir);
}

/* ---- quantize */

static void quantised(void **state)
{
    char *dir = scratch_make();
    nb_error err;
    nbi_quantize_result r;
    (void)state;
    make("glm-5.2", scratch_path(dir, "bf16"), NBI_SYNTH_BF16, true, 1, 1);
    scratch_write_text(scratch_path(dir, "bf16"), "tokenizer.json", "{}");
    char source[300];
    snprintf(source, sizeof source, "%s/bf16", dir);
    for (int scope = 0; scope < NBI_QUANTIZE_SCOPE_COUNT; scope++) {
        char out[300];
        snprintf(out, sizeof out, "%s/q%d", dir, scope);
        nbi_quantize_options o = {.model_dir = source,
                                  .out_dir = out,
                                  .scope = (nbi_quantize_scope)scope,
                                  .mtp = scope == 2,
                                  .n_threads = 2};
        if (nbi_quantize(&r, &o, &err) != NB_OK) fail_msg("%s", err.text);
        nbi_census c = open_census(out);
        assert_int_equal(nbi_checkpoint_unused(c.ckpt, 0), nbi_checkpoint_count(c.ckpt));
        assert_int_equal(nbi_checkpoint_bytes(c.ckpt), r.bytes);
        assert_int_equal(c.cells[NBI_COMPONENT_ROUTED][NBI_WEIGHT_NVFP4].modules,
                         4 * 3 * (scope == 2 ? 3 : 2));
        assert_int_equal(c.cells[NBI_COMPONENT_ROUTED][NBI_WEIGHT_BF16].modules,
                         scope == 2 ? 0 : 4 * 3);
        assert_int_equal(c.cells[NBI_COMPONENT_DENSE][NBI_WEIGHT_NVFP4].modules, scope ? 9 : 0);
        assert_int_equal(c.cells[NBI_COMPONENT_ATTENTION][NBI_WEIGHT_NVFP4].modules,
                         scope == 2 ? 30 : 0);
        assert_int_equal(c.unequal_pairs, 0);
        assert_string_equal(c.quant.algo, "W4A16_NVFP4");
        assert_true(nbi_quant_ignored(&c.quant, "lm_head"));
        assert_int_equal(nbi_quant_ignored(&c.quant, "model.layers.0.self_attn.o_proj"),
                         scope != 2);
        assert_int_equal(nbi_quant_ignored(&c.quant, "model.layers.5.mlp.experts.0.up_proj"),
                         scope != 2);
        assert_false(nbi_quant_ignored(&c.quant, "model.layers.4.mlp.experts.0.up_proj"));
        nbi_census_close(&c);
        assert_true(nbi_file_exists(scratch_path(out, "tokenizer.json")));
        assert_false(nbi_file_exists(scratch_path(out, "nibble-quantize.json")));
        char again[310];
        snprintf(again, sizeof again, "%s-again", out);
        nbi_quantize_options twice = {
            .model_dir = out, .out_dir = again, .scope = (nbi_quantize_scope)scope};
        assert_int_equal(nbi_quantize(&r, &twice, &err), NB_INVALID);
        assert_non_null(strstr(err.text, "nvfp4 already"));
    }
    scratch_remove(dir);
}

static void input_scales(void **state)
{
    char *dir = scratch_make(), source[300], scales[300], out[300], text[20000] = "{";
    nb_error err;
    nbi_quantize_result r;
    (void)state;
    snprintf(source, sizeof source, "%s/bf16", dir);
    snprintf(out, sizeof out, "%s/out", dir);
    snprintf(scales, sizeof scales, "%s/scales.json", dir);
    make("qwen3-30b-a3b", source, NBI_SYNTH_BF16, false, 1, 1);
    for (int layer = 0; layer < 5; layer++)
        for (int e = 0; e < 4; e++)
            snprintf(text + strlen(text), sizeof text - strlen(text),
                     "%s\"model.layers.%d.mlp.experts.%d.gate_proj\":0.25,\"model.layers.%d.mlp."
                     "experts.%d.up_proj\":0.5,"
                     "\"model.layers.%d.mlp.experts.%d.down_proj.input_scale\":0.125",
                     layer + e ? "," : "", layer, e, layer, e, layer, e);
    strcat(text, "}");
    scratch_write_text(dir, "scales.json", text);
    nbi_quantize_options o = {
        .model_dir = source, .out_dir = out, .scope = NBI_QUANTIZE_EXPERTS, .input_scales = scales};
    if (nbi_quantize(&r, &o, &err) != NB_OK) fail_msg("%s", err.text);
    nbi_census c = open_census(out);
    nbi_matrix m;
    assert_int_equal(c.without_input_scale, 0);
    assert_string_equal(c.quant.algo, "NVFP4");
    assert_int_equal(
        nbi_matrix_load(&m, c.ckpt, &c.arena, "model.layers.2.mlp.experts.1.gate_proj", 0, 0, &err),
        NB_OK);
    assert_true(m.input_scale == 0.5f); /* one activation, one scale */
    assert_int_equal(
        nbi_matrix_load(&m, c.ckpt, &c.arena, "model.layers.2.mlp.experts.1.down_proj", 0, 0, &err),
        NB_OK);
    assert_true(m.input_scale == 0.125f);
    nbi_census_close(&c);
    o.out_dir = scratch_path(dir, "out2");
    o.scope = NBI_QUANTIZE_ALL; /* now attention has none */
    assert_int_equal(nbi_quantize(&r, &o, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "no input scale for model.layers.0.self_attn.q_proj"));
    scratch_remove(dir);
}

/* Ends the process in the middle of a run, as a kill would. */
static void die_half_way(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    if (done > total / 2) kill(getpid(), SIGKILL);
}

/* A killed run leaves no output, is continued behind its complete shards, and gives the bytes of an
 * undisturbed one. */
static void resumed(void **state)
{
    char *dir = scratch_make(), source[300], a[300], b[300];
    nb_error err;
    nbi_quantize_result r;
    (void)state;
    snprintf(source, sizeof source, "%s/bf16", dir);
    snprintf(a, sizeof a, "%s/a", dir);
    snprintf(b, sizeof b, "%s/b", dir);
    make("glm-4.5-air", source, NBI_SYNTH_BF16, false, 1, 1);
    nbi_quantize_options o = {.model_dir = source,
                              .out_dir = a,
                              .scope = NBI_QUANTIZE_MLP,
                              .shard_bytes = 100000,
                              .n_threads = 1};
    if (nbi_quantize(&r, &o, &err) != NB_OK) fail_msg("%s", err.text);
    assert_int_equal(r.resumed_tensors, 0);
    o.out_dir = b;
    pid_t child = fork();
    if (child == 0) {
        o.progress = die_half_way;
        nbi_quantize(&r, &o, &err);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_false(nbi_file_exists(b));
    if (nbi_quantize(&r, &o, &err) != NB_OK) fail_msg("%s", err.text);
    assert_true(r.resumed_tensors > 0);
    char command[1000];
    snprintf(command, sizeof command, "diff -r '%s' '%s'", a, b);
    assert_int_equal(system(command), 0);
    /* A partial output of other options is not continued. */
    snprintf(command, sizeof command,
             "mv '%s' '%s.partial' && echo '{}' > '%s.partial/nibble-quantize.json'", b, b, b);
    assert_int_equal(system(command), 0);
    if (nbi_quantize(&r, &o, &err) != NB_OK) fail_msg("%s", err.text);
    assert_int_equal(r.resumed_tensors, 0);
    scratch_remove(dir);
}

static void poisoned_source(void **state)
{
    char *dir = scratch_make(), *data, source[300], out[300];
    nb_error err;
    nbi_quantize_result r;
    (void)state;
    snprintf(source, sizeof source, "%s/bf16", dir);
    snprintf(out, sizeof out, "%s/out", dir);
    make("qwen3-30b-a3b", source, NBI_SYNTH_BF16, false, 1, 1);
    size_t n = read_all(source, &data);
    nbi_checkpoint *c = NULL;
    assert_int_equal(nbi_checkpoint_open(&c, source, &err), NB_OK);
    const nbi_st_tensor *t =
        nbi_checkpoint_find(c, "model.layers.3.mlp.experts.1.down_proj.weight");
    const nbi_st_tensor *first = nbi_checkpoint_at(c, 0);
    size_t header = n - nbi_checkpoint_bytes(c), at = header + (size_t)(t->data - first->data);
    data[at + 48 * 2 * 5] = 0; /* row 5, first value: infinity */
    data[at + 48 * 2 * 5 + 1] = 0x7f;
    data[at + 48 * 2 * 5] = (char)0x80;
    nbi_checkpoint_close(&c);
    scratch_write(source, "model.safetensors", data, n);
    nbi_free(data);
    nbi_quantize_options o = {.model_dir = source, .out_dir = out, .scope = NBI_QUANTIZE_MLP};
    assert_int_equal(nbi_quantize(&r, &o, &err), NB_INVALID);
    if (!strstr(err.text, "model.layers.3.mlp.experts.1.down_proj: row 5: value 0 is infinite"))
        fail_msg("%s", err.text);
    assert_false(nbi_file_exists(out));
    scratch_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_shape),     cmocka_unit_test(reproducible),
        cmocka_unit_test(unit_rows),       cmocka_unit_test(sizes),
        cmocka_unit_test(shards),          cmocka_unit_test(quantised),
        cmocka_unit_test(input_scales),    cmocka_unit_test(resumed),
        cmocka_unit_test(poisoned_source),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
