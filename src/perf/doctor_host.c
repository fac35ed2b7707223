/* Facts of processors, memory, kernel and limits. Formats: the kernel's Documentation/ABI and
 * admin-guide, proc(5), DMTF's SMBIOS reference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cgroup.h"
#include "perf/doctor_facts.h"

#define CPU "/sys/devices/system/cpu"

static void *rows(nbi_facts *f, uint32_t n, size_t bytes)
{
    void *p = n ? nbi_arena_alloc(&f->reader.arena, n * bytes) : NULL;
    if (n && !p) f->reader.no_memory = true;
    return p;
}

/* ---------------------------------------------------------------- processors */

static void read_policies(nbi_facts *f)
{
    nbi_cpu_facts *c = &f->cpu;
    nbi_reader *r = &f->reader;
    const nbi_names names = nbi_read_names(r, CPU "/cpufreq");
    c->policies = rows(f, names.n, sizeof *c->policies);
    for (uint32_t i = 0; c->policies && i < names.n; i++) {
        const char *name = names.items[i];
        if (strncmp(name, "policy", 6) != 0) continue;
        nbi_cpu_policy *p = &c->policies[c->n_policies++];
        p->name = name;
        p->driver = nbi_read_text(r, CPU "/cpufreq/%s/scaling_driver", name);
        p->governor = nbi_read_text(r, CPU "/cpufreq/%s/scaling_governor", name);
        p->preference = nbi_read_text(r, CPU "/cpufreq/%s/energy_performance_preference", name);
        p->max_khz = nbi_read_number(r, CPU "/cpufreq/%s/scaling_max_freq", name);
        p->hardware_max_khz = nbi_read_number(r, CPU "/cpufreq/%s/cpuinfo_max_freq", name);
    }
}

static void read_idle(nbi_facts *f)
{
    nbi_cpu_facts *c = &f->cpu;
    nbi_reader *r = &f->reader;
    c->idle_driver = nbi_read_text(r, CPU "/cpuidle/current_driver");
    c->idle_governor = nbi_read_text(r, CPU "/cpuidle/current_governor");
    const nbi_names names = nbi_read_names(r, CPU "/cpu0/cpuidle");
    c->states = rows(f, names.n, sizeof *c->states);
    for (uint32_t i = 0; c->states && i < names.n; i++) {
        if (strncmp(names.items[i], "state", 5) != 0) continue;
        nbi_idle_state *s = &c->states[c->n_states++];
        s->name = nbi_read_text(r, CPU "/cpu0/cpuidle/%s/name", names.items[i]);
        s->latency_us = nbi_read_number(r, CPU "/cpu0/cpuidle/%s/latency", names.items[i]);
        s->disabled = nbi_read_number(r, CPU "/cpu0/cpuidle/%s/disable", names.items[i]);
    }
}

void nbi_facts_cpu(nbi_facts *f)
{
    nbi_cpu_facts *c = &f->cpu;
    nbi_reader *r = &f->reader;
    const char *info = nbi_read_text(r, "/proc/cpuinfo");
    c->vendor = nbi_line_text(r, info, "vendor_id");
    c->model = nbi_line_text(r, info, "model name");
    c->flags = nbi_line_text(r, info, "flags");
    nbi_set_parse(&c->online, nbi_read_text(r, CPU "/online"));
    nbi_set_parse(&c->offline, nbi_read_text(r, CPU "/offline"));
    nbi_set_parse(&c->allowed,
                  nbi_line_text(r, nbi_read_text(r, "/proc/self/status"), "Cpus_allowed_list"));
    read_policies(f);
    read_idle(f);
    c->amd_pstate = nbi_read_text(r, CPU "/amd_pstate/status");
    c->intel_pstate = nbi_read_text(r, CPU "/intel_pstate/status");
    c->boost = nbi_read_number(r, CPU "/cpufreq/boost");
    c->no_turbo = nbi_read_number(r, CPU "/intel_pstate/no_turbo");
    c->throttled = NBI_UNKNOWN;
    for (uint32_t i = 0; i < NBI_SET_MAX && c->online.n; i++) {
        if (!nbi_set_has(&c->online, i)) continue;
        const int64_t n = nbi_read_number(r, CPU "/cpu%u/thermal_throttle/core_throttle_count", i);
        if (n > 0 && n < INT32_MAX) c->throttled = c->throttled < 0 ? n : c->throttled + n;
        if (n == 0 && c->throttled < 0) c->throttled = 0;
    }
    c->quota_milli = (int64_t)nbi_cpu_quota_milli_under(r->root);
}

/* ---------------------------------------------------------------- memory */

#define DMI_MAX    (1u << 20)
#define DMI_DEVICE 17u

static uint32_t word_at(const uint8_t *p, size_t length, size_t at)
{
    return at + 2 <= length ? (uint32_t)p[at] | (uint32_t)p[at + 1] << 8 : 0;
}

static uint32_t long_at(const uint8_t *p, size_t length, size_t at)
{
    return word_at(p, length, at) | word_at(p, length, at + 2) << 16;
}

/* String `i` (from 1) of those behind a structure; the text ends with a NUL by construction. */
static const char *dmi_string(nbi_reader *r, const uint8_t *at, const uint8_t *end, uint8_t i)
{
    for (; i > 1 && at < end && *at; i--) at += strnlen((const char *)at, (size_t)(end - at)) + 1;
    if (!i || at >= end || !*at) return "?";
    char text[32];
    size_t n = 0;
    for (; at + n < end && at[n] && n + 1 < sizeof text; n++)
        text[n] = at[n] >= 0x20 && at[n] < 0x7f ? (char)at[n] : '?';
    text[n] = 0;
    return nbi_reader_text(r, "%s", text);
}

static void read_dimm(nbi_reader *r, nbi_dimm *d, const uint8_t *p, size_t length,
                      const uint8_t *end)
{
    const uint32_t size = word_at(p, length, 0x0c);
    *d = (nbi_dimm){.rated = word_at(p, length, 0x15), .configured = word_at(p, length, 0x20)};
    if (size == 0x7fff)
        d->bytes = (uint64_t)(long_at(p, length, 0x1c) & 0x7fffffff) << 20;
    else if (size != 0xffff)
        d->bytes = size & 0x8000 ? (uint64_t)(size & 0x7fff) << 10 : (uint64_t)size << 20;
    if (d->rated == 0xffff) d->rated = long_at(p, length, 0x54);
    if (d->configured == 0xffff) d->configured = long_at(p, length, 0x58);
    d->locator = dmi_string(r, p + length, end, length > 0x10 ? p[0x10] : 0);
}

static void read_dimms(nbi_facts *f)
{
    enum { MOST = 256 };
    nbi_memory_facts *m = &f->memory;
    size_t n = 0;
    const uint8_t *p = nbi_read_bytes(&f->reader, DMI_MAX, &n, "/sys/firmware/dmi/tables/DMI");
    if (!p || !(m->dimms = rows(f, MOST, sizeof *m->dimms))) return;
    const uint8_t *end = p + n;
    while (end - p >= 4 && p[1] >= 4 && p[1] <= end - p) {
        const size_t length = p[1];
        if (p[0] == DMI_DEVICE && m->n_dimms < MOST)
            read_dimm(&f->reader, &m->dimms[m->n_dimms++], p, length, end);
        p += length;
        while (end - p >= 2 && (p[0] || p[1])) p++;
        p = end - p >= 2 ? p + 2 : end;
    }
}

static void read_nodes(nbi_facts *f)
{
    nbi_memory_facts *m = &f->memory;
    nbi_reader *r = &f->reader;
    nbi_set online;
    nbi_set_parse(&online, nbi_read_text(r, "/sys/devices/system/node/online"));
    m->nodes = rows(f, online.n, sizeof *m->nodes);
    for (uint32_t i = 0; m->nodes && i < NBI_SET_MAX; i++) {
        if (!nbi_set_has(&online, i)) continue;
        nbi_numa_node *node = &m->nodes[m->n_nodes++];
        char key[48];
        snprintf(key, sizeof key, "Node %u MemTotal", i);
        node->id = i;
        nbi_set_parse(&node->cpus, nbi_read_text(r, "/sys/devices/system/node/node%u/cpulist", i));
        node->memory_kb =
            nbi_line_number(nbi_read_text(r, "/sys/devices/system/node/node%u/meminfo", i), key);
    }
}

static void read_edac(nbi_facts *f)
{
    nbi_memory_facts *m = &f->memory;
    m->corrected = m->uncorrected = NBI_UNKNOWN;
    const nbi_names names = nbi_read_names(&f->reader, "/sys/devices/system/edac/mc");
    for (uint32_t i = 0; i < names.n; i++) {
        if (strncmp(names.items[i], "mc", 2) != 0) continue;
        const int64_t c = nbi_read_number(&f->reader, "/sys/devices/system/edac/mc/%s/ce_count",
                                          names.items[i]),
                      u = nbi_read_number(&f->reader, "/sys/devices/system/edac/mc/%s/ue_count",
                                          names.items[i]);
        if (c >= 0 && c < INT32_MAX) m->corrected = c + (m->corrected > 0 ? m->corrected : 0);
        if (u >= 0 && u < INT32_MAX) m->uncorrected = u + (m->uncorrected > 0 ? m->uncorrected : 0);
    }
}

void nbi_facts_memory(nbi_facts *f)
{
    nbi_memory_facts *m = &f->memory;
    nbi_reader *r = &f->reader;
    const char *info = nbi_read_text(r, "/proc/meminfo");
    m->total_kb = nbi_line_number(info, "MemTotal");
    m->available_kb = nbi_line_number(info, "MemAvailable");
    m->swap_total_kb = nbi_line_number(info, "SwapTotal");
    m->swap_free_kb = nbi_line_number(info, "SwapFree");
    m->huge_total = nbi_line_number(info, "HugePages_Total");
    m->huge_free = nbi_line_number(info, "HugePages_Free");
    m->huge_kb = nbi_line_number(info, "Hugepagesize");
    m->thp = nbi_chosen_word(r, nbi_read_text(r, "/sys/kernel/mm/transparent_hugepage/enabled"));
    m->numa_balancing = nbi_read_number(r, "/proc/sys/kernel/numa_balancing");
    m->zone_reclaim = nbi_read_number(r, "/proc/sys/vm/zone_reclaim_mode");
    m->swappiness = nbi_read_number(r, "/proc/sys/vm/swappiness");
    m->ksm = nbi_read_number(r, "/sys/kernel/mm/ksm/run");
    read_nodes(f);
    read_edac(f);
    read_dimms(f);
    m->group_bytes = nbi_memory_available_under(r->root);
}

/* ---------------------------------------------------------------- kernel and limits */

/* Three numbers with dots between them at the start of the text. */
static bool version_at(uint32_t out[3], const char *text)
{
    unsigned a, b, c = 0;
    const int n = text ? sscanf(text, "%4u.%4u.%4u", &a, &b, &c) : 0;
    if (n < 2) return false;
    out[0] = a, out[1] = b, out[2] = c;
    return true;
}

/* Debian and Ubuntu name the version that they began with in the release; the one they stand at is
 * in /proc/version ("Debian 6.1.64-1") and /proc/version_signature. */
static void read_upstream(nbi_facts *f)
{
    nbi_kernel_facts *k = &f->kernel;
    const char *signature = nbi_read_text(&f->reader, "/proc/version_signature");
    const char *last = signature ? strrchr(signature, ' ') : NULL;
    const char *debian = k->version ? strstr(k->version, "Debian ") : NULL;
    for (; debian; debian = strstr(debian + 1, "Debian "))
        if (version_at(k->upstream, debian + 7) && k->upstream[0] >= 3) {
            uint32_t named[3];
            /* "(Debian 12.2.0-14)" is the compiler. */
            if (version_at(named, k->release) && named[0] == k->upstream[0] &&
                named[1] == k->upstream[1])
                return;
        }
    if (last && version_at(k->upstream, last + 1)) return;
    if (!version_at(k->upstream, k->release)) memset(k->upstream, 0, sizeof k->upstream);
}

/* Soft (0) or hard (1) value of a line of /proc/self/limits. */
static int64_t limit_of(const char *limits, const char *name, int which)
{
    const char *line = limits ? strstr(limits, name) : NULL;
    if (!line) return NBI_UNKNOWN;
    const char *at = line + strlen(name);
    for (;; which--) {
        while (*at == ' ') at++;
        if (which == 0) break;
        while (*at && *at != ' ' && *at != '\n') at++;
    }
    char *end;
    if (!strncmp(at, "unlimited", 9)) return INT64_MAX;
    const long long v = strtoll(at, &end, 10);
    return end == at ? NBI_UNKNOWN : v;
}

void nbi_facts_kernel(nbi_facts *f)
{
    nbi_kernel_facts *k = &f->kernel;
    nbi_reader *r = &f->reader;
    k->release = nbi_read_text(r, "/proc/sys/kernel/osrelease");
    k->version = nbi_read_text(r, "/proc/version");
    k->cmdline = nbi_read_text(r, "/proc/cmdline");
    read_upstream(f);
    k->clocksource =
        nbi_read_text(r, "/sys/devices/system/clocksource/clocksource0/current_clocksource");
    k->clocksources =
        nbi_read_text(r, "/sys/devices/system/clocksource/clocksource0/available_clocksource");
    const char *limits = nbi_read_text(r, "/proc/self/limits");
    k->open_files = limit_of(limits, "Max open files", 0);
    k->open_files_hard = limit_of(limits, "Max open files", 1);
    k->address_space = limit_of(limits, "Max address space", 0);
}

/* ---------------------------------------------------------------- where it runs */

static bool holds(const char *text, const char *word)
{
    return text && strstr(text, word);
}

static const char *hypervisor_of(nbi_facts *f)
{
    nbi_reader *r = &f->reader;
    const char *type = nbi_read_text(r, "/sys/hypervisor/type");
    if (type) return type;
    if (!nbi_has_word(f->cpu.flags, "hypervisor")) return NULL;
    const char *v = f->place.vendor, *p = f->place.product;
    if (holds(v, "QEMU") || holds(p, "KVM") || holds(v, "Red Hat")) return "KVM";
    if (holds(v, "VMware")) return "VMware";
    if (holds(v, "innotek")) return "VirtualBox";
    if (holds(v, "Microsoft")) return "Hyper-V";
    if (holds(v, "Amazon")) return "EC2";
    if (holds(v, "Google")) return "Google Compute Engine";
    if (holds(v, "Xen")) return "Xen";
    return v ? v : "a hypervisor without a name";
}

static const char *container_of(nbi_facts *f)
{
    nbi_reader *r = &f->reader;
    const char *said = nbi_read_text(r, "/run/systemd/container");
    if (said && *said) return said;
    if (nbi_read_exists(r, "/.dockerenv")) return "docker";
    if (nbi_read_exists(r, "/run/.containerenv")) return "podman";
    const char *group = nbi_read_text(r, "/proc/self/cgroup");
    if (holds(group, "kubepods")) return "kubernetes";
    if (holds(group, "/docker")) return "docker";
    if (holds(group, "libpod")) return "podman";
    if (holds(group, "/lxc") || holds(nbi_read_text(r, "/proc/self/mountinfo"), " lxcfs "))
        return "lxc";
    return NULL;
}

void nbi_facts_place(nbi_facts *f)
{
    nbi_place_facts *p = &f->place;
    p->vendor = nbi_read_text(&f->reader, "/sys/class/dmi/id/sys_vendor");
    p->product = nbi_read_text(&f->reader, "/sys/class/dmi/id/product_name");
    p->bios = nbi_read_text(&f->reader, "/sys/class/dmi/id/bios_version");
    p->hypervisor = hypervisor_of(f);
    p->container = container_of(f);
}
