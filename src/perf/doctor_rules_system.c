/* Rules of the kernel, limits, the clock, where it runs, and the disk below the model. */
#include <stdio.h>
#include <string.h>

#include "perf/doctor_rules.h"

static bool is(const char *text, const char *word)
{
    return text && !strcmp(text, word);
}

/* ---------------------------------------------------------------- kernel */

/* Versions from..before with a known fault, from public records. */
static const struct bad_kernel {
    uint32_t from[3], before[3];
    const char *vendor; /* of the CPU; NULL: any */
    nbi_finding_level level;
    const char *what;
} bad_kernels[] = {
    {{4, 19, 0},
     {4, 19, 8},
     NULL,
     NBI_FINDING_FAULT,
     "the block layer may corrupt data (fixed in 4.19.8)"},
    {{6, 1, 64},
     {6, 1, 66},
     NULL,
     NBI_FINDING_FAULT,
     "ext4 corrupts files written with direct I/O (fixed in 6.1.66)"},
    {{2, 0, 0},
     {5, 14, 0},
     NULL,
     NBI_FINDING_NOTE,
     "no MADV_POPULATE_WRITE (5.14): the KV cache is touched page by page at the start"},
    {{2, 0, 0},
     {6, 0, 0},
     "AuthenticAMD",
     NBI_FINDING_NOTE,
     "idle AMD cores wait in a workaround for chipsets of 2002 (gone in 6.0; some distributions "
     "took the change back)"},
};

static int compare(const uint32_t a[3], const uint32_t b[3])
{
    for (int i = 0; i < 3; i++)
        if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
    return 0;
}

static void kernel_version(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_kernel_facts *k = &f->kernel;
    const char *source = "/proc/sys/kernel/osrelease, /proc/version, /proc/version_signature";
    bool bad = false;
    if (!k->upstream[0]) return;
    for (size_t i = 0; i < sizeof bad_kernels / sizeof *bad_kernels; i++) {
        const struct bad_kernel *b = &bad_kernels[i];
        if (compare(k->upstream, b->from) < 0 || compare(k->upstream, b->before) >= 0) continue;
        if (b->vendor && !is(f->cpu.vendor, b->vendor)) continue;
        bad = true;
        nbi_judge(v, b->level, "", source, "Linux %u.%u.%u: %s", k->upstream[0], k->upstream[1],
                  k->upstream[2], b->what)
            ->setting = "a later kernel of the distribution";
    }
    if (!bad)
        nbi_judge(v, NBI_FINDING_OK, "", source, "Linux %u.%u.%u, nothing known against it",
                  k->upstream[0], k->upstream[1], k->upstream[2]);
}

static void clock_source(const nbi_facts *f, nbi_verdicts *v)
{
    static const char *const slow[] = {"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"};
    const char *now = f->kernel.clocksource;
    const char *source = "/sys/devices/system/clocksource/clocksource0";
    if (!now) return;
    for (size_t i = 0; i < sizeof slow / sizeof *slow; i++) {
        if (!is(now, slow[i])) continue;
        const bool has_tsc = nbi_has_word(f->kernel.clocksources, "tsc");
        nbi_finding *out = nbi_judge(v, NBI_FINDING_WARNING, "", source, "%s; available: %s", now,
                                     f->kernel.clocksources ? f->kernel.clocksources : "unknown");
        if (has_tsc)
            out->command =
                "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource";
        else
            out->setting = "the kernel gave the TSC up (dmesg says why): firmware update, or "
                           "tsc=reliable on the kernel command line; in a virtual machine an "
                           "invariant TSC for the guest";
        return;
    }
    nbi_judge(v, NBI_FINDING_OK, "", source, "%s", now);
}

/* ---------------------------------------------------------------- limits */

#define FILES_WANTED 4096

static void files(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_kernel_facts *k = &f->kernel;
    if (k->open_files < 0) return;
    nbi_finding *out;
    if (k->open_files >= FILES_WANTED)
        out =
            nbi_judge(v, NBI_FINDING_OK, "", "/proc/self/limits (Max open files)",
                      k->open_files == INT64_MAX ? "unlimited" : "%lld", (long long)k->open_files);
    else
        out = nbi_judge(v, NBI_FINDING_NOTE, "", "/proc/self/limits (Max open files)",
                        "%lld: nibble serve keeps its connections below it",
                        (long long)k->open_files);
    if (out->level != NBI_FINDING_OK)
        out->setting = "ulimit -n 65536 in the shell, LimitNOFILE= in the service, or --ulimit "
                       "nofile= of the container";
}

static void address_space(const nbi_facts *f, nbi_verdicts *v)
{
    const int64_t limit = f->kernel.address_space;
    if (limit < 0) return;
    if (limit == INT64_MAX)
        nbi_judge(v, NBI_FINDING_OK, "", "/proc/self/limits (Max address space)", "unlimited");
    else
        nbi_judge(v, NBI_FINDING_FAULT, "", "/proc/self/limits (Max address space)",
                  "%.1f GB: larger weights cannot be mapped", (double)limit * 1e-9)
            ->setting = "ulimit -v unlimited in the shell, LimitAS=infinity in the service";
}

/* ---------------------------------------------------------------- where it runs */

static void hypervisor(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_place_facts *p = &f->place;
    const char *source = "/proc/cpuinfo (hypervisor), /sys/class/dmi/id, /sys/hypervisor";
    if (!f->cpu.flags) return;
    if (!p->hypervisor)
        nbi_judge(v, NBI_FINDING_OK, "", source, "bare metal");
    else
        nbi_judge(v, NBI_FINDING_NOTE, "", source,
                  "a virtual machine (%s): clocks, idle states, IOMMU and slots are the host's, "
                  "and are not seen from here",
                  p->hypervisor)
            ->setting = "run nibble doctor on the host too; there pin virtual CPUs, back the "
                        "memory with huge pages, and hand the NUMA layout through";
}

static void container(const nbi_facts *f, nbi_verdicts *v)
{
    const char *source = "/run/systemd/container, /.dockerenv, /run/.containerenv, "
                         "/proc/self/cgroup, /proc/self/mountinfo";
    if (f->place.container)
        nbi_judge(v, NBI_FINDING_NOTE, "", source,
                  "a container (%s): settings of the kernel are the host's", f->place.container)
            ->setting = "what is marked \"on the host\" is mended there";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "no container");
}

/* ---------------------------------------------------------------- the disk */

static void file_system(const nbi_facts *f, nbi_verdicts *v)
{
    static const char *const remote[] = {"nfs",    "nfs4",     "cifs",      "smb3",
                                         "9p",     "ceph",     "glusterfs", "lustre",
                                         "beegfs", "virtiofs", "drvfs"};
    const nbi_storage_facts *s = &f->storage;
    if (!s->mount || !s->type) return;
    const char *source = "/proc/self/mountinfo";
    bool far = !strncmp(s->type, "fuse.", 5) || is(s->type, "fuse") || is(s->type, "fuseblk");
    for (size_t i = 0; i < sizeof remote / sizeof *remote; i++) far |= is(s->type, remote[i]);
    if (far)
        nbi_judge(v, NBI_FINDING_WARNING, s->path, source,
                  "%s from %s: every page of the weights comes over it", s->type, s->source)
            ->setting = "copy the model to a local disk (ext4 or XFS on NVMe)";
    else if (is(s->type, "tmpfs") || is(s->type, "ramfs"))
        nbi_judge(v, NBI_FINDING_NOTE, s->path, source,
                  "%s: the files take memory beside what the device holds", s->type);
    else if (is(s->type, "overlay"))
        nbi_judge(v, NBI_FINDING_NOTE, s->path, source,
                  "overlay: the model lies in a layer of the container")
            ->setting = "mount the model's folder into the container (-v DIR:/model:ro)";
    else if (is(s->type, "zfs") ||
             (is(s->type, "btrfs") && s->options && strstr(s->options, "compress")))
        nbi_judge(v, NBI_FINDING_NOTE, s->path, source, "%s: %s", s->type,
                  is(s->type, "zfs") ? "the ARC keeps a second copy beside the page cache"
                                     : "compressed; weights do not shrink, reading takes CPU time")
            ->setting = is(s->type, "zfs") ? "zfs set primarycache=metadata DATASET"
                                           : "btrfs property set DIR compression none, and copy "
                                             "the files again";
    else
        nbi_judge(v, NBI_FINDING_OK, s->path, source, "%s on %s", s->type, s->source);
}

/* More than a rotating disk gives: many hypervisors call every disk one. */
#define NOT_ROTATING 400e6

static void disk(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_storage_facts *s = &f->storage;
    if (!s->disk) return;
    const char *source = "/sys/dev/block/*/queue";
    if (s->rotational == 1 && f->place.hypervisor && f->measured.file_rate > NOT_ROTATING)
        nbi_judge(v, NBI_FINDING_OK, s->disk, source,
                  "a rotating disk, says the hypervisor; it reads %.2f GB/s",
                  f->measured.file_rate * 1e-9);
    else if (s->rotational == 1 && f->place.hypervisor)
        nbi_judge(v, NBI_FINDING_NOTE, s->disk, source,
                  "a rotating disk, says the hypervisor, as many do of any disk")
            ->setting = "see measured-file; if that is slow, move the model to NVMe";
    else if (s->rotational == 1)
        nbi_judge(v, NBI_FINDING_WARNING, s->disk, source, "a rotating disk")->setting =
            "move the model to NVMe";
    else if (s->read_ahead_kb >= 0 && s->read_ahead_kb < 128)
        nbi_judge(v, NBI_FINDING_NOTE, s->disk, source, "reads only %lld KiB ahead",
                  (long long)s->read_ahead_kb)
            ->command = nbi_reader_text(
            v->texts, "echo 1024 > /sys/class/block/%s/queue/read_ahead_kb", s->disk);
    else if (s->rotational == 0)
        nbi_judge(v, NBI_FINDING_OK, s->disk, source, "no rotating disk, reads %lld KiB ahead",
                  (long long)(s->read_ahead_kb < 0 ? 0 : s->read_ahead_kb));
}

/* ---------------------------------------------------------------- measured */

/* Below it a model of 400 GB takes more than a quarter of an hour to load. */
#define FILE_RATE_WARNING 500e6

static void memory_rate(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_measured_facts *m = &f->measured;
    if (m->memory_rate > 0)
        nbi_judge(v, NBI_FINDING_OK, "", "plain loads over fresh memory, all threads",
                  "%.1f GB/s on %u threads; nibble roofline --bandwidth %.3g says what a token "
                  "costs at least",
                  m->memory_rate * 1e-9, m->threads, m->memory_rate);
}

static void file_rate(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_measured_facts *m = &f->measured;
    const nbi_storage_facts *s = &f->storage;
    if (m->file_rate <= 0) return;
    char load[64] = "";
    if (s->model_bytes > 0)
        snprintf(load, sizeof load, "; the model's %.1f GB take %.0f s",
                 (double)s->model_bytes * 1e-9, (double)s->model_bytes / m->file_rate);
    nbi_finding *out =
        nbi_judge(v, m->file_rate < FILE_RATE_WARNING ? NBI_FINDING_WARNING : NBI_FINDING_OK, "",
                  "direct reads of 4 MiB by 4 threads, at most 2 s", "%.2f GB/s%s",
                  m->file_rate * 1e-9, load);
    if (out->level != NBI_FINDING_OK) out->setting = "move the model to a faster disk";
}

const nbi_doctor_rule nbi_rules_system[] = {
    {"kernel-version", "kernel", "kernel against known faults",
     "Some kernels corrupt files or idle badly, whatever the program does.", kernel_version, true},
    {"kernel-clock", "kernel", "time source",
     "Every step reads the clock; the TSC takes some 20 ns, HPET and the ACPI timer a microsecond "
     "and more, one reader at a time.",
     clock_source, true},
    {"limit-files", "limits", "open files",
     "Each client is a file: beyond the limit connections are refused.", files, false},
    {"limit-address-space", "limits", "address space",
     "Weights are mapped: their size counts, whatever the memory.", address_space, false},
    {"place-hypervisor", "place", "virtual machine",
     "A hypervisor takes a few per cent, and much more where its CPUs move between cores or its "
     "memory is of small pages.",
     hypervisor, false},
    {"place-container", "place", "container",
     "A container costs nothing, but its limits and its view of devices are others.", container,
     false},
    {"model-filesystem", "model", "file system of the model",
     "Weights come from there at every start, and again after memory pressure.", file_system,
     false},
    {"model-disk", "model", "disk of the model",
     "It sets the time of a start, and of a page that was dropped.", disk, true},
    {"measured-memory", "measured", "memory bandwidth",
     "On the CPU a token takes at least the bytes it reads over this rate.", memory_rate, false},
    {"measured-file", "measured", "reading where the model lies",
     "The time of a start is the model's size over this rate.", file_rate, false},
    {0},
};
