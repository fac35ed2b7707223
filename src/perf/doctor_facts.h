/* What `nibble doctor` reads of a machine. Facts only; doctor_rules.h says what they mean. A number
 * that could not be read is NBI_UNKNOWN, a text NULL. Strings belong to the reader.
 *
 * Everything that the kernel tells is read below `root`, so that a recorded tree of /sys, /proc and
 * /dev is read like this machine (docs/doctor.md, "Recorded machines"). */
#pragma once

#include "backend/transfers.h"
#include "perf/doctor_read.h"

#ifdef __cplusplus
extern "C" {
#endif

/* /sys/devices/system/cpu/cpufreq/policyN */
typedef struct nbi_cpu_policy {
    const char *name, *driver, *governor, *preference; /* energy_performance_preference */
    int64_t max_khz, hardware_max_khz;                 /* scaling_max_freq, cpuinfo_max_freq */
} nbi_cpu_policy;

/* /sys/devices/system/cpu/cpu0/cpuidle/stateN */
typedef struct nbi_idle_state {
    const char *name;
    int64_t latency_us, disabled;
} nbi_idle_state;

typedef struct nbi_cpu_facts {
    const char *vendor, *model, *flags; /* of the first processor of /proc/cpuinfo */
    nbi_set online, offline;
    nbi_set allowed; /* Cpus_allowed_list of this process */
    nbi_cpu_policy *policies;
    uint32_t n_policies;
    nbi_idle_state *states;
    uint32_t n_states;
    const char *idle_driver, *idle_governor;
    const char *amd_pstate, *intel_pstate; /* their status files */
    int64_t boost, no_turbo;
    int64_t throttled;   /* sum of core_throttle_count */
    int64_t quota_milli; /* thousandths of a CPU that the cgroup grants; 0: no quota */
} nbi_cpu_facts;

typedef struct nbi_numa_node {
    uint32_t id;
    nbi_set cpus;
    int64_t memory_kb;
} nbi_numa_node;

/* A memory device of SMBIOS (type 17). */
typedef struct nbi_dimm {
    const char *locator;
    uint64_t bytes;             /* 0: an empty slot */
    uint32_t rated, configured; /* million transfers per second; 0: not said */
} nbi_dimm;

typedef struct nbi_memory_facts {
    int64_t total_kb, available_kb, swap_total_kb, swap_free_kb;
    int64_t huge_total, huge_free, huge_kb; /* pages, pages, size of one */
    const char *thp;                        /* chosen word of transparent_hugepage/enabled */
    int64_t numa_balancing, zone_reclaim, swappiness, ksm;
    nbi_numa_node *nodes;
    uint32_t n_nodes;
    int64_t corrected, uncorrected; /* EDAC, all controllers */
    nbi_dimm *dimms;
    uint32_t n_dimms;
    uint64_t group_bytes; /* what machine and cgroups leave; 0: not known */
} nbi_memory_facts;

typedef struct nbi_kernel_facts {
    const char *release, *version, *cmdline; /* osrelease, /proc/version, /proc/cmdline */
    uint32_t upstream[3];                    /* 6.1.64 of Debian's 6.1.0-15; zeros: not known */
    const char *clocksource, *clocksources;
    int64_t open_files, open_files_hard; /* limits; INT64_MAX: unlimited */
    int64_t address_space;               /* bytes */
} nbi_kernel_facts;

typedef struct nbi_place_facts {
    const char *vendor, *product, *bios; /* DMI */
    const char *hypervisor;              /* "KVM", ...; NULL on bare metal */
    const char *container;               /* "docker", ...; NULL outside */
} nbi_place_facts;

/* What hwloc makes of the machine; zeros without it. */
typedef struct nbi_topology_facts {
    uint32_t packages, cores, kinds; /* kinds: of cores, by speed */
    const char *slow_cpus;           /* CPUs of the slowest kind; NULL */
} nbi_topology_facts;

typedef enum nbi_pci_kind { NBI_PCI_OTHER, NBI_PCI_GPU, NBI_PCI_NVME } nbi_pci_kind;

/* A function of /sys/bus/pci/devices. Capabilities are read through libpci from its configuration
 * space, of which the kernel gives 64 bytes to those who are not root: then the link is what sysfs
 * says, and the rest is unknown. */
typedef struct nbi_pci_device {
    const char *address;                     /* "0000:17:00.0" */
    uint32_t parent;                         /* index of the bridge above it; UINT32_MAX: none */
    nbi_pci_kind kind;                       /* GPU: of NVIDIA */
    int64_t vendor, device, class_code;      /* class_code: 24 bits */
    const char *driver, *group, *group_type; /* driver; IOMMU group and its type */
    const char *control;                     /* power/control: "auto", "on" */
    int64_t node;
    const char *local_cpus;                     /* by hwloc, else local_cpulist */
    int64_t speed, width, max_speed, max_width; /* tenths of GT/s; lanes */
    int64_t payload, payload_max, read_request; /* bytes */
    int64_t aspm;                               /* bit 0: L0s, bit 1: L1 */
    int64_t acs;                                /* its control register */
    int64_t corrected, nonfatal, fatal;         /* AER, since the start */
    int64_t bar, bar_max; /* bytes of the largest region; and what it could be */
    bool bar_unplaced;    /* a region without an address */
} nbi_pci_device;

/* A node of /dev. In a recorded tree it is a file "c MAJOR:MINOR MODE [ERROR]", ERROR being the
 * name of what open() says. */
typedef struct nbi_node {
    const char *name;
    bool there;
    int64_t major, minor;
    int64_t expected;    /* major of /proc/devices; NBI_UNKNOWN */
    const char *refused; /* "EPERM", ...; NULL: it opens */
} nbi_node;

typedef struct nbi_pci_facts {
    nbi_pci_device *devices;
    uint32_t n_devices, n_gpus, n_nvmes;
    bool iommu;            /* /sys/class/iommu has one */
    const char *no_libpci; /* why libpci was not used; NULL */
    nbi_node *nodes;       /* NVIDIA's, those that are wanted */
    uint32_t n_nodes;
    const char *driver_version; /* /proc/driver/nvidia/version; NULL: no module */
} nbi_pci_facts;

/* Numbers of a GPU, by NVML: field, and its name in a recorded nvml.json. Units in the names; enums
 * and bit masks as NVML has them. */
/* clang-format off */
#define NBI_GPU_NUMBERS(X)                                                       \
    X(capability_major) X(capability_minor) X(memory_bytes) X(bar1_bytes)        \
    X(persistence) X(power_limit_mw) X(power_default_mw) X(temperature_c)        \
    X(temperature_slowdown_c) X(sm_mhz) X(sm_max_mhz) X(memory_mhz)              \
    X(memory_max_mhz) X(clock_reasons) X(performance_state) X(utilization)       \
    X(ecc) X(ecc_pending) X(ecc_corrected) X(ecc_uncorrected) X(remapped)        \
    X(remap_pending) X(remap_failed) X(retired_pending) X(mig) X(compute_mode)   \
    X(processes)
/* clang-format on */

#define NBI_GPUS_MAX  64u
#define NBI_LINKS_MAX 36u /* NVML_NVLINK_MAX_LINKS */

typedef struct nbi_gpu {
    const char *name, *address; /* address as in sysfs */
    int64_t lost;               /* what NVML said instead of a handle; 0: nothing */
#define X(field) int64_t field;
    NBI_GPU_NUMBERS(X)
#undef X
    int64_t links[NBI_LINKS_MAX];                              /* NVLink: 1 active, 0 not */
    uint32_t n_links;                                          /* that this GPU has */
    int64_t peer_read[NBI_GPUS_MAX], peer_write[NBI_GPUS_MAX]; /* nvmlGpuP2PStatus; 0 is well */
    int64_t ancestor[NBI_GPUS_MAX];                            /* nvmlGpuTopologyLevel */
} nbi_gpu;

typedef struct nbi_nvml_facts {
    bool asked;          /* there is a driver that it could speak to, or a record */
    const char *missing; /* why the library could not be loaded; NULL */
    int64_t init;        /* what nvmlInit_v2() returned */
    const char *driver;
    int64_t cuda; /* 13000 for CUDA 13.0 */
    nbi_gpu *gpus;
    uint32_t n_gpus;
} nbi_nvml_facts;

/* Where the model lies; all unknown without a path. */
typedef struct nbi_storage_facts {
    const char *path, *mount, *type, *source, *options;
    const char *disk; /* "nvme0n1"; NULL: no block device */
    const char *pci;  /* its PCI address; NULL */
    int64_t rotational, read_ahead_kb;
    int64_t model_bytes; /* sum of *.safetensors */
    const char *largest; /* name of the largest of them */
} nbi_storage_facts;

/* Taken on the machine itself; 0: not measured, and then why. */
typedef struct nbi_measured_facts {
    double memory_rate, file_rate; /* bytes per second */
    uint32_t threads;
    uint64_t file_bytes;
    nbi_transfers transfers; /* of GPUs; a recorded machine has them in transfers.json */
    const char *memory_why, *file_why, *gpu_why;
} nbi_measured_facts;

typedef struct nbi_facts {
    nbi_reader reader;
    bool live, superuser;
    nbi_cpu_facts cpu;
    nbi_memory_facts memory;
    nbi_kernel_facts kernel;
    nbi_place_facts place;
    nbi_storage_facts storage;
    nbi_topology_facts topology;
    nbi_pci_facts pci;
    nbi_nvml_facts nvml;
    nbi_measured_facts measured;
} nbi_facts;

/* The GPU of a PCI address by NVML; NULL. */
const nbi_gpu *nbi_facts_gpu_at(const nbi_facts *f, const char *address);

/* Row of a PCI address; NULL. */
const nbi_pci_device *nbi_facts_pci_at(const nbi_facts *f, const char *address);

/* Each fills its part of the facts; none fails. */
void nbi_facts_cpu(nbi_facts *f);
void nbi_facts_memory(nbi_facts *f);
void nbi_facts_kernel(nbi_facts *f);
void nbi_facts_place(nbi_facts *f);
void nbi_facts_pci(nbi_facts *f);
void nbi_facts_nodes(nbi_facts *f);     /* behind nbi_facts_pci() */
void nbi_facts_topology(nbi_facts *f);  /* behind nbi_facts_pci() */
void nbi_facts_nvml(nbi_facts *f);      /* behind nbi_facts_nodes() */
void nbi_facts_transfers(nbi_facts *f); /* those of a recorded machine */
void nbi_facts_storage(nbi_facts *f, const char *model);

#ifdef __cplusplus
}
#endif
