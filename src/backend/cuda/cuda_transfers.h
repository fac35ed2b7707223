/* Copies between GPUs and to the host, timed. Private to src/backend. */
#pragma once

#include "backend/transfers.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_CUDA_TRANSFERS_TEXT 256

/* *out is zeroed by the caller. False with a sentence in `why` when nothing could be measured. */
bool nbi_cuda_transfers(nbi_transfers *out, char why[NBI_CUDA_TRANSFERS_TEXT]);

#ifdef __cplusplus
}
#endif
