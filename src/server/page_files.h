/* The files of the web page that the build makes of src/server/page. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Each [.._bytes]. */
extern const unsigned char nbi_page_html[], nbi_page_css[], nbi_page_page_js[], nbi_page_chat_js[],
    nbi_page_live_js[], nbi_page_charts_js[], nbi_page_server_js[], nbi_page_base_js[];
extern const size_t nbi_page_html_bytes, nbi_page_css_bytes, nbi_page_page_js_bytes,
    nbi_page_chat_js_bytes, nbi_page_live_js_bytes, nbi_page_charts_js_bytes,
    nbi_page_server_js_bytes, nbi_page_base_js_bytes;

#ifdef __cplusplus
}
#endif
