/* What narrows the next token beside a grammar: allowed ids, bad words, a budget for thinking.
 *
 * All of it is a mask, so that grammars and drafts go together with it: the mask of a place follows
 * from the answer and the drafts before it. Some id is always left: what would leave none gives way
 * at that place, to the grammar first, then to the allowed ids. Memory is taken at submission and
 * only by requests that ask for any of it. */
#include <string.h>

#include "engine/engine.h"

bool nbi_token_limits_wanted(const nb_sampling *s)
{
    return s->n_allowed || s->n_bad_words || s->has_think_budget;
}

static size_t words_ids(const nb_sampling *s)
{
    size_t n = 0;
    for (uint32_t i = 0; i < s->n_bad_words; i++) n += s->bad_words[i].n;
    return n;
}

size_t nbi_token_limits_bytes(const nb_sampling *s, uint32_t vocab)
{
    size_t mask = (vocab + 31) / 32;
    return ((s->n_allowed ? mask : 0) + words_ids(s) + s->n_bad_words) * 4;
}

/* ---------------------------------------------------------------- checks */

static nb_status check_id(int32_t id, uint32_t vocab, const char *field, nb_error *err)
{
    if (id >= 0 && (uint32_t)id < vocab) return NB_OK;
    return nbi_fail(err, NB_INVALID, "%s: token id %d; expected 0 to %u", field, id, vocab - 1);
}

static nb_status check_allowed(const nb_sampling *s, uint32_t vocab, uint32_t n_valid,
                               nb_error *err)
{
    bool any = s->n_allowed == 0;
    for (uint32_t i = 0; i < s->n_allowed; i++) {
        NB_TRY(check_id(s->allowed[i], vocab, "allowed_token_ids", err));
        any = any || (uint32_t)s->allowed[i] < n_valid;
    }
    if (any) return NB_OK;
    return nbi_fail(err, NB_INVALID, "allowed_token_ids: no token of the tokenizer is among them");
}

static nb_status check_words(const nb_sampling *s, uint32_t vocab, nb_error *err)
{
    for (uint32_t i = 0; i < s->n_bad_words; i++) {
        const nb_ids *word = &s->bad_words[i];
        if (!word->n) return nbi_fail(err, NB_INVALID, "bad_words: word %u has no token", i);
        for (uint32_t k = 0; k < word->n; k++)
            NB_TRY(check_id(word->ids[k], vocab, "bad_words", err));
    }
    size_t n = words_ids(s);
    if (s->n_bad_words <= NB_BAD_WORDS_MAX && n <= NB_BAD_WORD_IDS_MAX) return NB_OK;
    return nbi_fail(err, NB_INVALID, "bad_words: %u words of %zu tokens; expected at most %d of %d",
                    s->n_bad_words, n, NB_BAD_WORDS_MAX, NB_BAD_WORD_IDS_MAX);
}

nb_status nbi_token_limits_check(const nb_sampling *s, uint32_t vocab, uint32_t n_valid,
                                 nb_error *err)
{
    NB_TRY(check_allowed(s, vocab, n_valid, err));
    NB_TRY(check_words(s, vocab, err));
    if (!s->has_think_budget) return NB_OK;
    NB_TRY(check_id(s->think_begin, vocab, "thinking_token_budget", err));
    return check_id(s->think_end, n_valid, "thinking_token_budget", err);
}

/* ---------------------------------------------------------------- state */

nb_status nbi_token_limits_init(nbi_token_limits *l, const nb_sampling *s, uint32_t vocab,
                                uint32_t n_valid, nb_error *err)
{
    size_t at = 0, n_ids = words_ids(s);
    l->n_valid = n_valid;
    l->thinking = s->has_think_budget && s->think_open;
    if (s->n_allowed) l->allowed = nbi_calloc((vocab + 31) / 32, sizeof *l->allowed);
    if (s->n_bad_words) {
        l->ids = nbi_malloc(n_ids * sizeof *l->ids);
        l->ends = nbi_malloc(s->n_bad_words * sizeof *l->ends);
    }
    if ((s->n_allowed && !l->allowed) || (s->n_bad_words && (!l->ids || !l->ends)))
        return nbi_fail(err, NB_NO_MEMORY, "request: out of memory");
    for (uint32_t i = 0; i < s->n_allowed; i++) {
        uint32_t id = (uint32_t)s->allowed[i];
        if (id < n_valid) l->allowed[id / 32] |= 1u << id % 32;
    }
    for (uint32_t i = 0; i < s->n_bad_words; i++) {
        memcpy(l->ids + at, s->bad_words[i].ids, s->bad_words[i].n * sizeof *l->ids);
        at += s->bad_words[i].n;
        l->ends[i] = (uint32_t)at;
    }
    l->n_words = s->n_bad_words;
    return NB_OK;
}

void nbi_token_limits_deinit(nbi_token_limits *l)
{
    nbi_free(l->allowed);
    nbi_free(l->ids);
    nbi_free(l->ends);
    *l = (nbi_token_limits){0};
}

/* Thinking behind one more token. */
static void think(const nb_sampling *s, bool *inside, uint32_t *n, int32_t id)
{
    if (id == s->think_begin) {
        *inside = true;
    } else if (id == s->think_end || id == s->think_call) {
        *inside = false;
    } else {
        *n += *inside;
    }
}

void nbi_token_limits_add(nbi_token_limits *l, const nb_sampling *s, int32_t id)
{
    if (s->has_think_budget) think(s, &l->thinking, &l->n_thought, id);
}

/* ---------------------------------------------------------------- masks */

static bool has_bit(const uint32_t *mask, int32_t id)
{
    return mask[(uint32_t)id / 32] >> (uint32_t)id % 32 & 1u;
}

/* Thinking has to end behind i drafts. */
static bool must_close(const nb_request *r, uint32_t i)
{
    const nb_sampling *s = &r->sampling;
    bool inside = r->limits.thinking;
    uint32_t n = r->limits.n_thought;
    if (!s->has_think_budget) return false;
    for (uint32_t k = 0; k < i; k++) think(s, &inside, &n, r->drafts[k]);
    return inside && n >= s->think_budget;
}

static void keep_allowed(const nbi_token_limits *l, uint32_t *mask, uint32_t n_words)
{
    uint32_t any = 0;
    for (uint32_t w = 0; w < n_words; w++) any |= mask[w] & l->allowed[w];
    for (uint32_t w = 0; any && w < n_words; w++) mask[w] &= l->allowed[w];
}

/* Does the answer, with i drafts behind it, end with these ids? */
static bool ends_with(const nb_request *r, uint32_t i, const int32_t *ids, uint32_t n)
{
    uint32_t n_answer = r->n_tokens - r->n_prompt;
    if (n > n_answer + i) return false;
    for (uint32_t k = 0; k < n; k++) {
        uint32_t at = n_answer + i - n + k;
        int32_t id = at < n_answer ? r->tokens[r->n_prompt + at] : r->drafts[at - n_answer];
        if (id != ids[k]) return false;
    }
    return true;
}

static void ban_words(const nb_request *r, uint32_t i, uint32_t *mask)
{
    const nbi_token_limits *l = &r->limits;
    uint32_t n_left = 0;
    for (uint32_t w = 0; w < r->mask_words; w++) n_left += (uint32_t)__builtin_popcount(mask[w]);
    for (uint32_t w = 0, from = 0; w < l->n_words; from = l->ends[w++]) {
        int32_t last = l->ids[l->ends[w] - 1];
        if (n_left == 1 || !has_bit(mask, last)) continue;
        if (!ends_with(r, i, l->ids + from, l->ends[w] - 1 - from)) continue;
        mask[(uint32_t)last / 32] &= ~(1u << (uint32_t)last % 32);
        n_left--;
    }
}

/* Ids that no token has are never chosen: they do not count as left. */
static void clear_tail(uint32_t *mask, uint32_t n_words, uint32_t n_valid)
{
    uint32_t w = n_valid / 32;
    if (w >= n_words) return;
    mask[w] &= (1u << n_valid % 32) - 1;
    memset(mask + w + 1, 0, (n_words - w - 1) * sizeof *mask);
}

static void narrow(const nb_request *r, uint32_t i, uint32_t *mask)
{
    const nbi_token_limits *l = &r->limits;
    clear_tail(mask, r->mask_words, l->n_valid);
    if (must_close(r, i) && has_bit(mask, r->sampling.think_end)) {
        memset(mask, 0, r->mask_words * sizeof *mask);
        mask[(uint32_t)r->sampling.think_end / 32] = 1u << (uint32_t)r->sampling.think_end % 32;
        return;
    }
    if (l->allowed) keep_allowed(l, mask, r->mask_words);
    if (l->n_words) ban_words(r, i, mask);
}

const uint32_t *nbi_request_mask(nb_request *r, uint32_t i)
{
    uint32_t *mask = r->masks + (size_t)i * r->mask_words;
    if (i < r->n_masks) return mask;
    NB_ASSERT(i == r->n_masks);
    memset(mask, r->grammar.mask ? 0 : 0xff, r->mask_words * sizeof *mask);
    if (r->grammar.mask) r->grammar.mask(r->grammar.user, mask, r->mask_words);
    if (r->has_limits) narrow(r, i, mask);
    r->n_masks++;
    return mask;
}
