/* What ends mpiexec and its daemons when a host is lost.
 *
 * They would wait for one another until TCP gives up, which takes minutes: their keep-alives say
 * nothing while a message is on its way. So each leader has a process beside it, made before there
 * are threads and memory to copy, that sleeps until the leader has ended. Had the leader lost
 * another host before, it ends what has started the ranks of this one. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/mpi/hosts_parts.h"

#define LEADER_MS     1800 /* for a leader to end once it has lost a host */
#define NEIGHBOURS_MS 100  /* for the others here: a daemon without ranks has none to wait for */
#define TERM_MS       400  /* between signals */
#define ANCESTORS     4    /* there may be a shell between */

/* Name and parent of a process; false when it is gone. */
static bool look_at(pid_t pid, char name[32], pid_t *parent)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    const int f = open(path, O_RDONLY | O_CLOEXEC);
    if (f < 0) return false;
    const ssize_t n = read(f, text, sizeof text - 1);
    close(f);
    if (n <= 0) return false;
    text[n] = 0;
    const char *begin = strchr(text, '('), *end = strrchr(text, ')');
    if (!begin || !end || end[1] != ' ' || end[2] == 'Z') return false;
    const size_t length = (size_t)(end - begin - 1) < 31 ? (size_t)(end - begin - 1) : 31;
    memcpy(name, begin + 1, length);
    name[length] = 0;
    *parent = (pid_t)strtol(end + 4, NULL, 10);
    return true;
}

/* Slurm and Kubernetes end their own. */
static bool is_starter(const char *name)
{
    static const char *const names[] = {"orted",   "prted",   "mpiexec",        "mpirun",
                                        "orterun", "prterun", "mpiexec.openmp", "mpirun.openmpi"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i])) return true;
    return false;
}

/* 0: none. */
static pid_t find_starter(void)
{
    char name[32];
    pid_t pid = getppid(), parent = 0;
    for (int i = 0; i < ANCESTORS && pid > 1 && look_at(pid, name, &parent); i++) {
        if (is_starter(name)) return pid;
        pid = parent;
    }
    return 0;
}

static bool is_there(pid_t pid)
{
    char name[32];
    pid_t parent;
    return look_at(pid, name, &parent) && is_starter(name);
}

static bool is_gone_within(pid_t pid, int ms)
{
    for (int waited = 0; waited < ms && is_there(pid); waited += 10)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    return !is_there(pid);
}

/* What a daemon that was ended so leaves in /tmp; `folder`: "" or its own. */
static void sweep(const char *folder)
{
    static char script[] = "rm -rf -- \"$1\"; rmdir -- \"${1%/*}\" 2>/dev/null";
    if (*folder) execl("/bin/sh", "sh", "-c", script, "sh", folder, (char *)NULL);
}

/* The folder of the daemon that has started this rank; only of a name that is known. */
static void find_folder(char *out, size_t bytes)
{
    static const char *const names[] = {"/ompi.", "/prte."};
    const char *given = getenv("PMIX_SERVER_TMPDIR");
    *out = 0;
    if (!given || *given != '/' || strstr(given, "/..") || strlen(given) >= bytes) return;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *found = strstr(given, names[i]), *below = found ? strchr(found + 1, '/') : NULL;
        if (below && below[1]) snprintf(out, bytes, "%s", given);
    }
}

/* The first SIGTERM asks for an end in order, the second for one at once. */
static void end_starter(pid_t starter)
{
    static const int numbers[] = {SIGTERM, SIGTERM, SIGKILL};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers && is_there(starter); i++) {
        kill(starter, numbers[i]);
        if (is_gone_within(starter, TERM_MS)) return;
    }
}

/* Calls nothing that takes memory or locks. `words`: a byte when a host is lost, the end when the
 * leader has ended. */
__attribute__((noreturn)) static void wait_for_end(int words, pid_t starter, const char *folder)
{
    char word;
    sigset_t all;
    setsid(); /* mpiexec ends whole groups */
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    if (words != 0) dup2(words, 0);
    syscall(SYS_close_range, 1u, ~0u, 0u); /* somebody waits for the end of our output */
    prctl(PR_SET_NAME, "nibble-end");
    ssize_t n;
    while ((n = read(0, &word, 1)) < 0 && errno == EINTR) {}
    if (n <= 0) _exit(0);
    struct pollfd leader = {.fd = 0, .events = 0};
    (void)poll(&leader, 1, LEADER_MS);
    nanosleep(&(struct timespec){.tv_nsec = NEIGHBOURS_MS * 1000000}, NULL);
    end_starter(starter);
    if (!is_there(starter)) sweep(folder);
    _exit(0);
}

void nbi_hosts_end_prepare(nbi_hosts *h)
{
    int ends[2];
    char folder[512];
    const pid_t starter = find_starter();
    find_folder(folder, sizeof folder);
    h->end_word = -1;
    if (!starter || pipe2(ends, O_CLOEXEC)) return;
    const pid_t pid = fork();
    if (pid == 0) {
        close(ends[1]);
        wait_for_end(ends[0], starter, folder);
    }
    close(ends[0]);
    if (pid < 0) {
        close(ends[1]);
        return;
    }
    h->end_word = ends[1];
    h->end_pid = pid;
}

void nbi_hosts_end_starter(nbi_hosts *h)
{
    if (h->end_word >= 0) (void)!write(h->end_word, "L", 1);
}

void nbi_hosts_end_close(nbi_hosts *h)
{
    if (h->end_word < 0) return;
    close(h->end_word);
    h->end_word = -1;
    if (!nbi_hosts_lost_one(h)) waitpid(h->end_pid, NULL, 0);
}
