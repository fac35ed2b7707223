/* Files around the weights of a quantised checkpoint: input scales read, configurations written,
 * the record of a run. Called by nbi_quantize(). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/json.h"
#include "model/copy_files.h"
#include "model/quantize_parts.h"

#define FILE_BYTES_MAX ((size_t)256 << 20)

/* ---- input scales */

static const json_t *scale_of(const json_t *json, const char *module)
{
    char key[300];
    const json_t *v = json_object_get(json, module);
    snprintf(key, sizeof key, "%s.input_scale", module);
    return v ? v : json_object_get(json, key);
}

static nb_status read_scales(nbi_q_list *list, const json_t *json, const char *path, nb_error *err)
{
    uint32_t missing = 0;
    const char *first = "";
    for (uint32_t i = 0; i < list->n; i++) {
        const char *name = list->modules[i].matrix.name;
        const json_t *v = scale_of(json, name);
        if (!v) {
            if (!missing++) first = name;
            continue;
        }
        float scale = (float)json_number_value(v);
        if (!json_is_number(v) || !(scale > 0) || scale > 3e38f)
            return nbi_fail(err, NB_INVALID, "%s: the input scale of %s is not a positive number",
                            path, name);
        list->modules[i].input_scale = scale;
    }
    if (missing)
        return nbi_fail(err, NB_INVALID, "%s: no input scale for %s and %u other modules", path,
                        first, missing - 1);
    for (uint32_t i = 0; i < list->n;
         i++) { /* one activation, one scale: the largest of the group */
        for (uint32_t k = list->modules[i].next; k != i; k = list->modules[k].next)
            if (list->modules[k].input_scale > list->modules[i].input_scale)
                list->modules[i].input_scale = list->modules[k].input_scale;
    }
    return NB_OK;
}

nb_status nbi_q_read_input_scales(nbi_q_list *list, const char *path, nb_error *err)
{
    json_t *json = NULL;
    NB_TRY(nbi_json_load(&json, path, FILE_BYTES_MAX, err));
    nb_status st = json_is_object(json) ? read_scales(list, json, path, err)
                                        : nbi_fail(err, NB_INVALID, "%s: not an object", path);
    json_decref(json);
    return st;
}

/* ---- configurations */

/* Modules that stay as they are, as wildcards in ModelOpt's manner; NULL when out of memory. */
static json_t *ignore_list(const nbi_quantize_options *o, const nbi_config *c)
{
    static const char *const others[] = {"*mlp.shared_experts*", "*mlp.gate_proj*", "*mlp.up_proj*",
                                         "*mlp.down_proj*"};
    char mtp[64] = "*eh_proj*";
    bool bad = false;
    json_t *list = json_pack("[s]", "lm_head");
    if (o->scope != NBI_QUANTIZE_ALL)
        bad |= json_array_append_new(list, json_string("*self_attn*")) != 0;
    else if (c->has_indexer)
        bad |= json_array_append_new(list, json_string("*self_attn.indexer.weights_proj*")) != 0;
    for (size_t i = 0; o->scope == NBI_QUANTIZE_EXPERTS && i < sizeof others / sizeof *others; i++)
        bad |= json_array_append_new(list, json_string(others[i])) != 0;
    if (!o->mtp) snprintf(mtp, sizeof mtp, "model.layers.%u.*", c->n_layers);
    if (c->n_mtp_layers) bad |= json_array_append_new(list, json_string(mtp)) != 0;
    if (!bad) return list;
    json_decref(list);
    return NULL;
}

static json_t *numbers(bool dynamic)
{
    return json_pack("{s:i, s:s, s:i, s:b}", "num_bits", 4, "type", "float", "group_size",
                     NBI_NVFP4_BLOCK, "dynamic", dynamic);
}

/* quantization_config and hf_quant_config.json; NULL in either when out of memory. Takes over
 * `ignore`. */
static void describe(json_t **q, json_t **hf, json_t *ignore, bool activations)
{
    const char *algo = activations ? "NVFP4" : "W4A16_NVFP4";
    json_t *group = activations
                        ? json_pack("{s:o, s:o, s:[s]}", "weights", numbers(false),
                                    "input_activations", numbers(false), "targets", "Linear")
                        : json_pack("{s:o, s:[s]}", "weights", numbers(false), "targets", "Linear");
    *q = json_pack("{s:s, s:s, s:{s:o}, s:O, s:{s:s, s:s}}", "quant_method", "modelopt",
                   "quant_algo", algo, "config_groups", "group_0", group, "ignore", ignore,
                   "producer", "name", "nibble", "version", NB_VERSION);
    *hf =
        json_pack("{s:{s:s, s:s}, s:{s:s, s:n, s:i, s:o}}", "producer", "name", "nibble", "version",
                  NB_VERSION, "quantization", "quant_algo", algo, "kv_cache_quant_algo",
                  "group_size", NBI_NVFP4_BLOCK, "exclude_modules", ignore);
}

nb_status nbi_q_write_files(const char *dir, const nbi_quantize_options *o, const nbi_config *c,
                            const nbi_q_list *list, nb_error *err)
{
    static const char *const skip[] = {"config.json", "hf_quant_config.json", NBI_Q_RECORD, NULL};
    json_t *config = NULL, *q = NULL, *hf = NULL;
    char *path = nbi_path_join(o->model_dir, "config.json");
    nb_status st = path ? nbi_json_load(&config, path, FILE_BYTES_MAX, err)
                        : nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
    nbi_free(path);
    if (st == NB_OK) {
        describe(&q, &hf, ignore_list(o, c), list->modules[0].input_scale > 0);
        if (!q || !hf || json_object_set(config, "quantization_config", q))
            st = nbi_fail(err, NB_NO_MEMORY, "out of memory for the configuration");
    }
    if (st == NB_OK) st = nbi_write_json(dir, "config.json", config, err);
    if (st == NB_OK) st = nbi_write_json(dir, "hf_quant_config.json", hf, err);
    if (st == NB_OK) st = nbi_copy_others(dir, o->model_dir, skip, err);
    json_decref(q);
    json_decref(hf);
    json_decref(config);
    return st;
}

/* ---- record */

static json_t *file_record(const char *name, const char *path)
{
    struct stat st;
    if (stat(path, &st)) memset(&st, 0, sizeof st);
    return json_pack("{s:s, s:I, s:I, s:I}", "name", name, "bytes", (json_int_t)st.st_size,
                     "seconds", (json_int_t)st.st_mtim.tv_sec, "nanoseconds",
                     (json_int_t)st.st_mtim.tv_nsec);
}

/* Source files with size and time of change, and the options that decide the bytes. NULL when out
 * of memory. */
static json_t *make_record(const nbi_quantize_options *o, const nbi_checkpoint *ckpt)
{
    json_t *files = json_array();
    bool bad = !files;
    for (size_t i = 0; i < nbi_checkpoint_files(ckpt) && !bad; i++) {
        const char *name = nbi_checkpoint_file(ckpt, (uint32_t)i);
        char *path = nbi_path_join(o->model_dir, name);
        bad = !path || json_array_append_new(files, file_record(name, path));
        nbi_free(path);
    }
    if (!bad && o->input_scales)
        bad = json_array_append_new(files, file_record(o->input_scales, o->input_scales)) != 0;
    char *real = realpath(o->model_dir, NULL);
    json_t *record =
        bad ? NULL
            : json_pack("{s:s, s:s, s:s, s:b, s:I, s:O}", "nibble", NB_VERSION, "source",
                        real ? real : o->model_dir, "scope", nbi_quantize_scope_name(o->scope),
                        "mtp", o->mtp, "shard_bytes", (json_int_t)o->shard_bytes, "files", files);
    json_decref(files);
    free(real);
    return record;
}

nb_status nbi_q_record(bool *same, const char *dir, const nbi_quantize_options *o,
                       const nbi_checkpoint *ckpt, bool write, nb_error *err)
{
    char *path = nbi_path_join(dir, NBI_Q_RECORD);
    json_t *record = make_record(o, ckpt), *found = NULL;
    nb_status st =
        path && record ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "out of memory for the record");
    *same = st == NB_OK && nbi_file_exists(path) &&
            nbi_json_load(&found, path, FILE_BYTES_MAX, NULL) == NB_OK && json_equal(record, found);
    if (st == NB_OK && !*same && write) st = nbi_write_json(dir, NBI_Q_RECORD, record, err);
    json_decref(record);
    json_decref(found);
    nbi_free(path);
    return st;
}
