/* Facts of NVIDIA's device nodes: is each there, with the major number that the kernel has now, and
 * may this process open it. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "perf/doctor_facts.h"

#define NVIDIA_MAJOR 195 /* fixed in the kernel's list of devices; the others are given at load */

/* "195 nvidia" among the character devices of /proc/devices. */
static int64_t major_of(const char *devices, const char *name)
{
    if (!devices) return NBI_UNKNOWN;
    for (const char *line = devices; *line;) {
        char word[64];
        unsigned number;
        if (sscanf(line, "%8u %63s", &number, word) == 2 && !strcmp(word, name)) return number;
        line += strcspn(line, "\n");
        if (*line) line++;
        if (!strncmp(line, "Block", 5)) break;
    }
    return NBI_UNKNOWN;
}

/* "c 195:0 0666 EPERM" of a recorded tree. */
static void read_recorded(nbi_reader *r, nbi_node *n)
{
    const char *text = nbi_read_text(r, "/dev/%s", n->name);
    unsigned major, minor;
    char mode[16], refused[32] = "";
    if (!text || sscanf(text, "c %8u:%8u %15s %31s", &major, &minor, mode, refused) < 3) return;
    n->there = true;
    n->major = major;
    n->minor = minor;
    if (refused[0]) n->refused = nbi_reader_text(r, "%s", refused);
}

static void read_node(nbi_reader *r, nbi_node *n)
{
    char path[PATH_MAX];
    struct stat st;
    snprintf(path, sizeof path, "/dev/%s", n->name);
    if (stat(path, &st) != 0 || !S_ISCHR(st.st_mode)) return;
    n->there = true;
    n->major = major(st.st_rdev);
    n->minor = minor(st.st_rdev);
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) n->refused = nbi_reader_text(r, "%s", strerrorname_np(errno));
    if (fd >= 0) close(fd);
}

static void add(nbi_facts *f, const char *name, int64_t expected)
{
    nbi_node *n = &f->pci.nodes[f->pci.n_nodes++];
    *n = (nbi_node){.name = name, .major = NBI_UNKNOWN, .minor = NBI_UNKNOWN, .expected = expected};
    if (f->live)
        read_node(&f->reader, n);
    else
        read_recorded(&f->reader, n);
}

void nbi_facts_nodes(nbi_facts *f)
{
    nbi_reader *r = &f->reader;
    nbi_pci_facts *pci = &f->pci;
    const char *version = nbi_read_text(r, "/proc/driver/nvidia/version");
    pci->driver_version = nbi_line_text(r, version, "NVRM version");
    if (!version || !pci->n_gpus) return;
    pci->nodes = nbi_arena_alloc(&r->arena, (pci->n_gpus + 2) * sizeof *pci->nodes);
    if (!pci->nodes) {
        r->no_memory = true;
        return;
    }
    const char *devices = nbi_read_text(r, "/proc/devices");
    int64_t fixed = major_of(devices, "nvidia");
    if (fixed < 0) fixed = major_of(devices, "nvidia-frontend");
    if (fixed < 0) fixed = NVIDIA_MAJOR;
    add(f, "nvidiactl", fixed);
    add(f, "nvidia-uvm", major_of(devices, "nvidia-uvm"));
    for (uint32_t i = 0; i < pci->n_devices; i++) {
        const nbi_pci_device *d = &pci->devices[i];
        if (d->kind != NBI_PCI_GPU) continue;
        const int64_t number =
            nbi_line_number(nbi_read_text(r, "/proc/driver/nvidia/gpus/%s/information", d->address),
                            "Device Minor");
        if (number >= 0) add(f, nbi_reader_text(r, "nvidia%lld", (long long)number), fixed);
    }
}
