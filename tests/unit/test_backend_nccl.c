/* NCCL at run time, as far as it goes without a GPU: refusals in words, its entries where a library
 * is there, and which exchange is chosen for which size. */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "backend/nccl_api.h"
#include "cmocka_all.h"

static void test_refused(void **state)
{
    (void)state;
    const nbi_nccl *nccl = NULL;
    nb_error err = {0};
    assert_int_equal(nbi_nccl_load(&nccl, "libnccl-of-nobody.so.2", &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "NCCL is not there: install it (libnccl2, "));
    assert_non_null(strstr(err.text, "libnccl-of-nobody.so.2"));
    assert_int_equal(nbi_nccl_load(&nccl, "libc.so.6", &err), NB_UNSUPPORTED);
    assert_string_equal(err.text, "libc.so.6 has no ncclGetVersion; NCCL 2.18 or later is needed");
    assert_null(nccl);
}

static void test_entries(void **state)
{
    (void)state;
    const nbi_nccl *nccl = NULL;
    nb_error err = {0};
    int version = 0;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) skip();
    assert_int_equal(nbi_nccl_load(&nccl, NULL, &err), NB_OK);
    assert_int_equal(nccl->get_version(&version), NBI_NCCL_SUCCESS);
    assert_true(version >= NBI_NCCL_OLDEST);
    assert_int_equal(nccl->version[0], '2');
    assert_string_equal(nccl->get_error_string(4),
                        "invalid argument (run with NCCL_DEBUG=WARN for details)");
    assert_ptr_equal((void *)nccl->all_reduce, dlsym(library, "ncclAllReduce"));
    assert_ptr_equal((void *)nccl->group_end, dlsym(library, "ncclGroupEnd"));
    dlclose(library);
}

static nbi_exchange_times times(const float one_shot[], const float nccl[])
{
    nbi_exchange_times t;
    for (uint32_t i = 0; i < NBI_EXCHANGE_SIZES; i++) {
        t.values[i] = (size_t)3072 << 2 * i;
        t.one_shot_us[i] = one_shot[i];
        t.nccl_us[i] = nccl[i];
    }
    return t;
}

static void test_choice(void **state)
{
    (void)state;
    const float rising[] = {4, 4, 5, 10, 40, 160, 640, 2560},
                flat[] = {13, 13, 13, 14, 18, 49, 150, 500};
    nbi_exchange_times t = times(rising, flat);
    assert_int_equal(nbi_exchange_nccl_from(&t), 3072 << 8); /* 18 against 40 us */
    t.nccl_us[5] = 159; /* no better than one-shot: not from there on either */
    assert_int_equal(nbi_exchange_nccl_from(&t), 3072 << 12);
    t.nccl_us[7] = 2500;
    assert_int_equal(nbi_exchange_nccl_from(&t), SIZE_MAX);
    t = times(flat, rising);
    assert_int_equal(nbi_exchange_nccl_from(&t), SIZE_MAX);
    for (uint32_t i = 0; i < NBI_EXCHANGE_SIZES; i++) t.nccl_us[i] = 1;
    assert_int_equal(nbi_exchange_nccl_from(&t), 3072);
}

static void test_words(void **state)
{
    (void)state;
    const float a[] = {3.94f, 4, 5, 10, 40, 160, 640, 2560},
                b[] = {13, 13, 13, 14, 18, 49, 150, 500};
    nbi_exchange_times t = times(a, b);
    char text[512], little[24];
    nbi_exchange_describe(&t, text, sizeof text);
    assert_ptr_equal(strstr(text, "12 KB 3.9 and 13.0 us, 48 KB 4.0 and 13.0 us, "), text);
    assert_non_null(strstr(text, ", 196608 KB 2560.0 and 500.0 us"));
    nbi_exchange_describe(&t, little, sizeof little);
    assert_string_equal(little, "12 KB 3.9 and 13.0 us, ");
    memset(t.one_shot_us, 0, sizeof t.one_shot_us);
    nbi_exchange_describe(&t, text, sizeof text);
    assert_ptr_equal(strstr(text, "12 KB 13.0 us, 48 KB 13.0 us, "), text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_entries),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
