/* Quantisation descriptions: hf_quant_config.json and quantization_config of config.json.
 *
 * Called by inspect and by the model opener for its report. Two producers, one struct; where both
 * files speak, hf_quant_config.json (the producer's own) gives the algorithm, and the lists are
 * joined. Ignore lists are known to hold typing errors ("indexers_proj"): nothing here decides what
 * a tensor is. */
#include "format/quant.h"

#include <fnmatch.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/file.h"

#define FILE_BYTES_MAX ((size_t)16 << 20)
#define IGNORE_MAX     1000000u
#define MATCH_LIMIT    100000u /* steps of one expression */

const char *nbi_convention_name(nbi_convention convention)
{
    static const char *const names[NBI_CONVENTION_COUNT] = {"none", "modelopt",
                                                            "compressed-tensors", "fp8"};
    return convention < NBI_CONVENTION_COUNT ? names[convention] : "unknown";
}

static void copy_text(char *out, size_t size, const char *text)
{
    size_t n = strlen(text) < size ? strlen(text) : size - 1;
    memcpy(out, text, n);
    out[n] = 0;
}

static nb_status read_text(char *out, size_t size, const json_t *o, const char *key,
                           const char *name, nb_error *err)
{
    const char *text = NULL;
    NB_TRY(nbi_json_str(&text, o, key, name, err));
    if (text) copy_text(out, size, text);
    return NB_OK;
}

static nb_status add_ignored(nbi_quant *q, const json_t *list, const char *key, const char *name,
                             nb_error *err)
{
    if (!list || json_is_null(list)) return NB_OK;
    size_t n = json_array_size(list);
    if (!json_is_array(list) || n > IGNORE_MAX - q->n_ignore)
        return nbi_fail(err, NB_INVALID, "%s: %s is not a list of names", name, key);
    if (n == 0) return NB_OK;
    char **more = nbi_realloc(q->ignore, (q->n_ignore + n) * sizeof *more);
    if (!more) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for %s", name, key);
    q->ignore = more;
    for (size_t i = 0; i < n; i++) {
        const char *text = json_string_value(json_array_get(list, i));
        if (!text) return nbi_fail(err, NB_INVALID, "%s: %s[%zu] is not a string", name, key, i);
        if (!(more[q->n_ignore] = nbi_strdup(text)))
            return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for %s", name, key);
        q->n_ignore++;
    }
    return NB_OK;
}

/* The number format of the first group that states one. */
static nb_status read_groups(nbi_quant *q, const json_t *o, const char *name, nb_error *err)
{
    const char *key;
    json_t *group;
    json_object_foreach(json_object_get(o, "config_groups"), key, group)
    {
        const json_t *weights = json_object_get(group, "weights");
        if (!q->group_size && json_is_object(weights))
            NB_TRY(nbi_json_u32(&q->group_size, weights, "group_size", name, err));
    }
    return NB_OK;
}

static nb_status read_modelopt(nbi_quant *q, const json_t *o, const char *name, nb_error *err)
{
    q->convention = NBI_CONVENTION_MODELOPT;
    NB_TRY(read_text(q->algo, sizeof q->algo, o, "quant_algo", name, err));
    NB_TRY(read_text(q->kv_algo, sizeof q->kv_algo, o, "kv_cache_quant_algo", name, err));
    if (!q->kv_algo[0]) {
        const json_t *scheme = json_object_get(o, "kv_cache_scheme");
        uint32_t bits = 0;
        if (json_is_object(scheme)) NB_TRY(nbi_json_u32(&bits, scheme, "num_bits", name, err));
        if (bits == 8) copy_text(q->kv_algo, sizeof q->kv_algo, "FP8");
    }
    NB_TRY(nbi_json_u32(&q->group_size, o, "group_size", name, err));
    NB_TRY(read_groups(q, o, name, err));
    NB_TRY(add_ignored(q, json_object_get(o, "exclude_modules"), "exclude_modules", name, err));
    return add_ignored(q, json_object_get(o, "ignore"), "ignore", name, err);
}

static nb_status read_compressed(nbi_quant *q, const json_t *o, const char *name, nb_error *err)
{
    q->convention = NBI_CONVENTION_COMPRESSED_TENSORS;
    NB_TRY(read_text(q->algo, sizeof q->algo, o, "format", name, err));
    NB_TRY(read_groups(q, o, name, err));
    return add_ignored(q, json_object_get(o, "ignore"), "ignore", name, err);
}

static nb_status read_fp8(nbi_quant *q, const json_t *o, const char *name, nb_error *err)
{
    q->convention = NBI_CONVENTION_FP8;
    copy_text(q->algo, sizeof q->algo, "fp8");
    const json_t *block = json_object_get(o, "weight_block_size");
    if (block && !json_is_null(block)) {
        json_int_t size[2] = {json_integer_value(json_array_get(block, 0)),
                              json_integer_value(json_array_get(block, 1))};
        if (json_array_size(block) != 2 || size[0] < 1 || size[1] < 1 || size[0] > 65536 ||
            size[1] > 65536)
            return nbi_fail(err, NB_INVALID, "%s: weight_block_size is not two positive numbers",
                            name);
        q->block_rows = (uint32_t)size[0];
        q->block_cols = (uint32_t)size[1];
    }
    NB_TRY(add_ignored(q, json_object_get(o, "modules_to_not_convert"), "modules_to_not_convert",
                       name, err));
    return add_ignored(q, json_object_get(o, "ignored_layers"), "ignored_layers", name, err);
}

static nb_status read_config(nbi_quant *q, const json_t *config, const char *name, nb_error *err)
{
    const json_t *o = json_object_get(config, "quantization_config");
    if (!o || json_is_null(o))
        o = json_object_get(config, "compression_config"); /* older compressed-tensors */
    if (!o || json_is_null(o)) return NB_OK;
    if (!json_is_object(o))
        return nbi_fail(err, NB_INVALID, "%s: quantization_config is not an object", name);
    const char *method = NULL;
    NB_TRY(nbi_json_str(&method, o, "quant_method", name, err));
    if (!method)
        return nbi_fail(err, NB_INVALID, "%s: quantization_config has no quant_method", name);
    const json_t *producer = json_object_get(o, "producer");
    if (json_is_object(producer))
        NB_TRY(read_text(q->producer, sizeof q->producer, producer, "name", name, err));
    if (!strncmp(method, "modelopt", 8)) return read_modelopt(q, o, name, err);
    if (!strcmp(method, "compressed-tensors")) return read_compressed(q, o, name, err);
    if (!strcmp(method, "fp8")) return read_fp8(q, o, name, err);
    return nbi_fail(
        err, NB_UNSUPPORTED,
        "%s: quant_method \"%.40s\" is not supported; supported: modelopt, compressed-tensors, fp8",
        name, method);
}

static nb_status read_hf_quant(nbi_quant *q, const json_t *o, const char *name, nb_error *err)
{
    if (!o) return NB_OK;
    const json_t *body = json_object_get(o, "quantization"),
                 *producer = json_object_get(o, "producer");
    if (!json_is_object(body))
        return nbi_fail(err, NB_INVALID, "%s: hf_quant_config.json has no object quantization",
                        name);
    if (json_is_object(producer))
        NB_TRY(read_text(q->producer, sizeof q->producer, producer, "name", name, err));
    return read_modelopt(q, body, name, err);
}

nb_status nbi_quant_parse(nbi_quant *out, const json_t *config, const json_t *hf_quant,
                          const char *name, nb_error *err)
{
    if (!json_is_object(config)) return nbi_fail(err, NB_INVALID, "%s: not an object", name);
    nbi_quant q = {0};
    nb_status st = read_config(&q, config, name, err);
    if (st == NB_OK) st = read_hf_quant(&q, hf_quant, name, err);
    if (st == NB_OK)
        *out = q;
    else
        nbi_quant_free(&q);
    return st;
}

nb_status nbi_quant_load(nbi_quant *out, const char *dir, nb_error *err)
{
    char *path = nbi_path_join(dir, "config.json"),
         *hf_path = nbi_path_join(dir, "hf_quant_config.json");
    json_t *config = NULL, *hf = NULL;
    nb_status st =
        path && hf_path ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
    if (st == NB_OK) st = nbi_json_load(&config, path, FILE_BYTES_MAX, err);
    if (st == NB_OK && nbi_file_exists(hf_path))
        st = nbi_json_load(&hf, hf_path, FILE_BYTES_MAX, err);
    if (st == NB_OK) st = nbi_quant_parse(out, config, hf, path, err);
    json_decref(config);
    json_decref(hf);
    nbi_free(path);
    nbi_free(hf_path);
    return st;
}

void nbi_quant_free(nbi_quant *quant)
{
    for (uint32_t i = 0; i < quant->n_ignore; i++) nbi_free(quant->ignore[i]);
    nbi_free(quant->ignore);
    *quant = (nbi_quant){0};
}

/* An expression that does not compile or runs into the limit matches nothing: the lists are
 * advisory. */
static bool match_regex(const char *pattern, const char *module)
{
    int code;
    PCRE2_SIZE at;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                   PCRE2_UTF | PCRE2_ANCHORED, &code, &at, NULL);
    if (!re) return false;
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    pcre2_match_context *context = pcre2_match_context_create(NULL);
    if (context) pcre2_set_match_limit(context, MATCH_LIMIT);
    bool hit = data && context &&
               pcre2_match(re, (PCRE2_SPTR)module, strlen(module), 0, 0, data, context) >= 0;
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
    pcre2_code_free(re);
    return hit;
}

/* Exact name or shell wildcard; as in ModelOpt, * also spans dots. */
static bool match_glob(const char *pattern, const char *module)
{
    if (!strcmp(pattern, module)) return true;
    return strpbrk(pattern, "*?[") && strlen(pattern) < 4096 && fnmatch(pattern, module, 0) == 0;
}

bool nbi_quant_ignored(const nbi_quant *quant, const char *module)
{
    for (uint32_t i = 0; i < quant->n_ignore; i++) {
        const char *p = quant->ignore[i];
        if (!strncmp(p, "re:", 3) ? match_regex(p + 3, module) : match_glob(p, module)) return true;
    }
    return false;
}
