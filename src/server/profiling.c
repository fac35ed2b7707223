/* /start_profile and /stop_profile, with the fields of SGLang's and vLLM's. Called by http.c; by
 * the reporter for profiles that end by themselves.
 *
 * A server writes no files unless it is told a folder. Without one the profile is the reply. */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "server/http.h"

#define STEPS_MAX 1000000

nb_status nbi_profiling_open(nbi_server *server, nb_error *err)
{
    const char *dir = server->options.profile_dir;
    if (dir && access(dir, W_OK | X_OK) != 0)
        return nbi_fail(err, NB_IO, "--profile-dir %s: not a folder that can be written to", dir);
    if (pthread_mutex_init(&server->profiling.lock, NULL) != 0)
        return nbi_fail(err, NB_NO_MEMORY, "no memory for the server");
    server->profiling.is_open = true;
    return NB_OK;
}

void nbi_profiling_close(nbi_server *server)
{
    if (server->profiling.is_open) pthread_mutex_destroy(&server->profiling.lock);
    server->profiling.is_open = false;
}

/* ---------------------------------------------------------------- files */

/* DIR/PREFIX-20261130-101500-1.trace.json, and its path is the last one. Called with the lock held.
 */
static nb_status write_file(nbi_server *server, const nb_profile *profile, nb_error *err)
{
    nbi_profiling *p = &server->profiling;
    char when[32] = "", name[NBI_PROFILE_PREFIX_MAX + 80];
    const time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc)) strftime(when, sizeof when, "%Y%m%d-%H%M%S", &utc);
    snprintf(name, sizeof name, "%s%s-%u.trace.json", p->prefix, when, p->n_files + 1);
    char *path = nbi_path_join(server->options.profile_dir, name);
    if (!path) return nbi_fail(err, NB_NO_MEMORY, "no memory for the profile's name");
    const nb_status st = nbi_file_write(path, profile->trace, profile->n_trace, err);
    if (st == NB_OK) {
        p->n_files++;
        snprintf(p->last, sizeof p->last, "%s", path);
        nbi_log(NB_LOG_INFO, "profile written to %s", path);
    }
    nbi_free(path);
    return st;
}

void nbi_profiling_look(nbi_server *server)
{
    nb_engine *engine = server->served->engine;
    nb_profile profile;
    nb_error err = {0};
    if (!server->options.profile_dir || !nb_engine_profile_is_done(engine)) return;
    pthread_mutex_lock(&server->profiling.lock);
    nb_status st = nb_engine_profile_stop(engine, &profile, &err);
    if (st == NB_OK) {
        st = write_file(server, &profile, &err);
        nb_profile_free(&profile);
    }
    pthread_mutex_unlock(&server->profiling.lock);
    if (st != NB_OK && st != NB_NOT_FOUND) nbi_log(NB_LOG_ERROR, "profile: %s", err.text);
}

/* ---------------------------------------------------------------- start */

/* What the body asks for, in SGLang's words or vLLM's. */
typedef struct start_request {
    nb_profile_options options;
    const char *output_dir, *prefix;
} start_request;

/* Steps by either name; 0 is as good as absent. */
static nb_status read_steps(uint32_t *out, const json_t *body, const char *sglang, const char *vllm,
                            nbi_api_error *e)
{
    int64_t n = 0;
    if (vllm) NB_TRY(nbi_field_int(&n, body, "", vllm, 0, STEPS_MAX, e));
    if (sglang) NB_TRY(nbi_field_int(&n, body, "", sglang, 0, STEPS_MAX, e));
    *out = (uint32_t)n;
    return NB_OK;
}

/* CPU and GPU both mean the operators where they run. */
static nb_status read_activities(const json_t *body, nbi_api_error *e)
{
    json_t *list = NULL;
    NB_TRY(nbi_field_array(&list, body, "", "activities", e));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (name && (!strcmp(name, "CPU") || !strcmp(name, "GPU"))) continue;
        return nbi_api_field(e, "activities",
                             "expected \"CPU\" and \"GPU\"; others are not recorded");
    }
    return NB_OK;
}

/* Fields of SGLang's that have no meaning here, yet a type. */
static nb_status read_idle_fields(const json_t *body, nbi_api_error *e)
{
    static const char *const names[] = {"with_stack", "record_shapes", "merge_profiles"};
    bool unused = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        NB_TRY(nbi_field_bool(&unused, body, "", names[i], e));
    return NB_OK;
}

static nb_status check_prefix(const char *prefix, nbi_api_error *e)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    if (!prefix) return NB_OK;
    const size_t n = strlen(prefix);
    if (n > NBI_PROFILE_PREFIX_MAX || strspn(prefix, allowed) != n)
        return nbi_api_field(e, "profile_prefix",
                             "expected at most %u letters, digits, \"_\" and \"-\"",
                             NBI_PROFILE_PREFIX_MAX);
    return NB_OK;
}

/* Writing is for --profile-dir alone. */
static nb_status check_output_dir(const nbi_server *server, const char *dir, nbi_api_error *e)
{
    const char *mine = server->options.profile_dir;
    if (!dir || (mine && !strcmp(dir, mine))) return NB_OK;
    if (!mine)
        return nbi_api_field(e, "output_dir",
                             "this server was started without --profile-dir and writes no files; "
                             "leave it out, and /stop_profile replies with the profile");
    return nbi_api_field(e, "output_dir", "profiles go to the folder of --profile-dir, %s", mine);
}

static nb_status read_start(start_request *q, const nbi_server *server, const json_t *body,
                            nbi_api_error *e)
{
    uint32_t start = 0;
    nb_engine_stats stats;
    NB_TRY(nbi_field_str(&q->output_dir, body, "", "output_dir", e));
    NB_TRY(check_output_dir(server, q->output_dir, e));
    NB_TRY(nbi_field_str(&q->prefix, body, "", "profile_prefix", e));
    NB_TRY(check_prefix(q->prefix, e));
    NB_TRY(read_steps(&q->options.n_steps, body, "num_steps", "max_iterations", e));
    NB_TRY(read_steps(&q->options.skip_steps, body, NULL, "delay_iterations", e));
    NB_TRY(read_steps(&start, body, "start_step", NULL, e));
    NB_TRY(nbi_field_bool(&q->options.by_stage, body, "", "profile_by_stage", e));
    NB_TRY(read_activities(body, e));
    NB_TRY(read_idle_fields(body, e));
    nb_engine_get_stats(server->served->engine, &stats); /* start_step counts from the start */
    if (start > stats.n_steps + q->options.skip_steps)
        q->options.skip_steps = (uint32_t)(start - stats.n_steps);
    return NB_OK;
}

unsigned nbi_post_start_profile(nbi_exchange *ex, const json_t *body, nbi_buf *out)
{
    nbi_server *server = ex->server;
    nbi_profiling *p = &server->profiling;
    start_request q = {0};
    nb_error err = {0};
    if (read_start(&q, server, body, &ex->error) != NB_OK) return 0;
    pthread_mutex_lock(&p->lock);
    const nb_status st = nb_engine_profile_start(server->served->engine, &q.options, &err);
    if (st == NB_OK)
        snprintf(p->prefix, sizeof p->prefix, "%s%s", q.prefix ? q.prefix : "",
                 q.prefix && q.prefix[0] ? "-" : "");
    pthread_mutex_unlock(&p->lock);
    if (st == NB_BUSY) {
        nbi_api_fail(&ex->error, 400, "profile_running", NULL,
                     "a profile runs already: POST /stop_profile first");
        return 0;
    }
    if (st != NB_OK) {
        nbi_api_from(&ex->error, st, &err, NULL);
        return 0;
    }
    ex->content_type = "text/plain; charset=utf-8";
    if (nbi_buf_addf(out, "Start profiling.\n") == NB_OK) return 200;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}

unsigned nbi_get_start_profile(nbi_exchange *ex, nbi_buf *out)
{
    return nbi_post_start_profile(ex, NULL, out);
}

/* ---------------------------------------------------------------- stop */

/* The profile itself, or where it was written and its tables. */
static nb_status write_reply(nbi_server *server, const nb_profile *profile, nbi_buf *out,
                             nb_error *err)
{
    if (!server->options.profile_dir) return nbi_buf_add(out, profile->trace, profile->n_trace);
    NB_TRY(write_file(server, profile, err));
    const char *path = server->profiling.last;
    NB_TRY(nbi_buf_addf(out, "{\"path\": "));
    NB_TRY(nbi_json_quote(out, path, strlen(path)));
    NB_TRY(nbi_buf_addf(out, ", \"breakdown\": "));
    NB_TRY(nbi_buf_add(out, profile->breakdown, profile->n_breakdown));
    return nbi_buf_addf(out, "}\n");
}

static void fail_none(nbi_server *server, nbi_api_error *e)
{
    const char *last = server->profiling.last;
    nbi_api_fail(e, 400, "no_profile", NULL, "no profile runs%s%s",
                 last[0] ? "; the last one was written to " : ": POST /start_profile first", last);
}

unsigned nbi_post_stop_profile(nbi_exchange *ex, const json_t *body, nbi_buf *out)
{
    nbi_server *server = ex->server;
    nb_profile profile = {0};
    nb_error err = {0};
    (void)body;
    pthread_mutex_lock(&server->profiling.lock);
    nb_status st = nb_engine_profile_stop(server->served->engine, &profile, &err);
    if (st == NB_OK)
        st = write_reply(server, &profile, out, &err);
    else if (st == NB_NOT_FOUND)
        fail_none(server, &ex->error);
    pthread_mutex_unlock(&server->profiling.lock);
    nb_profile_free(&profile);
    if (st == NB_OK) return 200;
    if (err.text[0] && !ex->error.http) nbi_api_from(&ex->error, st, &err, NULL);
    if (!ex->error.http) nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}

unsigned nbi_get_stop_profile(nbi_exchange *ex, nbi_buf *out)
{
    return nbi_post_stop_profile(ex, NULL, out);
}
