/* Which MoE runner a step takes: tables by rows, the choice from times, and the file of
 * `nibble tune` with everything that can be wrong with it. */
#include "cmocka_all.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/build.h"
#include "base/file.h"
#include "moe/runners.h"
#include "moe/tune_file.h"
#include "scratch.h"

/* Three of one class, and one of another. */
static nbi_moe_runner_ops fast, other, third, apart;

static size_t bytes_of_rows(const nbi_backend *b, const nbi_moe_shape *s, uint32_t rows)
{
    (void)b, (void)s;
    return 10 * (size_t)rows;
}

static size_t bytes_fixed(const nbi_backend *b, const nbi_moe_shape *s, uint32_t rows)
{
    (void)b, (void)s, (void)rows;
    return 500;
}

static int make_runners(void **state)
{
    (void)state;
    fast = other = third = nbi_moe_runner_cpu;
    apart = nbi_moe_runner_reference;
    fast.name = "fast", other.name = "other", third.name = "third", apart.name = "apart";
    fast.numerics = other.numerics = third.numerics = "one";
    return 0;
}

static void classes(void **state)
{
    (void)state;
    assert_true(nbi_moe_same_class(&fast, &other));
    assert_false(nbi_moe_same_class(&fast, &apart));
    nbi_moe_runner_ops unnamed = fast, form = fast;
    unnamed.numerics = NULL; /* nothing is known of it */
    assert_false(nbi_moe_same_class(&unnamed, &fast));
    assert_true(nbi_moe_same_class(&unnamed, &unnamed));
    form.prepare = NULL; /* the same bits from another form */
    assert_false(nbi_moe_same_class(&form, &fast));
    /* those built in: different runners of the CPU round differently */
    assert_false(nbi_moe_same_class(&nbi_moe_runner_cpu, &nbi_moe_runner_reference));
}

static void rows_find_their_runner(void **state)
{
    (void)state;
    nbi_moe_table t = {{{4, &fast}, {64, &other}, {UINT32_MAX, &third}}, 3};
    const struct {
        uint32_t rows;
        const nbi_moe_runner_ops *want;
    } cases[] = {{1, &fast},   {4, &fast},   {5, &other},
                 {64, &other}, {65, &third}, {UINT32_MAX, &third}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_ptr_equal(nbi_moe_table_runner(&t, cases[i].rows), cases[i].want);
    char text[128];
    nbi_moe_table_text(&t, text, sizeof text);
    assert_string_equal(text, "1 to 4 rows fast, to 64 other, more third");
    t.buckets[2].runner = &fast;
    nbi_moe_table_names(&t, text, sizeof text);
    assert_string_equal(text, "fast+other");
    assert_true(nbi_moe_table_has(&t, &other));
    assert_false(nbi_moe_table_has(&t, &third));
    nbi_moe_table_text(&t, text, 10); /* cut, and still a string */
    assert_true(strlen(text) < 10);

    nbi_moe_table_one(&t, &apart);
    assert_ptr_equal(nbi_moe_table_runner(&t, 1), &apart);
    assert_ptr_equal(nbi_moe_table_runner(&t, 100000), &apart);
    nbi_moe_table_text(&t, text, sizeof text);
    assert_string_equal(text, "apart");
}

/* Enough for every step up to the most rows, and not for buckets beyond. */
static void workspace_of_every_step(void **state)
{
    (void)state;
    fast.workspace_bytes = other.workspace_bytes = bytes_of_rows;
    third.workspace_bytes = bytes_fixed;
    const nbi_moe_table t = {{{4, &third}, {64, &fast}, {UINT32_MAX, &other}}, 3};
    const nbi_moe_shape s = {.n_experts = 1};
    const struct {
        uint32_t rows;
        size_t want;
    } cases[] = {{1, 500}, {4, 500}, {40, 500}, {60, 600}, {1000, 10000}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(nbi_moe_table_workspace(&t, NULL, &s, cases[i].rows), cases[i].want);
    const nbi_moe_table late = {{{64, &fast}, {UINT32_MAX, &third}}, 2};
    assert_int_equal(nbi_moe_table_workspace(&late, NULL, &s, 30), 300);
}

static void joined(void **state)
{
    (void)state;
    nbi_moe_table t = {{{1, &fast}, {2, &fast}, {4, &other}, {8, &fast}, {UINT32_MAX, &fast}}, 5};
    nbi_moe_table_join(&t);
    assert_int_equal(t.n, 3);
    assert_int_equal(t.buckets[0].rows, 2);
    assert_int_equal(t.buckets[1].rows, 4);
    assert_int_equal(t.buckets[2].rows, UINT32_MAX);
    assert_ptr_equal(t.buckets[2].runner, &fast);
}

static void fastest_of_a_class(void **state)
{
    (void)state;
    const uint32_t rows[] = {1, 2, 4};
    nbi_moe_table t;
    /* within 3 % the first stays */
    nbi_moe_times times[] = {
        {&fast, {1, 1, 1}}, {&other, {0.98, 0.5, 2}}, {&apart, {0.9, 0.9, 0.9}}};
    assert_true(nbi_moe_table_choose(&t, times, 3, rows, 3));
    assert_int_equal(t.n, 3);
    assert_ptr_equal(t.buckets[0].runner, &fast);
    assert_ptr_equal(t.buckets[1].runner, &other);
    assert_ptr_equal(t.buckets[2].runner, &fast);
    assert_int_equal(t.buckets[1].rows, 2);
    assert_int_equal(t.buckets[2].rows, UINT32_MAX);

    /* another class that is faster on the whole takes all of it, also where it is slower */
    times[2] = (nbi_moe_times){&apart, {0.1, 0.1, 2}};
    assert_true(nbi_moe_table_choose(&t, times, 3, rows, 3));
    for (uint32_t i = 0; i < 3; i++) assert_ptr_equal(t.buckets[i].runner, &apart);

    /* but not with a gap */
    times[2] = (nbi_moe_times){&apart, {0.1, 0.1, 0}};
    assert_true(nbi_moe_table_choose(&t, times, 3, rows, 3));
    assert_ptr_equal(t.buckets[1].runner, &other);
    assert_ptr_equal(t.buckets[2].runner, &fast);
    assert_true(nbi_moe_table_choose(&t, times + 2, 1, rows, 3)); /* unless there is no other */
    assert_ptr_equal(t.buckets[2].runner, &apart);

    times[2].seconds[0] = 0;
    assert_false(nbi_moe_table_choose(&t, times + 2, 1, rows, 3));
    assert_false(nbi_moe_table_choose(&t, times, 0, rows, 3));
}

/* ---------------------------------------------------------------- the file */

static const nbi_moe_shape shape = {.n_experts = 8,
                                    .top_k = 2,
                                    .hidden = 64,
                                    .inter = 32,
                                    .kind_gate_up = NBI_WEIGHT_NVFP4,
                                    .kind_down = NBI_WEIGHT_BF16};

static nbi_backend *open_cpu(void)
{
    nbi_backend *b = NULL;
    nb_error err;
    const nbi_backend_options bo = {.cpu_level = NBI_CPU_REFERENCE, .n_threads = 1};
    assert_int_equal(nbi_backend_open(&b, "cpu", &bo, &err), NB_OK);
    return b;
}

/* As `nibble tune` writes it: every bucket by itself. */
static char *write_one(const char *dir, const nbi_backend *b, const nbi_tune_key *key)
{
    const nbi_moe_table t = {
        {{1, &nbi_moe_runner_cpu}, {2, &nbi_moe_runner_cpu}, {UINT32_MAX, &nbi_moe_runner_cpu}}, 3};
    const nbi_moe_times times[] = {{&nbi_moe_runner_cpu, {1e-6, 2e-6, 3e-6}},
                                   {&nbi_moe_runner_reference, {5e-6}}};
    nb_error err;
    (void)b;
    char *file = nbi_tune_path(dir, key);
    assert_non_null(file);
    assert_int_equal(nbi_tune_write(file, key, &t, times, 2, &err), NB_OK);
    return file;
}

static void written_is_read(void **state)
{
    (void)state;
    char *dir = scratch_make();
    nbi_backend *b = open_cpu();
    const nbi_tune_key key = nbi_tune_key_of(b, &shape);
    char *file = write_one(dir, b, &key);
    assert_non_null(strstr(file, "/tune-"));
    nbi_moe_table t;
    nb_error err;
    assert_int_equal(nbi_tune_read(&t, file, &key, b, &err), NB_OK);
    assert_int_equal(t.n, 1);
    assert_int_equal(t.buckets[0].rows, UINT32_MAX);
    assert_ptr_equal(t.buckets[0].runner, &nbi_moe_runner_cpu);

    /* a folder that is not there yet; a file by its own name; another shape, another file */
    char *later = nbi_tune_path("/nowhere/", &key), *named = nbi_tune_path("x.json", &key);
    assert_memory_equal(later, "/nowhere/tune-", 14);
    assert_string_equal(later + 9, strrchr(file, '/') + 1);
    assert_string_equal(named, "x.json");
    nbi_tune_key wide = key;
    wide.shape.hidden = 128;
    char *foreign = nbi_tune_path(dir, &wide);
    assert_string_not_equal(foreign, file);
    assert_int_equal(nbi_tune_read(&t, foreign, &wide, b, &err), NB_NOT_FOUND);
    nbi_free(later), nbi_free(named), nbi_free(foreign), nbi_free(file);
    nbi_backend_close(&b);
    scratch_remove(dir);
}

/* One member of the key after the other. */
static void another_key(void **state)
{
    (void)state;
    char *dir = scratch_make();
    nbi_backend *b = open_cpu();
    const nbi_tune_key key = nbi_tune_key_of(b, &shape);
    assert_string_equal(key.build, nbi_build_id());
    assert_memory_equal(key.build, NB_VERSION, strlen(NB_VERSION));
    char *file = write_one(dir, b, &key);
    nbi_tune_key keys[11];
    for (size_t i = 0; i < 11; i++) keys[i] = key;
    keys[0].build = "0.0.9+1234";
    keys[1].device = "cuda (NVIDIA H200, sm_90)";
    keys[2].driver = "1.2";
    keys[3].sm = 90;
    keys[4].shape.hidden = 128;
    keys[5].shape.inter = 64;
    keys[6].shape.n_experts = 16;
    keys[7].shape.top_k = 4;
    keys[8].shape.kind_gate_up = NBI_WEIGHT_BF16;
    keys[9].shape.kind_down = NBI_WEIGHT_NVFP4;
    keys[10].shape.w4a4 = true;
    static const char *const says[] = {"build",   "device", "driver",  "compute_capability",
                                       "hidden",  "inter",  "experts", "top_k",
                                       "gate_up", "down",   "w4a4"};
    for (size_t i = 0; i < 11; i++) {
        nbi_moe_table t = {.n = 77};
        nb_error err = {0};
        assert_int_equal(nbi_tune_read(&t, file, &keys[i], b, &err), NB_UNSUPPORTED);
        assert_non_null(strstr(err.text, says[i]));
        assert_non_null(strstr(err.text, file));
        assert_int_equal(t.n, 77);
    }
    nbi_free(file);
    nbi_backend_close(&b);
    scratch_remove(dir);
}

/* `from` becomes `to` in the file; NULL: the file ends there. */
static void doctor(const char *file, const char *from, const char *to)
{
    char *text = NULL;
    size_t n = 0;
    nb_error err;
    assert_int_equal(nbi_file_read(&text, &n, file, 1 << 16, &err), NB_OK);
    char *at = strstr(text, from);
    assert_non_null(at);
    nbi_buf out = {0};
    assert_int_equal(nbi_buf_add(&out, text, (size_t)(at - text)), NB_OK);
    if (to) assert_int_equal(nbi_buf_addf(&out, "%s%s", to, at + strlen(from)), NB_OK);
    assert_int_equal(nbi_file_write(file, out.data, out.len, &err), NB_OK);
    nbi_buf_free(&out);
    nbi_free(text);
}

static void damaged(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to;
        nb_status want;
        const char *says;
    } cases[] = {
        {"\"numerics\"", NULL, NB_CORRUPT, "near"},
        {"{", NULL, NB_CORRUPT, "near"},
        {"{", "[{", NB_CORRUPT, "near"},
        {"nibble tune", "nibble lute", NB_CORRUPT, "format"},
        {"\"version\": 1", "\"version\": 2", NB_UNSUPPORTED, "version"},
        {"\"version\": 1", "\"version\": \"1\"", NB_CORRUPT, "version"},
        {"\"version\": 1", "\"edition\": 1", NB_UNSUPPORTED, "version"},
        {"\"shape\": {", "\"form\": {", NB_CORRUPT, "shape"},
        {"\"hidden\": 64", "\"hidden\": -1", NB_CORRUPT, "hidden"},
        {"\"buckets\"", "\"pails\"", NB_CORRUPT, "buckets"},
        {"\"runner\": \"cpu\"", "\"runner\": \"warp\"", NB_CORRUPT, "unknown"},
        {"\"runner\": \"cpu\"", "\"runner\": 7", NB_CORRUPT, "runner"},
        {"\"runner\": \"cpu\"", "\"walker\": \"cpu\"", NB_CORRUPT, "runner"},
        {"\"runner\": \"cpu\"", "\"runner\": \"cuda\"", NB_CORRUPT, "cannot run"},
        {"\"runner\": \"cpu\"", "\"runner\": \"reference\"", NB_CORRUPT, "other bits"},
        {"\"rows\": 2", "\"rows\": 1", NB_CORRUPT, "ascending"},
        {"\"rows\": 2", "\"rows\": null", NB_CORRUPT, "ascending"},
        {"\"rows\": null", "\"rows\": 4", NB_CORRUPT, "null in the last"},
        {"\"rows\": 1", "\"rows\": 0", NB_CORRUPT, "ascending"},
    };
    char *dir = scratch_make();
    nbi_backend *b = open_cpu();
    const nbi_tune_key key = nbi_tune_key_of(b, &shape);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *file = write_one(dir, b, &key);
        doctor(file, cases[i].from, cases[i].to);
        nbi_moe_table t = {.n = 77};
        nb_error err = {0};
        const nb_status st = nbi_tune_read(&t, file, &key, b, &err);
        if (st != cases[i].want || !strstr(err.text, cases[i].says))
            fail_msg("%s for %s: status %d, %s", cases[i].to ? cases[i].to : "the end",
                     cases[i].from, st, err.text);
        assert_int_equal(t.n, 77);
        nbi_free(file);
    }
    nbi_backend_close(&b);
    scratch_remove(dir);
}

static void not_written(void **state)
{
    (void)state;
    nbi_backend *b = open_cpu();
    const nbi_tune_key key = nbi_tune_key_of(b, &shape);
    nbi_moe_table t;
    nb_error err;
    nbi_moe_table_one(&t, &nbi_moe_runner_cpu);
    assert_int_equal(nbi_tune_write("/nowhere/at/all", &key, &t, NULL, 0, &err), NB_NOT_FOUND);
    assert_non_null(strstr(err.text, "/nowhere/at/all"));
    nbi_backend_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(classes),         cmocka_unit_test(rows_find_their_runner),
        cmocka_unit_test(joined),          cmocka_unit_test(workspace_of_every_step),
        cmocka_unit_test(written_is_read), cmocka_unit_test(fastest_of_a_class),
        cmocka_unit_test(another_key),     cmocka_unit_test(damaged),
        cmocka_unit_test(not_written),
    };
    return cmocka_run_group_tests(tests, make_runners, NULL);
}
