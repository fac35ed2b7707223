/* CPU levels, element types, the clock. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/dtype.h"
#include "base/file.h"

/* The kernel's own list of flags: an independent answer to what CPUID says. */
static bool kernel_lists(const char *flags)
{
    char *text = NULL;
    if (nbi_file_read(&text, NULL, "/proc/cpuinfo", (size_t)64 << 20, NULL) != NB_OK) return false;
    const char *line = strstr(text, "\nflags");
    bool all = line != NULL;
    for (const char *flag = flags; all && *flag;) {
        char word[32];
        size_t n = strcspn(flag, " ");
        snprintf(word, sizeof word, " %.*s", (int)n, flag);
        const char *hit = line;
        const char *end = strchr(line + 1, '\n');
        do {
            hit = strstr(hit + 1, word);
        } while (hit && hit < end && hit[n + 1] != ' ' && hit[n + 1] != '\n');
        all = hit && hit < end;
        flag += n + (flag[n] == ' ');
    }
    nbi_free(text);
    return all;
}

static void level_is_what_the_kernel_lists(void **state)
{
    (void)state;
    nbi_cpu_level want = NBI_CPU_REFERENCE;
    if (kernel_lists("avx avx2 fma f16c bmi1 bmi2")) {
        want = NBI_CPU_AVX2;
        if (kernel_lists("avx512f avx512bw avx512vl avx512dq avx512vbmi avx512_vnni avx512_bf16")) {
            want = NBI_CPU_AVX512;
            if (kernel_lists("amx_tile amx_bf16 amx_int8")) want = NBI_CPU_AMX;
        }
    }
    /* An old or restricted kernel may refuse tiles that the flags promise. */
    nbi_cpu_level have = nbi_cpu_detect();
    if (!(want == NBI_CPU_AMX && have == NBI_CPU_AVX512)) assert_int_equal(have, want);
    assert_int_equal(nbi_cpu_detect(), have);
}

static void levels_are_parsed(void **state)
{
    (void)state;
    nb_error err;
    nbi_cpu_level here = nbi_cpu_detect(), level = NBI_CPU_LEVEL_COUNT;
    assert_int_equal(nbi_cpu_level_parse(&level, "auto", &err), NB_OK);
    assert_int_equal(level, here);
    for (unsigned i = 0; i < NBI_CPU_LEVEL_COUNT; i++) {
        const char *name = nbi_cpu_level_name((nbi_cpu_level)i);
        level = NBI_CPU_LEVEL_COUNT;
        nb_status st = nbi_cpu_level_parse(&level, name, &err);
        if (i <= (unsigned)here) {
            assert_int_equal(st, NB_OK);
            assert_int_equal(level, i);
        } else {
            assert_int_equal(st, NB_UNSUPPORTED);
            assert_int_equal(level, NBI_CPU_LEVEL_COUNT);
            assert_non_null(strstr(err.text, name));
        }
    }
    assert_int_equal(nbi_cpu_level_parse(&level, "sse9", &err), NB_INVALID);
    assert_non_null(strstr(err.text, "sse9"));
    assert_string_equal(nbi_cpu_level_name(NBI_CPU_LEVEL_COUNT), "unknown");
}

static void dtypes_round_trip(void **state)
{
    (void)state;
    for (unsigned i = 0; i < NBI_DTYPE_COUNT; i++) {
        const char *name = nbi_dtype_name((nbi_dtype)i);
        assert_int_equal(nbi_dtype_parse(name, strlen(name)), i);
        uint32_t bits = nbi_dtype_bits((nbi_dtype)i);
        assert_true(bits == 4 || bits == 8 || bits == 16 || bits == 32 || bits == 64);
    }
    assert_int_equal(nbi_dtype_bits(NBI_F4), 4);
    assert_int_equal(nbi_dtype_bits(NBI_F64), 64);
    assert_int_equal(nbi_dtype_parse("F32x", 3), NBI_F32);
    assert_int_equal(nbi_dtype_parse("F32x", 4), NBI_DTYPE_COUNT);
    assert_int_equal(nbi_dtype_parse("f32", 3), NBI_DTYPE_COUNT);
    assert_int_equal(nbi_dtype_parse("", 0), NBI_DTYPE_COUNT);
    assert_string_equal(nbi_dtype_name(NBI_DTYPE_COUNT), "unknown");
    assert_int_equal(nbi_dtype_bits(NBI_DTYPE_COUNT), 0);
}

static void clock_moves_forward(void **state)
{
    (void)state;
    uint64_t first = nbi_now_ns(), last = first;
    while (last - first < 2000000) {
        uint64_t now = nbi_now_ns();
        assert_true(now >= last);
        last = now;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(level_is_what_the_kernel_lists),
        cmocka_unit_test(levels_are_parsed),
        cmocka_unit_test(dtypes_round_trip),
        cmocka_unit_test(clock_moves_forward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
