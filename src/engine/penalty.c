/* Penalties and logit bias: one list of changed logits per request, kept up to date token by token.
 *
 * repetition_penalty counts prompt and answer; frequency_penalty and presence_penalty the answer
 * only, as vLLM and SGLang do. Memory is taken at submission and only by requests that ask for any
 * of it. */
#include "engine/engine.h"

static bool wants_any(const nb_sampling *s)
{
    return s->frequency_penalty != 0 || s->presence_penalty != 0 || s->repetition_penalty != 1 ||
           s->n_logit_bias;
}

/* The entry of an id, made when it is new. */
static uint32_t entry_of(nbi_penalties *p, int32_t id)
{
    if (p->index[id]) return p->index[id] - 1;
    uint32_t at = p->n++;
    NB_ASSERT(at < p->cap);
    p->index[id] = at + 1;
    p->adjust[at] = (nbi_sample_adjust){.id = id, .repetition = 1};
    return at;
}

static void refresh(nbi_penalties *p, const nb_sampling *s, uint32_t at)
{
    float count = (float)p->count[at];
    p->adjust[at].bias =
        p->fixed[at] - s->frequency_penalty * count - (p->count[at] ? s->presence_penalty : 0);
}

static uint32_t entries(const nb_sampling *s, uint32_t vocab, uint32_t max_tokens)
{
    return max_tokens + s->n_logit_bias < vocab ? max_tokens + s->n_logit_bias : vocab;
}

size_t nbi_penalties_bytes(const nb_sampling *s, uint32_t vocab, uint32_t max_tokens)
{
    if (!wants_any(s)) return 0;
    size_t each = sizeof(nbi_sample_adjust) + sizeof(float) + sizeof(uint32_t);
    return vocab * sizeof(uint32_t) + entries(s, vocab, max_tokens) * each;
}

nb_status nbi_penalties_init(nbi_penalties *p, const nb_sampling *s, uint32_t vocab,
                             uint32_t max_tokens, nb_error *err)
{
    if (!wants_any(s)) return NB_OK;
    p->cap = entries(s, vocab, max_tokens);
    p->index = nbi_calloc(vocab, sizeof *p->index);
    p->adjust = nbi_calloc(p->cap, sizeof *p->adjust);
    p->fixed = nbi_calloc(p->cap, sizeof *p->fixed);
    p->count = nbi_calloc(p->cap, sizeof *p->count);
    if (!p->index || !p->adjust || !p->fixed || !p->count)
        return nbi_fail(err, NB_NO_MEMORY, "request: out of memory");
    for (uint32_t i = 0; i < s->n_logit_bias; i++) {
        uint32_t at = entry_of(p, s->logit_bias[i].id);
        p->fixed[at] += s->logit_bias[i].bias;
        refresh(p, s, at);
    }
    return NB_OK;
}

void nbi_penalties_deinit(nbi_penalties *p)
{
    nbi_free(p->index);
    nbi_free(p->adjust);
    nbi_free(p->fixed);
    nbi_free(p->count);
    *p = (nbi_penalties){0};
}

void nbi_penalties_add(nbi_penalties *p, const nb_sampling *s, int32_t id, bool is_answer)
{
    if (!p->index) return;
    if (!is_answer && s->repetition_penalty == 1) return;
    uint32_t at = entry_of(p, id);
    p->adjust[at].repetition = s->repetition_penalty;
    if (is_answer) p->count[at]++;
    refresh(p, s, at);
}
