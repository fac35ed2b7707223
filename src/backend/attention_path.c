/* Names of attention backends and cache types. What a name asks for is written as in SGLang
 * (`server_args.py`, `layers/attention/attention_registry.py`, 2026-07). */
#include "backend/attention_path.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"

/* What a name asks of the device and of the model. */
enum {
    ON_GPU = 1,
    ON_CPU = 2,
    FOR_MLA = 4,      /* latent attention without or with an index */
    FOR_GQA = 8,      /* keys and values per head */
    FOR_SPARSE = 16,  /* latent attention over the positions that an index chose */
    ONLY_SPARSE = 32, /* and nothing else */
    OWN = 64,         /* nibble's name of its path */
    SM90_AT_MOST = 128,
    SM100_ONLY = 256, /* SM100, SM103 */
    NOT_SM120 = 512,
};

#define ANY_MODEL (FOR_MLA | FOR_GQA | FOR_SPARSE)

static const struct known {
    const char *name;
    unsigned asks;
    const char *why; /* never possible: the reason */
} known[] = {
    {"cpu", ON_CPU | ANY_MODEL | OWN, NULL},
    {"cuda", ON_GPU | ANY_MODEL | OWN, NULL},
    {"torch_native", ON_CPU | ON_GPU | FOR_MLA | FOR_GQA, NULL},
    {"intel_amx", ON_CPU | FOR_MLA | FOR_GQA, NULL},
    {"flashinfer", ON_GPU | FOR_MLA | FOR_GQA, NULL},
    {"triton", ON_GPU | FOR_MLA | FOR_GQA, NULL},
    {"flex_attention", ON_GPU | FOR_GQA, NULL},
    {"fa3", ON_GPU | ANY_MODEL | SM90_AT_MOST, NULL},
    {"fa4", ON_GPU | FOR_MLA | FOR_GQA | NOT_SM120, NULL},
    {"flashmla", ON_GPU | FOR_MLA | NOT_SM120, NULL},
    {"cutlass_mla", ON_GPU | FOR_MLA | SM100_ONLY, NULL},
    {"trtllm_mla", ON_GPU | FOR_MLA | SM100_ONLY, NULL},
    {"trtllm_mha", ON_GPU | FOR_GQA | SM100_ONLY, NULL},
    {"dsa", ON_GPU | ON_CPU | FOR_SPARSE | ONLY_SPARSE, NULL},
    {"nsa", ON_GPU | ON_CPU | FOR_SPARSE | ONLY_SPARSE, NULL},
    {"flashmla_sparse", ON_GPU | FOR_SPARSE | ONLY_SPARSE | NOT_SM120, NULL},
    {"flashmla_auto", ON_GPU | FOR_SPARSE | ONLY_SPARSE | NOT_SM120, NULL},
    {"tilelang", ON_GPU | FOR_SPARSE | ONLY_SPARSE, NULL},
    {"trtllm", ON_GPU | FOR_SPARSE | ONLY_SPARSE | SM100_ONLY, NULL},
    {"flashmla_kv", ON_GPU | FOR_SPARSE | ONLY_SPARSE | NOT_SM120, NULL},
    {"dual_chunk_flash_attn", 0, "it is for Qwen's dual chunk models, which nibble does not run"},
    {"aiter", 0, "it is for AMD GPUs"},
    {"wave", 0, "it is for AMD GPUs"},
    {"ascend", 0, "it is for Ascend NPUs"},
};

#define N_KNOWN (sizeof known / sizeof *known)

static bool on_gpu(const nbi_backend *b)
{
    return strcmp(b->ops->name, "cuda") == 0;
}

const char *nbi_attention_path(const nbi_backend *b)
{
    return b->ops->name;
}

const char *nbi_attention_summary(const nbi_backend *b, const nbi_config *c)
{
    (void)b;
    if (c->attention == NBI_ATTENTION_GQA)
        return "grouped-query attention over pages of 64 tokens, contexts in splits of fixed size";
    if (c->has_indexer)
        return "latent attention, absorbed, over the positions that the index chose";
    return "latent attention, absorbed, over pages of 64 tokens, contexts in splits of fixed size";
}

const char *const *nbi_attention_known(void)
{
    static const char *names[N_KNOWN + 1];
    for (size_t i = 0; i < N_KNOWN; i++) names[i] = known[i].name;
    return names;
}

static const struct known *find(const char *name)
{
    for (size_t i = 0; i < N_KNOWN; i++)
        if (strcmp(known[i].name, name) == 0) return &known[i];
    return NULL;
}

static const char *model_reason(const struct known *k, const nbi_config *c)
{
    const bool mla = c->attention == NBI_ATTENTION_MLA, sparse = mla && c->has_indexer;
    if ((k->asks & ONLY_SPARSE) && !sparse)
        return "it is sparse attention over an index (DSA), and this model has no indexer";
    if (sparse && !(k->asks & FOR_SPARSE))
        return "this model attends to the positions that its indexer chose (DSA); use \"dsa\" or "
               "\"auto\"";
    if (mla && !sparse && !(k->asks & FOR_MLA))
        return "this model has latent attention (MLA); use \"flashmla\", \"flashinfer\" or "
               "\"auto\"";
    if (!mla && !(k->asks & FOR_GQA))
        return "it is for latent attention (MLA), and this model has grouped-query attention; use "
               "\"flashinfer\" or \"auto\"";
    return NULL;
}

static const char *device_reason(const struct known *k, const nbi_backend *b)
{
    if (!(k->asks & (on_gpu(b) ? ON_GPU : ON_CPU)))
        return on_gpu(b) ? "it is for CPUs" : "its kernels are for GPUs; use \"cpu\" or \"auto\"";
    if (!on_gpu(b)) return NULL;
    if ((k->asks & SM90_AT_MOST) && b->sm > 90)
        return "FlashAttention 3 exists for SM80 to SM90; use \"flashinfer\" or \"auto\"";
    if ((k->asks & SM100_ONLY) && (b->sm < 100 || b->sm > 103))
        return "its kernels exist for SM100 and SM103 only; use \"auto\"";
    if ((k->asks & NOT_SM120) && b->sm >= 120)
        return "its kernels need what SM120 lacks (wgmma, tcgen05); use \"auto\"";
    return NULL;
}

bool nbi_attention_supports(const nbi_backend *b, const nbi_config *c, const char *name, char *why,
                            size_t why_bytes)
{
    const struct known *k = find(name);
    const char *reason = !k ? "it is not known" : k->asks ? NULL : k->why;
    if (!reason) reason = device_reason(k, b);
    if (!reason) reason = model_reason(k, c);
    if (!reason) reason = k->why;
    if (!reason) return true;
    snprintf(why, why_bytes, "%s", reason);
    return false;
}

static nb_status fail_unknown(const char *option, const char *name, nb_error *err)
{
    char list[512] = "auto";
    size_t n = strlen(list);
    for (size_t i = 0; i < N_KNOWN && n < sizeof list; i++)
        n += (size_t)snprintf(list + n, sizeof list - n, ", %s", known[i].name);
    return nbi_fail(err, NB_INVALID, "%s: \"%s\" is unknown; known are %s", option, name, list);
}

static nb_status choose(const char *option, const char *name, bool sparse, const nbi_backend *b,
                        const nbi_config *c, nb_error *err)
{
    char why[256];
    if (!name || !name[0] || strcmp(name, "auto") == 0) return NB_OK;
    const struct known *k = find(name);
    if (!k) return fail_unknown(option, name, err);
    if (sparse && !c->has_indexer)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s \"%s\" cannot run here: this model has no indexer (DSA)", option, name);
    if (!nbi_attention_supports(b, c, name, why, sizeof why))
        return nbi_fail(err, NB_UNSUPPORTED, "%s \"%s\" cannot run on %s: %s", option, name,
                        b->description, why);
    if (!(k->asks & OWN))
        nbi_log(NB_LOG_INFO, "%s \"%s\": \"%s\" does that here (%s)", option, name,
                nbi_attention_path(b), nbi_attention_summary(b, c));
    return NB_OK;
}

nb_status nbi_attention_choose(const nbi_attention_names *n, const nbi_backend *b,
                               const nbi_config *c, nb_error *err)
{
    if (!n) return NB_OK;
    NB_TRY(choose("--attention-backend", n->backend, false, b, c, err));
    NB_TRY(choose("--prefill-attention-backend", n->prefill, false, b, c, err));
    NB_TRY(choose("--decode-attention-backend", n->decode, false, b, c, err));
    NB_TRY(choose("--dsa-prefill-backend", n->sparse_prefill, true, b, c, err));
    return choose("--dsa-decode-backend", n->sparse_decode, true, b, c, err);
}

nb_status nbi_kv_dtype_parse(nbi_dtype *out, const char *name, nb_error *err)
{
    static const struct {
        const char *name;
        nbi_dtype dtype;
    } types[] = {{"auto", NBI_DTYPE_COUNT}, {"bf16", NBI_BF16},         {"bfloat16", NBI_BF16},
                 {"f32", NBI_F32},          {"float32", NBI_F32},       {"fp8_e4m3", NBI_F8_E4M3},
                 {"fp8", NBI_F8_E4M3},      {"fp8_ds_mla", NBI_F8_E4M3}};
    static const struct {
        const char *name, *why;
    } others[] = {
        {"fp8_e5m2", "two bits of mantissa lose too much and its range is not needed, since every "
                     "128 values have a scale; use fp8_e4m3"},
        {"fp4_e2m1", "the attention kernels read BF16, F32 and E4M3; use fp8_e4m3"},
        {"nvfp4", "the attention kernels read BF16, F32 and E4M3; use fp8_e4m3"},
        {"int8", "the attention kernels read BF16, F32 and E4M3; use fp8_e4m3"},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (name && strcmp(name, types[i].name) != 0) continue;
        *out = types[i].dtype;
        return NB_OK;
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(name, others[i].name))
            return nbi_fail(err, NB_UNSUPPORTED, "--kv-cache-dtype \"%s\": %s", name,
                            others[i].why);
    return nbi_fail(err, NB_INVALID,
                    "--kv-cache-dtype \"%s\": expected auto, bf16, fp8_e4m3 (fp8) or f32", name);
}

const char *nbi_kv_dtype_name(nbi_dtype dtype)
{
    return dtype == NBI_F8_E4M3 ? "fp8_e4m3" : dtype == NBI_BF16 ? "bf16" : "f32";
}

nb_status nbi_kv_dtype_choose(nbi_dtype *out, const char *name, const nbi_kv_asked *asked,
                              nb_error *err)
{
    const bool fp8 = asked->algo && !strcmp(asked->algo, "FP8");
    nbi_dtype dtype;
    NB_TRY(nbi_kv_dtype_parse(&dtype, name, err));
    if (dtype != NBI_DTYPE_COUNT) {
        *out = dtype;
        return NB_OK;
    }
    *out = fp8 ? NBI_F8_E4M3 : NBI_BF16;
    if (asked->level == NBI_CPU_REFERENCE) *out = NBI_F32;
    if (asked->algo && asked->algo[0])
        nbi_log(NB_LOG_INFO, "KV cache: the checkpoint asks for %s; %s is taken", asked->algo,
                nbi_kv_dtype_name(*out));
    return NB_OK;
}
