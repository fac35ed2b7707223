/* The small files beside the weights, for tools that write checkpoints. */
#pragma once

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes dir/name, indented, keys in their order. */
nb_status nbi_write_json(const char *dir, const char *name, const json_t *json, nb_error *err);

/* Copies the tokenizer files and chat templates that `from` has. NB_NOT_FOUND when it has no
 * tokenizer.json. */
nb_status nbi_copy_tokenizer(const char *dir, const char *from, nb_error *err);

/* Copies every file of `from` but weights, their index and what `skip` names (NULL behind the
 * last); folders are left out. */
nb_status nbi_copy_others(const char *dir, const char *from, const char *const *skip,
                          nb_error *err);

#ifdef __cplusplus
}
#endif
