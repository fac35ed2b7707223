/* A loaded model: config -> layer description -> prepared weights -> forward. Knows no device, rank
 * or socket. */
#pragma once

#include "backend/attention_path.h"
#include "backend/timing.h"
#include "comm/comm.h"
#include "format/config.h"
#include "format/quant.h"
#include "moe/table.h"
#include "tensor/load.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_model nbi_model;

typedef struct nbi_model_options {
    const char *dir;
    const char *moe_runner; /* NULL: auto */
    /* With runner auto: what `nibble tune` has written, a file or a folder of such files
     * (nbi_tune_path()); NULL: none is looked for. One that does not fit is logged and not used. */
    const char *tune_file;
    const nbi_attention_names *attention; /* NULL: auto */
    nb_progress progress;
    void *progress_user;
    bool verify_scales; /* read and check every scale (default true) */
    bool use_mtp;       /* make ready for nbi_model_draft() when the files hold an MTP layer */
    /* Opportunistic expert activation (nbi_share_experts_args) with this k0; 0: off. Batches of
     * nbi_model_forward() then have `shares`; draft passes choose as ever. */
    uint32_t oea_k0;
    /* Ranks that run the model together (split.h): all call nbi_model_open() with the same files
     * and options, and then the same forward and draft passes with the same batches. NULL: this one
     * alone. The comm is borrowed and outlives the model; tp_rank and tp_size are the comm's. A
     * pass fails with the comm's error. On the CPU only. */
    nbi_comm *comm;
    nbi_shard shard;
    /* Optional: called when headers are read and no weight is, with the bytes of this rank's share;
     * an error refuses the model. */
    nb_status (*plan)(void *user, const nbi_config *config, uint64_t weight_bytes, nb_error *err);
    void *plan_user;
} nbi_model_options;

/* The backend is borrowed and must outlive the model. Unused tensors and choices are logged. */
nb_status nbi_model_open(nbi_model **out, nbi_backend *b, const nbi_model_options *opt,
                         nb_error *err);
void nbi_model_close(nbi_model **model);

const nbi_config *nbi_model_config(const nbi_model *model);
/* The same with the rank's numbers of heads and key heads: what its KV cache is made for. */
const nbi_config *nbi_model_local(const nbi_model *model);
const char *nbi_model_runner(const nbi_model *model);             /* names in use, "a+b"; "none" */
const nbi_moe_table *nbi_model_moe_table(const nbi_model *model); /* n 0 without experts */
/* Why these: "named", "rule" or "tuned". */
const char *nbi_model_moe_source(const nbi_model *model);
/* Positions of a prompt of so many tokens whose rows attend in MLA's expanded form
 * (nbi_batch.expanded): whole blocks from the front. */
uint32_t nbi_model_expanded(const nbi_model *model, uint32_t n_prompt);
uint64_t nbi_model_weight_bytes(const nbi_model *model); /* all that was loaded, of this rank */
/* Bytes one decode step of `batch` sequences of `context` tokens must read: weights once, the
 * expected number of distinct experts, cache. */
uint64_t nbi_model_token_bytes(const nbi_model *model, uint32_t batch, uint32_t context,
                               nbi_dtype kv_dtype);
/* The same of any step of at most a token per sequence and drafts: n_rows of n_seqs sequences whose
 * caches hold `cached` tokens together. */
uint64_t nbi_model_step_bytes(const nbi_model *model, uint32_t n_rows, uint32_t n_seqs,
                              uint64_t cached, nbi_dtype kv_dtype);
uint64_t nbi_model_token_macs(
    const nbi_model *model); /* multiply-adds per token, attention over the cache left out */

/* ---- KV cache */
typedef struct nbi_kv {
    nbi_dtype dtype;
    uint32_t n_pages;
    uint32_t n_layers;
    nbi_kv_layer *layers; /* [n_layers + MTP layers] */
    void *memory;
    size_t bytes;
} nbi_kv;

size_t nbi_kv_page_bytes(const nbi_config *config, nbi_dtype dtype); /* one page over all layers */
nb_status nbi_kv_create(nbi_kv *out, nbi_backend *b, const nbi_config *config, nbi_dtype dtype,
                        uint32_t n_pages, nb_error *err);
void nbi_kv_destroy(nbi_kv *kv, nbi_backend *b);
/* Page `to` becomes what page `from` is, in every layer. Between steps. */
void nbi_kv_copy_page(nbi_kv *kv, nbi_backend *b, const nbi_config *config, int32_t from,
                      int32_t to);

/* ---- forward */
size_t nbi_model_workspace_bytes(const nbi_model *model, uint32_t max_rows, uint32_t max_seqs,
                                 uint32_t max_logit_rows, uint32_t max_context);
/* Allocates the workspace once; forward() never allocates. */
nb_status nbi_model_reserve(nbi_model *model, uint32_t max_rows, uint32_t max_seqs,
                            uint32_t max_logit_rows, uint32_t max_context, nb_error *err);

/* Asks for a run of the batch, which appends to the cache and leaves logits [R, V] float32 in
 * *logits (device memory of the model, valid until the next call). The backend's `sync` waits for
 * it and writes row_fault: the batch's arrays stay until then. */
nb_status nbi_model_forward(nbi_model *model, nbi_kv *kv, const nbi_batch *batch, float **logits,
                            nb_error *err);

/* Waits for all that was asked for. */
nb_status nbi_model_sync(nbi_model *model, nb_error *err);

/* ---- timing (backend/timing.h). A timer of the model's backend and experts; destroyed by
 * nbi_timing_destroy(), before the backend is closed. */
nb_status nbi_model_timing_create(nbi_timing **out, nbi_model *model, nb_error *err);
/* nbi_timing_step_begin() and _end(), with the experts. */
void nbi_model_time_begin(nbi_model *model, nbi_timing *timing);
void nbi_model_time_end(nbi_model *model, nbi_timing *timing, uint32_t n_rows, bool decode);
void nbi_model_time_cancel(nbi_model *model, nbi_timing *timing);

/* Sums over the layers of steps in which some row shared experts; after nbi_model_sync(). */
typedef struct nbi_oea_counts {
    uint64_t layers, before, after; /* distinct experts chosen by the router; that were read */
} nbi_oea_counts;
void nbi_model_oea_counts(const nbi_model *model, nbi_oea_counts *out);

/* Copies the first n rows of what forward left in *logits: out[n, V] on the host. */
void nbi_model_read_logits(const nbi_model *model, float *out, const float *logits, uint32_t n);

/* ---- drafting with the MTP layer (options.use_mtp). A draft pass runs the layer over `batch`: row
 * i holds token ids[i] behind the position pos[i] whose final hidden state is hidden row
 * hidden_rows[i] of the last forward (`from_draft` false) or of the last draft pass (true). It
 * appends to the MTP layer's cache at pos[i], and leaves logits of what follows ids[i]. Source:
 * DeepSeek-V3 (arXiv 2412.19437), section 2.2.
 *
 * Where the configuration shares index lists between draft steps, a row of a pass with `from_draft`
 * attends to the positions that row list_rows[i] of the last pass without it has chosen, and leaves
 * no index key: drafts that turn out right pass by again. */
/* What the checkpoint asks the cache to be: "FP8", ...; "" when it does not say. */
const char *nbi_model_kv_algo(const nbi_model *m);
bool nbi_model_can_draft(const nbi_model *model);
nb_status nbi_model_draft(nbi_model *model, nbi_kv *kv, const nbi_batch *batch, bool from_draft,
                          float **logits, nb_error *err);

/* Sentence for a guard code of nbi_batch.row_fault: "layer 3, post-attention norm: non-finite
 * value". */
void nbi_fault_text(int32_t code, char *out, size_t n);

#ifdef __cplusplus
}
#endif
