/* The registry of MoE runners. Callers: model (choice at load), CLI (lists). */
#include "moe/runner.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "moe/runners.h"

#if !NBI_WITH_CUDA
/* Listed so that a user sees what a CUDA build would have. */
static bool no_cuda(const nbi_backend *b, const nbi_moe_shape *shape, char *why, size_t why_bytes)
{
    (void)b, (void)shape;
    snprintf(why, why_bytes, "this build has no CUDA");
    return false;
}

#define ABSENT(id, text)                                                               \
    static const nbi_moe_runner_ops absent_##id = {.version = 1,                       \
                                                   .size = sizeof(nbi_moe_runner_ops), \
                                                   .name = #id,                        \
                                                   .summary = NBI_MOE_##text,          \
                                                   .supports = no_cuda}
ABSENT(cuda, CUDA_SUMMARY);
ABSENT(cuda_gemv, CUDA_GEMV_SUMMARY);
ABSENT(cuda_stream, CUDA_STREAM_SUMMARY);
ABSENT(cuda_grouped, CUDA_GROUPED_SUMMARY);
ABSENT(cuda_masked, CUDA_MASKED_SUMMARY);
ABSENT(cuda_masked_fp4, CUDA_MASKED_FP4_SUMMARY);
ABSENT(cuda_grouped_fp4, CUDA_GROUPED_FP4_SUMMARY);
#define CUDA_RUNNERS                                                            \
    &absent_cuda, &absent_cuda_gemv, &absent_cuda_stream, &absent_cuda_grouped, \
        &absent_cuda_masked, &absent_cuda_masked_fp4, &absent_cuda_grouped_fp4
#else
#define CUDA_RUNNERS                                                              \
    &nbi_moe_runner_cuda, &nbi_moe_runner_cuda_gemv, &nbi_moe_runner_cuda_stream, \
        &nbi_moe_runner_cuda_grouped, &nbi_moe_runner_cuda_masked,                \
        &nbi_moe_runner_cuda_masked_fp4, &nbi_moe_runner_cuda_grouped_fp4
#endif

static const nbi_moe_runner_ops *const runners[] = {&nbi_moe_runner_cpu, &nbi_moe_runner_reference,
                                                    CUDA_RUNNERS,
#if NBI_WITH_CUTLASS
                                                    &nbi_moe_runner_cutlass,
#endif
                                                    NULL};

#define TRTLLM_WHY                                                                            \
    "its kernels (trtllm-gen) exist for SM100 and SM103 only; use \"flashinfer_cutlass\" or " \
    "\"auto\""

/* Names that users bring from other engines and that mean kernels for GPUs: the runner that does
 * that algorithm here, or why there is none. `sm100`: the name means kernels of SM100 and SM103; on
 * another device `why` holds. Where a build has a runner of the name (cutlass), that comes first,
 * and what it does not take is done as without it. */
static const struct foreign {
    const char *name, *runner, *why;
    bool sm100;
    const char *fp4; /* with NVFP4 activations on SM120, which has FP4 products */
} foreign[] = {
    {"flashinfer_cutlass", "cuda_grouped", NULL, false, "cuda_grouped_fp4"},
    {"cutlass", "cuda_grouped", NULL, false, "cuda_grouped_fp4"},
    {"triton", "cuda_grouped", NULL, false, NULL},
    {"triton_kernel", "cuda_grouped", NULL, false, NULL},
    {"deep_gemm", "cuda_grouped", NULL, false, NULL},
    {"marlin", "cuda_grouped", NULL, false, NULL},
    {"flashinfer_cutedsl", "cuda_masked", NULL, false, "cuda_masked_fp4"},
    {"flashinfer_trtllm", "cuda", TRTLLM_WHY, true, NULL},
    {"flashinfer_trtllm_routed", "cuda", TRTLLM_WHY, true, NULL},
    {"aiter", NULL, "it is for AMD GPUs; use \"auto\"", false, NULL},
    {"flashinfer_mxfp4", NULL,
     "it is for MXFP4 weights, which no model of nibble has; use \"auto\"", false, NULL},
};

const nbi_moe_runner_ops *const *nbi_moe_runners(void)
{
    return runners;
}

static bool has_name(const nbi_moe_runner_ops *r, const char *name)
{
    if (strcmp(r->name, name) == 0) return true;
    for (const char *const *a = r->aliases; a && *a; a++)
        if (strcmp(*a, name) == 0) return true;
    return false;
}

static nb_status choose_auto(const nbi_moe_runner_ops **out, const nbi_backend *b,
                             const nbi_moe_shape *shape, nb_error *err)
{
    char why[256] = "none is built in";
    for (const nbi_moe_runner_ops *const *r = runners; *r; r++) {
        if ((*r)->supports(b, shape, why, sizeof why)) {
            *out = *r;
            return NB_OK;
        }
    }
    return nbi_fail(err, NB_UNSUPPORTED, "no MoE runner can run this model on %s: %s",
                    b->description, why);
}

static nb_status fail_unknown(const char *name, nb_error *err)
{
    char known[256] = "auto";
    size_t n = strlen(known);
    for (const nbi_moe_runner_ops *const *r = runners; *r && n < sizeof known; r++)
        n += (size_t)snprintf(known + n, sizeof known - n, ", %s", (*r)->name);
    return nbi_fail(err, NB_INVALID, "MoE runner \"%s\" is unknown; known are %s", name, known);
}

static const nbi_moe_runner_ops *find(const char *name)
{
    for (const nbi_moe_runner_ops *const *r = runners; *r; r++)
        if (has_name(*r, name)) return *r;
    return NULL;
}

static nb_status choose_named(const nbi_moe_runner_ops **out, const nbi_moe_runner_ops *r,
                              const char *name, const nbi_backend *b, const nbi_moe_shape *shape,
                              nb_error *err)
{
    char why[256] = "";
    if (!r->supports(b, shape, why, sizeof why))
        return nbi_fail(err, NB_UNSUPPORTED, "MoE runner \"%s\" cannot run this: %s", name, why);
    *out = r;
    return NB_OK;
}

static nb_status choose_foreign(const nbi_moe_runner_ops **out, const struct foreign *f,
                                const nbi_backend *b, const nbi_moe_shape *shape, nb_error *err)
{
    if (strcmp(b->ops->name, "cuda") != 0)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "MoE runner \"%s\" is a GPU runner and this is %s; use \"cpu\" or "
                        "\"auto\" here",
                        f->name, b->description);
    if (!f->runner || (f->sm100 && (b->sm < 100 || b->sm > 103)))
        return nbi_fail(err, NB_UNSUPPORTED, "MoE runner \"%s\" cannot run here: %s", f->name,
                        f->why);
    const bool fp4 = f->fp4 && shape->w4a4 && b->sm / 10 == 12;
    const nbi_moe_runner_ops *r = find(fp4 ? f->fp4 : f->runner);
    NB_ASSERT(r);
    return choose_named(out, r, f->name, b, shape, err);
}

static const struct foreign *find_foreign(const char *name)
{
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (strcmp(foreign[i].name, name) == 0) return &foreign[i];
    return NULL;
}

nb_status nbi_moe_runner_choose(const nbi_moe_runner_ops **out, const char *name,
                                const nbi_backend *b, const nbi_moe_shape *shape, nb_error *err)
{
    if (!name || strcmp(name, "auto") == 0) return choose_auto(out, b, shape, err);
    const nbi_moe_runner_ops *r = find(name);
    const struct foreign *f = find_foreign(name);
    if (!f) return r ? choose_named(out, r, name, b, shape, err) : fail_unknown(name, err);
    char why[256] = "";
    if (r && r->supports(b, shape, why, sizeof why)) {
        *out = r;
        return NB_OK;
    }
    NB_TRY(choose_foreign(out, f, b, shape, err));
    nbi_log(NB_LOG_INFO, "MoE runner \"%s\": \"%s\" does that here (%s)%s%s", name, (*out)->name,
            (*out)->summary, r ? "; " : "", why);
    return NB_OK;
}
