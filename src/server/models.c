/* GET /v1/models and /v1/models/{id}: what OpenAI's clients read and what Anthropic's do, together.
 * Called by http.c. */
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "server/http.h"

static nb_status write_model(const nbi_served *served, const char *name, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, "{\"id\":"));
    NB_TRY(nbi_json_quote(out, name, strlen(name)));
    NB_TRY(nbi_buf_addf(out,
                        ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"nibble\",\"root\":",
                        (long long)served->created));
    NB_TRY(nbi_json_quote(out, served->info.model_dir, strlen(served->info.model_dir)));
    NB_TRY(nbi_buf_addf(
        out, ",\"parent\":null,\"max_model_len\":%u,\"family\":", served->facts.max_context));
    NB_TRY(nbi_json_quote(out, served->info.family, strlen(served->info.family)));
    char created[32] = "";
    const time_t seconds = (time_t)served->created;
    struct tm utc;
    if (gmtime_r(&seconds, &utc))
        (void)strftime(created, sizeof created, "%Y-%m-%dT%H:%M:%SZ", &utc);
    NB_TRY(
        nbi_buf_addf(out, ",\"type\":\"model\",\"created_at\":\"%s\",\"display_name\":", created));
    NB_TRY(nbi_json_quote(out, name, strlen(name)));
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_list(const nbi_served *served, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, "{\"object\":\"list\",\"data\":["));
    for (uint32_t i = 0; i < served->facts.n_names; i++) {
        if (i) NB_TRY(nbi_buf_add(out, ",", 1));
        NB_TRY(write_model(served, served->facts.names[i], out));
    }
    const char *const *names = served->facts.names; /* all fit in one page */
    NB_TRY(nbi_buf_addf(out, "],\"has_more\":false,\"first_id\":"));
    NB_TRY(nbi_json_quote(out, names[0], strlen(names[0])));
    const char *last = names[served->facts.n_names - 1];
    NB_TRY(nbi_buf_addf(out, ",\"last_id\":"));
    NB_TRY(nbi_json_quote(out, last, strlen(last)));
    return nbi_buf_add(out, "}", 1);
}

static unsigned done(nbi_exchange *ex, nb_status status)
{
    if (status == NB_OK) return 200;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}

unsigned nbi_get_models(nbi_exchange *ex, nbi_buf *out)
{
    return done(ex, write_list(ex->server->served, out));
}

unsigned nbi_get_model(nbi_exchange *ex, nbi_buf *out)
{
    const nbi_served *served = ex->server->served;
    for (uint32_t i = 0; i < served->facts.n_names; i++) {
        const char *name = served->facts.names[i];
        if (strcmp(ex->rest, name) == 0) return done(ex, write_model(served, name, out));
    }
    nbi_api_fail(&ex->error, 404, "model_not_found", "model",
                 "the model \"%.128s\" does not exist, this server has \"%.128s\"", ex->rest,
                 served->facts.names[0]);
    return 0;
}
