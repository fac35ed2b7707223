/* What tools/bench/request_cost.py times: completions of one token, by turns of TURN through the
 * server, from an engine that the caller steps, and from an engine with a thread of its own. One
 * process and one clock for all. Within a turn each has the caches to itself, as in use; a turn is
 * short, so that all meet the same state of the machine.
 *
 *     request_cost PORT MODEL THREADS REQUESTS PROMPT
 *
 * One line per request: nanoseconds of the three, and of `GET /v1/models`. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nibble.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define TURN 20

static _Noreturn void fail(const char *what, const char *why)
{
    fprintf(stderr, "request_cost: %s: %s\n", what, why);
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int dial(int port)
{
    const int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to))
        fail("connect", "no server there");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

/* Sends the request and reads the whole reply, by its Content-Length. */
static uint64_t through_server(int fd, const char *request, size_t n, const char *expected)
{
    char reply[16384];
    size_t got = 0, want = 0;
    const uint64_t begin = now_ns();
    if (write(fd, request, n) != (ssize_t)n) fail("write", "not all of the request was taken");
    while (!want || got < want) {
        const ssize_t more = read(fd, reply + got, sizeof reply - 1 - got);
        if (more <= 0) fail("read", "the reply was cut");
        got += (size_t)more;
        reply[got] = 0;
        const char *end = strstr(reply, "\r\n\r\n"), *length = strstr(reply, "Content-Length: ");
        if (!want && end && length)
            want = (size_t)(end + 4 - reply) + strtoul(length + 16, NULL, 10);
    }
    const uint64_t end = now_ns();
    if (!strstr(reply, " 200 ") || !strstr(reply, expected)) fail("reply", reply);
    return end - begin;
}

static uint64_t through_engine(nb_engine *engine, const nb_request_options *options, bool step)
{
    nb_error error;
    nb_request *request;
    nb_event event;
    bool worked;
    const uint64_t begin = now_ns();
    if (nb_request_submit(&request, engine, options, &error)) fail("submit", error.text);
    do {
        if (step && nb_engine_step(engine, &worked, &error)) fail("step", error.text);
        if (nb_request_read(request, &event, step ? 0 : -1, &error) < 0) fail("read", error.text);
    } while (event.finish == NB_FINISH_NONE);
    const uint64_t end = now_ns();
    if (event.finish != NB_FINISH_LENGTH) fail("engine", "the answer did not end by its length");
    nb_request_close(&request);
    if (step && nb_engine_step(engine, &worked, &error)) fail("step", error.text);
    return end - begin;
}

static nb_engine *open_engine(const char *model, int threads)
{
    nb_engine_options options;
    nb_engine *engine;
    nb_error error;
    nb_engine_options_default(&options);
    options.model_dir = model;
    options.device = "cpu";
    options.n_threads = (uint32_t)threads;
    if (nb_engine_open(&engine, &options, &error)) fail(model, error.text);
    return engine;
}

int main(int argc, char **argv)
{
    if (argc != 6) fail("arguments", "PORT MODEL THREADS REQUESTS PROMPT");
    const char *prompt = argv[5];
    nb_engine *stepped = open_engine(argv[2], atoi(argv[3])),
              *started = open_engine(argv[2], atoi(argv[3]));
    nb_error error;
    if (nb_engine_start(started, &error)) fail("start", error.text);

    nb_request_options options = {.priority = 0};
    int32_t *ids;
    if (nb_tokenize(stepped, prompt, strlen(prompt), false, 0, &ids, &options.n_prompt, &error))
        fail("prompt", error.text);
    options.prompt = ids;
    nb_sampling_default(stepped, &options.sampling);
    options.sampling.temperature = 0;
    options.sampling.max_tokens = 1;
    options.sampling.ignore_eos = true;

    char body[2048], request[4096];
    const int n_body = snprintf(
        body, sizeof body,
        "{\"prompt\": \"%s\", \"max_tokens\": 1, \"temperature\": 0, \"ignore_eos\": true}",
        prompt);
    const int n = snprintf(request, sizeof request,
                           "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                           "application/json\r\nContent-Length: %d\r\n\r\n%s",
                           n_body, body);
    if (n_body >= (int)sizeof body || n >= (int)sizeof request) fail("prompt", "too long");
    const char *get = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n";
    const int fd = dial(atoi(argv[1]));
    for (int turn = -2; turn * TURN < atoi(argv[4]); turn++) { /* the first ones only warm up */
        uint64_t server[TURN], alone[TURN], thread[TURN], http[TURN];
        for (int i = 0; i < TURN; i++)
            http[i] = through_server(fd, get, strlen(get), "\"object\":\"list\"");
        for (int i = 0; i < TURN; i++)
            server[i] = through_server(fd, request, (size_t)n, "\"completion_tokens\":1");
        for (int i = 0; i < TURN; i++) alone[i] = through_engine(stepped, &options, true);
        for (int i = 0; i < TURN; i++) thread[i] = through_engine(started, &options, false);
        for (int i = 0; i < TURN && turn >= 0; i++)
            printf("%lu %lu %lu %lu\n", (unsigned long)server[i], (unsigned long)alone[i],
                   (unsigned long)thread[i], (unsigned long)http[i]);
    }
    close(fd);
    nb_free(ids);
    nb_engine_close(&stepped);
    nb_engine_close(&started);
}
