/* nibble quantize: BF16, F16 or F32 weights to NVFP4. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "model/quantize.h"

static const nbi_command command = {
    .name = "quantize",
    .summary = "BF16, F16 or F32 weights to NVFP4 in ModelOpt's convention.",
    .usage = "--model DIR --out DIR [OPTIONS]",
    .text = "The values are those of ModelOpt's max calibration on the same tensors, bit for bit; "
            "gate and up (and\n"
            "other layers that read one input) share the larger of their global scales, as its "
            "exporter does.\n"
            "Tokenizer and other small files are copied. The result is written to OUT.partial and "
            "renamed when it is\n"
            "complete; an interrupted run is continued by the same command.",
};

int nbi_cmd_quantize(int argc, char **argv)
{
    nbi_cli_progress progress = {.label = "quantising"};
    nbi_quantize_options o = {.progress = nbi_cli_show_progress, .progress_user = &progress};
    const char *scope = "mlp";
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &o.model_dir, "DIR", "source, in Hugging Face layout", true},
        {"out", NBI_OPT_STRING, &o.out_dir, "DIR", "new or empty folder", true},
        {"scope", NBI_OPT_STRING, &scope, "SCOPE",
         "experts  routed experts\n"
         "mlp      shared experts and dense MLPs too (default)\n"
         "all      attention and indexer projections too\n"
         "router, embedding, head and norms are never quantised",
         false},
        {"input-scales", NBI_OPT_STRING, &o.input_scales, "FILE",
         "JSON object {module: input_scale} (activation maximum / 2688);\n"
         "without it the weights are for plain activations (W4A16)",
         false},
        {"mtp", NBI_OPT_FLAG, &o.mtp, NULL, "quantise the multi-token-prediction layer too", false},
        {"shard-bytes", NBI_OPT_BYTES, &o.shard_bytes, "N",
         "size of an output file at most (default 4Gi)", false},
        {"threads", NBI_OPT_U32, &o.n_threads, "N", "default: all cores this process may use",
         false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status >= 0) return status;
    o.scope = nbi_quantize_scope_parse(scope);
    if (o.scope == NBI_QUANTIZE_SCOPE_COUNT)
        return nbi_cli_usage(&command, "--scope: unknown scope \"%s\"", scope);
    nbi_cli_log_start(NB_LOG_INFO);
    nb_error err;
    nbi_quantize_result r;
    uint64_t start = nbi_now_ns();
    if (nbi_quantize(&r, &o, &err) != NB_OK) return nbi_cli_fail(&command, &err);
    char from[24], to[24];
    printf("%s: %llu modules quantised, %s to %s in %.1f s\n", o.out_dir,
           (unsigned long long)r.n_modules, nbi_cli_bytes(from, r.source_bytes),
           nbi_cli_bytes(to, r.bytes), (double)(nbi_now_ns() - start) * 1e-9);
    return NBI_EXIT_OK;
}
