/* Opening backends by name, levels and threads, memory, scratch. */
#include "operator_util.h"

static void test_names(void **state)
{
    (void)state;
    const nbi_backend_options opt = {.cpu_level = NBI_CPU_LEVEL_COUNT, .n_threads = 2};
    nb_error err = {0};
    nbi_backend *b = NULL;
    static const char *good[] = {"cpu", "auto", NULL};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(nbi_backend_open(&b, good[i], &opt, &err), NB_OK);
        assert_string_equal(b->ops->name, "cpu");
        assert_int_equal(b->act_dtype, NBI_F32);
        char want[64];
        snprintf(want, sizeof want, "cpu (%s, 2 threads)", nbi_cpu_level_name(nbi_cpu_detect()));
        assert_string_equal(b->description, want);
        assert_int_equal(b->ops->sync(b, &err), NB_OK);
        nbi_backend_close(&b);
        assert_null(b);
    }
    nbi_backend_close(&b);
    nbi_backend_close(NULL);
    assert_int_equal(nbi_backend_open(&b, "cuda", &opt, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "no CUDA backend"));
    assert_int_equal(nbi_backend_open(&b, "tpu", &opt, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "tpu"));
    assert_null(b);
}

static void test_level_cap(void **state)
{
    (void)state;
    for (nbi_cpu_level level = NBI_CPU_REFERENCE; level < NBI_CPU_LEVEL_COUNT; level++) {
        nbi_cpu *cpu = op_open(level, 1, NULL);
        assert_int_equal(cpu->level, level < nbi_cpu_detect() ? level : nbi_cpu_detect());
        char want[64];
        snprintf(want, sizeof want, "cpu (%s, 1 thread)", nbi_cpu_level_name(cpu->level));
        assert_string_equal(cpu->base.description, want);
        op_close(cpu);
    }
}

static void test_memory(void **state)
{
    (void)state;
    nbi_cpu *cpu = op_open(nbi_cpu_detect(), 1, NULL);
    nbi_backend *b = &cpu->base;
    static const size_t sizes[] = {1, 4096, (size_t)5 << 20};
    for (int i = 0; i < 3; i++) {
        unsigned char *p = b->ops->alloc(b, sizes[i]);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t k = 0; k < sizes[i]; k++) assert_int_equal(p[k], 0);
        const unsigned char x = 7;
        unsigned char y = 0;
        b->ops->upload(b, p + sizes[i] - 1, &x, 1);
        b->ops->download(b, &y, p + sizes[i] - 1, 1);
        assert_int_equal(y, 7);
        b->ops->release(b, p, sizes[i]);
    }
    b->ops->release(b, NULL, 0);
    op_close(cpu);
}

/* reserve may be called again with other limits; workspace_bytes says what it takes. */
static void test_reserve(void **state)
{
    (void)state;
    nbi_limits l = {.max_rows = 512,
                    .max_seqs = 4,
                    .max_context = 4096,
                    .max_logit_rows = 4,
                    .n_heads = 20,
                    .kv_lora = 512,
                    .rope_dim = 64,
                    .nope_dim = 192,
                    .v_dim = 256,
                    .index_heads = 32,
                    .index_dim = 128,
                    .index_topk = 2048,
                    .max_linear_cols = 2048,
                    .max_linear_rows = 4096,
                    .vocab = 154880};
    nbi_cpu *cpu = op_open(nbi_cpu_detect(), 2, &l);
    assert_int_equal(cpu->base.ops->workspace_bytes(&cpu->base, &l),
                     cpu->scratch_bytes + cpu->attention_bytes);
    const size_t before = cpu->attention_bytes;
    l.max_context = 1048576; /* pieces grow longer, not more: scratch stays bounded */
    nb_error err;
    assert_int_equal(cpu->base.ops->reserve(&cpu->base, &l, &err), NB_OK);
    assert_true(cpu->attention_bytes >= before && cpu->attention_bytes < (size_t)100 << 20);
    nbi_limits wide = l;
    wide.kv_lora = 1000;
    assert_int_equal(cpu->base.ops->reserve(&cpu->base, &wide, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "1064"));
    nbi_heap_fail_after(0);
    const nb_status st = cpu->base.ops->reserve(&cpu->base, &l, &err);
    nbi_heap_fail_after(-1);
    if (st != NB_OK) assert_int_equal(st, NB_NO_MEMORY);
    op_close(cpu);

    nbi_backend *b = NULL;
    for (long n = 0; n < 4; n++) { /* opening with each allocation failing in turn */
        nbi_heap_fail_after(n);
        const nb_status open = nbi_backend_open(&b, "cpu", NULL, &err);
        nbi_heap_fail_after(-1);
        if (open == NB_OK)
            nbi_backend_close(&b);
        else
            assert_int_equal(open, NB_NO_MEMORY);
        assert_null(b);
    }
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_level_cap),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_reserve),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
