/* Rules of PCI Express, the IOMMU, and what stands between a process and its GPUs. */
#include <stdio.h>
#include <string.h>

#include "perf/doctor_rules.h"

#define SYSFS "/sys/bus/pci/devices/*/"

#define EACH(d, f)                                   \
    for (const nbi_pci_device *d = (f)->pci.devices; \
         d && d < (f)->pci.devices + (f)->pci.n_devices; d++)

static bool is(const char *text, const char *word)
{
    return text && !strcmp(text, word);
}

static const nbi_pci_device *above(const nbi_facts *f, const nbi_pci_device *d)
{
    return d->parent < f->pci.n_devices ? &f->pci.devices[d->parent] : NULL;
}

/* The chain of bridges has at most this many; a recorded tree may have a loop. */
#define DEEPEST 16

static const char *subject_of(nbi_verdicts *v, const nbi_pci_device *d)
{
    const char *kind = d->kind == NBI_PCI_GPU ? "GPU" : d->kind == NBI_PCI_NVME ? "NVMe" : "bridge";
    return nbi_reader_text(v->texts, "%s %s", kind, d->address);
}

static int64_t least(int64_t a, int64_t b)
{
    if (a < 0) return b;
    return b < 0 || a < b ? a : b;
}

/* ---------------------------------------------------------------- links */

static void link_state(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(d, f)
    {
        if (d->kind == NBI_PCI_OTHER || d->width <= 0 || d->speed <= 0) continue;
        /* The port that a hypervisor shows is made up. */
        const nbi_pci_device *up = f->place.hypervisor ? NULL : above(f, d);
        const int64_t width = up ? least(d->max_width, up->max_width) : d->max_width,
                      speed = up ? least(d->max_speed, up->max_speed) : d->max_speed;
        const nbi_gpu *state = nbi_facts_gpu_at(f, d->address);
        /* P0 to P2 are the states of work: then the link is as fast as it gets. */
        const bool works = state && state->performance_state >= 0 && state->performance_state <= 2;
        const bool narrow = d->width < width, slow = d->speed < speed, gpu = d->kind == NBI_PCI_GPU;
        const nbi_finding_level level =
            narrow ? d->width * 4 <= width && gpu ? NBI_FINDING_FAULT : NBI_FINDING_WARNING
            : slow && gpu && !works ? NBI_FINDING_NOTE
            : slow                  ? NBI_FINDING_WARNING
                                    : NBI_FINDING_OK;
        nbi_finding *out = nbi_judge(
            v, level, subject_of(v, d), "PCI Express link capabilities and status",
            "%.1f GT/s x%lld of %.1f GT/s x%lld%s", (double)d->speed / 10, (long long)d->width,
            (double)speed / 10, (long long)width,
            level == NBI_FINDING_NOTE ? ": an idle GPU lowers its link; look again under load"
                                      : "");
        if (narrow)
            out->setting = "hardware: seat the card again, clean its contacts, try another slot or "
                           "riser; firmware: the slot's lanes (bifurcation)";
        else if (level == NBI_FINDING_WARNING)
            out->setting = "firmware: the link speed of the slot (auto); hardware: riser or cable "
                           "of the generation";
    }
}

static void slot(const nbi_facts *f, nbi_verdicts *v)
{
    if (f->place.hypervisor) return;
    EACH(d, f)
    {
        const nbi_pci_device *up = above(f, d);
        if (d->kind == NBI_PCI_OTHER || !up || up->max_width <= 0 || d->max_width <= 0) continue;
        const bool less = up->max_width < d->max_width || up->max_speed < d->max_speed;
        nbi_finding *out =
            nbi_judge(v, less ? NBI_FINDING_NOTE : NBI_FINDING_OK, subject_of(v, d),
                      "PCI Express link capabilities of the device and its port",
                      "the port gives %.1f GT/s x%lld, the device could %.1f GT/s x%lld",
                      (double)up->max_speed / 10, (long long)up->max_width,
                      (double)d->max_speed / 10, (long long)d->max_width);
        if (less) out->setting = "hardware: another slot, if the board has one";
    }
}

static void payload(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(d, f)
    {
        if (d->kind == NBI_PCI_OTHER || d->payload < 0) continue;
        int64_t possible = d->payload_max, agreed = d->payload;
        int deep = 0;
        for (const nbi_pci_device *up = above(f, d); up && deep < DEEPEST; up = above(f, up)) {
            possible = least(possible, up->payload_max);
            agreed = least(agreed, up->payload);
            deep++;
        }
        const char *source = "PCI Express device capabilities and control, up to the root port";
        if (agreed < d->payload)
            nbi_judge(
                v, NBI_FINDING_FAULT, subject_of(v, d), source,
                "sends up to %lld bytes, a bridge above takes %lld: larger packets are errors",
                (long long)d->payload, (long long)agreed)
                ->setting = "kernel command line: pci=pcie_bus_safe";
        else if (d->payload < possible && !f->place.hypervisor)
            nbi_judge(v, NBI_FINDING_NOTE, subject_of(v, d), source,
                      "%lld bytes a packet, %lld are possible", (long long)d->payload,
                      (long long)possible)
                ->setting =
                "kernel command line: pci=pcie_bus_perf, or the firmware's payload size";
        else
            nbi_judge(v, NBI_FINDING_OK, subject_of(v, d), source, "%lld bytes a packet",
                      (long long)d->payload);
    }
}

static void read_request(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(d, f)
    {
        if (d->kind == NBI_PCI_OTHER || d->read_request < 0) continue;
        const bool less = d->read_request < 512;
        nbi_finding *out = nbi_judge(v, less ? NBI_FINDING_NOTE : NBI_FINDING_OK, subject_of(v, d),
                                     "PCI Express device control", "asks for %lld bytes at a time",
                                     (long long)d->read_request);
        if (less)
            out->command =
                nbi_reader_text(v->texts, "setpci -s %s CAP_EXP+8.w=2000:7000", d->address);
    }
}

static void link_power(const nbi_facts *f, nbi_verdicts *v)
{
    static const char *const names[] = {"off", "L0s", "L1", "L0s and L1"};
    EACH(d, f)
    {
        if (d->kind == NBI_PCI_OTHER || d->aspm < 0) continue;
        nbi_finding *out =
            nbi_judge(v, d->aspm ? NBI_FINDING_NOTE : NBI_FINDING_OK, subject_of(v, d),
                      "PCI Express link control", "%s", names[d->aspm & 3]);
        if (d->aspm) out->command = "echo performance > /sys/module/pcie_aspm/parameters/policy";
    }
}

#define ACS_REDIRECT 0x0c /* requests, completions */

static bool is_above_gpu(const nbi_facts *f, const nbi_pci_device *bridge)
{
    EACH(d, f)
    {
        int deep = 0;
        if (d->kind != NBI_PCI_GPU) continue;
        for (const nbi_pci_device *up = above(f, d); up && deep < DEEPEST; up = above(f, up)) {
            if (up == bridge) return true;
            deep++;
        }
    }
    return false;
}

static void redirect(const nbi_facts *f, nbi_verdicts *v)
{
    char list[512] = "";
    uint32_t n = 0, seen = 0;
    if (f->pci.n_gpus < 2 || f->place.hypervisor) return;
    EACH(d, f)
    {
        if (d->acs < 0 || d->kind != NBI_PCI_OTHER || !is_above_gpu(f, d)) continue;
        seen++;
        if (!(d->acs & ACS_REDIRECT)) continue;
        const size_t at = strlen(list);
        snprintf(list + at, sizeof list - at, "%s%s", n++ ? " " : "", d->address);
    }
    const char *source = "PCI Express access control services of the bridges above GPUs";
    if (!seen) return;
    if (!n) {
        nbi_judge(v, NBI_FINDING_OK, "", source, "no redirection on %u bridges", seen);
        return;
    }
    nbi_finding *out =
        nbi_judge(v, NBI_FINDING_WARNING, "", source,
                  "%u of %u bridges send traffic between devices up to the root", n, seen);
    out->command = nbi_reader_text(
        v->texts, "for d in %s; do setpci -s $d ECAP_ACS+6.w=0000:000c; done", list);
    out->setting = "firmware: ACS off, where no virtual machine is given devices";
}

#define CORRECTED_WARNING 100

static void link_errors(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(d, f)
    {
        const bool counts = d->corrected >= 0 || d->nonfatal >= 0 || d->fatal >= 0;
        if (!counts || (d->kind == NBI_PCI_OTHER && !is_above_gpu(f, d))) continue;
        const bool hard = d->nonfatal > 0 || d->fatal > 0;
        const nbi_finding_level level = hard                                ? NBI_FINDING_FAULT
                                        : d->corrected >= CORRECTED_WARNING ? NBI_FINDING_WARNING
                                        : d->corrected > 0                  ? NBI_FINDING_NOTE
                                                                            : NBI_FINDING_OK;
        nbi_finding *out =
            nbi_judge(v, level, subject_of(v, d),
                      SYSFS "aer_dev_correctable, aer_dev_nonfatal, aer_dev_fatal",
                      "%lld fatal, %lld not fatal, %lld corrected errors since the start",
                      (long long)(d->fatal > 0 ? d->fatal : 0),
                      (long long)(d->nonfatal > 0 ? d->nonfatal : 0),
                      (long long)(d->corrected > 0 ? d->corrected : 0));
        if (level != NBI_FINDING_OK)
            out->setting = "hardware: card, riser, cable, slot; a lower link speed in the firmware "
                           "shows whether the signal is at fault";
    }
}

#define SMALL_BAR (256ll << 20)

static void region(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(d, f)
    {
        if (d->kind != NBI_PCI_GPU || (d->bar < 0 && !d->bar_unplaced)) continue;
        const char *source = SYSFS "resource, resizable BAR capability",
                   *mend = "firmware: Above 4G Decoding and Resizable BAR on, CSM off";
        if (d->bar_unplaced)
            nbi_judge(v, NBI_FINDING_FAULT, subject_of(v, d), source,
                      "a region of %.0f MiB has no address", (double)d->bar / 0x1p20)
                ->setting = mend;
        else if (d->bar < d->bar_max || (d->bar_max < 0 && d->bar <= SMALL_BAR))
            nbi_judge(v, f->pci.n_gpus > 1 ? NBI_FINDING_WARNING : NBI_FINDING_NOTE,
                      subject_of(v, d), source, "%.0f MiB of the memory can be reached%s",
                      (double)d->bar / 0x1p20,
                      d->bar_max > 0 ? ", the card could show all of it" : "")
                ->setting = mend;
        else
            nbi_judge(v, NBI_FINDING_OK, subject_of(v, d), source, "%.0f GiB",
                      (double)d->bar / 0x1p30);
    }
}

static void runtime_power(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(d, f)
    {
        if (d->kind != NBI_PCI_GPU || !d->control) continue;
        const bool sleeps = is(d->control, "auto");
        nbi_finding *out = nbi_judge(v, sleeps ? NBI_FINDING_NOTE : NBI_FINDING_OK,
                                     subject_of(v, d), SYSFS "power/control", "%s", d->control);
        if (sleeps)
            out->command = nbi_reader_text(
                v->texts, "echo on > /sys/bus/pci/devices/%s/power/control", d->address);
    }
}

/* ---------------------------------------------------------------- IOMMU and hypervisor */

static void iommu(const nbi_facts *f, nbi_verdicts *v)
{
    const char *source = "/sys/class/iommu, /sys/kernel/iommu_groups/*/type, /proc/cmdline";
    const char *type = NULL;
    if (!f->pci.n_gpus) return;
    EACH(d, f)
    {
        if (d->kind == NBI_PCI_GPU && d->group_type && (!type || !is(d->group_type, "identity")))
            type = d->group_type;
    }
    if (!type)
        nbi_judge(v, NBI_FINDING_OK, "", source, f->pci.iommu ? "on, no group of a GPU" : "none");
    else if (is(type, "identity"))
        nbi_judge(v, NBI_FINDING_OK, "", source, "identity: addresses pass through");
    else
        nbi_judge(v, f->pci.n_gpus > 1 ? NBI_FINDING_WARNING : NBI_FINDING_NOTE, "", source,
                  "%s: every transfer of a GPU is translated", type)
            ->setting = "kernel command line: iommu=pt; or the IOMMU off in the firmware, where no "
                        "virtual machine is given devices";
}

/* Does the driver say of every pair that they reach each other? */
static bool all_reach(const nbi_nvml_facts *n)
{
    uint32_t pairs = 0;
    for (uint32_t i = 0; i < n->n_gpus; i++)
        for (uint32_t k = 0; k < n->n_gpus; k++) {
            if (i == k) continue;
            if (n->gpus[i].peer_read[k] != 0 || n->gpus[i].peer_write[k] != 0) return false;
            pairs++;
        }
    return pairs > 0;
}

static void virtual_peers(const nbi_facts *f, nbi_verdicts *v)
{
    if (!f->pci.n_gpus || !f->cpu.flags) return;
    const char *source = "/sys/bus/pci/devices, /proc/cpuinfo (hypervisor)";
    if (f->place.hypervisor && f->pci.n_gpus > 1 && all_reach(&f->nvml))
        nbi_judge(v, NBI_FINDING_OK, "", "nvmlDeviceGetP2PStatus()",
                  "%u GPUs handed through, and they reach each other", f->pci.n_gpus);
    else if (f->place.hypervisor && f->pci.n_gpus > 1)
        nbi_judge(v, NBI_FINDING_WARNING, "", source,
                  "%u GPUs handed through: peer access is off unless the hypervisor arranges it",
                  f->pci.n_gpus)
            ->setting = "hypervisor: give GPUs that reach each other to one machine, behind a "
                        "virtual switch (QEMU x-nv-gpudirect-clique), with ACS direct translation; "
                        "or run in a container on the host";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "%u GPU%s%s", f->pci.n_gpus,
                  f->pci.n_gpus == 1 ? "" : "s", f->place.hypervisor ? " handed through" : "");
}

/* ---------------------------------------------------------------- from a process to its GPUs */

static void kernel_driver(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(d, f)
    {
        if (d->kind != NBI_PCI_GPU) continue;
        const char *source = SYSFS "driver";
        if (is(d->driver, "nvidia"))
            nbi_judge(v, NBI_FINDING_OK, subject_of(v, d), source, "nvidia");
        else if (is(d->driver, "vfio-pci"))
            nbi_judge(v, NBI_FINDING_NOTE, subject_of(v, d), source,
                      "vfio-pci: kept for a virtual machine");
        else
            nbi_judge(v, NBI_FINDING_FAULT, subject_of(v, d), source, "%s",
                      d->driver ? d->driver : "no driver")
                ->setting = "install NVIDIA's driver (its open kernel modules for Blackwell) and "
                            "keep nouveau away: modprobe.blacklist=nouveau";
    }
}

static void nodes(const nbi_facts *f, nbi_verdicts *v)
{
    const char *give = "docker and podman: --gpus all, or CDI (--device nvidia.com/gpu=all); LXC: "
                       "lxc.mount.entry and lxc.cgroup2.devices.allow for the node's major number";
    for (uint32_t i = 0; i < f->pci.n_nodes; i++) {
        const nbi_node *n = &f->pci.nodes[i];
        const char *subject = nbi_reader_text(v->texts, "/dev/%s", n->name);
        const char *source = "stat() and open() of the node, /proc/devices";
        nbi_finding *out;
        if (!n->there) {
            out = nbi_judge(v, NBI_FINDING_FAULT, subject, source, "not there");
            if (f->place.container)
                out->setting = give;
            else
                out->command = "nvidia-modprobe -u -c 0";
        } else if (n->expected >= 0 && n->major != n->expected) {
            nbi_judge(v, NBI_FINDING_FAULT, subject, source,
                      "a stale node: major number %lld, the driver has %lld", (long long)n->major,
                      (long long)n->expected)
                ->setting = "make it anew: restart the container, and let its configuration name "
                            "the number that /proc/devices has now (it may change at every start "
                            "of the host)";
        } else if (n->refused) {
            nbi_judge(v, NBI_FINDING_FAULT, subject, source, "open() says %s", n->refused)
                ->setting = is(n->refused, "EACCES")
                                ? "permissions of the node: the group of the service (video, "
                                  "render), or NVreg_DeviceFileMode"
                                : give;
        } else {
            nbi_judge(v, NBI_FINDING_OK, subject, source, "opens");
        }
    }
}

static void placement(const nbi_facts *f, nbi_verdicts *v)
{
    nbi_set near;
    EACH(d, f)
    {
        if (d->kind != NBI_PCI_GPU || !d->local_cpus || !f->cpu.allowed.n) continue;
        nbi_set_parse(&near, d->local_cpus);
        if (!near.n || f->memory.n_nodes < 2) continue;
        const char *source = "hwloc, " SYSFS "local_cpulist, /proc/self/status";
        if (nbi_set_common(&near, &f->cpu.allowed))
            nbi_judge(v, NBI_FINDING_OK, subject_of(v, d), source, "near CPUs %s", d->local_cpus);
        else
            nbi_judge(v, NBI_FINDING_WARNING, subject_of(v, d), source,
                      "near CPUs %s, this process may use %s only", d->local_cpus,
                      f->cpu.allowed.text)
                ->setting = nbi_reader_text(v->texts,
                                            "numactl --cpunodebind=%lld --membind=%lld nibble "
                                            "serve ...",
                                            (long long)(d->node < 0 ? 0 : d->node),
                                            (long long)(d->node < 0 ? 0 : d->node));
    }
}

static void kinds(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_topology_facts *t = &f->topology;
    if (t->kinds > 1)
        nbi_judge(v, NBI_FINDING_NOTE, "", "hwloc (kinds of CPUs)",
                  "%u kinds of cores; the slowest: CPUs %s", t->kinds,
                  t->slow_cpus ? t->slow_cpus : "?")
            ->setting = "taskset on the fast cores: an operator waits for its slowest thread";
    else if (t->cores)
        nbi_judge(v, NBI_FINDING_OK, "", "hwloc", "%u cores of one kind in %u package%s", t->cores,
                  t->packages, t->packages == 1 ? "" : "s");
}

const nbi_doctor_rule nbi_rules_pci[] = {
    {"cpu-kinds", "cpu", "kinds of cores",
     "Work is cut in equal pieces: slow cores hold the others up.", kinds, false},
    {"pcie-link", "pcie", "link now against possible",
     "Loading, offloaded experts and transfers between GPUs without NVLink go at the link's rate.",
     link_state, true},
    {"pcie-slot", "pcie", "slot against device",
     "A slot of fewer lanes or an older generation bounds the same transfers.", slot, true},
    {"pcie-payload", "pcie", "MaxPayload",
     "Small packets spend more of the link on headers: 128 instead of 256 bytes cost some 8 % of "
     "it.",
     payload, true},
    {"pcie-read-request", "pcie", "MaxReadReq",
     "Small requests keep too few bytes under way for the link's latency.", read_request, true},
    {"pcie-aspm", "pcie", "link power saving (ASPM)",
     "A link that sleeps takes microseconds to wake up, at the first transfer of a step.",
     link_power, true},
    {"pcie-acs", "pcie", "redirection by ACS",
     "Transfers between GPUs below one switch go up to the processor and back: half the rate, "
     "twice the latency.",
     redirect, true},
    {"pcie-errors", "pcie", "errors counted by AER",
     "A corrected error is a packet sent twice; others end the driver's work with the device.",
     link_errors, true},
    {"pcie-bar", "pcie", "size of the BAR",
     "Peers and the host reach a GPU's memory through it; a small one rules peer access out.",
     region, true},
    {"pcie-power", "pcie", "runtime power management",
     "A GPU that was put to sleep takes a second to come back to the first request.", runtime_power,
     true},
    {"iommu-mode", "pcie", "IOMMU",
     "Translation costs latency on every transfer, and keeps GPUs from reaching each other "
     "directly.",
     iommu, true},
    {"place-peers", "place", "several GPUs in a virtual machine",
     "Without peer access a reduction over ranks goes through host memory.", virtual_peers, false},
    {"gpu-module", "gpu", "kernel driver of the GPU",
     "Without NVIDIA's module the GPU is not used at all.", kernel_driver, true},
    {"gpu-nodes", "gpu", "device nodes and rights to them",
     "CUDA opens these nodes; without one it finds no device.", nodes, false},
    {"gpu-placement", "gpu", "process near its GPUs",
     "From another socket every launch and every copy crosses the processors' link.", placement,
     false},
    {0},
};
