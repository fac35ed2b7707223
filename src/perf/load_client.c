/* libcurl's event interface over epoll. Its handles are kept for the next call, its connections for
 * the next exchange. Time is read once per block of bytes, before anything is done with them. */
#include "perf/load_client.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "perf/curl_api.h"

enum {
    EVENTS = 256,     /* of one epoll_wait */
    OTHER_FILES = 64, /* beside the streams */
    CONNECT_SECONDS = 30,
};

typedef struct slot {
    nbi_load_client *client;
    CURL *easy;
    nbi_load_call *call; /* NULL: free */
    char reason[CURL_ERROR_SIZE];
    struct slot *next_free, *next; /* `next`: of all */
} slot;

struct nbi_load_client {
    const nbi_curl *curl;
    CURLM *multi;
    int epoll;
    struct curl_slist *headers;
    nbi_load_client_options opt;
    slot *all, *free;
    uint64_t timer_ns; /* when libcurl wants to be called; UINT64_MAX: not */
    uint64_t idle_ns;
};

/* ---- what libcurl calls */

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *user, void *of_socket)
{
    (void)easy, (void)of_socket;
    nbi_load_client *c = user;
    struct epoll_event event = {.data.fd = fd};
    if (what == CURL_POLL_REMOVE) {
        epoll_ctl(c->epoll, EPOLL_CTL_DEL, fd, NULL); /* already closed: gone by itself */
        return 0;
    }
    if (what & CURL_POLL_IN) event.events |= EPOLLIN;
    if (what & CURL_POLL_OUT) event.events |= EPOLLOUT;
    if (epoll_ctl(c->epoll, EPOLL_CTL_MOD, fd, &event) == 0) return 0;
    return errno == ENOENT && epoll_ctl(c->epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : -1;
}

static int on_timer(CURLM *multi, long ms, void *user)
{
    (void)multi;
    nbi_load_client *c = user;
    c->timer_ns = ms < 0 ? UINT64_MAX : nbi_now_ns() + (uint64_t)ms * 1000000;
    return 0;
}

static size_t on_data(char *data, size_t size, size_t n, void *user)
{
    const uint64_t now = nbi_now_ns();
    slot *s = user;
    nbi_load_answer *a = &s->call->answer;
    if (!a->http) {
        long http = 0;
        char *type = NULL;
        s->client->curl->easy_getinfo(s->easy, CURLINFO_RESPONSE_CODE, &http);
        s->client->curl->easy_getinfo(s->easy, CURLINFO_CONTENT_TYPE, &type);
        a->http = (unsigned)http;
        a->sse = type && !strncmp(type, "text/event-stream", 17);
    }
    return nbi_load_answer_feed(a, data, size * n, now) ? size * n : 0;
}

/* ---- create, destroy */

static nb_status raise_files(uint32_t n_streams, nb_error *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return NB_OK;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return NB_OK;
    if (limit.rlim_max != RLIM_INFINITY && n_streams + (rlim_t)OTHER_FILES > limit.rlim_max)
        return nbi_fail(err, NB_TOO_LARGE,
                        "%u streams need as many open files, the limit of this process is %llu "
                        "(ulimit -n)",
                        n_streams, (unsigned long long)limit.rlim_max);
    return NB_OK;
}

static bool add_header(nbi_load_client *c, const char *text)
{
    struct curl_slist *list = c->curl->slist_append(c->headers, text);
    if (list) c->headers = list;
    return list != NULL;
}

static nb_status set_up(nbi_load_client *c, nb_error *err)
{
    const char *url = c->opt.base_url;
    if (strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0)
        return nbi_fail(err, NB_INVALID,
                        "the base URL is \"%s\"; expected http://HOST:PORT or https://...", url);
    NB_TRY(raise_files(c->opt.max_streams, err));
    char key[4096];
    c->epoll = epoll_create1(EPOLL_CLOEXEC);
    c->multi = c->curl->multi_init();
    /* No "Expect: 100-continue": it would put a round trip in front of long prompts. */
    bool ok = c->epoll >= 0 && c->multi && add_header(c, "Content-Type: application/json") &&
              add_header(c, "Expect:");
    if (ok && c->opt.api_key) {
        int n = snprintf(key, sizeof key, "Authorization: Bearer %s", c->opt.api_key);
        if (n < 0 || (size_t)n >= sizeof key)
            return nbi_fail(err, NB_TOO_LARGE, "the API key is longer than 4,000 bytes");
        ok = add_header(c, key);
    }
    if (!ok) return nbi_fail(err, NB_NO_MEMORY, "out of memory for the HTTP client");
    c->curl->multi_setopt(c->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    c->curl->multi_setopt(c->multi, CURLMOPT_SOCKETDATA, c);
    c->curl->multi_setopt(c->multi, CURLMOPT_TIMERFUNCTION, on_timer);
    c->curl->multi_setopt(c->multi, CURLMOPT_TIMERDATA, c);
    if (c->opt.max_streams)
        c->curl->multi_setopt(c->multi, CURLMOPT_MAXCONNECTS, (long)c->opt.max_streams + 1);
    return NB_OK;
}

nb_status nbi_load_client_create(nbi_load_client **out, const nbi_load_client_options *opt,
                                 nb_error *err)
{
    nb_status st;
    nbi_load_client *c = nbi_calloc(1, sizeof *c);
    if (!c) return nbi_fail(err, NB_NO_MEMORY, "out of memory for the HTTP client");
    c->epoll = -1;
    c->opt = *opt;
    c->timer_ns = UINT64_MAX;
    NB_TRY_OR(st, nbi_curl_load(&c->curl, err), fail);
    NB_TRY_OR(st, set_up(c, err), fail);
    *out = c;
    return NB_OK;
fail:
    nbi_load_client_destroy(&c);
    return st;
}

void nbi_load_client_destroy(nbi_load_client **client)
{
    nbi_load_client *c = *client;
    if (!c) return;
    while (c->all) {
        slot *s = c->all;
        c->all = s->next;
        if (s->call) c->curl->multi_remove_handle(c->multi, s->easy);
        c->curl->easy_cleanup(s->easy);
        nbi_free(s);
    }
    if (c->multi) c->curl->multi_cleanup(c->multi);
    if (c->headers) c->curl->slist_free_all(c->headers);
    if (c->epoll >= 0) close(c->epoll);
    nbi_free(c);
    *client = NULL;
}

/* ---- exchanges */

static slot *new_slot(nbi_load_client *c)
{
    slot *s = nbi_calloc(1, sizeof *s);
    CURL *easy = s ? c->curl->easy_init() : NULL;
    if (!easy) {
        nbi_free(s);
        return NULL;
    }
    const nbi_curl *curl = c->curl;
    *s = (slot){.client = c, .easy = easy, .next = c->all};
    c->all = s;
    curl->easy_setopt(easy, CURLOPT_HTTPHEADER, c->headers);
    curl->easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl->easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl->easy_setopt(easy, CURLOPT_NOPROXY, "*");
    curl->easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)(c->opt.timeout_s * 1000 + 0.5));
    curl->easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_SECONDS);
    curl->easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_data);
    curl->easy_setopt(easy, CURLOPT_WRITEDATA, s);
    curl->easy_setopt(easy, CURLOPT_ERRORBUFFER, s->reason);
    curl->easy_setopt(easy, CURLOPT_PRIVATE, s);
    if (c->opt.ca_file) curl->easy_setopt(easy, CURLOPT_CAINFO, c->opt.ca_file);
    if (c->opt.insecure) {
        curl->easy_setopt(easy, CURLOPT_SSL_VERIFYPEER, 0L);
        curl->easy_setopt(easy, CURLOPT_SSL_VERIFYHOST, 0L);
    }
    return s;
}

nb_status nbi_load_client_start(nbi_load_client *c, nbi_load_call *call, nb_error *err)
{
    const nbi_curl *curl = c->curl;
    slot *s = c->free ? c->free : new_slot(c);
    nbi_buf url = {0};
    if (!s || nbi_buf_addf(&url, "%s%s", c->opt.base_url, call->path) != NB_OK)
        return nbi_fail(err, NB_NO_MEMORY, "out of memory for a request");
    if (s == c->free) c->free = s->next_free;
    s->call = call;
    s->reason[0] = 0;
    call->over = false;
    call->answer = (nbi_load_answer){.raw = call->raw};
    curl->easy_setopt(s->easy, CURLOPT_URL, url.data); /* copied */
    nbi_buf_free(&url);
    if (call->body) {
        curl->easy_setopt(s->easy, CURLOPT_POSTFIELDS, call->body);
        curl->easy_setopt(s->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)call->body_bytes);
    } else {
        curl->easy_setopt(s->easy, CURLOPT_HTTPGET, 1L);
    }
    call->sent_ns = nbi_now_ns();
    if (curl->multi_add_handle(c->multi, s->easy) != CURLM_OK)
        return nbi_fail(err, NB_NO_MEMORY, "libcurl takes no more requests");
    /* It is sent now, not after the events that are already waiting. */
    int running;
    curl->multi_socket_action(c->multi, CURL_SOCKET_TIMEOUT, 0, &running);
    return NB_OK;
}

static nbi_load_failure failure_of(CURLcode code)
{
    switch (code) {
    case CURLE_OK: return NBI_LOAD_NONE;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_CONNECT_ERROR: return NBI_LOAD_CONNECT;
    case CURLE_OPERATION_TIMEDOUT: return NBI_LOAD_TIMEOUT;
    case CURLE_PARTIAL_FILE:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR: return NBI_LOAD_CUT;
    case CURLE_WEIRD_SERVER_REPLY:
    case CURLE_UNSUPPORTED_PROTOCOL: return NBI_LOAD_MALFORMED;
    default: return NBI_LOAD_OTHER;
    }
}

static void end_call(nbi_load_client *c, CURL *easy, CURLcode code)
{
    slot *s = NULL;
    char *private_data = NULL;
    long http = 0;
    c->curl->easy_getinfo(easy, CURLINFO_PRIVATE, &private_data);
    memcpy(&s, &private_data, sizeof s);
    c->curl->easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &http);
    c->curl->multi_remove_handle(c->multi, easy);
    nbi_load_call *call = s->call;
    call->answer.http = (unsigned)http;
    nbi_load_answer_end(&call->answer, failure_of(code),
                        s->reason[0] ? s->reason : c->curl->easy_strerror(code), nbi_now_ns());
    s->call = NULL;
    s->next_free = c->free;
    c->free = s;
    call->over = true;
    if (call->ended) call->ended(call, call->user);
}

/* Up to EVENTS sockets that have something; waits until `until_ns` when none has. */
static int wait_events(nbi_load_client *c, struct epoll_event *events, uint64_t until_ns)
{
    int n = epoll_wait(c->epoll, events, EVENTS, 0);
    const uint64_t begin = nbi_now_ns();
    if (n != 0 || begin >= until_ns) return n;
    uint64_t ns = until_ns - begin;
    if (ns > 1000000000) ns = 1000000000;
    struct timespec limit = {.tv_sec = (time_t)(ns / 1000000000),
                             .tv_nsec = (long)(ns % 1000000000)};
    struct pollfd pollfd = {.fd = c->epoll, .events = POLLIN};
    n = ppoll(&pollfd, 1, &limit, NULL); /* in nanoseconds, which epoll_wait() is not */
    c->idle_ns += nbi_now_ns() - begin;
    return n > 0 ? epoll_wait(c->epoll, events, EVENTS, 0) : n;
}

nb_status nbi_load_client_wait(nbi_load_client *c, uint64_t until_ns, nb_error *err)
{
    struct epoll_event events[EVENTS];
    int running, left;
    int n = wait_events(c, events, c->timer_ns < until_ns ? c->timer_ns : until_ns);
    if (n < 0 && errno != EINTR)
        return nbi_fail(err, NB_IO, "waiting for answers: %s", strerror(errno));
    for (int i = 0; i < n; i++) {
        int what = (events[i].events & EPOLLIN ? CURL_CSELECT_IN : 0) |
                   (events[i].events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
                   (events[i].events & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0);
        c->curl->multi_socket_action(c->multi, events[i].data.fd, what, &running);
    }
    if (nbi_now_ns() >= c->timer_ns) {
        c->timer_ns = UINT64_MAX;
        c->curl->multi_socket_action(c->multi, CURL_SOCKET_TIMEOUT, 0, &running);
    }
    for (CURLMsg *m; (m = c->curl->multi_info_read(c->multi, &left));)
        if (m->msg == CURLMSG_DONE) end_call(c, m->easy_handle, m->data.result);
    return NB_OK;
}

nb_status nbi_load_client_ask(nbi_load_client *c, nbi_load_call *call, nb_error *err)
{
    NB_TRY(nbi_load_client_start(c, call, err));
    while (!call->over) NB_TRY(nbi_load_client_wait(c, UINT64_MAX, err));
    return NB_OK;
}

nb_status nbi_load_client_fetch(nbi_load_client *c, nbi_load_call *call, json_t **out,
                                nb_error *err)
{
    call->raw = true;
    NB_TRY(nbi_load_client_ask(c, call, err));
    nbi_buf *body = &call->answer.body;
    json_t *json = NULL;
    if (!call->answer.failure && nbi_json_parse(&json, body->data, body->len, "", NULL) != NB_OK)
        json = NULL;
    nbi_buf_free(body);
    *out = json;
    return NB_OK;
}

uint64_t nbi_load_client_idle_ns(const nbi_load_client *c)
{
    return c->idle_ns;
}
