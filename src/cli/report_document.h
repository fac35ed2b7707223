/* A document written twice at once: as Markdown, and as one self-contained HTML page. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_document {
    nbi_buf markdown, html;
    const char *dir;  /* pictures of the Markdown go there; NULL: it has none */
    nb_status status; /* the first failure; what comes behind it does nothing */
    nb_error err;
    bool right[16]; /* columns of the table that are numbers */
} nbi_document;

/* `dir` is borrowed, may be NULL. */
void nbi_document_open(nbi_document *d, const char *title, const char *dir);
void nbi_document_close(nbi_document *d);

void nbi_document_heading(nbi_document *d, const char *text);
void nbi_document_text(nbi_document *d, const char *fmt, ...) NBI_PRINTF(2, 3);

/* Cells are parted by tabs; at most 16. A head that begins with ">" is of numbers. */
void nbi_document_table(nbi_document *d, const char *heads);
void nbi_document_row(nbi_document *d, const char *fmt, ...) NBI_PRINTF(2, 3);
void nbi_document_table_end(nbi_document *d);

/* An SVG document: within the page, and as DIR/name.svg beside the Markdown. */
void nbi_document_picture(nbi_document *d, const char *name, const char *text, const nbi_buf *svg);

/* Ends both; writes DIR/name.md and DIR/name.html. The first failure of all. */
nb_status nbi_document_write(nbi_document *d, const char *name, nb_error *err);

#ifdef __cplusplus
}
#endif
