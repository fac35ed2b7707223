/* The registry of MoE runners. Callers: model (choice at load), CLI (lists). */
#include "moe/runner.h"

#include <stdio.h>
#include <string.h>

#include "moe/runners.h"

static const nbi_moe_runner_ops *const runners[] = {&nbi_moe_runner_cpu, &nbi_moe_runner_reference,
                                                    NULL};

/* Names that users bring from other engines and that mean kernels for GPUs. */
static const char *const gpu_names[] = {"flashinfer_cutlass",
                                        "flashinfer_cutedsl",
                                        "flashinfer_trtllm",
                                        "flashinfer_mxfp4",
                                        "triton",
                                        "triton_kernel",
                                        "deep_gemm",
                                        "cutlass",
                                        "marlin"};

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

nb_status nbi_moe_runner_choose(const nbi_moe_runner_ops **out, const char *name,
                                const nbi_backend *b, const nbi_moe_shape *shape, nb_error *err)
{
    if (!name || strcmp(name, "auto") == 0) return choose_auto(out, b, shape, err);
    for (const nbi_moe_runner_ops *const *r = runners; *r; r++) {
        if (!has_name(*r, name)) continue;
        char why[256] = "";
        if (!(*r)->supports(b, shape, why, sizeof why))
            return nbi_fail(err, NB_UNSUPPORTED, "MoE runner \"%s\" cannot run this: %s", name,
                            why);
        *out = *r;
        return NB_OK;
    }
    for (size_t i = 0; i < sizeof gpu_names / sizeof *gpu_names; i++) {
        if (strcmp(gpu_names[i], name) == 0)
            return nbi_fail(err, NB_UNSUPPORTED,
                            "MoE runner \"%s\" is a GPU runner and this is %s; use \"cpu\" or "
                            "\"auto\" here",
                            name, b->description);
    }
    return fail_unknown(name, err);
}
