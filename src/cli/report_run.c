/* Processes of `nibble report`. Called by cmd_report.c. */
#include "cli/report_run.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"

#define PROGRAM       "/proc/self/exe"
#define OUTPUT_MAX    ((size_t)64 << 20)
#define READY_SECONDS 1800u /* a large model from a slow disk */
#define READY         "ready after "

extern char **environ;

void nbi_report_add_words(nbi_report_words *w, const char *const *words, size_t n)
{
    NB_ASSERT(n <= NBI_REPORT_WORDS - w->n);
    memcpy(w->items + w->n, words, n * sizeof *words);
    w->n += (uint32_t)n;
}

/* `fd` becomes the child's descriptor `as`. */
static nb_status start(pid_t *pid, const nbi_report_words *w, int fd, int as, nb_error *err)
{
    const char *argv[NBI_REPORT_WORDS + 2] = {"nibble"};
    memcpy(argv + 1, w->items, w->n * sizeof *argv);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, as);
    /* posix_spawn() takes char *const, and changes nothing */
    char **arguments = NULL;
    memcpy(&arguments, &(const char **){argv}, sizeof arguments);
    const int failed = posix_spawn(pid, PROGRAM, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (!failed) return NB_OK;
    return nbi_fail(err, NB_IO, "cannot start nibble %s: %s", w->items[0], strerror(failed));
}

static nb_status read_all(nbi_buf *out, int fd)
{
    char piece[16384];
    nb_status st = NB_OK;
    out->max = OUTPUT_MAX;
    for (ssize_t n; (n = read(fd, piece, sizeof piece)) != 0;) {
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return NB_IO;
        if (st == NB_OK) st = nbi_buf_add(out, piece, (size_t)n); /* else only empties the pipe */
    }
    return st;
}

static int wait_for(pid_t pid)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

nb_status nbi_report_json(json_t **out, const nbi_report_words *w, int max_status, nb_error *err)
{
    int ends[2];
    pid_t pid;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return nbi_fail(err, NB_IO, "no pipe for nibble %s: %s", w->items[0], strerror(errno));
    nb_status st = start(&pid, w, ends[1], STDOUT_FILENO, err);
    close(ends[1]);
    if (st != NB_OK) {
        close(ends[0]);
        return st;
    }
    nbi_buf text = {0};
    st = read_all(&text, ends[0]);
    close(ends[0]);
    const int status = wait_for(pid);
    if (st != NB_OK)
        nbi_fail(err, st, "nibble %s: its output cannot be read", w->items[0]);
    else if (status > max_status)
        st = nbi_fail(err, NB_INTERNAL, "nibble %s ended with status %d", w->items[0], status);
    else
        st = nbi_json_parse(out, text.data ? text.data : "", text.len, w->items[0], err);
    nbi_buf_free(&text);
    return st;
}

/* ---------------------------------------------------------------- a server */

/* The address behind "ready after ...", if the log has it. */
static bool find_url(char url[128], const char *log)
{
    char *text = NULL;
    size_t n = 0;
    bool found = false;
    if (nbi_file_read(&text, &n, log, OUTPUT_MAX, NULL) != NB_OK) return false;
    const char *line = strstr(text, READY);
    const char *at = line ? strstr(line, "http://") : NULL;
    const size_t length = at ? strcspn(at, " \n") : 0;
    if (length && length < 128 && at[length] == '\n') {
        memcpy(url, at, length);
        url[length] = '\0';
        found = true;
    }
    nbi_free(text);
    return found;
}

nb_status nbi_report_serve(nbi_report_server *s, const nbi_report_words *w, const char *log,
                           nb_error *err)
{
    const struct timespec tick = {.tv_nsec = 20000000};
    const uint64_t end = nbi_now_ns() + READY_SECONDS * 1000000000ull;
    *s = (nbi_report_server){0};
    const int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return nbi_fail(err, NB_IO, "%s: %s", log, strerror(errno));
    const nb_status st = start(&s->pid, w, fd, STDERR_FILENO, err);
    close(fd);
    if (st != NB_OK) return st;
    while (!find_url(s->url, log)) {
        int status;
        if (waitpid(s->pid, &status, WNOHANG) == s->pid) {
            s->pid = 0;
            return nbi_fail(err, NB_INTERNAL, "the server has ended; its log is %s", log);
        }
        if (nbi_now_ns() > end) {
            nbi_report_serve_end(s);
            return nbi_fail(err, NB_INTERNAL, "the server was not ready within %u s; its log is %s",
                            READY_SECONDS, log);
        }
        nanosleep(&tick, NULL);
    }
    return NB_OK;
}

void nbi_report_serve_end(nbi_report_server *s)
{
    if (!s->pid) return;
    kill(s->pid, SIGTERM);
    (void)wait_for(s->pid);
    s->pid = 0;
}
