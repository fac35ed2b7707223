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

/* Modules that stay as they are, as wildcards in ModelOpt's manner. */
static json_t *ignore_list(const nbi_quantize_options *o, const nbi_config *c)
{
    static const char *const others[] = {"*mlp.shared_experts*", "*mlp.gate_proj*", "*mlp.up_proj*",
                                         "*mlp.down_proj*"};
    json_t *list = json_pack("[s]", "lm_head");
    if (o->scope != NBI_QUANTIZE_ALL)
        json_array_append_new(list, json_string("*self_attn*"));
    else if (c->has_indexer)
        json_array_append_new(list, json_string("*self_attn.indexer.weights_proj*"));
    for (size_t i = 0; o->scope == NBI_QUANTIZE_EXPERTS && i < sizeof others / sizeof *others; i++)
        json_array_append_new(list, json_string(others[i]));
    if (c->n_mtp_layers && !o->mtp) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%u.*", c->n_layers);
        json_array_append_new(list, json_string(name));
    } else if (c->n_mtp_layers) {
        json_array_append_new(list, json_string("*eh_proj*"));
    }
    return list;
}

static json_t *numbers(bool dynamic)
{
    return json_pack("{s:i, s:s, s:i, s:b}", "num_bits", 4, "type", "float", "group_size",
                     NBI_NVFP4_BLOCK, "dynamic", dynamic);
}

nb_status nbi_q_write_files(const char *dir, const nbi_quantize_options *o, const nbi_config *c,
                            const nbi_q_list *list, nb_error *err)
{
    static const char *const skip[] = {"config.json", "hf_quant_config.json", NBI_Q_RECORD, NULL};
    bool activations = list->modules[0].input_scale > 0;
    const char *algo = activations ? "NVFP4" : "W4A16_NVFP4";
    json_t *config = NULL, *ignore = ignore_list(o, c);
    char *path = nbi_path_join(o->model_dir, "config.json");
    nb_status st = path ? nbi_json_load(&config, path, FILE_BYTES_MAX, err)
                        : nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
    nbi_free(path);
    json_t *group = json_pack("{s:o, s:[s]}", "weights", numbers(false), "targets", "Linear");
    if (activations) json_object_set_new(group, "input_activations", numbers(false));
    json_t *q = json_pack("{s:s, s:s, s:{s:o}, s:O, s:{s:s, s:s}}", "quant_method", "modelopt",
                          "quant_algo", algo, "config_groups", "group_0", group, "ignore", ignore,
                          "producer", "name", "nibble", "version", NB_VERSION);
    json_t *hf =
        json_pack("{s:{s:s, s:s}, s:{s:s, s:n, s:i, s:o}}", "producer", "name", "nibble", "version",
                  NB_VERSION, "quantization", "quant_algo", algo, "kv_cache_quant_algo",
                  "group_size", NBI_NVFP4_BLOCK, "exclude_modules", ignore);
    if (st == NB_OK && (!q || !hf))
        st = nbi_fail(err, NB_NO_MEMORY, "out of memory for the configuration");
    if (st == NB_OK) json_object_set(config, "quantization_config", q);
    if (st == NB_OK) st = nbi_write_json(dir, "config.json", config, err);
    if (st == NB_OK) st = nbi_write_json(dir, "hf_quant_config.json", hf, err);
    if (st == NB_OK) st = nbi_copy_others(dir, o->model_dir, skip, err);
    json_decref(q);
    json_decref(hf);
    json_decref(config);
    return st;
}

/* ---- record */

/* Source files with size and time of change, and the options that decide the bytes. */
static json_t *make_record(const nbi_quantize_options *o, const nbi_checkpoint *ckpt)
{
    json_t *files = json_array();
    size_t n = nbi_checkpoint_files(ckpt);
    for (size_t i = 0; i <= n; i++) {
        const char *name = i < n ? nbi_checkpoint_file(ckpt, (uint32_t)i) : o->input_scales;
        char *path = i < n ? nbi_path_join(o->model_dir, name) : name ? nbi_strdup(name) : NULL;
        struct stat st;
        if (path && stat(path, &st) == 0)
            json_array_append_new(files, json_pack("{s:s, s:I, s:I, s:I}", "name", name, "bytes",
                                                   (json_int_t)st.st_size, "seconds",
                                                   (json_int_t)st.st_mtim.tv_sec, "nanoseconds",
                                                   (json_int_t)st.st_mtim.tv_nsec));
        nbi_free(path);
    }
    char *real = realpath(o->model_dir, NULL);
    json_t *record =
        json_pack("{s:s, s:s, s:s, s:b, s:I, s:o}", "nibble", NB_VERSION, "source",
                  real ? real : o->model_dir, "scope", nbi_quantize_scope_name(o->scope), "mtp",
                  o->mtp, "shard_bytes", (json_int_t)o->shard_bytes, "files", files);
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
