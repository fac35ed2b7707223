/* The log: formats a line and hands it to the one sink. Called from any thread.
 *
 * The sink is called under a shared lock, so that it cannot be replaced while it runs. */
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

#define LINE_BYTES 2048

static pthread_rwlock_t sink_lock = PTHREAD_RWLOCK_INITIALIZER;
static nb_log_sink sink_call;      /* under sink_lock */
static void *sink_user;            /* under sink_lock */
static atomic_int sink_level = -1; /* highest level wanted; -1: none */

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
    pthread_rwlock_rdlock(&sink_lock);
    if (sink_call) sink_call(sink_user, level, line);
    pthread_rwlock_unlock(&sink_lock);
}
