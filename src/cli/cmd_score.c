/* nibble score: log-likelihood, perplexity and logits of given tokens or text. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/attention_options.h"
#include "cli/ranks.h"
#include "cli/tune_options.h"
#include "comm/device_ranks.h"
#include "engine/npy.h"
#include "engine/score.h"
#include "text/tokenizer.h"

static const nbi_command command = {
    .name = "score",
    .summary = "Log-likelihood, perplexity and logits of given tokens or text.",
    .usage = "--model DIR (--token-ids FILE.json | --text FILE) [OPTIONS]",
    .text =
        "Runs the tokens through the model and reports the log-likelihood of every token but the\n"
        "first, given those before it. --token-ids: a JSON list of ids, or a list of such lists\n"
        "(independent sequences). --logits writes float32 [positions, vocabulary], sequences one\n"
        "after the other.",
};

#define TOKENS_FILE_MAX ((size_t)1 << 30)

typedef struct sequences {
    int32_t *ids;      /* all sequences, one after the other */
    uint32_t *lengths; /* [n] */
    uint32_t n, longest;
    size_t n_ids;
} sequences;

typedef struct score {
    const char *device, *model_dir, *token_ids, *text, *logits, *cpu_level, *activations, *kv_dtype,
        *runner, *tune_file;
    uint32_t chunk, threads;
    nbi_attention_names attention;
    bool json, disable_graphs;
    nbi_comm *comm; /* every rank runs all of it; NULL: one rank */
    nbi_ranks_options ranks;

    nbi_backend *backend;
    nbi_model *model;
    nbi_kv kv;
    nbi_npy npy;
    sequences seqs;
    const int32_t *now; /* ids of the sequence being run */
    uint32_t now_length;
    double log_likelihood;
    uint64_t n_scored;
} score;

/* ---------------------------------------------------------------- input */

static nb_status read_list(sequences *s, const json_t *list, const char *name, nb_error *err)
{
    size_t i;
    json_t *item;
    uint32_t length = 0;
    json_array_foreach(list, i, item)
    {
        json_int_t id = json_integer_value(item);
        if (!json_is_integer(item) || id < 0 || id > INT32_MAX)
            return nbi_fail(err, NB_INVALID, "%s: entry %zu is not a token id", name, i);
        s->ids[s->n_ids++] = (int32_t)id;
        length++;
    }
    if (!length) return nbi_fail(err, NB_INVALID, "%s: an empty list of token ids", name);
    s->lengths[s->n++] = length;
    if (length > s->longest) s->longest = length;
    return NB_OK;
}

static nb_status read_lists(sequences *s, const json_t *root, const char *name, nb_error *err)
{
    bool nested = json_is_array(json_array_get(root, 0));
    if (!json_is_array(root) || !json_array_size(root))
        return nbi_fail(err, NB_INVALID, "%s: expected a list of token ids or a list of lists",
                        name);
    size_t total = nested ? 0 : json_array_size(root), n = nested ? json_array_size(root) : 1, i;
    json_t *list;
    if (nested) json_array_foreach(root, i, list) total += json_array_size(list);
    s->ids = nbi_calloc(total + 1, sizeof *s->ids);
    s->lengths = nbi_calloc(n, sizeof *s->lengths);
    if (!s->ids || !s->lengths) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", name);
    if (!nested) return read_list(s, root, name, err);
    json_array_foreach(root, i, list)
    {
        if (!json_is_array(list))
            return nbi_fail(err, NB_INVALID, "%s: entry %zu is not a list of token ids", name, i);
        NB_TRY(read_list(s, list, name, err));
    }
    return NB_OK;
}

static nb_status read_token_ids(sequences *s, const char *path, nb_error *err)
{
    json_t *root = NULL;
    NB_TRY(nbi_json_load(&root, path, TOKENS_FILE_MAX, err));
    nb_status st = read_lists(s, root, path, err);
    json_decref(root);
    return st;
}

static nb_status encode_text(sequences *s, const char *dir, const char *text, size_t n,
                             nb_error *err)
{
    nbi_tokenizer *tokenizer = NULL;
    nbi_ids ids = {0};
    NB_TRY(nbi_tokenizer_open(&tokenizer, dir, err));
    nb_status st = nbi_tokenizer_encode(tokenizer, text, n, true, &ids, err);
    nbi_tokenizer_close(&tokenizer);
    s->lengths = nbi_calloc(1, sizeof *s->lengths);
    if (st == NB_OK && !ids.len) st = nbi_fail(err, NB_INVALID, "--text: the file gives no tokens");
    if (st == NB_OK && !s->lengths) st = nbi_fail(err, NB_NO_MEMORY, "--text: out of memory");
    if (st != NB_OK) {
        nbi_ids_free(&ids);
        return st;
    }
    s->ids = ids.data;
    s->n_ids = ids.len;
    s->n = 1;
    s->lengths[0] = s->longest = (uint32_t)ids.len;
    return NB_OK;
}

static nb_status read_input(score *s, nb_error *err)
{
    if (s->token_ids) return read_token_ids(&s->seqs, s->token_ids, err);
    char *text = NULL;
    size_t n = 0;
    NB_TRY(nbi_file_read(&text, &n, s->text, TOKENS_FILE_MAX, err));
    nb_status st = encode_text(&s->seqs, s->model_dir, text, n, err);
    nbi_free(text);
    return st;
}

/* ---------------------------------------------------------------- the run */

static nb_status check_ids(const score *s, nb_error *err)
{
    const nbi_config *c = nbi_model_config(s->model);
    for (size_t i = 0; i < s->seqs.n_ids; i++) {
        if ((uint32_t)s->seqs.ids[i] >= c->vocab)
            return nbi_fail(err, NB_INVALID, "token id %d at %zu; the vocabulary ends at %u",
                            s->seqs.ids[i], i, c->vocab - 1);
    }
    if (s->seqs.longest > c->max_positions)
        return nbi_fail(err, NB_TOO_LARGE, "a sequence has %u tokens; the model's limit is %u",
                        s->seqs.longest, c->max_positions);
    return NB_OK;
}

static nb_status open_all(score *s, nb_error *err)
{
    nbi_backend_options bo = {.n_threads = s->threads,
                              .w4a4 = !strcmp(s->activations, "w4a4"),
                              .disable_graphs = s->disable_graphs,
                              .ranks_per_device = s->ranks.per_gpu,
                              .exchange = s->ranks.exchange,
                              .apart_sums = s->ranks.no_batch_overlap};
    nbi_dtype kv_dtype;
    NB_TRY(nbi_cpu_level_parse(&bo.cpu_level, s->cpu_level, err));
    NB_TRY(nbi_kv_dtype_parse(&kv_dtype, s->kv_dtype, err));
    nbi_comm_device(s->comm, &bo);
    NB_TRY(nbi_backend_open(&s->backend, s->device, &bo, err));
    nbi_model_options mo = {.dir = s->model_dir,
                            .comm = s->comm,
                            .attention = &s->attention,
                            .moe_runner = s->runner,
                            .tune_file = nbi_tune_place(s->tune_file),
                            .verify_scales = true};
    if (s->comm)
        NB_TRY(nbi_shard_make(&mo.shard, nbi_comm_rank(s->comm), nbi_comm_size(s->comm),
                              s->ranks.ep_size, err));
    mo.shard.latents = s->comm && s->ranks.shard_latents;
    NB_TRY(nbi_model_open(&s->model, s->backend, &mo, err));
    const nbi_kv_asked asked = {nbi_model_kv_algo(s->model), bo.cpu_level};
    NB_TRY(nbi_kv_dtype_choose(&kv_dtype, s->kv_dtype, &asked, err));
    NB_TRY(check_ids(s, err));
    uint32_t pages = (s->seqs.longest + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS;
    const nbi_config *c = nbi_model_config(s->model);
    NB_TRY(nbi_model_reserve(s->model, s->chunk, 1, s->chunk, s->seqs.longest, err));
    NB_TRY(nbi_kv_create(&s->kv, s->backend, nbi_model_local(s->model), kv_dtype, pages, err));
    if (!s->logits) return NB_OK;
    return nbi_npy_create(&s->npy, s->logits, c->vocab, err);
}

/* log softmax(logits)[id] */
static double log_probability(const float *logits, uint32_t vocab, int32_t id)
{
    double top = logits[0], sum = 0; /* sum ends at 1 or more: the largest gives exp(0) */
    for (uint32_t i = 1; i < vocab; i++) top = fmax(top, (double)logits[i]);
    for (uint32_t i = 0; i < vocab; i++) sum += exp((double)logits[i] - top);
    return (double)logits[id] - top - log(fmax(sum, 1.0));
}

static nb_status each_position(void *user, uint32_t position, const float *logits, nb_error *err)
{
    score *s = user;
    if (position + 1 < s->now_length) {
        uint32_t vocab = nbi_model_config(s->model)->vocab;
        s->log_likelihood += log_probability(logits, vocab, s->now[position + 1]);
        s->n_scored++;
    }
    return s->logits ? nbi_npy_row(&s->npy, logits, err) : NB_OK;
}

static nb_status run_all(score *s, nb_error *err)
{
    s->now = s->seqs.ids;
    for (uint32_t i = 0; i < s->seqs.n; i++) {
        s->now_length = s->seqs.lengths[i];
        NB_TRY(nbi_score_run(s->model, &s->kv, s->now, s->now_length, s->chunk, each_position, s,
                             err));
        s->now += s->now_length;
    }
    return s->logits ? nbi_npy_finish(&s->npy, err) : NB_OK;
}

static void close_all(score *s)
{
    nbi_npy_abandon(&s->npy);
    if (s->kv.layers) nbi_kv_destroy(&s->kv, s->backend);
    nbi_model_close(&s->model);
    nbi_backend_close(&s->backend);
    nbi_free(s->seqs.ids);
    nbi_free(s->seqs.lengths);
}

static void print_result(const score *s)
{
    double mean = s->n_scored ? s->log_likelihood / (double)s->n_scored : 0;
    double perplexity = exp(-mean);
    unsigned long long scored = s->n_scored;
    const char *runner = nbi_model_runner(s->model), *device = s->backend->description;
    if (s->json) {
        printf("{\"tokens\": %zu, \"scored\": %llu, \"log_likelihood\": %.9g, "
               "\"perplexity\": %.9g, \"runner\": \"%s\", \"device\": \"%s\"}\n",
               s->seqs.n_ids, scored, s->log_likelihood, perplexity, runner, device);
        return;
    }
    printf("tokens %zu, scored %llu\nlog-likelihood %.6f\nperplexity %.6f\nrunner %s, device %s\n",
           s->seqs.n_ids, scored, s->log_likelihood, perplexity, runner, device);
}

static int check_usage(const score *s)
{
    if (!s->token_ids == !s->text)
        return nbi_cli_usage(&command, "give one of --token-ids and --text");
    if (strcmp(s->activations, "weight-only") && strcmp(s->activations, "w4a4"))
        return nbi_cli_usage(&command, "--activations: \"%s\"; expected weight-only or w4a4",
                             s->activations);
    if (!s->chunk || s->chunk > 65536)
        return nbi_cli_usage(&command, "--chunk-size: %u; expected 1 to 65536", s->chunk);
    return -1;
}

static int run(score *s)
{
    nb_error err;
    const bool follows = nbi_ranks_follows(s->comm);
    if (follows) s->logits = NULL;
    nb_status st = read_input(s, &err);
    if (st == NB_OK) st = open_all(s, &err);
    if (st == NB_OK) st = run_all(s, &err);
    if (st == NB_OK && !follows) print_result(s);
    close_all(s);
    return st == NB_OK ? NBI_EXIT_OK : nbi_ranks_fail(s->comm, &command, &err);
}

int nbi_cmd_score(int argc, char **argv)
{
    score s = {.device = "cpu",
               .cpu_level = "auto",
               .activations = "weight-only",
               .kv_dtype = "auto",
               .runner = "auto",
               .chunk = 64};
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &s.model_dir, "DIR", "checkpoint in Hugging Face layout", true},
        {"token-ids", NBI_OPT_STRING, &s.token_ids, "FILE", "JSON list of ids, or list of lists",
         false},
        {"text", NBI_OPT_STRING, &s.text, "FILE", "text, encoded with the model's tokenizer",
         false},
        {"logits", NBI_OPT_STRING, &s.logits, "OUT.npy", "write float32 [positions, vocabulary]",
         false},
        {"chunk-size", NBI_OPT_U32, &s.chunk, "N", "tokens per step (default 64)", false},
        {"device", NBI_OPT_STRING, &s.device, "NAME", "cpu (default), cuda, auto", false},
        {"disable-cuda-graph", NBI_OPT_FLAG, &s.disable_graphs, NULL,
         "launch every operator of every step by itself", false},
        {"cpu-level", NBI_OPT_STRING, &s.cpu_level, "LEVEL",
         "auto (default), or at most reference, avx2, avx512, amx", false},
        {"activations", NBI_OPT_STRING, &s.activations, "KIND",
         "weight-only (default), or w4a4: NVFP4 activations\nas the checkpoint's input scales say",
         false},
        {"kv-cache-dtype", NBI_OPT_STRING, &s.kv_dtype, "TYPE",
         "auto (default: fp8_e4m3 where the checkpoint asks for FP8,\nelse bf16; f32 at level "
         "reference), bf16, fp8_e4m3, f32",
         false},
        {"moe-runner-backend", NBI_OPT_STRING, &s.runner, "NAME", "default auto", false},
        NBI_TUNE_OPTION_ROW(s.tune_file),
        NBI_ATTENTION_OPTION_ROWS(s.attention.backend, s.attention.prefill, s.attention.decode,
                                  s.attention.sparse_prefill, s.attention.sparse_decode),
        NBI_MLA_OPTION_ROWS(s.attention.mla_prefill, s.attention.mla_block),
        {"threads", NBI_OPT_U32, &s.threads, "N", "default: all cores this process may use", false},
        NBI_RANKS_OPTION_ROWS(&s.ranks),
        {"json", NBI_OPT_FLAG, &s.json, NULL, "one JSON object on stdout", false},
        {0},
    };
    char **kept = nbi_ranks_keep(argc, argv);
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status < 0) status = check_usage(&s);
    if (status < 0) status = nbi_ranks_enter(&s.comm, &s.ranks, &command, kept, false);
    nbi_free(kept);
    if (status >= 0) return status;
    nbi_cli_log_start(NB_LOG_WARN);
    nb_engine_options engine = {.n_threads = s.threads};
    nbi_ranks_apply(s.comm, &s.ranks, &engine);
    s.threads = engine.n_threads;
    status = run(&s);
    nbi_comm_close(&s.comm);
    return status;
}
