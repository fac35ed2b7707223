/* Backends by name. Callers: model, engine, tests. A backend that is not in this build is refused
 * with a sentence, never replaced silently. */
#include "backend/backend.h"

#include <string.h>

#include "backend/cpu/cpu_backend.h"
#include "base/log.h"

#if NBI_WITH_CUDA
extern const nbi_backend_ops nbi_cuda_ops; /* its own header is C++ */
#endif

/* Every member of a table is required: a missing one is a fault of the build, found at opening. */
static void assert_complete(const nbi_backend_ops *ops)
{
    NB_ASSERT(ops->version == 1 && ops->size == sizeof(nbi_backend_ops) && ops->name);
#define HAS(member) NB_ASSERT(ops->member != NULL)
    HAS(open), HAS(close), HAS(alloc), HAS(release), HAS(upload), HAS(download);
    HAS(weight_prepare), HAS(weight_release), HAS(workspace_bytes), HAS(reserve);
    HAS(step_begin), HAS(step_end);
    HAS(embed), HAS(rope_table), HAS(rmsnorm), HAS(linear), HAS(swiglu), HAS(gather), HAS(add);
    HAS(mla_append), HAS(mla_attend), HAS(gqa_append), HAS(gqa_attend);
    HAS(index_append), HAS(index_select), HAS(index_reuse), HAS(route), HAS(sample), HAS(sync);
#undef HAS
}

static nb_status open_cuda(nbi_backend **out, const nbi_backend_options *opt, nb_error *err)
{
#if NBI_WITH_CUDA
    assert_complete(&nbi_cuda_ops);
    return nbi_cuda_ops.open(out, opt, err);
#else
    (void)out, (void)opt;
    return nbi_fail(err, NB_UNSUPPORTED,
                    "device \"cuda\": this build has no CUDA backend; use \"cpu\" or \"auto\"");
#endif
}

static nb_status open_cpu(nbi_backend **out, const nbi_backend_options *opt, nb_error *err)
{
    assert_complete(&nbi_cpu_ops);
    return nbi_cpu_ops.open(out, opt, err);
}

/* A GPU when there is one, said in the log either way. */
static nb_status open_auto(nbi_backend **out, const nbi_backend_options *opt, nb_error *err)
{
#if NBI_WITH_CUDA && !NBI_CUDA_EMULATED
    nb_error why;
    if (open_cuda(out, opt, &why) == NB_OK) return NB_OK;
    nbi_log(NB_LOG_INFO, "%s; using the CPU", why.text);
#endif
    return open_cpu(out, opt, err);
}

nb_status nbi_backend_open(nbi_backend **out, const char *name, const nbi_backend_options *opt,
                           nb_error *err)
{
    if (!name || strcmp(name, "auto") == 0) return open_auto(out, opt, err);
    if (strcmp(name, "cpu") == 0) return open_cpu(out, opt, err);
    if (strcmp(name, "cuda") == 0) return open_cuda(out, opt, err);
    return nbi_fail(err, NB_INVALID,
                    "device \"%s\" is unknown; expected \"auto\", \"cpu\" or \"cuda\"", name);
}

void nbi_backend_close(nbi_backend **b)
{
    if (b && *b) (*b)->ops->close(b);
}
