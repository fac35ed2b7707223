/* Every allocation of reading a checkpoint made to fail, one after the other: always a status and a
 * sentence, never a crash or a leak. */
#include "cmocka_all.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/census.h"
#include "model/quantize.h"
#include "model/synth.h"
#include "scratch.h"

static const char *const small[] = {
    "hidden_size=64",       "vocab_size=64",   "eos_token_id=1",       "num_attention_heads=4",
    "q_lora_rank=32",       "kv_lora_rank=32", "intermediate_size=96", "moe_intermediate_size=48",
    "num_experts_per_tok=2"};

typedef struct folders {
    char *dir, bf16[300], nvfp4[300], out[300];
} folders;

static nbi_synth_options options(const char *out, nbi_synth_weights weights)
{
    return (nbi_synth_options){.like = "glm-5.2",
                               .out_dir = out,
                               .n_layers = 4,
                               .n_experts = 4,
                               .sets = small,
                               .n_sets = sizeof small / sizeof *small,
                               .weights = weights,
                               .shard_bytes = 100000,
                               .n_threads = 1};
}

static nb_status do_open(const folders *f, nb_error *err)
{
    nbi_census c;
    nb_status st = nbi_census_open(&c, f->nvfp4, true, err);
    if (st == NB_OK) nbi_census_close(&c);
    return st;
}

static nb_status do_synth(const folders *f, nb_error *err)
{
    nbi_synth_result r;
    const nbi_synth_options o = options(f->out, NBI_SYNTH_FP8);
    return nbi_synth(&r, &o, err);
}

static nb_status do_quantize(const folders *f, nb_error *err)
{
    nbi_quantize_result r;
    const nbi_quantize_options o = {
        .model_dir = f->bf16, .out_dir = f->out, .scope = NBI_QUANTIZE_ALL, .n_threads = 1};
    return nbi_quantize(&r, &o, err);
}

static void remove_output(const folders *f)
{
    char command[1000];
    snprintf(command, sizeof command, "rm -rf '%s' '%s.partial'", f->out, f->out);
    assert_int_equal(system(command), 0);
}

/* Runs with the n-th allocation failing: every one of the first hundred, then every twentieth of
 * the rest or so. jansson gets by without a few of its own; then the run succeeds. */
static void fail_each(nb_status (*run)(const folders *, nb_error *), const folders *f)
{
    nb_error err;
    long before = nbi_heap_count(), failed = 0, tried = 0;
    assert_int_equal(run(f, &err), NB_OK);
    long total = nbi_heap_count() - before;
    remove_output(f);
    for (long n = 0; n < total; n += n < 100 ? 1 : 1 + total / 300) {
        memset(&err, 0, sizeof err);
        nbi_heap_fail_after(n);
        nb_status st = run(f, &err);
        nbi_heap_fail_after(-1);
        if (st != NB_OK && !err.text[0]) fail_msg("allocation %ld of %ld: no sentence", n, total);
        if (st != NB_OK) assert_false(nbi_file_exists(f->out));
        failed += st != NB_OK;
        tried++;
        remove_output(f);
    }
    print_message("%ld allocations, %ld made to fail, %ld refusals\n", total, tried, failed);
    assert_true(failed * 10 > tried * 9);
}

static void every_allocation(void **state)
{
    folders f = {.dir = scratch_make()};
    nbi_synth_result r;
    nb_error err;
    (void)state;
    snprintf(f.bf16, sizeof f.bf16, "%s/bf16", f.dir);
    snprintf(f.nvfp4, sizeof f.nvfp4, "%s/nvfp4", f.dir);
    snprintf(f.out, sizeof f.out, "%s/out", f.dir);
    nbi_synth_options o = options(f.bf16, NBI_SYNTH_BF16);
    assert_int_equal(nbi_synth(&r, &o, &err), NB_OK);
    o = options(f.nvfp4, NBI_SYNTH_NVFP4_ALL);
    assert_int_equal(nbi_synth(&r, &o, &err), NB_OK);
    fail_each(do_open, &f);
    fail_each(do_synth, &f);
    fail_each(do_quantize, &f);
    scratch_remove(f.dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_allocation)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
