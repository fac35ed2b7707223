/* Rules of memory: pages, nodes, modules, swap, what is left for a model. */
#include <string.h>

#include "perf/doctor_rules.h"

#define GB(kb) ((double)(kb)*1024e-9)

static void huge_pages(const nbi_facts *f, nbi_verdicts *v)
{
    const char *thp = f->memory.thp, *source = "/sys/kernel/mm/transparent_hugepage/enabled";
    if (!thp) return;
    if (!strcmp(thp, "never"))
        nbi_judge(v, NBI_FINDING_WARNING, "", source, "never")->command =
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "%s", thp);
}

static void reserved(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_memory_facts *m = &f->memory;
    if (m->huge_total < 0 || m->huge_free < 0 || m->huge_kb <= 0 || m->total_kb <= 0) return;
    if (m->huge_total > m->total_kb || m->huge_free > m->huge_total) return; /* no such machine */
    const double idle = (double)m->huge_free * (double)m->huge_kb;
    if (idle > 0.05 * (double)m->total_kb)
        nbi_judge(v, NBI_FINDING_WARNING, "", "/proc/meminfo (HugePages_Free)",
                  "%.1f GB of %.1f GB are reserved as huge pages that nobody uses", GB(idle),
                  GB(m->total_kb))
            ->command = "sysctl -w vm.nr_hugepages=0";
    else
        nbi_judge(v, NBI_FINDING_OK, "", "/proc/meminfo (HugePages_Free)", "%.1f GB", GB(idle));
}

static void balancing(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_memory_facts *m = &f->memory;
    if (m->numa_balancing < 0) return;
    const bool on = m->numa_balancing && m->n_nodes > 1;
    nbi_finding *out = nbi_judge(v, on ? NBI_FINDING_WARNING : NBI_FINDING_OK, "",
                                 "/proc/sys/kernel/numa_balancing", "%s, %u nodes",
                                 m->numa_balancing ? "on" : "off", m->n_nodes);
    if (on) out->command = "sysctl -w kernel.numa_balancing=0";
}

static void reclaim(const nbi_facts *f, nbi_verdicts *v)
{
    const int64_t mode = f->memory.zone_reclaim;
    if (mode < 0) return;
    nbi_finding *out = nbi_judge(v, mode ? NBI_FINDING_WARNING : NBI_FINDING_OK, "",
                                 "/proc/sys/vm/zone_reclaim_mode", "%lld", (long long)mode);
    if (mode) out->command = "sysctl -w vm.zone_reclaim_mode=0";
}

static void nodes(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_memory_facts *m = &f->memory;
    const char *source = "/sys/devices/system/node/node*/meminfo";
    int64_t least = INT64_MAX, most = 0;
    for (uint32_t i = 0; i < m->n_nodes; i++) {
        const nbi_numa_node *n = &m->nodes[i];
        if (n->memory_kb < 0 || !n->cpus.n) continue; /* memory without CPUs is of another kind */
        if (n->memory_kb < least) least = n->memory_kb;
        if (n->memory_kb > most) most = n->memory_kb;
    }
    if (!most) return;
    if (least < most / 2)
        nbi_judge(v, NBI_FINDING_WARNING, "", source,
                  "nodes differ: %.1f GB at one, %.1f GB at another", GB(least), GB(most))
            ->setting = "hardware: the same memory modules in the channels of every socket";
    else if (m->n_nodes > 1)
        nbi_judge(v, NBI_FINDING_NOTE, "", source, "%u nodes of %.1f GB to %.1f GB", m->n_nodes,
                  GB(least), GB(most))
            ->setting = "numactl --interleave=all nibble serve ... spreads the weights over all "
                        "channels; firmware: NPS1, or sub-NUMA clustering off";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "one node");
}

static void modules(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_memory_facts *m = &f->memory;
    const char *source = "/sys/firmware/dmi/tables/DMI (type 17)";
    const nbi_dimm *slow = NULL, *first = NULL;
    uint32_t used = 0, unequal = 0;
    for (uint32_t i = 0; i < m->n_dimms; i++) {
        const nbi_dimm *d = &m->dimms[i];
        if (!d->bytes) continue;
        if (!used++) first = d;
        if (d->configured && d->rated > d->configured && !slow) slow = d;
        unequal += d->bytes != first->bytes || d->configured != first->configured;
    }
    if (!used || f->place.hypervisor) return;
    if (slow)
        nbi_judge(v, NBI_FINDING_WARNING, slow->locator, source,
                  "runs at %u MT/s, rated for %u MT/s (%u of %u slots filled)", slow->configured,
                  slow->rated, used, m->n_dimms)
            ->setting = "firmware: memory speed or profile (XMP, EXPO); with two modules per "
                        "channel the board's limit is lower";
    else if (unequal)
        nbi_judge(v, NBI_FINDING_WARNING, "", source,
                  "%u of %u modules differ in size or speed from the first", unequal, used)
            ->setting = "hardware: equal modules in all channels, or channels interleave only in "
                        "part";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "%u of %u slots filled, %.1f GB each, %u MT/s",
                  used, m->n_dimms, (double)first->bytes * 1e-9, first->configured);
}

static void errors(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_memory_facts *m = &f->memory;
    const char *source = "/sys/devices/system/edac/mc/mc*/ce_count, ue_count";
    if (m->corrected < 0 && m->uncorrected < 0) return;
    nbi_finding *out = nbi_judge(v,
                                 m->uncorrected > 0 ? NBI_FINDING_FAULT
                                 : m->corrected > 0 ? NBI_FINDING_WARNING
                                                    : NBI_FINDING_OK,
                                 "", source, "%lld uncorrected, %lld corrected errors",
                                 (long long)(m->uncorrected > 0 ? m->uncorrected : 0),
                                 (long long)(m->corrected > 0 ? m->corrected : 0));
    if (out->level != NBI_FINDING_OK)
        out->setting = "hardware: find the module (ras-mc-ctl --errors) and replace it";
}

static void swap(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_memory_facts *m = &f->memory;
    const char *source = "/proc/meminfo (SwapTotal, SwapFree)";
    if (m->swap_total_kb < 0 || m->swap_free_kb < 0) return;
    const int64_t used = m->swap_total_kb - m->swap_free_kb;
    if (m->swap_total_kb == 0)
        nbi_judge(v, NBI_FINDING_OK, "", source, "none");
    else if (used > (1 << 20))
        nbi_judge(v, NBI_FINDING_WARNING, "", source, "%.1f GB of %.1f GB are in use", GB(used),
                  GB(m->swap_total_kb))
            ->command = "swapoff -a  # memory must have room for it";
    else
        nbi_judge(v, NBI_FINDING_NOTE, "", source, "%.1f GB, %.1f GB in use, swappiness %lld",
                  GB(m->swap_total_kb), GB(used > 0 ? used : 0),
                  (long long)(m->swappiness < 0 ? -1 : m->swappiness))
            ->command = "sysctl -w vm.swappiness=1";
}

static void merging(const nbi_facts *f, nbi_verdicts *v)
{
    const int64_t run = f->memory.ksm;
    if (run < 0) return;
    nbi_finding *out = nbi_judge(v, run == 1 ? NBI_FINDING_NOTE : NBI_FINDING_OK, "",
                                 "/sys/kernel/mm/ksm/run", "%s", run == 1 ? "on" : "off");
    if (run == 1) out->command = "echo 0 > /sys/kernel/mm/ksm/run";
}

static void room(const nbi_facts *f, nbi_verdicts *v)
{
    const double left = (double)f->memory.group_bytes, model = (double)f->storage.model_bytes;
    const char *source = "/proc/meminfo, memory.max of the control groups, NVML, the model's files";
    double device = 0;
    for (uint32_t i = 0; i < f->nvml.n_gpus; i++)
        if ((double)f->nvml.gpus[i].memory_bytes > device)
            device = (double)f->nvml.gpus[i].memory_bytes;
    if (!f->memory.group_bytes || f->storage.model_bytes <= 0) return;
    if (model < device)
        nbi_judge(v, NBI_FINDING_OK, "", source, "%.1f GB of %.1f GB of a GPU", model * 1e-9,
                  device * 1e-9);
    else if (model > left)
        nbi_judge(v, NBI_FINDING_WARNING, "", source,
                  "the model's files have %.1f GB, this process may use %.1f GB", model * 1e-9,
                  left * 1e-9)
            ->setting = "on a CPU the weights must fit: more memory, a higher limit of the "
                        "container, fewer other programs";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "%.1f GB of %.1f GB", model * 1e-9, left * 1e-9);
}

const nbi_doctor_rule nbi_rules_memory[] = {
    {"memory-thp", "memory", "transparent huge pages",
     "nibble asks for huge pages for the KV cache and workspaces; with small ones every few "
     "kilobytes cost a walk of page tables.",
     huge_pages, true},
    {"memory-reserved", "memory", "reserved huge pages",
     "Pages reserved at boot hold neither weights nor page cache.", reserved, true},
    {"memory-balancing", "memory", "NUMA balancing",
     "The kernel takes mappings away to see who uses a page, and moves pages: faults in the middle "
     "of a step, over all of the weights.",
     balancing, true},
    {"memory-reclaim", "memory", "zone reclaim",
     "A node throws page cache away - mapped weights - while other nodes have free memory.",
     reclaim, true},
    {"memory-nodes", "memory", "NUMA nodes",
     "Weights that lie at one node are read through that node's channels alone.", nodes, true},
    {"memory-modules", "memory", "memory modules",
     "A token on the CPU takes its bytes over the memory's bandwidth: channels times speed.",
     modules, true},
    {"memory-errors", "memory", "memory errors",
     "A module that corrects errors is slower and about to fail; an uncorrected error ends the "
     "process or changes weights.",
     errors, true},
    {"memory-swap", "memory", "swap",
     "A page that was swapped out costs a read from disk when a step needs it.", swap, true},
    {"memory-merging", "memory", "page merging (KSM)",
     "ksmd compares pages of memory all the time and takes bandwidth for it.", merging, true},
    {"memory-room", "memory", "room for the model",
     "Weights that do not fit into memory are read from the disk for every token.", room, false},
    {0},
};
