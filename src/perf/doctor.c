/* Facts, then rules. */
#include "perf/doctor.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "perf/doctor_measure.h"
#include "perf/doctor_rules.h"

struct nbi_doctor {
    nbi_facts facts;
    nbi_finding *findings;
    uint32_t counts[NBI_FINDING_LEVEL_COUNT];
};

static const nbi_doctor_rule *const tables[] = {nbi_rules_cpu, nbi_rules_memory, nbi_rules_system,
                                                nbi_rules_pci, nbi_rules_gpu};

const char *nbi_finding_level_name(nbi_finding_level level)
{
    static const char *const names[] = {"ok", "note", "warning", "fault"};
    return names[level];
}

const nbi_doctor_rule *nbi_doctor_rule_at(uint32_t i)
{
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const nbi_doctor_rule *r = tables[t]; r->id; r++)
            if (i-- == 0) return r;
    return NULL;
}

nbi_finding *nbi_judge(nbi_verdicts *v, nbi_finding_level level, const char *subject,
                       const char *source, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    nbi_finding *found = nbi_arena_alloc(&v->texts->arena, sizeof *found);
    if (!found) {
        v->texts->no_memory = true;
        return v->scrap;
    }
    *found = (nbi_finding){.rule = v->rule,
                           .level = level,
                           .subject = nbi_reader_text(v->texts, "%s", subject),
                           .found = nbi_reader_text(v->texts, "%s", text),
                           .source = nbi_reader_text(v->texts, "%s", source),
                           .on_host = v->in_container && v->rule->host};
    if (v->last)
        v->last->next = found;
    else
        v->first = found;
    v->last = found;
    return found;
}

static void read_facts(nbi_facts *f, const nbi_doctor_options *o)
{
    f->live = !o->root[0];
    f->superuser = geteuid() == 0;
    nbi_facts_cpu(f);
    nbi_facts_memory(f);
    nbi_facts_kernel(f);
    nbi_facts_place(f);
    nbi_facts_pci(f);
    nbi_facts_nodes(f);
    nbi_facts_topology(f);
    nbi_facts_nvml(f);
    nbi_facts_storage(f, o->model);
    if (!f->live) nbi_facts_transfers(f);
    nbi_doctor_measure(f, o);
}

static void judge(nbi_doctor *d)
{
    nbi_finding scrap;
    nbi_verdicts v = {.texts = &d->facts.reader,
                      .scrap = &scrap,
                      .in_container = d->facts.place.container != NULL};
    for (uint32_t i = 0; (v.rule = nbi_doctor_rule_at(i)); i++) v.rule->judge(&d->facts, &v);
    d->findings = v.first;
    for (const nbi_finding *f = v.first; f; f = f->next) d->counts[f->level]++;
}

nb_status nbi_doctor_run(nbi_doctor **out, const nbi_doctor_options *o, nb_error *err)
{
    nbi_doctor *d = nbi_calloc(1, sizeof *d);
    if (!d) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    d->facts.reader.root = o->root;
    read_facts(&d->facts, o);
    judge(d);
    if (d->facts.reader.no_memory) {
        nbi_doctor_free(&d);
        return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    }
    *out = d;
    return NB_OK;
}

void nbi_doctor_free(nbi_doctor **d)
{
    if (!*d) return;
    nbi_reader_free(&(*d)->facts.reader);
    nbi_free(*d);
    *d = NULL;
}

const nbi_finding *nbi_doctor_findings(const nbi_doctor *d)
{
    return d->findings;
}

uint32_t nbi_doctor_count(const nbi_doctor *d, nbi_finding_level level)
{
    return d->counts[level];
}

const struct nbi_facts *nbi_doctor_facts(const nbi_doctor *d)
{
    return &d->facts;
}
