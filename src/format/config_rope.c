/* Rotary settings of config.json, in every spelling.
 *
 * transformers v5 writes rope_parameters {rope_type, rope_theta, ...}; older files have rope_theta
 * at the top and scaling in rope_scaling with `type` or `rope_type`; files of mixed models nest one
 * object per layer type in rope_parameters. Whatever asks for a scaling that is not implemented is
 * refused by name: positions that are silently unscaled look right on short prompts only. YaRN
 * follows transformers' modeling_rope_utils.py (arXiv 2309.00071). */
#include <math.h>
#include <string.h>

#include "format/config_parts.h"

/* The objects that may hold a key, in order of precedence. */
typedef struct rope_source {
    const nbi_config_source *s;
    const json_t *inner[2];
} rope_source;

static const json_t *inner_member(const rope_source *r, const char *key)
{
    for (int i = 0; i < 2; i++) {
        const json_t *v = json_object_get(r->inner[i], key);
        if (v && !json_is_null(v)) return v;
    }
    return NULL;
}

static nb_status number(double *out, const rope_source *r, const json_t *v, const char *key,
                        double low, double high)
{
    if (!v) return NB_OK;
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= low && x <= high))
        return nbi_fail(r->s->err, NB_INVALID, "%s: %s is not a number from %g to %g", r->s->name,
                        key, low, high);
    *out = x;
    return NB_OK;
}

/* An object of the file; one that nests equal objects per layer type is opened. */
static nb_status open_object(const json_t **out, const nbi_config_source *s, const char *key)
{
    json_t *o = json_object_get(s->o, key);
    const json_t *first = NULL;
    if (!o || json_is_null(o)) return NB_OK;
    if (!json_is_object(o))
        return nbi_fail(s->err, NB_INVALID, "%s: %s is not an object", s->name, key);
    const char *name;
    json_t *v;
    size_t nested = 0;
    json_object_foreach(o, name, v)
    {
        if (!json_is_object(v)) continue;
        if (first && !json_equal(first, v))
            return nbi_fail(s->err, NB_UNSUPPORTED, "%s: %s differs between layer types (%s)",
                            s->name, key, name);
        first = v;
        nested++;
    }
    if (nested && nested != json_object_size(o))
        return nbi_fail(s->err, NB_INVALID, "%s: %s mixes objects and values", s->name, key);
    *out = nested ? first : o;
    return NB_OK;
}

/* "default" or "yarn"; NULL for neither word anywhere. */
static nb_status read_type(const char **out, const rope_source *r)
{
    static const char *const spellings[] = {"rope_type", "type"};
    const char *type = NULL;
    for (int i = 0; i < 4; i++) {
        const json_t *v = json_object_get(r->inner[i / 2], spellings[i % 2]);
        if (!v || json_is_null(v)) continue;
        const char *t = json_string_value(v);
        if (!t)
            return nbi_fail(r->s->err, NB_INVALID, "%s: %s of the rope settings is not a string",
                            r->s->name, spellings[i % 2]);
        if (strcmp(t, "default") && strcmp(t, "yarn"))
            return nbi_fail(r->s->err, NB_UNSUPPORTED,
                            "%s: rope type \"%.60s\" is not supported; supported: default, yarn",
                            r->s->name, t);
        if (type && strcmp(type, t))
            return nbi_fail(r->s->err, NB_INVALID,
                            "%s: rope type is \"%s\" in one place and \"%s\" in another",
                            r->s->name, type, t);
        type = t;
    }
    *out = type;
    return NB_OK;
}

static nb_status read_theta(nbi_rope_config *rope, const rope_source *r)
{
    const json_t *v = inner_member(r, "rope_theta");
    if (!v) v = json_object_get(r->s->o, "rope_theta");
    if (!v || json_is_null(v))
        return nbi_fail(
            r->s->err, NB_INVALID,
            "%s: rope_theta is missing (at the top, in rope_parameters and in rope_scaling)",
            r->s->name);
    return number(&rope->theta, r, v, "rope_theta", 1.0 + 1e-9, 1e30);
}

/* Rotated values per head. MLA: qk_rope_head_dim, never head_dim. GQA: head_dim x
 * partial_rotary_factor. */
static nb_status read_dim(nbi_rope_config *rope, const nbi_config *c, const rope_source *r)
{
    double partial = c->family == NBI_FAMILY_GLM4_MOE ? 0.5 : 1.0;
    const json_t *v = inner_member(r, "partial_rotary_factor");
    if (!v) v = json_object_get(r->s->o, "partial_rotary_factor");
    if (v && !json_is_null(v)) NB_TRY(number(&partial, r, v, "partial_rotary_factor", 0, 1));
    if (c->family != NBI_FAMILY_GLM4_MOE && partial != 1.0)
        return nbi_fail(r->s->err, NB_UNSUPPORTED,
                        "%s: partial_rotary_factor is %g, model_type %s rotates whole heads",
                        r->s->name, partial, nbi_family_name(c->family));
    rope->dim =
        c->attention == NBI_ATTENTION_MLA ? c->rope_dim : (uint32_t)((double)c->head_dim * partial);
    if (rope->dim == 0 || rope->dim % 2)
        return nbi_fail(r->s->err, NB_INVALID,
                        "%s: %u values per head would be rotated, expected a positive even number",
                        r->s->name, rope->dim);
    return NB_OK;
}

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static nb_status read_yarn(nbi_rope_config *rope, const nbi_config *c, const rope_source *r)
{
    rope->yarn = true;
    rope->beta_fast = 32;
    rope->beta_slow = 1;
    /* A value at the top wins over the inner one, as in transformers; without either YaRN counts
     * from the declared maximum. */
    double original = c->max_positions, attention = 0;
    const json_t *top = json_object_get(r->s->o, "original_max_position_embeddings");
    const json_t *v =
        top && !json_is_null(top) ? top : inner_member(r, "original_max_position_embeddings");
    NB_TRY(number(&original, r, v, "original_max_position_embeddings", 1, 1u << 30));
    rope->original_max_positions = (uint32_t)original;
    rope->factor = c->max_positions / original;
    NB_TRY(number(&rope->factor, r, inner_member(r, "factor"), "factor", 1, 1e6));
    NB_TRY(number(&rope->beta_fast, r, inner_member(r, "beta_fast"), "beta_fast", 0, 1e6));
    NB_TRY(number(&rope->beta_slow, r, inner_member(r, "beta_slow"), "beta_slow", 0, 1e6));
    if (rope->beta_fast == 0) rope->beta_fast = 32; /* `or 32` in transformers */
    if (rope->beta_slow == 0) rope->beta_slow = 1;
    NB_TRY(number(&rope->mscale, r, inner_member(r, "mscale"), "mscale", 0, 100));
    NB_TRY(number(&rope->mscale_all_dim, r, inner_member(r, "mscale_all_dim"), "mscale_all_dim", 0,
                  100));
    v = inner_member(r, "attention_factor");
    NB_TRY(number(&attention, r, v, "attention_factor", 1e-6, 1e6));
    if (v)
        rope->attention_factor = attention;
    else if (rope->mscale != 0 && rope->mscale_all_dim != 0)
        rope->attention_factor = yarn_mscale(rope->factor, rope->mscale) /
                                 yarn_mscale(rope->factor, rope->mscale_all_dim);
    else
        rope->attention_factor = yarn_mscale(rope->factor, 1);
    v = inner_member(r, "truncate");
    if (v && !json_is_boolean(v))
        return nbi_fail(r->s->err, NB_INVALID, "%s: truncate is not true or false", r->s->name);
    rope->truncate = !v || json_is_true(v);
    return NB_OK;
}

/* MLA pairs are adjacent (2i, 2i+1). Only these two classes of transformers look at
 * rope_interleave; the DSA classes ignore it. */
static nb_status read_pairs(nbi_rope_config *rope, const nbi_config *c, const nbi_config_source *s)
{
    rope->interleaved = c->attention == NBI_ATTENTION_MLA;
    if (c->family == NBI_FAMILY_DEEPSEEK_V3 || c->family == NBI_FAMILY_GLM4_MOE_LITE)
        return nbi_json_bool(&rope->interleaved, s->o, "rope_interleave", s->name, s->err);
    return NB_OK;
}

nb_status nbi_config_rope(nbi_config *c, const nbi_config_source *s)
{
    rope_source r = {.s = s};
    nbi_rope_config rope = {.factor = 1, .attention_factor = 1, .truncate = true};
    const char *type = NULL;
    NB_TRY(open_object(&r.inner[0], s, "rope_parameters"));
    NB_TRY(open_object(&r.inner[1], s, "rope_scaling"));
    NB_TRY(read_type(&type, &r));
    NB_TRY(read_theta(&rope, &r));
    NB_TRY(read_dim(&rope, c, &r));
    NB_TRY(read_pairs(&rope, c, s));
    if (type && !strcmp(type, "yarn"))
        NB_TRY(read_yarn(&rope, c, &r));
    else if (inner_member(&r, "factor"))
        return nbi_fail(s->err, NB_INVALID,
                        "%s: rope settings have a factor but no type (rope_type) that uses it",
                        s->name);
    c->rope = rope;
    return NB_OK;
}
