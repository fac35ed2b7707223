/* nibble doctor: an audit of the machine. Called by main.c. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/cli.h"
#include "perf/doctor_rules.h"

enum { COULD_NOT_RUN = 3 };

static const nbi_command command = {
    .name = "doctor",
    .summary = "Audits the machine for inference: what costs tokens per second, and what mends it.",
    .usage = "[--model DIR] [OPTIONS]",
    .text =
        "Reads what the kernel, PCI devices and NVIDIA's driver tell, and measures memory, the\n"
        "disk below --model and copies of GPUs, some seconds. Nothing is changed. Every finding\n"
        "says what was read and where, why it matters, and the command or firmware setting that\n"
        "mends it. Root is not needed; what could not be seen is listed. Limits and CPUs are "
        "those\n"
        "of this process: start it the way the server is started. Rules, and how to record a\n"
        "machine: docs/doctor.md.\n"
        "\n"
        "The exit status is 0 when all is ok or noted, 1 with warnings, 2 with faults, 3 when the\n"
        "audit could not run.\n\n"
        "Example: nibble doctor --model /srv/models/GLM-5-NVFP4 --fix-script fix.sh",
};

typedef struct args {
    nbi_doctor_options doctor;
    const char *script;
    bool json, rules, no_measure;
} args;

/* ---------------------------------------------------------------- text */

/* Words of `text` behind a label, in lines of at most 100 columns. */
static void print_wrapped(const char *label, const char *text)
{
    enum { INDENT = 21, WIDTH = 100 };
    size_t column = INDENT;
    printf("         %-12s", label);
    for (const char *at = text; *at;) {
        const size_t n = strcspn(at, " ");
        if (column > INDENT && column + 1 + n > WIDTH) {
            printf("\n%*s", INDENT, "");
            column = INDENT;
        }
        const bool space = column > INDENT;
        printf("%s%.*s", space ? " " : "", (int)n, at);
        column += n + space;
        at += n + strspn(at + n, " ");
    }
    printf("\n");
}

static void print_finding(const nbi_finding *f)
{
    const nbi_doctor_rule *r = f->rule;
    printf("%-8s %s: %s%s%s%s\n", nbi_finding_level_name(f->level), r->id, r->title,
           f->subject[0] ? " (" : "", f->subject, f->subject[0] ? ")" : "");
    print_wrapped("found", f->found);
    print_wrapped("read from", f->source);
    print_wrapped("why", r->why);
    const char *where = f->on_host ? "on the host" : "mend";
    if (f->command) printf("         %-12s%s\n", where, f->command);
    if (f->setting) print_wrapped(f->command ? "or" : where, f->setting);
    printf("\n");
}

/* One line for neighbours that say the same; returns the last of them. */
static const nbi_finding *print_ok(const nbi_finding *x)
{
    const nbi_finding *last = x;
    int more = 0;
    while (last->next && last->next->rule == x->rule && last->next->level == x->level &&
           !strcmp(last->next->found, x->found)) {
        last = last->next;
        more++;
    }
    printf("ok       %-20s %s", x->rule->id, x->subject);
    if (more) printf(" and %d more", more);
    printf("%s%s\n", x->subject[0] ? ": " : "", x->found);
    return last;
}

static void print_machine(const nbi_facts *f)
{
    const nbi_place_facts *p = &f->place;
    printf("machine  %s%s%s%s%s%s\n", p->vendor ? p->vendor : "unknown maker",
           p->product ? " " : "", p->product ? p->product : "", p->hypervisor ? ", virtual: " : "",
           p->hypervisor ? p->hypervisor : "", p->container ? ", in a container" : "");
    printf("         %s, %u CPUs; %.1f GB in %u node%s; Linux %s\n",
           f->cpu.model ? f->cpu.model : "unknown processor", f->cpu.online.n,
           f->memory.total_kb > 0 ? (double)f->memory.total_kb * 1024e-9 : 0, f->memory.n_nodes,
           f->memory.n_nodes == 1 ? "" : "s", f->kernel.release ? f->kernel.release : "unknown");
    for (uint32_t i = 0; i < f->nvml.n_gpus; i++)
        printf("         %s %s, %.1f GB\n", f->nvml.gpus[i].address, f->nvml.gpus[i].name,
               f->nvml.gpus[i].memory_bytes > 0 ? (double)f->nvml.gpus[i].memory_bytes * 1e-9 : 0);
}

static void print_unseen(const nbi_facts *f)
{
    if (f->measured.memory_why) printf("not measured: memory (%s)\n", f->measured.memory_why);
    if (f->measured.file_why) printf("not measured: disk (%s)\n", f->measured.file_why);
    if (f->measured.gpu_why)
        printf("not measured: transfers between devices and host (%s)\n", f->measured.gpu_why);
    for (const nbi_unseen *u = f->reader.unseen; u; u = u->next)
        printf("not seen: %s (%s)\n", u->what, u->reason);
    if (f->reader.unseen && f->live && !f->superuser)
        printf("root sees more: sudo nibble doctor\n");
}

static void print_text(const nbi_doctor *d)
{
    const nbi_facts *f = nbi_doctor_facts(d);
    print_machine(f);
    printf("\n");
    for (int level = NBI_FINDING_FAULT; level > NBI_FINDING_OK; level--)
        for (const nbi_finding *x = nbi_doctor_findings(d); x; x = x->next)
            if ((int)x->level == level) print_finding(x);
    for (const nbi_finding *x = nbi_doctor_findings(d); x; x = x->next)
        if (x->level == NBI_FINDING_OK) x = print_ok(x);
    printf("\n");
    print_unseen(f);
    printf("%u faults, %u warnings, %u notes, %u ok\n", nbi_doctor_count(d, NBI_FINDING_FAULT),
           nbi_doctor_count(d, NBI_FINDING_WARNING), nbi_doctor_count(d, NBI_FINDING_NOTE),
           nbi_doctor_count(d, NBI_FINDING_OK));
}

static void print_rules(void)
{
    const nbi_doctor_rule *r;
    for (uint32_t i = 0; (r = nbi_doctor_rule_at(i)); i++)
        printf("%-20s %s. %s\n", r->id, r->title, r->why);
}

/* ---------------------------------------------------------------- JSON */

static json_t *findings_json(const nbi_doctor *d)
{
    json_t *list = json_array();
    for (const nbi_finding *x = nbi_doctor_findings(d); x; x = x->next)
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s?, s:s?, s:b}", "id",
                            x->rule->id, "area", x->rule->area, "title", x->rule->title, "level",
                            nbi_finding_level_name(x->level), "subject", x->subject, "found",
                            x->found, "source", x->source, "why", x->rule->why, "command",
                            x->command, "setting", x->setting, "on_host", x->on_host));
    return list;
}

static json_t *unseen_json(const nbi_facts *f)
{
    const nbi_measured_facts *m = &f->measured;
    const char *const what[] = {"memory bandwidth", "disk", "transfers between devices and host"},
                      *const why[] = {m->memory_why, m->file_why, m->gpu_why};
    json_t *list = json_array();
    for (int i = 0; i < 3; i++)
        if (why[i])
            json_array_append_new(list, json_pack("{s:s, s:s}", "what", what[i], "reason", why[i]));
    for (const nbi_unseen *u = f->reader.unseen; u; u = u->next)
        json_array_append_new(list, json_pack("{s:s, s:s}", "what", u->what, "reason", u->reason));
    return list;
}

/* GPUs as NVML has them; numbers that are not known are left out. */
static json_t *gpus_json(const nbi_facts *f)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < f->nvml.n_gpus; i++) {
        const nbi_gpu *g = &f->nvml.gpus[i];
        json_t *o = json_pack("{s:s, s:s}", "name", g->name, "pci", g->address);
        json_t *peers = json_array();
#define X(name) \
    if (g->name != NBI_UNKNOWN) json_object_set_new(o, #name, json_integer(g->name));
        NBI_GPU_NUMBERS(X)
#undef X
        for (uint32_t k = 0; k < f->nvml.n_gpus; k++)
            json_array_append_new(peers, g->peer_read[k] == NBI_UNKNOWN
                                             ? json_null()
                                             : json_integer(g->peer_read[k]));
        json_object_set_new(o, "peer_read", peers);
        json_array_append_new(list, o);
    }
    return list;
}

static json_t *transfer_json(const nbi_transfer *t)
{
    return t->rate > 0 ? json_pack("{s:f, s:f, s:b}", "bytes_per_s", t->rate, "latency_s",
                                   t->latency, "direct", t->direct)
                       : json_null();
}

static json_t *transfers_json(const nbi_transfers *t)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < t->n; i++) {
        json_t *peers = json_array();
        for (uint32_t k = 0; k < t->n; k++)
            json_array_append_new(peers, transfer_json(&t->peer[i][k]));
        json_array_append_new(list, json_pack("{s:s, s:o, s:o, s:o}", "pci", t->address[i],
                                              "to_host", transfer_json(&t->to_host[i]), "from_host",
                                              transfer_json(&t->from_host[i]), "peers", peers));
    }
    return list;
}

static json_t *machine_json(const nbi_facts *f)
{
    const nbi_place_facts *p = &f->place;
    return json_pack("{s:s?, s:s?, s:s?, s:s?, s:s?, s:i, s:I, s:i, s:s?}", "vendor", p->vendor,
                     "product", p->product, "hypervisor", p->hypervisor, "container", p->container,
                     "cpu", f->cpu.model, "cpus", (int)f->cpu.online.n, "memory_bytes",
                     (json_int_t)(f->memory.total_kb > 0 && f->memory.total_kb < INT64_MAX / 1024
                                      ? f->memory.total_kb * 1024
                                      : 0),
                     "nodes", (int)f->memory.n_nodes, "kernel", f->kernel.release);
}

/* False when out of memory. */
static bool print_json(const nbi_doctor *d, int status)
{
    const nbi_facts *f = nbi_doctor_facts(d);
    json_t *root = json_pack(
        "{s:s, s:i, s:{s:i, s:i, s:i, s:i}, s:o, s:o, s:{s:f, s:f, s:o}, s:o, s:o}", "version",
        nb_version(), "status", status, "counts", "fault",
        (int)nbi_doctor_count(d, NBI_FINDING_FAULT), "warning",
        (int)nbi_doctor_count(d, NBI_FINDING_WARNING), "note",
        (int)nbi_doctor_count(d, NBI_FINDING_NOTE), "ok", (int)nbi_doctor_count(d, NBI_FINDING_OK),
        "machine", machine_json(f), "gpus", gpus_json(f), "measured", "memory_bytes_per_s",
        f->measured.memory_rate, "file_bytes_per_s", f->measured.file_rate, "transfers",
        transfers_json(&f->measured.transfers), "findings", findings_json(d), "unseen",
        unseen_json(f));
    char *text = root ? nbi_json_dumps(root) : NULL;
    if (text) puts(text);
    nbi_free(text);
    json_decref(root);
    return text != NULL;
}

/* ---------------------------------------------------------------- script */

static nb_status write_script(const nbi_doctor *d, const char *path, nb_error *err)
{
    nbi_buf b = {0};
    nb_status st = nbi_buf_addf(
        &b,
        "#!/bin/sh\n# Written by nibble doctor %s. Read every line before you run it, as "
        "root; nothing here outlives a\n# restart of the machine. Settings that no command "
        "makes are comments.\n",
        nb_version());
    for (const nbi_finding *x = nbi_doctor_findings(d); st == NB_OK && x; x = x->next) {
        if (!x->command && (!x->setting || x->level == NBI_FINDING_OK)) continue;
        st = nbi_buf_addf(&b, "\n# %s %s: %s%s%s%s\n#   %s\n", nbi_finding_level_name(x->level),
                          x->rule->id, x->rule->title, x->subject[0] ? " (" : "", x->subject,
                          x->subject[0] ? ")" : "", x->found);
        if (st == NB_OK && x->on_host)
            st = nbi_buf_addf(&b, "#   On the host, outside of this container:\n");
        if (st == NB_OK && x->setting) st = nbi_buf_addf(&b, "#   %s\n", x->setting);
        if (st == NB_OK && x->command)
            st = nbi_buf_addf(&b, "%s%s\n", x->on_host ? "# " : "", x->command);
    }
    if (st == NB_OK)
        st = nbi_file_write(path, b.data, b.len, err);
    else
        nbi_fail(err, st, "%s: out of memory", path);
    nbi_buf_free(&b);
    return st;
}

static int audit(args *a)
{
    nb_error err;
    nbi_doctor *d = NULL;
    if (nbi_doctor_run(&d, &a->doctor, &err) != NB_OK) {
        nbi_cli_fail(&command, &err);
        return COULD_NOT_RUN;
    }
    int status = nbi_doctor_count(d, NBI_FINDING_FAULT)     ? 2
                 : nbi_doctor_count(d, NBI_FINDING_WARNING) ? 1
                                                            : 0;
    if (!a->json)
        print_text(d);
    else if (!print_json(d, status))
        status = COULD_NOT_RUN;
    if (a->script && write_script(d, a->script, &err) != NB_OK) {
        nbi_cli_fail(&command, &err);
        status = COULD_NOT_RUN;
    }
    nbi_doctor_free(&d);
    return status;
}

int nbi_cmd_doctor(int argc, char **argv)
{
    args a = {.doctor = {.root = ""}};
    char model[PATH_MAX];
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &a.doctor.model, "DIR", "the checkpoint: its disk, its size",
         false},
        {"file", NBI_OPT_STRING, &a.doctor.file, "FILE",
         "measure reading of this file (default: the model's largest)", false},
        {"no-measure", NBI_OPT_FLAG, &a.no_measure, NULL, "read only, measure nothing", false},
        {"json", NBI_OPT_FLAG, &a.json, NULL, "one JSON object instead of text", false},
        {"fix-script", NBI_OPT_STRING, &a.script, "FILE",
         "write the commands that mend findings to FILE, for review", false},
        {"rules", NBI_OPT_FLAG, &a.rules, NULL, "print all rules and end", false},
        {"root", NBI_OPT_STRING, &a.doctor.root, "DIR",
         "audit a recorded machine: /sys, /proc and /dev below DIR", false},
        {0},
    };
    const int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status >= 0) return status == NBI_EXIT_OK ? status : COULD_NOT_RUN;
    nbi_cli_log_start(NB_LOG_WARN);
    if (a.rules) {
        print_rules();
        return NBI_EXIT_OK;
    }
    a.doctor.measure = !a.no_measure;
    if (a.doctor.model && !a.doctor.root[0]) {
        if (!realpath(a.doctor.model, model)) {
            fprintf(stderr, "nibble doctor: --model %s: there is no such folder\n", a.doctor.model);
            return COULD_NOT_RUN;
        }
        a.doctor.model = model;
    }
    return audit(&a);
}
