/* Prompts from a file: ShareGPT JSON or JSON lines. */
#pragma once

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_load_entry {
    json_t *prompt;         /* a string, or an array of token ids or of chat messages */
    uint32_t output_tokens; /* 0: the file does not say */
    uint32_t answer_bytes;  /* of the recorded answer; 0: none */
} nbi_load_entry;

typedef struct nbi_load_file {
    nbi_load_entry *entries; /* [n], n >= 1 */
    uint32_t n;
} nbi_load_file;

/* The file is one JSON array of objects, or one object a line (empty lines are skipped). Of an
 * object:
 *   "prompt"         string or array of token ids
 *   "messages"       array of chat messages, for the chat endpoint
 *   "conversations"  ShareGPT: array of {"from" or "role", "value" or "content"}; the first is the
 *                    prompt, the second's length stands for the length of the answer; entries with
 *                    fewer than two are skipped
 *   "output_len", or "output_tokens", or "max_tokens"   tokens to ask for
 * NB_CORRUPT names the entry or line, and the key. */
nb_status nbi_load_file_read(nbi_load_file *out, const char *path, bool chat, nb_error *err);
void nbi_load_file_free(nbi_load_file *file);

#ifdef __cplusplus
}
#endif
