/* What grammars know of the vocabulary, and the masks of one answer (see grammar.h). */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "text/grammar_impl.h"

#define NO_TOKEN_BYTE 0xff /* the library: a name follows that no text matches */
#define MESSAGE_BYTES 512

typedef enum phase { PHASE_THINKING, PHASE_TEXT, PHASE_FREE, PHASE_ENDED } phase;

/* Where an answer stands beside the matcher. */
typedef struct place {
    phase phase;
    bool begun;    /* the matcher was given a token */
    bool thought;  /* reasoning was opened, or cannot be any more */
    bool consumed; /* by the token that led here: the matcher has to give it back */
    bool failed;
} place;

struct nbi_grammar {
    atomic_uint refs;
    nbi_grammar_compiler *compiler;
    const nbi_llg *llg;
    nbi_llg_matcher *matcher;
    nbi_grammar_options options;
    nbi_grammar_own own;
    place now;
    place undo[NB_GRAMMAR_ROLLBACK_MAX]; /* ring: places before the last tokens */
    uint32_t n_accepted;
    atomic_bool failed;
    char failure[256]; /* written before `failed` */
    uint32_t mask[];   /* [words of n_tokens] */
};

static void set_bit(uint32_t *bits, uint32_t id)
{
    bits[id / 32] |= 1u << id % 32;
}

static void clear_bit(uint32_t *bits, uint32_t id)
{
    bits[id / 32] &= ~(1u << id % 32);
}

static bool has_bit(const uint32_t *bits, uint32_t id)
{
    return bits[id / 32] >> id % 32 & 1;
}

/* ---------------------------------------------------------------- the vocabulary */

static nb_status check_setup(const nbi_grammar_setup *s, uint32_t vocab, nb_error *err)
{
    if (s->n_eos == 0)
        return nbi_fail(err, NB_INVALID,
                        "grammars: the model has no end token, so no answer could end");
    for (uint32_t i = 0; i < s->n_eos; i++) {
        if (s->eos[i] < 0 || (uint32_t)s->eos[i] >= vocab)
            return nbi_fail(err, NB_INVALID, "grammars: end token %d is outside [0, %u)", s->eos[i],
                            vocab);
    }
    return NB_OK;
}

static bool is_text(const nbi_grammar_compiler *c, uint32_t id)
{
    size_t n = 0;
    return nbi_token_bytes(c->tokenizer, (int32_t)id, &n) && n > 0 &&
           !nbi_token_is_added(c->tokenizer, (int32_t)id) &&
           !nbi_token_is_special(c->tokenizer, (int32_t)id);
}

static void fill_masks(nbi_grammar_compiler *c)
{
    for (uint32_t id = 0; id < c->vocab; id++) set_bit(c->free_ids, id);
    for (uint32_t id = 0; id < c->n_tokens; id++) {
        if (is_text(c, id)) set_bit(c->text_ids, id);
    }
    for (uint32_t i = 0; i < c->n_eos; i++) {
        clear_bit(c->free_ids, (uint32_t)c->eos[i]);
        clear_bit(c->text_ids, (uint32_t)c->eos[i]);
    }
}

nb_status nbi_grammar_compiler_open(nbi_grammar_compiler **out, const nbi_grammar_setup *setup,
                                    nb_error *err)
{
    uint32_t size = nbi_tokenizer_size(setup->tokenizer),
             vocab = setup->vocab ? setup->vocab : size;
    NB_TRY(check_setup(setup, vocab, err));
    nbi_grammar_compiler *c = nbi_calloc(1, sizeof *c);
    if (!c) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    atomic_init(&c->refs, 1);
    pthread_mutex_init(&c->load_lock, NULL);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->more, NULL);
    pthread_cond_init(&c->changed, NULL);
    c->last = &c->first;
    c->time_ns = (uint64_t)NBI_GRAMMAR_SECONDS * 1000000000u;
    c->tokenizer = setup->tokenizer;
    c->vocab = vocab;
    c->n_tokens = size < vocab ? size : vocab;
    c->n_eos = setup->n_eos;
    c->n_words = (uint32_t)nbi_grammar_words(vocab);
    c->eos = nbi_malloc(c->n_eos * sizeof *c->eos);
    c->text_ids = nbi_calloc(c->n_words, sizeof *c->text_ids);
    c->free_ids = nbi_calloc(c->n_words, sizeof *c->free_ids);
    if (setup->folder) c->folder = nbi_strdup(setup->folder);
    if (!c->eos || !c->text_ids || !c->free_ids || (setup->folder && !c->folder)) {
        nbi_grammar_compiler_close(&c);
        return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    }
    memcpy(c->eos, setup->eos, c->n_eos * sizeof *c->eos);
    fill_masks(c);
    *out = c;
    return NB_OK;
}

void nbi_grammar_compiler_release(nbi_grammar_compiler *c)
{
    if (atomic_fetch_sub(&c->refs, 1) != 1) return;
    for (size_t i = 0; i < NBI_GRAMMAR_CACHED_MAX; i++) nbi_grammar_free_entry(c, &c->cache[i]);
    if (c->vocabulary) c->llg->free_tokenizer(c->vocabulary);
    pthread_mutex_destroy(&c->load_lock);
    pthread_cond_destroy(&c->more);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    nbi_free(c->free_ids);
    nbi_free(c->text_ids);
    nbi_free(c->eos);
    nbi_free(c->folder);
    nbi_free(c);
}

void nbi_grammar_compiler_close(nbi_grammar_compiler **compiler)
{
    if (!*compiler) return;
    nbi_grammar_end_threads(*compiler);
    nbi_grammar_compiler_release(*compiler);
    *compiler = NULL;
}

/* Ids that are no text get a name no text matches; so do unused ids. */
static nb_status token_texts(const nbi_grammar_compiler *c, uint32_t *lens, nbi_buf *bytes)
{
    for (uint32_t id = 0; id < c->n_tokens; id++) {
        size_t n = 0, before = bytes->len;
        if (has_bit(c->text_ids, id)) {
            const char *text = nbi_token_bytes(c->tokenizer, (int32_t)id, &n);
            NB_TRY(nbi_buf_add(bytes, text, n));
        } else {
            NB_TRY(nbi_buf_addf(bytes, "%c<%u>", NO_TOKEN_BYTE, id));
        }
        lens[id] = (uint32_t)(bytes->len - before);
    }
    return NB_OK;
}

static nb_status give_vocabulary(nbi_grammar_compiler *c, nb_error *err)
{
    char message[MESSAGE_BYTES] = "";
    nbi_buf bytes = {0};
    uint32_t *lens = nbi_malloc(c->n_tokens * sizeof *lens);
    nb_status st = lens ? token_texts(c, lens, &bytes) : NB_NO_MEMORY;
    if (st == NB_OK) {
        nbi_llg_tokenizer_init init = {
            .struct_size = sizeof init,
            .vocab_size = c->n_tokens,
            .tok_eos = UINT32_MAX, /* none: nibble puts the end tokens into the mask */
            .token_lens = lens,
            .token_bytes = (const uint8_t *)bytes.data,
            .use_approximate_greedy_tokenize_fn = true, /* used for forced tokens only */
        };
        c->vocabulary = c->llg->new_tokenizer(&init, message, sizeof message);
        if (!c->vocabulary)
            st = nbi_fail(err, NB_UNSUPPORTED, "the grammar library refuses the vocabulary: %s",
                          message);
    } else {
        st = nbi_fail(err, st, "grammars: out of memory");
    }
    nbi_buf_free(&bytes);
    nbi_free(lens);
    return st;
}

nb_status nbi_grammar_compiler_load(nbi_grammar_compiler *c, nb_error *err)
{
    pthread_mutex_lock(&c->load_lock);
    if (!c->load_tried) {
        uint64_t start = nbi_now_ns();
        nb_status st = nbi_llg_load(&c->llg, c->folder, &c->load_error);
        if (st == NB_OK) st = give_vocabulary(c, &c->load_error);
        c->load_error.status = st;
        c->load_tried = st != NB_NO_MEMORY;
        nbi_log(NB_LOG_DEBUG, "grammars: %s after %.0f ms", st == NB_OK ? "ready" : "not available",
                (double)(nbi_now_ns() - start) * 1e-6);
    }
    nb_status st = c->load_error.status;
    if (st != NB_OK && err) *err = c->load_error;
    pthread_mutex_unlock(&c->load_lock);
    return st;
}

/* ---------------------------------------------------------------- one request */

nb_status nbi_grammar_check_options(const nbi_grammar_compiler *c, const nbi_grammar_options *o,
                                    nb_error *err)
{
    if (o->after_think < -1 || o->after_think >= (int64_t)c->vocab ||
        o->n_banned > NBI_GRAMMAR_BANNED_MAX)
        return nbi_fail(err, NB_INVALID, "grammars: after_think %d or n_banned %u is out of range",
                        o->after_think, o->n_banned);
    for (uint32_t i = 0; i < o->n_banned; i++) {
        if (o->banned[i] < 0 || (uint32_t)o->banned[i] >= c->vocab ||
            o->banned[i] == o->after_think)
            return nbi_fail(err, NB_INVALID, "grammars: banned token %d cannot be banned",
                            o->banned[i]);
    }
    if ((o->may_think && (o->think_begin < 0 || (uint32_t)o->think_begin >= c->vocab ||
                          o->after_think < 0 || o->after_think == o->think_begin)) ||
        (o->may_call && (o->call_begin < 0 || (uint32_t)o->call_begin >= c->vocab)))
        return nbi_fail(err, NB_INVALID, "grammars: may_think %d %d or may_call %d is out of range",
                        o->think_begin, o->after_think, o->call_begin);
    return NB_OK;
}

/* A token of the grammar's own means what the grammar says: it opens neither reasoning nor a call.
 */
static void give_up_own(nbi_grammar_options *o, const nbi_grammar_own *own)
{
    for (uint32_t i = 0; i < own->n; i++) {
        if (o->may_think && own->ids[i] == o->think_begin) {
            o->may_think = false;
            o->after_think = -1;
        }
        if (!o->may_call || own->ids[i] != o->call_begin) continue;
        o->may_call = false;
        if (o->call_begin != o->after_think && o->n_banned < NBI_GRAMMAR_BANNED_MAX)
            o->banned[o->n_banned++] = o->call_begin;
    }
}

nb_status nbi_grammar_create(nbi_grammar **out, nbi_grammar_compiler *c,
                             const nbi_grammar_options *options, const nbi_llg_matcher *matcher,
                             const nbi_grammar_own *own, nb_error *err)
{
    nbi_grammar *g = nbi_calloc(1, sizeof *g + nbi_grammar_words(c->n_tokens) * sizeof *g->mask);
    if (!g) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    atomic_init(&g->refs, 1);
    atomic_fetch_add(&c->refs, 1);
    g->compiler = c;
    g->llg = c->llg;
    g->options = *options;
    g->own = *own;
    give_up_own(&g->options, own);
    bool inside = g->options.after_think >= 0 && !g->options.may_think;
    g->now =
        (place){.phase = inside ? PHASE_THINKING : PHASE_TEXT, .thought = !g->options.may_think};
    g->matcher = c->llg->clone_matcher(matcher);
    *out = g;
    return NB_OK;
}

static void unref(nbi_grammar *g)
{
    if (atomic_fetch_sub(&g->refs, 1) != 1) return;
    if (g->matcher) g->llg->free_matcher(g->matcher);
    nbi_grammar_compiler_release(g->compiler);
    nbi_free(g);
}

void nbi_grammar_close(nbi_grammar **grammar)
{
    if (*grammar) unref(*grammar);
    *grammar = NULL;
}

void nbi_grammar_retain(nbi_grammar *grammar)
{
    atomic_fetch_add(&grammar->refs, 1);
}

/* The answer ends here. */
static void fail(nbi_grammar *g, const char *what)
{
    const char *why = g->llg->error(g->matcher);
    size_t n = 0;
    if (!why) why = "nothing can follow the text so far";
    snprintf(g->failure, sizeof g->failure, "%s: %s", what, why);
    n = strcspn(g->failure, "\r\n");
    g->failure[n] = 0;
    g->now.phase = PHASE_ENDED;
    g->now.failed = true;
    atomic_store_explicit(&g->failed, true, memory_order_release);
}

static void allow_end(const nbi_grammar *g, uint32_t *bits, size_t n_words)
{
    for (uint32_t i = 0; i < g->compiler->n_eos; i++) {
        uint32_t id = (uint32_t)g->compiler->eos[i];
        if (id / 32 < n_words) set_bit(bits, id);
    }
}

static void mask_thinking(const nbi_grammar *g, uint32_t *bits, size_t n_words)
{
    size_t n = n_words < g->compiler->n_words ? n_words : g->compiler->n_words;
    memcpy(bits, g->compiler->free_ids, n * sizeof *bits);
    for (uint32_t i = 0; i < g->options.n_banned; i++) {
        uint32_t id = (uint32_t)g->options.banned[i];
        if (id / 32 < n) clear_bit(bits, id);
    }
}

/* What may stand in place of the grammar's first token. */
static bool allow_others(const nbi_grammar *g, uint32_t *bits, size_t n_words)
{
    const nbi_grammar_options *o = &g->options;
    bool think = !g->now.begun && !g->now.thought && (uint32_t)o->think_begin / 32 < n_words;
    bool call = !g->now.begun && o->may_call && (uint32_t)o->call_begin / 32 < n_words;
    if (think) set_bit(bits, (uint32_t)o->think_begin);
    if (call) set_bit(bits, (uint32_t)o->call_begin);
    return think || call;
}

/* Returns whether anything is allowed. */
static bool mask_text(nbi_grammar *g, uint32_t *bits, size_t n_words)
{
    const nbi_grammar_compiler *c = g->compiler;
    size_t n = nbi_grammar_words(c->n_tokens);
    uint32_t any = 0;
    if (c->llg->compute_mask(g->matcher, g->mask, n * sizeof *g->mask) != 0) return false;
    if (n > n_words) n = n_words;
    for (size_t i = 0; i < n; i++) any |= bits[i] = g->mask[i] & c->text_ids[i];
    for (uint32_t i = 0; i < g->own.n; i++) {
        uint32_t id = (uint32_t)g->own.ids[i];
        if (id / 32 >= n || !has_bit(g->mask, id)) continue;
        set_bit(bits, id);
        any = 1;
    }
    if (allow_others(g, bits, n_words)) any = 1;
    if (!c->llg->is_accepting(g->matcher)) return any != 0;
    allow_end(g, bits, n_words);
    return true;
}

static void mask(void *user, uint32_t *bits, size_t n_words)
{
    nbi_grammar *g = user;
    switch (g->now.phase) {
    case PHASE_THINKING: mask_thinking(g, bits, n_words); return;
    case PHASE_FREE:
        mask_thinking(g, bits, n_words);
        allow_end(g, bits, n_words);
        return;
    case PHASE_ENDED: allow_end(g, bits, n_words); return;
    case PHASE_TEXT: break;
    }
    if (mask_text(g, bits, n_words)) return;
    fail(g, "the grammar cannot go on");
    allow_end(g, bits, n_words);
}

static bool is_end(const nbi_grammar *g, int32_t id)
{
    for (uint32_t i = 0; i < g->compiler->n_eos; i++) {
        if (g->compiler->eos[i] == id) return true;
    }
    return false;
}

static void accept_text(nbi_grammar *g, int32_t id)
{
    if (!g->now.begun && !g->now.thought && id == g->options.think_begin) {
        g->now.phase = PHASE_THINKING;
        g->now.thought = true;
    } else if (!g->now.begun && g->options.may_call && id == g->options.call_begin) {
        g->now.phase = PHASE_FREE;
    } else if (id < 0 || (uint32_t)id >= g->compiler->n_tokens ||
               g->llg->consume(g->matcher, (uint32_t)id) != 0) {
        fail(g, "the grammar was given a token it does not allow");
    } else {
        g->now.begun = g->now.consumed = true;
    }
}

static void accept(void *user, int32_t id)
{
    nbi_grammar *g = user;
    g->undo[g->n_accepted++ % NB_GRAMMAR_ROLLBACK_MAX] = g->now;
    g->now.consumed = false;
    if (g->now.phase == PHASE_ENDED) return;
    if (is_end(g, id)) {
        g->now.phase = PHASE_ENDED;
    } else if (g->now.phase == PHASE_THINKING) {
        if (id == g->options.after_think) g->now.phase = PHASE_TEXT;
        if (g->options.may_call && id == g->options.call_begin) g->now.phase = PHASE_FREE;
    } else if (g->now.phase == PHASE_TEXT) {
        accept_text(g, id);
    }
}

static void rollback(void *user, uint32_t n)
{
    nbi_grammar *g = user;
    size_t n_consumed = 0;
    NB_ASSERT(n <= NB_GRAMMAR_ROLLBACK_MAX && n <= g->n_accepted);
    for (; n; n--) {
        n_consumed += g->now.consumed;
        g->now = g->undo[--g->n_accepted % NB_GRAMMAR_ROLLBACK_MAX];
    }
    atomic_store_explicit(&g->failed, g->now.failed, memory_order_release);
    if (n_consumed && g->llg->rollback(g->matcher, n_consumed) != 0)
        fail(g, "the grammar cannot go back");
}

static void release(void *user)
{
    unref(user);
}

nb_grammar nbi_grammar_hooks(nbi_grammar *grammar)
{
    return (nb_grammar){
        .user = grammar, .mask = mask, .accept = accept, .rollback = rollback, .release = release};
}

bool nbi_grammar_complete(nbi_grammar *g)
{
    if (g->now.failed || g->now.phase == PHASE_THINKING) return false;
    return g->now.phase == PHASE_FREE || g->llg->is_accepting(g->matcher);
}

const char *nbi_grammar_failure(const nbi_grammar *g)
{
    return atomic_load_explicit(&g->failed, memory_order_acquire) ? g->failure : NULL;
}
