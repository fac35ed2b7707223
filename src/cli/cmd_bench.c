/* nibble bench: decode and prefill speed of a checkpoint as a share of what the memory allows. */
#include <stdio.h>
#include <string.h>

#include "cli/attention_options.h"
#include "cli/ranks.h"
#include "cli/tune_options.h"
#include "perf/bench.h"

static const nbi_command command = {
    .name = "bench",
    .summary = "Decode and prefill speed against the floor of the machine's read bandwidth.",
    .usage = "(decode | prefill) --model DIR [OPTIONS]\n       nibble bench serve [OPTIONS]",
    .text =
        "Runs the model on random tokens, fresh each step, so that experts are chosen as in real\n"
        "use. The floor of a token is the bytes that it must read, divided by the bandwidth that\n"
        "plain loads reach over the same mapped weights in the same run. Times are medians over\n"
        "the repeats, with the smallest and the largest. gmac_per_s counts the multiply-adds of\n"
        "all matrix products, not the attention over the cache.\n"
        "--breakdown times every operator call on its device: components as in nibble roofline,\n"
        "with gaps as rows of their own, so that rows add up to the step.\n"
        "  decode   steps of --batch sequences whose caches hold --context tokens\n"
        "  prefill  prompts of --tokens tokens behind --context tokens\n"
        "  serve    load against a running server, over HTTP: see nibble bench serve --help",
    .operands = "decode or prefill",
};

typedef struct args {
    nbi_bench_options bench;
    const char *model, *cpu_level, *activations;
    uint32_t tokens;
    bool json;
} args;

static nb_status write_json(nbi_buf *out, const args *a, const nbi_bench_result *r)
{
    NB_TRY(nbi_buf_addf(
        out,
        "{\"bytes_per_token\": %llu, \"read_bandwidth\": %.6g, \"floor_ms\": %.6g, "
        "\"ms_per_token\": %.6g, \"ms_per_token_min\": %.6g, \"ms_per_token_max\": %.6g, "
        "\"tokens_per_s\": %.6g, \"share_of_floor\": %.4g, \"gmac_per_s\": %.6g, "
        "\"weight_bytes\": %llu, \"threads\": %u, \"runner\": \"%s\", \"device\": \"%s\"",
        (unsigned long long)r->bytes_per_token, r->read_bandwidth, r->floor_ms, r->ms_per_token,
        r->ms_per_token_min, r->ms_per_token_max, r->tokens_per_s, r->share_of_floor, r->gmac_per_s,
        (unsigned long long)r->weight_bytes, r->n_threads, r->runner, r->device));
    if (a->bench.oea_k0)
        NB_TRY(nbi_buf_addf(out,
                            ", \"oea_k0\": %u, \"full_ms_per_token\": %.6g, "
                            "\"experts_before\": %.6g, \"experts_after\": %.6g",
                            a->bench.oea_k0, r->full_ms_per_token, r->experts_before,
                            r->experts_after));
    if (a->bench.breakdown) {
        NB_TRY(nbi_buf_addf(
            out, ", \"timed_ms_per_token\": %.6g, \"breakdown\": ", r->timed_ms_per_token));
        NB_TRY(nbi_breakdown_json(out, &r->breakdown));
    }
    return nbi_buf_addf(out, "}\n");
}

static int print_json(const args *a, const nbi_bench_result *r)
{
    nbi_buf text = {0};
    nb_error err;
    int status = NBI_EXIT_OK;
    if (write_json(&text, a, r) == NB_OK) {
        fputs(text.data, stdout);
    } else {
        nbi_fail(&err, NB_NO_MEMORY, "no memory for the JSON");
        status = nbi_cli_fail(&command, &err);
    }
    nbi_buf_free(&text);
    return status;
}

static void print_text(const args *a, const nbi_bench_result *r)
{
    char bytes[24], weights[24], rate[24];
    printf("%s, batch %u, context %u, tokens %u, repeats %u; runner %s, %s, weights %s\n",
           a->bench.prefill ? "prefill" : "decode", a->bench.batch, a->bench.context,
           a->bench.tokens, a->bench.repeat, r->runner, r->device,
           nbi_cli_bytes(weights, r->weight_bytes));
    printf("read per token    %s\n", nbi_cli_bytes(bytes, r->bytes_per_token));
    printf("read bandwidth    %s/s\n", nbi_cli_bytes(rate, (uint64_t)r->read_bandwidth));
    printf("floor             %.3f ms per token\n", r->floor_ms);
    printf("time              %.3f ms per token (%.3f to %.3f), %.1f tokens/s\n", r->ms_per_token,
           r->ms_per_token_min, r->ms_per_token_max, r->tokens_per_s);
    if (a->bench.oea_k0)
        printf(
            "with all experts  %.3f ms per token, %.1f %% more; distinct experts of a layer %.1f "
            "instead of %.1f\n",
            r->full_ms_per_token, 100 * (r->full_ms_per_token / r->ms_per_token - 1),
            r->experts_after, r->experts_before);
    printf("share of floor    %.1f %%\n", 100 * r->share_of_floor);
    printf("multiply-adds     %.1f GMAC/s", r->gmac_per_s);
    if (r->n_threads) printf(", %.1f per thread", r->gmac_per_s / r->n_threads);
    printf("\n");
}

static void print_row(const nbi_breakdown_row *r)
{
    char bytes[24], rate[24], per_s[32] = "", floor[24] = "", share[24] = "";
    if (r->bytes > 0 && r->ms > 0)
        snprintf(per_s, sizeof per_s, "%s/s",
                 nbi_cli_bytes(rate, (uint64_t)(1e3 * r->bytes / r->ms)));
    if (r->floor_ms > 0) {
        snprintf(floor, sizeof floor, "%.1f", 1e3 * r->floor_ms);
        if (r->ms > 0) snprintf(share, sizeof share, "%.1f %%", 100 * r->share_of_floor);
    }
    char name[64];
    snprintf(name, sizeof name, "%s%s", r->op ? "  " : "", r->op ? r->op : r->component);
    printf("%-18s %8.0f %11.1f %7.1f %% %11s %13s %10s %9s\n", name, r->calls, 1e3 * r->ms,
           100 * r->share_of_step, r->bytes > 0 ? nbi_cli_bytes(bytes, (uint64_t)r->bytes) : "",
           per_s, floor, share);
}

/* Components with more than one operator have these below them. */
static void print_breakdown(const nbi_bench_result *r)
{
    const nbi_breakdown *b = &r->breakdown;
    double sum = 0;
    printf("\n%-18s %8s %11s %9s %11s %13s %10s %9s\n", "per step", "calls", "time us", "of step",
           "bytes", "rate", "floor us", "of floor");
    for (uint32_t i = 0; i < b->n_rows; i++) {
        uint32_t parts = 0;
        print_row(&b->rows[i]);
        sum += b->rows[i].ms;
        for (uint32_t k = 0; k < b->n_ops; k++)
            parts += !strcmp(b->ops[k].component, b->rows[i].component);
        for (uint32_t k = 0; parts > 1 && k < b->n_ops; k++)
            if (!strcmp(b->ops[k].component, b->rows[i].component)) print_row(&b->ops[k]);
    }
    print_row(&b->step);
    printf("\nrows add up to     %.3f ms of a step of %.3f ms (%.2f %%), over %llu timed steps\n",
           sum, b->step.ms, b->step.ms > 0 ? 100 * sum / b->step.ms : 0,
           (unsigned long long)b->steps);
    printf("timed              %.3f ms per token, %+.2f %% of the same untimed\n",
           r->timed_ms_per_token, 100 * (r->timed_ms_per_token / r->ms_per_token - 1));
    printf("most time above the floor:\n");
    for (uint32_t i = 0; i < b->n_slowest; i++)
        printf("  %u. %s%s%s, %.1f us: %s\n", i + 1, b->slowest[i].row.component,
               b->slowest[i].row.op ? ", " : "", b->slowest[i].row.op ? b->slowest[i].row.op : "",
               1e3 * b->slowest[i].lost_ms, b->slowest[i].why);
}

/* -1 to go on, else the exit status. */
static int settle(args *a, int n_operands, char **argv)
{
    if (n_operands != 1 || (strcmp(argv[1], "decode") && strcmp(argv[1], "prefill")))
        return nbi_cli_usage(&command, "say what to measure: decode, prefill or serve");
    a->bench.prefill = !strcmp(argv[1], "prefill");
    if (a->bench.trace) a->bench.breakdown = true;
    a->bench.dir = a->model;
    a->bench.tokens = a->tokens ? a->tokens : a->bench.prefill ? 512 : 32;
    if (strcmp(a->activations, "weight-only") && strcmp(a->activations, "w4a4"))
        return nbi_cli_usage(&command, "--activations: \"%s\"; expected weight-only or w4a4",
                             a->activations);
    a->bench.backend.w4a4 = !strcmp(a->activations, "w4a4");
    nb_error err;
    if (nbi_cpu_level_parse(&a->bench.backend.cpu_level, a->cpu_level, &err) != NB_OK ||
        nbi_kv_dtype_parse(&(nbi_dtype){NBI_BF16}, a->bench.kv_dtype, &err) != NB_OK)
        return nbi_cli_fail(&command, &err);
    return -1;
}

/* Every rank runs the same steps; rank 0 tells of them. */
static int run(args *a)
{
    nb_error err;
    nbi_bench_result result;
    if (nbi_ranks_follows(a->bench.ranks)) a->bench.trace = NULL;
    if (nbi_bench_run(&result, &a->bench, &err) != NB_OK)
        return nbi_ranks_fail(a->bench.ranks, &command, &err);
    if (nbi_ranks_follows(a->bench.ranks)) return NBI_EXIT_OK;
    if (a->json) return print_json(a, &result);
    print_text(a, &result);
    if (a->bench.breakdown) print_breakdown(&result);
    return NBI_EXIT_OK;
}

int nbi_cmd_bench(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "serve")) return nbi_cmd_bench_serve(argc - 1, argv + 1);
    args a = {.bench = {.batch = 1, .chunk = 512, .repeat = 5, .seed = 1, .kv_dtype = "auto"},
              .cpu_level = "auto",
              .activations = "weight-only"};
    nbi_bench_options *b = &a.bench;
    nbi_ranks_options ranks = {0};
    char **kept = nbi_ranks_keep(argc, argv);
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &a.model, "DIR", "checkpoint in Hugging Face layout", true},
        {"device", NBI_OPT_STRING, &b->device, "NAME", "cpu (default), cuda, auto", false},
        {"disable-cuda-graph", NBI_OPT_FLAG, &b->backend.disable_graphs, NULL,
         "launch every operator of every step by itself", false},
        {"batch", NBI_OPT_U32, &b->batch, "N", "sequences (default 1)", false},
        {"context", NBI_OPT_U32, &b->context, "N", "tokens already in the cache (default 0)",
         false},
        {"tokens", NBI_OPT_U32, &a.tokens, "N",
         "decode: steps of a repeat (default 32);\nprefill: tokens of a prompt (default 512)",
         false},
        {"repeat", NBI_OPT_U32, &b->repeat, "N", "default 5", false},
        {"chunk-size", NBI_OPT_U32, &b->chunk, "N", "prompt tokens per step (default 512)", false},
        {"seed", NBI_OPT_U64, &b->seed, "N", "of the token ids (default 1)", false},
        {"cpu-level", NBI_OPT_STRING, &a.cpu_level, "LEVEL",
         "auto (default), or at most reference, avx2, avx512, amx", false},
        {"activations", NBI_OPT_STRING, &a.activations, "KIND",
         "weight-only (default), or w4a4: NVFP4 activations\nas the checkpoint's input scales say",
         false},
        {"kv-cache-dtype", NBI_OPT_STRING, &a.bench.kv_dtype, "TYPE",
         "auto (default: fp8_e4m3 where the checkpoint asks for FP8,\nelse bf16; f32 at level "
         "reference), bf16, fp8_e4m3, f32",
         false},
        {"moe-runner-backend", NBI_OPT_STRING, &b->moe_runner, "NAME", "default auto", false},
        NBI_TUNE_OPTION_ROW(b->tune_file),
        NBI_ATTENTION_OPTION_ROWS(b->attention.backend, b->attention.prefill, b->attention.decode,
                                  b->attention.sparse_prefill, b->attention.sparse_decode),
        NBI_MLA_OPTION_ROWS(b->attention.mla_prefill, b->attention.mla_block),
        {"oea-k0", NBI_OPT_U32, &b->oea_k0, "K0",
         "decode: a token keeps its first K0 experts and takes more only\nof those that the step "
         "reads anyway; measured in turns with all\nof them (default 0: off)",
         false},
        {"breakdown", NBI_OPT_FLAG, &b->breakdown, NULL,
         "where a step's time goes: a repeat with every operator timed\nbehind every other one",
         false},
        {"trace", NBI_OPT_STRING, &b->trace, "FILE",
         "the same, and the events of the last timed repeat, for Perfetto\nor chrome://tracing",
         false},
        {"threads", NBI_OPT_U32, &b->backend.n_threads, "N",
         "default: all cores this process may use", false},
        NBI_RANKS_OPTION_ROWS(&ranks),
        {"json", NBI_OPT_FLAG, &a.json, NULL, "one JSON object on stdout", false},
        {0},
    };
    int n_operands = 0;
    int status = nbi_cli_parse(&command, options, argc, argv, &n_operands);
    if (status < 0) status = settle(&a, n_operands, argv);
    if (status < 0) status = nbi_ranks_enter(&b->ranks, &ranks, &command, kept, false);
    nbi_free(kept);
    if (status >= 0) return status;
    b->tune_file = nbi_tune_place(b->tune_file);
    nbi_cli_log_start(NB_LOG_WARN);
    nb_engine_options engine = {.n_threads = b->backend.n_threads};
    nbi_ranks_apply(b->ranks, &ranks, &engine);
    b->ep_size = engine.ep_size;
    b->shard_latents = engine.shard_latents;
    b->backend.n_threads = engine.n_threads;
    b->backend.ranks_per_device = engine.ranks_per_gpu;
    b->backend.exchange = engine.gpu_exchange;
    b->backend.apart_sums = engine.disable_single_batch_overlap;
    status = run(&a);
    nbi_comm_close(&b->ranks);
    return status;
}
