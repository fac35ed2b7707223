/* Small files of a machine, or of a recorded tree of one. What a file holds becomes clean text: one
 * cannot know who wrote it. Callers: doctor_*.c. */
#pragma once

#include <stdarg.h>

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_UNKNOWN INT64_MIN /* a number that could not be read */

/* Something that is there and may not be read. */
typedef struct nbi_unseen {
    const char *what;   /* a path, or the name of an interface */
    const char *reason; /* "permission denied", ... */
    struct nbi_unseen *next;
} nbi_unseen;

/* Owns every string that it hands out. Running out of memory sets the flag and reads as absence. */
typedef struct nbi_reader {
    const char *root; /* put before /sys, /proc, /dev and /etc; "" for this machine */
    nbi_arena arena;
    nbi_unseen *unseen, *last_unseen;
    bool no_memory;
} nbi_reader;

void nbi_reader_free(nbi_reader *r);

/* Formatted text that lives as long as the reader; "" when out of memory. */
const char *nbi_reader_text(nbi_reader *r, const char *fmt, ...) NBI_PRINTF(2, 3);
void nbi_reader_unseen(nbi_reader *r, const char *what, const char *reason);

/* The paths of the next functions are formatted, and begin with '/'.
 *
 * Text without white space at its end, of printable ASCII and line feeds, at most 64 KiB; NULL when
 * there is no such regular file. A file that may not be opened is noted as unseen. */
const char *nbi_read_text(nbi_reader *r, const char *fmt, ...) NBI_PRINTF(2, 3);

/* A number, decimal or 0x..., at the start of the file; NBI_UNKNOWN. */
int64_t nbi_read_number(nbi_reader *r, const char *fmt, ...) NBI_PRINTF(2, 3);

/* At most `max` bytes as they are; *n of them; NULL. */
const uint8_t *nbi_read_bytes(nbi_reader *r, size_t max, size_t *n, const char *fmt, ...)
    NBI_PRINTF(4, 5);

/* Size of a regular file; NBI_UNKNOWN. */
int64_t nbi_read_size(nbi_reader *r, const char *fmt, ...) NBI_PRINTF(2, 3);

/* What a symbolic link points to; NULL. */
const char *nbi_read_link(nbi_reader *r, const char *fmt, ...) NBI_PRINTF(2, 3);

/* Is anything of that name there? */
bool nbi_read_exists(nbi_reader *r, const char *fmt, ...) NBI_PRINTF(2, 3);

/* Names in a folder in the order of their numbers ("cpu2" before "cpu10"), at most 4096, without
 * those that begin with a dot. */
typedef struct nbi_names {
    const char **items; /* [n] */
    uint32_t n;
} nbi_names;
nbi_names nbi_read_names(nbi_reader *r, const char *fmt, ...) NBI_PRINTF(2, 3);

/* ---- pieces of text */

/* Behind the last '/'; NULL for NULL. */
const char *nbi_last_part(const char *path);

/* The number behind "key:" or "key " at the start of a line ("MemTotal:   12 kB"); NBI_UNKNOWN.
 * NULL text is allowed. */
int64_t nbi_line_number(const char *text, const char *key);

/* What stands behind "key" and white space or a colon at the start of a line, to its end; NULL. */
const char *nbi_line_text(nbi_reader *r, const char *text, const char *key);

/* Is `word` one of the words of the text? */
bool nbi_has_word(const char *text, const char *word);

/* The word in brackets of "always [madvise] never"; the whole text when there are none; NULL for
 * NULL. */
const char *nbi_chosen_word(nbi_reader *r, const char *text);

/* A set of CPUs or nodes, "0-31,64-95". */
#define NBI_SET_MAX 8192u
typedef struct nbi_set {
    uint64_t bits[NBI_SET_MAX / 64];
    uint32_t n;
    const char *text; /* as it was read; NULL: not known */
} nbi_set;
void nbi_set_parse(nbi_set *out, const char *text); /* wrong parts are skipped */
bool nbi_set_has(const nbi_set *s, uint32_t i);
uint32_t nbi_set_common(const nbi_set *a, const nbi_set *b); /* members of both */

#ifdef __cplusplus
}
#endif
