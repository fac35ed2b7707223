/* Quantisation descriptions of three producers, and their lists of modules that stay as they are
 * (C08, C09). */
#include "cmocka_all.h"

#include <string.h>

#include "format/quant.h"
#include "scratch.h"

static nb_status parse(nbi_quant *q, const char *config, const char *hf, nb_error *err)
{
    json_t *j = scratch_json(config), *h = hf ? scratch_json(hf) : NULL;
    nb_status st = nbi_quant_parse(q, j, h, "config.json", err);
    json_decref(j);
    json_decref(h);
    return st;
}

static nbi_quant good(const char *config, const char *hf)
{
    nbi_quant q;
    nb_error err;
    if (parse(&q, config, hf, &err) != NB_OK) fail_msg("%s", err.text);
    return q;
}

static void none(void **state)
{
    (void)state;
    nbi_quant q = good("{}", NULL);
    assert_int_equal(q.convention, NBI_CONVENTION_NONE);
    assert_false(nbi_quant_ignored(&q, "lm_head"));
    nbi_quant_free(&q);
}

static void modelopt(void **state)
{
    static const char hf[] = "{'producer':{'name':'modelopt','version':'0.29'},'quantization':{'"
                             "quant_algo':'NVFP4','kv_cache_quant_algo':'FP8',"
                             "'group_size':16,'exclude_modules':['lm_head','model.layers.1.mlp."
                             "experts*','*self_attn*']}}";
    static const char config[] = "{'quantization_config':{'quant_method':'modelopt','quant_algo':'"
                                 "NVFP4','config_groups':{'group_0':{'weights':{"
                                 "'num_bits':4,'type':'float','group_size':16}}},'ignore':['model."
                                 "layers.7*'],'kv_cache_scheme':{'num_bits':8},"
                                 "'producer':{'name':'modelopt'}}}";
    (void)state;
    nbi_quant q = good("{}", hf); /* nvidia/GLM-5-NVFP4 ships only this one */
    assert_int_equal(q.convention, NBI_CONVENTION_MODELOPT);
    assert_string_equal(q.algo, "NVFP4");
    assert_string_equal(q.kv_algo, "FP8");
    assert_string_equal(q.producer, "modelopt");
    assert_int_equal(q.group_size, 16);
    assert_true(nbi_quant_ignored(&q, "lm_head"));
    assert_true(nbi_quant_ignored(&q, "model.layers.3.self_attn.o_proj"));
    assert_true(nbi_quant_ignored(&q, "model.layers.1.mlp.experts.3.up_proj")); /* C09 */
    assert_false(nbi_quant_ignored(&q, "model.layers.2.mlp.experts.3.up_proj"));
    assert_false(nbi_quant_ignored(&q, "model.lm_head"));
    nbi_quant_free(&q);
    q = good(config, NULL);
    assert_string_equal(q.kv_algo, "FP8");
    assert_int_equal(q.group_size, 16);
    assert_int_equal(q.n_ignore, 1);
    nbi_quant_free(&q);
    q = good(config, hf);
    assert_int_equal(q.n_ignore, 4);
    nbi_quant_free(&q);
}

static void compressed_tensors(void **state)
{
    (void)state;
    nbi_quant q = good(
        "{'quantization_config':{'quant_method':'compressed-tensors','format':'nvfp4-pack-"
        "quantized','config_groups':{'group_0':"
        "{'targets':['Linear'],'weights':{'num_bits':4,'group_size':16},'input_activations':null}},"
        "'ignore':['lm_head','re:.*self_attn.*','re:.*mlp\\\\.gate$','re:.*shared_experts.*','re:('"
        "]}}",
        NULL);
    assert_int_equal(q.convention, NBI_CONVENTION_COMPRESSED_TENSORS);
    assert_string_equal(q.algo, "nvfp4-pack-quantized");
    assert_true(nbi_quant_ignored(&q, "model.layers.2.self_attn.q_proj")); /* C08 */
    assert_true(nbi_quant_ignored(&q, "model.layers.2.mlp.gate"));
    assert_false(nbi_quant_ignored(&q, "model.layers.2.mlp.gate_proj"));
    assert_true(nbi_quant_ignored(&q, "model.layers.2.mlp.shared_experts.up_proj"));
    assert_false(nbi_quant_ignored(&q, "model.layers.2.mlp.experts.1.up_proj"));
    nbi_quant_free(&q);
}

static void fp8(void **state)
{
    (void)state;
    nbi_quant q = good(
        "{'quantization_config':{'quant_method':'fp8','fmt':'e4m3','weight_block_size':[128,128],"
        "'modules_to_not_convert':['lm_head','model.layers.0.self_attn.indexers_proj']}}",
        NULL);
    assert_int_equal(q.convention, NBI_CONVENTION_FP8);
    assert_true(q.block_rows == 128 && q.block_cols == 128 && q.n_ignore == 2);
    nbi_quant_free(&q);
}

static void refused(void **state)
{
    static const struct {
        const char *config, *hf, *says;
    } cases[] = {
        {"[]", NULL, "not an object"},
        {"{'quantization_config':[]}", NULL, "quantization_config"},
        {"{'quantization_config':{}}", NULL, "quant_method"},
        {"{'quantization_config':{'quant_method':'awq'}}", NULL, "\"awq\""},
        {"{'quantization_config':{'quant_method':'fp8','weight_block_size':[128]}}", NULL,
         "weight_block_size"},
        {"{'quantization_config':{'quant_method':'fp8','weight_block_size':[0,128]}}", NULL,
         "weight_block_size"},
        {"{'quantization_config':{'quant_method':'modelopt','ignore':[1]}}", NULL, "ignore[0]"},
        {"{'quantization_config':{'quant_method':'modelopt','ignore':'x'}}", NULL, "ignore"},
        {"{}", "{}", "quantization"},
    };
    nbi_quant q;
    nb_error err;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (parse(&q, cases[i].config, cases[i].hf, &err) == NB_OK)
            fail_msg("case %zu accepted", i);
        if (!strstr(err.text, cases[i].says)) fail_msg("case %zu: \"%s\"", i, err.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(none), cmocka_unit_test(modelopt), cmocka_unit_test(compressed_tensors),
        cmocka_unit_test(fp8),  cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
