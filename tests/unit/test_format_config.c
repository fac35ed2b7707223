/* config.json: each family, each spelling, each trap; what is wrong is refused with file, key and
 * value. */
#include "cmocka_all.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "format/config.h"
#include "scratch.h"

#define GLM5                                                                                      \
    "'model_type':'glm_moe_dsa','num_hidden_layers':78,'hidden_size':6144,'num_attention_heads':" \
    "64,"                                                                                         \
    "'num_key_value_heads':64,'q_lora_rank':2048,'kv_lora_rank':512,'qk_nope_head_dim':192,"      \
    "'qk_rope_head_dim':64,'v_head_dim':256,'intermediate_size':12288,'moe_intermediate_size':"   \
    "2048,"                                                                                       \
    "'n_routed_experts':256,'num_experts_per_tok':8,'vocab_size':154880,'eos_token_id':[154820,"  \
    "154827,154829]"
#define GLM5_ROPE                                                                              \
    ",'max_position_embeddings':202752,'rope_parameters':{'rope_type':'default','rope_theta':" \
    "1000000}"
#define V3                                                                                        \
    "'model_type':'deepseek_v3','num_hidden_layers':6,'hidden_size':7168,'num_attention_heads':"  \
    "128,"                                                                                        \
    "'q_lora_rank':1536,'kv_lora_rank':512,'qk_nope_head_dim':128,'qk_rope_head_dim':64,'v_head_" \
    "dim':128,"                                                                                   \
    "'intermediate_size':18432,'moe_intermediate_size':2048,'n_routed_experts':256,'num_experts_" \
    "per_tok':8,"                                                                                 \
    "'vocab_size':129280,'max_position_embeddings':163840,'eos_token_id':1"
#define AIR                                                                                      \
    "'model_type':'glm4_moe','num_hidden_layers':4,'hidden_size':4096,'num_attention_heads':96," \
    "'num_key_value_heads':8,'head_dim':128,'attention_bias':true,'intermediate_size':10944,"    \
    "'moe_intermediate_size':1408,'n_routed_experts':128,'num_experts_per_tok':8,'vocab_size':"  \
    "151552,"                                                                                    \
    "'max_position_embeddings':131072"
#define QWEN                                                                                       \
    "'model_type':'qwen3_moe','num_hidden_layers':6,'hidden_size':2048,'num_attention_heads':32,"  \
    "'num_key_value_heads':4,'head_dim':128,'intermediate_size':6144,'moe_intermediate_size':768," \
    "'num_experts':128,'num_experts_per_tok':8,'vocab_size':151936,'max_position_embeddings':"     \
    "40960,"                                                                                       \
    "'rope_theta':1000000"
#define THETA ",'rope_theta':1000000"
#define MAX   ",'max_position_embeddings':4096"

static nb_status parse(nbi_config *c, const char *config, const char *generation, nb_error *err)
{
    char text[4096];
    snprintf(text, sizeof text, "{%s}", config);
    json_t *j = scratch_json(text), *g = generation ? scratch_json(generation) : NULL;
    nb_status st = nbi_config_parse(c, j, g, "dir/config.json", err);
    json_decref(j);
    json_decref(g);
    return st;
}

static nbi_config good(const char *config)
{
    nbi_config c;
    nb_error err;
    if (parse(&c, config, NULL, &err) != NB_OK) fail_msg("%s: %s", config, err.text);
    return c;
}

static void glm5(void **state)
{
    (void)state;
    nbi_config c =
        good(GLM5 GLM5_ROPE ",'num_nextn_predict_layers':1,'head_dim':64,'bos_token_id':0");
    assert_int_equal(c.family, NBI_FAMILY_GLM_MOE_DSA);
    assert_true(c.softmax_scale == 0.0625f);
    assert_true(c.rope.theta == 1e6 && c.rope.dim == 64 && c.rope.interleaved && !c.rope.yarn &&
                c.rope.attention_factor == 1);
    assert_true(c.has_indexer && c.index_heads == 32 && c.index_dim == 128 &&
                c.index_topk == 2048 && c.index_interleaved);
    assert_true(c.norm_eps == 1e-5f && c.latent_norm_eps == 1e-6f && c.index_norm_eps == 1e-6f);
    assert_true(c.scoring == NBI_SCORING_SIGMOID && c.router_bias && c.norm_topk &&
                c.routed_scale == 2.5f);
    assert_int_equal(c.n_shared, 1);
    assert_int_equal(c.n_eos, 3);
    assert_int_equal(c.eos[1], 154827);
    for (uint32_t i = 0; i < 79; i++) {
        assert_int_equal(c.layer_sparse[i], i >= 3);
        assert_int_equal(c.layer_full_indexer[i], 1);
    }
    nbi_config_free(&c);
    assert_null(c.layer_sparse);
}

/* GLM-5.2: head_dim 192 is not the rotary width; 21 layers of 78 own an indexer. */
static void glm52_schedule(void **state)
{
    static const int full[] = {0,  1,  2,  6,  10, 14, 18, 22, 26, 30, 34,
                               38, 42, 46, 50, 54, 58, 62, 66, 70, 74};
    uint8_t expected[79] = {0};
    (void)state;
    for (size_t i = 0; i < sizeof full / sizeof *full; i++) expected[full[i]] = 1;
    expected[78] = 1; /* MTP */
    char types[4096] = GLM5 GLM5_ROPE ",'num_nextn_predict_layers':1,'head_dim':192,'index_share_"
                                      "for_mtp_iteration':true,'indexer_types':[";
    for (int i = 0; i < 78; i++) {
        strcat(types, i ? "," : "");
        strcat(types, expected[i] ? "'full'" : "'shared'");
    }
    strcat(types, "]");
    char both[4096];
    snprintf(both, sizeof both,
             "%s,'index_topk_freq':4,'index_skip_topk_offset':3,'index_topk_pattern':null", types);
    const char *const configs[] = {types, both,
                                   GLM5 GLM5_ROPE ",'num_nextn_predict_layers':1,'head_dim':192,'"
                                                  "index_topk_freq':4,'index_skip_topk_offset':3,"
                                                  "'index_share_for_mtp_iteration':true"};
    for (int k = 0; k < 3; k++) {
        nbi_config c = good(configs[k]);
        assert_memory_equal(c.layer_full_indexer, expected, 79);
        assert_int_equal(c.rope.dim, 64);
        assert_true(c.index_share_mtp);
        nbi_config_free(&c);
    }
}

/* C17: a list of its own, or a pattern; the first layer must own one. */
static void indexer_types(void **state)
{
#define FOUR                                                                                      \
    "'model_type':'glm_moe_dsa','num_hidden_layers':4,'hidden_size':64,'num_attention_heads':2,'" \
    "q_lora_rank':16,'kv_lora_rank':16,'qk_nope_head_dim':16,'qk_rope_head_dim':8,'v_head_dim':"  \
    "16,'intermediate_size':64,'moe_intermediate_size':32,'n_routed_experts':4,'num_experts_per_" \
    "tok':2,'vocab_size':128,'index_head_dim':16" MAX THETA
    static const uint8_t expected[4] = {1, 1, 0, 1};
    nb_error err;
    nbi_config c;
    (void)state;
    const char *const same[] = {FOUR ",'indexer_types':['full','full','shared','full']",
                                FOUR ",'index_topk_pattern':'FFSF'",
                                FOUR ",'index_topk_pattern':['full','full','shared','full'],'"
                                     "indexer_types':['full','full','shared','full']"};
    for (int i = 0; i < 3; i++) {
        c = good(same[i]);
        assert_memory_equal(c.layer_full_indexer, expected, 4);
        nbi_config_free(&c);
    }
    static const struct {
        const char *config, *says;
    } bad[] = {
        {FOUR ",'indexer_types':['shared','full','full','full']", "layer 0"},
        {FOUR ",'indexer_types':['full','full','full']", "indexer_types"},
        {FOUR ",'indexer_types':['full','half','full','full']", "indexer_types[1] is \"half\""},
        {FOUR ",'indexer_types':['full','full','full','full'],'index_topk_pattern':'FFSF'",
         "indexer_types[2] is \"full\" but index_topk_pattern"},
        {FOUR ",'index_topk_pattern':'FFXF'", "index_topk_pattern"},
        {FOUR ",'index_topk_pattern':'FF'", "index_topk_pattern"},
        {FOUR ",'index_topk':0", "index_topk 0"},
        {FOUR ",'index_head_dim':4", "index_head_dim 4"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (parse(&c, bad[i].config, NULL, &err) == NB_OK) fail_msg("accepted: %s", bad[i].config);
        if (!strstr(err.text, bad[i].says))
            fail_msg("\"%s\" does not say \"%s\"", err.text, bad[i].says);
    }
}

/* C11: the base in every place it is written to, and none is refused. */
static void rope_spellings(void **state)
{
    static const char *const same[] = {
        GLM5 MAX ",'rope_parameters':{'rope_theta':8000000,'rope_type':'default'}",
        GLM5 MAX ",'rope_parameters':{'rope_theta':8000000},'rope_theta':10000",
        GLM5 MAX ",'rope_theta':8000000,'rope_scaling':null",
        GLM5 MAX ",'rope_theta':8000000,'rope_parameters':null",
        GLM5 MAX ",'rope_theta':8000000,'rope_scaling':{'type':'default'}",
        GLM5 MAX ",'rope_parameters':{'deepseek_sparse_attention':{'rope_theta':8000000,'rope_type'"
                 ":'default'}}",
        GLM5 MAX ",'rope_scaling':{'rope_theta':8e6,'rope_type':'default'}",
    };
    nbi_config c;
    nb_error err;
    (void)state;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        c = good(same[i]);
        assert_true(c.rope.theta == 8e6 && !c.rope.yarn);
        nbi_config_free(&c);
    }
    static const struct {
        const char *config, *says;
    } bad[] = {
        {GLM5 MAX, "rope_theta is missing"},
        {GLM5 MAX ",'rope_parameters':{'rope_type':'default'}", "rope_theta is missing"},
        {GLM5 MAX ",'rope_theta':'big'", "rope_theta"},
        {GLM5 MAX ",'rope_theta':0.5", "rope_theta"},
        {GLM5 MAX THETA ",'rope_scaling':{'type':'linear','factor':2}", "\"linear\""}, /* C12 */
        {GLM5 MAX THETA ",'rope_scaling':{'rope_type':'llama3','factor':8}", "\"llama3\""},
        {GLM5 MAX THETA ",'rope_parameters':{'rope_type':'dynamic'}", "\"dynamic\""},
        {GLM5 MAX THETA ",'rope_scaling':{'factor':2}", "factor but no type"},
        {GLM5 MAX THETA
         ",'rope_scaling':{'type':'yarn','factor':2},'rope_parameters':{'rope_type':'default'}",
         "\"default\" in one place"},
        {GLM5 MAX ",'rope_parameters':{'a':{'rope_theta':1e6},'b':{'rope_theta':2e6}}",
         "differs between layer types"},
        {GLM5 MAX THETA ",'rope_parameters':7", "rope_parameters"},
        {GLM5 MAX THETA ",'partial_rotary_factor':0.5", "partial_rotary_factor"},
        {GLM5 MAX THETA ",'rope_scaling':{'type':'yarn','factor':0.5}", "factor"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (parse(&c, bad[i].config, NULL, &err) == NB_OK) fail_msg("accepted: %s", bad[i].config);
        if (!strstr(err.text, bad[i].says) || !strstr(err.text, "dir/config.json"))
            fail_msg("\"%s\" does not say \"%s\"", err.text, bad[i].says);
    }
}

static void yarn(void **state)
{
    (void)state;
    nbi_config c = good(V3 ",'rope_theta':10000,'rope_scaling':{'type':'yarn','factor':40,'beta_"
                           "fast':32,'beta_slow':1,'mscale':1.0,"
                           "'mscale_all_dim':1.0,'original_max_position_embeddings':4096}");
    const double m = 0.1 * log(40) + 1;
    assert_true(c.rope.yarn && c.rope.factor == 40 && c.rope.original_max_positions == 4096 &&
                c.rope.beta_fast == 32 && c.rope.truncate);
    assert_true(fabs(c.rope.attention_factor - 1) < 1e-12);
    assert_true(fabs((double)c.softmax_scale - m * m / sqrt(192)) < 1e-8);
    assert_true(fabs(m - 1.36889) < 1e-5);
    nbi_config_free(&c);
    /* Without mscale the factor goes into cos and sin, in any family. */
    c = good(QWEN ",'rope_scaling':{'rope_type':'yarn','factor':4.0,'original_max_position_"
                  "embeddings':32768,'truncate':false}");
    assert_true(fabs(c.rope.attention_factor - (0.1 * log(4) + 1)) < 1e-12 && !c.rope.truncate &&
                !c.rope.interleaved && c.rope.dim == 128);
    assert_true(fabs((double)c.softmax_scale - 1 / sqrt(128)) < 1e-8);
    nbi_config_free(&c);
    c = good(GLM5 ",'max_position_embeddings':16384,'rope_parameters':{'rope_type':'yarn','rope_"
                  "theta':1e6,'original_max_position_embeddings':4096,"
                  "'mscale':0.707,'mscale_all_dim':1,'beta_fast':null}");
    assert_true(c.rope.factor == 4 && c.rope.beta_fast == 32); /* from the lengths */
    assert_true(fabs(c.rope.attention_factor - (0.0707 * log(4) + 1) / (0.1 * log(4) + 1)) < 1e-12);
    nbi_config_free(&c);
    c = good(QWEN ",'rope_scaling':{'type':'yarn','factor':2,'attention_factor':1.25}");
    assert_true(c.rope.attention_factor == 1.25 && c.rope.original_max_positions == 40960);
    nbi_config_free(&c);
}

static void other_families(void **state)
{
    (void)state;
    nbi_config c = good(AIR THETA ",'partial_rotary_factor':0.5,'rope_scaling':null,'num_nextn_"
                                  "predict_layers':1,'first_k_dense_replace':1");
    assert_true(c.attention == NBI_ATTENTION_GQA && c.rope.dim == 64 && !c.rope.interleaved &&
                c.attention_bias && !c.qk_norm);
    assert_true(c.routed_scale == 1 && c.n_kv_heads == 8 && !c.has_indexer &&
                c.layer_full_indexer == NULL);
    assert_true(!c.layer_sparse[0] && c.layer_sparse[1] && c.layer_sparse[4] && c.n_eos == 0);
    nbi_config_free(&c);
    c = good(
        AIR
        ",'use_qk_norm':true,'rope_parameters':{'rope_theta':1e6,'partial_rotary_factor':0.25}");
    assert_true(c.qk_norm && c.rope.dim == 32);
    nbi_config_free(&c);
    c = good(AIR THETA); /* the class default is a half */
    assert_int_equal(c.rope.dim, 64);
    nbi_config_free(&c);
    c = good(V3 ",'rope_theta':10000,'n_group':8,'topk_group':4,'moe_layer_freq':2,'rope_"
                "interleave':false,'n_shared_experts':null");
    assert_true(c.n_group == 8 && c.topk_group == 4 && c.norm_eps == 1e-6f && !c.rope.interleaved &&
                c.n_shared == 0);
    for (uint32_t i = 0; i < 6; i++) assert_int_equal(c.layer_sparse[i], i == 4);
    nbi_config_free(&c);
    c = good(V3 ",'rope_theta':10000,'mlp_layer_types':['dense','sparse','dense','sparse','sparse',"
                "'dense'],'q_lora_rank':null");
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(c.layer_sparse[i], i == 1 || i == 3 || i == 4);
    assert_int_equal(c.q_lora, 0);
    nbi_config_free(&c);
    c = good(QWEN ",'mlp_only_layers':[1,5],'decoder_sparse_step':2,'norm_topk_prob':true,'eos_"
                  "token_id':151645");
    for (uint32_t i = 0; i < 6; i++) assert_int_equal(c.layer_sparse[i], i == 3);
    assert_true(c.scoring == NBI_SCORING_SOFTMAX && !c.router_bias && c.n_shared == 0 &&
                c.qk_norm && c.norm_topk && c.n_eos == 1);
    nbi_config_free(&c);
    c = good(QWEN ",'tie_word_embeddings':true,'num_local_experts':128");
    assert_true(c.tied_head && !c.norm_topk);
    nbi_config_free(&c);
}

static void generation(void **state)
{
    nbi_config c;
    nb_error err;
    (void)state;
    assert_int_equal(
        parse(&c, QWEN ",'eos_token_id':151645",
              "{'eos_token_id':[7,8,8],'temperature':0.6,'top_p':0.95,'top_k':20,'do_sample':true}",
              &err),
        NB_OK);
    assert_true(c.n_eos == 2 && c.eos[0] == 7 && c.eos[1] == 8 && c.gen_temperature == 0.6f &&
                c.gen_top_p == 0.95f && c.gen_top_k == 20);
    nbi_config_free(&c);
    assert_int_equal(parse(&c, QWEN ",'eos_token_id':[5]", "{'top_k':0}", &err), NB_OK);
    assert_true(c.n_eos == 1 && c.eos[0] == 5 && c.gen_top_k == -1 && c.gen_temperature == 1 &&
                c.gen_min_p == 0);
    nbi_config_free(&c);
    assert_int_equal(parse(&c, QWEN ",'eos_token_id':[5,99999999]", NULL, &err),
                     NB_OK); /* an id that cannot occur */
    assert_int_equal(c.n_eos, 1);
    nbi_config_free(&c);
    static const struct {
        const char *generation, *says;
    } bad[] = {
        {"{'eos_token_id':'x'}", "eos_token_id"},
        {"{'eos_token_id':[1,-2]}", "eos_token_id"},
        {"{'temperature':-1}", "temperature"},
        {"{'top_p':0}", "top_p"},
        {"{'top_k':-7}", "top_k"},
        {"[]", "not an object"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_not_equal(parse(&c, QWEN, bad[i].generation, &err), NB_OK);
        if (!strstr(err.text, bad[i].says) || !strstr(err.text, "generation_config.json"))
            fail_msg("\"%s\"", err.text);
    }
}

static void refused(void **state)
{
    static const struct {
        const char *config, *says;
        nb_status status;
    } cases[] = {
        {"'a':1", "model_type is missing", NB_INVALID},
        {"'model_type':7", "model_type", NB_INVALID},
        {"'model_type':'llama'", "\"llama\" is not supported", NB_UNSUPPORTED},
        {"'model_type':'glm5_next'", "\"glm5_next\" is not supported (GLM-5.3-Flash",
         NB_UNSUPPORTED},
        {"'model_type':'glm5_next_text'", "\"glm5_next_text\"", NB_UNSUPPORTED},
        {"'model_type':'qwen3_moe'", "num_hidden_layers is missing", NB_INVALID},
        {QWEN ",'hidden_act':'gelu'", "hidden_act is \"gelu\"", NB_UNSUPPORTED},
        {QWEN ",'use_sliding_window':true", "use_sliding_window", NB_UNSUPPORTED},
        {QWEN ",'scoring_func':'sigmoid'", "scoring_func", NB_UNSUPPORTED},
        {QWEN ",'num_local_experts':64", "num_experts is 128 and num_local_experts is 64",
         NB_INVALID},
        {QWEN ",'mlp_only_layers':[6]", "mlp_only_layers[0]", NB_INVALID},
        {QWEN ",'decoder_sparse_step':0", "decoder_sparse_step", NB_INVALID},
        {V3 THETA ",'topk_method':'greedy'", "topk_method", NB_UNSUPPORTED},
        {V3 THETA ",'n_group':3,'topk_group':1", "n_group 3", NB_INVALID},
        {V3 THETA ",'n_group':64,'topk_group':1",
         "num_experts_per_tok is 8, 4 experts can be chosen", NB_INVALID},
        {V3 THETA ",'routed_scaling_factor':'x'", "routed_scaling_factor", NB_INVALID},
        {V3 THETA ",'mlp_layer_types':['dense']", "mlp_layer_types", NB_INVALID},
        {AIR THETA ",'rms_norm_eps':0", "rms_norm_eps", NB_INVALID},
    };
    nb_error err;
    nbi_config c = {.hidden = 12345};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nb_status st = parse(&c, cases[i].config, NULL, &err);
        if (st != cases[i].status || !strstr(err.text, cases[i].says))
            fail_msg("case %zu: %d \"%s\"", i, st, st ? err.text : "");
        assert_int_equal(c.hidden, 12345);
    }
}

/* Every required size: absent, 0, negative, of the wrong type, huge. */
static void required(void **state)
{
    static const char *const keys[] = {"num_hidden_layers",
                                       "hidden_size",
                                       "vocab_size",
                                       "num_attention_heads",
                                       "max_position_embeddings",
                                       "kv_lora_rank",
                                       "qk_nope_head_dim",
                                       "qk_rope_head_dim",
                                       "v_head_dim",
                                       "q_lora_rank",
                                       "n_routed_experts",
                                       "num_experts_per_tok",
                                       "moe_intermediate_size",
                                       "intermediate_size"};
    static const char *const values[] = {"0", "-1", "\"6\"", "1e30", "1.5", "[]", "4294967295"};
    nbi_config c;
    nb_error err;
    (void)state;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        for (size_t v = 0; v <= sizeof values / sizeof *values; v++) {
            json_t *j = scratch_json("{" GLM5 GLM5_ROPE "}");
            json_object_del(j, keys[i]);
            if (v)
                json_object_set_new(j, keys[i], json_loads(values[v - 1], JSON_DECODE_ANY, NULL));
            err.text[0] = 0;
            nb_status st = nbi_config_parse(&c, j, NULL, "config.json", &err);
            if (st == NB_OK ||
                (!strstr(err.text, keys[i]) && !strstr(err.text, "number of experts")))
                fail_msg("%s = %s: %d \"%s\"", keys[i], v ? values[v - 1] : "absent", st, err.text);
            json_decref(j);
        }
}

static void from_a_folder(void **state)
{
    char *dir = scratch_make();
    nbi_config c;
    nb_error err;
    (void)state;
    assert_int_equal(nbi_config_load(&c, dir, &err), NB_NOT_FOUND);
    assert_non_null(strstr(err.text, "config.json"));
    scratch_write_text(dir, "config.json", "{\"model_type\": \"gpt2\"");
    assert_int_not_equal(nbi_config_load(&c, dir, &err), NB_OK);
    scratch_write_text(dir, "config.json", "[]");
    assert_int_equal(nbi_config_load(&c, dir, &err), NB_INVALID);
    json_t *j = scratch_json("{" AIR THETA "}");
    char *text = json_dumps(j, 0);
    scratch_write_text(dir, "config.json", text);
    scratch_write_text(dir, "generation_config.json", "{\"eos_token_id\": 9}");
    assert_int_equal(nbi_config_load(&c, dir, &err), NB_OK);
    assert_int_equal(c.eos[0], 9);
    nbi_config_free(&c);
    nbi_free(text);
    json_decref(j);
    scratch_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(glm5),          cmocka_unit_test(glm52_schedule),
        cmocka_unit_test(indexer_types), cmocka_unit_test(rope_spellings),
        cmocka_unit_test(yarn),          cmocka_unit_test(other_families),
        cmocka_unit_test(generation),    cmocka_unit_test(refused),
        cmocka_unit_test(required),      cmocka_unit_test(from_a_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
