/* nibble chat: a conversation in the terminal, directly on the engine. Called by main.c.
 *
 * One line is one message. On a terminal the thinking is shown dimmed; into a pipe only answers are
 * written. Ctrl-C ends the answer that is being written, at the prompt it ends the program. */
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "cli/ranks.h"
#include "cli/run_options.h"
#include "server/served.h"

#define READ_MS    50 /* how long Ctrl-C may go unnoticed */
#define LINE_BYTES ((size_t)64 << 20)

static const nbi_command command = {
    .name = "chat",
    .summary = "Talks with a model in the terminal.",
    .usage = "[--model DIR] [OPTIONS]",
    .text = "Every line is a message. Lines that begin with / are commands:\n"
            "  /reset           forget the conversation\n"
            "  /think on|off    let the model think first, or not\n"
            "  /exit            leave (as does Ctrl-D)\n"
            "Ctrl-C ends an answer. When the output is no terminal only answers are written:\n\n"
            "Example: echo 'What is 3+5?' | nibble chat",
    .operands = "MODEL",
};

typedef enum shown { SHOWN_NOTHING, SHOWN_REASONING, SHOWN_CONTENT } shown;

typedef struct chat {
    nbi_run_options model;
    const char *system, *template_file, *parser;
    double temperature, top_p;
    uint64_t seed;
    uint32_t max_tokens;
    bool no_think, has_seed;

    nb_engine *engine;
    nb_engine_info info;
    nbi_served_text text;
    nbi_reasoning_kind reasoning;
    json_t *messages;
    int thinking; /* 1, 0; -1: as the template has it */
    bool in_tty, out_tty, err_tty;
} chat;

/* One answer while it is written. */
typedef struct answer {
    nbi_reasoning splitter;
    nbi_buf reasoning, content;
    shown shown;
    uint32_t n_tokens;
    uint64_t begin_ns, first_ns, end_ns;
} answer;

/* ---------------------------------------------------------------- Ctrl-C */

/* SIGINT is blocked in every thread, and let through by the main thread while it writes an answer
 * or waits for a line: one that comes in between waits too. */
static volatile sig_atomic_t interrupted;

static void on_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

static void mask_interrupts(int how)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    pthread_sigmask(how, &set, NULL);
}

static void catch_interrupts(void)
{
    struct sigaction action = {.sa_handler = on_interrupt};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
}

/* ---------------------------------------------------------------- output */

/* Control characters of a model must not steer the terminal. */
static void print_text(const chat *c, const char *s, size_t n)
{
    size_t done = 0;
    for (size_t i = 0; i < n && c->out_tty; i++) {
        unsigned char b = (unsigned char)s[i];
        if ((b >= 0x20 && b != 0x7f) || b == '\n' || b == '\t') continue;
        fwrite(s + done, 1, i - done, stdout);
        done = i + 1;
    }
    fwrite(s + done, 1, n - done, stdout);
}

static void show(const chat *c, answer *a, const nbi_span *span)
{
    bool reasoning = span->kind == NBI_SPAN_REASONING;
    if (reasoning && !c->out_tty) return;
    shown now = reasoning ? SHOWN_REASONING : SHOWN_CONTENT;
    if (a->shown != now && c->out_tty) {
        if (a->shown == SHOWN_REASONING) fputs("\x1b[0m\n", stdout);
        if (now == SHOWN_REASONING) fputs("\x1b[2m", stdout);
    }
    a->shown = now;
    print_text(c, span->text, span->n);
}

static void end_line(const chat *c, const answer *a)
{
    if (a->shown == SHOWN_REASONING && c->out_tty) fputs("\x1b[0m", stdout);
    fputc('\n', stdout);
    fflush(stdout);
}

static void print_speed(const chat *c, const answer *a, nb_finish finish)
{
    static const char *const ends[NB_FINISH_COUNT] = {
        [NB_FINISH_LENGTH] = ", cut at the length limit", [NB_FINISH_CANCELLED] = ", interrupted"};
    double first = (double)(a->first_ns - a->begin_ns) / 1e9;
    double rest = (double)(a->end_ns - a->first_ns) / 1e9;
    if (!a->n_tokens) return;
    fprintf(stderr, "%s%u tokens, first after %.2f s", c->err_tty ? "\x1b[2m" : "", a->n_tokens,
            first);
    if (a->n_tokens > 1 && rest > 0) fprintf(stderr, ", %.1f tokens/s", (a->n_tokens - 1) / rest);
    fprintf(stderr, "%s%s\n", ends[finish] ? ends[finish] : "", c->err_tty ? "\x1b[0m" : "");
}

/* ---------------------------------------------------------------- one answer */

static nb_status encode(const chat *c, nbi_chat_prompt *prompt, nb_error *err)
{
    nbi_chat_options options = {.reasoning = c->reasoning};
    json_t *kwargs =
        c->thinking < 0 ? json_object() : json_pack("{sb}", "enable_thinking", c->thinking);
    json_t *request =
        json_pack("{sO, so}", "messages", c->messages, "chat_template_kwargs", kwargs);
    if (!request) return nbi_fail(err, NB_NO_MEMORY, "no memory for the conversation");
    nb_status status =
        nbi_chat_encode(prompt, c->text.tmpl, c->text.tokenizer, request, &options, err);
    json_decref(request);
    return status;
}

static nb_status submit(const chat *c, nb_request **out, const nbi_chat_prompt *prompt,
                        nb_error *err)
{
    nb_request_options o = {.prompt = prompt->ids.data, .n_prompt = prompt->ids.len};
    nb_sampling_default(c->engine, &o.sampling);
    if (!isnan(c->temperature)) o.sampling.temperature = (float)c->temperature;
    if (!isnan(c->top_p)) o.sampling.top_p = (float)c->top_p;
    o.sampling.max_tokens = c->max_tokens;
    o.sampling.has_seed = c->has_seed;
    o.sampling.seed = c->seed;
    return nb_request_submit(out, c->engine, &o, err);
}

static nb_status take_spans(const chat *c, answer *a, const nbi_span *spans, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        nbi_buf *to = spans[i].kind == NBI_SPAN_REASONING ? &a->reasoning : &a->content;
        NB_TRY(nbi_buf_add(to, spans[i].text, spans[i].n));
        show(c, a, &spans[i]);
    }
    return NB_OK;
}

static nb_status take_event(const chat *c, answer *a, const nb_event *event)
{
    nbi_span spans[NBI_REASONING_SPANS_MAX];
    bool unclosed = false;
    if (event->id >= 0 && a->n_tokens++ == 0) a->first_ns = nbi_now_ns();
    size_t n = nbi_reasoning_push(&a->splitter, event->text, event->n_text, spans);
    NB_TRY(take_spans(c, a, spans, n));
    if (event->finish == NB_FINISH_NONE) return NB_OK;
    n = nbi_reasoning_finish(&a->splitter, event->finish == NB_FINISH_STOP, spans, &unclosed);
    NB_TRY(take_spans(c, a, spans, n));
    if (!unclosed || !a->reasoning.len) return NB_OK;
    nbi_span whole = {NBI_SPAN_CONTENT, a->reasoning.data, a->reasoning.len};
    return take_spans(c, a, &whole, 1);
}

/* Reads the request to its end. */
static nb_status follow(const chat *c, answer *a, nb_request *request, nb_finish *finish,
                        nb_error *err)
{
    for (;;) {
        nb_event event;
        if (interrupted) nb_request_cancel(request);
        nb_status status = nb_request_read(request, &event, READ_MS, err);
        if (status == NB_AGAIN) continue;
        if (status != NB_OK) return status;
        if (take_event(c, a, &event) != NB_OK)
            return nbi_fail(err, NB_NO_MEMORY, "no memory for the answer");
        if (c->out_tty) fflush(stdout);
        if (event.finish == NB_FINISH_NONE) continue;
        a->end_ns = nbi_now_ns();
        *finish = event.finish;
        if (event.finish != NB_FINISH_ERROR) return NB_OK;
        return nbi_fail(err, NB_INTERNAL, "%s", nb_request_error(request));
    }
}

static nb_status keep(chat *c, const answer *a, nb_error *err)
{
    json_t *message = json_pack("{ss, ss#}", "role", "assistant", "content",
                                a->content.len ? a->content.data : "", (int)a->content.len);
    if (message && a->reasoning.len) {
        json_object_set_new(message, "reasoning_content",
                            json_stringn(a->reasoning.data, a->reasoning.len));
    }
    if (message && json_array_append_new(c->messages, message) == 0) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY, "no memory for the conversation");
}

/* Answers the conversation as it stands; on failure it is as before. */
static nb_status reply(chat *c, nb_error *err)
{
    nbi_chat_prompt prompt = {0};
    nb_request *request = NULL;
    nb_finish finish = NB_FINISH_NONE;
    answer a = {.begin_ns = nbi_now_ns()};
    nb_status status;
    interrupted = 0;
    mask_interrupts(SIG_UNBLOCK);
    NB_TRY_OR(status, encode(c, &prompt, err), done);
    NB_TRY_OR(status, submit(c, &request, &prompt, err), done);
    nbi_reasoning_init(&a.splitter, c->reasoning, prompt.thinking_open);
    status = follow(c, &a, request, &finish, err);
    end_line(c, &a);
    if (status == NB_OK) status = keep(c, &a, err);
    if (status == NB_OK) print_speed(c, &a, finish);
done:
    mask_interrupts(SIG_BLOCK);
    interrupted = 0;
    nb_request_close(&request);
    nbi_chat_prompt_free(&prompt);
    nbi_buf_free(&a.reasoning);
    nbi_buf_free(&a.content);
    return status;
}

/* ---------------------------------------------------------------- lines */

/* Appends what standard input has to *in; false at its end or on Ctrl-C. */
static bool read_more(nbi_buf *in)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    sigset_t waiting;
    char piece[4096];
    pthread_sigmask(SIG_BLOCK, NULL, &waiting);
    sigdelset(&waiting, SIGINT);
    for (;;) {
        int ready = ppoll(&input, 1, NULL, &waiting);
        if (interrupted) return false;
        if (ready < 0 && errno == EINTR) continue;
        ssize_t n = read(STDIN_FILENO, piece, sizeof piece);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        return n > 0 && nbi_buf_add(in, piece, (size_t)n) == NB_OK;
    }
}

/* The next line without its end, until the next call; NULL at the end. *taken bytes of *in were of
 * the line before. */
static char *next_line(nbi_buf *in, size_t *taken, size_t *n)
{
    size_t seen = 0;
    char *end = NULL;
    if (*taken) memmove(in->data, in->data + *taken, in->len -= *taken);
    *taken = 0;
    while (in->len == seen || !(end = memchr(in->data + seen, '\n', in->len - seen))) {
        seen = in->len;
        if (read_more(in)) continue;
        if (interrupted || in->len == 0) return NULL;
        end = in->data + in->len; /* a last line without a line feed */
        break;
    }
    *n = (size_t)(end - in->data);
    *taken = *n < in->len ? *n + 1 : *n;
    if (*n && in->data[*n - 1] == '\r') --*n;
    in->data[*n] = '\0';
    return in->data;
}

static nb_status reset(chat *c, nb_error *err)
{
    json_array_clear(c->messages);
    if (!c->system) return NB_OK;
    json_t *message = json_pack("{ss, ss}", "role", "system", "content", c->system);
    if (message && json_array_append_new(c->messages, message) == 0) return NB_OK;
    return nbi_fail(err, NB_INVALID, "--system is not valid UTF-8");
}

/* Returns false for the command that ends the program. */
static bool take_command(chat *c, const char *line, nb_error *err)
{
    if (strcmp(line, "/exit") == 0 || strcmp(line, "/quit") == 0) return false;
    if (strcmp(line, "/reset") == 0) {
        reset(c, err); /* worked at the start */
        fputs("(the conversation is forgotten)\n", stderr);
    } else if (strcmp(line, "/think on") == 0 || strcmp(line, "/think off") == 0) {
        c->thinking = strcmp(line, "/think on") == 0;
        fprintf(stderr, "(thinking is %s)\n", line + strlen("/think "));
    } else {
        fputs("(commands: /reset, /think on, /think off, /exit)\n", stderr);
    }
    return true;
}

static void take_message(chat *c, const char *line, size_t n, nb_error *err)
{
    json_t *message = json_pack("{ss, ss#}", "role", "user", "content", line, (int)n);
    if (!message || json_array_append_new(c->messages, message) != 0) {
        fputs("nibble chat: the line is not valid UTF-8\n", stderr);
        return;
    }
    if (reply(c, err) == NB_OK) return;
    fflush(stdout);
    fprintf(stderr, "nibble chat: %s\n", err->text);
    json_array_remove(c->messages, json_array_size(c->messages) - 1);
}

/* Reads lines until the end. Returns the exit status: a failed answer in a pipe is a failure. */
static int converse(chat *c)
{
    nbi_buf in = {.max = LINE_BYTES};
    size_t taken = 0, n;
    int status = NBI_EXIT_OK;
    for (;;) {
        nb_error err = {0};
        if (c->in_tty && c->out_tty) fputs("> ", stdout);
        fflush(stdout);
        char *line = next_line(&in, &taken, &n);
        if (!line) break; /* the end, or Ctrl-C */
        if (n == 0) continue;
        if (line[0] == '/') {
            if (!take_command(c, line, &err)) break;
            continue;
        }
        take_message(c, line, n, &err);
        if (err.status != NB_OK && !c->in_tty) status = NBI_EXIT_FAILED;
    }
    if (c->in_tty && c->out_tty) fputc('\n', stdout);
    nbi_buf_free(&in);
    return status;
}

/* ---------------------------------------------------------------- start */

static nb_status load(chat *c, nb_error *err)
{
    nbi_cli_progress progress = {.label = "loading"};
    c->model.engine.progress = nbi_cli_show_progress;
    c->model.engine.progress_user = &progress;
    c->model.engine.max_running = 1;
    NB_TRY(nbi_served_text_open(&c->text, c->model.model, c->template_file, err));
    if (!c->text.tmpl) return nbi_fail(err, NB_UNSUPPORTED, "no chat: %s", c->text.why);
    NB_TRY(nb_engine_open(&c->engine, &c->model.engine, err));
    nb_engine_get_info(c->engine, &c->info);
    c->reasoning = nbi_reasoning_of_family(c->info.family);
    if (strcmp(c->parser, "auto") != 0) {
        NB_TRY(nbi_reasoning_by_name(&c->reasoning, c->parser, err));
    }
    return nb_engine_start(c->engine, err);
}

static int run(chat *c)
{
    nb_error err = {0};
    int status = NBI_EXIT_FAILED;
    c->thinking = c->no_think ? 0 : -1;
    c->in_tty = isatty(STDIN_FILENO);
    c->out_tty = isatty(STDOUT_FILENO);
    c->err_tty = isatty(STDERR_FILENO);
    c->messages = json_array();
    mask_interrupts(SIG_BLOCK); /* for the engine's threads too */
    catch_interrupts();
    if (!c->messages || reset(c, &err) != NB_OK || load(c, &err) != NB_OK) {
        status = nbi_cli_fail(&command, &err);
    } else {
        if (c->in_tty && c->err_tty) {
            fprintf(stderr,
                    "\x1b[2m%s on %s. /exit or Ctrl-D ends, Ctrl-C stops an answer.\x1b[0m\n",
                    c->info.model_name, c->info.device);
        }
        status = converse(c);
    }
    nb_engine_close(&c->engine);
    nbi_served_text_close(&c->text);
    json_decref(c->messages);
    return status;
}

static int apply(chat *c, int n_operands, char **argv)
{
    if (n_operands > 1) return nbi_cli_usage(&command, "more than one MODEL");
    if (n_operands && c->model.model) return nbi_cli_usage(&command, "the model is named twice");
    if (n_operands) c->model.model = argv[1];
    c->has_seed = c->seed != UINT64_MAX;
    return nbi_run_options_apply(&c->model, &command);
}

int nbi_cmd_chat(int argc, char **argv)
{
    chat c = {.parser = "auto", .temperature = NAN, .top_p = NAN, .seed = UINT64_MAX};
    int n_operands = 0;
    nbi_run_options_init(&c.model, "warn");
    nbi_ranks_options ranks = {0};
    nbi_comm *comm = NULL;
    char **kept = nbi_ranks_keep(argc, argv);
    const nbi_opt options[] = {
        NBI_RUN_OPTION_ROWS(&c.model),
        NBI_RANKS_OPTION_ROWS(&ranks),
        {"system", NBI_OPT_STRING, &c.system, "TEXT", "a system message to begin with", false},
        {"temperature", NBI_OPT_F64, &c.temperature, "T", "default: the model's; 0: greedy", false},
        {"top-p", NBI_OPT_F64, &c.top_p, "P", "default: the model's", false},
        {"seed", NBI_OPT_U64, &c.seed, "N", "default: another one for every answer", false},
        {"max-tokens", NBI_OPT_U32, &c.max_tokens, "N",
         "of an answer (default: until the context is full)", false},
        {"no-think", NBI_OPT_FLAG, &c.no_think, NULL, "begin with /think off", false},
        {"chat-template", NBI_OPT_STRING, &c.template_file, "FILE",
         "Jinja file instead of the checkpoint's", false},
        {"reasoning-parser", NBI_OPT_STRING, &c.parser, "NAME",
         "auto (default), none, glm45, deepseek-r1, qwen3", false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, &n_operands);
    if (status < 0) status = nbi_ranks_enter(&comm, &ranks, &command, kept, true);
    if (status < 0) status = apply(&c, n_operands, argv);
    nbi_ranks_apply(comm, &ranks, &c.model.engine);
    if (status < 0 && nbi_ranks_follows(comm)) {
        c.model.engine.max_running = 1;
        status = nbi_ranks_follow(comm, &c.model.engine);
    } else if (status < 0) {
        status = run(&c);
        nbi_comm_close(&comm);
    }
    nbi_free(kept);
    nbi_run_options_free(&c.model);
    return status;
}
