/* Rules of GPUs, by NVML. Codes, masks and levels: NVML API Reference Guide. */
#include <stdio.h>
#include <string.h>

#include "perf/doctor_rules.h"

#define EACH(g, f) \
    for (const nbi_gpu *g = (f)->nvml.gpus; g && g < (f)->nvml.gpus + (f)->nvml.n_gpus; g++)

static const char *subject_of(nbi_verdicts *v, const nbi_gpu *g)
{
    return nbi_reader_text(v->texts, "GPU %s", g->address);
}

/* A command for one GPU. */
static const char *smi(nbi_verdicts *v, const nbi_gpu *g, const char *what)
{
    return nbi_reader_text(v->texts, "nvidia-smi -i %s %s", g->address, what);
}

/* ---------------------------------------------------------------- driver */

#define NVML_DRIVER_NOT_LOADED 9
#define NVML_VERSION_MISMATCH  18

static void library(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_nvml_facts *n = &f->nvml;
    const char *source = "libnvidia-ml.so.1, nvmlInit_v2()";
    if (!n->asked) return;
    if (n->missing)
        nbi_judge(v, NBI_FINDING_FAULT, "", source, "%s", n->missing)->setting =
            f->place.container ? "NVIDIA_DRIVER_CAPABILITIES=compute,utility for the container"
                               : "the driver's libraries (libnvidia-compute, nvidia-driver-libs)";
    else if (n->init == NVML_VERSION_MISMATCH)
        nbi_judge(v, NBI_FINDING_FAULT, "", source,
                  "the library and the kernel module are of different versions")
            ->setting = "restart the machine after an update of the driver, or the container with "
                        "the host's new driver";
    else if (n->init)
        nbi_judge(v, NBI_FINDING_FAULT, "", source, "code %lld%s", (long long)n->init,
                  n->init == NVML_DRIVER_NOT_LOADED ? ": the driver is not loaded" : "")
            ->setting = "dmesg says why (NVRM); nvidia-smi must work first";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "driver %s, %u GPU%s", n->driver ? n->driver : "?",
                  n->n_gpus, n->n_gpus == 1 ? "" : "s");
}

#define CUDA_NEEDED 13000

static void cuda(const nbi_facts *f, nbi_verdicts *v)
{
    const int64_t version = f->nvml.cuda;
    const char *source = "nvmlSystemGetCudaDriverVersion_v2()";
    if (version < 0) return;
    if (version < CUDA_NEEDED)
        nbi_judge(v, NBI_FINDING_FAULT, "", source,
                  "driver %s is for CUDA %lld.%lld, nibble needs %d.0",
                  f->nvml.driver ? f->nvml.driver : "?", (long long)version / 1000,
                  (long long)version % 1000 / 10, CUDA_NEEDED / 1000)
            ->setting = "a driver of branch 580 or later";
    else
        nbi_judge(v, NBI_FINDING_OK, "", source, "CUDA %lld.%lld", (long long)version / 1000,
                  (long long)version % 1000 / 10);
}

static void reachable(const nbi_facts *f, nbi_verdicts *v)
{
    uint32_t n = 0;
    EACH(g, f)
    {
        if (g->lost)
            nbi_judge(v, NBI_FINDING_FAULT,
                      nbi_reader_text(v->texts, "GPU %u", (unsigned)(g - f->nvml.gpus)),
                      "nvmlDeviceGetHandleByIndex_v2()", "code %lld: it does not answer",
                      (long long)g->lost)
                ->setting = "dmesg (Xid) says why; a cold start of the machine; hardware: power "
                            "cables, seat";
        n += !g->lost;
    }
    if (n) nbi_judge(v, NBI_FINDING_OK, "", "nvmlDeviceGetHandleByIndex_v2()", "%u answer", n);
}

/* Kernels are compiled for 8.0, 8.9, 9.0, 10.0 and 12.0; the last three for exactly these. */
static void capability(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        const int64_t major = g->capability_major, minor = g->capability_minor;
        if (major < 0) continue;
        const bool runs = major == 8 || ((major == 9 || major == 10 || major == 12) && minor == 0);
        nbi_finding *out =
            nbi_judge(v, runs ? NBI_FINDING_OK : NBI_FINDING_FAULT, subject_of(v, g),
                      "nvmlDeviceGetCudaComputeCapability()", "%s, compute capability %lld.%lld",
                      g->name, (long long)major, (long long)minor);
        if (!runs)
            out->setting = "nibble has kernels for 8.0 to 8.9, 9.0, 10.0 and 12.0: another GPU, or "
                           "--device cpu";
    }
}

/* ---------------------------------------------------------------- clocks and power */

static void persistence(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        if (g->persistence < 0) continue;
        nbi_finding *out =
            nbi_judge(v, g->persistence ? NBI_FINDING_OK : NBI_FINDING_WARNING, subject_of(v, g),
                      "nvmlDeviceGetPersistenceMode()", "%s", g->persistence ? "on" : "off");
        if (!g->persistence) out->command = smi(v, g, "-pm 1");
    }
}

static void power(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        if (g->power_limit_mw <= 0 || g->power_default_mw <= 0) continue;
        const bool less = g->power_limit_mw < g->power_default_mw;
        nbi_finding *out =
            nbi_judge(v, less ? NBI_FINDING_WARNING : NBI_FINDING_OK, subject_of(v, g),
                      "nvmlDeviceGetEnforcedPowerLimit()", "%.0f W of %.0f W",
                      (double)g->power_limit_mw * 1e-3, (double)g->power_default_mw * 1e-3);
        if (less)
            out->command = smi(
                v, g, nbi_reader_text(v->texts, "-pl %.0f", (double)g->power_default_mw * 1e-3));
    }
}

static const struct reason {
    int64_t bit;
    nbi_finding_level level;
    const char *what, *mend;
} reasons[] = {
    {0x80, NBI_FINDING_FAULT, "power brake by the board", "hardware: power supply and its cables"},
    {0x40, NBI_FINDING_WARNING, "too hot (hardware)", "cooling: air flow, fans, distance of cards"},
    {0x08, NBI_FINDING_WARNING, "slowed down by the hardware", "hardware: power, temperature"},
    {0x20, NBI_FINDING_WARNING, "too hot (driver)", "cooling: air flow, fans, distance of cards"},
    {0x04, NBI_FINDING_NOTE, "at the power limit", "nvidia-smi -pl, where power and cooling allow"},
    {0x02, NBI_FINDING_NOTE, "clocks set by hand", "nvidia-smi -rac; nvidia-smi -rgc -rmc"},
    {0x10, NBI_FINDING_NOTE, "bound to the slowest of a group (sync boost)",
     "take the GPU out of its group (DCGM)"},
};

static void throttle(const nbi_facts *f, nbi_verdicts *v)
{
    const char *source = "nvmlDeviceGetCurrentClocksEventReasons()";
    EACH(g, f)
    {
        if (g->clock_reasons < 0) continue;
        bool any = false;
        for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
            if (!(g->clock_reasons & reasons[i].bit)) continue;
            nbi_judge(v, reasons[i].level, subject_of(v, g), source, "%s", reasons[i].what)
                ->setting = reasons[i].mend;
            any = true;
        }
        if (!any) nbi_judge(v, NBI_FINDING_OK, subject_of(v, g), source, "nothing holds it back");
    }
}

/* Only at work: an idle GPU saves power. */
static void clocks(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        if (g->memory_mhz <= 0 || g->memory_max_mhz <= 0) continue;
        if (g->performance_state < 0 || g->performance_state > 15) continue; /* 32: unknown */
        const bool works = g->performance_state <= 2,
                   low = (double)g->memory_mhz < 0.95 * (double)g->memory_max_mhz,
                   stuck = !works && g->utilization > 50;
        nbi_finding *out =
            nbi_judge(v, (works && low) || stuck ? NBI_FINDING_WARNING : NBI_FINDING_OK,
                      subject_of(v, g), "nvmlDeviceGetClockInfo(), nvmlDeviceGetPerformanceState()",
                      "P%lld, memory at %lld of %lld MHz, SM at %lld of %lld MHz%s",
                      (long long)g->performance_state, (long long)g->memory_mhz,
                      (long long)g->memory_max_mhz, (long long)(g->sm_mhz < 0 ? 0 : g->sm_mhz),
                      (long long)(g->sm_max_mhz < 0 ? 0 : g->sm_max_mhz), works ? "" : " (idle)");
        if (out->level != NBI_FINDING_OK) out->command = smi(v, g, "-rgc -rmc");
    }
}

#define DEGREES_LEFT 5

static void temperature(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        if (g->temperature_c < 0 || g->temperature_slowdown_c <= 0) continue;
        const bool hot = g->temperature_c > g->temperature_slowdown_c - DEGREES_LEFT;
        nbi_finding *out =
            nbi_judge(v, hot ? NBI_FINDING_WARNING : NBI_FINDING_OK, subject_of(v, g),
                      "nvmlDeviceGetTemperature()", "%lld degrees, slows down at %lld",
                      (long long)g->temperature_c, (long long)g->temperature_slowdown_c);
        if (hot) out->setting = "cooling: air flow, fans, distance of cards";
    }
}

/* ---------------------------------------------------------------- memory */

static void ecc(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        const char *source = "nvmlDeviceGetTotalEccErrors(), nvmlDeviceGetEccMode()";
        if (g->ecc < 0) continue;
        if (g->ecc_uncorrected > 0)
            nbi_judge(v, NBI_FINDING_FAULT, subject_of(v, g), source,
                      "%lld uncorrected errors since the driver was loaded",
                      (long long)g->ecc_uncorrected)
                ->command = smi(v, g, "-r  # resets the GPU: nothing may use it");
        else if (g->ecc_pending >= 0 && g->ecc_pending != g->ecc)
            nbi_judge(v, NBI_FINDING_NOTE, subject_of(v, g), source,
                      "ECC is %s, and will be %s from the next restart on", g->ecc ? "on" : "off",
                      g->ecc ? "off" : "on");
        else
            nbi_judge(v, g->ecc_corrected > 0 ? NBI_FINDING_NOTE : NBI_FINDING_OK, subject_of(v, g),
                      source, "ECC %s, %lld errors corrected", g->ecc ? "on" : "off",
                      (long long)(g->ecc_corrected > 0 ? g->ecc_corrected : 0));
    }
}

static void remap(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        const char *source =
            "nvmlDeviceGetRemappedRows(), nvmlDeviceGetRetiredPagesPendingStatus()";
        if (g->remap_failed < 0 && g->retired_pending < 0) continue;
        if (g->remap_failed > 0)
            nbi_judge(v, NBI_FINDING_FAULT, subject_of(v, g), source,
                      "a broken row of memory could not be replaced")
                ->setting = "hardware: replace the card";
        else if (g->remap_pending > 0 || g->retired_pending > 0)
            nbi_judge(v, NBI_FINDING_WARNING, subject_of(v, g), source,
                      "memory waits for a reset to be taken out of use")
                ->command = smi(v, g, "-r  # resets the GPU: nothing may use it");
        else
            nbi_judge(v, NBI_FINDING_OK, subject_of(v, g), source, "%lld rows remapped",
                      (long long)(g->remapped < 0 ? 0 : g->remapped));
    }
}

/* ---------------------------------------------------------------- who may use it */

static void mig(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        if (g->mig < 0) continue;
        nbi_finding *out = nbi_judge(v, g->mig ? NBI_FINDING_WARNING : NBI_FINDING_OK,
                                     subject_of(v, g), "nvmlDeviceGetMigMode()", "%s",
                                     g->mig ? "on: a process gets a slice of the GPU" : "off");
        if (g->mig) out->command = smi(v, g, "-mig 0");
    }
}

static void mode(const nbi_facts *f, nbi_verdicts *v)
{
    static const char *const names[] = {"default", "exclusive thread", "prohibited",
                                        "exclusive process"};
    EACH(g, f)
    {
        if (g->compute_mode < 0 || g->compute_mode > 3) continue;
        nbi_finding *out =
            nbi_judge(v,
                      g->compute_mode == 2   ? NBI_FINDING_FAULT
                      : g->compute_mode == 0 ? NBI_FINDING_OK
                                             : NBI_FINDING_NOTE,
                      subject_of(v, g), "nvmlDeviceGetComputeMode()", "%s", names[g->compute_mode]);
        if (g->compute_mode) out->command = smi(v, g, "-c 0");
    }
}

static void processes(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        if (g->processes < 0) continue;
        nbi_judge(v, g->processes ? NBI_FINDING_NOTE : NBI_FINDING_OK, subject_of(v, g),
                  "nvmlDeviceGetComputeRunningProcesses_v3()", "%lld processes compute on it",
                  (long long)g->processes);
    }
}

/* ---------------------------------------------------------------- several */

static void alike(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_nvml_facts *n = &f->nvml;
    if (n->n_gpus < 2) return;
    for (uint32_t i = 1; i < n->n_gpus; i++) {
        const nbi_gpu *a = &n->gpus[0], *b = &n->gpus[i];
        if (a->lost || b->lost) continue;
        if (!strcmp(a->name, b->name) && a->memory_bytes == b->memory_bytes) continue;
        nbi_judge(v, NBI_FINDING_NOTE, "", "nvmlDeviceGetName(), nvmlDeviceGetMemoryInfo()",
                  "%s beside %s", a->name, b->name);
        return;
    }
    nbi_judge(v, NBI_FINDING_OK, "", "nvmlDeviceGetName(), nvmlDeviceGetMemoryInfo()",
              "%u of the same", n->n_gpus);
}

static const char *peer_reason(int64_t status)
{
    static const char *const names[] = {"well",
                                        "chipset not supported",
                                        "GPU not supported",
                                        "topology not supported",
                                        "disabled by a registry key of the driver",
                                        "not supported",
                                        "unknown"};
    return status >= 0 && status <= 6 ? names[status] : "unknown";
}

static void peers(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_nvml_facts *n = &f->nvml;
    uint32_t asked = 0, bad = 0;
    int64_t why = 0;
    char first[96] = "";
    for (uint32_t i = 0; i < n->n_gpus; i++)
        for (uint32_t k = 0; k < n->n_gpus; k++) {
            const int64_t read = n->gpus[i].peer_read[k], write = n->gpus[i].peer_write[k];
            if (i == k || (read < 0 && write < 0)) continue;
            asked++;
            if (read <= 0 && write <= 0) continue;
            if (bad++) continue;
            why = read > 0 ? read : write;
            snprintf(first, sizeof first, "%s to %s", n->gpus[i].address, n->gpus[k].address);
        }
    const char *source = "nvmlDeviceGetP2PStatus()";
    if (!asked) return;
    if (!bad)
        nbi_judge(v, NBI_FINDING_OK, "", source, "%u of %u directions", asked, asked);
    else
        nbi_judge(v, NBI_FINDING_WARNING, "", source, "none on %u of %u directions; %s: %s", bad,
                  asked, first, peer_reason(why))
            ->setting = f->place.hypervisor
                            ? "hypervisor: peer access must be arranged there (QEMU "
                              "x-nv-gpudirect-clique)"
                            : "GPUs below one root complex; iommu=pt; ACS off; consumer cards need "
                              "a driver that allows it";
}

#define TOPOLOGY_SYSTEM 50

static void ancestors(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_nvml_facts *n = &f->nvml;
    uint32_t asked = 0, far = 0;
    for (uint32_t i = 0; i < n->n_gpus; i++)
        for (uint32_t k = i + 1; k < n->n_gpus; k++) {
            if (n->gpus[i].ancestor[k] < 0) continue;
            asked++;
            far += n->gpus[i].ancestor[k] >= TOPOLOGY_SYSTEM;
        }
    if (!asked) return;
    nbi_finding *out = nbi_judge(v, far ? NBI_FINDING_NOTE : NBI_FINDING_OK, "",
                                 "nvmlDeviceGetTopologyCommonAncestor()",
                                 "%u of %u pairs cross the processors' link", far, asked);
    if (far)
        out->setting = "ranks that talk most on GPUs of one socket (CUDA_VISIBLE_DEVICES); "
                       "hardware: GPUs below one switch";
}

static void nvlink(const nbi_facts *f, nbi_verdicts *v)
{
    EACH(g, f)
    {
        uint32_t up = 0;
        if (!g->n_links) continue;
        for (uint32_t i = 0; i < g->n_links; i++) up += g->links[i] == 1;
        const nbi_finding_level level = up == g->n_links     ? NBI_FINDING_OK
                                        : f->nvml.n_gpus < 2 ? NBI_FINDING_NOTE
                                                             : NBI_FINDING_WARNING;
        nbi_finding *out = nbi_judge(v, level, subject_of(v, g), "nvmlDeviceGetNvLinkState()",
                                     "%u of %u links are up", up, g->n_links);
        if (level != NBI_FINDING_OK)
            out->setting = "systemctl status nvidia-fabricmanager, of the driver's version; "
                           "hardware: bridge or switch board";
    }
}

/* ---------------------------------------------------------------- measured */

/* Bytes per second that a link can carry one way: 8b/10b until 5 GT/s, 128b/130b from 8 on. */
static double link_rate(const nbi_pci_device *d)
{
    if (!d || d->max_speed <= 0 || d->max_width <= 0) return 0;
    return (double)d->max_speed * 1e8 * (double)d->max_width / 8 *
           (d->max_speed <= 50 ? 0.8 : 0.985);
}

/* Large copies reach 80 to 90 % of it. */
#define SHARE_WARNING 0.5

static void host_transfers(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_transfers *t = &f->measured.transfers;
    for (uint32_t i = 0; i < t->n; i++) {
        const nbi_transfer *to = &t->to_host[i], *from = &t->from_host[i];
        const double link = link_rate(nbi_facts_pci_at(f, t->address[i]));
        if (to->rate <= 0 || from->rate <= 0) continue;
        const bool slow =
            link > 0 && (to->rate < SHARE_WARNING * link || from->rate < SHARE_WARNING * link);
        char of[48] = "";
        if (link > 0) snprintf(of, sizeof of, ", of %.1f GB/s of the link", link * 1e-9);
        nbi_finding *out = nbi_judge(
            v, slow ? NBI_FINDING_WARNING : NBI_FINDING_OK,
            nbi_reader_text(v->texts, "GPU %s", t->address[i]),
            "copies of 64 MiB and of 16 bytes, pinned memory",
            "to the host %.1f GB/s and %.1f us, from it %.1f GB/s and %.1f us%s", to->rate * 1e-9,
            to->latency * 1e6, from->rate * 1e-9, from->latency * 1e6, of);
        if (slow)
            out->setting = "see pcie-link, iommu-mode and gpu-placement; other transfers at the "
                           "same time count too";
    }
}

static void peer_transfers(const nbi_facts *f, nbi_verdicts *v)
{
    const nbi_transfers *t = &f->measured.transfers;
    double least = 0, most = 0, latency = 0;
    uint32_t n = 0, direct = 0, slow = 0;
    for (uint32_t i = 0; i < t->n; i++) {
        const double link = link_rate(nbi_facts_pci_at(f, t->address[i]));
        for (uint32_t k = 0; k < t->n; k++) {
            const nbi_transfer *p = &t->peer[i][k];
            if (i == k || p->rate <= 0) continue;
            least = n && least < p->rate ? least : p->rate;
            most = most > p->rate ? most : p->rate;
            latency = latency > p->latency ? latency : p->latency;
            direct += p->direct;
            slow += link > 0 && p->rate < SHARE_WARNING * link;
            n++;
        }
    }
    if (!n) return;
    nbi_finding *out =
        nbi_judge(v, direct < n || slow ? NBI_FINDING_WARNING : NBI_FINDING_OK, "",
                  "copies of 64 MiB and of 16 bytes between all pairs",
                  "%.1f to %.1f GB/s, up to %.1f us; %u of %u directions with peer access",
                  least * 1e-9, most * 1e-9, latency * 1e6, direct, n);
    if (direct < n || slow) out->setting = "see gpu-peers, pcie-acs, iommu-mode, pcie-bar";
}

const nbi_doctor_rule nbi_rules_gpu[] = {
    {"gpu-library", "gpu", "NVML", "CUDA fails where this library fails.", library, false},
    {"gpu-cuda", "gpu", "driver against CUDA", "An older driver does not load nibble's kernels.",
     cuda, true},
    {"gpu-answers", "gpu", "GPUs that answer", "A lost GPU takes the ranks of the others with it.",
     reachable, true},
    {"gpu-capability", "gpu", "compute capability",
     "Kernels are compiled for certain generations; others cannot run them.", capability, false},
    {"gpu-persistence", "gpu", "persistence mode",
     "Without it the driver lets go of an idle GPU: the next start waits for it, and clocks and "
     "limits are forgotten.",
     persistence, true},
    {"gpu-power", "gpu", "power limit", "Prompts run at the clock that the power allows.", power,
     true},
    {"gpu-throttle", "gpu", "clocks held back",
     "What holds clocks back costs prompts in proportion, and decode where the memory's clock "
     "falls.",
     throttle, true},
    {"gpu-clocks", "gpu", "clocks at work",
     "Decode is bound by the memory's bandwidth, and that by its clock.", clocks, true},
    {"gpu-temperature", "gpu", "temperature", "A card near its limit slows down under load.",
     temperature, true},
    {"gpu-ecc", "gpu", "ECC", "An uncorrected error ends the process or changes weights.", ecc,
     true},
    {"gpu-remap", "gpu", "replaced rows of memory",
     "Memory that is about to fail ends the process at the next error.", remap, true},
    {"gpu-mig", "gpu", "MIG", "A slice has a part of the bandwidth and of the SMs.", mig, true},
    {"gpu-mode", "gpu", "compute mode", "Prohibited and exclusive modes refuse a process.", mode,
     true},
    {"gpu-processes", "gpu", "other processes",
     "They share bandwidth and memory: figures of a benchmark are theirs too.", processes, false},
    {"gpu-alike", "gpu", "GPUs of one kind",
     "Ranks wait for the slowest GPU, and the smallest sets "
     "the cache.",
     alike, false},
    {"gpu-peers", "gpu", "peer access, reported",
     "Without it every reduction over ranks is copied through host memory.", peers, true},
    {"gpu-ancestors", "gpu", "way between GPUs",
     "Transfers across sockets have a fraction of the rate of those below one switch.", ancestors,
     true},
    {"gpu-nvlink", "gpu", "NVLink",
     "A link that is down takes its share of the bandwidth between ranks with it.", nvlink, true},
    {"measured-host", "measured", "transfers between GPU and host",
     "Loading and offloaded experts go at this rate; each step waits some of these latencies.",
     host_transfers, true},
    {"measured-peers", "measured", "transfers between GPUs",
     "A reduction over ranks takes its bytes over this rate, and its latency per layer.",
     peer_transfers, true},
    {0},
};
