/* An audit of the machine for inference: what is read, judged by rules. Nothing is changed.
 * Callers: nibble doctor. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_finding_level {
    NBI_FINDING_OK,
    NBI_FINDING_NOTE,    /* good to know; speed or safety hardly change */
    NBI_FINDING_WARNING, /* costs tokens per second, or will fail under load */
    NBI_FINDING_FAULT,   /* does not work, or costs a large part */
    NBI_FINDING_LEVEL_COUNT
} nbi_finding_level;

const char *nbi_finding_level_name(nbi_finding_level level);

typedef struct nbi_doctor_rule nbi_doctor_rule;

typedef struct nbi_finding {
    const nbi_doctor_rule *rule;
    nbi_finding_level level;
    const char *subject; /* "0000:17:00.0", "nvme0n1"; "" for the machine */
    const char *found;   /* a sentence */
    const char *source;  /* files or functions that it was read from */
    const char *command; /* shell, as root, that mends it; NULL */
    const char *setting; /* what mends it, in words: firmware, hypervisor, boot; NULL */
    bool on_host;        /* to be done outside of this container */
    struct nbi_finding *next;
} nbi_finding;

typedef struct nbi_doctor_options {
    const char *root;  /* "" for this machine, a folder for a recorded one */
    const char *model; /* folder of a checkpoint; NULL */
    const char *file;  /* any large file, for the rate of reading; NULL: the model's largest */
    bool measure;      /* of this machine: memory, and the disk below the model */
} nbi_doctor_options;

typedef struct nbi_doctor nbi_doctor;

/* NB_NO_MEMORY; what cannot be read is not an error. */
nb_status nbi_doctor_run(nbi_doctor **out, const nbi_doctor_options *options, nb_error *err);
void nbi_doctor_free(nbi_doctor **d);

const nbi_finding *nbi_doctor_findings(const nbi_doctor *d); /* in the order of the rules */
uint32_t nbi_doctor_count(const nbi_doctor *d, nbi_finding_level level);

struct nbi_facts;
const struct nbi_facts *nbi_doctor_facts(const nbi_doctor *d);

/* All rules, one after another; NULL behind the last. doctor_rules.h has their fields. */
const nbi_doctor_rule *nbi_doctor_rule_at(uint32_t i);

#ifdef __cplusplus
}
#endif
