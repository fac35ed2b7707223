/* nibble inspect: what a checkpoint holds, whether it is sound, and what can run it. One JSON
 * object is made; text is printed from it. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "cli/cli.h"
#include "cli/default_model.h"
#include "model/census.h"
#include "moe/runner.h"

static const nbi_command command = {
    .name = "inspect",
    .summary = "What a checkpoint holds, whether it is sound, and what can run it.",
    .usage = "[--model DIR] [--json] [--verify]",
    .text = "Reads configuration files and tensor headers, checks that every tensor the model "
            "needs is there in\n"
            "the right shape with its scales, and lists tensors that nothing reads. A checkpoint "
            "that cannot be\n"
            "loaded is refused with a sentence and exit status 1.",
};

#define UNUSED_SHOWN 20 /* in text; --json lists all */

/* ---- facts to JSON */

static json_t *layers_json(const nbi_census *c)
{
    const nbi_config *k = &c->config;
    json_int_t sparse = 0, full = 0;
    for (uint32_t i = 0; i < k->n_layers; i++) {
        sparse += k->layer_sparse[i];
        full += k->has_indexer && k->layer_full_indexer[i];
    }
    return json_pack("{s:I, s:I, s:I, s:b, s:I}", "main", (json_int_t)k->n_layers, "sparse", sparse,
                     "dense", (json_int_t)k->n_layers - sparse, "mtp_stored", c->has_mtp,
                     "full_indexers", full);
}

static json_t *rope_json(const nbi_rope_config *r)
{
    json_t *o =
        json_pack("{s:f, s:I, s:s, s:s}", "theta", r->theta, "dim", (json_int_t)r->dim, "pairs",
                  r->interleaved ? "adjacent" : "halves", "type", r->yarn ? "yarn" : "default");
    if (o && r->yarn)
        json_object_update_new(o, json_pack("{s:f, s:I, s:f}", "factor", r->factor,
                                            "original_max_positions",
                                            (json_int_t)r->original_max_positions,
                                            "attention_factor", r->attention_factor));
    return o;
}

static json_t *config_json(const nbi_config *k)
{
    json_t *o =
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:s, s:f, s:o}", "hidden", (json_int_t)k->hidden,
                  "vocab", (json_int_t)k->vocab, "heads", (json_int_t)k->n_heads, "kv_heads",
                  (json_int_t)k->n_kv_heads, "max_positions", (json_int_t)k->max_positions,
                  "attention", k->attention == NBI_ATTENTION_MLA ? "mla" : "gqa", "softmax_scale",
                  (double)k->softmax_scale, "rope", rope_json(&k->rope));
    if (o && k->n_experts)
        json_object_update_new(
            o, json_pack("{s:I, s:I, s:I, s:I}", "experts", (json_int_t)k->n_experts,
                         "experts_per_token", (json_int_t)k->top_k, "shared_experts",
                         (json_int_t)k->n_shared, "expert_width", (json_int_t)k->moe_intermediate));
    if (o && k->has_indexer)
        json_object_update_new(o, json_pack("{s:I, s:I}", "index_topk", (json_int_t)k->index_topk,
                                            "index_heads", (json_int_t)k->index_heads));
    return o;
}

static json_t *quant_json(const nbi_census *c)
{
    const nbi_quant *q = &c->quant;
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:b, s:I, s:I, s:I}", "convention",
                     nbi_convention_name(c->convention), "declared",
                     nbi_convention_name(q->convention), "algorithm", q->algo, "producer",
                     q->producer, "kv_cache", q->kv_algo, "fused_experts", c->fused_experts,
                     "ignore_patterns", (json_int_t)q->n_ignore, "experts_with_unequal_gate_up",
                     (json_int_t)c->unequal_pairs, "without_input_scale",
                     (json_int_t)c->without_input_scale);
}

static json_t *cell_json(const char *component, const char *kind, const nbi_census_cell *cell)
{
    json_t *o = json_pack("{s:I, s:I, s:I}", "modules", (json_int_t)cell->modules, "weights",
                          (json_int_t)cell->weights, "bytes", (json_int_t)cell->bytes);
    if (component) json_object_set_new(o, "component", json_string(component));
    if (kind) json_object_set_new(o, "kind", json_string(kind));
    return o;
}

static void add_weights(json_t *root, const nbi_census *c)
{
    json_t *components = json_array(), *kinds = json_array();
    nbi_census_cell per_kind[NBI_WEIGHT_KIND_COUNT] = {0}, all = {0};
    for (int i = 0; i < NBI_COMPONENT_COUNT; i++)
        for (int k = 0; k < NBI_WEIGHT_KIND_COUNT; k++) {
            const nbi_census_cell *cell = &c->cells[i][k];
            if (!cell->modules) continue;
            json_array_append_new(components,
                                  cell_json(nbi_component_name((nbi_component)i),
                                            nbi_weight_kind_name((nbi_weight_kind)k), cell));
            nbi_census_cell *sums[] = {&per_kind[k], &all};
            for (int s = 0; s < 2; s++) {
                sums[s]->modules += cell->modules;
                sums[s]->weights += cell->weights;
                sums[s]->bytes += cell->bytes;
            }
        }
    for (int k = 0; k < NBI_WEIGHT_KIND_COUNT; k++)
        if (per_kind[k].modules)
            json_array_append_new(
                kinds, cell_json(NULL, nbi_weight_kind_name((nbi_weight_kind)k), &per_kind[k]));
    json_object_set_new(root, "components", components);
    json_object_set_new(root, "kinds", kinds);
    json_object_set_new(root, "total", cell_json(NULL, NULL, &all));
}

static json_t *unused_json(const nbi_census *c)
{
    json_t *list = json_array();
    size_t n = nbi_checkpoint_count(c->ckpt);
    for (size_t i = nbi_checkpoint_unused(c->ckpt, 0); i < n;
         i = nbi_checkpoint_unused(c->ckpt, i + 1)) {
        const nbi_st_tensor *t = nbi_checkpoint_at(c->ckpt, i);
        const char *note = nbi_tensor_note(t->name);
        json_t *o = json_pack("{s:s, s:I, s:s}", "name", t->name, "bytes", (json_int_t)t->bytes,
                              "note", note ? note : "");
        float value;
        if (t->dtype == NBI_F32 && t->bytes == sizeof value) { /* e.g. k_scale: worth its value */
            memcpy(&value, t->data, sizeof value);
            json_object_set_new(o, "value", json_real((double)value));
        }
        json_array_append_new(list, o);
    }
    return list;
}

/* Can the runner do every layer? The first reason why not. */
static bool runs_all(const nbi_moe_runner_ops *r, const nbi_backend *b, const nbi_census *c,
                     char *why, size_t n)
{
    const nbi_config *k = &c->config;
    nbi_moe_shape shape = {k->n_experts,    k->top_k,        k->hidden, k->moe_intermediate,
                           NBI_WEIGHT_NONE, NBI_WEIGHT_NONE, false,     0};
    for (uint32_t i = 0; i < k->n_layers + c->has_mtp; i++) {
        if (c->expert_kinds[i][0] == NBI_WEIGHT_NONE) continue;
        if (c->expert_kinds[i][0] == shape.kind_gate_up && c->expert_kinds[i][1] == shape.kind_down)
            continue; /* asked already */
        shape.kind_gate_up = c->expert_kinds[i][0];
        shape.kind_down = c->expert_kinds[i][1];
        if (!r->supports(b, &shape, why, n)) return false;
    }
    return true;
}

static json_t *runners_json(const nbi_census *c, const nbi_backend *b)
{
    json_t *list = json_array();
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); c->n_sparse && *r; r++) {
        char why[256] = "";
        bool yes = runs_all(*r, b, c, why, sizeof why);
        json_array_append_new(list, json_pack("{s:s, s:b, s:s, s:s}", "name", (*r)->name, "runs",
                                              yes, "reason", yes ? "" : why, "summary",
                                              (*r)->summary ? (*r)->summary : ""));
    }
    return list;
}

static json_t *report(const nbi_census *c, const char *dir, const nbi_backend *b)
{
    const nbi_checkpoint *k = c->ckpt;
    json_t *root = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:o, s:o, s:o}", "model", dir, "family",
        nbi_family_name(c->config.family), "files", (json_int_t)nbi_checkpoint_files(k), "tensors",
        (json_int_t)nbi_checkpoint_count(k), "bytes", (json_int_t)nbi_checkpoint_bytes(k), "layers",
        layers_json(c), "config", config_json(&c->config), "quantization", quant_json(c));
    add_weights(root, c);
    json_object_set_new(
        root, "head",
        json_string(c->stored_head ? "tied in the configuration, but stored: the stored one is used"
                    : c->config.tied_head ? "tied to the embedding"
                                          : "stored"));
    json_object_set_new(root, "unused", unused_json(c));
    json_object_set_new(root, "device", json_string(b->description));
    json_object_set_new(root, "runners", runners_json(c, b));
    return root;
}

/* ---- JSON to text */

static const char *text(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static long long whole(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static void print_head(const json_t *root)
{
    const json_t *layers = json_object_get(root, "layers"), *k = json_object_get(root, "config"),
                 *rope = json_object_get(k, "rope");
    char bytes[24];
    printf("%s\n", text(root, "model"));
    printf("  family      %s, %s attention, %lld heads (%lld for keys), hidden %lld, vocabulary "
           "%lld\n",
           text(root, "family"), text(k, "attention"), whole(k, "heads"), whole(k, "kv_heads"),
           whole(k, "hidden"), whole(k, "vocab"));
    printf("  layers      %lld: %lld dense, %lld with experts; MTP layer %s\n",
           whole(layers, "main"), whole(layers, "dense"), whole(layers, "sparse"),
           json_is_true(json_object_get(layers, "mtp_stored")) ? "stored" : "absent");
    if (whole(k, "experts"))
        printf("  experts     %lld, %lld per token, width %lld, %lld shared\n", whole(k, "experts"),
               whole(k, "experts_per_token"), whole(k, "expert_width"), whole(k, "shared_experts"));
    if (whole(k, "index_topk"))
        printf("  indexer     %lld heads, %lld positions, own in %lld of %lld layers\n",
               whole(k, "index_heads"), whole(k, "index_topk"), whole(layers, "full_indexers"),
               whole(layers, "main"));
    printf("  positions   %lld; rotary base %g over %lld values, pairs %s, type %s\n",
           whole(k, "max_positions"), json_number_value(json_object_get(rope, "theta")),
           whole(rope, "dim"), text(rope, "pairs"), text(rope, "type"));
    printf("  head        %s\n", text(root, "head"));
    printf("  files       %lld with %lld tensors, %s\n", whole(root, "files"),
           whole(root, "tensors"), nbi_cli_bytes(bytes, (uint64_t)whole(root, "bytes")));
}

static void print_quant(const json_t *q)
{
    printf("  weights     convention %s", text(q, "convention"));
    if (strcmp(text(q, "convention"), text(q, "declared")))
        printf(" (the configuration says %s)", text(q, "declared"));
    if (*text(q, "algorithm")) printf(", %s", text(q, "algorithm"));
    if (*text(q, "producer")) printf(", by %s", text(q, "producer"));
    printf(", experts %s\n",
           json_is_true(json_object_get(q, "fused_experts")) ? "stacked" : "one by one");
    if (whole(q, "experts_with_unequal_gate_up"))
        printf("  note        %lld experts have different global scales for gate and up; both are "
               "kept\n",
               whole(q, "experts_with_unequal_gate_up"));
    if (whole(q, "without_input_scale"))
        printf("  note        %lld NVFP4 matrices have no input scale: they run with plain "
               "activations only\n",
               whole(q, "without_input_scale"));
}

static void print_weights(const json_t *root)
{
    const json_t *list = json_object_get(root, "components"),
                 *total = json_object_get(root, "total");
    char bytes[24];
    printf("\n  %-22s %-11s %9s %16s %12s\n", "component", "kind", "modules", "weights", "bytes");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *o = json_array_get(list, i);
        printf("  %-22s %-11s %9lld %16lld %12s\n", text(o, "component"), text(o, "kind"),
               whole(o, "modules"), whole(o, "weights"),
               nbi_cli_bytes(bytes, (uint64_t)whole(o, "bytes")));
    }
    printf("  %-22s %-11s %9lld %16lld %12s\n", "all", "", whole(total, "modules"),
           whole(total, "weights"), nbi_cli_bytes(bytes, (uint64_t)whole(total, "bytes")));
}

static void print_unused(const json_t *list)
{
    size_t n = json_array_size(list);
    if (!n) return;
    printf("\n  %zu tensors that nothing reads:\n", n);
    for (size_t i = 0; i < n && i < UNUSED_SHOWN; i++) {
        const json_t *o = json_array_get(list, i), *value = json_object_get(o, "value");
        printf("    %s", text(o, "name"));
        if (value) printf(" = %g", json_real_value(value));
        printf("%s%s\n", *text(o, "note") ? ": " : "", text(o, "note"));
    }
    if (n > UNUSED_SHOWN) printf("    and %zu more (--json lists all)\n", n - UNUSED_SHOWN);
}

static void print_runners(const json_t *root)
{
    const json_t *list = json_object_get(root, "runners");
    printf("\n  on %s\n", text(root, "device"));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *o = json_array_get(list, i);
        bool runs = json_is_true(json_object_get(o, "runs"));
        printf("    runner %-12s %s  %s\n", text(o, "name"), runs ? "yes" : "no ",
               runs ? text(o, "summary") : text(o, "reason"));
    }
}

static void print_text(const json_t *root)
{
    print_head(root);
    print_quant(json_object_get(root, "quantization"));
    print_weights(root);
    print_unused(json_object_get(root, "unused"));
    print_runners(root);
}

static void print_json(const json_t *root)
{
    char *dump = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    if (dump) puts(dump);
    nbi_free(dump); /* jansson allocates through base/mem.h */
}

int nbi_cmd_inspect(int argc, char **argv)
{
    const char *dir = NULL;
    bool json = false, verify = false;
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &dir, "DIR",
         "folder in Hugging Face layout (default: the embedded model)", false},
        {"json", NBI_OPT_FLAG, &json, NULL, "one JSON object instead of text", false},
        {"verify", NBI_OPT_FLAG, &verify, NULL,
         "read every scale and refuse NaN, infinite, negative and zero ones", false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status >= 0) return status;
    nbi_cli_log_start(NB_LOG_WARN);
    nbi_census census = {0};
    nbi_backend *backend = NULL;
    nb_error err;
    char *found = NULL;
    const nbi_backend_options backend_options = {.cpu_level = nbi_cpu_detect()};
    if (!dir && nbi_default_model(&found, &err) != NB_OK) return nbi_cli_fail(&command, &err);
    if (found) dir = found;
    if (nbi_census_open(&census, dir, verify, &err) != NB_OK ||
        nbi_backend_open(&backend, "auto", &backend_options, &err) != NB_OK) {
        status = nbi_cli_fail(&command, &err);
    } else {
        json_t *root = report(&census, dir, backend);
        if (json)
            print_json(root);
        else
            print_text(root);
        json_decref(root);
        status = NBI_EXIT_OK;
    }
    nbi_backend_close(&backend);
    nbi_census_close(&census);
    nbi_free(found);
    return status;
}
