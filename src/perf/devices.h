/* What known accelerators and processors can do at most, from their makers' data sheets: the roofs
 * of `nibble roofline`. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_device {
    const char *name;   /* as typed, e.g. "rtx-pro-6000" */
    const char *label;  /* as sold */
    double memory;      /* bytes of one device; 0: as much as is built in */
    double bandwidth;   /* bytes per second of its memory */
    double flops_bf16;  /* dense, float32 accumulation; 0: not given here, and then no roof */
    double flops_fp8;   /* 0: no such unit */
    double flops_fp4;   /* NVFP4; 0: no such unit */
    double link;        /* bytes per second that one device sends to others; 0: not given */
    const char *source; /* where the figures come from */
} nbi_device;

/* Row i of the table, NULL behind the last. */
const nbi_device *nbi_device_at(size_t i);

/* By name; "epyc-9004:8" is an EPYC with 8 of its memory channels in use. NB_INVALID names what is
 * known. */
nb_status nbi_device_find(nbi_device *out, const char *name, nb_error *err);

#ifdef __cplusplus
}
#endif
