/* The rules of `nibble doctor`: facts in, findings out. A rule reads nothing but facts. */
#pragma once

#include "perf/doctor.h"
#include "perf/doctor_facts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where the findings of one rule go. */
typedef struct nbi_verdicts {
    nbi_reader *texts; /* owns them */
    const nbi_doctor_rule *rule;
    nbi_finding *first, *last, *scrap;
    bool in_container;
} nbi_verdicts;

/* Adds a finding: what was found (formatted) and the place that it was read from. `subject` names
 * the device, "" for the machine. The caller may set `command` and `setting`, also by
 * nbi_reader_text(v->texts, ...). Never NULL. */
nbi_finding *nbi_judge(nbi_verdicts *v, nbi_finding_level level, const char *subject,
                       const char *source, const char *fmt, ...) NBI_PRINTF(5, 6);

struct nbi_doctor_rule {
    const char *id, *area;
    const char *title; /* what is looked at */
    const char *why;   /* what it has to do with tokens per second */
    void (*judge)(const nbi_facts *f, nbi_verdicts *v);
    bool host; /* inside of a container it is the host that mends it */
};

/* Tables end with a row of zeros. */
extern const nbi_doctor_rule nbi_rules_cpu[];
extern const nbi_doctor_rule nbi_rules_memory[];
extern const nbi_doctor_rule nbi_rules_system[];
extern const nbi_doctor_rule nbi_rules_pci[];
extern const nbi_doctor_rule nbi_rules_gpu[];

#ifdef __cplusplus
}
#endif
