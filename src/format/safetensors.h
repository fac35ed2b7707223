/* safetensors checkpoints: one file or shards with model.safetensors.index.json, mapped read-only.
 *
 * Layout of a file: u64 little-endian header length, that many bytes of JSON {name: {dtype, shape,
 * data_offsets}}, then data; offsets count from the end of the header. Everything is checked before
 * use: length of the header against the file, dtype, shape x dtype against the span, spans inside
 * the file, not overlapping and without holes, duplicate names in a file and across shards, index
 * against files in both directions. Source: huggingface/safetensors README, "Format". */
#pragma once

#include "base/dtype.h"
#include "base/file.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TENSOR_DIMS_MAX 8

typedef struct nbi_st_tensor {
    const char *name; /* lives as long as the checkpoint */
    nbi_dtype dtype;
    uint32_t n_dims; /* 0 for a scalar */
    uint64_t shape[NBI_TENSOR_DIMS_MAX];
    const uint8_t *data; /* mapped; not aligned beyond what the file gives */
    uint64_t bytes;
    uint32_t file; /* index for nbi_checkpoint_file() */
    bool used;     /* set by nbi_checkpoint_find() */
} nbi_st_tensor;

typedef struct nbi_checkpoint nbi_checkpoint;

/* Opens the safetensors of a folder. NB_NOT_FOUND when there are none, NB_CORRUPT with file and
 * tensor. */
nb_status nbi_checkpoint_open(nbi_checkpoint **out, const char *dir, nb_error *err);
void nbi_checkpoint_close(nbi_checkpoint **checkpoint);

size_t nbi_checkpoint_count(const nbi_checkpoint *checkpoint);
const nbi_st_tensor *nbi_checkpoint_at(const nbi_checkpoint *checkpoint,
                                       size_t i); /* file order, then offset order */
/* The i of nbi_checkpoint_at() for a tensor of this checkpoint. */
size_t nbi_checkpoint_index(const nbi_checkpoint *checkpoint, const nbi_st_tensor *tensor);
size_t nbi_checkpoint_files(const nbi_checkpoint *checkpoint);
const char *nbi_checkpoint_file(const nbi_checkpoint *checkpoint, uint32_t file); /* base name */
/* Where a tensor of this checkpoint begins in its file. */
uint64_t nbi_checkpoint_offset(const nbi_checkpoint *checkpoint, const nbi_st_tensor *tensor);
const char *nbi_checkpoint_dir(const nbi_checkpoint *checkpoint); /* as given to open */
uint64_t nbi_checkpoint_bytes(const nbi_checkpoint *checkpoint);  /* data of all tensors */

/* NULL when absent. Marks the tensor used. O(1). */
const nbi_st_tensor *nbi_checkpoint_find(nbi_checkpoint *checkpoint, const char *name);
/* The same without marking. */
const nbi_st_tensor *nbi_checkpoint_peek(const nbi_checkpoint *checkpoint, const char *name);
/* First tensor at or behind `from` that was never found by nbi_checkpoint_find();
 * nbi_checkpoint_count() when there is none. */
size_t nbi_checkpoint_unused(const nbi_checkpoint *checkpoint, size_t from);

/* Parses one header from memory (fuzzed). `n_bytes` is the whole file. Tensors are handed to `each`
 * in offset order. */
typedef nb_status (*nbi_st_each)(void *user, const nbi_st_tensor *tensor, nb_error *err);
nb_status nbi_st_parse(const uint8_t *file, size_t n_bytes, const char *name, nbi_st_each each,
                       void *user, nb_error *err);

/* ---- writing: names and shapes first, then data in the same order. */
typedef struct nbi_st_writer nbi_st_writer;

/* Shards of at most shard_bytes (0: one file) written to `dir` as model.safetensors or
 * model-0000i-of-0000n.safetensors with an index. Files are written under temporary names and
 * renamed by nbi_st_writer_finish(): the output is complete or absent. */
nb_status nbi_st_writer_create(nbi_st_writer **out, const char *dir, uint64_t shard_bytes,
                               nb_error *err);
/* Keeps finished shards: each is renamed when it is complete, and an unfinished writer leaves them.
 * Called once, behind the last nbi_st_writer_add(). *n_done tensors at the front are already there,
 * in shards of exactly these names, shapes and sizes: data starts behind them. Whether their
 * contents are still wanted is for the caller to know. */
nb_status nbi_st_writer_resume(nbi_st_writer *writer, size_t *n_done, nb_error *err);
/* Declares all tensors before the first nbi_st_writer_data(). */
nb_status nbi_st_writer_add(nbi_st_writer *writer, const char *name, nbi_dtype dtype,
                            uint32_t n_dims, const uint64_t *shape, nb_error *err);
/* The data of the next declared tensor, in one piece or several. */
nb_status nbi_st_writer_data(nbi_st_writer *writer, const void *data, uint64_t bytes,
                             nb_error *err);
nb_status nbi_st_writer_finish(nbi_st_writer *writer, nb_error *err);
void nbi_st_writer_destroy(nbi_st_writer **writer); /* unfinished output is removed */

#ifdef __cplusplus
}
#endif
