/* Names of attention backends, cache types and MoE runners against devices and models: what can be
 * meant, and the sentence where it cannot. */
#include "operator_util.h"

#include "backend/attention_path.h"
#include "moe/runner.h"

static const nbi_backend_ops gpu_ops = {.name = "cuda"}, cpu_ops = {.name = "cpu"};

static nbi_backend device(uint32_t sm)
{
    nbi_backend b = {.ops = sm ? &gpu_ops : &cpu_ops, .sm = sm};
    snprintf(b.description, sizeof b.description, sm ? "cuda (sm_%u)" : "cpu", sm);
    return b;
}

static nbi_config config(nbi_attention attention, bool has_indexer)
{
    return (nbi_config){.attention = attention, .has_indexer = has_indexer};
}

enum { GQA, MLA, DSA };

static void names_by_device_and_model(void **state)
{
    (void)state;
    const nbi_config models[] = {config(NBI_ATTENTION_GQA, false), config(NBI_ATTENTION_MLA, false),
                                 config(NBI_ATTENTION_MLA, true)};
    static const struct {
        const char *name;
        uint32_t sm;
        int model;
        const char *says; /* NULL: it can */
    } cases[] = {
        {"flashinfer", 90, GQA, NULL},
        {"flashinfer", 120, MLA, NULL},
        {"flashinfer", 0, GQA, "for GPUs"},
        {"torch_native", 0, GQA, NULL},
        {"intel_amx", 0, MLA, NULL},
        {"intel_amx", 90, MLA, "for CPUs"},
        {"fa3", 90, GQA, NULL},
        {"fa3", 90, DSA, NULL},
        {"fa3", 120, GQA, "SM80 to SM90"},
        {"flashmla", 90, MLA, NULL},
        {"flashmla", 90, GQA, "grouped-query"},
        {"flashmla", 120, MLA, "SM120"},
        {"trtllm_mla", 100, MLA, NULL},
        {"trtllm_mla", 103, MLA, NULL},
        {"trtllm_mla", 120, MLA, "SM100"},
        {"trtllm_mla", 90, MLA, "SM100"},
        {"trtllm_mha", 100, GQA, NULL},
        {"trtllm_mha", 100, MLA, "latent"},
        {"flex_attention", 90, MLA, "latent"},
        {"dsa", 120, DSA, NULL},
        {"nsa", 0, DSA, NULL},
        {"dsa", 90, MLA, "no indexer"},
        {"triton", 90, DSA, "\"dsa\""},
        {"flashmla_sparse", 90, DSA, NULL},
        {"flashmla_sparse", 120, DSA, "SM120"},
        {"flashmla_kv", 90, DSA, NULL},
        {"flashmla_kv", 120, DSA, "SM120"},
        {"aiter", 90, GQA, "AMD"},
        {"cuda", 90, DSA, NULL},
        {"cuda", 0, GQA, "for GPUs"},
        {"cpu", 90, GQA, "for CPUs"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const nbi_backend b = device(cases[i].sm);
        const nbi_attention_names both = {.backend = cases[i].name},
                                  one = {.decode = cases[i].name};
        nb_error err = {0};
        const nb_status want = cases[i].says ? NB_UNSUPPORTED : NB_OK;
        if (nbi_attention_choose(&both, &b, &models[cases[i].model], &err) != want ||
            nbi_attention_choose(&one, &b, &models[cases[i].model], &err) != want ||
            (cases[i].says &&
             (!strstr(err.text, cases[i].says) || !strstr(err.text, "--decode-attention-backend"))))
            fail_msg("%s on sm_%u: %s", cases[i].name, cases[i].sm, err.text);
    }
}

static void sparse_options_and_unknown_names(void **state)
{
    (void)state;
    const nbi_backend b = device(90);
    const nbi_config gqa = config(NBI_ATTENTION_GQA, false), dsa = config(NBI_ATTENTION_MLA, true);
    const nbi_attention_names sparse = {.sparse_decode = "fa3"}, wrong = {.prefill = "fa9"},
                              automatic = {.backend = "auto", .decode = ""};
    nb_error err;
    assert_int_equal(nbi_attention_choose(&sparse, &b, &dsa, &err), NB_OK);
    assert_int_equal(nbi_attention_choose(&sparse, &b, &gqa, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "no indexer"));
    assert_int_equal(nbi_attention_choose(&wrong, &b, &gqa, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "fa9"));
    assert_non_null(strstr(err.text, "flashinfer"));
    assert_int_equal(nbi_attention_choose(&automatic, &b, &gqa, &err), NB_OK);
    assert_int_equal(nbi_attention_choose(NULL, &b, &gqa, &err), NB_OK);
}

static void cache_types(void **state)
{
    (void)state;
    static const struct {
        const char *name, *algo;
        nbi_cpu_level level;
        nbi_dtype want;
    } taken[] = {
        {"bfloat16", "FP8", NBI_CPU_AVX2, NBI_BF16},
        {"fp8", "", NBI_CPU_AVX2, NBI_F8_E4M3},
        {"fp8_e4m3", NULL, NBI_CPU_REFERENCE, NBI_F8_E4M3},
        {"f32", "FP8", NBI_CPU_AVX2, NBI_F32},
        {"auto", NULL, NBI_CPU_REFERENCE, NBI_F32},
        {NULL, "", NBI_CPU_AVX2, NBI_BF16},
        {"auto", "FP8", NBI_CPU_AVX2, NBI_F8_E4M3},
        {"auto", "FP8", NBI_CPU_REFERENCE, NBI_F32},
        {"auto", "NVFP4", NBI_CPU_AVX2, NBI_BF16},
    };
    nb_error err;
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        nbi_dtype t = NBI_F16;
        const nbi_kv_asked asked = {taken[i].algo, taken[i].level};
        assert_int_equal(nbi_kv_dtype_choose(&t, taken[i].name, &asked, &err), NB_OK);
        assert_int_equal(t, taken[i].want);
    }
    nbi_dtype t = NBI_F16;
    assert_int_equal(nbi_kv_dtype_parse(&t, "fp8_e5m2", &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "fp8_e4m3"));
    assert_int_equal(nbi_kv_dtype_parse(&t, "int4", &err), NB_INVALID);
    assert_int_equal(t, NBI_F16);
}

/* trtllm-gen by the device alone; whether the runner itself is there comes after. */
static void trtllm_runner_by_device(void **state)
{
    (void)state;
    const nbi_moe_shape shape = {.n_experts = 4,
                                 .top_k = 2,
                                 .hidden = 64,
                                 .inter = 32,
                                 .kind_gate_up = NBI_WEIGHT_NVFP4,
                                 .kind_down = NBI_WEIGHT_NVFP4};
    const nbi_moe_runner_ops *r = NULL;
    const nbi_backend sm120 = device(120);
    nb_error err;
    assert_int_equal(nbi_moe_runner_choose(&r, "flashinfer_trtllm", &sm120, &shape, &err),
                     NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "SM100 and SM103 only"));
#if !NBI_WITH_CUDA
    const nbi_backend sm100 = device(100);
    assert_int_equal(nbi_moe_runner_choose(&r, "flashinfer_trtllm", &sm100, &shape, &err),
                     NB_UNSUPPORTED);
    assert_null(strstr(err.text, "SM100 and SM103 only"));
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_by_device_and_model),
        cmocka_unit_test(sparse_options_and_unknown_names),
        cmocka_unit_test(cache_types),
        cmocka_unit_test(trtllm_runner_by_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
