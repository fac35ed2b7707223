/* The part of NCCL that is used, found at run time: a build needs neither its header nor its
 * library. Prototypes and values are those of nccl.h, NCCL 2.28; they are the same since 2.18. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_NCCL_OLDEST  21800 /* as ncclGetVersion counts: 2.18.0 */

#define NBI_NCCL_SUCCESS 0 /* ncclResult_t */
#define NBI_NCCL_FLOAT32 7 /* ncclDataType_t */
#define NBI_NCCL_SUM     0 /* ncclRedOp_t */

typedef struct nbi_nccl_comm nbi_nccl_comm; /* *ncclComm_t */

typedef struct nbi_nccl_id { /* ncclUniqueId */
    char bytes[128];
} nbi_nccl_id;

/* A stream is a cudaStream_t; int is ncclResult_t. */
typedef struct nbi_nccl {
    int (*get_version)(int *version);
    int (*get_unique_id)(nbi_nccl_id *id);
    int (*comm_init_rank)(nbi_nccl_comm **comm, int n_ranks, nbi_nccl_id id, int rank);
    int (*comm_destroy)(nbi_nccl_comm *comm);
    int (*comm_abort)(nbi_nccl_comm *comm);
    int (*comm_get_async_error)(nbi_nccl_comm *comm, int *result);
    const char *(*get_error_string)(int result);
    const char *(*get_last_error)(nbi_nccl_comm *comm);
    int (*all_reduce)(const void *in, void *out, size_t n, int type, int op, nbi_nccl_comm *comm,
                      void *stream);
    int (*all_gather)(const void *in, void *out, size_t n, int type, nbi_nccl_comm *comm,
                      void *stream);
    int (*send)(const void *in, size_t n, int type, int to, nbi_nccl_comm *comm, void *stream);
    int (*recv)(void *out, size_t n, int type, int from, nbi_nccl_comm *comm, void *stream);
    int (*group_start)(void);
    int (*group_end)(void);
    char version[16]; /* "2.28.9" */
} nbi_nccl;

/* The library of the process, opened once; it stays open. `file` is for tests; NULL: libnccl.so.2.
 * NB_UNSUPPORTED with the reason where there is none, or an older one. One thread at a time.
 *
 * NVLink multicast stays off unless NCCL_NVLS_ENABLE says otherwise, and connections are made at
 * the start unless NCCL_RUNTIME_CONNECT does: their memory is then part of the plan. */
nb_status nbi_nccl_load(const nbi_nccl **out, const char *file, nb_error *err);

/* ---- which exchange for a sum of so many values */

#define NBI_EXCHANGE_SIZES 8u

typedef struct nbi_exchange_times {
    size_t values[NBI_EXCHANGE_SIZES]; /* ascending */
    float one_shot_us[NBI_EXCHANGE_SIZES], nccl_us[NBI_EXCHANGE_SIZES];
} nbi_exchange_times;

/* The least number of values from which on NCCL is the faster one at all sizes that were measured,
 * by more than a twentieth; SIZE_MAX: it is not. */
size_t nbi_exchange_nccl_from(const nbi_exchange_times *t);

/* "12 KB 3.9 and 14.3 us, ...", or one time where only one was measured; cut where it does not
 * fit. */
void nbi_exchange_describe(const nbi_exchange_times *t, char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
