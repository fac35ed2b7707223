/* Rules of processors: clocks, idle states, who may run where. */
#include <string.h>

#include "perf/doctor_rules.h"

#define POLICY               "/sys/devices/system/cpu/cpufreq/policy*"
#define SET_ALL(file, value) "for f in " POLICY "/" file "; do echo " value " > \"$f\"; done"

static bool is(const char *text, const char *word)
{
    return text && !strcmp(text, word);
}

/* Drivers that choose clocks themselves; their "powersave" is not the lowest clock. */
static bool chooses_itself(const char *driver)
{
    return is(driver, "intel_pstate") || is(driver, "amd-pstate-epp");
}

/* How slow a policy may make a CPU. */
static nbi_finding_level rate_policy(const nbi_cpu_policy *p)
{
    if (!p->governor || is(p->governor, "performance")) return NBI_FINDING_OK;
    if (is(p->governor, "userspace")) return NBI_FINDING_WARNING;
    if (!is(p->governor, "powersave")) return NBI_FINDING_NOTE; /* ondemand, schedutil */
    if (!chooses_itself(p->driver)) return NBI_FINDING_WARNING;
    if (is(p->preference, "performance")) return NBI_FINDING_OK;
    if (is(p->preference, "balance_performance") || is(p->preference, "default"))
        return NBI_FINDING_NOTE;
    return p->preference ? NBI_FINDING_WARNING : NBI_FINDING_NOTE;
}

static void governor(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_cpu_facts *c = &f->cpu;
    const nbi_cpu_policy *worst = NULL;
    nbi_finding_level level = NBI_FINDING_OK;
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n_policies; i++) {
        const nbi_finding_level l = rate_policy(&c->policies[i]);
        if (!worst || l > level) worst = &c->policies[i], level = l, n = 0;
        n += l == level;
    }
    if (!worst || !worst->governor) return;
    const char *preference = worst->preference ? worst->preference : "none";
    nbi_finding *out =
        nbi_judge(v, level, "", POLICY "/scaling_governor",
                  "governor %s, driver %s, preference %s on %u of %u policies", worst->governor,
                  worst->driver ? worst->driver : "unknown", preference, n, c->n_policies);
    if (level == NBI_FINDING_OK) return;
    out->command = SET_ALL("scaling_governor", "performance");
}

static void driver(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_cpu_facts *c = &f->cpu;
    if (f->place.hypervisor) return; /* the host's */
    const char *name = c->n_policies ? c->policies[0].driver : NULL;
    const bool amd = is(c->vendor, "AuthenticAMD");
    if (!name) {
        if (!c->model) return;
        nbi_judge(v, NBI_FINDING_NOTE, "", "/sys/devices/system/cpu/cpufreq",
                  "no frequency driver: the firmware alone chooses clocks")
            ->setting = "firmware: give control of power to the operating system (CPPC, OS DBPM)";
    } else if (is(name, "acpi-cpufreq") && amd && nbi_has_word(c->flags, "cppc")) {
        nbi_judge(v, NBI_FINDING_NOTE, "", POLICY "/scaling_driver",
                  "acpi-cpufreq on a processor that has CPPC: clocks move in three steps")
            ->setting = "kernel command line: amd_pstate=active (Linux 6.3 and later)";
    } else if (is(name, "acpi-cpufreq") && is(c->vendor, "GenuineIntel")) {
        nbi_judge(v, NBI_FINDING_NOTE, "", POLICY "/scaling_driver",
                  "acpi-cpufreq instead of intel_pstate")
            ->setting = "kernel command line: take intel_pstate=disable away; firmware: enable HWP "
                        "(Speed Shift)";
    } else {
        const char *status = c->amd_pstate ? c->amd_pstate : c->intel_pstate;
        nbi_judge(v, NBI_FINDING_OK, "", POLICY "/scaling_driver", "%s%s%s", name,
                  status ? ", " : "", status ? status : "");
    }
}

static void boost(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_cpu_facts *c = &f->cpu;
    if (c->no_turbo == 1)
        nbi_judge(v, NBI_FINDING_WARNING, "", "/sys/devices/system/cpu/intel_pstate/no_turbo",
                  "turbo is off")
            ->command = "echo 0 > /sys/devices/system/cpu/intel_pstate/no_turbo";
    else if (c->boost == 0)
        nbi_judge(v, NBI_FINDING_WARNING, "", "/sys/devices/system/cpu/cpufreq/boost",
                  "boost is off")
            ->command = "echo 1 > /sys/devices/system/cpu/cpufreq/boost";
    else if (c->no_turbo == 0 || c->boost == 1)
        nbi_judge(v, NBI_FINDING_OK, "", "/sys/devices/system/cpu/cpufreq/boost, intel_pstate",
                  "on");
}

static void limit(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_cpu_facts *c = &f->cpu;
    uint32_t n = 0, seen = 0;
    const nbi_cpu_policy *first = NULL;
    for (uint32_t i = 0; i < c->n_policies; i++) {
        const nbi_cpu_policy *p = &c->policies[i];
        if (p->max_khz <= 0 || p->hardware_max_khz <= 0) continue;
        seen++;
        if (p->max_khz >= p->hardware_max_khz) continue;
        if (!n++) first = p;
    }
    if (first)
        nbi_judge(v, NBI_FINDING_WARNING, "", POLICY "/scaling_max_freq",
                  "held at %.2f GHz of %.2f GHz on %u of %u policies",
                  (double)first->max_khz * 1e-6, (double)first->hardware_max_khz * 1e-6, n, seen)
            ->command =
            "for p in " POLICY "; do cat \"$p/cpuinfo_max_freq\" > \"$p/scaling_max_freq\"; done";
    else if (seen)
        nbi_judge(v, NBI_FINDING_OK, "", POLICY "/scaling_max_freq",
                  "%.2f GHz, the processor's own", (double)c->policies[0].max_khz * 1e-6);
}

/* From here on a wake-up is a visible part of a step of some milliseconds. */
#define LATENCY_NOTE_US    50
#define LATENCY_WARNING_US 200

static void idle(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_cpu_facts *c = &f->cpu;
    const nbi_idle_state *deepest = NULL;
    for (uint32_t i = 0; i < c->n_states; i++) {
        const nbi_idle_state *s = &c->states[i];
        if (s->disabled > 0 || s->latency_us < 0) continue;
        if (!deepest || s->latency_us > deepest->latency_us) deepest = s;
    }
    if (!deepest) return;
    const nbi_finding_level level = deepest->latency_us >= LATENCY_WARNING_US ? NBI_FINDING_WARNING
                                    : deepest->latency_us >= LATENCY_NOTE_US  ? NBI_FINDING_NOTE
                                                                              : NBI_FINDING_OK;
    nbi_finding *out =
        nbi_judge(v, level, "", "/sys/devices/system/cpu/cpu0/cpuidle/state*/latency",
                  "deepest state in use %s: %lld us to wake up (driver %s, governor %s)",
                  deepest->name ? deepest->name : "?", (long long)deepest->latency_us,
                  c->idle_driver ? c->idle_driver : "unknown",
                  c->idle_governor ? c->idle_governor : "unknown");
    if (level != NBI_FINDING_OK)
        out->command =
            nbi_reader_text(v->texts,
                            "for s in /sys/devices/system/cpu/cpu*/cpuidle/state*; do "
                            "[ \"$(cat \"$s/latency\")\" -lt %d ] || echo 1 > \"$s/disable\"; done",
                            LATENCY_NOTE_US);
}

static void throttle(const nbi_facts *f, nbi_verdicts *v)
{
    if (f->cpu.throttled < 0) return;
    const char *source = "/sys/devices/system/cpu/cpu*/thermal_throttle/core_throttle_count";
    if (f->cpu.throttled)
        nbi_judge(v, NBI_FINDING_WARNING, "", source, "%lld times too hot since the start",
                  (long long)f->cpu.throttled)
            ->setting = "cooling: fans, dust, paste; firmware: the thermal profile for performance";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "never too hot since the start");
}

static void instructions(const nbi_facts *f, nbi_verdicts *v)
{
    const char *flags = f->cpu.flags, *source = "/proc/cpuinfo";
    if (!flags) return;
    const bool avx2 = nbi_has_word(flags, "avx2") && nbi_has_word(flags, "fma"),
               avx512 = nbi_has_word(flags, "avx512_vnni") && nbi_has_word(flags, "avx512vbmi") &&
                        nbi_has_word(flags, "avx512_bf16");
    nbi_finding *out;
    if (!avx2)
        out = nbi_judge(v, NBI_FINDING_FAULT, "", source,
                        "no AVX2 with FMA: products on the CPU run in plain C");
    else if (!avx512)
        out = nbi_judge(v, NBI_FINDING_NOTE, "", source,
                        "AVX2 without AVX-512 (VNNI, VBMI, BF16): the second level of kernels");
    else
        out = nbi_judge(v, NBI_FINDING_OK, "", source, "AVX-512%s",
                        nbi_has_word(flags, "amx_bf16") ? " and AMX" : "");
    if (out->level == NBI_FINDING_FAULT) out->setting = "hardware: a newer processor, or a GPU";
    if (out->level != NBI_FINDING_OK && f->place.hypervisor)
        out->setting = "hypervisor: hand the host's processor type through (cpu host, "
                       "host-passthrough)";
}

static void affinity(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_cpu_facts *c = &f->cpu;
    if (!c->online.n || !c->allowed.n) return;
    const uint32_t n = nbi_set_common(&c->online, &c->allowed);
    const char *source = "/proc/self/status (Cpus_allowed_list), /sys/devices/system/cpu/online";
    if (n < c->online.n)
        nbi_judge(v, NBI_FINDING_NOTE, "", source, "this process may use %u of %u CPUs: %s", n,
                  c->online.n, c->allowed.text)
            ->setting = "taskset, numactl, the cpuset of the container or AllowedCPUs= of the "
                        "service, if this is not meant";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "all %u CPUs", n);
}

static void quota(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_cpu_facts *c = &f->cpu;
    const char *source = "cpu.max or cpu.cfs_quota_us of the control groups";
    if (c->quota_milli > 0 && c->online.n && c->quota_milli < (int64_t)c->online.n * 1000)
        nbi_judge(v, NBI_FINDING_WARNING, "", source, "%.2f CPUs of time on %u CPUs",
                  (double)c->quota_milli / 1000, c->online.n)
            ->setting = "give whole CPUs by a cpuset instead of a quota (docker --cpuset-cpus, "
                        "kubelet static policy), or take CPUQuota= away";
    else if (c->online.n)
        nbi_judge(v, NBI_FINDING_OK, "", source, "no quota below the machine's %u CPUs",
                  c->online.n);
}

static void offline(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_cpu_facts *c = &f->cpu;
    if (c->offline.n && c->offline.text && c->online.n && !f->place.hypervisor)
        nbi_judge(v, NBI_FINDING_NOTE, "", "/sys/devices/system/cpu/offline", "CPUs %s are offline",
                  c->offline.text)
            ->command = "for c in /sys/devices/system/cpu/cpu*/online; do echo 1 > \"$c\"; done";
}

const nbi_doctor_rule nbi_rules_cpu[] = {
    {"cpu-governor", "cpu", "frequency governor",
     "A core at a low clock reads memory and launches kernels slowly; governors raise the clock "
     "only after a while.",
     governor, true},
    {"cpu-driver", "cpu", "frequency driver",
     "The driver decides how fast and how far clocks follow the load.", driver, true},
    {"cpu-boost", "cpu", "turbo and boost",
     "Without boost a core stays at its base clock, often a third below what it can do.", boost,
     true},
    {"cpu-limit", "cpu", "highest clock allowed",
     "A limit below the processor's own costs in proportion where products bound a step.", limit,
     true},
    {"cpu-idle", "cpu", "idle states",
     "Threads that wait for a device or the next request sleep; every wake-up adds the exit "
     "latency to a token.",
     idle, true},
    {"cpu-throttle", "cpu", "thermal throttling",
     "A hot processor lowers its clock, and speed varies from minute to minute.", throttle, true},
    {"cpu-instructions", "cpu", "instruction sets",
     "The CPU kernels are written for AVX-512 and AMX first; each level below is several times "
     "slower in prompts.",
     instructions, true},
    {"cpu-affinity", "cpu", "CPUs of this process",
     "Memory bandwidth needs cores: fewer of them read fewer bytes per second.", affinity, false},
    {"cpu-quota", "cpu", "quota of CPU time",
     "When the quota of a period is used up all threads stop for the rest of it: tens of "
     "milliseconds in the middle of a step.",
     quota, false},
    {"cpu-offline", "cpu", "offline CPUs", "A CPU that is offline reads no memory.", offline, true},
    {0},
};
