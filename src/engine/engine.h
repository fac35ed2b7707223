/* The engine from inside. Private to src/engine.
 *
 * Who touches what: the step (one thread at a time) owns the model, the KV pool, the batch and the
 * running list. `lock` guards the waiting list, the counters and the failure text. Each request's
 * `lock` guards its event ring; the step writes it, a reader takes from it. Order of locks: engine
 * before request, never the other way round. */
#pragma once

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include "base/histogram.h"
#include "comm/comm.h"
#include "engine/kvpool.h"
#include "engine/prefix.h"
#include "model/candidates.h"
#include "model/model.h"
#include "text/decode.h"
#include "text/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Events a reader may be behind before its request waits for it; the ring is never larger. */
#define NBI_EVENTS_MAX 128u
/* Rows of a prompt whose log-probabilities are wanted: half a ring has room for their events. */
#define NBI_PROMPT_EVENTS_MAX (NBI_EVENTS_MAX / 2 - 2)
/* Rows whose logits one step can hold beside the running requests' own (prompt log-probabilities).
 */
#define NBI_PROMPT_LOGIT_ROWS 32u

#define NBI_DRAFTS_MAX        ((uint32_t)NB_DRAFTS_MAX) /* NB_GRAMMAR_ROLLBACK_MAX at most */

/* Times of a request in ns (nb_request_times); the step writes, anybody reads. */
typedef struct nbi_request_clock {
    atomic_uint_fast64_t arrival, submitted, admitted, first, last;
} nbi_request_clock;

/* One event in the ring; its text lies in the request's text ring. */
typedef struct nbi_event_slot {
    nb_event event;    /* `text` points into text_ring */
    uint32_t text_end; /* where the text ring continues behind this event */
} nbi_event_slot;

/* Logits that a request changes, kept up to date (penalty.c). index NULL: none. */
typedef struct nbi_penalties {
    uint32_t *index;           /* [vocab] entry + 1, 0: none */
    nbi_sample_adjust *adjust; /* [cap], n in use */
    float *fixed;              /* [cap] logit_bias */
    uint32_t *count;           /* [cap] occurrences in the answer */
    uint32_t n, cap;
} nbi_penalties;

/* What narrows the next token beside a grammar (token_limits.c). */
typedef struct nbi_token_limits {
    uint32_t *allowed; /* [mask_words]; NULL: all */
    int32_t *ids;      /* bad words, one behind the other */
    uint32_t *ends;    /* [n_words] where each ends */
    uint32_t n_words;
    uint32_t n_valid; /* ids from here on have no token */
    bool thinking;
    uint32_t n_thought; /* tokens of thinking so far */
} nbi_token_limits;

typedef struct nbi_beams nbi_beams; /* beam.h */

struct nb_request {
    /* sequence: the step's. What every step looks at comes first, in as few cache lines as can be:
     * between two steps the model has emptied the caches. */
    nb_engine *engine;
    int32_t *tokens; /* [n_max] prompt, then answer */
    uint32_t n_prompt, n_tokens, n_max;
    uint32_t n_cached;   /* positions in the KV cache */
    uint32_t n_expanded; /* positions of the prompt in MLA's expanded form: whole pages */
    uint32_t n_reported; /* prompt tokens whose event was written */
    int32_t *pages;      /* [n_pages_max] */
    uint32_t n_pages, n_pages_max;
    uint32_t n_shared; /* of them, from the front: nodes of the prefix tree */
    uint32_t rows;     /* rows in the batch being run */
    uint32_t n_owed;   /* its newest tokens, of which no event was written yet */
    uint32_t n_drafts, drafts_wanted;
    uint32_t n_sure; /* events that the ring has room for, whatever its reader does; 0: not known */
    bool lacked_room; /* when a step last asked its ring itself */
    atomic_bool cancelled;
    bool has_limits;
    bool has_stops;       /* strings or expressions are looked for in the text */
    bool admitted;        /* once */
    bool preempted;       /* waits again: goes before those of its priority that never ran */
    uint64_t deadline_ns; /* on the clock of nbi_now_ns(); 0: none */
    nbi_beams *beams;     /* the search it is part of; NULL: none */
    uint32_t beam;        /* its place there */
    uint32_t n_masks;     /* of masks known; 0 after every token */
    uint32_t *masks; /* [1 + drafts at most][mask_words] of the next token and those behind drafts;
                        NULL: neither grammar nor limits */
    uint64_t metered_ns; /* when it was last given tokens */
    nbi_penalties penalties;
    nb_grammar grammar; /* mask NULL: none */
    nb_count count_as;
    uint32_t n_end_ids;
    nb_sampling sampling;                           /* its arrays are last */
    int32_t end_ids[NBI_EOS_MAX + NB_STOP_IDS_MAX]; /* ids that end the answer */

    /* sequence: the rest */
    nb_request *next;          /* waiting list */
    uint32_t n_queued;         /* tokens when it entered that; under the engine's lock */
    atomic_int refs;           /* the user's and the engine's */
    uint32_t passed;           /* how often a later request was admitted before it; the step's */
    int32_t priority;          /* lower goes first */
    uint64_t client;           /* for turns within a priority */
    size_t bytes;              /* counted in the engine's request_bytes */
    uint64_t cache_salt;       /* of nb_request_options */
    nbi_prefix_place peeked;   /* what the tree had for it while it waited */
    atomic_uint cached_tokens; /* of the prompt, found in the tree at first admission */
    int32_t drafts[NBI_DRAFTS_MAX]; /* [n_drafts] guesses at the tokens behind tokens[] */
    nb_finish finish;               /* of the event that ended it */
    nbi_token_limits limits;
    uint32_t mask_words;

    /* events: `lock`, but for the text before it is one */
    nbi_request_clock clock;
    nbi_decoder decoder; /* bytes -> whole characters; the step's */
    nbi_stop *stop;      /* holds back what may become a stop string; the step's */
    char *whole;         /* [text_worst] scratch of the step: decoded, not yet searched */
    pthread_mutex_t lock;
    uint32_t head, count; /* head: oldest unread or the one being read */
    nbi_event_slot *ring; /* [NBI_EVENTS_MAX] */
    char *text_ring;      /* [text_cap] */
    uint32_t text_cap, text_begin, text_end;
    uint32_t text_worst;    /* most bytes one event can carry */
    uint32_t n_blocked;     /* threads that wait at `readable` */
    uint32_t notify_events; /* at least 1 */
    bool reading;           /* head was handed out and is freed by the next read */
    bool ended;             /* the finishing event was written */
    bool drained;           /* and read */
    bool wants_room;        /* a step had to leave it out: the reader says when there is room */
    bool closed;
    void (*notify)(void *user);
    void *notify_user;
    pthread_cond_t readable;
    char error[NB_ERROR_TEXT_MAX];
};

/* One batch's host arrays. */
typedef struct nbi_step_batch {
    nbi_batch view;
    int32_t *ids, *pos, *row_seq, *seq_first, *seq_len, *expanded, *page_table, *logit_rows,
        *row_fault, *logit_fault;
    int32_t *shares;                  /* [n_rows], as in nbi_batch */
    int32_t *candidates;              /* [n_logit_rows], likewise */
    int32_t *hidden_rows, *list_rows; /* drafting: [n_rows], as in nbi_batch */
    uint32_t *last_row;  /* drafting: [n_seqs] last row of each request in the pass before */
    uint32_t *seq_logit; /* [n_seqs + 1] first logit row of each sequence */
    nb_request **seqs;   /* [n_seqs]; NULL once it has ended */
    nbi_sample_row *sample_rows; /* [n_logit_rows] */
    nbi_sample_out *sample_out;
    void *block;
    bool constrained; /* some row may have a mask or banned ids */
    uint32_t max_rows, max_seqs, max_logit_rows, page_stride;
    uint32_t n_valid; /* ids that may be chosen */
} nbi_step_batch;

typedef struct nbi_owed nbi_owed; /* results.c */

#define NBI_PASS_SIZES 20u /* up to 2^19 rows */

static inline uint32_t nbi_min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Clients are told apart by a hash into so many places; two that share one share its turns. */
#define NBI_CLIENTS 1024u

typedef struct nbi_client_turn {
    uint64_t last;    /* its latest admission, counted over all */
    uint32_t running; /* its requests in the running list */
} nbi_client_turn;

/* Timing of steps (profile.c). `lock` guards what is not the step's own. */
typedef struct nbi_profile {
    nbi_timing *timing; /* of a timed step while in_step; else of who holds the lock */
    pthread_mutex_t lock;
    pthread_cond_t idle; /* in_step or writing has become false */
    atomic_bool wanted;  /* the next step has to ask */
    bool in_step;        /* the step under way is timed */
    bool writing;        /* somebody reads the timer: no step is timed */
    bool running, done;  /* a profile; has taken its steps */
    nb_profile_options options;
    uint32_t taken[2];         /* [decode] steps of it */
    uint32_t interval;         /* of steps that are timed for the sums */
    uint32_t since;            /* the step's: steps since the last one that was timed */
    bool timed, skipped;       /* the step's: in_step; it counts as one of skip_steps */
    nb_component_stats totals; /* of all that were timed */
} nbi_profile;

struct nb_engine {
    nb_engine_options options; /* strings copied into `strings` */
    nbi_arena strings;
    nbi_backend *backend;
    nbi_model *model;
    nbi_tokenizer *tokenizer; /* NULL: ids only */
    nbi_kv kv;
    bool (*commit)(nbi_backend *b, void *p, size_t bytes); /* the backend's, of kv; or NULL */
    nbi_profile profile;
    atomic_uint_fast64_t read_bandwidth; /* bytes per second; 0: not known */
    nbi_kvpool pool;
    nbi_prefix prefix;
    bool lpm; /* schedule policy: longest cached prefix first */
    uint32_t max_queued, decode_steps;
    uint32_t decode_run; /* decode steps since the queue was last looked at; the step's */
    sem_t commit_done;
    bool has_commit_thread;
    uint64_t request_bytes_max;
    atomic_uint_fast64_t request_bytes; /* of requests that are not freed yet */
    nbi_client_turn *turns;             /* [NBI_CLIENTS]; under `lock` */
    uint64_t next_turn;
    uint64_t first_deadline_ns; /* none in the queue is earlier; UINT64_MAX: none; under `lock` */
    bool has_cancelled;         /* somebody may have been cancelled while waiting; under `lock` */
    nbi_step_batch batch;
    nbi_step_batch drafting; /* the MTP layer's */
    bool overlaps;           /* results are handed out beside the next step or draft pass */
    nbi_owed *owed;          /* [max_running], n_owed in use: committed, not handed out */
    uint32_t n_owed;
    nbi_sample_out *owed_out; /* behind owed[]; trades places with batch.sample_out */
    uint32_t n_draft_steps;   /* 0: no drafting */
    uint32_t max_context, chunk_size, max_running, n_valid_ids, max_token_bytes;
    uint64_t workspace_bytes, tree_bytes, batch_bytes, available_bytes;
    char *order; /* [order_bytes] lockstep.c; NULL: one rank */
    size_t order_bytes;
    uint64_t pass_begin_ns, usual_ns[NBI_PASS_SIZES]; /* of a pass, by the bits of its rows */
    const char *model_name;
    struct nbi_gate_result *checks; /* [n_checks] of the start */
    uint32_t n_checks;

    pthread_mutex_t step_lock; /* guards the two below */
    void (*after_step)(void *user);
    void *after_step_user;
    bool notified; /* some request was, since after_step was called; the step's */

    nb_request **running; /* [max_running] in order of admission; the step's */
    uint32_t n_running;

    pthread_mutex_t lock;
    pthread_cond_t work;
    nb_request *waiting_head, *waiting_tail;
    uint32_t n_waiting;
    uint64_t waiting_tokens; /* of them */
    nb_engine_stats stats;
    nbi_histogram histograms[NB_HIST_COUNT];
    uint64_t now_ns;            /* when the tokens of the step were there; the step's */
    uint64_t gap_ns, gap_times; /* of NB_HIST_INTER_TOKEN, not counted yet; the step's */
    atomic_uint_fast64_t seed_counter;
    atomic_bool stopping;
    bool has_thread, has_failed;
    bool flush; /* the step is to forget cached pages */
    bool kick;  /* somebody wants a step: a request came or was cancelled, a reader made room */
    pthread_t thread;
    char failure[NB_ERROR_TEXT_MAX];
};

/* ---- memory.c: what is reserved at the start */
/* An nbi_model_options.plan: refuses weights that do not fit, before any is read. */
nb_status nbi_engine_check_weights(void *engine, const nbi_config *config, uint64_t weight_bytes,
                                   nb_error *err);
/* Plans, prints the plan, reserves. */
nb_status nbi_engine_reserve(nb_engine *e, nbi_dtype kv_dtype, nb_error *err);
/* Commits the KV pages on a thread of its own, which the other call ends. */
void nbi_engine_start_commit(nb_engine *e);
void nbi_engine_stop_commit(nb_engine *e);
/* What a request of n_max tokens takes, without penalties and grammar. */
size_t nbi_request_bytes(uint32_t n_max, size_t n_text);

/* ---- batch.c */
nb_status nbi_step_batch_create(nbi_step_batch *batch, uint32_t max_rows, uint32_t max_seqs,
                                uint32_t max_logit_rows, uint32_t max_context, nb_error *err);
/* Bytes that nbi_step_batch_create() takes. */
size_t nbi_step_batch_bytes(uint32_t max_rows, uint32_t max_seqs, uint32_t max_logit_rows,
                            uint32_t max_context);
void nbi_step_batch_destroy(nbi_step_batch *batch);
void nbi_step_batch_clear(nbi_step_batch *batch);
/* Adds `rows` rows of the request from its n_cached on; wants logits where its sampling asks for
 * them. */
void nbi_step_batch_add(nbi_step_batch *batch, nb_request *r, uint32_t rows);
/* Completes the sample rows with masks and banned ids. The forward pass does without: it may have
 * been launched. */
void nbi_step_batch_constrain(nbi_step_batch *batch);
/* The request ends: its rows are nobody's, and nothing of it is needed to sample them. */
void nbi_step_batch_forget(nbi_step_batch *batch, const nb_request *r);
/* First guard code among the rows of sequence s or its logit rows, 0 when all are fine. */
int32_t nbi_step_batch_fault(const nbi_step_batch *batch, uint32_t s);

/* ---- scheduler.c: one step */
nb_status nbi_engine_step_once(nb_engine *e, bool *worked, nb_error *err);
/* Calls after_step when events were written. */
void nbi_engine_after_step(nb_engine *e);
/* Launches the sampling of the batch's logit rows into sample_out. */
void nbi_engine_sample(nb_engine *e, nbi_step_batch *b, float *logits);
/* A pass has been launched: with overlap, does what the host has to do meanwhile. Requests that end
 * there are forgotten by the batches. */
void nbi_engine_meanwhile(nb_engine *e);

/* ---- lockstep.c: the step's */
typedef enum nbi_order {
    NBI_ORDER_END = 1,
    NBI_ORDER_FORWARD,
    NBI_ORDER_DRAFT,    /* behind a forward */
    NBI_ORDER_DRAFT_ON, /* behind a draft */
    NBI_ORDER_COPY_PAGE
} nbi_order;
/* Is this rank 0 of several? */
bool nbi_ranks_lead(const nb_engine *e);
size_t nbi_ranks_order_bytes(uint32_t rows, uint32_t seqs, uint32_t logits, uint32_t max_context);
/* After nbi_step_batch_create(). */
nb_status nbi_ranks_init(nb_engine *e, uint32_t rows, uint32_t logits, nb_error *err);
/* Before the same is done here: a pass over the batch, a copy of a page, the end. Nothing with one
 * rank. */
NBI_MUST_CHECK nb_status nbi_ranks_order(nb_engine *e, nbi_order kind, nbi_step_batch *b,
                                         nb_error *err);
/* The pass has been waited for. */
void nbi_ranks_done(nb_engine *e, const nbi_step_batch *b);
NBI_MUST_CHECK nb_status nbi_ranks_copy_page(nb_engine *e, int32_t from, int32_t to, nb_error *err);
void nbi_ranks_end(nb_engine *e);

/* ---- results.c: what a step's rows say. The step's */
size_t nbi_owed_bytes(uint32_t max_running, uint32_t max_logit_rows);
nb_status nbi_owed_create(nb_engine *e, uint32_t max_logit_rows, nb_error *err);
/* Takes the results of e->batch, which has been waited for: what the next step builds on. */
void nbi_engine_commit(nb_engine *e);
/* Writes the events of what was committed; ends requests whose stop string came. */
void nbi_engine_hand_out(nb_engine *e);
/* Counts how a request ended, in stats. */
void nbi_engine_count_end(nb_engine *e, const nb_request *r, nb_finish finish);
/* Takes running[i] out: pages back, the engine's reference dropped. The event that ended it was
 * written before. */
void nbi_engine_retire(nb_engine *e, uint32_t i);

/* ---- token_limits.c */
bool nbi_token_limits_wanted(const nb_sampling *s);
nb_status nbi_token_limits_check(const nb_sampling *s, uint32_t vocab, uint32_t n_valid,
                                 nb_error *err);
/* Copies what the sampling points to; deinit also after a failure. */
nb_status nbi_token_limits_init(nbi_token_limits *l, const nb_sampling *s, uint32_t vocab,
                                uint32_t n_valid, nb_error *err);
void nbi_token_limits_deinit(nbi_token_limits *l);
/* Bytes that nbi_token_limits_init() takes. */
size_t nbi_token_limits_bytes(const nb_sampling *s, uint32_t vocab);
/* A token of the answer. */
void nbi_token_limits_add(nbi_token_limits *l, const nb_sampling *s, int32_t id);
/* The mask of the next token, or with i > 0 of the token behind i drafts: those have been accepted
 * by the grammar for a while, and masks come in order. Needs r->masks. */
const uint32_t *nbi_request_mask(nb_request *r, uint32_t i);

/* ---- draft.c: the step's */
nb_status nbi_engine_draft(nb_engine *e, nb_error *err);

/* ---- queue.c: the waiting list; called with the engine's lock held */
void nbi_queue_push(nb_engine *e, nb_request *r);
void nbi_queue_push_front(nb_engine *e, nb_request *r);
/* Who is to be admitted next by priority and policy; stays in the list. NULL when nobody waits. */
nb_request *nbi_queue_best(nb_engine *e);
void nbi_queue_remove(nb_engine *e, nb_request *r);
/* Takes every request out that is cancelled or whose time is over, chained by `next`. */
nb_request *nbi_queue_take_ended(nb_engine *e, uint64_t now_ns);
/* The place of a request's client. */
nbi_client_turn *nbi_queue_turn(const nb_engine *e, const nb_request *r);

/* ---- pages.c: the step's */
uint32_t nbi_kv_pages_free(const nb_engine *e);
/* A page for a request's own use, evicting from the tree if need be; -1 when every page is in use.
 */
int32_t nbi_kv_pages_take(nb_engine *e);
/* Pages the tree could give this request. */
uint32_t nbi_request_peek_prefix(nb_engine *e, nb_request *r);
/* Takes them. The request has no pages yet. */
void nbi_request_match_prefix(nb_engine *e, nb_request *r);
/* Makes the request's full pages known to the tree. */
void nbi_request_share_pages(nb_engine *e, nb_request *r);
/* Gives a request's pages back; those in the tree stay cached. */
void nbi_request_drop_pages(nb_engine *e, nb_request *r);
/* Forgets every cached page that nobody uses. */
void nbi_kv_pages_flush(nb_engine *e);

/* ---- output.c: what a sampled token means for its request. Called by the step. */
/* Room for every event a step of `rows` rows may write? If not, the reader kicks the engine as soon
 * as half of the rings is free. */
bool nbi_request_has_room(nb_request *r, uint32_t rows);
/* Is half of the rings free? For one row, or NBI_PROMPT_EVENTS_MAX of a prompt, that is room
 * enough. Called with the request's lock held. */
bool nbi_request_is_half_free(const nb_request *r);
/* Events are about to be written: asks for the memory. The request's own lines are there. */
void nbi_request_prefetch_events(const nb_request *r);
/* A prompt token with (or, for the first, without) its log-probability. */
void nbi_request_put_prompt(nb_request *r, uint32_t index, const nbi_sample_out *out);
/* Copies an event without the places of `top` that are not in use. */
void nbi_event_copy(nb_event *to, const nb_event *from);
/* Appends the token to the sequence. True when that ends the request, by its id or by length. */
bool nbi_request_take_token(nb_request *r, int32_t id);
/* Writes the event of a token taken before, the last of n_tokens. True when the request ended with
 * it: as above, or by a stop string. */
bool nbi_request_put_token(nb_engine *e, nb_request *r, const nbi_sample_out *out,
                           uint32_t n_tokens);
/* Ends a request without a token; `why` is the sentence for NB_FINISH_ERROR. */
void nbi_request_end(nb_request *r, nb_finish finish, const char *why);
/* An id that ends the answer. */
bool nbi_request_is_end(const nb_request *r, int32_t id);

/* ---- meter.c: counters and distributions. No heap, no lock in the token loop but where said. */
void nbi_meter_init(nb_engine *e);
void nbi_meter_submit(nb_request *r, const nb_request_options *o);
/* First admission. Called with the engine's lock held. */
void nbi_meter_admit(nb_engine *e, nb_request *r);
/* The request is about to show a token of this step. */
void nbi_meter_stamp(nb_engine *e, nb_request *r);
/* The step gave the request n >= 1 tokens. The gap before them is counted by nbi_meter_flush(),
 * with those of others that are the same. */
void nbi_meter_tokens(nb_engine *e, nb_request *r, uint32_t n);
void nbi_meter_flush(nb_engine *e);
/* The request has ended (r->finish). Takes the engine's lock. */
void nbi_meter_end(nb_engine *e, const nb_request *r);
/* Is every row a sequence's newest token or a draft behind it? */
static inline bool nbi_batch_decodes(const nbi_batch *batch)
{
    return batch->n_rows == batch->n_logit_rows;
}
/* The step of `batch` took from begin_ns to now. */
void nbi_meter_step(nb_engine *e, uint64_t begin_ns, const nbi_batch *batch);

/* ---- profile.c: which steps are timed */
nb_status nbi_profile_init(nb_engine *e, nb_error *err);
void nbi_profile_deinit(nb_engine *e);
/* Around all that a step does; the step's. */
void nbi_profile_step_begin(nb_engine *e);
void nbi_profile_step_end(nb_engine *e, const nbi_batch *batch);
/* Of an engine on a device that has a measure of its own; when all else is reserved. */
void nbi_profile_measure(nb_engine *e);

/* ---- penalty.c */
/* `max_tokens`: prompt and answer together. Nothing is taken when the request asks for nothing. */
nb_status nbi_penalties_init(nbi_penalties *p, const nb_sampling *s, uint32_t vocab,
                             uint32_t max_tokens, nb_error *err);
void nbi_penalties_deinit(nbi_penalties *p);
/* Bytes that nbi_penalties_init() takes. */
size_t nbi_penalties_bytes(const nb_sampling *s, uint32_t vocab, uint32_t max_tokens);
void nbi_penalties_add(nbi_penalties *p, const nb_sampling *s, int32_t id, bool is_answer);

/* ---- request.c */
/* The parts of nb_request_submit(). What create made goes to enqueue or to destroy. */
nb_status nbi_request_check(const nb_engine *e, const nb_request_options *o, nb_error *err);
nb_status nbi_request_create(nb_request **out, nb_engine *e, const nb_request_options *o,
                             nb_error *err);
nb_status nbi_request_enqueue(nb_engine *e, nb_request *r, nb_error *err);
void nbi_request_destroy(nb_request *r);
/* Takes bytes of the memory planned for requests; nothing is taken on failure. */
nb_status nbi_request_count_bytes(nb_engine *e, size_t bytes, nb_count count, nb_error *err);
/* Cancelled, or a search that one of its members was. The step's. */
bool nbi_request_is_cancelled(const nb_request *r);
/* Requests that go through the queue with this one, itself among them, in the order of the running
 * list. */
nb_request *const *nbi_request_members(nb_request *const *r, uint32_t *n);
void nbi_request_unref(nb_request *r);
/* Nothing can be served from here on; the next step ends what runs. Any thread. */
void nbi_engine_break(nb_engine *e, const nb_error *why);
/* Wakes the engine's thread. */
void nbi_engine_kick(nb_engine *e);

#ifdef __cplusplus
}
#endif
