/* The thread that looks at the server once a second: what the engine did lately, for /metrics and a
 * line in the log every ten seconds of load; deadlines of exchanges. Private to src/server. */
#pragma once

#include "server/server_state.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_REPORT_WINDOW 10u /* seconds that rates are taken over */

/* Of the last NBI_REPORT_WINDOW seconds. */
typedef struct nbi_rates {
    double generation, prefill; /* tokens per second */
    double hit_rate;            /* of prompt tokens, found in the prefix cache; 0 without prompts */
    double accept_rate;         /* of drafted tokens; 0 without drafts */
    double accept_length;       /* tokens per verified step, the model's own included; 0 without */
    double read_rate;           /* bytes that decode steps had to read, per second of their time */
    double share_of_floor;      /* of them; 0 without such steps or without a known bandwidth */
} nbi_rates;

typedef struct nbi_reporter nbi_reporter;

nb_status nbi_reporter_start(nbi_server *server, nb_error *err);
void nbi_reporter_stop(nbi_server *server);

/* Any thread. */
void nbi_reporter_rates(const nbi_server *server, nbi_rates *out);

#ifdef __cplusplus
}
#endif
