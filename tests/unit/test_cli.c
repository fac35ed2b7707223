/* The option parser of the subcommands: numbers with suffixes, kinds, and everything that is wrong
 * refused by name. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"

static void numbers(void **state)
{
    static const struct {
        const char *text;
        uint64_t value;
    } good[] = {{"0", 0},
                {"4096", 4096},
                {"5G", 5000000000u},
                {"5g", 5000000000u},
                {"512Mi", 512u << 20},
                {"4Ki", 4096},
                {"1.5K", 1500},
                {"1.5Ki", 1536},
                {"2T", 2000000000000u},
                {"18446744073709551615", UINT64_MAX}};
    static const char *const bad[] = {
        "",          "-1", "x",   "5X", "5GG", "1.5", "1e3", "5 G", "18446744073709551616",
        "99999999T", "+1", ".5K", "Ki", "5Kx"};
    uint64_t v;
    nb_error err;
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        if (nbi_cli_number(&v, good[i].text, &err) != NB_OK || v != good[i].value)
            fail_msg("%s: %llu", good[i].text, (unsigned long long)v);
    }
    v = 7;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (nbi_cli_number(&v, bad[i], &err) == NB_OK) fail_msg("\"%s\" was accepted", bad[i]);
        assert_int_equal(v, 7);
    }
}

static void bytes(void **state)
{
    char text[24];
    (void)state;
    assert_string_equal(nbi_cli_bytes(text, 999), "999 B");
    assert_string_equal(nbi_cli_bytes(text, 1500), "1.50 kB");
    assert_string_equal(nbi_cli_bytes(text, 4650000000u), "4.65 GB");
    assert_string_equal(nbi_cli_bytes(text, UINT64_MAX), "18446.74 PB");
}

typedef struct values {
    bool flag;
    const char *name;
    nbi_opt_list list;
    uint32_t n;
    uint64_t bytes;
    double x;
    int operands, status;
    char text[2048]; /* what went to stderr or stdout */
} values;

/* Parses a line of words; `operands` as in nbi_command. */
static values parse(const char *line, const char *operands)
{
    static char copy[512];
    char *argv[32] = {"cmd"};
    int argc = 1;
    values v = {.n = 3};
    const nbi_command command = {
        .name = "cmd", .summary = "does it", .usage = "[OPTIONS]", .operands = operands};
    const nbi_opt options[] = {
        {"flag", NBI_OPT_FLAG, &v.flag, NULL, "a flag", false},
        {"name", NBI_OPT_STRING, &v.name, "NAME", "a name\nof two lines", true},
        {"set", NBI_OPT_LIST, &v.list, "K=V", "repeated", false},
        {"n", NBI_OPT_U32, &v.n, "N", "a number", false},
        {"bytes", NBI_OPT_BYTES, &v.bytes, "N", "a size", false},
        {"x", NBI_OPT_F64, &v.x, "X", "a real number", false},
        {0},
    };
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok(copy, " "); w; w = strtok(NULL, " ")) argv[argc++] = w;
    FILE *file = tmpfile();
    fflush(stdout);
    fflush(stderr);
    int out = dup(1), err = dup(2);
    dup2(fileno(file), 1);
    dup2(fileno(file), 2);
    v.status = nbi_cli_parse(&command, options, argc, argv, &v.operands);
    fflush(stdout);
    fflush(stderr);
    dup2(out, 1);
    dup2(err, 2);
    close(out);
    close(err);
    rewind(file);
    v.text[fread(v.text, 1, sizeof v.text - 1, file)] = 0;
    fclose(file);
    return v;
}

static void good_lines(void **state)
{
    (void)state;
    values v = parse("--name a --flag --set k=1 --set=l=2 --n=2K --bytes 1.5GB --x -2.5", NULL);
    assert_int_equal(v.status, -1);
    assert_true(v.flag && !strcmp(v.name, "a") && v.n == 2000 && v.bytes == 1500000000 &&
                v.x == -2.5);
    assert_int_equal(v.list.n, 2);
    assert_string_equal(v.list.items[1], "l=2");
    nbi_opt_list_free(&v.list);
    v = parse("--name=", NULL);
    assert_true(v.status == -1 && v.name[0] == 0 && v.n == 3);
    v = parse("one --name x two -- --three", "WORDS");
    assert_true(v.status == -1 && v.operands == 3);
}

static void bad_lines(void **state)
{
    static const struct {
        const char *line, *says;
    } cases[] = {
        {"", "--name NAME is required"},
        {"--name a --nam b", "unknown option --nam"},
        {"--name a -v", "unknown option -v"},
        {"--name a extra", "unexpected argument \"extra\""},
        {"--name a --flag=1", "--flag takes no value"},
        {"--name", "--name needs a value (NAME)"},
        {"--name a --name b", "--name is given twice"},
        {"--name a --n 5X", "--n: \"5X\" is not a number"},
        {"--name a --n 5G", "--n: \"5G\" is too large"},
        {"--name a --x 1.0z", "--x: \"1.0z\" is not a number"},
        {"--name a --bytes B", "--bytes: \"B\" is not a number"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        values v = parse(cases[i].line, NULL);
        assert_int_equal(v.status, NBI_EXIT_USAGE);
        if (!strstr(v.text, cases[i].says) || !strstr(v.text, "nibble cmd --help"))
            fail_msg("\"%s\": \"%s\"", cases[i].line, v.text);
    }
}

/* Help names every option, even beside errors. */
static void help(void **state)
{
    static const char *const lines[] = {"--help", "-h", "--name a --help", "--wrong --help"};
    static const char *const words[] = {"Usage: nibble cmd [OPTIONS]",
                                        "does it",
                                        "--flag",
                                        "--name NAME",
                                        "--set K=V",
                                        "--bytes N",
                                        "--x X",
                                        "of two lines",
                                        "--help"};
    (void)state;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        values v = parse(lines[i], NULL);
        assert_int_equal(v.status, NBI_EXIT_OK);
        for (size_t k = 0; k < sizeof words / sizeof *words; k++)
            if (!strstr(v.text, words[k])) fail_msg("\"%s\" is not in: %s", words[k], v.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers),   cmocka_unit_test(bytes), cmocka_unit_test(good_lines),
        cmocka_unit_test(bad_lines), cmocka_unit_test(help),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
