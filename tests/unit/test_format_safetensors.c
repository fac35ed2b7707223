/* safetensors: what is read is what was written, and everything else is refused with a sentence
 * that names file and tensor. */
#include "cmocka_all.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "format/st_ahead.h"
#include "scratch.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define NBI_TEST_SLOW 1
#else
#define NBI_TEST_SLOW 0
#endif

static nb_status count_tensor(void *user, const nbi_st_tensor *t, nb_error *err)
{
    (void)t;
    (void)err;
    ++*(size_t *)user;
    return NB_OK;
}

static nb_status parse(const char *header, size_t n_data, size_t *n_tensors, nb_error *err)
{
    size_t n;
    unsigned char *file = scratch_safetensors(header, NULL, n_data, &n);
    nb_status st = nbi_st_parse(file, n, "f.safetensors", count_tensor, n_tensors, err);
    free(file);
    return st;
}

/* ---- one header */

static void good_headers(void **state)
{
    static const struct {
        const char *header;
        size_t n_data, n_tensors;
    } cases[] = {
        {"{}", 0, 0},
        {"{\"__metadata__\":{}}", 0, 0},
        {"{\"__metadata__\":{\"format\":\"pt\",\"a\":\"{}\"},\"t\":{\"dtype\":\"F32\",\"shape\":[2]"
         ",\"data_offsets\":[0,8]}}   ",
         8, 1},
        {" {\n\"t\" : { \"shape\" : [ ] , \"data_offsets\" : [ 0 , 4 ] , \"dtype\" : \"F32\" } } ",
         4, 1},
        {"{\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[2,5]},\"a\":{\"dtype\":\"BF16\","
         "\"shape\":[1],\"data_offsets\":[0,2]}}",
         5, 2},
        {"{\"z\":{\"dtype\":\"F32\",\"shape\":[4,0,18446744073709551615],\"data_offsets\":[0,0]},"
         "\"t\":{\"dtype\":\"F4\",\"shape\":[2,3],\"data_offsets\":[0,3]}}",
         3, 2},
        {"{\"\\u00e9\\ud83d\\ude00\\n\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"e\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
         2, 2},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nb_error err = {0};
        size_t n = 0;
        if (parse(cases[i].header, cases[i].n_data, &n, &err) != NB_OK)
            fail_msg("case %zu: %s", i, err.text);
        assert_int_equal(n, cases[i].n_tensors);
    }
}

#define T(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void bad_headers(void **state)
{
    static const struct {
        const char *header;
        size_t n_data;
        const char *says;
    } cases[] = {
        {"", 0, "header length 0"},
        {"[]", 0, "expected {"},
        {"{ ", 0, "expected a string"},
        {"{\"t\"}", 0, "expected :"},
        {"{\"t\":1}", 0, "expected an object"},
        {"{\"t\":{}}", 0, "expected a string"},
        {"{\"t\":{\"dtype\":\"F32\"}}", 0, "tensor t: shape is missing"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1]}}", 0, "tensor t: data_offsets is missing"},
        {"{\"t\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor t: dtype is missing"},
        {"{\"t\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
         "tensor t: repeated key"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4,
         "tensor t: unknown key \"x\""},
        {"{" T("t", "F33", "[1]", "[0,4]") "}", 4, "tensor t: dtype \"F33\""},
        {"{" T("t", "F32", "[-1]", "[0,4]") "}", 4, "whole number"},
        {"{" T("t", "F32", "[1.0]", "[0,4]") "}", 4, "whole number"},
        {"{" T("t", "F32", "[01]", "[0,4]") "}", 4, "leading zero"},
        {"{" T("t", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "too long"},
        {"{" T("t", "F32", "[1]", "[0]") "}", 4, "two numbers"},
        {"{" T("t", "F32", "[99999999999999999999]", "[0,4]") "}", 4, "too large"},
        {"{" T("t", "F32", "[4294967296,4294967296]", "[0,4]") "}", 4, "tensor t: shape is not"},
        {"{" T("t", "F4", "[3]", "[0,2]") "}", 2, "tensor t: shape is not"},
        {"{" T("t", "F32", "[32,8]", "[0,65536]") "}", 65536,
         "tensor t: data_offsets [0, 65536] do not span the 1024"}, /* C14 */
        {"{" T("t", "F32", "[32,8]", "[0,4]") "}", 65536,
         "tensor t: data_offsets [0, 4] do not span the 1024"}, /* C14 */
        {"{" T("t", "F32", "[1]", "[4,0]") "}", 4, "tensor t: data_offsets [4, 0]"},
        {"{" T("t", "F32", "[2]", "[0,8]") "}", 4,
         "tensor t: ends at byte 8 of the data, the file has 4"},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[2]", "[4,12]") "}", 12,
         "tensors a and b overlap"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[0,4]") "}", 4,
         "tensors a and b overlap"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[8,12]") "}", 12,
         "hole of 4 bytes before tensor b"},
        {"{" T("a", "F32", "[1]", "[4,8]") "}", 8, "hole of 4 bytes before tensor a"},
        {"{" T("a", "F32", "[1]", "[0,4]") "}", 9, "5 bytes behind the last tensor a"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("a", "F32", "[1]", "[4,8]") "}", 8,
         "tensor a is there twice"},
        {"{" T("a", "U8", "[1]", "[0,1]") "," T("\\u0061", "U8", "[1]", "[1,2]") "}", 2,
         "tensor a is there twice"},
        {"{" T("", "U8", "[1]", "[0,1]") "}", 1, "without a name"},
        {"{" T("a\\u0000b", "U8", "[1]", "[0,1]") "}", 1, "NUL"},
        {"{" T("\\ud800", "U8", "[1]", "[0,1]") "}", 1, "surrogate"},
        {"{" T("\\udc00", "U8", "[1]", "[0,1]") "}", 1, "surrogate"},
        {"{" T("\\x", "U8", "[1]", "[0,1]") "}", 1, "escape"},
        {"{" T("\xff", "U8", "[1]", "[0,1]") "}", 1, "UTF-8"},
        {"{" T("a\nb", "U8", "[1]", "[0,1]") "}", 1, "control character"},
        {"{\"__metadata__\":[]}", 0, "__metadata__"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "expected a string"},
        {"{} x", 0, "behind the last }"},
        {"{" T("t", "F32", "[1]", "[0,4]") ",}", 4, "expected a string"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nb_error err = {0};
        size_t n = 0;
        nb_status st = parse(cases[i].header, cases[i].n_data, &n, &err);
        if (st == NB_OK) fail_msg("case %zu was accepted: %s", i, cases[i].header);
        if (!strstr(err.text, cases[i].says) || !strstr(err.text, "f.safetensors"))
            fail_msg("case %zu: \"%s\" does not say \"%s\"", i, err.text, cases[i].says);
        assert_int_equal(n, 0);
    }
}

/* A file cut anywhere is refused; so is a header length that points beyond it. */
static void truncated(void **state)
{
    size_t n, seen = 0;
    nb_error err;
    unsigned char *file = scratch_safetensors(
        "{" T("a", "F32", "[2]", "[0,8]") "," T("b", "U8", "[3]", "[8,11]") "}", NULL, 11, &n);
    (void)state;
    assert_int_equal(nbi_st_parse(file, n, "f", count_tensor, &seen, &err), NB_OK);
    assert_int_equal(seen, 2);
    for (size_t k = 0; k < n; k++) {
        unsigned char *exact =
            malloc(k ? k : 1); /* so that the sanitizer sees a byte read behind the cut */
        memcpy(exact, file, k);
        assert_int_equal(nbi_st_parse(exact, k, "f", count_tensor, &seen, &err), NB_CORRUPT);
        free(exact);
    }
    memset(file, 0xff, 8);
    assert_int_equal(nbi_st_parse(file, n, "f", count_tensor, &seen, &err), NB_CORRUPT);
    assert_int_equal(seen, 2);
    free(file);
}

/* ---- folders */

static void write_two_shards(const char *dir)
{
    scratch_write_safetensors(dir, "model-00001-of-00002.safetensors",
                              "{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[1]", "[2,3]") "}",
                              "xyz", 3);
    scratch_write_safetensors(dir, "model-00002-of-00002.safetensors",
                              "{" T("c", "U8", "[1]", "[0,1]") "}", "w", 1);
}

#define INDEX(a, b, c)                                                                            \
    "{\"metadata\":{\"total_size\":4},\"weight_map\":{\"a\":\"" a "\",\"b\":\"" b "\",\"c\":\"" c \
    "\"}}"
#define S1 "model-00001-of-00002.safetensors"
#define S2 "model-00002-of-00002.safetensors"

static void refused(const char *dir, nb_status status, const char *first, const char *second)
{
    nb_error err = {0};
    nbi_checkpoint *c = NULL;
    assert_int_equal(nbi_checkpoint_open(&c, dir, &err), status);
    assert_null(c);
    if (!strstr(err.text, first) || !strstr(err.text, second))
        fail_msg("\"%s\" does not say \"%s\" and \"%s\"", err.text, first, second);
}

static void shards(void **state)
{
    char *dir = scratch_make();
    nb_error err;
    nbi_checkpoint *c = NULL;
    (void)state;
    write_two_shards(dir);
    scratch_write_text(dir, "model.safetensors.index.json", INDEX(S1, S1, S2));
    assert_int_equal(nbi_checkpoint_open(&c, dir, &err), NB_OK);
    assert_int_equal(nbi_checkpoint_count(c), 3);
    assert_int_equal(nbi_checkpoint_files(c), 2);
    assert_int_equal(nbi_checkpoint_bytes(c), 4);
    assert_string_equal(nbi_checkpoint_dir(c), dir);
    assert_string_equal(nbi_checkpoint_at(c, 0)->name, "a");
    assert_null(nbi_checkpoint_find(c, "d"));
    assert_null(nbi_checkpoint_find(c, ""));
    assert_int_equal(nbi_checkpoint_unused(c, 0), 0);
    const nbi_st_tensor *t = nbi_checkpoint_find(c, "c");
    assert_non_null(t);
    assert_int_equal(t->data[0], 'w');
    assert_string_equal(nbi_checkpoint_file(c, t->file), S2);
    assert_non_null(nbi_checkpoint_peek(c, "b"));
    assert_false(nbi_checkpoint_peek(c, "b")->used);
    assert_non_null(nbi_checkpoint_find(c, "a"));
    assert_int_equal(nbi_checkpoint_unused(c, 0), 1);
    assert_int_equal(nbi_checkpoint_unused(c, 2), 3);
    nbi_checkpoint_close(&c);
    assert_null(c);
    scratch_remove(dir);
}

/* C13, C15: index and folder are compared in both directions. */
static void index_and_folder(void **state)
{
    static const struct {
        const char *index;
        nb_status status;
        const char *first, *second;
    } cases[] = {
        {INDEX(S1, S1, "model-00003-of-00002.safetensors"), NB_NOT_FOUND,
         "listed but not in the folder: model-00003-of", "not listed: " S2},
        {INDEX(S1, S1, "other.safetensors"), NB_NOT_FOUND, "other.safetensors", S2},
        {INDEX(S1, S1, S1), NB_CORRUPT, "in the folder but not listed: " S2, "index.json"},
        {INDEX(S1, S2, S2), NB_CORRUPT, "tensor b is listed in " S2 " but is in " S1, "index.json"},
        {"{\"weight_map\":{\"a\":\"" S1 "\",\"c\":\"" S2 "\"}}", NB_CORRUPT,
         "tensor b of " S1 " is not listed", ""},
        {"{\"weight_map\":{\"a\":\"" S1 "\",\"b\":\"" S1 "\",\"c\":\"" S2 "\",\"d\":\"" S2 "\"}}",
         NB_CORRUPT, "tensor d is listed in " S2, ""},
        {"{\"weight_map\":{\"a\":\"../" S1 "\"}}", NB_CORRUPT, "weight_map[\"a\"]", "same folder"},
        {"{\"weight_map\":{\"a\":\"model.bin\"}}", NB_CORRUPT, "weight_map[\"a\"]", "model.bin"},
        {"{\"weight_map\":{\"a\":1}}", NB_CORRUPT, "weight_map[\"a\"]", "not a file name"},
        {"{\"weight_map\":{}}", NB_CORRUPT, "empty", ""},
        {"{\"weight_map\":[]}", NB_CORRUPT, "weight_map", ""},
        {"{}", NB_CORRUPT, "weight_map", ""},
    };
    char *dir = scratch_make();
    (void)state;
    write_two_shards(dir);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        scratch_write_text(dir, "model.safetensors.index.json", cases[i].index);
        refused(dir, cases[i].status, cases[i].first, cases[i].second);
    }
    scratch_write_text(dir, "model.safetensors.index.json", INDEX(S1, S1, S2));
    unlink(scratch_path(dir, S2)); /* C13 */
    refused(dir, NB_NOT_FOUND, "listed but not in the folder: " S2, "index.json");
    scratch_remove(dir);
}

static void without_index(void **state)
{
    char *dir = scratch_make();
    nbi_checkpoint *c = NULL;
    nb_error err;
    (void)state;
    refused(dir, NB_NOT_FOUND, "no safetensors file", dir);
    refused(scratch_path(dir, "nowhere"), NB_NOT_FOUND, "nowhere", "cannot open");
    scratch_write_safetensors(dir, S1, "{" T("a", "U8", "[1]", "[0,1]") "}", "x", 1);
    refused(dir, NB_NOT_FOUND, "one shard of several", S1);
    scratch_write_safetensors(dir, "model.safetensors", "{" T("a", "U8", "[1]", "[0,1]") "}", "x",
                              1);
    refused(dir, NB_NOT_FOUND, "2 safetensors files but no model.safetensors.index.json", "");
    unlink(scratch_path(dir, S1));
    scratch_write_safetensors(dir, "adapter.safetensors", "{}", NULL,
                              0); /* another thing: not read, not in the way */
    assert_int_equal(nbi_checkpoint_open(&c, dir, &err), NB_OK);
    assert_int_equal(nbi_checkpoint_files(c), 1);
    nbi_checkpoint_close(&c);
    scratch_write(dir, "model.safetensors", "", 0);
    refused(dir, NB_CORRUPT, "model.safetensors", "too few");
    scratch_remove(dir);
}

static void duplicate_over_shards(void **state)
{
    char *dir = scratch_make();
    (void)state;
    scratch_write_safetensors(dir, S1, "{" T("a", "U8", "[1]", "[0,1]") "}", "x", 1);
    scratch_write_safetensors(dir, S2, "{" T("a", "U8", "[1]", "[0,1]") "}", "y", 1);
    scratch_write_text(dir, "model.safetensors.index.json",
                       "{\"weight_map\":{\"a\":\"" S1 "\",\"b\":\"" S2 "\"}}");
    refused(dir, NB_CORRUPT, "tensor a is in " S1, S2);
    scratch_remove(dir);
}

/* ---- writing */

static void declare(nbi_st_writer *w)
{
    nb_error err;
    const uint64_t shape[2] = {3, 4};
    assert_int_equal(nbi_st_writer_add(w, "first \"quoted\"", NBI_F32, 2, shape, &err), NB_OK);
    assert_int_equal(nbi_st_writer_add(w, "empty", NBI_BF16, 1, (const uint64_t[]){0}, &err),
                     NB_OK);
    assert_int_equal(nbi_st_writer_add(w, "scalar", NBI_F32, 0, NULL, &err), NB_OK);
    assert_int_equal(nbi_st_writer_add(w, "second", NBI_U8, 2, shape, &err), NB_OK);
}

static size_t files_in(const char *dir)
{
    char command[300], line[32] = "";
    snprintf(command, sizeof command, "ls -A '%s' | wc -l", dir);
    FILE *p = popen(command, "r");
    assert_non_null(fgets(line, sizeof line, p));
    pclose(p);
    return (size_t)atol(line);
}

static void written_is_read(void **state)
{
    uint8_t data[64];
    nb_error err;
    (void)state;
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * 7);
    for (uint64_t shard_bytes = 0; shard_bytes < 80; shard_bytes += 13) {
        char *dir = scratch_make();
        nbi_st_writer *w = NULL;
        nbi_checkpoint *c = NULL;
        assert_int_equal(nbi_st_writer_create(&w, dir, shard_bytes, &err), NB_OK);
        declare(w);
        for (size_t i = 0; i < sizeof data; i += 16)
            assert_int_equal(nbi_st_writer_data(w, data + i, 16, &err), NB_OK); /* across borders */
        assert_int_not_equal(nbi_st_writer_data(w, data, 1, &err), NB_OK);
        assert_int_equal(nbi_st_writer_finish(w, &err), NB_OK);
        nbi_st_writer_destroy(&w);
        assert_int_equal(nbi_checkpoint_open(&c, dir, &err), NB_OK);
        /* 48, 0, 4 and 12 bytes in shards of 0 (one file), 13, 26, 39, 52, 65, 78 */
        assert_int_equal(nbi_checkpoint_files(c), shard_bytes == 13                      ? 3
                                                  : shard_bytes == 0 || shard_bytes > 64 ? 1
                                                                                         : 2);
        assert_int_equal(nbi_checkpoint_count(c), 4);
        const nbi_st_tensor *t = nbi_checkpoint_find(c, "first \"quoted\"");
        assert_true(t && t->n_dims == 2 && t->shape[1] == 4 && t->dtype == NBI_F32 &&
                    (uintptr_t)t->data % 64 == 0);
        assert_memory_equal(t->data, data, 48);
        assert_memory_equal(nbi_checkpoint_find(c, "scalar")->data, data + 48, 4);
        assert_memory_equal(nbi_checkpoint_find(c, "second")->data, data + 52, 12);
        assert_int_equal(nbi_checkpoint_find(c, "empty")->bytes, 0);
        nbi_checkpoint_close(&c);
        scratch_remove(dir);
    }
}

static void unfinished_leaves_nothing(void **state)
{
    char *dir = scratch_make();
    uint8_t data[64] = {0};
    nb_error err = {0};
    nbi_st_writer *w = NULL;
    (void)state;
    assert_int_equal(nbi_st_writer_create(&w, dir, 30, &err), NB_OK);
    declare(w);
    assert_int_equal(nbi_st_writer_data(w, data, 60, &err), NB_OK);
    assert_int_equal(nbi_st_writer_finish(w, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "second"));
    nbi_st_writer_destroy(&w);
    assert_int_equal(files_in(dir), 0);
    scratch_remove(dir);
}

static void resumed(void **state)
{
    char *dir = scratch_make();
    uint8_t data[64];
    nb_error err;
    nbi_st_writer *w = NULL;
    nbi_checkpoint *c = NULL;
    size_t done = 99;
    (void)state;
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i + 1);
    assert_int_equal(nbi_st_writer_create(&w, dir, 50, &err), NB_OK);
    declare(w);
    assert_int_equal(nbi_st_writer_resume(w, &done, &err), NB_OK);
    assert_int_equal(done, 0);
    assert_int_equal(nbi_st_writer_data(w, data, 55, &err),
                     NB_OK); /* the first shard and a part of the second */
    nbi_st_writer_destroy(&w);
    assert_int_equal(files_in(dir), 1);
    assert_int_equal(nbi_st_writer_create(&w, dir, 50, &err), NB_OK);
    declare(w);
    assert_int_equal(nbi_st_writer_resume(w, &done, &err), NB_OK);
    assert_int_equal(done, 2); /* "first" and the empty one */
    assert_int_equal(nbi_st_writer_data(w, data + 48, 16, &err), NB_OK);
    assert_int_equal(nbi_st_writer_finish(w, &err), NB_OK);
    nbi_st_writer_destroy(&w);
    assert_int_equal(nbi_checkpoint_open(&c, dir, &err), NB_OK);
    assert_memory_equal(nbi_checkpoint_find(c, "first \"quoted\"")->data, data, 48);
    assert_memory_equal(nbi_checkpoint_find(c, "second")->data, data + 52, 12);
    nbi_checkpoint_close(&c);
    scratch_remove(dir);
}

/* ---- speed: the census of GLM-5 in ModelOpt form is 232,385 tensors. */
static void many_tensors(void **state)
{
    enum { N = 250000, LAYERS = 79 };
    char *dir = scratch_make();
    nb_error err;
    nbi_st_writer *w = NULL;
    nbi_checkpoint *c = NULL;
    (void)state;
    assert_int_equal(nbi_st_writer_create(&w, dir, N / 4, &err), NB_OK);
    for (int i = 0; i < N; i++) {
        char name[128];
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.down_proj.weight_scale_2",
                 i % LAYERS, i / LAYERS);
        assert_int_equal(nbi_st_writer_add(w, name, NBI_U8, 1, (const uint64_t[]){1}, &err), NB_OK);
    }
    uint8_t *data = calloc(1, N);
    assert_int_equal(nbi_st_writer_data(w, data, N, &err), NB_OK);
    assert_int_equal(nbi_st_writer_finish(w, &err), NB_OK);
    nbi_st_writer_destroy(&w);
    free(data);
    clock_t start = clock(); /* of this process: the machine may be busy */
    assert_int_equal(nbi_checkpoint_open(&c, dir, &err), NB_OK);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    print_message("%d tensors in %.3f s\n", N, seconds);
    assert_int_equal(nbi_checkpoint_count(c), N);
    assert_int_equal(nbi_checkpoint_files(c), 4);
    assert_non_null(
        nbi_checkpoint_find(c, "model.layers.5.mlp.experts.1000.down_proj.weight_scale_2"));
    assert_true(seconds < (NBI_TEST_SLOW ? 40 : 2));
    nbi_checkpoint_close(&c);
    scratch_remove(dir);
}

/* ---- reading ahead */

#define BIG  (3 * NBI_ST_PIECE + 12345) /* bytes of a tensor */
#define FAR  (2 * NBI_ST_GAP)           /* of one that nobody wants */
#define NEAR 100
#define SEEN 64

/* What was read, in order. */
typedef struct pieces {
    struct {
        uint32_t file;
        uint64_t at, bytes;
    } of[SEEN];
    size_t n;
} pieces;

static void note_piece(void *user, uint32_t file, uint64_t at, uint64_t bytes)
{
    pieces *p = user;
    assert_true(p->n < SEEN);
    p->of[p->n].file = file;
    p->of[p->n].at = at;
    p->of[p->n++].bytes = bytes;
}

/* "1.a": unit 1; "x": none. */
static uint32_t unit_by_name(void *user, const nbi_st_tensor *t)
{
    (void)user;
    return t->name[0] == 'x' ? NBI_ST_NONE : (uint32_t)(t->name[0] - '0');
}

/* Two files whose tensors belong to three units: file 0 has 2.b, x, 0.a, x, 1.a, (near) 1.c; file 1
 * has 0.d, 1.e. */
static nbi_checkpoint *open_units(char *dir)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } tensors[] = {{"2.b", BIG},  {"x.0", FAR}, {"0.a", BIG},  {"x.1", FAR}, {"1.a", BIG},
                   {"x.2", NEAR}, {"1.c", BIG}, {"x.fill", 0}, {"0.d", BIG}, {"1.e", BIG}};
    nb_error err;
    nbi_st_writer *w = NULL;
    assert_int_equal(nbi_st_writer_create(&w, dir, 5 * BIG, &err), NB_OK);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        assert_int_equal(nbi_st_writer_add(w, tensors[i].name, NBI_U8, 1, &tensors[i].bytes, &err),
                         NB_OK);
    void *zeros = calloc(1, BIG);
    assert_non_null(zeros);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        assert_int_equal(nbi_st_writer_data(w, zeros, tensors[i].bytes, &err), NB_OK);
    free(zeros);
    assert_int_equal(nbi_st_writer_finish(w, &err), NB_OK);
    nbi_st_writer_destroy(&w);
    nbi_checkpoint *c = NULL;
    assert_int_equal(nbi_checkpoint_open(&c, dir, &err), NB_OK);
    assert_int_equal(nbi_checkpoint_files(c), 2);
    return c;
}

/* Do the pieces from *i on read [at, at + bytes) upwards, large but for the last? */
static void expect_range(const pieces *p, size_t *i, uint32_t file, uint64_t at, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes; done += p->of[(*i)++].bytes) {
        assert_true(*i < p->n);
        assert_int_equal(p->of[*i].file, file);
        assert_int_equal(p->of[*i].at, at + done);
        const uint64_t left = bytes - done;
        assert_int_equal(p->of[*i].bytes, left < NBI_ST_PIECE ? left : NBI_ST_PIECE);
    }
}

static uint64_t offset_of(nbi_checkpoint *c, const char *name)
{
    return nbi_checkpoint_offset(c, nbi_checkpoint_peek(c, name));
}

/* C74: unit by unit, in each by file and offset, every wanted byte once and in large pieces; one
 * unit ahead and no more. */
static void read_in_order(void **state)
{
    (void)state;
    char *dir = scratch_make();
    nbi_checkpoint *c = open_units(dir);
    pieces p = {.n = 0};
    const nbi_st_ahead_plan plan = {
        .n_units = 3, .unit_of = unit_by_name, .piece = note_piece, .user = &p};
    nb_error err;
    nbi_st_ahead *a = NULL;
    assert_int_equal(nbi_st_ahead_start(&a, c, &plan, &err), NB_OK);
    for (uint32_t u = 0; u < 3; u++) assert_int_equal(nbi_st_ahead_need(a, u, &err), NB_OK);
    nbi_st_ahead_sum sum;
    nbi_st_ahead_stop(&a, &sum);
    size_t i = 0;
    expect_range(&p, &i, 0, offset_of(c, "0.a"), BIG);
    expect_range(&p, &i, 1, offset_of(c, "0.d"), BIG);
    expect_range(&p, &i, 0, offset_of(c, "1.a"), 2 * BIG + NEAR); /* with the small gap */
    expect_range(&p, &i, 1, offset_of(c, "1.e"), BIG);
    expect_range(&p, &i, 0, offset_of(c, "2.b"), BIG);
    assert_int_equal(i, p.n);
    assert_int_equal(sum.bytes, 6 * BIG + NEAR);
    assert_true(sum.read_bytes <= sum.bytes);

    /* Unit 2 is not begun while unit 0 is used. */
    p.n = 0;
    assert_int_equal(nbi_st_ahead_start(&a, c, &plan, &err), NB_OK);
    assert_int_equal(nbi_st_ahead_need(a, 0, &err), NB_OK);
    nbi_st_ahead_stop(&a, NULL);
    for (i = 0; i < p.n; i++) assert_false(p.of[i].file == 0 && p.of[i].at < offset_of(c, "0.a"));
    nbi_checkpoint_close(&c);
    scratch_remove(dir);
}

/* A file that was cut after its header was read is a sentence, not a signal. */
static void cut_while_loading(void **state)
{
    (void)state;
    char *dir = scratch_make();
    nbi_checkpoint *c = open_units(dir);
    const nbi_st_ahead_plan plan = {.n_units = 3, .unit_of = unit_by_name};
    assert_int_equal(truncate(scratch_path(dir, nbi_checkpoint_file(c, 1)), 4096), 0);
    nb_error err;
    nbi_st_ahead *a = NULL;
    assert_int_equal(nbi_st_ahead_start(&a, c, &plan, &err), NB_OK);
    assert_int_equal(nbi_st_ahead_need(a, 0, &err), NB_IO);
    assert_non_null(strstr(err.text, nbi_checkpoint_file(c, 1)));
    assert_non_null(strstr(err.text, "shorter"));
    assert_int_equal(nbi_st_ahead_need(a, 1, &err), NB_IO);
    nbi_st_ahead_stop(&a, NULL);
    nbi_checkpoint_close(&c);
    scratch_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_headers),
        cmocka_unit_test(bad_headers),
        cmocka_unit_test(truncated),
        cmocka_unit_test(shards),
        cmocka_unit_test(index_and_folder),
        cmocka_unit_test(without_index),
        cmocka_unit_test(duplicate_over_shards),
        cmocka_unit_test(written_is_read),
        cmocka_unit_test(unfinished_leaves_nothing),
        cmocka_unit_test(resumed),
        cmocka_unit_test(many_tensors),
        cmocka_unit_test(read_in_order),
        cmocka_unit_test(cut_while_loading),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
