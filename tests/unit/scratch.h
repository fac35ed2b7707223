/* Scratch folders of tests, and small checkpoints in them. */
#pragma once

#include "base/json.h"

/* A new folder under the system's temporary one; removed with all it holds by scratch_remove(). */
char *scratch_make(void);
void scratch_remove(char *dir);

/* dir/name; one of a few static buffers. */
const char *scratch_path(const char *dir, const char *name);
void scratch_write(const char *dir, const char *name, const void *data, size_t n);
void scratch_write_text(const char *dir, const char *name, const char *text);

/* A safetensors file: header length, header, n_data bytes (data may be NULL: zeros). Malloc'ed;
 * free(). */
unsigned char *scratch_safetensors(const char *header, const void *data, size_t n_data,
                                   size_t *n_bytes);
void scratch_write_safetensors(const char *dir, const char *name, const char *header,
                               const void *data, size_t n_data);

/* JSON text with ' instead of ", for readable test tables; of keys given twice the later wins.
 * Never fails. */
json_t *scratch_json(const char *text);
