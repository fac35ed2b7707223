/* Markdown and HTML side by side. Callers: report_write.c, report_compare.c. */
#include "cli/report_document.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"

#define LINE_MAX_BYTES 2048
#define CELLS          16u

static const char style[] =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;"
    "color:#1a202c;background:#fff}h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem;"
    "border-bottom:1px solid #cbd5e0}table{border-collapse:collapse;margin:.8rem 0}"
    "th,td{padding:.2rem .7rem;border-bottom:1px solid #e2e8f0;text-align:left;"
    "vertical-align:top}th{background:#edf2f7}.n{text-align:right;"
    "font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}";

static void keep(nbi_document *d, nb_status st)
{
    if (d->status != NB_OK || st == NB_OK) return;
    d->status = nbi_fail(&d->err, st, "no memory for the report");
}

static void put(nbi_document *d, nbi_buf *to, const char *text)
{
    if (d->status == NB_OK) keep(d, nbi_buf_add(to, text, strlen(text)));
}

/* Text of n bytes with what means something to the reader's format taken away. */
static void put_escaped(nbi_document *d, nbi_buf *to, const char *s, size_t n)
{
    const bool html = to == &d->html;
    for (size_t i = 0; i < n && d->status == NB_OK; i++) {
        const char *as = NULL;
        if (html)
            as = s[i] == '&' ? "&amp;" : s[i] == '<' ? "&lt;" : s[i] == '>' ? "&gt;" : NULL;
        else
            as = s[i] == '|' ? "\\|" : s[i] == '<' ? "&lt;" : NULL;
        if (as)
            put(d, to, as);
        else
            keep(d, nbi_buf_add(to, s + i, 1));
    }
}

void nbi_document_open(nbi_document *d, const char *title, const char *dir)
{
    *d = (nbi_document){.dir = dir};
    put(d, &d->markdown, "# ");
    put_escaped(d, &d->markdown, title, strlen(title));
    put(d, &d->markdown, "\n\n");
    put(d, &d->html, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<title>");
    put_escaped(d, &d->html, title, strlen(title));
    put(d, &d->html, "</title>\n<style>");
    put(d, &d->html, style);
    put(d, &d->html, "</style></head><body>\n<h1>");
    put_escaped(d, &d->html, title, strlen(title));
    put(d, &d->html, "</h1>\n");
}

void nbi_document_close(nbi_document *d)
{
    nbi_buf_free(&d->markdown);
    nbi_buf_free(&d->html);
}

void nbi_document_heading(nbi_document *d, const char *text)
{
    put(d, &d->markdown, "## ");
    put_escaped(d, &d->markdown, text, strlen(text));
    put(d, &d->markdown, "\n\n");
    put(d, &d->html, "<h2>");
    put_escaped(d, &d->html, text, strlen(text));
    put(d, &d->html, "</h2>\n");
}

void nbi_document_text(nbi_document *d, const char *fmt, ...)
{
    char line[LINE_MAX_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    put_escaped(d, &d->markdown, line, strlen(line));
    put(d, &d->markdown, "\n\n");
    put(d, &d->html, "<p>");
    put_escaped(d, &d->html, line, strlen(line));
    put(d, &d->html, "</p>\n");
}

/* ---------------------------------------------------------------- tables */

static void put_cells(nbi_document *d, const char *line, bool head)
{
    put(d, &d->markdown, "|");
    put(d, &d->html, "<tr>");
    uint32_t column = 0;
    for (const char *at = line; column < CELLS; column++) {
        size_t n = strcspn(at, "\t");
        if (head) d->right[column] = *at == '>';
        const char *cell = head && *at == '>' ? at + 1 : at;
        const size_t bytes = n - (size_t)(cell - at);
        put(d, &d->markdown, " ");
        put_escaped(d, &d->markdown, cell, bytes);
        put(d, &d->markdown, " |");
        put(d, &d->html, head ? "<th" : "<td");
        put(d, &d->html, d->right[column] ? " class=\"n\">" : ">");
        put_escaped(d, &d->html, cell, bytes);
        put(d, &d->html, head ? "</th>" : "</td>");
        if (!at[n]) break;
        at += n + 1;
    }
    put(d, &d->html, "</tr>\n");
    put(d, &d->markdown, "\n");
    if (!head) return;
    put(d, &d->markdown, "|");
    for (uint32_t i = 0; i <= column && i < CELLS; i++)
        put(d, &d->markdown, d->right[i] ? "---:|" : "---|");
    put(d, &d->markdown, "\n");
}

void nbi_document_table(nbi_document *d, const char *heads)
{
    put(d, &d->html, "<table>\n");
    put_cells(d, heads, true);
}

void nbi_document_row(nbi_document *d, const char *fmt, ...)
{
    char line[LINE_MAX_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    put_cells(d, line, false);
}

void nbi_document_table_end(nbi_document *d)
{
    put(d, &d->html, "</table>\n");
    put(d, &d->markdown, "\n");
}

/* ---------------------------------------------------------------- pictures, files */

static void write_file(nbi_document *d, const char *name, const char *ending, const nbi_buf *text)
{
    char file[128];
    snprintf(file, sizeof file, "%s.%s", name, ending);
    char *path = nbi_path_join(d->dir, file);
    if (!path)
        keep(d, NB_NO_MEMORY);
    else if (d->status == NB_OK)
        d->status = nbi_file_write(path, text->data, text->len, &d->err);
    nbi_free(path);
}

void nbi_document_picture(nbi_document *d, const char *name, const char *text, const nbi_buf *svg)
{
    if (d->status != NB_OK || !d->dir) return;
    const char *from = strstr(svg->data, "<svg"); /* the prologue is for a file of its own */
    put(d, &d->html, "<figure>\n");
    put(d, &d->html, from ? from : svg->data);
    put(d, &d->html, "</figure>\n");
    put(d, &d->markdown, "![");
    put_escaped(d, &d->markdown, text, strlen(text));
    put(d, &d->markdown, "](");
    put(d, &d->markdown, name);
    put(d, &d->markdown, ".svg)\n\n");
    write_file(d, name, "svg", svg);
}

nb_status nbi_document_write(nbi_document *d, const char *name, nb_error *err)
{
    put(d, &d->html, "</body></html>\n");
    if (d->status == NB_OK) write_file(d, name, "md", &d->markdown);
    if (d->status == NB_OK) write_file(d, name, "html", &d->html);
    if (d->status != NB_OK) return nbi_fail(err, d->status, "%s", d->err.text);
    return NB_OK;
}
