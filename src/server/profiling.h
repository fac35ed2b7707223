/* Profiles over HTTP: /start_profile and /stop_profile, and the files they may be written to.
 * Private to src/server. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_PROFILE_PREFIX_MAX 64u
#define NBI_PROFILE_PATH_MAX   4096u

typedef struct nbi_server nbi_server;

typedef struct nbi_profiling {
    pthread_mutex_t lock;
    bool is_open;
    uint32_t n_files;                        /* written; under lock like the next two */
    char prefix[NBI_PROFILE_PREFIX_MAX + 2]; /* of the next file's name, with its "-" */
    char last[NBI_PROFILE_PATH_MAX];         /* the file written last; empty: none */
} nbi_profiling;

/* NB_IO when --profile-dir is no folder that can be written to. */
nb_status nbi_profiling_open(nbi_server *server, nb_error *err);
void nbi_profiling_close(nbi_server *server);

/* Once a second, when a model is there: writes a profile that has taken its steps, where files may
 * be written. */
void nbi_profiling_look(nbi_server *server);

#ifdef __cplusplus
}
#endif
