/* Options as a JSON object: what /server_info shows. Called by cmd_serve.c. */
#include <string.h>

#include "base/json.h"
#include "cli/cli.h"

/* Keys are not shown. */
static bool is_secret(const char *name)
{
    const char *key = strstr(name, "key");
    return key && (key == name || key[-1] == '-');
}

/* "max-body-bytes" as "max_body_bytes". */
static nb_status write_name(const char *name, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "\"", 1));
    for (const char *s = name; *s; s++) NB_TRY(nbi_buf_add(out, *s == '-' ? "_" : s, 1));
    return nbi_buf_add(out, "\":", 2);
}

static nb_status write_string(const char *s, nbi_buf *out)
{
    return s ? nbi_json_quote(out, s, strlen(s)) : nbi_buf_add(out, "null", 4);
}

static nb_status write_list(const nbi_opt_list *list, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "[", 1));
    for (size_t i = 0; i < list->n; i++) {
        if (i) NB_TRY(nbi_buf_add(out, ",", 1));
        NB_TRY(write_string(list->items[i], out));
    }
    return nbi_buf_add(out, "]", 1);
}

static nb_status write_value(const nbi_opt *o, nbi_buf *out)
{
    switch (o->kind) {
    case NBI_OPT_FLAG: return nbi_buf_addf(out, *(const bool *)o->out ? "true" : "false");
    case NBI_OPT_STRING: return write_string(*(const char *const *)o->out, out);
    case NBI_OPT_LIST: return write_list(o->out, out);
    case NBI_OPT_U32: return nbi_buf_addf(out, "%u", *(const uint32_t *)o->out);
    case NBI_OPT_U64:
    case NBI_OPT_BYTES:
        return nbi_buf_addf(out, "%llu", (unsigned long long)*(const uint64_t *)o->out);
    case NBI_OPT_F64: return nbi_buf_addf(out, "%.17g", *(const double *)o->out);
    }
    return NB_INTERNAL;
}

nb_status nbi_cli_options_json(const nbi_opt *options, nbi_buf *out)
{
    bool first = true;
    NB_TRY(nbi_buf_add(out, "{", 1));
    for (const nbi_opt *o = options; o->name; o++) {
        if (is_secret(o->name)) continue;
        if (!first) NB_TRY(nbi_buf_add(out, ",", 1));
        first = false;
        NB_TRY(write_name(o->name, out));
        NB_TRY(write_value(o, out));
    }
    return nbi_buf_add(out, "}", 1);
}
