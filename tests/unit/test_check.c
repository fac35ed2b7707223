/* The gate finds kernels that compute wrongly: `nibble check` exits with 1, and an engine that is
 * to check first does not open. The faults are planted between the model and the real backend and
 * runner: the link wraps the two functions that hand them out (tests/CMakeLists.txt). */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "model/gate.h"
#include "model/synth.h"
#include "scratch.h"

typedef enum fault {
    NONE,
    LINEAR_SCALE,    /* every output 10 % too large */
    LINEAR_LAST_ROW, /* one output row of many tokens is not written */
    NORM_DELTA,      /* the residual is not added */
    LATENT_VALUE,    /* one head's value is another's */
    LATENT_APPEND,   /* q is not rotated */
    CHOSEN_POSITION, /* an index that misses the best positions */
    EXPERT_VALUE,    /* one value of one row */
    EXPERT_SWAPPED,  /* prepared with gate and up changed */
    EXPERT_SCALE,    /* up has the global scale of gate times 1.2 */
    EXPERT_BATCH,    /* right alone, other bits together */
    N_FAULTS
} fault;

static const char *const names[N_FAULTS] = {"none",          "linear, scale", "linear, last row",
                                            "norm, delta",   "latent, value", "latent, append",
                                            "index, list",   "expert, value", "expert, swapped",
                                            "expert, scale", "expert, batch"};
static const char *const kinds[N_FAULTS] = {NULL,        "linear",    "linear",    "mlp",
                                            "attention", "attention", "attention", "runner",
                                            "runner",    "runner",    "runner"};

static fault planted;
static nbi_backend_ops bad_ops;
static const nbi_backend_ops *good_ops;
static nbi_moe_runner_ops bad_runner;
static const nbi_moe_runner_ops *good_runner;

static float get(nbi_backend *b, const void *at)
{
    float v;
    b->ops->download(b, &v, at, sizeof v);
    return v;
}

static void put(nbi_backend *b, void *at, float v)
{
    b->ops->upload(b, at, &v, sizeof v);
    assert_int_equal(b->ops->sync(b, NULL), NB_OK);
}

static void bad_linear(nbi_backend *b, const nbi_linear_args *a)
{
    const uint32_t rows = a->w->host.rows;
    float *y = a->y;
    if (planted == LINEAR_LAST_ROW && a->n_rows > 8) {
        nbi_linear_args fewer = *a;
        fewer.n_rows--;
        good_ops->linear(b, &fewer);
        return;
    }
    good_ops->linear(b, a);
    for (uint32_t i = 0; planted == LINEAR_SCALE && i < rows; i++)
        put(b, y + i, 1.1f * get(b, y + i));
}

static void bad_rmsnorm(nbi_backend *b, const nbi_rmsnorm_args *a)
{
    nbi_rmsnorm_args other = *a;
    other.delta = NULL;
    good_ops->rmsnorm(b, &other);
}

static void bad_mla_append(nbi_backend *b, const nbi_mla_append_args *a)
{
    const size_t at = a->nope_dim; /* of row 0, head 0: the rotated part */
    float q[2] = {get(b, (float *)a->q + at), get(b, (float *)a->q + at + 1)};
    good_ops->mla_append(b, a);
    for (int i = 0; i < 2; i++) put(b, (float *)a->q + at + i, q[i] + 1);
}

static void bad_mla_attend(nbi_backend *b, const nbi_mla_attend_args *a)
{
    good_ops->mla_attend(b, a);
    put(b, a->out, get(b, (float *)a->out + a->v_dim));
}

/* The list of row 0 becomes the first positions. */
static void bad_index_select(nbi_backend *b, const nbi_index_select_args *a)
{
    good_ops->index_select(b, a);
    for (int32_t i = 0; i < (int32_t)a->topk; i++) b->ops->upload(b, a->select + i, &i, sizeof i);
    assert_int_equal(b->ops->sync(b, NULL), NB_OK);
}

static void bad_run(nbi_backend *b, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    good_runner->run(b, l, a);
    float *out = a->out;
    if (planted == EXPERT_VALUE) put(b, out, get(b, out) + 1);
    if (planted == EXPERT_BATCH && a->n_rows > 8) put(b, out, get(b, out) * 1.000001f);
}

static nb_status bad_prepare(nbi_backend *b, nbi_moe_layer **out, const nbi_moe_experts *e,
                             nb_error *err)
{
    nbi_moe_experts other = *e;
    const uint32_t n = nbi_moe_n_all(&e->shape);
    nbi_matrix *up = calloc(n, sizeof *up);
    assert_non_null(up);
    if (planted == EXPERT_SWAPPED) {
        other.gate = e->up;
        other.up = e->gate;
    } else {
        memcpy(up, e->up, n * sizeof *up);
        for (uint32_t i = 0; i < n; i++) up[i].global_scale = 1.2f * e->gate[i].global_scale;
        other.up = up;
    }
    const nb_status st = good_runner->prepare(b, out, &other, err);
    free(up);
    return st;
}

nb_status __real_nbi_backend_open(nbi_backend **out, const char *name,
                                  const nbi_backend_options *opt, nb_error *err);
nb_status __wrap_nbi_backend_open(nbi_backend **out, const char *name,
                                  const nbi_backend_options *opt, nb_error *err)
{
    NB_TRY(__real_nbi_backend_open(out, name, opt, err));
    good_ops = (*out)->ops;
    bad_ops = *good_ops;
    if (planted == LINEAR_SCALE || planted == LINEAR_LAST_ROW) bad_ops.linear = bad_linear;
    if (planted == NORM_DELTA) bad_ops.rmsnorm = bad_rmsnorm;
    if (planted == LATENT_VALUE) bad_ops.mla_attend = bad_mla_attend;
    if (planted == LATENT_APPEND) bad_ops.mla_append = bad_mla_append;
    if (planted == CHOSEN_POSITION) bad_ops.index_select = bad_index_select;
    (*out)->ops = &bad_ops;
    return NB_OK;
}

nb_status __real_nbi_moe_runner_choose(const nbi_moe_runner_ops **out, const char *name,
                                       const nbi_backend *b, const nbi_moe_shape *shape,
                                       nb_error *err);
nb_status __wrap_nbi_moe_runner_choose(const nbi_moe_runner_ops **out, const char *name,
                                       const nbi_backend *b, const nbi_moe_shape *shape,
                                       nb_error *err)
{
    NB_TRY(__real_nbi_moe_runner_choose(out, name, b, shape, err));
    good_runner = *out;
    bad_runner = *good_runner;
    if (planted == EXPERT_VALUE || planted == EXPERT_BATCH) bad_runner.run = bad_run;
    if (planted == EXPERT_SWAPPED || planted == EXPERT_SCALE) bad_runner.prepare = bad_prepare;
    *out = &bad_runner;
    return NB_OK;
}

/* On CUDA a small model: the same kernels emulated take seconds for a real one. */
#ifdef NBI_TEST_CHECK_CUDA
#define DEVICE "cuda"
static char model_dir[512], *scratch_dir;
#else
#define DEVICE "cpu"
static char model_dir[] = NBI_TEST_SOURCE_DIR "/models/glm5-tiny";
#endif

static char last_error[NB_ERROR_TEXT_MAX];

/* What an engine says that is to check itself; NULL: it opens. */
static const char *open_checked(const char *level)
{
    nb_engine_options o;
    nb_engine *e = NULL;
    nb_error err = {0};
    nb_engine_options_default(&o);
    o.model_dir = model_dir;
    o.device = DEVICE;
    o.cpu_level = level;
    o.check_kernels = true;
    o.kv_tokens = 2048;
    const nb_status st = nb_engine_open(&e, &o, &err);
    nb_engine_close(&e);
    snprintf(last_error, sizeof last_error, "%s", err.text);
    assert_true(st == NB_OK || st == NB_NUMERIC);
    return st == NB_OK ? NULL : last_error;
}

static void engines_refuse_planted_faults(void **state)
{
    (void)state;
    for (planted = NONE; planted < N_FAULTS; planted++) {
        const char *why = open_checked("auto");
        if (!why != !kinds[planted] ||
            (why && strncmp(why, kinds[planted], strlen(kinds[planted]))))
            fail_msg("%s: %s", names[planted], why ? why : "not found");
        print_message("%-18s %s\n", names[planted], why ? why : "fine");
    }
    planted = NONE;
}

#ifndef NBI_TEST_CHECK_CUDA
static void every_level_is_right(void **state)
{
    (void)state;
    for (int l = 0; l <= (int)nbi_cpu_detect(); l++) {
        const char *why = open_checked(nbi_cpu_level_name((nbi_cpu_level)l));
        if (why) fail_msg("%s: %s", nbi_cpu_level_name((nbi_cpu_level)l), why);
    }
}

static int run_check(char **extra, int n)
{
    char *argv[16] = {"check",    "--model", NBI_TEST_SOURCE_DIR "/models/glm5-tiny",
                      "--device", DEVICE,    "--json"};
    int argc = 6;
    for (int i = 0; i < n; i++) argv[argc++] = extra[i];
    return nbi_cmd_check(argc, argv);
}

static void command_exits_with_the_truth(void **state)
{
    (void)state;
    char *alone[] = {"--moe-runner-backend", "auto"};
    char *unknown[] = {"--moe-runner-backend", "cublas"};
    char *attention[] = {"--attention-backend", "trtllm_mla"};
    assert_int_equal(run_check(alone, 2), NBI_EXIT_OK);
    planted = EXPERT_SCALE;
    assert_int_equal(run_check(alone, 2), NBI_EXIT_FAILED);
    planted = LATENT_VALUE;
    assert_int_equal(run_check(alone, 2), NBI_EXIT_FAILED);
    planted = NONE;
    assert_int_equal(run_check(unknown, 2), NBI_EXIT_FAILED);
    assert_int_equal(run_check(attention, 2), NBI_EXIT_FAILED);
}

#endif

#ifdef NBI_TEST_CHECK_CUDA
static int make_model(void **state)
{
    (void)state;
    static const char *const sets[] = {"hidden_size=256",
                                       "num_attention_heads=2",
                                       "num_key_value_heads=2",
                                       "q_lora_rank=128",
                                       "kv_lora_rank=64",
                                       "qk_nope_head_dim=32",
                                       "qk_rope_head_dim=16",
                                       "qk_head_dim=48",
                                       "v_head_dim=32",
                                       "index_n_heads=2",
                                       "index_head_dim=32",
                                       "index_topk=64",
                                       "intermediate_size=128",
                                       "moe_intermediate_size=64",
                                       "num_experts_per_tok=2",
                                       "first_k_dense_replace=1",
                                       "vocab_size=256",
                                       "head_dim=16",
                                       "max_position_embeddings=512"};
    const nbi_synth_options options = {.like = "glm-5",
                                       .out_dir = model_dir,
                                       .n_layers = 2,
                                       .n_experts = 8,
                                       .sets = sets,
                                       .n_sets = sizeof sets / sizeof *sets,
                                       .seed = 1,
                                       .weights = NBI_SYNTH_NVFP4_MLP};
    nbi_synth_result made;
    nb_error err = {0};
    scratch_dir = scratch_make();
    snprintf(model_dir, sizeof model_dir, "%s", scratch_path(scratch_dir, "model"));
    if (nbi_synth(&made, &options, &err) == NB_OK) return 0;
    print_error("%s\n", err.text);
    return -1;
}

static int remove_model(void **state)
{
    (void)state;
    scratch_remove(scratch_dir);
    return 0;
}
#else
#define make_model   NULL
#define remove_model NULL
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(engines_refuse_planted_faults),
#ifndef NBI_TEST_CHECK_CUDA
        cmocka_unit_test(every_level_is_right),
        cmocka_unit_test(command_exits_with_the_truth),
#endif
    };
    return cmocka_run_group_tests(tests, make_model, remove_model);
}
