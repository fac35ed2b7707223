/* The process itself, under the names of Prometheus' client libraries. Called by metrics.c. */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "server/process_metrics.h"

/* Field 3 onwards of /proc/self/stat, behind the name in parentheses. */
static bool read_stat(unsigned long long out[50])
{
    char text[1024];
    FILE *f = fopen("/proc/self/stat", "re");
    if (!f) return false;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    const char *at = strrchr(text, ')');
    if (!at || strlen(at) < 4) return false;
    at += 4; /* ") S" */
    for (int i = 4, used = 0; i < 50; i++, at += used) {
        long long value;
        used = 0;
        if (sscanf(at, " %lld%n", &value, &used) != 1) return i > 24;
        out[i] = (unsigned long long)value;
    }
    return true;
}

/* Seconds since 1970 when the machine started; 0 when unknown. */
static unsigned long long boot_seconds(void)
{
    char line[256];
    unsigned long long seconds = 0;
    FILE *f = fopen("/proc/stat", "re");
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "btime %llu", &seconds) == 1) break;
    }
    fclose(f);
    return seconds;
}

static unsigned count_fds(void)
{
    unsigned n = 0;
    DIR *dir = opendir("/proc/self/fd");
    if (!dir) return 0;
    while (readdir(dir)) n++;
    closedir(dir);
    return n > 3 ? n - 3 : 0; /* ".", "..", and the folder itself */
}

static nb_status put(nbi_buf *out, const char *name, const char *type, const char *help,
                     double value)
{
    return nbi_buf_addf(out, "# HELP %s %s\n# TYPE %s %s\n%s %.17g\n", name, help, name, type, name,
                        value);
}

nb_status nbi_process_metrics_write(nbi_buf *out)
{
    unsigned long long stat[50] = {0};
    struct rlimit files;
    double ticks = (double)sysconf(_SC_CLK_TCK), page = (double)sysconf(_SC_PAGESIZE);
    if (read_stat(stat)) {
        NB_TRY(put(out, "process_cpu_seconds_total", "counter", "CPU time, user and system.",
                   (double)(stat[14] + stat[15]) / ticks));
        NB_TRY(put(out, "process_threads", "gauge", "Threads.", (double)stat[20]));
        NB_TRY(put(out, "process_start_time_seconds", "gauge", "Start, seconds since 1970.",
                   (double)boot_seconds() + (double)stat[22] / ticks));
        NB_TRY(
            put(out, "process_virtual_memory_bytes", "gauge", "Virtual memory.", (double)stat[23]));
        NB_TRY(put(out, "process_resident_memory_bytes", "gauge", "Resident memory.",
                   (double)stat[24] * page));
    }
    NB_TRY(put(out, "process_open_fds", "gauge", "Open file descriptors.", count_fds()));
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return NB_OK;
    return put(out, "process_max_fds", "gauge", "Most file descriptors.", (double)files.rlim_cur);
}
