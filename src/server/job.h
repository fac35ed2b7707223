/* One API request from its JSON body to its last byte: parse, validate, submit, stream.
 *
 * A job knows no HTTP: it takes a body, and gives either one JSON reply or SSE events. What differs
 * between API surfaces is a table of functions (nbi_surface); one file per surface fills it.
 *
 * Threads: one thread at a time works on a job; its hooks come from other threads, and
 * nbi_job_cancel() may be called from any thread. */
#pragma once

#include <stdatomic.h>

#include "server/answer.h"
#include "server/logprobs.h"
#include "server/sampling_params.h"
#include "server/served.h"
#include "server/structured.h"
#include "text/reasoning.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_job nbi_job;

#define NBI_NAME_BYTES_MAX 256 /* what a client may call a request */

/* One prompt; `ids` and `text` live in the job's arena. */
typedef struct nbi_prompt {
    const int32_t *ids; /* [n_ids] */
    size_t n_ids;
    const char *text; /* [n_text] what echo or return_prompt_text shows; NULL without either */
    size_t n_text;
    uint64_t cache_salt; /* as in nb_request_options */
} nbi_prompt;

/* How a job says that nbi_job_pump() has something to do. Neither may block. */
typedef struct nbi_job_hooks {
    void (*notify)(void *user); /* from any thread */
    void (*event)(void *user);  /* from the engine's, whose nb_engine_on_step() function follows */
    void *user;
    uint64_t client; /* nb_request_options.client */
} nbi_job_hooks;

/* One answer. In a stream the buffers hold what was not sent yet, else all of it. */
typedef struct nbi_choice {
    /* Touched for every piece of a stream, the first line by the engine's thread too. */
    nbi_job *job;
    void (*event)(void *user); /* the job's hook */
    void *event_user;
    atomic_bool signalled; /* the engine has said that something can be read */
    atomic_bool done;
    bool opened; /* stream: the first event was written */
    bool has_reasoning;
    nb_finish finish;
    uint32_t index, prompt;
    nb_request *request;
    uint32_t n_tokens, n_reasoning; /* the second counts only when has_reasoning */
    nbi_buf text;                   /* completions */
    nbi_buf lead;           /* what all its events begin with; empty until the first is written */
    nbi_buf ids;            /* of the answer, "1,2,3"; only where surface or client ask for them */
    nbi_reasoning splitter; /* chat: reasoning and content */
    nbi_answer answer;      /* chat */
    nbi_logprobs logprobs;

    nbi_logprobs prompt_logprobs;
    nbi_logprobs native;                /* the answer's once more, for params.return_meta */
    nbi_grammar *grammar;               /* of the job's constraint */
    int32_t matched_id, matched_string; /* as in nb_event */
    uint32_t n_shown;                   /* stream: of n_tokens, in events */
    uint32_t n_prompt_seen;             /* prompt tokens whose log-probability was looked at */
    double sum_logprob;                 /* of the answer; to rank by */
    bool outranked;                     /* left out of the reply */
    atomic_bool was_aborted;            /* by nbi_job_abort() */
    size_t n_chars; /* characters of prompt (with echo) and answer so far, for text offsets */
    nbi_buf whole;  /* the text of all events, for the log; empty unless served->keep_text */
} nbi_choice;

/* What an API surface decides. */
typedef struct nbi_surface {
    const char *id_prefix;    /* "chatcmpl-" */
    const char *object;       /* of the whole reply */
    const char *chunk_object; /* of a stream's events */
    const char *prompt_field; /* what errors about a prompt's length name; NULL: "prompt" */
    bool count_only;          /* nothing is generated: the reply follows from the prompts */
    bool ranks;               /* best_of may be more than n */
    bool beams;               /* searches with beams */
    bool ranked_as_one;       /* streamed, ranked answers are one event: the whole reply */
    bool keeps_ids;
    bool shows_abort; /* an aborted answer is a reply with this finish, not an error */
    bool bodyless;    /* GET as well as POST, and no body is read; errors are 503 */
    nbi_logprob_shape logprob_shape, prompt_logprob_shape;
    /* Reads and checks the body into job->params, job->echo, job->chat. Pure. */
    nb_status (*read)(nbi_job *job, const json_t *body, nbi_api_error *e);
    /* Fills job->prompts: renders and tokenises. */
    nb_status (*encode)(nbi_job *job, const json_t *body, nbi_api_error *e);
    /* Prepares a choice before its request is submitted. */
    nb_status (*begin)(nbi_job *job, nbi_choice *choice);
    /* Takes the text of an event that has some, or is the last. */
    nb_status (*take)(nbi_job *job, nbi_choice *choice, const nb_event *event);
    /* Appends stream events for what is waiting in the choice, and empties it. */
    nb_status (*write_delta)(nbi_job *job, nbi_choice *choice, nbi_buf *out);
    /* Appends the choice's object of the whole reply. */
    nb_status (*write_choice)(nbi_job *job, nbi_choice *choice, nbi_buf *out);
    /* Optional: called about once a second while the job waits; may fail or finish it. */
    void (*tick)(nbi_job *job);
    /* Optional: the whole reply, instead of OpenAI's list of choices. */
    nb_status (*write_reply)(nbi_job *job, nbi_buf *out);
    /* Optional: further members behind the choices and the usage. */
    nb_status (*write_extra)(nbi_job *job, nbi_buf *out);
    /* Optional: the last events of a stream (job->error may be set), instead of [DONE]. */
    nb_status (*write_end)(nbi_job *job, nbi_buf *out);
    /* Optional: the body of an error, instead of OpenAI's. */
    nb_status (*write_error)(nbi_buf *out, const nbi_api_error *e);
} nbi_surface;

extern const nbi_surface nbi_surface_completions;
extern const nbi_surface nbi_surface_chat;
extern const nbi_surface nbi_surface_responses;
extern const nbi_surface nbi_surface_messages;     /* Anthropic's */
extern const nbi_surface nbi_surface_count_tokens; /* Anthropic's */
extern const nbi_surface nbi_surface_generate;     /* SGLang's */
extern const nbi_surface nbi_surface_tokenize;     /* vLLM's */
extern const nbi_surface nbi_surface_detokenize;   /* vLLM's */
extern const nbi_surface nbi_surface_health;       /* /health_generate */

struct nbi_job {
    /* Touched for every piece of a stream: up to error.http, and the first lines of params. */
    const nbi_surface *surface;
    const nbi_served *served; /* the model; outlives the job */
    nbi_choice *choices;      /* [n_choices] choice c answers prompt c / per_prompt */
    uint32_t n_choices, n_done;
    nbi_grammar_order *order; /* grammars being compiled; NULL: none */
    nbi_buf head;             /* {"id":...,"choices":[ */
    bool echo;                /* completions: the prompt is part of the text */
    bool separate_reasoning;  /* chat: false leaves the thinking in the content */
    bool include_reasoning;   /* chat: false drops it */
    bool ended;               /* stream: the last event was written */
    bool cut;                 /* stream: or could not be; what was sent must not look complete */
    atomic_bool submitted;    /* choices[].request are written */
    uint32_t per_prompt;      /* answers computed for every prompt */
    nbi_api_error error;      /* http != 0: the job has failed */
    nbi_params params;

    const nbi_api_facts *facts; /* the model's, for validation */
    nbi_arena arena;            /* prompts, stop strings */
    const char *echo_text;      /* chat: the content begins with it, in the arena; NULL: none */
    bool whole_reasoning;       /* chat: it is one event of a stream */
    json_t *chat;               /* chat: what nbi_chat_encode() takes; until it is encoded */
    bool starts_in_reasoning;   /* chat: the prompt has opened the thinking */
    bool thinking_closed;       /* chat: or closed it */
    json_t *tools;              /* chat: those that may be called; NULL: none */
    bool one_call;              /* chat: calls after the first are left out */
    bool forced_calls; /* chat: the answer is the JSON list of calls that a grammar makes */
    nbi_constraint constraint;
    void *state; /* of the surface, in the arena */
    char id[NBI_ID_BYTES];
    const char *name;         /* what the client calls the request, in the arena; NULL: nothing */
    bool name_is_id;          /* and wants it called in the reply */
    const char *const *names; /* [n_prompts] the same for every prompt; NULL: nothing */
    int64_t created;          /* seconds since 1970 */
    uint64_t begin_ns;        /* on the clock of nbi_now_ns() */
    nb_count count;           /* what the engine's counters take of it */
    const char *prompt_field; /* what errors about a prompt name; NULL: the surface's. Static */
    nbi_prompt *prompts;      /* [n_prompts], in the arena */
    uint32_t n_prompts;
    nbi_job_hooks hooks;
};

/* Parses, validates, encodes and submits. On failure *e is filled and *out untouched. `body` is
 * read, and rewritten where messages are normalised; it is not kept. */
nb_status nbi_job_open(nbi_job **out, const nbi_surface *surface, const nbi_served *served,
                       json_t *body, const nbi_job_hooks *hooks, nbi_api_error *e);

/* Is a grammar still being compiled? Until it is there the job may fail with a status of its own,
 * and a stream has not begun; notify says when to pump. */
bool nbi_job_is_pending(const nbi_job *job);

/* nbi_job_pump() will be called soon: asks for memory, `steps` from 4 to 1 as in
 * nbi_exchange_prefetch(). */
void nbi_job_prefetch(const nbi_job *job, uint32_t steps);

/* Reads what the engine has ready. With params.stream, appends events to *out; the last of them is
 * [DONE]. Failures end up in job->error (and, in a stream, in an error event). */
void nbi_job_pump(nbi_job *job, nbi_buf *out);

/* Nothing more will come: every choice is done, or the job failed. */
bool nbi_job_finished(const nbi_job *job);

/* Appends the JSON of a finished job that is not a stream; false, with job->error filled, when it
 * failed. */
bool nbi_job_reply(nbi_job *job, nbi_buf *out);

/* From any thread, until nbi_job_close(). A job that is pending has nothing to cancel. */
void nbi_job_cancel(nbi_job *job);

/* Ends the answers whose request is called `id` (by the client, or in replies), all of them with
 * NULL; returns how many were still running. Thread rule of nbi_job_cancel(). */
uint32_t nbi_job_abort(nbi_job *job, const char *id);

/* Fails the job with this error; its stream ends with it. */
void nbi_job_fail(nbi_job *job, const nbi_api_error *e);

void nbi_job_close(nbi_job **job);

/* ---- shared by the surfaces */

/* A name that a client gives a request, checked, into the arena. */
nb_status nbi_job_keep_name(nbi_job *job, const char **out, const json_t *value, const char *param,
                            nbi_api_error *e);

/* `,"usage":{...}`; choice NULL: of the whole job. */
nb_status nbi_job_write_usage(const nbi_job *job, const nbi_choice *choice, nbi_buf *out);
/* `,"token_ids":[...]` where they are asked for, emptying the choice's. */
nb_status nbi_job_write_ids(const nbi_job *job, nbi_choice *choice, nbi_buf *out);
/* `,"prompt_token_ids":[...]` */
nb_status nbi_job_write_prompt_ids(const nbi_job *job, const nbi_choice *choice, nbi_buf *out);
/* `data: {...,"choices":[{"index":N,` and `key`, with which all events of a choice begin: kept by
 * the choice, so `key` is always the same. */
nb_status nbi_job_write_lead(const nbi_job *job, nbi_choice *choice, const char *key, nbi_buf *out);
/* What follows the choices in a stream event: usage where asked for, the end of the event. */
nb_status nbi_job_write_tail(const nbi_job *job, const nbi_choice *choice, nbi_buf *out);
/* `,"finish_reason":...,"stop_reason":...,"matched_stop":...`; nulls while the choice runs on. */
nb_status nbi_job_write_finish(const nbi_job *job, const nbi_choice *choice, bool last,
                               nbi_buf *out);
/* `key`, then the string with quotes. */
nb_status nbi_job_write_string(nbi_buf *out, const char *key, const char *s, size_t n);

/* ---- job_sampling.c, for job.c */

/* What job->params borrow from the body, into the arena. */
nb_status nbi_job_keep_sampling(nbi_job *job, nbi_api_error *e);
/* Has the model a reasoning parser, and tokens that begin and end its thinking? */
bool nbi_job_can_end_thinking(const nbi_job *job);
/* Whether the prompt has opened the thinking that has a budget. */
void nbi_job_set_thinking(const nbi_prompt *prompt, nb_sampling *s);
/* The token of a text that is one, else -1. */
int32_t nbi_job_find_token(const nbi_job *job, const char *text);
/* The token that opens calls in the model's form, -1 when it is not one token. */
int32_t nbi_job_call_token(const nbi_job *job);
/* The stop text, or the expression, that ended the choice: matched_string is not -1. */
const char *nbi_job_matched_stop(const nbi_job *job, const nbi_choice *choice);

/* ---- job_grammar.c, for job.c */

/* Makes the grammars of all choices, or orders them (job->order). */
nb_status nbi_job_make_grammars(nbi_job *job, nbi_api_error *e);
/* Takes what a done order came to, and closes it. */
nb_status nbi_job_take_grammars(nbi_job *job, nbi_api_error *e);

/* ---- shared by the chat surfaces (chat_job.c) */

/* Takes what nbi_chat_request_read() makes of a body, into job->chat, tools and one_call. Calls
 * that tool_choice forces become job->constraint; what was read there before gives way when it is
 * a format of the content, and is refused otherwise. */
nb_status nbi_job_read_chat(nbi_job *job, const json_t *body, nbi_api_error *e);
/* nbi_surface.encode, begin and take. */
nb_status nbi_job_encode_chat(nbi_job *job, const json_t *body, nbi_api_error *e);
/* The same with the ids of the prompt in place of the template's. */
nb_status nbi_job_encode_ids(nbi_job *job, const json_t *ids, nbi_api_error *e);
nb_status nbi_job_begin_chat(nbi_job *job, nbi_choice *choice);
nb_status nbi_job_take_chat(nbi_job *job, nbi_choice *choice, const nb_event *event);

#ifdef __cplusplus
}
#endif
