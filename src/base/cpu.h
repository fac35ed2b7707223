/* CPU levels: what kernels may use. A level includes the ones before it. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_cpu_level {
    NBI_CPU_REFERENCE, /* plain C, float32 throughout */
    NBI_CPU_AVX2,      /* AVX2, FMA, F16C */
    NBI_CPU_AVX512,    /* AVX-512 F, BW, VL, DQ, VBMI, VNNI, BF16 */
    NBI_CPU_AMX,       /* AMX-TILE, AMX-BF16, and the kernel grants tile state */
    NBI_CPU_LEVEL_COUNT
} nbi_cpu_level;

/* Highest level of this machine (cached; asks Linux for AMX tile permission once). */
nbi_cpu_level nbi_cpu_detect(void);

const char *nbi_cpu_level_name(nbi_cpu_level level);

/* "auto" gives the detected level. NB_INVALID for an unknown name, NB_UNSUPPORTED for one above
 * this machine's. */
nb_status nbi_cpu_level_parse(nbi_cpu_level *out, const char *name, nb_error *err);

#ifdef __cplusplus
}
#endif
