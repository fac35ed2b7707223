/* Beam search from the user's side: checks and submission. Any thread. */
#include <math.h>
#include <string.h>

#include "engine/beam.h"

/* ---------------------------------------------------------------- checks */

/* What a search has no place for: it looks at the model's own distribution only, and answers differ
 * in length until the end. */
static const char *unsupported(const nb_request_options *o)
{
    const nb_sampling *s = &o->sampling;
    return s->n_stop_strings            ? "stop"
           : s->n_stop_regex            ? "stop_regex"
           : s->min_tokens              ? "min_tokens"
           : s->prompt_logprobs         ? "prompt_logprobs"
           : s->n_logprob_ids           ? "logprob_token_ids"
           : s->n_logit_bias            ? "logit_bias"
           : s->n_allowed               ? "allowed_token_ids"
           : s->n_bad_words             ? "bad_words"
           : s->has_think_budget        ? "thinking_token_budget"
           : s->frequency_penalty != 0  ? "frequency_penalty"
           : s->presence_penalty != 0   ? "presence_penalty"
           : s->repetition_penalty != 1 ? "repetition_penalty"
           : o->grammar                 ? "grammar"
                                        : NULL;
}

/* The pages that a search may come to need: those full of prompt once, all others for each beam. */
static nb_status check_pages(const nb_engine *e, const nb_request_options *o, uint32_t width,
                             nb_error *err)
{
    uint64_t max_tokens = o->sampling.max_tokens, n_prompt = o->n_prompt;
    uint64_t all = max_tokens ? n_prompt + max_tokens : e->max_context;
    uint64_t shared = n_prompt / NBI_PAGE_TOKENS;
    uint64_t each = (all + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS - shared;
    if (shared + width * each <= e->pool.n_pages) return NB_OK;
    return nbi_fail(err, NB_TOO_LARGE,
                    "%u beams of %llu tokens behind a prompt of %llu may come to need %llu pages "
                    "of the KV cache, which has %u; ask for fewer tokens or beams",
                    width, (unsigned long long)(all - n_prompt), (unsigned long long)n_prompt,
                    (unsigned long long)(shared + width * each), e->pool.n_pages);
}

static nb_status check(const nb_engine *e, const nb_request_options *o, const nb_beam_options *beam,
                       nb_error *err)
{
    uint32_t most = e->max_running < NB_BEAM_WIDTH_MAX ? e->max_running : NB_BEAM_WIDTH_MAX;
    const char *field = unsupported(o);
    if (!beam->width || beam->width > most || 2 * beam->width > e->n_valid_ids) {
        return nbi_fail(err, NB_INVALID, "beam search: the width is %u; expected 1 to %u",
                        beam->width, most);
    }
    if (!isfinite(beam->length_penalty)) {
        return nbi_fail(err, NB_INVALID, "length_penalty is %g; expected a finite number",
                        beam->length_penalty);
    }
    if (field) return nbi_fail(err, NB_UNSUPPORTED, "%s: not together with beam search", field);
    return check_pages(e, o, beam->width, err);
}

/* ---------------------------------------------------------------- making one */

static size_t carve(nbi_beams *g, char *base)
{
    nbi_plan plan = {0};
    size_t cells = (size_t)g->max_steps * g->width;
    size_t self = nbi_plan_add(&plan, sizeof *g);
    size_t links = nbi_plan_add(&plan, cells * sizeof *g->links);
    size_t tops = nbi_plan_add(&plan, cells * g->n_top * sizeof *g->tops);
    size_t paths = nbi_plan_add(&plan, cells);
    (void)self; /* at 0 */
    if (!base) return plan.bytes;
    g->links = (nbi_beam_link *)(void *)(base + links);
    g->tops = (nb_logprob *)(void *)(base + tops);
    g->paths = (uint8_t *)(base + paths);
    return plan.bytes;
}

/* The search of requests[0 .. width), which hold it from now on. */
static nb_status create(nb_request **requests, nb_engine *e, const nb_beam_options *beam,
                        nb_error *err)
{
    const nb_request *r = requests[0];
    nbi_beams plan = {.width = beam->width,
                      .max_steps = r->n_max - r->n_prompt,
                      .n_top = r->sampling.n_logprobs > 0 ? (uint32_t)r->sampling.n_logprobs : 0};
    plan.bytes = carve(&plan, NULL);
    nbi_beams *g = NULL;
    NB_TRY(nbi_request_count_bytes(e, plan.bytes, r->count_as, err));
    g = nbi_calloc(1, plan.bytes);
    if (!g) {
        atomic_fetch_sub(&e->request_bytes, plan.bytes);
        return nbi_fail(err, NB_NO_MEMORY, "beam search: out of memory");
    }
    *g = plan;
    carve(g, (char *)g);
    atomic_init(&g->refs, (int)g->width);
    g->length_penalty = beam->length_penalty;
    g->early_stopping = beam->early_stopping;
    g->n_row_logprobs = (int32_t)(g->n_top > 2 * g->width ? g->n_top : 2 * g->width);
    g->live[0] = true;
    g->n_live = 1;
    for (uint32_t i = 0; i < g->width; i++) {
        nb_request *m = g->members[i] = requests[i];
        m->beams = g;
        m->beam = i;
        m->deadline_ns = r->deadline_ns;
        if (i) m->count_as = NB_COUNT_NONE; /* the first counts for all */
    }
    return NB_OK;
}

void nbi_beams_unref(nb_request *r)
{
    nbi_beams *g = r->beams;
    if (!g || atomic_fetch_sub(&g->refs, 1) != 1) return;
    atomic_fetch_sub(&r->engine->request_bytes, g->bytes);
    nbi_free(g);
}

nb_status nb_beams_submit(nb_request **out, nb_engine *e, const nb_request_options *options,
                          const nb_beam_options *beam, nb_error *err)
{
    nb_request *requests[NB_BEAM_WIDTH_MAX] = {NULL};
    nb_request_options o = *options;
    nb_status st = NB_OK;
    NB_TRY(nbi_request_check(e, &o, err));
    NB_TRY(check(e, &o, beam, err));
    o.sampling.temperature = 0; /* nothing is drawn */
    for (uint32_t i = 0; i < beam->width && st == NB_OK; i++) {
        if (beam->notify_users) o.notify_user = beam->notify_users[i];
        st = nbi_request_create(&requests[i], e, &o, err);
    }
    if (st == NB_OK) st = create(requests, e, beam, err);
    if (st == NB_OK) st = nbi_request_enqueue(e, requests[0], err);
    if (st != NB_OK) {
        for (uint32_t i = 0; i < beam->width; i++) {
            if (requests[i]) nbi_request_destroy(requests[i]);
        }
        return st;
    }
    memcpy(out, requests, beam->width * sizeof *out);
    return NB_OK;
}
