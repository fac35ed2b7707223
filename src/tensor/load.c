/* Checkpoint tensors to matrices and vectors, whatever convention wrote them.
 *
 * Called by the model opener, inspect and quantize. What a module is, its own tensors decide: the
 * names beside `weight` and their dtypes; ignore lists and quant_method are not asked. Data stays
 * in the map; only names, vectors and converted FP8 scales go to the arena. */
#include "tensor/load.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/numfmt.h"

#define NAME_MAX_BYTES 512

/* Where a module's tensors are: names are base + suffix. Fused expert tensors have suffixes of
 * their own. */
typedef struct source {
    nbi_checkpoint *ckpt;
    nbi_arena *arena;
    const char *base;
    nb_error *err;
} source;

typedef struct suffixes {
    const char *weight[3];    /* "" ends the list */
    const char *packed;       /* compressed-tensors */
    const char *scale[3];     /* NVFP4 block scales; FP8 scales */
    const char *scale_inv[3]; /* FP8 block scales */
    const char *scale_2[3];   /* multiplies */
    const char *global_scale; /* divides */
    const char *input_scale[3];
    const char *input_global_scale;
} suffixes;

static const suffixes module_names = {
    .weight = {".weight"},
    .packed = ".weight_packed",
    .scale = {".weight_scale"},
    .scale_inv = {".weight_scale_inv"},
    .scale_2 = {".weight_scale_2"},
    .global_scale = ".weight_global_scale",
    .input_scale = {".input_scale"},
    .input_global_scale = ".input_global_scale",
};

/* Stacked experts: transformers v5 names the parameter itself; ModelOpt appends "_weight_scale",
 * transformers' FP8 "_scale_inv". */
static const suffixes stacked_names = {
    .weight = {"", ".weight"},
    .packed = ".weight_packed",
    .scale = {"_weight_scale", ".weight_scale", "_scale"},
    .scale_inv = {"_scale_inv", "_weight_scale_inv", ".weight_scale_inv"},
    .scale_2 = {"_weight_scale_2", ".weight_scale_2"},
    .global_scale = ".weight_global_scale",
    .input_scale = {"_input_scale", ".input_scale"},
    .input_global_scale = ".input_global_scale",
};

static const nbi_st_tensor *peek(const nbi_checkpoint *ckpt, const char *base, const char *suffix)
{
    char name[NAME_MAX_BYTES];
    int n = snprintf(name, sizeof name, "%s%s", base, suffix);
    return n > 0 && (size_t)n < sizeof name ? nbi_checkpoint_peek(ckpt, name) : NULL;
}

/* The first of up to three spellings that exists, marked used. */
static const nbi_st_tensor *find(const source *s, const char *const suffix[3])
{
    for (int i = 0; i < 3 && suffix[i]; i++) {
        const nbi_st_tensor *t = peek(s->ckpt, s->base, suffix[i]);
        if (t) return nbi_checkpoint_find(s->ckpt, t->name);
    }
    return NULL;
}

static const nbi_st_tensor *find_one(const source *s, const char *suffix)
{
    return find(s, (const char *const[3]){suffix});
}

/* ---- sentences */

static const char *shape_text(char out[96], const nbi_st_tensor *t)
{
    size_t n = 0;
    out[n++] = '[';
    for (uint32_t i = 0; i < t->n_dims; i++) {
        int k = snprintf(out + n, 90 - n, i ? ", %llu" : "%llu", (unsigned long long)t->shape[i]);
        if (k < 0 || n + (size_t)k >= 90) break;
        n += (size_t)k;
    }
    out[n++] = ']';
    out[n] = 0;
    return out;
}

static const char *file_of(const source *s, const nbi_st_tensor *t)
{
    return nbi_checkpoint_file(s->ckpt, t->file);
}

/* Names that loading reads sooner or later: not strays, although nobody has read them yet. */
static bool is_known_suffix(const char *suffix)
{
    static const char *const known[] = {
        ".weight",         ".weight_packed",       ".weight_scale",
        ".weight_scale_2", ".weight_global_scale", ".weight_scale_inv",
        ".input_scale",    ".input_global_scale",  ".bias"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(suffix, known[i])) return true;
    return false;
}

/* "X is missing", with a tensor of the module that nobody reads, when there is one: a misspelt
 * scale is named with the name it should have. */
static nb_status missing(const source *s, const nbi_st_tensor *beside, const char *suffix)
{
    size_t n = strlen(s->base), count = nbi_checkpoint_count(s->ckpt);
    const char *stray = NULL;
    for (size_t i = nbi_checkpoint_unused(s->ckpt, 0); i < count && !stray;
         i = nbi_checkpoint_unused(s->ckpt, i + 1)) {
        const char *name = nbi_checkpoint_at(s->ckpt, i)->name;
        if (!strncmp(name, s->base, n) && (name[n] == '.' || name[n] == '_') &&
            !is_known_suffix(name + n))
            stray = name;
    }
    return nbi_fail(s->err, NB_CORRUPT, "%s: tensor %s is %s, but %s%s is missing%s%s%s",
                    file_of(s, beside), beside->name, nbi_dtype_name(beside->dtype), s->base,
                    suffix, stray ? " (there is a tensor that nothing reads: " : "",
                    stray ? stray : "", stray ? ")" : "");
}

static nb_status wrong_shape(const source *s, const nbi_st_tensor *t, const char *expected)
{
    char shape[96];
    return nbi_fail(s->err, NB_CORRUPT, "%s: tensor %s is %s %s, expected %s", file_of(s, t),
                    t->name, nbi_dtype_name(t->dtype), shape_text(shape, t), expected);
}

/* ---- scalars */

static bool element(float *out, const nbi_st_tensor *t, uint64_t i)
{
    uint16_t half;
    switch (t->dtype) {
    case NBI_F32: memcpy(out, t->data + i * 4, 4); return true;
    case NBI_BF16:
        memcpy(&half, t->data + i * 2, 2);
        *out = nbi_bf16_f32(half);
        return true;
    case NBI_F16:
        memcpy(&half, t->data + i * 2, 2);
        *out = nbi_f16_f32(half);
        return true;
    case NBI_F8_E8M0: /* 2^(e - 127), 255 is NaN */
        *out = t->data[i] == 255 ? NAN : ldexpf(1, (int)t->data[i] - 127);
        return true;
    default: return false;
    }
}

static uint64_t elements(const nbi_st_tensor *t)
{
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) n *= t->shape[i];
    return n;
}

/* Scale number i of a tensor that holds one, or one per expert. Positive and finite, and so is its
 * reciprocal when it divides. */
static nb_status read_scale(float *out, const source *s, const nbi_st_tensor *t, uint64_t i,
                            uint64_t n, bool divides)
{
    float v;
    char expected[64];
    uint64_t have = elements(t);
    snprintf(expected, sizeof expected,
             n > 1 ? "1 or %llu floating-point numbers" : "one floating-point number",
             (unsigned long long)n);
    if ((have != 1 && have != n) || !element(&v, t, have == 1 ? 0 : i))
        return wrong_shape(s, t, expected);
    float used = divides ? 1.0f / v : v;
    if (!(v > 0) || isinf(v) || !(used > 0) || isinf(used))
        return nbi_fail(s->err, NB_CORRUPT,
                        "%s: tensor %s is %g, a scale must be a positive finite number",
                        file_of(s, t), t->name, (double)v);
    *out = used;
    return NB_OK;
}

/* ---- one module, or one slice of stacked ones */

/* What is wanted: experts [0, n) of [rows, cols] each, number `index`; n == 1 for a plain module.
 */
typedef struct wanted {
    uint32_t rows, cols; /* rows == 0: the file's own */
    uint32_t n, index;
    bool stacked;
} wanted;

/* Checks t against [n,] rows, cols / pack; fills in rows and cols when they are open. */
static nb_status check_shape(const source *s, const nbi_st_tensor *t, wanted *w, uint32_t pack)
{
    char expected[96];
    uint32_t first = w->stacked ? 1 : 0;
    bool ok = t->n_dims == first + 2 && (!w->stacked || t->shape[0] == w->n);
    if (ok && !w->rows) {
        if (t->shape[first] > UINT32_MAX || t->shape[first + 1] > UINT32_MAX / 2)
            return wrong_shape(s, t, "at most 2^31 rows and columns");
        w->rows = (uint32_t)t->shape[first];
        w->cols = (uint32_t)t->shape[first + 1] * pack;
    }
    ok = ok && t->shape[first] == w->rows && t->shape[first + 1] * pack == w->cols;
    if (w->stacked)
        snprintf(expected, sizeof expected, "[%u, %u, %u]", w->n, w->rows, w->cols / pack);
    else
        snprintf(expected, sizeof expected, w->rows ? "[%u, %u]" : "two dimensions", w->rows,
                 w->cols / pack);
    return ok ? NB_OK : wrong_shape(s, t, expected);
}

/* t as [n,] rows, cols of any scale grid. */
static bool has_grid(const nbi_st_tensor *t, const wanted *w, uint64_t rows, uint64_t cols)
{
    uint32_t first = w->stacked ? 1 : 0;
    return t->n_dims == first + 2 && (!first || t->shape[0] == w->n) && t->shape[first] == rows &&
           t->shape[first + 1] == cols;
}

static nb_status load_nvfp4(nbi_matrix *m, const source *s, const suffixes *names,
                            const nbi_st_tensor *t, wanted *w, bool divides)
{
    char expected[96];
    NB_TRY(check_shape(s, t, w, t->dtype == NBI_F4 ? 1 : 2));
    if (w->cols % NBI_NVFP4_BLOCK || w->cols == 0)
        return wrong_shape(s, t, "a multiple of 16 input columns");
    const nbi_st_tensor *scale = find(s, names->scale);
    if (!scale) return missing(s, t, names->scale[0]);
    uint32_t per_row = w->cols / NBI_NVFP4_BLOCK;
    snprintf(expected, sizeof expected,
             w->stacked ? "F8_E4M3 [%u, %u, %u]" : "F8_E4M3 [%.0u%u, %u]", w->stacked ? w->n : 0,
             w->rows, per_row);
    if (scale->dtype != NBI_F8_E4M3 || !has_grid(scale, w, w->rows, per_row))
        return wrong_shape(s, scale, expected);
    const nbi_st_tensor *global =
        divides ? find_one(s, names->global_scale) : find(s, names->scale_2);
    if (!global) return missing(s, t, divides ? names->global_scale : names->scale_2[0]);
    const nbi_st_tensor *input =
        divides ? find_one(s, names->input_global_scale) : find(s, names->input_scale);
    m->kind = NBI_WEIGHT_NVFP4;
    NB_TRY(read_scale(&m->global_scale, s, global, w->index, w->n, divides));
    if (input) NB_TRY(read_scale(&m->input_scale, s, input, w->index, w->n, divides));
    m->scales = scale->data + (uint64_t)w->index * w->rows * per_row;
    m->data = t->data + (uint64_t)w->index * w->rows * (w->cols / 2);
    return NB_OK;
}

/* FP8 block scales as float32: in place, or converted. */
static nb_status block_scales(const void **out, const source *s, const nbi_st_tensor *scale,
                              uint64_t begin, uint64_t n)
{
    if (scale->dtype == NBI_F32) {
        *out = scale->data + begin * sizeof(float);
        return NB_OK;
    }
    float *copy = nbi_arena_alloc(s->arena, n * sizeof *copy);
    if (!copy)
        return nbi_fail(s->err, NB_NO_MEMORY, "%s: out of memory for %llu scales", scale->name,
                        (unsigned long long)n);
    for (uint64_t i = 0; i < n; i++)
        if (!element(&copy[i], scale, begin + i))
            return wrong_shape(s, scale, "F32, BF16, F16 or F8_E8M0 scales");
    *out = copy;
    return NB_OK;
}

static nb_status load_fp8(nbi_matrix *m, const source *s, const suffixes *names,
                          const nbi_st_tensor *t, wanted *w)
{
    NB_TRY(check_shape(s, t, w, 1));
    const nbi_st_tensor *scale = find(s, names->scale_inv);
    if (!scale) scale = find(s, names->scale);
    if (!scale) return missing(s, t, names->scale_inv[0]);
    m->data = t->data + (uint64_t)w->index * w->rows * w->cols;
    uint64_t rows = ((uint64_t)w->rows + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK,
             cols = ((uint64_t)w->cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK;
    if (elements(scale) == 1 && !has_grid(scale, w, rows, cols)) {
        m->kind = NBI_WEIGHT_FP8_TENSOR;
        return read_scale(&m->global_scale, s, scale, w->index, w->n, false);
    }
    if (has_grid(scale, w, rows, cols)) {
        m->kind = NBI_WEIGHT_FP8_BLOCK;
        return block_scales(&m->scales, s, scale, w->index * rows * cols, rows * cols);
    }
    if (w->stacked && elements(scale) == w->n) {
        m->kind = NBI_WEIGHT_FP8_TENSOR;
        return read_scale(&m->global_scale, s, scale, w->index, w->n, false);
    }
    char expected[128];
    snprintf(expected, sizeof expected, "one number or one per block of 128 x 128, [%llu, %llu]",
             (unsigned long long)rows, (unsigned long long)cols);
    return wrong_shape(s, scale, expected);
}

static nb_status load_plain(nbi_matrix *m, const source *s, const nbi_st_tensor *t, wanted *w,
                            nbi_weight_kind kind)
{
    NB_TRY(check_shape(s, t, w, 1));
    m->kind = kind;
    m->data = t->data + (uint64_t)w->index * w->rows * w->cols * (nbi_dtype_bits(t->dtype) / 8);
    return NB_OK;
}

static nb_status load_any(nbi_matrix *out, const source *s, const suffixes *names, wanted *w)
{
    nbi_matrix m = {.global_scale = 1};
    const nbi_st_tensor *packed = find_one(s, names->packed),
                        *t = packed ? packed : find(s, names->weight);
    if (!t)
        return nbi_fail(s->err, NB_NOT_FOUND, "%s: tensor %s%s is missing",
                        nbi_checkpoint_dir(s->ckpt), s->base, names->weight[0]);
    switch (t->dtype) {
    case NBI_U8:
    case NBI_F4: NB_TRY(load_nvfp4(&m, s, names, t, w, packed != NULL)); break;
    case NBI_F8_E4M3: NB_TRY(load_fp8(&m, s, names, t, w)); break;
    case NBI_BF16: NB_TRY(load_plain(&m, s, t, w, NBI_WEIGHT_BF16)); break;
    case NBI_F16: NB_TRY(load_plain(&m, s, t, w, NBI_WEIGHT_F16)); break;
    case NBI_F32: NB_TRY(load_plain(&m, s, t, w, NBI_WEIGHT_F32)); break;
    default:
        return nbi_fail(s->err, NB_UNSUPPORTED,
                        "%s: tensor %s is %s; supported weights: BF16, F16, F32, F8_E4M3, NVFP4 "
                        "(U8 with scales)",
                        file_of(s, t), t->name, nbi_dtype_name(t->dtype));
    }
    m.rows = w->rows;
    m.cols = w->cols;
    *out = m;
    return NB_OK;
}

static nb_status keep_name(nbi_matrix *m, nbi_arena *arena, const char *name, nb_error *err)
{
    m->name = nbi_arena_strndup(arena, name, strlen(name));
    return m->name ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for its name", name);
}

nb_status nbi_matrix_load(nbi_matrix *out, nbi_checkpoint *ckpt, nbi_arena *arena, const char *name,
                          uint32_t rows, uint32_t cols, nb_error *err)
{
    source s = {ckpt, arena, name, err};
    wanted w = {.rows = rows, .cols = cols, .n = 1};
    nbi_matrix m;
    NB_TRY(load_any(&m, &s, &module_names, &w));
    NB_TRY(keep_name(&m, arena, name, err));
    *out = m;
    return NB_OK;
}

bool nbi_matrix_present(const nbi_checkpoint *ckpt, const char *name)
{
    return peek(ckpt, name, ".weight") || peek(ckpt, name, ".weight_packed");
}

nb_status nbi_matrix_load_fused(nbi_matrix *out, nbi_checkpoint *ckpt, nbi_arena *arena,
                                const char *base, uint32_t n_experts, uint32_t expert,
                                uint32_t part, uint32_t inter, uint32_t hidden, nb_error *err)
{
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    char stacked[NAME_MAX_BYTES], name[NAME_MAX_BYTES];
    NB_ASSERT(part < 3 && expert < n_experts);
    snprintf(stacked, sizeof stacked, "%s.%s", base, part == 2 ? "down_proj" : "gate_up_proj");
    snprintf(name, sizeof name, "%s.%u.%s", base, expert, parts[part]);
    source s = {ckpt, arena, stacked, err};
    wanted w = {.rows = part == 2 ? hidden : 2 * inter,
                .cols = part == 2 ? inter : hidden,
                .n = n_experts,
                .index = expert,
                .stacked = true};
    nbi_matrix m;
    NB_TRY(load_any(&m, &s, &stacked_names, &w));
    NB_TRY(keep_name(&m, arena, name, err));
    if (part < 2) NB_TRY(nbi_matrix_rows(&m, &m, part * inter, (part + 1) * inter, err));
    *out = m;
    return NB_OK;
}

/* ---- vectors */

nb_status nbi_vector_load(const float **out, uint32_t *n_out, nbi_checkpoint *ckpt,
                          nbi_arena *arena, const char *name, uint32_t n, nb_error *err)
{
    source s = {ckpt, arena, name, err};
    char expected[48];
    const nbi_st_tensor *t = nbi_checkpoint_find(ckpt, name);
    if (!t)
        return nbi_fail(err, NB_NOT_FOUND, "%s: tensor %s is missing", nbi_checkpoint_dir(ckpt),
                        name);
    snprintf(expected, sizeof expected,
             n ? "[%u] of F32, BF16 or F16" : "one dimension of F32, BF16 or F16", n);
    uint64_t have = elements(t);
    if (t->n_dims != 1 || (n && have != n) || have > UINT32_MAX || t->dtype == NBI_F8_E8M0)
        return wrong_shape(&s, t, expected);
    float *v = nbi_arena_alloc(arena, (size_t)have * sizeof *v);
    if (!v)
        return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for %llu values", name,
                        (unsigned long long)have);
    for (uint64_t i = 0; i < have; i++) {
        if (!element(&v[i], t, i)) return wrong_shape(&s, t, expected);
        if (!isfinite(v[i]))
            return nbi_fail(err, NB_CORRUPT, "%s: tensor %s: value %llu is %s", file_of(&s, t),
                            name, (unsigned long long)i, isnan(v[i]) ? "NaN" : "infinite");
    }
    *out = v;
    if (n_out) *n_out = (uint32_t)have;
    return NB_OK;
}

/* ---- tensors that are not weights of the computation */

const char *nbi_tensor_note(const char *name)
{
    static const struct note {
        const char *tail, *text;
    } notes[] = {
        {".k_scale", "FP8 key cache scale; tokens have scales of their own here"},
        {".v_scale", "FP8 value cache scale; tokens have scales of their own here"},
        {".input_scale", "activation scale of a weight that is not run with quantised activations"},
        {".input_global_scale",
         "activation scale of a weight that is not run with quantised activations"},
        {".inv_freq", "rotary table; computed from the configuration"},
        {".shared_head.head.weight", "copy of the output head for the MTP layer"},
    };
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof notes / sizeof *notes; i++) {
        size_t k = strlen(notes[i].tail);
        if (n >= k && !strcmp(name + n - k, notes[i].tail)) return notes[i].text;
    }
    return NULL;
}
