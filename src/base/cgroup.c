/* Control-group limits, read as the kernel documents them (Documentation/admin-guide/cgroup-v2.rst,
 * cgroup-v1/memory.rst, scheduler/sched-bwc.rst). Called once at start by memory and thread
 * planning.
 *
 * A process's group is named in /proc/self/cgroup; where the hierarchy is mounted and which part of
 * it one sees stands in /proc/self/mountinfo (a container may see only its own subtree: then the
 * mount's root is a prefix of the group's path). */
#include "base/cgroup.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#define FILE_BYTES 65536u
#define UNLIMITED  UINT64_MAX

/* One hierarchy as this process sees it. */
typedef struct group {
    bool found, v2;
    char mount[PATH_MAX]; /* folder of the mount, with root in front */
    char path[PATH_MAX];  /* group below it: "" or "/a/b" */
} group;

/* A short file into text[FILE_BYTES]; false when it cannot be read. Not nbi_file_read(): absence is
 * normal here. */
static bool slurp(const char *path, char *text)
{
    FILE *f = fopen(path, "re");
    if (!f) return false;
    size_t n = fread(text, 1, FILE_BYTES - 1, f);
    fclose(f);
    text[n] = '\0';
    return n > 0;
}

/* Is `word` one of the comma-separated words of list[n]? */
static bool has_word(const char *list, size_t n, const char *word)
{
    size_t n_word = strlen(word);
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && list[end] != ',') end++;
        if (end - i == n_word && memcmp(list + i, word, n_word) == 0) return true;
        i = end + 1;
    }
    return false;
}

/* The path of this process's group for a v1 controller, or for v2 (controller NULL), from the text
 * of /proc/self/cgroup: lines "id:controllers:path", with id 0 and no controllers for v2. */
static bool own_path(const char *text, const char *controller, char *path, size_t bytes)
{
    for (const char *line = text; *line;) {
        size_t n = strcspn(line, "\n");
        const char *colon = memchr(line, ':', n);
        const char *second = colon ? memchr(colon + 1, ':', n - (size_t)(colon + 1 - line)) : NULL;
        if (second) {
            size_t n_list = (size_t)(second - colon - 1);
            bool match = controller ? has_word(colon + 1, n_list, controller)
                                    : n_list == 0 && colon - line == 1 && line[0] == '0';
            if (match) {
                int n_path = (int)(line + n - second - 1);
                return snprintf(path, bytes, "%.*s", n_path, second + 1) < (int)bytes;
            }
        }
        line += n + (line[n] == '\n');
    }
    return false;
}

/* Fields of a mountinfo line that matter: "36 35 98:0 ROOT MOUNT opts ... - TYPE source SUPER". */
typedef struct mount_line {
    const char *root, *mount, *type, *super;
    int n_root, n_mount, n_type, n_super;
} mount_line;

static bool parse_mount(mount_line *out, const char *line, size_t n)
{
    memset(out, 0, sizeof *out);
    bool behind_dash = false;
    int field = 0;
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && line[end] != ' ') end++;
        const char *word = line + i;
        int length = (int)(end - i);
        if (!behind_dash && field >= 6 && length == 1 && word[0] == '-') {
            behind_dash = true;
            field = 0;
        } else if (!behind_dash) {
            if (field == 3) out->root = word, out->n_root = length;
            if (field == 4) out->mount = word, out->n_mount = length;
            field++;
        } else {
            if (field == 0) out->type = word, out->n_type = length;
            if (field == 2) out->super = word, out->n_super = length;
            field++;
        }
        i = end + 1;
    }
    return out->root && out->mount && out->type && out->super;
}

/* Does the line mount the wanted hierarchy? */
static bool mounts(const mount_line *m, const char *controller)
{
    if (!controller) return m->n_type == 7 && memcmp(m->type, "cgroup2", 7) == 0;
    return m->n_type == 6 && memcmp(m->type, "cgroup", 6) == 0 &&
           has_word(m->super, (size_t)m->n_super, controller);
}

/* Finds the hierarchy of a v1 controller, or the v2 one (controller NULL). text is scratch. */
static void find_group(group *out, const char *root, const char *controller, char *text)
{
    char name[PATH_MAX], path[PATH_MAX];
    out->found = false;
    out->v2 = controller == NULL;
    snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
    if (!slurp(name, text) || !own_path(text, controller, path, sizeof path)) return;
    snprintf(name, sizeof name, "%s/proc/self/mountinfo", root);
    if (!slurp(name, text)) return;
    for (const char *line = text; *line;) {
        size_t n = strcspn(line, "\n");
        mount_line m;
        if (parse_mount(&m, line, n) && mounts(&m, controller)) {
            const char *below = path;
            if (m.n_root > 1 && strncmp(path, m.root, (size_t)m.n_root) == 0) below += m.n_root;
            if (strcmp(below, "/") == 0 || strstr(below, "/..")) below = "";
            int wrote = snprintf(out->mount, sizeof out->mount, "%s%.*s", root, m.n_mount, m.mount);
            out->found = wrote < (int)sizeof out->mount &&
                         snprintf(out->path, sizeof out->path, "%s", below) < (int)sizeof out->path;
            return;
        }
        line += n + (line[n] == '\n');
    }
}

/* Text of a file of the group; false when the group or the file is not there. */
static bool group_file(const group *g, const char *file, char *text)
{
    char name[PATH_MAX * 2 + 64];
    snprintf(name, sizeof name, "%s%s/%s", g->mount, g->path, file);
    return slurp(name, text);
}

/* Steps to the group above; false at the mounted one. */
static bool group_up(group *g)
{
    char *slash = strrchr(g->path, '/');
    if (!slash) return false;
    *slash = '\0';
    return true;
}

/* A number at the start of a file; "max" is UNLIMITED. */
static bool group_number(const group *g, const char *file, char *text, uint64_t *value)
{
    if (!group_file(g, file, text)) return false;
    char *end;
    if (strncmp(text, "max", 3) == 0) {
        *value = UNLIMITED;
        return true;
    }
    *value = strtoull(text, &end, 10);
    return end != text;
}

/* The value behind `key` at the start of a line of memory.stat; 0 without one. */
static uint64_t stat_value(const char *text, const char *key)
{
    size_t n_key = strlen(key);
    for (const char *line = text; *line;) {
        if (strncmp(line, key, n_key) == 0 && line[n_key] == ' ') {
            return strtoull(line + n_key, NULL, 10);
        }
        line += strcspn(line, "\n");
        if (*line) line++;
    }
    return 0;
}

/* Bytes that one group leaves; UNLIMITED without a limit. */
static uint64_t group_memory_left(const group *g, char *text)
{
    uint64_t limit, used;
    const char *limit_file = g->v2 ? "memory.max" : "memory.limit_in_bytes";
    const char *used_file = g->v2 ? "memory.current" : "memory.usage_in_bytes";
    if (!group_number(g, limit_file, text, &limit) || limit == UNLIMITED) return UNLIMITED;
    if (!group_number(g, used_file, text, &used)) used = 0;
    uint64_t cache = 0;
    if (group_file(g, "memory.stat", text)) {
        cache = stat_value(text, g->v2 ? "inactive_file" : "total_inactive_file") +
                stat_value(text, g->v2 ? "active_file" : "total_active_file");
    }
    used = used > cache ? used - cache : 0;
    return limit > used ? limit - used : 0;
}

/* Thousandths of a CPU that one group grants; UNLIMITED without a quota. */
static uint64_t group_quota_milli(const group *g, char *text)
{
    uint64_t quota, period = 0;
    if (g->v2) {
        if (!group_number(g, "cpu.max", text, &quota) || quota == UNLIMITED) return UNLIMITED;
        const char *space = strchr(text, ' ');
        if (space) period = strtoull(space + 1, NULL, 10);
    } else {
        /* -1 is "no quota". */
        if (!group_file(g, "cpu.cfs_quota_us", text) || text[0] == '-') return UNLIMITED;
        quota = strtoull(text, NULL, 10);
        if (!group_number(g, "cpu.cfs_period_us", text, &period)) return UNLIMITED;
    }
    if (period == 0 || quota == 0 || quota > UINT64_MAX / 1000) return UNLIMITED;
    return quota * 1000 / period;
}

/* The tightest answer of `ask` over both hierarchies and all groups upwards. */
static uint64_t tightest(const char *root, const char *controller,
                         uint64_t (*ask)(const group *g, char *text))
{
    uint64_t least = UNLIMITED;
    char *text = nbi_malloc(FILE_BYTES);
    group *g = nbi_malloc(sizeof *g);
    const char *hierarchies[] = {NULL, controller};
    for (int i = 0; text && g && i < 2; i++) {
        find_group(g, root, hierarchies[i], text);
        if (!g->found) continue;
        do {
            uint64_t value = ask(g, text);
            if (value < least) least = value;
        } while (group_up(g));
    }
    nbi_free(text);
    nbi_free(g);
    return least;
}

/* MemAvailable of /proc/meminfo in bytes; UNLIMITED when it is not there. */
static uint64_t machine_memory(const char *root)
{
    char name[PATH_MAX];
    uint64_t bytes = UNLIMITED;
    char *text = nbi_malloc(FILE_BYTES);
    snprintf(name, sizeof name, "%s/proc/meminfo", root);
    if (text && slurp(name, text)) {
        const char *line = strstr(text, "MemAvailable:");
        if (line) bytes = strtoull(line + strlen("MemAvailable:"), NULL, 10) * 1024;
    }
    nbi_free(text);
    return bytes;
}

uint64_t nbi_memory_available_under(const char *root)
{
    uint64_t bytes = machine_memory(root);
    uint64_t group_bytes = tightest(root, "memory", group_memory_left);
    if (group_bytes < bytes) bytes = group_bytes;
    return bytes == UNLIMITED ? 0 : bytes;
}

uint64_t nbi_cpu_quota_milli_under(const char *root)
{
    uint64_t milli = tightest(root, "cpu", group_quota_milli);
    if (milli == UNLIMITED) return 0;
    return milli ? milli : 1; /* a quota below a thousandth is still a quota */
}
