/* Facts of PCI Express. Registers: PCI Express Base Specification, named as in pci_regs.h; sysfs:
 * the kernel's Documentation/ABI/testing/sysfs-bus-pci. */
#include <limits.h>
#include <pci/pci.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "perf/doctor_facts.h"
#include "perf/library.h"

#define DEVICES "/sys/bus/pci/devices"
#define NVIDIA  0x10de

/* ---------------------------------------------------------------- sysfs */

/* "32.0 GT/s PCIe" in tenths; NBI_UNKNOWN. */
static int64_t speed_of(const char *text)
{
    unsigned whole, tenth;
    return text && sscanf(text, "%4u.%1u GT/s", &whole, &tenth) == 2 ? (int64_t)whole * 10 + tenth
                                                                     : NBI_UNKNOWN;
}

/* Regions of the file `resource`: "first last flags" per line, in hexadecimal. */
static void read_regions(nbi_pci_device *d, const char *text)
{
    d->bar = NBI_UNKNOWN;
    for (int i = 0; i < 6 && text && *text; i++) {
        unsigned long long first, last, flags;
        if (sscanf(text, "%llx %llx %llx", &first, &last, &flags) == 3 && last > first &&
            flags & 0x200 /* memory */) {
            const unsigned long long size = last - first + 1;
            if (size <= INT64_MAX && (int64_t)size > d->bar) d->bar = (int64_t)size;
            if (!first) d->bar_unplaced = true;
        }
        text += strcspn(text, "\n");
        if (*text) text++;
    }
}

static void read_errors(nbi_reader *r, nbi_pci_device *d)
{
    const char *a = d->address;
    d->corrected =
        nbi_line_number(nbi_read_text(r, DEVICES "/%s/aer_dev_correctable", a), "TOTAL_ERR_COR");
    d->nonfatal =
        nbi_line_number(nbi_read_text(r, DEVICES "/%s/aer_dev_nonfatal", a), "TOTAL_ERR_NONFATAL");
    d->fatal = nbi_line_number(nbi_read_text(r, DEVICES "/%s/aer_dev_fatal", a), "TOTAL_ERR_FATAL");
}

static void read_sysfs(nbi_reader *r, nbi_pci_device *d)
{
    const char *a = d->address;
    d->vendor = nbi_read_number(r, DEVICES "/%s/vendor", a);
    d->device = nbi_read_number(r, DEVICES "/%s/device", a);
    d->class_code = nbi_read_number(r, DEVICES "/%s/class", a);
    const int64_t class = d->class_code < 0 ? 0 : d->class_code >> 8;
    if (d->vendor == NVIDIA && (class == 0x0300 || class == 0x0302)) d->kind = NBI_PCI_GPU;
    if (class == 0x0108) d->kind = NBI_PCI_NVME;
    d->driver = nbi_last_part(nbi_read_link(r, DEVICES "/%s/driver", a));
    d->group = nbi_last_part(nbi_read_link(r, DEVICES "/%s/iommu_group", a));
    if (d->group) d->group_type = nbi_read_text(r, "/sys/kernel/iommu_groups/%s/type", d->group);
    d->control = nbi_read_text(r, DEVICES "/%s/power/control", a);
    d->node = nbi_read_number(r, DEVICES "/%s/numa_node", a);
    d->local_cpus = nbi_read_text(r, DEVICES "/%s/local_cpulist", a);
    d->speed = speed_of(nbi_read_text(r, DEVICES "/%s/current_link_speed", a));
    d->max_speed = speed_of(nbi_read_text(r, DEVICES "/%s/max_link_speed", a));
    d->width = nbi_read_number(r, DEVICES "/%s/current_link_width", a);
    d->max_width = nbi_read_number(r, DEVICES "/%s/max_link_width", a);
    read_regions(d, nbi_read_text(r, DEVICES "/%s/resource", a));
    read_errors(r, d);
    d->payload = d->payload_max = d->read_request = d->aspm = d->acs = d->bar_max = NBI_UNKNOWN;
}

/* ---------------------------------------------------------------- configuration space */

typedef struct pci_api {
    struct pci_access *(*alloc)(void);
    void (*init)(struct pci_access *a);
    void (*cleanup)(struct pci_access *a);
    int (*set_param)(struct pci_access *a, char *name, char *value);
    struct pci_dev *(*get_dev)(struct pci_access *a, int domain, int bus, int dev, int function);
    void (*free_dev)(struct pci_dev *d);
    int (*fill_info)(struct pci_dev *d, int flags);
    struct pci_cap *(*find_cap)(struct pci_dev *d, unsigned id, unsigned type);
    u16 (*read_word)(struct pci_dev *d, int at);
    u32 (*read_long)(struct pci_dev *d, int at);
} pci_api;

static const nbi_symbol symbols[] = {
#define SYMBOL(name)                             \
    {                                            \
        "pci_" #name, offsetof(pci_api, name), 0 \
    }
    SYMBOL(alloc),
    SYMBOL(init),
    SYMBOL(cleanup),
    SYMBOL(set_param),
    SYMBOL(get_dev),
    SYMBOL(free_dev),
    SYMBOL(fill_info),
    SYMBOL(find_cap),
    SYMBOL(read_word),
    SYMBOL(read_long),
    {0},
#undef SYMBOL
};

/* libpci ends the program on an error unless its handler does not return. */
static jmp_buf on_error;
static char error_text[160];

static void raise_error(char *fmt, ...) __attribute__((noreturn));

static void raise_error(char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(error_text, sizeof error_text, fmt, args);
    va_end(args);
    longjmp(on_error, 1);
}

static void ignore(char *fmt, ...)
{
    (void)fmt;
}

/* The code of a speed in link registers, in tenths of GT/s. */
static int64_t coded_speed(uint32_t code)
{
    static const int64_t speeds[] = {NBI_UNKNOWN, 25, 50, 80, 160, 320, 640};
    return code < sizeof speeds / sizeof *speeds ? speeds[code] : NBI_UNKNOWN;
}

static void read_express(const pci_api *api, struct pci_dev *p, int at, nbi_pci_device *d)
{
    const uint32_t device = api->read_long(p, at + PCI_EXP_DEVCAP),
                   link = api->read_long(p, at + PCI_EXP_LNKCAP);
    const uint16_t type = (api->read_word(p, at + PCI_EXP_FLAGS) & PCI_EXP_FLAGS_TYPE) >> 4,
                   control = api->read_word(p, at + PCI_EXP_DEVCTL),
                   link_control = api->read_word(p, at + PCI_EXP_LNKCTL),
                   state = api->read_word(p, at + PCI_EXP_LNKSTA);
    if (device == UINT32_MAX || link == UINT32_MAX || control == UINT16_MAX) return; /* not there */
    d->payload_max = 128ll << (device & PCI_EXP_DEVCAP_PAYLOAD);
    d->payload = 128ll << ((control & PCI_EXP_DEVCTL_PAYLOAD) >> 5);
    d->read_request = 128ll << ((control & PCI_EXP_DEVCTL_READRQ) >> 12);
    if (type == PCI_EXP_TYPE_ROOT_INT_EP || type == PCI_EXP_TYPE_ROOT_EC) return; /* no link */
    d->aspm = link_control & PCI_EXP_LNKCTL_ASPM;
    d->max_speed = coded_speed(link & PCI_EXP_LNKCAP_SPEED);
    d->max_width = (link & PCI_EXP_LNKCAP_WIDTH) >> 4;
    d->speed = coded_speed(state & PCI_EXP_LNKSTA_SPEED);
    d->width = (state & PCI_EXP_LNKSTA_WIDTH) >> 4;
}

/* Resizable BAR: bit 4 + n of the capability says that 2^n MiB are possible. */
static void read_resizable(const pci_api *api, struct pci_dev *p, int at, nbi_pci_device *d)
{
    const uint32_t n = api->read_long(p, at + 8) >> 5 & 7;
    for (uint32_t i = 0; i < n && i < 6; i++) {
        const uint32_t sizes = api->read_long(p, at + 4 + (int)i * 8) >> 4;
        if (!sizes || sizes == UINT32_MAX >> 4) continue;
        const int64_t most = (1ll << 20) << (31 - __builtin_clz(sizes));
        if (most > d->bar_max) d->bar_max = most;
    }
}

static void read_capabilities(const pci_api *api, struct pci_access *access, nbi_pci_device *d)
{
    unsigned domain, bus, dev, function;
    if (sscanf(d->address, "%8x:%2x:%2x.%1x", &domain, &bus, &dev, &function) != 4) return;
    if (domain > INT_MAX) return;
    struct pci_dev *p = api->get_dev(access, (int)domain, (int)bus, (int)dev, (int)function);
    api->fill_info(p, PCI_FILL_CAPS | PCI_FILL_EXT_CAPS);
    const struct pci_cap *express = api->find_cap(p, PCI_CAP_ID_EXP, PCI_CAP_NORMAL),
                         *acs = api->find_cap(p, PCI_EXT_CAP_ID_ACS, PCI_CAP_EXTENDED),
                         *bars = api->find_cap(p, PCI_EXT_CAP_ID_REBAR, PCI_CAP_EXTENDED);
    if (express) read_express(api, p, (int)express->addr, d);
    if (acs) {
        const uint16_t control = api->read_word(p, (int)acs->addr + 6);
        if (control != UINT16_MAX) d->acs = control;
    }
    if (bars) read_resizable(api, p, (int)bars->addr, d);
    api->free_dev(p);
}

static void read_config(nbi_facts *f)
{
    static pci_api api; /* not on the stack: longjmp() comes by */
    static struct pci_access *access;
    nbi_pci_facts *pci = &f->pci;
    nb_error err;
    char path[PATH_MAX + 16], name[] = "sysfs.path";
    if (nbi_library_load(&api, symbols, "libpci.so.3", &err) != NB_OK) {
        pci->no_libpci = nbi_reader_text(&f->reader, "%s", err.text);
        return;
    }
    snprintf(path, sizeof path, "%s/sys/bus/pci", f->reader.root);
    access = api.alloc();
    access->method = PCI_ACCESS_SYS_BUS_PCI;
    access->error = raise_error;
    access->warning = access->debug = ignore;
    if (setjmp(on_error) == 0) {
        api.set_param(access, name, path);
        api.init(access);
        for (uint32_t i = 0; i < pci->n_devices; i++)
            read_capabilities(&api, access, &pci->devices[i]);
    } else {
        pci->no_libpci = nbi_reader_text(&f->reader, "libpci: %s", error_text);
    }
    api.cleanup(access);
}

/* ---------------------------------------------------------------- all devices */

static uint32_t row_of(const nbi_pci_facts *pci, const char *address, size_t n)
{
    for (uint32_t i = 0; i < pci->n_devices; i++)
        if (strlen(pci->devices[i].address) == n && !strncmp(pci->devices[i].address, address, n))
            return i;
    return UINT32_MAX;
}

const nbi_pci_device *nbi_facts_pci_at(const nbi_facts *f, const char *address)
{
    const uint32_t i = address ? row_of(&f->pci, address, strlen(address)) : UINT32_MAX;
    return i == UINT32_MAX ? NULL : &f->pci.devices[i];
}

/* The folder above a device in "../../../devices/pci0000:00/0000:00:01.1/0000:01:00.0". */
static uint32_t parent_of(nbi_facts *f, const nbi_pci_device *d)
{
    const char *target = nbi_read_link(&f->reader, DEVICES "/%s", d->address);
    const char *end = target ? strrchr(target, '/') : NULL;
    if (!end || end == target) return UINT32_MAX;
    const char *begin = end - 1;
    while (begin > target && begin[-1] != '/') begin--;
    const uint32_t i = row_of(&f->pci, begin, (size_t)(end - begin));
    return i < f->pci.n_devices && &f->pci.devices[i] != d ? i : UINT32_MAX;
}

void nbi_facts_pci(nbi_facts *f)
{
    nbi_pci_facts *pci = &f->pci;
    nbi_reader *r = &f->reader;
    const nbi_names names = nbi_read_names(r, DEVICES);
    pci->iommu = nbi_read_names(r, "/sys/class/iommu").n > 0;
    if (!names.n) return;
    pci->devices = nbi_arena_alloc(&r->arena, names.n * sizeof *pci->devices);
    if (!pci->devices) {
        r->no_memory = true;
        return;
    }
    for (uint32_t i = 0; i < names.n; i++) {
        nbi_pci_device *d = &pci->devices[pci->n_devices++];
        *d = (nbi_pci_device){.address = names.items[i], .parent = UINT32_MAX};
        read_sysfs(r, d);
        pci->n_gpus += d->kind == NBI_PCI_GPU;
        pci->n_nvmes += d->kind == NBI_PCI_NVME;
    }
    for (uint32_t i = 0; i < pci->n_devices; i++)
        pci->devices[i].parent = parent_of(f, &pci->devices[i]);
    read_config(f);
    if (pci->no_libpci) nbi_reader_unseen(r, "PCI capabilities", pci->no_libpci);
    for (uint32_t i = 0; i < pci->n_devices; i++)
        if (pci->devices[i].kind != NBI_PCI_OTHER && pci->devices[i].payload < 0 &&
            pci->devices[i].max_width > 0 && !pci->no_libpci)
            nbi_reader_unseen(r, nbi_reader_text(r, DEVICES "/%s/config", pci->devices[i].address),
                              "64 bytes only: capabilities are for root");
}
