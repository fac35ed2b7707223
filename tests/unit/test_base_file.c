/* Files: maps, reading, atomic writing, paths. */
#include "cmocka_all.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

static char folder[] = "/tmp/nibble-test-XXXXXX";

static const char *at(const char *name)
{
    static char paths[4][256];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    static const char *const names[] = {"a", "a.tmp", "empty", "pipe", "sub/x", "sub/x.tmp"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(at(names[i]));
    rmdir(at("sub"));
    return rmdir(folder);
}

static void written_is_read_and_mapped(void **state)
{
    (void)state;
    nb_error err;
    char data[10000];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (char)(i * 31);
    assert_false(nbi_file_exists(at("a")));
    assert_int_equal(nbi_file_write(at("a"), "old", 3, &err), NB_OK);
    assert_int_equal(nbi_file_write(at("a"), data, sizeof data, &err), NB_OK);
    assert_true(nbi_file_exists(at("a")));
    assert_false(nbi_file_exists(at("a.tmp")));

    char *text = NULL;
    size_t n = 0;
    assert_int_equal(nbi_file_read(&text, &n, at("a"), sizeof data, &err), NB_OK);
    assert_int_equal(n, sizeof data);
    assert_memory_equal(text, data, sizeof data);
    assert_int_equal(text[n], 0);
    nbi_free(text);

    nbi_map map;
    assert_int_equal(nbi_map_open(&map, at("a"), &err), NB_OK);
    assert_int_equal(map.bytes, sizeof data);
    assert_memory_equal(map.data, data, sizeof data);
    nbi_map_close(&map);
    assert_null(map.data);
    nbi_map_close(&map);
}

static void empty_files(void **state)
{
    (void)state;
    nbi_map map;
    char *text = NULL;
    size_t n = 1;
    assert_int_equal(nbi_file_write(at("empty"), NULL, 0, NULL), NB_OK);
    assert_int_equal(nbi_map_open(&map, at("empty"), NULL), NB_OK);
    assert_null(map.data);
    assert_int_equal(map.bytes, 0);
    nbi_map_close(&map);
    assert_int_equal(nbi_file_read(&text, &n, at("empty"), 0, NULL), NB_OK);
    assert_int_equal(n, 0);
    assert_string_equal(text, "");
    nbi_free(text);
}

/* stat says 0 bytes for these; there is text all the same. */
static void proc_files_are_read_to_the_end(void **state)
{
    (void)state;
    char *text = NULL;
    assert_int_equal(nbi_file_read(&text, NULL, "/proc/self/maps", 1 << 20, NULL), NB_OK);
    assert_true(strlen(text) > 100);
    nbi_free(text);
    nb_error err;
    assert_int_equal(nbi_file_read(&text, NULL, "/proc/self/maps", 50, &err), NB_TOO_LARGE);
}

static void maximum_is_exact(void **state)
{
    (void)state;
    nb_error err;
    char *text = NULL;
    size_t n;
    assert_int_equal(nbi_file_write(at("a"), "0123456789", 10, &err), NB_OK);
    assert_int_equal(nbi_file_read(&text, &n, at("a"), 10, &err), NB_OK);
    nbi_free(text);
    text = (char *)"untouched";
    assert_int_equal(nbi_file_read(&text, &n, at("a"), 9, &err), NB_TOO_LARGE);
    assert_string_equal(text, "untouched");
    assert_non_null(strstr(err.text, at("a")));
    assert_non_null(strstr(err.text, "limit of 9"));
    assert_int_equal(nbi_file_read(&text, &n, at("a"), SIZE_MAX, &err), NB_OK);
    nbi_free(text);
}

/* Everything that is no regular file is refused at once, a pipe without waiting for its writer. */
static void only_regular_files(void **state)
{
    (void)state;
    nb_error err;
    nbi_map map;
    char *text;
    assert_int_equal(nbi_map_open(&map, at("missing"), &err), NB_NOT_FOUND);
    assert_non_null(strstr(err.text, "missing"));
    assert_int_equal(nbi_file_read(&text, NULL, at("missing"), 10, &err), NB_NOT_FOUND);
    assert_int_equal(nbi_map_open(&map, folder, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "folder"));
    assert_int_equal(mkfifo(at("pipe"), 0600), 0);
    assert_int_equal(nbi_file_read(&text, NULL, at("pipe"), 10, &err), NB_INVALID);
    assert_int_equal(nbi_map_open(&map, "/dev/null", &err), NB_INVALID);
    assert_int_equal(nbi_map_open(&map, at("a/b"), &err), NB_IO);
}

static void failed_write_leaves_the_old_file(void **state)
{
    (void)state;
    nb_error err;
    assert_int_equal(nbi_file_write(at("nowhere/x"), "x", 1, &err), NB_NOT_FOUND);
    assert_non_null(strstr(err.text, "nowhere"));
    /* The name is taken by a folder that is not empty: rename fails, the temporary file goes. */
    assert_int_equal(mkdir(at("sub"), 0700), 0);
    assert_int_equal(nbi_file_write(at("sub/x"), "x", 1, &err), NB_OK);
    assert_int_equal(nbi_file_write(at("sub"), "x", 1, &err), NB_IO);
    assert_false(nbi_file_exists(at("sub.tmp")));
    assert_true(nbi_file_exists(at("sub/x")));
    char longer[8192];
    memset(longer, 'p', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    assert_int_equal(nbi_file_write(longer, "x", 1, &err), NB_INVALID);
    /* A full device is found at write or at sync. */
    if (nbi_file_exists("/dev/full")) {
        assert_int_equal(symlink("/dev/full", at("a.tmp")), 0);
        assert_int_equal(nbi_file_write(at("a"), "new", 3, &err), NB_IO);
        char *text;
        assert_int_equal(nbi_file_read(&text, NULL, at("a"), 100, &err), NB_OK);
        assert_string_equal(text, "0123456789");
        nbi_free(text);
    }
}

static void paths_are_joined(void **state)
{
    (void)state;
    static const char *const cases[][3] = {{"a", "b", "a/b"}, {"a/", "b", "a/b"},
                                           {"", "b", "b"},    {"/", "b", "/b"},
                                           {"a", "", "a/"},   {"a/b", "c/d", "a/b/c/d"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *path = nbi_path_join(cases[i][0], cases[i][1]);
        assert_string_equal(path, cases[i][2]);
        nbi_free(path);
    }
    nbi_heap_fail_after(0);
    assert_null(nbi_path_join("a", "b"));
}

/* Each allocation of a read made to fail: refused, nothing lost, no leak (sanitizer build). */
static void reading_without_memory(void **state)
{
    (void)state;
    char *text = NULL;
    for (long n = 0; n < 3; n++) {
        nbi_heap_fail_after(n);
        nb_status st = nbi_file_read(&text, NULL, at("a"), 100, NULL);
        nbi_heap_fail_after(-1);
        assert_true(n == 0 ? st == NB_NO_MEMORY : st == NB_OK || st == NB_NO_MEMORY);
        if (st == NB_OK) nbi_free(text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_is_read_and_mapped),
        cmocka_unit_test(empty_files),
        cmocka_unit_test(proc_files_are_read_to_the_end),
        cmocka_unit_test(maximum_is_exact),
        cmocka_unit_test(only_regular_files),
        cmocka_unit_test(failed_write_leaves_the_old_file),
        cmocka_unit_test(paths_are_joined),
        cmocka_unit_test(reading_without_memory),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
