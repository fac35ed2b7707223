/* nibble synth: checkpoints of random weights. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "model/synth.h"

static const nbi_command command = {
    .name = "synth",
    .summary = "Writes a checkpoint of random weights in the shape of a real model.",
    .usage = "--like SHAPE --out DIR [OPTIONS]",
    .text = "Speed and memory use can be tried without the real weights: names, shapes and "
            "quantisation are those\n"
            "of published checkpoints (ModelOpt's convention, one expert at a time). Activations "
            "stay finite and\n"
            "routing is spread over the experts; the text such a model writes has no meaning. "
            "There is no\n"
            "tokenizer unless --tokenizer is given. The same options write the same bytes.\n\n"
            "Shapes: glm-5, glm-5.2, glm-4.7-flash, glm-4.5-air, deepseek-v3.2, qwen3-30b-a3b.\n\n"
            "Example: nibble synth --like qwen3-30b-a3b --max-bytes 5G --out /tmp/qwen3-5g",
};

int nbi_cmd_synth(int argc, char **argv)
{
    nbi_cli_progress progress = {.label = "writing"};
    nbi_synth_options o = {.progress = nbi_cli_show_progress, .progress_user = &progress};
    const char *weights = "nvfp4-mlp";
    nbi_opt_list sets = {0};
    const nbi_opt options[] = {
        {"like", NBI_OPT_STRING, &o.like, "SHAPE", "one of the shapes above", true},
        {"out", NBI_OPT_STRING, &o.out_dir, "DIR",
         "new or empty folder; complete or absent at the end", true},
        {"layers", NBI_OPT_U32, &o.n_layers, "N", "layers instead of the shape's", false},
        {"experts", NBI_OPT_U32, &o.n_experts, "N", "experts instead of the shape's", false},
        {"set", NBI_OPT_LIST, &sets, "KEY=VALUE",
         "any value of config.json, e.g. --set index_topk=64\n"
         "--set rope_parameters.rope_theta=10000; may be repeated",
         false},
        {"max-bytes", NBI_OPT_BYTES, &o.max_bytes, "N",
         "cut layers, then experts, until the weights take at most\n"
         "this many bytes (5G, 512Mi)",
         false},
        {"shard-of-tp", NBI_OPT_U32, &o.shard_of_tp, "N",
         "what one of N ranks of tensor parallelism holds: heads,\n"
         "columns of MLPs and experts, and the vocabulary divided by N",
         false},
        {"weights", NBI_OPT_STRING, &weights, "KIND",
         "nvfp4-experts  routed experts in NVFP4, the rest BF16\n"
         "nvfp4-mlp      shared experts and dense MLPs too (default)\n"
         "nvfp4-all      attention and indexer projections too\n"
         "fp8            linear layers in FP8 with 128 x 128 blocks\n"
         "bf16           nothing quantised\n"
         "embedding, head, router and norms stay BF16 always",
         false},
        {"mtp", NBI_OPT_FLAG, &o.mtp, NULL, "write the multi-token-prediction layer too", false},
        {"seed", NBI_OPT_U64, &o.seed, "N", "of the random weights (default 0)", false},
        {"shard-bytes", NBI_OPT_BYTES, &o.shard_bytes, "N", "size of a file at most (default 4Gi)",
         false},
        {"tokenizer", NBI_OPT_STRING, &o.tokenizer_dir, "DIR",
         "copy the tokenizer files and chat template of this folder", false},
        {"threads", NBI_OPT_U32, &o.n_threads, "N", "default: all cores this process may use",
         false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status < 0) {
        nbi_cli_log_start(NB_LOG_WARN);
        o.weights = nbi_synth_weights_parse(weights);
        o.sets = sets.items;
        o.n_sets = sets.n;
        nb_error err;
        nbi_synth_result r;
        uint64_t start = nbi_now_ns();
        if (o.weights == NBI_SYNTH_WEIGHTS_COUNT) {
            status = nbi_cli_usage(&command, "--weights: unknown kind \"%s\"", weights);
        } else if (nbi_synth(&r, &o, &err) != NB_OK) {
            status = nbi_cli_fail(&command, &err);
        } else {
            char bytes[24], rate[24];
            double seconds = (double)(nbi_now_ns() - start) * 1e-9;
            printf("%s: %s with %u layers and %u experts, %llu tensors, %s in %.1f s (%s/s)\n",
                   o.out_dir, o.like, r.n_layers, r.n_experts, (unsigned long long)r.n_tensors,
                   nbi_cli_bytes(bytes, r.bytes), seconds,
                   nbi_cli_bytes(rate, (uint64_t)((double)r.bytes / seconds)));
            status = NBI_EXIT_OK;
        }
    }
    nbi_opt_list_free(&sets);
    return status;
}
