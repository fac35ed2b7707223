/* nibble roofline: the floor of a decode step by arithmetic. Called by main.c. */
#include <stdio.h>
#include <string.h>

#include "backend/attention_path.h"
#include "base/json.h"
#include "cli/cli.h"
#include "model/census.h"
#include "perf/roofline.h"

static const nbi_command command = {
    .name = "roofline",
    .summary = "What a decode step costs at least: bytes, operations, time, memory.",
    .usage = "(--model DIR | --like SHAPE) (--device NAME | --bandwidth B) [OPTIONS]",
    .text =
        "Arithmetic alone: nothing is run, and of a checkpoint only headers are read. Bytes are "
        "those that a\n"
        "step must read; a part takes the longer of bytes over bandwidth and operations over "
        "peak; the\n"
        "floor is the sum of the parts. Figures are of one rank, the busiest. Heads, columns "
        "and the\n"
        "vocabulary are split over --tp ranks, experts over --ep groups, router and norms are "
        "on every\n"
        "rank, layers are split over --pp stages that a token passes one after another.\n"
        "`nibble bench decode` measures what this machine reaches.\n\n"
        "Example: nibble roofline --like glm-5 --weights nvfp4-mlp --tp 8 --device "
        "rtx-pro-6000",
};

typedef struct request {
    const char *model, *like, *weights, *device, *kv, *plot;
    nbi_opt_list sets;
    nbi_roof_options roof;
    nbi_config config;
    nbi_census census; /* of --model: what each module takes */
    uint64_t memory, context;
    double bandwidth, flops, link, latency;
    bool json, list, mtp;
} request;

/* ---------------------------------------------------------------- what is asked */

/* Takes the census' configuration over. */
static nb_status from_checkpoint(request *q, nb_error *err)
{
    NB_TRY(nbi_census_open(&q->census, q->model, false, err));
    nbi_census_fit(&q->census, q->mtp);
    q->roof.module_bytes = q->census.module_bytes;
    q->config = q->census.config;
    q->census.config = (nbi_config){0};
    return NB_OK;
}

/* "auto" is what `nibble serve` takes. */
static nb_status choose_cache(request *q, nb_error *err)
{
    nbi_dtype dtype;
    NB_TRY(nbi_kv_dtype_parse(&dtype, q->kv, err));
    if (dtype == NBI_DTYPE_COUNT)
        dtype = q->model && !strcmp(q->census.quant.kv_algo, "FP8") ? NBI_F8_E4M3 : NBI_BF16;
    q->roof.kv_dtype = dtype;
    q->kv = nbi_kv_dtype_name(dtype);
    return NB_OK;
}

static nb_status read_device(request *q, nb_error *err)
{
    nbi_device *d = &q->roof.device;
    if (q->device) NB_TRY(nbi_device_find(d, q->device, err));
    if (!q->device) *d = (nbi_device){.name = "given", .label = "given by options", .source = ""};
    if (q->bandwidth > 0) d->bandwidth = q->bandwidth;
    if (q->flops > 0) d->flops_bf16 = q->flops, d->flops_fp8 = d->flops_fp4 = 0;
    if (q->link > 0) d->link = q->link;
    if (q->memory > 0) d->memory = (double)q->memory;
    q->roof.link_latency = q->latency;
    return NB_OK;
}

static nb_status prepare(request *q, nb_error *err)
{
    if (!q->model == !q->like)
        return nbi_fail(err, NB_INVALID, "expected one of --model and --like");
    q->roof.weights = nbi_synth_weights_parse(q->weights);
    if (q->roof.weights == NBI_SYNTH_WEIGHTS_COUNT)
        return nbi_fail(err, NB_INVALID,
                        "--weights %s: expected nvfp4-experts, nvfp4-mlp, nvfp4-all, fp8 or bf16",
                        q->weights);
    NB_TRY(read_device(q, err));
    if (q->model)
        NB_TRY(from_checkpoint(q, err));
    else
        NB_TRY(nbi_synth_shape(&q->config, q->like, q->sets.items, q->sets.n, q->mtp, err));
    q->roof.config = &q->config;
    q->roof.context = q->context;
    return choose_cache(q, err);
}

/* ---------------------------------------------------------------- text */

static const char *what(const request *q)
{
    return q->model ? q->model : q->like;
}

static void print_parts(const nbi_roofline *r)
{
    printf("%-18s %12s %12s %12s %8s\n", "per rank and step", "bytes", "operations", "floor us",
           "share");
    for (int i = 0; i <= NBI_ROOF_PART_COUNT; i++) {
        const bool sum = i == NBI_ROOF_PART_COUNT;
        const nbi_roof_cost *c = sum ? &r->step : &r->parts[i];
        char bytes[24];
        if (!sum && c->bytes <= 0 && c->flops <= 0) continue;
        printf("%-18s %12s %10.3f G %12.2f %6.1f %%%s\n",
               sum ? "step" : nbi_roof_part_name((nbi_roof_part)i),
               nbi_cli_bytes(bytes, (uint64_t)c->bytes), c->flops * 1e-9, c->seconds * 1e6,
               100 * c->seconds / r->step.seconds, c->by_flops ? "  by operations" : "");
    }
}

/* "743.9 G", "31.0 M" */
static const char *count(char out[24], uint64_t n)
{
    const bool giga = n >= 1000000000u;
    snprintf(out, 24, "%.2f %c", (double)n * (giga ? 1e-9 : 1e-6), giga ? 'G' : 'M');
    return out;
}

static void print_text(const request *q, const nbi_roofline *r)
{
    const nbi_roof_options *o = &q->roof;
    char a[24], b[24], c[24], d[24];
    printf("%s, weights %s; %s parameters, %s used per token\n", what(q),
           q->model ? "as stored" : q->weights, count(a, r->parameters), count(b, r->active));
    printf("%s: %s/s", o->device.label, nbi_cli_bytes(a, (uint64_t)o->device.bandwidth));
    if (o->device.flops_bf16 > 0) printf(", %.0f TFLOP/s in BF16", o->device.flops_bf16 * 1e-12);
    printf("; tp %u, ep %u, pp %u; batch %u, ", o->tp, o->ep, o->pp, o->batch);
    if (o->context == NBI_ROOF_ALL_WEIGHTS)
        printf("weights alone, ");
    else
        printf("context %llu, ", (unsigned long long)o->context);
    printf("cache %s\n\n", q->kv);
    print_parts(r);
    if (q->config.n_experts)
        printf("\nexperts read       %.1f of %u per layer%s\n", r->experts_read,
               q->config.n_experts, o->ep > 1 ? " by the busiest group" : "");
    if (o->ep > 1)
        printf("                   %.1f if all groups had equal shares\n", r->experts_balanced);
    printf("floor              %.3f ms per token, %.0f tokens/s\n", r->step.seconds * 1e3,
           r->tokens_per_s);
    if (r->compute_batch)
        printf("compute-bound      from batch %llu on\n", (unsigned long long)r->compute_batch);
    else
        printf("compute-bound      %s\n",
               o->device.flops_bf16 > 0 ? "at no batch up to a million" : "not known: no --flops");
    printf("memory per rank    weights %s, cache %s (%s a token)",
           nbi_cli_bytes(a, (uint64_t)r->weight_bytes), nbi_cli_bytes(b, (uint64_t)r->cache_bytes),
           nbi_cli_bytes(c, (uint64_t)r->kv_bytes_per_token));
    if (o->device.memory > 0)
        printf(" of %s", nbi_cli_bytes(d, (uint64_t)(o->device.memory * o->memory_share)));
    printf("\n");
    if (o->device.memory > 0 && r->longest_context)
        printf("longest context    %llu tokens for each of %u\n",
               (unsigned long long)r->longest_context, o->batch);
    else if (o->device.memory > 0)
        printf("longest context    none: the weights do not fit\n");
    if (o->tp * o->pp > 1 && !(o->device.link > 0 || o->link_latency > 0))
        printf("collectives        not in the floor: no --link-bandwidth, no --link-latency\n");
}

/* ---------------------------------------------------------------- JSON */

static json_t *parts_json(const nbi_roofline *r)
{
    json_t *list = json_array();
    for (int i = 0; i < NBI_ROOF_PART_COUNT; i++) {
        const nbi_roof_cost *c = &r->parts[i];
        json_array_append_new(list,
                              json_pack("{s:s, s:f, s:f, s:f, s:s}", "component",
                                        nbi_roof_part_name((nbi_roof_part)i), "bytes", c->bytes,
                                        "flops", c->flops, "floor_ms", c->seconds * 1e3, "bound",
                                        c->by_flops ? "operations" : "bytes"));
    }
    return list;
}

static int print_json(const request *q, const nbi_roofline *r)
{
    const nbi_roof_options *o = &q->roof;
    json_t *memory =
        json_pack("{s:f, s:f, s:f, s:f}", "weights", r->weight_bytes, "cache", r->cache_bytes,
                  "cache_per_token", r->kv_bytes_per_token, "device", o->device.memory);
    json_t *context =
        o->context == NBI_ROOF_ALL_WEIGHTS ? json_null() : json_integer((json_int_t)o->context);
    json_t *root = json_pack(
        "{s:s, s:s, s:{s:s, s:f, s:f, s:s}, s:i, s:i, s:i, s:i, s:o, s:s, s:f, s:f, s:f, s:f, s:o, "
        "s:o, "
        "s:I, s:I, "
        "s:f, s:I, s:I}",
        "model", what(q), "weights", q->model ? "as stored" : q->weights, "device", "name",
        o->device.name, "bandwidth", o->device.bandwidth, "flops_bf16", o->device.flops_bf16,
        "source", o->device.source, "tp", (int)o->tp, "ep", (int)o->ep, "pp", (int)o->pp, "batch",
        (int)o->batch, "context", context, "kv_cache_dtype", q->kv, "bytes_per_step", r->step.bytes,
        "flops_per_step", r->step.flops, "floor_ms", r->step.seconds * 1e3, "tokens_per_s",
        r->tokens_per_s, "components", parts_json(r), "memory_per_gpu", memory, "longest_context",
        (json_int_t)r->longest_context, "compute_bound_batch", (json_int_t)r->compute_batch,
        "experts_read", r->experts_read, "parameters", (json_int_t)r->parameters,
        "active_parameters", (json_int_t)r->active);
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    const int status = text ? NBI_EXIT_OK : NBI_EXIT_FAILED;
    if (text) puts(text);
    nbi_free(text); /* jansson allocates through base/mem.h */
    json_decref(root);
    return status;
}

static void print_devices(void)
{
    const nbi_device *d;
    printf("%-14s %-30s %9s %9s %9s  %s\n", "name", "device", "memory", "TB/s", "TFLOP/s",
           "source");
    for (size_t i = 0; (d = nbi_device_at(i)); i++) {
        char memory[24] = "", flops[24] = "";
        if (d->memory > 0) nbi_cli_bytes(memory, (uint64_t)d->memory);
        if (d->flops_bf16 > 0) snprintf(flops, sizeof flops, "%.0f", d->flops_bf16 * 1e-12);
        printf("%-14s %-30s %9s %9.3f %9s  %s\n", d->name, d->label, memory, d->bandwidth * 1e-12,
               flops, d->source);
    }
}

static int run(request *q)
{
    nb_error err;
    nbi_roofline r;
    nb_status st = prepare(q, &err);
    if (st == NB_OK) st = nbi_roofline_run(&r, &q->roof, &err);
    if (st == NB_OK && q->plot) st = nbi_roofline_plot(&r, &q->roof, what(q), q->plot, &err);
    if (st != NB_OK) return nbi_cli_fail(&command, &err);
    if (q->json) return print_json(q, &r);
    print_text(q, &r);
    return NBI_EXIT_OK;
}

int nbi_cmd_roofline(int argc, char **argv)
{
    request q = {.weights = "nvfp4-mlp",
                 .kv = "auto",
                 .context = NBI_ROOF_ALL_WEIGHTS,
                 .roof = {.tp = 1, .ep = 1, .pp = 1, .batch = 1, .memory_share = 0.9}};
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &q.model, "DIR", "a checkpoint: bytes as it stores them", false},
        {"like", NBI_OPT_STRING, &q.like, "SHAPE",
         "instead: glm-5, glm-5.2, glm-4.7-flash, glm-4.5-air, deepseek-v3.2, qwen3-30b-a3b",
         false},
        {"set", NBI_OPT_LIST, &q.sets, "KEY=VALUE", "a value of that shape's config.json", false},
        {"weights", NBI_OPT_STRING, &q.weights, "KIND",
         "of --like: nvfp4-experts, nvfp4-mlp (default), nvfp4-all, fp8, bf16;\n"
         "see nibble synth --help",
         false},
        {"mtp", NBI_OPT_FLAG, &q.mtp, NULL, "count the MTP layer in memory", false},
        {"device", NBI_OPT_STRING, &q.device, "NAME", "one of --list-devices", false},
        {"list-devices", NBI_OPT_FLAG, &q.list, NULL, "print the known devices and their sources",
         false},
        {"bandwidth", NBI_OPT_F64, &q.bandwidth, "B",
         "bytes per second of the memory, e.g. 1.79e12", false},
        {"flops", NBI_OPT_F64, &q.flops, "F", "operations per second (dense)", false},
        {"memory", NBI_OPT_BYTES, &q.memory, "N", "bytes of memory of a rank", false},
        {"memory-share", NBI_OPT_F64, &q.roof.memory_share, "X",
         "part of it that weights and cache may fill (default 0.9)", false},
        {"link-bandwidth", NBI_OPT_F64, &q.link, "L", "bytes per second from rank to rank", false},
        {"link-latency", NBI_OPT_F64, &q.latency, "S",
         "seconds of one collective beside its bytes (default 0)", false},
        {"tp", NBI_OPT_U32, &q.roof.tp, "N", "tensor-parallel ranks (default 1)", false},
        {"ep", NBI_OPT_U32, &q.roof.ep, "N", "expert groups among them, divides --tp (default 1)",
         false},
        {"pp", NBI_OPT_U32, &q.roof.pp, "N", "pipeline stages of --tp ranks each (default 1)",
         false},
        {"whole-latents", NBI_OPT_FLAG, &q.roof.whole_latents, NULL,
         "q_a, kv_a and the indexer on every rank, as SGLang and vLLM have them", false},
        {"fp4-products", NBI_OPT_FLAG, &q.roof.fp4_products, NULL,
         "NVFP4 activations too: the device's FP4 peak", false},
        {"batch", NBI_OPT_U32, &q.roof.batch, "N", "sequences (default 1)", false},
        {"context", NBI_OPT_U64, &q.context, "N",
         "tokens in the cache of each; without it, no cache is counted and every weight is.\n"
         "Up to index_topk tokens an indexer has nothing to choose and only writes its key",
         false},
        {"kv-cache-dtype", NBI_OPT_STRING, &q.kv, "TYPE",
         "auto (default: what the checkpoint asks for, else bf16), bf16, fp8_e4m3, f32:\n"
         "of latents or heads, and of index keys",
         false},
        {"json", NBI_OPT_FLAG, &q.json, NULL, "one JSON object instead of text", false},
        {"plot", NBI_OPT_STRING, &q.plot, "FILE.svg", "draw the roofs and a bar per part", false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status < 0) {
        nbi_cli_log_start(NB_LOG_WARN);
        if (q.list) print_devices();
        status = q.list ? NBI_EXIT_OK : run(&q);
    }
    nbi_census_close(&q.census);
    nbi_config_free(&q.config);
    nbi_opt_list_free(&q.sets);
    return status;
}
