/* What `nibble doctor` measures on the machine itself. Callers: doctor.c. */
#pragma once

#include "perf/doctor.h"
#include "perf/doctor_facts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills f->measured; behind the other facts. A few seconds. What is not measured says why. */
void nbi_doctor_measure(nbi_facts *f, const nbi_doctor_options *options);

#ifdef __cplusplus
}
#endif
