/* Request bodies: parsing, validation and normalisation of every API surface, without an engine.
 * The first byte chooses the surface: '0' to '7'. */
#include <string.h>

#include "server/job.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* What a small model would say of itself. */
static const char *const names[] = {"m", "other"};
static const nbi_api_facts facts = {.defaults = {.temperature = 1,
                                                 .top_p = 0.95f,
                                                 .top_k = -1,
                                                 .skip_special = true,
                                                 .n_logprobs = -1},
                                    .vocab_size = 4096,
                                    .max_context = 4096,
                                    .max_running = 64,
                                    .names = names,
                                    .n_names = 2,
                                    .has_text = true,
                                    .has_chat = true,
                                    .no_chat = ""};

/* What every accepted body must have. */
static void check(const nbi_job *job, bool chat)
{
    const nb_sampling *s = &job->params.sampling;
    NB_ASSERT(s->temperature >= 0 && s->top_p > 0 && s->top_p <= 1 && s->min_p >= 0 &&
              s->min_p <= 1);
    const nbi_params *p = &job->params;
    NB_ASSERT(s->top_k >= -1 && p->n_logprobs >= -1 && p->n_logprobs <= NB_TOP_LOGPROBS_MAX);
    NB_ASSERT(p->n_prompt_logprobs >= -1 && p->n_prompt_logprobs <= NB_TOP_LOGPROBS_MAX);
    NB_ASSERT(p->best_of >= p->n && p->truncate_prompt >= -1);
    NB_ASSERT(!p->beams || p->best_of <= NB_BEAM_WIDTH_MAX);
    NB_ASSERT(!p->return_meta || !p->stream);
    NB_ASSERT(s->repeat_count != 1 && s->repeat_min <= s->repeat_max);
    NB_ASSERT(!p->beams || (p->length_penalty >= -NBI_LENGTH_PENALTY_MAX &&
                            p->length_penalty <= NBI_LENGTH_PENALTY_MAX));
    NB_ASSERT(job->params.n >= 1 && job->params.n <= NBI_N_MAX);
    NB_ASSERT(s->n_stop_strings <= NB_STOP_STRINGS_MAX && s->n_stop_ids <= NB_STOP_IDS_MAX);
    for (uint32_t i = 0; i < s->n_stop_strings; i++) NB_ASSERT(s->stop_strings[i][0]);
    for (uint32_t i = 0; i < s->n_stop_ids; i++) {
        NB_ASSERT(s->stop_ids[i] >= 0 && (uint32_t)s->stop_ids[i] < facts.vocab_size);
    }
    NB_ASSERT(!job->params.has_max_tokens || s->min_tokens <= job->params.max_tokens);
    if (!chat) return;
    size_t i;
    const json_t *message, *messages = json_object_get(job->chat, "messages");
    NB_ASSERT(json_array_size(messages) > 0);
    json_array_foreach(messages, i, message)
    {
        NB_ASSERT(json_is_string(json_object_get(message, "role")));
        NB_ASSERT(json_is_string(json_object_get(message, "content")));
    }
}

/* A refusal is a 4xx with a sentence, and prints as JSON. */
static void check_error(const nbi_surface *surface, const nbi_api_error *e)
{
    nbi_buf text = {0};
    json_t *root = NULL;
    NB_ASSERT(e->http >= 400 && e->http < 500 && e->message[0]);
    nb_status (*write)(nbi_buf *, const nbi_api_error *) =
        surface->write_error ? surface->write_error : nbi_api_error_json;
    NB_ASSERT(write(&text, e) == NB_OK);
    NB_ASSERT(nbi_json_parse(&root, text.data, text.len, "error", NULL) == NB_OK);
    json_decref(root);
    nbi_buf_free(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 1) return 0;
    static const nbi_surface *const surfaces[] = {
        &nbi_surface_completions,  &nbi_surface_chat,      &nbi_surface_messages,
        &nbi_surface_count_tokens, &nbi_surface_responses, &nbi_surface_generate,
        &nbi_surface_tokenize,     &nbi_surface_detokenize};
    const nbi_surface *surface =
        surfaces[(uint8_t)(data[0] - '0') % (sizeof surfaces / sizeof *surfaces)];
    bool chat = surface != &nbi_surface_completions && surface != &nbi_surface_generate;
    bool samples = surface != &nbi_surface_tokenize && surface != &nbi_surface_detokenize;
    char *text = nbi_strndup((const char *)data + 1, n - 1);
    nbi_job job = {.surface = surface, .facts = &facts};
    nbi_api_error e = {0};
    json_t *body = NULL;
    if (!text) return 0;
    nb_status status = nbi_body_parse(&body, text, n - 1, &e);
    if (status == NB_OK) {
        status = surface->read(&job, body, &e);
        if (status == NB_OK && samples) check(&job, chat);
    }
    if (status != NB_OK) check_error(surface, &e);
    json_decref(job.chat);
    json_decref(job.tools);
    nbi_arena_free(&job.arena);
    json_decref(body);
    nbi_free(text);
    return 0;
}
