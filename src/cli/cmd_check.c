/* nibble check: are the kernels of this device right on this model's weights, and how near to what
 * its memory allows. One JSON object is made; text is printed while it grows. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/attention_options.h"
#include "cli/default_model.h"
#include "cli/tune_options.h"
#include "comm/comm.h"
#include "model/gate.h"
#include "model/synth.h"
#include "moe/runner.h"
#include "perf/bandwidth.h"

static const nbi_command command = {
    .name = "check",
    .summary = "Are the kernels of this device right on this model, and how fast.",
    .usage =
        "[--model DIR | --like SHAPE] [--device NAME] [--moe-runner-backend NAME|all] [--json]",
    .text =
        "Runs linear layers, attention and MoE runners on weights of the model and compares them\n"
        "with sums in double. The error is the largest difference of one value, over the root\n"
        "mean square of its row. Runners and names that cannot be used here are listed with the\n"
        "reason. Exit status 1 when something is wrong that serve would use: nibble serve\n"
        "refuses to start then. Times are those of one layer, alone, called again and again: what\n"
        "fits into a cache comes out above 100 % of the floor.\n\n"
        "Without --model the embedded model is taken; --like makes one layer of random weights in\n"
        "the shape of a model, see nibble synth --help.",
};

#define ROWS         512u
#define SEQS         8u
#define CONTEXT      1024u
#define DEVICE_BYTES ((size_t)2 << 30)
#define PASS_BYTES   ((uint64_t)1 << 29)
#define LIKE_EXPERTS 16u

typedef struct check {
    const char *dir, *like, *device, *runner, *cpu_level, *activations, *kv_dtype, *tune_file;
    uint32_t threads, tp_size, ep_size;
    bool json;
    nbi_attention_names attention;
    char *found, *made; /* the embedded model; a folder to be deleted */
    nbi_backend *b;
    nbi_model *model;
    nbi_dtype kv;
    double rate; /* bytes per second */
    json_t *results;
    const char *last_kind;
} check;

/* ---------------------------------------------------------------- the model */

/* A flat folder. */
static void delete_folder(const char *path)
{
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        char *file = nbi_path_join(path, e->d_name);
        if (file) unlink(file);
        nbi_free(file);
    }
    if (d) closedir(d);
    rmdir(path);
}

static nb_status make_like(check *c, nb_error *err)
{
    static const char *const sets[] = {"vocab_size=2048", "first_k_dense_replace=0"};
    const char *tmp = getenv("TMPDIR");
    c->made = nbi_path_join(tmp && *tmp ? tmp : "/tmp", "nibble-check-XXXXXX");
    if (!c->made) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    if (!mkdtemp(c->made)) return nbi_fail(err, NB_IO, "%s: cannot be created", c->made);
    c->dir = c->made;
    nbi_synth_result ignored;
    return nbi_synth(&ignored,
                     &(nbi_synth_options){.like = c->like,
                                          .out_dir = c->made,
                                          .n_layers = 1,
                                          .n_experts = LIKE_EXPERTS,
                                          .sets = sets,
                                          .n_sets = sizeof sets / sizeof *sets,
                                          .seed = 1,
                                          .weights = NBI_SYNTH_NVFP4_EXPERTS,
                                          .n_threads = c->threads},
                     err);
}

static nb_status find_model(check *c, nb_error *err)
{
    if (c->like) return make_like(c, err);
    if (c->dir) return NB_OK;
    NB_TRY(nbi_default_model(&c->found, err));
    c->dir = c->found;
    return NB_OK;
}

static uint32_t context_of(const nbi_config *k)
{
    uint32_t n = CONTEXT;
    if (k->has_indexer && n < k->index_topk + CONTEXT / 4) n = k->index_topk + CONTEXT / 4;
    return n < k->max_positions ? n : k->max_positions;
}

static nb_status open_all(check *c, nb_error *err)
{
    nbi_backend_options bo = {.n_threads = c->threads, .w4a4 = !strcmp(c->activations, "w4a4")};
    NB_TRY(nbi_cpu_level_parse(&bo.cpu_level, c->cpu_level, err));
    NB_TRY(nbi_kv_dtype_parse(&c->kv, c->kv_dtype, err));
    NB_TRY(find_model(c, err));
    NB_TRY(nbi_backend_open(&c->b, c->device, &bo, err));
    const nbi_model_options mo = {.dir = c->dir,
                                  .moe_runner = strcmp(c->runner, "all") ? c->runner : "auto",
                                  .tune_file = nbi_tune_place(c->tune_file),
                                  .attention = &c->attention,
                                  .verify_scales = true};
    NB_TRY(nbi_model_open(&c->model, c->b, &mo, err));
    const nbi_kv_asked asked = {nbi_model_kv_algo(c->model), bo.cpu_level};
    NB_TRY(nbi_kv_dtype_choose(&c->kv, c->kv_dtype, &asked, err));
    return nbi_model_reserve(c->model, ROWS, SEQS, 1, context_of(nbi_model_config(c->model)), err);
}

static void close_all(check *c)
{
    nbi_model_close(&c->model);
    nbi_backend_close(&c->b);
    if (c->made) delete_folder(c->made);
    nbi_free(c->made);
    nbi_free(c->found);
    json_decref(c->results);
}

/* What the memory gives; 0 when it cannot be measured, and then there is no share. */
static nb_status measure(check *c, nb_error *err)
{
    if (!c->b->ops->read_bandwidth) {
        nbi_bandwidth *bw = NULL;
        NB_TRY(nbi_bandwidth_open(&bw, c->dir, c->threads, 0, err));
        for (int i = 0; i < 3; i++) {
            const double rate = nbi_bandwidth_pass(bw, PASS_BYTES);
            if (rate > c->rate) c->rate = rate;
        }
        nbi_bandwidth_close(&bw);
        return NB_OK;
    }
    const size_t most = c->b->memory_bytes / 4, bytes = most < DEVICE_BYTES ? most : DEVICE_BYTES;
    void *memory = c->b->ops->alloc(c->b, bytes);
    if (!memory) return NB_OK;
    c->rate = c->b->ops->read_bandwidth(c->b, memory, bytes);
    c->b->ops->release(c->b, memory, bytes);
    return NB_OK;
}

/* ---------------------------------------------------------------- results */

static double share(const check *c, const nbi_gate_result *r)
{
    if (r->seconds <= 0 || c->rate <= 0) return 0;
    return (double)r->bytes / c->rate / r->seconds;
}

static void print_result(check *c, const nbi_gate_result *r)
{
    char bytes[24], where[160];
    if (!c->last_kind || strcmp(c->last_kind, r->kind) != 0)
        printf("\n  %-9s %-52s %-6s %9s %6s %7s %9s %10s %7s\n", "", r->kind, "", "error", "rows",
               "context", "us", "reads", "floor");
    c->last_kind = r->kind;
    if (!r->supported) {
        printf("  %-9s %-52s %s\n", "not here", r->path, r->why);
        return;
    }
    snprintf(where, sizeof where,
             strcmp(r->kind, "linear") && strcmp(r->kind, "mlp") ? "%s" : "%s  %s", r->path,
             r->where);
    printf("  %-9s %-52s %-6s %9.2g %6u", r->ok ? "ok" : "WRONG", where, r->chosen ? "chosen" : "",
           r->error, r->rows);
    if (r->context)
        printf(" %7u", r->context);
    else
        printf(" %7s", "");
    if (r->seconds > 0)
        printf(" %9.1f %10s %5.1f %%", 1e6 * r->seconds, nbi_cli_bytes(bytes, r->bytes),
               100 * share(c, r));
    printf("\n");
    if (!r->ok && r->why[0]) printf("            %s\n", r->why);
    if (!r->ok && !r->why[0]) printf("            the error may be at most %.3g\n", r->bound);
}

static void each_result(void *user, const nbi_gate_result *r)
{
    check *c = user;
    if (!c->json) {
        print_result(c, r);
        return;
    }
    /* JSON has no infinity: an error that is not finite becomes null */
    json_t *error = r->error <= 1e300 ? json_real(r->error) : json_null();
    json_t *o =
        json_pack("{s:s, s:s, s:s, s:b, s:b, s:b, s:s, s:o, s:f, s:I, s:I, s:f, s:I, s:f}", "kind",
                  r->kind, "path", r->path, "where", r->where, "chosen", r->chosen, "supported",
                  r->supported, "ok", r->ok, "why", r->why, "error", error, "bound", r->bound,
                  "rows", (json_int_t)r->rows, "context", (json_int_t)r->context, "seconds",
                  r->seconds, "bytes", (json_int_t)r->bytes, "share_of_floor", share(c, r));
    json_array_append_new(c->results, o);
}

static void print_names(const check *c)
{
    char why[256];
    printf("\n  %-9s --attention-backend\n", "");
    for (const char *const *n = nbi_attention_known(); *n; n++) {
        const bool yes =
            nbi_attention_supports(c->b, nbi_model_config(c->model), *n, why, sizeof why);
        printf("  %-9s %-52s %s\n", yes ? "ok" : "not here", *n, yes ? "" : why);
    }
}

static bool on_ranks(const check *c, const nbi_moe_runner_ops *r, char *why, size_t why_bytes)
{
    return nbi_gate_runner_on_ranks(c->model, r, c->tp_size, c->ep_size ? c->ep_size : 1, why,
                                    why_bytes);
}

/* With --tp-size: the runners that could do what the ranks would hold. */
static void print_ranks(const check *c)
{
    char why[256];
    printf("\n  %-9s runner on ranks, --tp-size %u --ep-size %u\n", "", c->tp_size,
           c->ep_size ? c->ep_size : 1);
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); *r; r++) {
        const bool yes = on_ranks(c, *r, why, sizeof why);
        printf("  %-9s %-52s %s\n", yes ? "ok" : "not here", (*r)->name, yes ? "" : why);
    }
}

static json_t *ranks_json(const check *c)
{
    char why[256];
    json_t *all = json_array();
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); c->tp_size && *r; r++) {
        const bool yes = on_ranks(c, *r, why, sizeof why);
        json_array_append_new(all, json_pack("{s:s, s:b, s:s}", "name", (*r)->name, "supported",
                                             yes, "why", yes ? "" : why));
    }
    return all;
}

static void print_json(const check *c, nb_status st, const nb_error *err)
{
    char why[256];
    json_t *names = json_array();
    for (const char *const *n = nbi_attention_known(); *n; n++) {
        const bool yes =
            nbi_attention_supports(c->b, nbi_model_config(c->model), *n, why, sizeof why);
        json_array_append_new(names, json_pack("{s:s, s:b, s:s}", "name", *n, "supported", yes,
                                               "why", yes ? "" : why));
    }
    json_t *root = json_pack(
        "{s:s, s:s, s:s, s:f, s:b, s:s, s:O, s:o, s:o}", "model", c->like ? c->like : c->dir,
        "device", c->b->description, "runner", nbi_model_runner(c->model), "read_bandwidth",
        c->rate, "ok", st == NB_OK, "failure", st == NB_OK ? "" : err->text, "results", c->results,
        "attention_names", names, "runners_on_ranks", ranks_json(c));
    char *dump = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    if (dump) puts(dump);
    nbi_free(dump); /* jansson allocates through base/mem.h */
    json_decref(root);
}

static nb_status run(check *c, nb_error *err)
{
    const nbi_gate_options go = {.runner = !strcmp(c->runner, "all") ? "all" : NULL,
                                 .kv_dtype = c->kv,
                                 .max_seqs = SEQS,
                                 .max_context = context_of(nbi_model_config(c->model)),
                                 .each = each_result,
                                 .user = c};
    char rate[24];
    NB_TRY(measure(c, err));
    if (!c->json)
        printf("%s on %s, runner %s; read bandwidth %s/s\n", c->like ? c->like : c->dir,
               c->b->description, nbi_model_runner(c->model),
               nbi_cli_bytes(rate, (uint64_t)c->rate));
    const nb_status st = nbi_gate_run(c->model, &go, err);
    if (c->json)
        print_json(c, st, err);
    else
        print_names(c);
    if (!c->json && c->tp_size) print_ranks(c);
    return st;
}

int nbi_cmd_check(int argc, char **argv)
{
    check c = {.device = "auto",
               .runner = "all",
               .cpu_level = "auto",
               .activations = "weight-only",
               .kv_dtype = "auto"};
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &c.dir, "DIR",
         "checkpoint in Hugging Face layout (default: the embedded model)", false},
        {"like", NBI_OPT_STRING, &c.like, "SHAPE", "one layer of this shape, random weights",
         false},
        {"device", NBI_OPT_STRING, &c.device, "NAME",
         "auto (default): a GPU where there is one; cpu, cuda", false},
        {"moe-runner-backend", NBI_OPT_STRING, &c.runner, "NAME",
         "all (default), auto: the one that serve takes, or a name", false},
        {"tp-size", NBI_OPT_U32, &c.tp_size, "N",
         "say also which runners could do what N ranks would hold;\nthe rest of the check is of "
         "one",
         false},
        {"ep-size", NBI_OPT_U32, &c.ep_size, "M", "whole experts in M parts of them (default 1)",
         false},
        NBI_TUNE_OPTION_ROW(c.tune_file),
        NBI_ATTENTION_OPTION_ROWS(c.attention.backend, c.attention.prefill, c.attention.decode,
                                  c.attention.sparse_prefill, c.attention.sparse_decode),
        {"cpu-level", NBI_OPT_STRING, &c.cpu_level, "LEVEL",
         "auto (default), or at most reference, avx2, avx512, amx", false},
        {"activations", NBI_OPT_STRING, &c.activations, "KIND", "weight-only (default), or w4a4",
         false},
        {"kv-cache-dtype", NBI_OPT_STRING, &c.kv_dtype, "TYPE",
         "auto (default), bf16, fp8_e4m3, f32", false},
        {"threads", NBI_OPT_U32, &c.threads, "N", "default: all cores this process may use", false},
        {"json", NBI_OPT_FLAG, &c.json, NULL, "one JSON object on stdout", false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status >= 0) return status;
    nbi_shard shard;
    nb_error err;
    if (c.tp_size > NBI_RANKS_MAX || (c.ep_size && !c.tp_size))
        return nbi_cli_usage(&command, "--tp-size is %u; expected 1 to %u", c.tp_size,
                             NBI_RANKS_MAX);
    if (c.tp_size && nbi_shard_make(&shard, 0, c.tp_size, c.ep_size, &err) != NB_OK)
        return nbi_cli_usage(&command, "--ep-size: %s", err.text);
    if (c.dir && c.like) return nbi_cli_usage(&command, "give one of --model and --like");
    if (strcmp(c.activations, "weight-only") && strcmp(c.activations, "w4a4"))
        return nbi_cli_usage(&command, "--activations: \"%s\"; expected weight-only or w4a4",
                             c.activations);
    nbi_cli_log_start(NB_LOG_WARN);
    c.results = json_array();
    nb_status st = open_all(&c, &err);
    if (st == NB_OK) st = run(&c, &err);
    close_all(&c);
    return st == NB_OK ? NBI_EXIT_OK : nbi_cli_fail(&command, &err);
}
