/* Facts of the topology through hwloc, which reads the same tree (HWLOC_FSROOT). */
#include <errno.h>
#include <fcntl.h>
#include <hwloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "perf/doctor_facts.h"
#include "perf/library.h"

typedef struct hwloc_api {
    int (*topology_init)(hwloc_topology_t *t);
    int (*topology_load)(hwloc_topology_t t);
    void (*topology_destroy)(hwloc_topology_t t);
    int (*topology_set_io_types_filter)(hwloc_topology_t t, enum hwloc_type_filter_e filter);
    int (*get_type_depth)(hwloc_topology_t t, hwloc_obj_type_t type);
    unsigned (*get_nbobjs_by_depth)(hwloc_topology_t t, int depth);
    hwloc_obj_t (*get_obj_by_depth)(hwloc_topology_t t, int depth, unsigned i);
    int (*cpukinds_get_nr)(hwloc_topology_t t, unsigned long flags);
    int (*cpukinds_get_info)(hwloc_topology_t t, unsigned kind, hwloc_bitmap_t cpus,
                             int *efficiency, unsigned *n, struct hwloc_info_s **infos,
                             unsigned long flags);
    hwloc_bitmap_t (*bitmap_alloc)(void);
    void (*bitmap_free)(hwloc_bitmap_t b);
    int (*bitmap_list_snprintf)(char *text, size_t n, hwloc_const_bitmap_t b);
} hwloc_api;

static const nbi_symbol symbols[] = {
#define SYMBOL(name)                                 \
    {                                                \
        "hwloc_" #name, offsetof(hwloc_api, name), 0 \
    }
    SYMBOL(topology_init),
    SYMBOL(topology_load),
    SYMBOL(topology_destroy),
    SYMBOL(topology_set_io_types_filter),
    SYMBOL(get_type_depth),
    SYMBOL(get_nbobjs_by_depth),
    SYMBOL(get_obj_by_depth),
    SYMBOL(cpukinds_get_nr),
    SYMBOL(cpukinds_get_info),
    SYMBOL(bitmap_alloc),
    SYMBOL(bitmap_free),
    SYMBOL(bitmap_list_snprintf),
    {0},
#undef SYMBOL
};

static uint32_t count(const hwloc_api *api, hwloc_topology_t t, hwloc_obj_type_t type)
{
    const int depth = api->get_type_depth(t, type);
    return depth == HWLOC_TYPE_DEPTH_UNKNOWN ? 0 : api->get_nbobjs_by_depth(t, depth);
}

static void print_set(const hwloc_api *api, FILE *to, const char *key, hwloc_const_bitmap_t set)
{
    char text[4096];
    api->bitmap_list_snprintf(text, sizeof text, set);
    fprintf(to, "%s %s\n", key, text);
}

/* "near ADDRESS CPUS": those of the object that a PCI device hangs below. */
static void print_near(const hwloc_api *api, hwloc_topology_t t, FILE *to)
{
    const int depth = api->get_type_depth(t, HWLOC_OBJ_PCI_DEVICE);
    if (depth == HWLOC_TYPE_DEPTH_UNKNOWN) return;
    const unsigned n = api->get_nbobjs_by_depth(t, depth);
    for (unsigned i = 0; i < n; i++) {
        hwloc_obj_t o = api->get_obj_by_depth(t, depth, i);
        char key[40];
        snprintf(key, sizeof key, "near-%04x:%02x:%02x.%01x", o->attr->pcidev.domain,
                 o->attr->pcidev.bus, o->attr->pcidev.dev, o->attr->pcidev.func);
        while (o && !o->cpuset) o = o->parent;
        if (o) print_set(api, to, key, o->cpuset);
    }
}

/* Kinds are ranked by efficiency from 0, the slowest. */
static void print_kinds(const hwloc_api *api, hwloc_topology_t t, FILE *to)
{
    const int n = api->cpukinds_get_nr(t, 0);
    hwloc_bitmap_t set = n > 1 ? api->bitmap_alloc() : NULL;
    int efficiency = -1;
    if (!set) return;
    fprintf(to, "kinds %d\n", n);
    if (api->cpukinds_get_info(t, 0, set, &efficiency, NULL, NULL, 0) == 0)
        print_set(api, to, "slow", set);
    api->bitmap_free(set);
}

/* hwloc asserts what it reads, and would take the audit with it: a child loads it and writes lines.
 */
static void ask_hwloc(const hwloc_api *api, const char *root, int out)
{
    const struct rlimit none = {0, 0};
    hwloc_topology_t t = NULL;
    FILE *to = fdopen(out, "w");
    if (!to) return;
    setrlimit(RLIMIT_CORE, &none);
    alarm(20);
    if (!freopen("/dev/null", "w", stderr)) return;
    /* The kernel's files alone: no plugins, which would start drivers of devices. */
    setenv("HWLOC_COMPONENTS", "linux,stop", 1);
    setenv("HWLOC_HIDE_ERRORS", "2", 1);
    if (*root) setenv("HWLOC_FSROOT", root, 1);
    if (api->topology_init(&t) != 0) return;
    api->topology_set_io_types_filter(t, HWLOC_TYPE_FILTER_KEEP_ALL);
    if (api->topology_load(t) != 0) return;
    fprintf(to, "packages %u\n", count(api, t, HWLOC_OBJ_PACKAGE));
    fprintf(to, "cores %u\n", count(api, t, HWLOC_OBJ_CORE));
    print_near(api, t, to);
    print_kinds(api, t, to);
    fprintf(to, "end 1\n");
    fflush(to);
}

/* Everything the child wrote; NULL when it could not start. */
static const char *listen(nbi_reader *r, const hwloc_api *api)
{
    nbi_buf text = {.max = 1u << 20};
    int ends[2];
    char piece[4096];
    ssize_t n;
    if (pipe2(ends, O_CLOEXEC) != 0) return NULL;
    const pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        ask_hwloc(api, r->root, ends[1]);
        _exit(0);
    }
    close(ends[1]);
    while (child > 0 && (n = read(ends[0], piece, sizeof piece)) > 0)
        if (nbi_buf_add(&text, piece, (size_t)n) != NB_OK) break;
    close(ends[0]);
    while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR) {}
    const char *kept = text.data ? nbi_reader_text(r, "%s", text.data) : NULL;
    nbi_buf_free(&text);
    return kept;
}

static uint32_t number(const char *text, const char *key)
{
    const int64_t n = nbi_line_number(text, key);
    return n > 0 && n < UINT32_MAX ? (uint32_t)n : 0;
}

void nbi_facts_topology(nbi_facts *f)
{
    hwloc_api api;
    nb_error err;
    nbi_reader *r = &f->reader;
    nbi_topology_facts *t = &f->topology;
    if (!f->cpu.online.n) return; /* hwloc wants processors */
    if (nbi_library_load(&api, symbols, "libhwloc.so.15", &err) != NB_OK) {
        nbi_reader_unseen(r, "topology by hwloc", err.text);
        return;
    }
    const char *text = listen(r, &api);
    if (number(text, "end") != 1) {
        nbi_reader_unseen(r, "topology by hwloc", "hwloc cannot read it");
        return;
    }
    t->packages = number(text, "packages");
    t->cores = number(text, "cores");
    t->kinds = number(text, "kinds");
    t->slow_cpus = nbi_line_text(r, text, "slow");
    for (uint32_t i = 0; i < f->pci.n_devices; i++) {
        nbi_pci_device *d = &f->pci.devices[i];
        const char *near = nbi_line_text(r, text, nbi_reader_text(r, "near-%s", d->address));
        if (near) d->local_cpus = near;
    }
}
