/* The roofline against published sums and arithmetic done by hand. */
#include "cmocka_all.h"

#include <math.h>
#include <string.h>

#include "perf/roofline.h"

#define GIB 1073741824.0

static nbi_config shape(const char *like, bool mtp)
{
    nbi_config c;
    nb_error err;
    if (nbi_synth_shape(&c, like, NULL, 0, mtp, &err) != NB_OK) fail_msg("%s", err.text);
    return c;
}

static nbi_roof_options options(const nbi_config *c, nbi_synth_weights weights)
{
    return (nbi_roof_options){.config = c,
                              .weights = weights,
                              .device = {.name = "test", .label = "test", .bandwidth = 1.79e12},
                              .tp = 1,
                              .ep = 1,
                              .pp = 1,
                              .batch = 1,
                              .context = NBI_ROOF_ALL_WEIGHTS,
                              .kv_dtype = NBI_BF16,
                              .memory_share = 0.9};
}

static nbi_roofline run(const nbi_roof_options *o)
{
    nbi_roofline r;
    nb_error err;
    if (nbi_roofline_run(&r, o, &err) != NB_OK) fail_msg("%s", err.text);
    return r;
}

static double bytes(const nbi_roofline *r, nbi_roof_part part)
{
    return r->parts[part].bytes;
}

/* The published sums of GLM-5 and 5.2. */
static void test_check_sums(void **state)
{
    (void)state;
    nbi_config five = shape("glm-5", true), two = shape("glm-5.2", true);
    nbi_roof_options o = options(&five, NBI_SYNTH_BF16);
    nbi_roofline r = run(&o);
    assert_int_equal(r.parameters, 753864139008);
    assert_true(fabs(r.weight_bytes / GIB - 1404.18) < 0.005);
    assert_true(fabs((double)r.active * 1e-9 - 40.83) < 0.005);
    o = options(&two, NBI_SYNTH_NVFP4_EXPERTS);
    r = run(&o);
    assert_int_equal(r.parameters, 753329940480);
    assert_true(fabs((double)r.active * 1e-9 - 40.30) < 0.005);
    /* 78 layers of attention and 21 indexers, in BF16. */
    assert_true(bytes(&r, NBI_ROOF_ATTENTION) == 78 * 165019648.0 * 2);
    assert_true(bytes(&r, NBI_ROOF_INDEXER) == 21 * 9371648.0 * 2);
    assert_true(fabs((bytes(&r, NBI_ROOF_ATTENTION) + bytes(&r, NBI_ROOF_INDEXER)) / GIB - 24.34) <
                0.005);
    /* Eight of 256 experts of 75 layers, codes and block scales. */
    assert_true(bytes(&r, NBI_ROOF_ROUTED) == 75 * 8 * 37748736.0 * 0.5625);
    assert_true(fabs(bytes(&r, NBI_ROOF_ROUTED) / GIB * 256 / 8 - 379.69) < 0.005);
    assert_true(fabs(bytes(&r, NBI_ROOF_SHARED) / GIB - 5.27) < 0.005);
    assert_true(fabs(2 * bytes(&r, NBI_ROOF_HEAD) / GIB - 3.54) < 0.01); /* embedding and head */
    assert_true(nbi_roof_kv_bytes(&two, NBI_F8_E4M3) == 79 * 656 + 22 * 132);
    nbi_config_free(&five);
    nbi_config_free(&two);
}

/* NVFP4 MLPs, BF16 attention, eight ranks of 1.79 TB/s: the router is on every rank, the rest an
 * eighth. (13.6026 + 0.9516) G x 2 B / 8 + 26.1594 G x 0.5625 B / 8 + 0.118 G x 2 B = 5.714 GB. */
static void test_eight_ranks(void **state)
{
    (void)state;
    nbi_config c = shape("glm-5", false);
    nbi_roof_options o = options(&c, NBI_SYNTH_NVFP4_MLP);
    o.tp = 8;
    const nbi_roofline r = run(&o);
    assert_true(fabs(r.step.seconds * 1e3 - 3.19) < 0.005);
    assert_true(fabs(r.tokens_per_s - 313) < 0.5);
    nbi_config_free(&c);
}

/* GQA: keys and values of 4 heads on 8 ranks are on two ranks each. */
static void test_heads(void **state)
{
    (void)state;
    nbi_config c = shape("qwen3-30b-a3b", false);
    nbi_roof_options o = options(&c, NBI_SYNTH_BF16);
    o.context = 1000;
    const nbi_roofline one = run(&o);
    assert_true(bytes(&one, NBI_ROOF_ATTENTION) == 48 * 2.0 * 2048 * 128 * (32 + 4 + 4 + 32));
    assert_true(bytes(&one, NBI_ROOF_KV_READ) == 48 * 1000 * 2048.0);
    assert_true(one.parts[NBI_ROOF_KV_READ].flops == 48 * 1000 * 32 * 256 * 2.0);
    o.tp = 8;
    const nbi_roofline eight = run(&o);
    assert_true(bytes(&eight, NBI_ROOF_ATTENTION) == 48 * 2.0 * 2048 * 128 * (4 + 1 + 1 + 4));
    assert_true(bytes(&eight, NBI_ROOF_KV_READ) == 48 * 1000 * 2048.0 / 4);
    nbi_config_free(&c);
}

/* Expected distinct experts; at 2 groups the busier one has more than half. */
static void test_experts(void **state)
{
    (void)state;
    nbi_config c = shape("qwen3-30b-a3b", false);
    nbi_roof_options o = options(&c, NBI_SYNTH_NVFP4_MLP);
    nbi_roofline r = run(&o);
    assert_true(fabs(r.experts_read - 8) < 1e-9);
    o.batch = 16;
    r = run(&o);
    assert_true(fabs(r.experts_read - 128 * (1 - pow(0.9375, 16))) < 1e-9);
    o.batch = 1;
    o.tp = o.ep = 8;
    r = run(&o);
    /* Eight of 128 into eight groups of 16: P(most = 1) = 16^8 / C(128, 8) = 0.003, most are 2, 3.
     */
    assert_true(r.experts_read > 2.2 && r.experts_read < 2.8);
    assert_true(fabs(r.experts_balanced - 1) < 1e-9);
    /* A group's experts are whole: 2.65 MB each and layer. */
    assert_true(fabs(bytes(&r, NBI_ROOF_ROUTED) - r.experts_read * 48 * 4718592 * 0.5625) < 1);
    nbi_config_free(&c);
}

/* Sparse attention reads index_topk latents and all index keys. */
static void test_sparse_cache(void **state)
{
    (void)state;
    nbi_config c = shape("glm-5.2", false);
    nbi_roof_options o = options(&c, NBI_SYNTH_NVFP4_MLP);
    o.context = 100000;
    o.kv_dtype = NBI_F8_E4M3;
    o.batch = 3;
    const nbi_roofline r = run(&o);
    assert_true(bytes(&r, NBI_ROOF_KV_READ) == 3 * (78 * 2048 * 656.0 + 21 * 100000 * 132.0));
    assert_true(bytes(&r, NBI_ROOF_KV_WRITE) == 3 * (78 * 656.0 + 21 * 132.0));
    assert_true(r.cache_bytes == 3 * 100000 * (78 * 656.0 + 21 * 132.0));
    nbi_config_free(&c);
}

/* At most index_topk tokens in sight, the new one among them: the indexer's key is made and
 * written, nothing is scored. Types of the cache hold for index keys, too. */
static void test_idle_indexer(void **state)
{
    (void)state;
    nbi_config c = shape("glm-5.2", false);
    nbi_roof_options o = options(&c, NBI_SYNTH_BF16);
    o.context = c.index_topk - 1;
    const nbi_roofline idle = run(&o);
    assert_true(bytes(&idle, NBI_ROOF_INDEXER) == 21 * 128 * 6144.0 * 2);
    assert_true(bytes(&idle, NBI_ROOF_KV_READ) == 78 * 2047 * 1152.0);
    assert_true(bytes(&idle, NBI_ROOF_KV_WRITE) == 78 * 1152.0 + 21 * 256.0);
    assert_true(idle.parts[NBI_ROOF_KV_READ].flops == 2 * 78 * 64 * 2047 * (2.0 * 512 + 64));
    o.context++;
    const nbi_roofline chooses = run(&o);
    assert_true(bytes(&chooses, NBI_ROOF_INDEXER) == 21 * 9371648.0 * 2);
    assert_true(bytes(&chooses, NBI_ROOF_KV_READ) == 2048 * (78 * 1152.0 + 21 * 256.0));
    assert_int_equal(chooses.active - idle.active, 21 * (9371648 - 128 * 6144));
    o.kv_dtype = NBI_F32;
    const nbi_roofline wide = run(&o);
    assert_true(bytes(&wide, NBI_ROOF_KV_READ) == 2 * bytes(&chooses, NBI_ROOF_KV_READ));
    assert_true(wide.kv_bytes_per_token == 2 * chooses.kv_bytes_per_token);
    nbi_config_free(&c);
}

/* The batch it names is the first whose operations outlast its bytes; a peak of nothing known
 * gives none. */
static void test_compute_bound(void **state)
{
    (void)state;
    nbi_config c = shape("qwen3-30b-a3b", false);
    nbi_roof_options o = options(&c, NBI_SYNTH_BF16);
    assert_int_equal(run(&o).compute_batch, 0);
    o.device.flops_bf16 = 100e12;
    const uint64_t batch = run(&o).compute_batch;
    assert_in_range(batch, 2, 100000);
    for (int i = 0; i < 2; i++) {
        o.batch = (uint32_t)batch - 1 + (uint32_t)i;
        const nbi_roofline r = run(&o);
        assert_int_equal(r.step.flops / 100e12 > r.step.bytes / 1.79e12, i);
    }
    nbi_config_free(&c);
}

static void test_memory(void **state)
{
    (void)state;
    nbi_config c = shape("glm-5", false);
    nbi_roof_options o = options(&c, NBI_SYNTH_NVFP4_MLP);
    o.device.memory = 96e9;
    assert_int_equal(run(&o).longest_context, 0); /* 440 GB into 86 */
    o.tp = 8;
    nbi_roofline r = run(&o);
    const double per_token = 78 * (1152.0 + 256);
    assert_true(r.kv_bytes_per_token == per_token);
    const double tokens = (0.9 * 96e9 - r.weight_bytes) / per_token;
    assert_int_equal(r.longest_context, tokens < 202752 ? (uint64_t)tokens : 202752);
    /* Stages: weights by layer, the fullest holds 3 dense layers and the embedding, or the head. */
    const double whole = r.weight_bytes;
    o.pp = 2;
    r = run(&o);
    assert_true(r.weight_bytes > whole / 2 && r.weight_bytes < 0.53 * whole);
    assert_true(r.kv_bytes_per_token == per_token / 2);
    nbi_config_free(&c);
}

static void test_refusals(void **state)
{
    (void)state;
    nbi_config c = shape("qwen3-30b-a3b", false);
    nbi_roofline r;
    nb_error err;
    static const struct {
        uint32_t tp, ep, pp, batch;
        uint64_t context;
        double bandwidth;
        const char *says;
    } cases[] = {{1, 1, 1, 1, 0, 0, "bandwidth"},     {0, 1, 1, 1, 0, 1e12, "at least 1"},
                 {8, 3, 1, 1, 0, 1e12, "divisor"},    {3, 1, 1, 1, 0, 1e12, "32 heads"},
                 {1, 1, 49, 1, 0, 1e12, "48 layers"}, {1, 1, 1, 0, 0, 1e12, "batch 0"},
                 {1, 1, 1, 1, 1 << 20, 1e12, "40960"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nbi_roof_options o = options(&c, NBI_SYNTH_BF16);
        o.tp = cases[i].tp, o.ep = cases[i].ep, o.pp = cases[i].pp;
        o.batch = cases[i].batch, o.context = cases[i].context;
        o.device.bandwidth = cases[i].bandwidth;
        assert_int_equal(nbi_roofline_run(&r, &o, &err), NB_INVALID);
        if (!strstr(err.text, cases[i].says)) fail_msg("%s", err.text);
    }
    nbi_device d;
    assert_int_equal(nbi_device_find(&d, "h300", &err), NB_INVALID);
    assert_non_null(strstr(err.text, "h200"));
    assert_int_equal(nbi_device_find(&d, "epyc-9004:0", &err), NB_INVALID);
    assert_int_equal(nbi_device_find(&d, "h200:3", &err), NB_INVALID);
    assert_int_equal(nbi_device_find(&d, "epyc-9004:6", &err), NB_OK);
    assert_true(fabs(d.bandwidth - 6 * 38.4e9) < 1);
    nbi_config_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check_sums),   cmocka_unit_test(test_eight_ranks),
        cmocka_unit_test(test_heads),        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_sparse_cache), cmocka_unit_test(test_compute_bound),
        cmocka_unit_test(test_memory),       cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_idle_indexer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
