/* What a server says about itself: /ping, /version, /model_info, /server_info. Called by http.c. */
#include <string.h>

#include "base/clock.h"
#include "base/json.h"
#include "server/http.h"
#include "server/job.h"
#include "server/messages.h"

static unsigned done(nbi_exchange *ex, nb_status status)
{
    if (status == NB_OK) return 200;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}

unsigned nbi_get_ping(nbi_exchange *ex, nbi_buf *out)
{
    return nbi_get_health(ex, out);
}

unsigned nbi_get_version(nbi_exchange *ex, nbi_buf *out)
{
    return done(ex, nbi_buf_addf(out, "{\"version\":\"%s\"}", nb_version()));
}

/* ---------------------------------------------------------------- the model */

static nb_status write_names(const nbi_served *served, nbi_buf *out)
{
    for (uint32_t i = 0; i < served->facts.n_names; i++) {
        const char *name = served->facts.names[i];
        NB_TRY(nbi_job_write_string(out, i ? "," : "", name, strlen(name)));
    }
    return NB_OK;
}

/* The members that /model_info and /server_info share, without braces. */
static nb_status write_model(const nbi_served *served, nbi_buf *out)
{
    const nb_engine_info *info = &served->info;
    const char *dir = info->model_dir;
    NB_TRY(nbi_job_write_string(out, "\"model_path\":", dir, strlen(dir)));
    if (info->has_tokenizer) {
        NB_TRY(nbi_job_write_string(out, ",\"tokenizer_path\":", dir, strlen(dir)));
    } else {
        NB_TRY(nbi_buf_addf(out, ",\"tokenizer_path\":null"));
    }
    NB_TRY(nbi_job_write_string(out, ",\"model_type\":", info->family, strlen(info->family)));
    NB_TRY(nbi_buf_addf(out, ",\"architectures\":%s",
                        served->architectures ? served->architectures : "null"));
    NB_TRY(nbi_buf_addf(out, ",\"served_model_names\":["));
    NB_TRY(write_names(served, out));
    return nbi_buf_addf(out,
                        "],\"is_generation\":true,\"preferred_sampling_params\":null,"
                        "\"weight_version\":\"default\",\"has_image_understanding\":false,"
                        "\"has_audio_understanding\":false,\"has_chat_template\":%s,"
                        "\"max_model_len\":%u,\"vocab_size\":%u,\"n_layers\":%u",
                        served->facts.has_chat ? "true" : "false", info->max_context,
                        info->vocab_size, info->n_layers);
}

unsigned nbi_get_model_info(nbi_exchange *ex, nbi_buf *out)
{
    nb_status status = nbi_buf_add(out, "{", 1);
    if (status == NB_OK) status = write_model(ex->server->served, out);
    if (status == NB_OK) status = nbi_buf_add(out, "}", 1);
    return done(ex, status);
}

/* ---------------------------------------------------------------- the server */

static nb_status write_limits(const nbi_server *server, nbi_buf *out)
{
    return nbi_buf_addf(
        out,
        ",\"limits\":{\"context_tokens\":%u,\"body_bytes\":%llu,\"json_depth\":%d,"
        "\"answers_per_request\":%d,\"n\":%d,\"messages\":%d,\"stop_strings\":%d,"
        "\"stop_string_bytes\":%d,\"stop_token_ids\":%d,\"logit_bias\":%d,\"top_logprobs\":%d}",
        server->served->info.max_context, (unsigned long long)server->options.max_body_bytes,
        NBI_JSON_DEPTH, NBI_CHOICES_MAX, NBI_N_MAX, NBI_MESSAGES_MAX, NB_STOP_STRINGS_MAX,
        NBI_STOP_BYTES_MAX, NB_STOP_IDS_MAX, NB_LOGIT_BIAS_MAX, NB_TOP_LOGPROBS_MAX);
}

static nb_status write_memory(const nb_engine_info *info, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(
        out, ",\"memory\":{\"weight_bytes\":%llu,\"kv_bytes\":%llu,\"workspace_bytes\":%llu",
        (unsigned long long)info->weight_bytes, (unsigned long long)info->kv_bytes,
        (unsigned long long)info->workspace_bytes));
    return nbi_buf_addf(out,
                        ",\"request_bytes\":%llu,\"batch_bytes\":%llu,\"prefix_tree_bytes\":%llu,"
                        "\"available_bytes\":%llu}",
                        (unsigned long long)info->request_bytes,
                        (unsigned long long)info->batch_bytes, (unsigned long long)info->tree_bytes,
                        (unsigned long long)info->available_bytes);
}

static nb_status write_check(const nb_check_result *r, bool first, nbi_buf *out)
{
    NB_TRY(
        nbi_job_write_string(out, first ? "{\"kind\":" : ",{\"kind\":", r->kind, strlen(r->kind)));
    NB_TRY(nbi_job_write_string(out, ",\"path\":", r->path, strlen(r->path)));
    NB_TRY(nbi_job_write_string(out, ",\"where\":", r->where, strlen(r->where)));
    NB_TRY(nbi_job_write_string(out, ",\"why\":", r->why, strlen(r->why)));
    NB_TRY(nbi_buf_addf(out, ",\"chosen\":%s,\"supported\":%s", r->chosen ? "true" : "false",
                        r->supported ? "true" : "false"));
    bool shown = r->compared && r->error <= 1e300; /* JSON has no infinity */
    if (!shown) return nbi_buf_addf(out, ",\"error\":null,\"bound\":null}");
    return nbi_buf_addf(out, ",\"error\":%.9g,\"bound\":%.9g}", r->error, r->bound);
}

/* What was compared before serving began: all of it was right. */
static nb_status write_checks(const nb_engine *engine, nbi_buf *out)
{
    nb_check_result r;
    NB_TRY(nbi_buf_addf(out, ",\"checks\":["));
    for (uint32_t i = 0; nb_engine_get_check(engine, i, &r); i++) {
        NB_TRY(write_check(&r, i == 0, out));
    }
    return nbi_buf_addf(out, "]");
}

/* Benchmark clients read internal_states[0].avg_spec_accept_length. */
static nb_status write_states(const nbi_served *served, nbi_buf *out)
{
    nb_engine_stats s;
    nb_engine_get_stats(served->engine, &s);
    double share =
        served->info.kv_tokens ? (double)s.kv_tokens_used / (double)served->info.kv_tokens : 0;
    NB_TRY(nbi_buf_addf(
        out,
        ",\"internal_states\":[{\"num_running_reqs\":%u,\"num_queue_reqs\":%u,"
        "\"kv_used_tokens\":%llu,\"kv_evictable_tokens\":%llu,\"token_usage\":%.6f,"
        "\"steps\":%llu,\"prompt_tokens\":%llu,\"generated_tokens\":%llu,\"cached_tokens\":%llu,"
        "\"requests_finished\":%llu,\"requests_failed\":%llu,\"requests_cancelled\":%llu,"
        "\"preemptions\":%llu,",
        s.n_running, s.n_waiting, (unsigned long long)s.kv_tokens_used,
        (unsigned long long)s.kv_tokens_cached, share, (unsigned long long)s.n_steps,
        (unsigned long long)s.prompt_tokens, (unsigned long long)s.generated_tokens,
        (unsigned long long)s.prefix_hit_tokens, (unsigned long long)s.requests_finished,
        (unsigned long long)s.requests_failed, (unsigned long long)s.requests_cancelled,
        (unsigned long long)s.preemptions));
    if (!s.draft_steps) return nbi_buf_addf(out, "\"avg_spec_accept_length\":null}]");
    return nbi_buf_addf(out, "\"avg_spec_accept_length\":%.4f}]",
                        1.0 + (double)s.draft_accepted / (double)s.draft_steps);
}

/* max_rows null: steps of any more rows. */
static nb_status write_choices(const nb_engine_info *info, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, ",\"moe_runner_source\":\"%s\",\"moe_runner_choices\":[",
                        info->moe_choice_source));
    for (uint32_t i = 0; i < info->n_moe_choices; i++) {
        const nb_moe_choice *c = &info->moe_choices[i];
        NB_TRY(nbi_buf_addf(out, "%s{\"max_rows\":", i ? "," : ""));
        if (c->max_rows == UINT32_MAX)
            NB_TRY(nbi_buf_addf(out, "null"));
        else
            NB_TRY(nbi_buf_addf(out, "%u", c->max_rows));
        NB_TRY(nbi_job_write_string(out, ",\"runner\":", c->runner, strlen(c->runner)));
        NB_TRY(nbi_buf_addf(out, "}"));
    }
    return nbi_buf_addf(out, "]");
}

static nb_status write_server(const nbi_server *server, nbi_buf *out)
{
    const nbi_served *served = server->served;
    const nb_engine_info *info = &served->info;
    const char *failure = nb_engine_failure(served->engine);
    const char *flags = server->options.flags_json;
    NB_TRY(nbi_buf_add(out, "{", 1));
    NB_TRY(nbi_buf_addf(out, "\"flags\":%s,", flags ? flags : "{}"));
    NB_TRY(write_model(served, out));
    NB_TRY(nbi_buf_addf(out, ",\"version\":\"%s\",\"status\":\"%s\"", nb_version(),
                        failure ? "failed" : "ready"));
    NB_TRY(nbi_job_write_string(out, ",\"device\":", info->device, strlen(info->device)));
    NB_TRY(nbi_job_write_string(out, ",\"moe_runner_backend\":", info->moe_runner,
                                strlen(info->moe_runner)));
    NB_TRY(
        nbi_job_write_string(out, ",\"kv_cache_dtype\":", info->kv_dtype, strlen(info->kv_dtype)));
    NB_TRY(write_choices(info, out));
    NB_TRY(nbi_buf_addf(out,
                        ",\"max_total_num_tokens\":%llu,\"max_req_input_len\":%u,"
                        "\"uptime_seconds\":%.3f",
                        (unsigned long long)info->kv_tokens,
                        info->max_context ? info->max_context - 1 : 0,
                        (double)(nbi_now_ns() - server->options.start_ns) / 1e9));
    NB_TRY(write_memory(info, out));
    NB_TRY(write_checks(served->engine, out));
    NB_TRY(write_limits(server, out));
    NB_TRY(write_states(served, out));
    return nbi_buf_add(out, "}", 1);
}

unsigned nbi_get_server_info(nbi_exchange *ex, nbi_buf *out)
{
    return done(ex, write_server(ex->server, out));
}
