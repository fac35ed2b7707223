/* Options of the commands that run a model. Called by serve and chat. */
#include "cli/run_options.h"

#include <string.h>

#include "cli/default_model.h"

void nbi_run_options_init(nbi_run_options *o, const char *log_level)
{
    *o = (nbi_run_options){.log_level = log_level};
    nb_engine_options_default(&o->engine);
}

static bool parse_level(nb_log_level *out, const char *name)
{
    static const struct {
        const char *name;
        nb_log_level level;
    } levels[] = {{"error", NB_LOG_ERROR},
                  {"warn", NB_LOG_WARN},
                  {"warning", NB_LOG_WARN},
                  {"info", NB_LOG_INFO},
                  {"debug", NB_LOG_DEBUG}};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        if (strcmp(name, levels[i].name) == 0) {
            *out = levels[i].level;
            return true;
        }
    }
    return false;
}

int nbi_run_options_apply(nbi_run_options *o, const nbi_command *command)
{
    nb_log_level level;
    nb_error err = {0};
    if (!parse_level(&level, o->log_level)) {
        return nbi_cli_usage(command,
                             "--log-level: \"%s\" is unknown, expected error, warn, info "
                             "or debug",
                             o->log_level);
    }
    nbi_cli_log_start(level);
    if (!o->model) {
        if (nbi_default_model(&o->found, &err) != NB_OK) return nbi_cli_fail(command, &err);
        o->model = o->found;
    }
    o->engine.model_dir = o->model;
    if (o->overlap) o->engine.overlap_schedule = "on";
    if (o->no_overlap) o->engine.overlap_schedule = "off";
    o->engine.tune_file = nbi_tune_place(o->engine.tune_file);
    return -1;
}

void nbi_run_options_free(nbi_run_options *o)
{
    nbi_free(o->found);
    o->found = NULL;
}
