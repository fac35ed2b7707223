/* The files of the web page and the tail of the log (see page.h). Called by http.c and exchange.c.
 */
#include "server/page.h"

#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "server/page_files.h"

#define JAVASCRIPT "text/javascript; charset=utf-8"

static const struct file {
    const char *name, *type;
    const unsigned char *bytes; /* [*n] */
    const size_t *n;
} files[] = {
    {"", "text/html; charset=utf-8", nbi_page_html, &nbi_page_html_bytes},
    {"page.css", "text/css; charset=utf-8", nbi_page_css, &nbi_page_css_bytes},
    {"page.js", JAVASCRIPT, nbi_page_page_js, &nbi_page_page_js_bytes},
    {"chat.js", JAVASCRIPT, nbi_page_chat_js, &nbi_page_chat_js_bytes},
    {"live.js", JAVASCRIPT, nbi_page_live_js, &nbi_page_live_js_bytes},
    {"charts.js", JAVASCRIPT, nbi_page_charts_js, &nbi_page_charts_js_bytes},
    {"server.js", JAVASCRIPT, nbi_page_server_js, &nbi_page_server_js_bytes},
    {"base.js", JAVASCRIPT, nbi_page_base_js, &nbi_page_base_js_bytes},
};

/* Scripts and styles come from files of this server alone, a text never becomes markup or code
 * (trusted types), nobody may frame the page. */
static const char *const headers[][2] = {
    {"Content-Security-Policy",
     "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
     "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
     "require-trusted-types-for 'script'; trusted-types 'none'"},
    {"X-Content-Type-Options", "nosniff"},
    {"Referrer-Policy", "no-referrer"},
    {"Cross-Origin-Resource-Policy", "same-origin"},
    {"Cache-Control", "no-cache"},
};

void nbi_page_add_headers(struct MHD_Response *response)
{
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        MHD_add_response_header(response, headers[i][0], headers[i][1]);
    }
}

static unsigned no_memory(nbi_exchange *ex)
{
    ex->content_type = NULL;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}

static unsigned send_file(nbi_exchange *ex, const char *name, nbi_buf *out)
{
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        if (strcmp(files[i].name, name) != 0) continue;
        ex->content_type = files[i].type;
        return nbi_buf_add(out, files[i].bytes, *files[i].n) == NB_OK ? 200 : no_memory(ex);
    }
    nbi_api_fail(&ex->error, 404, "unknown_url", NULL, "there is no /ui/%.100s here", name);
    return 0;
}

unsigned nbi_get_page(nbi_exchange *ex, nbi_buf *out)
{
    return send_file(ex, "", out);
}

unsigned nbi_get_page_file(nbi_exchange *ex, nbi_buf *out)
{
    return send_file(ex, ex->rest, out);
}

/* ---------------------------------------------------------------- the log */

static nb_status write_line(const nbi_log_line *line, bool first, nbi_buf *out)
{
    static const char *const levels[NB_LOG_COUNT] = {"error", "warning", "info", "debug"};
    NB_TRY(nbi_buf_addf(
        out, "%s{\"n\":%llu,\"time\":%llu.%03u,\"level\":\"%s\",\"text\":", first ? "" : ",",
        (unsigned long long)line->n, (unsigned long long)(line->unix_ms / 1000),
        (unsigned)(line->unix_ms % 1000), levels[line->level]));
    NB_TRY(nbi_json_quote(out, line->text, strlen(line->text)));
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_log(nbi_buf *out)
{
    nbi_log_line line;
    NB_TRY(nbi_buf_addf(out, "{\"lines\":["));
    for (uint64_t n = 0; nbi_log_tail(n, &line); n = line.n + 1) {
        NB_TRY(write_line(&line, n == 0, out));
    }
    return nbi_buf_addf(out, "]}");
}

unsigned nbi_get_page_log(nbi_exchange *ex, nbi_buf *out)
{
    return write_log(out) == NB_OK ? 200 : no_memory(ex);
}
