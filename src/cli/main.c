/* nibble: one program, one subcommand per task. The table is the only list of them; a subcommand
 * lives in cmd_NAME.c. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "text/template.h"

#define PYTHON_WAIT_MS 10000

static const struct row {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *text;
} rows[] = {
    {"bench", nbi_cmd_bench, "decode and prefill speed against the memory's floor"},
    {"chat", nbi_cmd_chat, "a conversation in the terminal"},
    {"check", nbi_cmd_check, "are the kernels right on this device and model"},
    {"doctor", nbi_cmd_doctor, "what of this machine costs tokens per second, and what mends it"},
    {"inspect", nbi_cmd_inspect, "what a checkpoint holds and whether it can run"},
    {"quantize", nbi_cmd_quantize, "BF16 weights to NVFP4"},
    {"report", nbi_cmd_report, "check, measure and explain a model on this machine, in one page"},
    {"roofline", nbi_cmd_roofline, "what a decode step costs at least, by arithmetic"},
    {"score", nbi_cmd_score, "log-likelihood, perplexity and logits of given tokens"},
    {"serve", nbi_cmd_serve, "the OpenAI API over HTTP"},
    {"synth", nbi_cmd_synth, "a checkpoint of random weights in the shape of a real model"},
    {"tokenize", nbi_cmd_tokenize, "text to token ids and back"},
    {"tune", nbi_cmd_tune, "which MoE runner is fastest here, for serve to choose"},
};

static void print_help(FILE *to)
{
    fprintf(to,
            "nibble %s: inference of mixture-of-experts language models in NVFP4\n\n"
            "Usage: nibble COMMAND [OPTIONS]\n\nCommands:\n",
            nb_version());
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        fprintf(to, "  %-10s %s\n", rows[i].name, rows[i].text);
    fprintf(to, "\n  nibble COMMAND --help    everything about a command\n  nibble --version\n");
}

/* Nothing may run beside exit(): a thread that cannot be waited for ends with the process. */
static int finish(int status)
{
    if (fflush(stdout)) status = NBI_EXIT_FAILED;
    if (!nbi_template_stop(PYTHON_WAIT_MS)) _exit(status);
    return status;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return NBI_EXIT_USAGE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) {
        print_help(stdout);
        return NBI_EXIT_OK;
    }
    if (!strcmp(name, "--version")) {
        printf("nibble %s\n", nb_version());
        return NBI_EXIT_OK;
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!strcmp(name, rows[i].name)) return finish(rows[i].run(argc - 1, argv + 1));
    fprintf(stderr, "nibble: unknown %s %s\nTry: nibble --help\n",
            name[0] == '-' ? "option" : "command", name);
    return NBI_EXIT_USAGE;
}
