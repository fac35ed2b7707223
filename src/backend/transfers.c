/* Which build can measure. */
#include "backend/transfers.h"

#if NBI_WITH_CUDA && !NBI_CUDA_EMULATED
#include "backend/cuda/cuda_transfers.h"

nb_status nbi_transfers_measure(nbi_transfers *out, nb_error *err)
{
    nbi_transfers t = {0};
    char why[NBI_CUDA_TRANSFERS_TEXT] = "";
    if (!nbi_cuda_transfers(&t, why)) return nbi_fail(err, NB_UNSUPPORTED, "%s", why);
    *out = t;
    return NB_OK;
}
#else
nb_status nbi_transfers_measure(nbi_transfers *out, nb_error *err)
{
    (void)out;
    return nbi_fail(err, NB_UNSUPPORTED, "this build has no CUDA");
}
#endif
