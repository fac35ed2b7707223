/* The file of `nibble tune`: key, writing, reading. A file that does not fit is never half used. */
#include "moe/tune_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/build.h"
#include "base/file.h"
#include "base/json.h"

#define FORMAT    "nibble tune"
#define BYTES_MAX ((size_t)1 << 20)

nbi_tune_key nbi_tune_key_of(const nbi_backend *b, const nbi_moe_shape *shape)
{
    return (nbi_tune_key){.build = nbi_build_id(),
                          .device = b->description,
                          .driver = b->driver,
                          .sm = b->sm,
                          .shape = *shape};
}

/* FNV-1a. Build and driver are left out: after an update the old file is found, and said to be
 * old. */
static uint64_t hash_of(const nbi_tune_key *k)
{
    char text[256];
    const nbi_moe_shape *s = &k->shape;
    snprintf(text, sizeof text, "%s|%u|%u|%u|%u|%u|%s|%s|%d", k->device, k->sm, s->hidden, s->inter,
             s->n_experts, s->top_k, nbi_weight_kind_name(s->kind_gate_up),
             nbi_weight_kind_name(s->kind_down), s->w4a4);
    uint64_t h = 0xcbf29ce484222325u;
    for (const char *c = text; *c; c++) h = (h ^ (uint8_t)*c) * 0x100000001b3u;
    return h;
}

char *nbi_tune_path(const char *path, const nbi_tune_key *key)
{
    struct stat st;
    const size_t n = strlen(path);
    const bool folder = (n && path[n - 1] == '/') || (stat(path, &st) == 0 && S_ISDIR(st.st_mode));
    char name[40];
    snprintf(name, sizeof name, "tune-%016llx.json", (unsigned long long)hash_of(key));
    if (folder) return nbi_path_join(path, name);
    char *copy = nbi_malloc(n + 1);
    if (copy) memcpy(copy, path, n + 1);
    return copy;
}

/* ---------------------------------------------------------------- writing */

static json_t *shape_json(const nbi_moe_shape *s)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:s, s:s, s:b}", "hidden", (json_int_t)s->hidden,
                     "inter", (json_int_t)s->inter, "experts", (json_int_t)s->n_experts, "top_k",
                     (json_int_t)s->top_k, "gate_up", nbi_weight_kind_name(s->kind_gate_up), "down",
                     nbi_weight_kind_name(s->kind_down), "w4a4", s->w4a4);
}

static json_t *bucket_json(const nbi_moe_bucket *k, uint32_t i, const nbi_moe_times *times,
                           uint32_t n_times)
{
    json_t *us = json_object();
    for (uint32_t t = 0; t < n_times; t++)
        if (times[t].seconds[i] > 0)
            json_object_set_new(us, times[t].runner->name, json_real(1e6 * times[t].seconds[i]));
    json_t *rows = k->rows == UINT32_MAX ? json_null() : json_integer((json_int_t)k->rows);
    return json_pack("{s:o, s:s, s:o}", "rows", rows, "runner", k->runner->name, "us", us);
}

nb_status nbi_tune_write(const char *file, const nbi_tune_key *key, const nbi_moe_table *table,
                         const nbi_moe_times *times, uint32_t n_times, nb_error *err)
{
    json_t *buckets = json_array();
    for (uint32_t i = 0; i < table->n; i++)
        json_array_append_new(buckets, bucket_json(&table->buckets[i], i, times, n_times));
    const char *numerics = table->buckets[0].runner->numerics;
    json_t *root = json_pack("{s:s, s:I, s:s, s:s, s:s, s:I, s:o, s:s, s:o}", "format", FORMAT,
                             "version", (json_int_t)NBI_TUNE_VERSION, "build", key->build, "device",
                             key->device, "driver", key->driver, "compute_capability",
                             (json_int_t)key->sm, "shape", shape_json(&key->shape), "numerics",
                             numerics ? numerics : "", "buckets", buckets);
    const bool whole = root && json_array_size(json_object_get(root, "buckets")) == table->n;
    char *text = whole ? json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(6)) : NULL;
    json_decref(root);
    if (!text) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", file);
    const nb_status st = nbi_file_write(file, text, strlen(text), err);
    nbi_free(text);
    return st;
}

/* ---------------------------------------------------------------- reading */

static nb_status same_text(const json_t *root, const char *member, const char *want,
                           const char *file, nb_error *err)
{
    const char *got = "";
    NB_TRY(nbi_json_str(&got, root, member, file, err));
    if (strcmp(got, want) == 0) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED, "%s is for %s \"%.100s\", here it is \"%s\"", file, member,
                    got, want);
}

static nb_status same_number(const json_t *root, const char *member, uint32_t want,
                             const char *file, nb_error *err)
{
    uint32_t got = UINT32_MAX;
    NB_TRY(nbi_json_u32(&got, root, member, file, err));
    if (got == want) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED, "%s is for %s %u, here it is %u", file, member, got, want);
}

static nb_status check_shape(const json_t *shape, const nbi_moe_shape *s, const char *file,
                             nb_error *err)
{
    const struct {
        const char *name;
        uint32_t want;
    } numbers[] = {
        {"hidden", s->hidden}, {"inter", s->inter}, {"experts", s->n_experts}, {"top_k", s->top_k}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        NB_TRY(same_number(shape, numbers[i].name, numbers[i].want, file, err));
    NB_TRY(same_text(shape, "gate_up", nbi_weight_kind_name(s->kind_gate_up), file, err));
    NB_TRY(same_text(shape, "down", nbi_weight_kind_name(s->kind_down), file, err));
    bool w4a4 = !s->w4a4;
    NB_TRY(nbi_json_bool(&w4a4, shape, "w4a4", file, err));
    if (w4a4 == s->w4a4) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED, "%s is for activations %s, here they are %s", file,
                    w4a4 ? "w4a4" : "weight-only", s->w4a4 ? "w4a4" : "weight-only");
}

static nb_status check_key(const json_t *root, const nbi_tune_key *k, const char *file,
                           nb_error *err)
{
    const char *format = "";
    NB_TRY(nbi_json_str(&format, root, "format", file, err));
    if (strcmp(format, FORMAT) != 0)
        return nbi_fail(err, NB_CORRUPT, "%s: \"format\" is \"%.40s\", expected \"" FORMAT "\"",
                        file, format);
    NB_TRY(same_number(root, "version", NBI_TUNE_VERSION, file, err));
    NB_TRY(same_text(root, "build", k->build, file, err));
    NB_TRY(same_text(root, "device", k->device, file, err));
    NB_TRY(same_text(root, "driver", k->driver, file, err));
    NB_TRY(same_number(root, "compute_capability", k->sm, file, err));
    const json_t *shape = json_object_get(root, "shape");
    if (!json_is_object(shape))
        return nbi_fail(err, NB_CORRUPT, "%s: \"shape\" is %s, expected an object", file,
                        nbi_json_kind(shape));
    return check_shape(shape, &k->shape, file, err);
}

static nb_status read_bucket(nbi_moe_table *t, const json_t *o, bool last, const char *file,
                             const nbi_tune_key *key, const nbi_backend *b, nb_error *err)
{
    nbi_moe_bucket k = {.rows = UINT32_MAX};
    const char *name = NULL;
    const uint32_t before = t->n ? t->buckets[t->n - 1].rows : 0;
    char why[256] = "";
    NB_TRY(nbi_json_u32(&k.rows, o, "rows", file, err));
    NB_TRY(nbi_json_str(&name, o, "runner", file, err));
    if (last != (k.rows == UINT32_MAX) || k.rows <= before)
        return nbi_fail(err, NB_CORRUPT,
                        "%s: \"rows\" of bucket %u; expected ascending numbers, null in the last",
                        file, t->n);
    if (!name) return nbi_fail(err, NB_CORRUPT, "%s: bucket %u has no \"runner\"", file, t->n);
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); *r; r++)
        if (strcmp((*r)->name, name) == 0) k.runner = *r;
    if (!k.runner) return nbi_fail(err, NB_CORRUPT, "%s: runner \"%.40s\" is unknown", file, name);
    if (!k.runner->supports(b, &key->shape, why, sizeof why))
        return nbi_fail(err, NB_CORRUPT, "%s: runner %s cannot run this: %s", file, name, why);
    if (t->n && !nbi_moe_same_class(k.runner, t->buckets[0].runner))
        return nbi_fail(err, NB_CORRUPT,
                        "%s: runners %s and %s give other bits and cannot be mixed", file,
                        t->buckets[0].runner->name, name);
    t->buckets[t->n++] = k;
    return NB_OK;
}

static nb_status read_table(nbi_moe_table *out, const json_t *root, const char *file,
                            const nbi_tune_key *key, const nbi_backend *b, nb_error *err)
{
    const json_t *list = json_object_get(root, "buckets");
    const size_t n = json_array_size(list); /* 0 for what is no array */
    nbi_moe_table t = {0};
    if (!n || n > NBI_MOE_BUCKETS)
        return nbi_fail(err, NB_CORRUPT, "%s: \"buckets\" is %s of %zu, expected 1 to %u", file,
                        nbi_json_kind(list), n, NBI_MOE_BUCKETS);
    for (size_t i = 0; i < n; i++)
        NB_TRY(read_bucket(&t, json_array_get(list, i), i + 1 == n, file, key, b, err));
    nbi_moe_table_join(&t);
    *out = t;
    return NB_OK;
}

nb_status nbi_tune_read(nbi_moe_table *out, const char *file, const nbi_tune_key *key,
                        const nbi_backend *b, nb_error *err)
{
    json_t *root = NULL;
    nb_error why = {0};
    if (!nbi_file_exists(file))
        return nbi_fail(err, NB_NOT_FOUND, "%s: there is no such file", file);
    nb_status st = nbi_json_load(&root, file, BYTES_MAX, &why);
    if (st == NB_OK) st = check_key(root, key, file, &why);
    if (st == NB_OK) st = read_table(out, root, file, key, b, &why);
    json_decref(root);
    if (st == NB_OK) return NB_OK;
    if (st == NB_INVALID) st = NB_CORRUPT; /* what JSON access says of a wrong type */
    return nbi_fail(err, st, "%s", why.text);
}
