/* Facts of the place where the model lies, from /proc/self/mountinfo (proc(5)) and sysfs. */
#include <stdio.h>
#include <string.h>

#include "perf/doctor_facts.h"

/* Is `path` the mount point or below it? */
static bool below(const char *path, const char *mount)
{
    const size_t n = strlen(mount);
    if (n == 1) return path[0] == '/';
    return !strncmp(path, mount, n) && (path[n] == '/' || !path[n]);
}

/* "36 35 98:0 ROOT MOUNT options ... - TYPE source super": takes the line when its mount holds the
 * path and is no shorter than the one found so far. */
static void take_mount(nbi_facts *f, const char *line, char device[24])
{
    nbi_storage_facts *s = &f->storage;
    char number[24], mount[512], type[64], source[256], options[512];
    const char *dash = strstr(line, " - ");
    if (sscanf(line, "%*s %*s %23s %*s %511s", number, mount) != 2) return;
    if (!dash || sscanf(dash, " - %63s %255s %511s", type, source, options) != 3) return;
    if (!below(s->path, mount) || (s->mount && strlen(mount) < strlen(s->mount))) return;
    memcpy(device, number, sizeof number);
    s->mount = nbi_reader_text(&f->reader, "%s", mount);
    s->type = nbi_reader_text(&f->reader, "%s", type);
    s->source = nbi_reader_text(&f->reader, "%s", source);
    s->options = nbi_reader_text(&f->reader, "%s", options);
}

/* The last PCI address of a path below /sys/devices; NULL. */
static const char *last_pci(nbi_reader *r, const char *path)
{
    const char *found = NULL;
    for (const char *at = path; at && (at = strchr(at, '/')); at++) {
        unsigned domain, bus, dev, fn;
        if (sscanf(at, "/%8x:%2x:%2x.%1x", &domain, &bus, &dev, &fn) == 4) found = at + 1;
    }
    return found ? nbi_reader_text(r, "%.*s", (int)strcspn(found, "/"), found) : NULL;
}

/* `at`: a folder of sysfs that stands for the disk or a partition of it. */
static void read_disk(nbi_facts *f, const char *at)
{
    nbi_storage_facts *s = &f->storage;
    nbi_reader *r = &f->reader;
    const char *target = nbi_read_link(r, "%s", at);
    if (!target) return;
    const bool part = nbi_read_exists(r, "%s/partition", at);
    const char *up = part ? "/.." : "";
    if (part) {
        const char *name = nbi_last_part(target);
        target = nbi_reader_text(r, "%.*s", (int)(name - target) - (name > target), target);
    }
    s->disk = nbi_last_part(target);
    s->pci = last_pci(r, target);
    s->rotational = nbi_read_number(r, "%s%s/queue/rotational", at, up);
    s->read_ahead_kb = nbi_read_number(r, "%s%s/queue/read_ahead_kb", at, up);
}

static void read_model(nbi_facts *f)
{
    static const char ending[] = ".safetensors";
    nbi_storage_facts *s = &f->storage;
    const nbi_names names = nbi_read_names(&f->reader, "%s", s->path);
    int64_t most = 0;
    for (uint32_t i = 0; i < names.n; i++) {
        const size_t n = strlen(names.items[i]), m = sizeof ending - 1;
        if (n <= m || strcmp(names.items[i] + n - m, ending) != 0) continue;
        const int64_t bytes = nbi_read_size(&f->reader, "%s/%s", s->path, names.items[i]);
        if (bytes <= 0 || bytes >= INT64_MAX / 8192) continue;
        s->model_bytes = bytes + (s->model_bytes > 0 ? s->model_bytes : 0);
        if (bytes > most) most = bytes, s->largest = names.items[i];
    }
}

void nbi_facts_storage(nbi_facts *f, const char *model)
{
    nbi_storage_facts *s = &f->storage;
    *s = (nbi_storage_facts){
        .rotational = NBI_UNKNOWN, .read_ahead_kb = NBI_UNKNOWN, .model_bytes = NBI_UNKNOWN};
    if (!model) return;
    s->path = model;
    char device[24] = "";
    const char *mounts = nbi_read_text(&f->reader, "/proc/self/mountinfo");
    for (const char *line = mounts; line && *line;) {
        const size_t n = strcspn(line, "\n");
        take_mount(f, nbi_reader_text(&f->reader, "%.*s", (int)n, line), device);
        line += n + (line[n] == '\n');
    }
    /* Btrfs, ZFS and overlays have numbers of no device. */
    if (s->mount && strncmp(device, "0:", 2) != 0)
        read_disk(f, nbi_reader_text(&f->reader, "/sys/dev/block/%s", device));
    else if (s->mount && !strncmp(s->source, "/dev/", 5))
        read_disk(f, nbi_reader_text(&f->reader, "/sys/class/block/%s", nbi_last_part(s->source)));
    read_model(f);
}
