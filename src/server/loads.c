/* How much there is to do, in the forms that routers of other servers read: GET /v1/loads and
 * /get_load (SGLang's), /load (vLLM's). Called by http.c. */
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "server/http.h"
#include "server/reporter.h"

/* What one reply is written from. */
typedef struct load {
    const nb_engine_info *info;
    nb_engine_stats stats;
    nbi_rates rates;
    double usage, utilization; /* 0 to 1 */
} load;

enum { CORE = 1, MEMORY = 2, SPEC = 4, QUEUES = 8, ALL = 15 };

/* SGLang's names of sections. What nibble has nothing for is there without a member. */
static const struct {
    const char *name;
    unsigned bits;
} sections[] = {{"core", CORE}, {"memory", MEMORY}, {"spec", SPEC}, {"queues", QUEUES},
                {"lora", 0},    {"disagg", 0},      {"all", ALL}};

static unsigned done(nbi_exchange *ex, nb_status status)
{
    if (status == NB_OK) return 200;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}

static double share(uint64_t a, uint64_t b)
{
    return b ? (double)a / (double)b : 0.0;
}

static void take(nbi_exchange *ex, load *l)
{
    nbi_server *server = ex->server;
    l->info = &server->served->info;
    nb_engine_get_stats(server->served->engine, &l->stats);
    nbi_reporter_rates(server, &l->rates);
    l->usage = share(l->stats.kv_tokens_used, l->info->kv_tokens);
    double places = share(l->stats.n_running, l->info->max_running);
    l->utilization = places > l->usage ? places : l->usage;
}

/* ---------------------------------------------------------------- the query */

static const char *argument(const nbi_exchange *ex, const char *name)
{
    return MHD_lookup_connection_value(ex->conn, MHD_GET_ARGUMENT_KIND, name);
}

/* A list of sections with commas between. Without one *bits stays. */
static nb_status read_include(const char *list, unsigned *bits, nbi_api_error *e)
{
    if (!list || !*list) return NB_OK;
    *bits = 0;
    for (;;) {
        list += strspn(list, " ");
        size_t n = strcspn(list, ","), kept = n, i = 0;
        while (kept && list[kept - 1] == ' ') kept--;
        while (i < sizeof sections / sizeof *sections &&
               (strlen(sections[i].name) != kept || memcmp(sections[i].name, list, kept) != 0))
            i++;
        if (i == sizeof sections / sizeof *sections) {
            return nbi_api_field(e, "include",
                                 "is a list of core, memory, spec, lora, disagg, queues, all; "
                                 "\"%.*s\" is none of them",
                                 (int)(kept < 32 ? kept : 32), list);
        }
        *bits |= sections[i].bits;
        if (!list[n]) return NB_OK;
        list += n + 1;
    }
}

static nb_status read_query(nbi_exchange *ex, unsigned *bits)
{
    const char *rank = argument(ex, "dp_rank"), *format = argument(ex, "format");
    if (rank && *rank && strcmp(rank, "0") != 0) {
        return nbi_api_field(&ex->error, "dp_rank", "is %.32s, and there is only rank 0", rank);
    }
    if (format && *format && strcmp(format, "json") != 0) {
        return nbi_api_field(&ex->error, "format",
                             "is %.32s; only json is written here, /metrics has the same figures "
                             "for Prometheus",
                             format);
    }
    return read_include(argument(ex, "include"), bits, &ex->error);
}

/* ---------------------------------------------------------------- /v1/loads */

static nb_status write_core(const load *l, nbi_buf *out)
{
    const nb_engine_stats *s = &l->stats;
    NB_TRY(nbi_buf_addf(out,
                        "{\"dp_rank\":0,\"num_running_reqs\":%u,\"num_waiting_reqs\":%u,"
                        "\"num_total_reqs\":%u,\"num_used_tokens\":%llu,\"num_total_tokens\":%llu,"
                        "\"max_total_num_tokens\":%llu,",
                        s->n_running, s->n_waiting, s->n_running + s->n_waiting,
                        (unsigned long long)s->kv_tokens_used,
                        (unsigned long long)(s->kv_tokens_used + s->waiting_tokens),
                        (unsigned long long)l->info->kv_tokens));
    return nbi_buf_addf(out,
                        "\"token_usage\":%.6f,\"gen_throughput\":%.3f,\"cache_hit_rate\":%.6f,"
                        "\"utilization\":%.6f,\"max_running_requests\":%u",
                        l->usage, l->rates.generation, l->rates.hit_rate, l->utilization,
                        l->info->max_running);
}

static nb_status write_sections(const load *l, unsigned bits, nbi_buf *out)
{
    if (bits & MEMORY) {
        NB_TRY(nbi_buf_addf(out,
                            ",\"memory\":{\"weight_gb\":%.6f,\"kv_cache_gb\":%.6f,"
                            "\"token_capacity\":%llu}",
                            1e-9 * (double)l->info->weight_bytes, 1e-9 * (double)l->info->kv_bytes,
                            (unsigned long long)l->info->kv_tokens));
    }
    if (bits & SPEC && l->stats.draft_steps) {
        NB_TRY(nbi_buf_addf(out, ",\"speculative\":{\"accept_length\":%.4f,\"accept_rate\":%.4f}",
                            1.0 + share(l->stats.draft_accepted, l->stats.draft_steps),
                            share(l->stats.draft_accepted, l->stats.draft_tokens)));
    }
    if (bits & QUEUES) {
        NB_TRY(nbi_buf_addf(out, ",\"queues\":{\"waiting\":%u,\"paused\":0,\"retracted\":%llu}",
                            l->stats.n_waiting, (unsigned long long)l->stats.preemptions));
    }
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_aggregate(const load *l, nbi_buf *out)
{
    const nb_engine_stats *s = &l->stats;
    NB_TRY(nbi_buf_addf(out,
                        "],\"aggregate\":{\"total_running_reqs\":%u,\"total_waiting_reqs\":%u,"
                        "\"total_reqs\":%u,\"total_used_tokens\":%llu,\"total_tokens\":%llu,",
                        s->n_running, s->n_waiting, s->n_running + s->n_waiting,
                        (unsigned long long)s->kv_tokens_used,
                        (unsigned long long)(s->kv_tokens_used + s->waiting_tokens)));
    return nbi_buf_addf(
        out, "\"avg_token_usage\":%.6f,\"avg_throughput\":%.3f,\"avg_utilization\":%.6f}}",
        l->usage, l->rates.generation, l->utilization);
}

static nb_status write_loads(const load *l, unsigned bits, nbi_buf *out)
{
    char now[40] = "";
    const time_t seconds = time(NULL);
    struct tm utc;
    if (gmtime_r(&seconds, &utc)) (void)strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%S+00:00", &utc);
    NB_TRY(nbi_buf_addf(out,
                        "{\"timestamp\":\"%s\",\"version\":\"%s\",\"dp_rank_count\":1,"
                        "\"loads\":[",
                        now, nb_version()));
    NB_TRY(write_core(l, out));
    NB_TRY(write_sections(l, bits, out));
    return write_aggregate(l, out);
}

unsigned nbi_get_loads(nbi_exchange *ex, nbi_buf *out)
{
    load l;
    unsigned bits = ALL;
    if (read_query(ex, &bits) != NB_OK) return 0;
    take(ex, &l);
    return done(ex, write_loads(&l, bits, out));
}

/* ---------------------------------------------------------------- the older forms */

unsigned nbi_get_load(nbi_exchange *ex, nbi_buf *out)
{
    load l;
    take(ex, &l);
    return done(
        ex, nbi_buf_addf(out,
                         "[{\"dp_rank\":0,\"num_reqs\":%u,\"num_waiting_reqs\":%u,"
                         "\"num_tokens\":%llu,\"num_pending_tokens\":%llu,"
                         "\"ts_tic\":%.6f}]",
                         l.stats.n_running + l.stats.n_waiting, l.stats.n_waiting,
                         (unsigned long long)(l.stats.kv_tokens_used + l.stats.waiting_tokens),
                         (unsigned long long)l.stats.waiting_tokens, 1e-9 * (double)nbi_now_ns()));
}

unsigned nbi_get_server_load(nbi_exchange *ex, nbi_buf *out)
{
    return done(ex, nbi_buf_addf(out, "{\"server_load\":%u}", nbi_server_owed(ex->server)));
}
