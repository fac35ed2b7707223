/* nibble tune: which MoE runner is fastest here, by the rows of a step. Writes the file that the
 * commands which run a model read. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "cli/default_model.h"
#include "cli/tune_options.h"
#include "model/tune.h"

static const nbi_command command = {
    .name = "tune",
    .summary = "Which MoE runner is fastest here, by the rows of a step.",
    .usage = "[--model DIR] [--device NAME] [--rows N] [--tune-file PATH] [--json]",
    .text =
        "Measures the MoE runners on experts of the model with 1, 2, 4, ... rows, and keeps the\n"
        "result for nibble serve and the other commands: with --moe-runner-backend auto they take\n"
        "the fastest for each step. Runners that would give a row other bits are not mixed. The\n"
        "file holds for this device, driver, shape of the model and build of nibble; another one\n"
        "is not used, and serve says so. Only runners whose results are right are measured. Stop\n"
        "what else runs on the machine first.",
};

#define ROWS    512u
#define SEQS    8u
#define CONTEXT 1024u

typedef struct tune {
    const char *dir, *device, *cpu_level, *activations, *place;
    uint32_t threads, rows;
    bool json;
    char *found; /* the embedded model */
    nbi_backend *b;
    nbi_model *model;
    nbi_dtype kv;
    uint32_t context;
    char *file;
} tune;

static nb_status open_all(tune *t, nb_error *err)
{
    nbi_backend_options bo = {.n_threads = t->threads, .w4a4 = !strcmp(t->activations, "w4a4")};
    NB_TRY(nbi_cpu_level_parse(&bo.cpu_level, t->cpu_level, err));
    if (!t->dir) {
        NB_TRY(nbi_default_model(&t->found, err));
        t->dir = t->found;
    }
    NB_TRY(nbi_backend_open(&t->b, t->device, &bo, err));
    const nbi_model_options mo = {.dir = t->dir, .moe_runner = "auto", .verify_scales = true};
    NB_TRY(nbi_model_open(&t->model, t->b, &mo, err));
    const nbi_kv_asked asked = {nbi_model_kv_algo(t->model), bo.cpu_level};
    NB_TRY(nbi_kv_dtype_choose(&t->kv, "auto", &asked, err));
    const nbi_config *c = nbi_model_config(t->model);
    t->context = CONTEXT < c->max_positions ? CONTEXT : c->max_positions;
    return nbi_model_reserve(t->model, ROWS, SEQS, 1, t->context, err);
}

static void close_all(tune *t)
{
    nbi_model_close(&t->model);
    nbi_backend_close(&t->b);
    nbi_free(t->found);
    nbi_free(t->file);
}

static void each_time(void *user, const nbi_gate_result *r)
{
    const tune *t = user;
    if (!t->json) printf("  %6u  %-12s %12.1f us\n", r->rows, r->path, 1e6 * r->seconds);
}

/* The folder is made when it is the default one or was named as a folder. */
static nb_status write_file(tune *t, const nbi_tune_result *r, nb_error *err)
{
    const char *place = nbi_tune_place(t->place);
    if (!place)
        return nbi_fail(err, NB_INVALID,
                        "neither XDG_CACHE_HOME nor HOME is set: name a file with --tune-file");
    if (place[strlen(place) - 1] == '/') NB_TRY(nbi_tune_make_folder(place, err));
    t->file = nbi_tune_path(place, &r->key);
    if (!t->file) return nbi_fail(err, NB_NO_MEMORY, "tune: out of memory");
    return nbi_tune_write(t->file, &r->key, &r->table, r->times, r->n_times, err);
}

static void print_text(const tune *t, const nbi_tune_result *r)
{
    char text[256];
    nbi_moe_table joined = r->table;
    nbi_moe_table_join(&joined);
    nbi_moe_table_text(&joined, text, sizeof text);
    printf("chosen: %s\nwritten to %s\n", text, t->file);
}

/* The file, and where it is. */
static nb_status print_json(const tune *t, nb_error *err)
{
    json_t *root = NULL;
    NB_TRY(nbi_json_load(&root, t->file, (size_t)1 << 20, err));
    json_object_set_new(root, "file", json_string(t->file));
    char *dump = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    if (dump) puts(dump);
    nbi_free(dump); /* jansson allocates through base/mem.h */
    json_decref(root);
    return NB_OK;
}

static nb_status run(tune *t, nb_error *err)
{
    nbi_tune_result result;
    if (!t->json) printf("%s on %s\n\n  %6s\n", t->dir, t->b->description, "rows");
    NB_TRY(nbi_tune_run(&result, t->model,
                        &(nbi_tune_options){.max_rows = t->rows,
                                            .kv_dtype = t->kv,
                                            .max_seqs = SEQS,
                                            .max_context = t->context,
                                            .each = each_time,
                                            .user = t},
                        err));
    NB_TRY(write_file(t, &result, err));
    if (t->json) return print_json(t, err);
    print_text(t, &result);
    return NB_OK;
}

static int check_usage(const tune *t)
{
    if (!t->rows || t->rows > ROWS)
        return nbi_cli_usage(&command, "--rows: %u; expected 1 to %u", t->rows, ROWS);
    if (strcmp(t->activations, "weight-only") && strcmp(t->activations, "w4a4"))
        return nbi_cli_usage(&command, "--activations: \"%s\"; expected weight-only or w4a4",
                             t->activations);
    if (t->place && (!t->place[0] || !strcmp(t->place, "none")))
        return nbi_cli_usage(&command, "--tune-file: \"%s\"; expected a file or a folder",
                             t->place);
    return -1;
}

int nbi_cmd_tune(int argc, char **argv)
{
    tune t = {.device = "auto", .cpu_level = "auto", .activations = "weight-only", .rows = ROWS};
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &t.dir, "DIR",
         "checkpoint in Hugging Face layout (default: the embedded model)", false},
        {"device", NBI_OPT_STRING, &t.device, "NAME",
         "auto (default): a GPU where there is one; cpu, cuda", false},
        {"rows", NBI_OPT_U32, &t.rows, "N",
         "measure up to so many rows (default 512); the last\nchoice holds for larger steps",
         false},
        NBI_TUNE_OPTION_ROW(t.place),
        {"cpu-level", NBI_OPT_STRING, &t.cpu_level, "LEVEL",
         "auto (default), or at most reference, avx2, avx512, amx", false},
        {"activations", NBI_OPT_STRING, &t.activations, "KIND", "weight-only (default), or w4a4",
         false},
        {"threads", NBI_OPT_U32, &t.threads, "N", "default: all cores this process may use", false},
        {"json", NBI_OPT_FLAG, &t.json, NULL, "one JSON object on stdout", false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status < 0) status = check_usage(&t);
    if (status >= 0) return status;
    nb_error err;
    nbi_cli_log_start(NB_LOG_WARN);
    nb_status st = open_all(&t, &err);
    if (st == NB_OK) st = run(&t, &err);
    close_all(&t);
    return st == NB_OK ? NBI_EXIT_OK : nbi_cli_fail(&command, &err);
}
