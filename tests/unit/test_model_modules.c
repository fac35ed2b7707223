/* The list of modules against the published sizes of the real models (docs of the hub's model
 * cards). */
#include "cmocka_all.h"

#include "model/modules.h"
#include "model/synth_parts.h"

typedef struct sums {
    uint64_t weights, tensors;
    uint64_t component[NBI_COMPONENT_COUNT];
} sums;

static nb_status add(void *user, const nbi_module *m, nb_error *err)
{
    sums *s = user;
    uint64_t n = m->linear ? m->rows * m->cols : m->rows;
    (void)err;
    s->weights += n;
    s->tensors++;
    s->component[m->component] += n;
    return NB_OK;
}

static sums count(const char *like, bool mtp)
{
    const nbi_synth_options o = {.like = like, .mtp = mtp};
    json_t *json = NULL;
    nbi_config config;
    nb_error err;
    sums s = {0};
    assert_int_equal(nbi_synth_config(&json, &o, &err), NB_OK);
    assert_int_equal(nbi_config_parse(&config, json, NULL, like, &err), NB_OK);
    assert_int_equal(nbi_modules_walk(&config, false, add, &s, &err), NB_OK);
    nbi_config_free(&config);
    json_decref(json);
    return s;
}

static void glm5(void **state)
{
    (void)state;
    sums five = count("glm-5", true), five2 = count("glm-5.2", true),
         main_stack = count("glm-5.2", false);
    assert_int_equal(five.weights, 753864139008u);
    assert_int_equal(five2.weights, 753329940480u);
    assert_int_equal(five2.weights - main_stack.weights, 9952920576u); /* the MTP layer */
    assert_int_equal(five.tensors, 59870);
    assert_int_equal(five2.tensors, 59585);
    assert_int_equal(main_stack.component[NBI_COMPONENT_ROUTED] / 75 / 256,
                     37748736); /* one expert */
}

/* "experts-only" in ModelOpt's form: three more tensors for each expert matrix of the main stack.
 */
static void modelopt_census(void **state)
{
    (void)state;
    assert_int_equal(count("glm-5.2", true).tensors + (uint64_t)75 * 256 * 3 * 3, 232385);
}

static void other_models(void **state)
{
    (void)state;
    uint64_t v32 = count("deepseek-v3.2", false).weights,
             qwen = count("qwen3-30b-a3b", false).weights,
             air = count("glm-4.5-air", false).weights;
    assert_int_equal(qwen, 30532122624u);                    /* "30.5B" */
    assert_true(v32 > 671000000000u && v32 < 672000000000u); /* "671B" */
    assert_true(air > 105000000000u && air < 108000000000u); /* "106B" */
    assert_true(count("glm-4.7-flash", false).weights > 29000000000u &&
                count("glm-4.7-flash", false).weights < 31000000000u); /* "30B" */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(glm5),
        cmocka_unit_test(modelopt_census),
        cmocka_unit_test(other_models),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
