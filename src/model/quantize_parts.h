/* Pieces of nbi_quantize(). Private to src/model/quantize*.c. */
#pragma once

#include "base/file.h"
#include "base/thread.h"
#include "format/safetensors.h"
#include "model/modules.h"
#include "model/quantize.h"
#include "tensor/load.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A linear layer to quantise. Members of a group (gate and up; q, k and v; ...) get the scale of
 * the largest among them, because engines run them as one; they form a ring through `next`. */
typedef struct nbi_q_module {
    nbi_matrix matrix;
    float amax;        /* of the group, once `known` */
    float input_scale; /* 0: none */
    uint32_t next;     /* in the ring */
    uint32_t chain;    /* next module out of the same source tensor + 1; 0 ends */
    bool known;
} nbi_q_module;

typedef struct nbi_q_list {
    nbi_q_module *modules; /* [n] */
    uint32_t n, cap;
    uint64_t n_kept;
    uint32_t
        *first; /* [tensors of the source] module + 1 that begins there, 0: the tensor is copied */
    nbi_arena arena;
} nbi_q_list;

/* ---- quantize_list.c */
nb_status nbi_q_list_make(nbi_q_list *out, nbi_checkpoint *ckpt, const nbi_config *config,
                          const nbi_quantize_options *o, nb_error *err);
void nbi_q_list_free(nbi_q_list *list);

/* ---- quantize_files.c */

/* Reads {module or module.input_scale: number}; every module of the list must be there. Groups get
 * their largest. */
nb_status nbi_q_read_input_scales(nbi_q_list *list, const char *path, nb_error *err);
/* config.json and hf_quant_config.json of the output, and all other small files of the source. */
nb_status nbi_q_write_files(const char *dir, const nbi_quantize_options *o,
                            const nbi_config *config, const nbi_q_list *list, nb_error *err);
/* What a partial output was made from: *same when dir has the record of exactly this source and
 * these options; else it is written. */
nb_status nbi_q_record(bool *same, const char *dir, const nbi_quantize_options *o,
                       const nbi_checkpoint *ckpt, bool write, nb_error *err);
#define NBI_Q_RECORD "nibble-quantize.json"

#ifdef __cplusplus
}
#endif
