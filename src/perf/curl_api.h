/* The functions of libcurl that the load client calls, found at run time: only `nibble bench serve`
 * pays for the thirty libraries that libcurl brings, neither the server nor libnibble.so. */
#pragma once

#include <curl/curl.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_curl {
    CURLcode (*global_init)(long flags);
    curl_version_info_data *(*version_info)(CURLversion age);
    CURL *(*easy_init)(void);
    void (*easy_cleanup)(CURL *easy);
    CURLcode (*easy_setopt)(CURL *easy, CURLoption option, ...);
    CURLcode (*easy_getinfo)(CURL *easy, CURLINFO info, ...);
    const char *(*easy_strerror)(CURLcode code);
    struct curl_slist *(*slist_append)(struct curl_slist *list, const char *text);
    void (*slist_free_all)(struct curl_slist *list);
    CURLM *(*multi_init)(void);
    CURLMcode (*multi_cleanup)(CURLM *multi);
    CURLMcode (*multi_setopt)(CURLM *multi, CURLMoption option, ...);
    CURLMcode (*multi_add_handle)(CURLM *multi, CURL *easy);
    CURLMcode (*multi_remove_handle)(CURLM *multi, CURL *easy);
    CURLMcode (*multi_socket_action)(CURLM *multi, curl_socket_t s, int events, int *running);
    CURLMsg *(*multi_info_read)(CURLM *multi, int *left);
} nbi_curl;

/* Loads the library once per process; it stays. NB_UNSUPPORTED says what to install. Not for
 * several threads at a time. */
nb_status nbi_curl_load(const nbi_curl **out, nb_error *err);

#ifdef __cplusplus
}
#endif
