/* The log: formats a line and hands it to the one sink. Called from any thread.
 *
 * The sink is called under a shared lock, so that it cannot be replaced while it runs. */
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/utf8.h"

#define LINE_BYTES 2048

static pthread_rwlock_t sink_lock = PTHREAD_RWLOCK_INITIALIZER;
static nb_log_sink sink_call;      /* under sink_lock */
static void *sink_user;            /* under sink_lock */
static atomic_int sink_level = -1; /* highest level wanted; -1: none */

static pthread_mutex_t tail_lock = PTHREAD_MUTEX_INITIALIZER;
static nbi_log_line
    tail[NBI_LOG_TAIL_LINES]; /* line n at n % NBI_LOG_TAIL_LINES; under tail_lock */
static uint64_t tail_next;    /* under tail_lock */

void nb_log_set_sink(nb_log_sink sink, void *user, nb_log_level max_level)
{
    pthread_rwlock_wrlock(&sink_lock);
    sink_call = sink;
    sink_user = user;
    atomic_store(&sink_level, sink ? (int)max_level : -1);
    pthread_rwlock_unlock(&sink_lock);
}

bool nbi_log_wants(nb_log_level level)
{
    return (int)level <= atomic_load_explicit(&sink_level, memory_order_relaxed);
}

static void tail_add(nb_log_level level, const char *text)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    pthread_mutex_lock(&tail_lock);
    nbi_log_line *line = &tail[tail_next % NBI_LOG_TAIL_LINES];
    size_t n = strlen(text);
    if (n >= sizeof line->text) n = nbi_utf8_cut(text, sizeof line->text - 1);
    memcpy(line->text, text, n);
    line->text[n] = '\0';
    line->n = tail_next++;
    line->unix_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    line->level = level;
    pthread_mutex_unlock(&tail_lock);
}

bool nbi_log_tail(uint64_t n, nbi_log_line *out)
{
    pthread_mutex_lock(&tail_lock);
    if (n + NBI_LOG_TAIL_LINES < tail_next) n = tail_next - NBI_LOG_TAIL_LINES;
    bool there = n < tail_next;
    if (there) *out = tail[n % NBI_LOG_TAIL_LINES];
    pthread_mutex_unlock(&tail_lock);
    return there;
}

void nbi_log(nb_log_level level, const char *fmt, ...)
{
    if (!nbi_log_wants(level)) return;
    char line[LINE_BYTES];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    if (n < 0) return;
    if ((size_t)n >= sizeof line) line[nbi_utf8_cut(line, sizeof line - 1)] = '\0';
    for (char *c = line; *c; c++) {
        if (*c == '\n' || *c == '\r') *c = ' ';
    }
    if (level <= NB_LOG_INFO) tail_add(level, line);
    pthread_rwlock_rdlock(&sink_lock);
    if (sink_call) sink_call(sink_user, level, line);
    pthread_rwlock_unlock(&sink_lock);
}
