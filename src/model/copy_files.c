/* Small files beside the weights: configurations, tokenizer, templates. Called by synth and
 * quantize. */
#include "model/copy_files.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"

#define COPY_BYTES_MAX \
    ((size_t)512 << 20) /* per file; the largest tokenizer.json are about 40 MB */

nb_status nbi_write_json(const char *dir, const char *name, const json_t *json, nb_error *err)
{
    char *path = nbi_path_join(dir, name), *text = json_dumps(json, JSON_INDENT(2));
    nb_status st = path && text ? nbi_file_write(path, text, strlen(text), err)
                                : nbi_fail(err, NB_NO_MEMORY, "%s/%s: out of memory", dir, name);
    nbi_free(path);
    nbi_free(text); /* jansson allocates through base/mem.h */
    return st;
}

static nb_status copy(const char *dir, const char *from, const char *name, nb_error *err)
{
    char *source = nbi_path_join(from, name), *target = nbi_path_join(dir, name), *data = NULL;
    size_t n = 0;
    nb_status st = source && target ? nbi_file_read(&data, &n, source, COPY_BYTES_MAX, err)
                                    : nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
    if (st == NB_OK) st = nbi_file_write(target, data, n, err);
    nbi_free(data);
    nbi_free(source);
    nbi_free(target);
    return st;
}

static bool is_file(const char *dir, const char *name)
{
    char path[4352];
    struct stat st;
    int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    return n > 0 && (size_t)n < sizeof path && stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

nb_status nbi_copy_tokenizer(const char *dir, const char *from, nb_error *err)
{
    static const char *const names[] = {"tokenizer.json",          "tokenizer_config.json",
                                        "special_tokens_map.json", "added_tokens.json",
                                        "chat_template.jinja",     "chat_template.json"};
    if (!is_file(from, names[0]))
        return nbi_fail(err, NB_NOT_FOUND, "%s: no tokenizer.json in the folder", from);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (is_file(from, names[i])) NB_TRY(copy(dir, from, names[i], err));
    return NB_OK;
}

static bool is_weights(const char *name)
{
    static const char *const tails[] = {".safetensors", ".safetensors.index.json",
                                        ".bin",         ".bin.index.json",
                                        ".pt",          ".pth",
                                        ".gguf",        ".tmp"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        size_t k = strlen(tails[i]);
        if (n >= k && !strcmp(name + n - k, tails[i])) return true;
    }
    return false;
}

nb_status nbi_copy_others(const char *dir, const char *from, const char *const *skip, nb_error *err)
{
    DIR *d = opendir(from);
    if (!d) return nbi_fail(err, NB_IO, "%s: cannot open the folder: %s", from, strerror(errno));
    nb_status st = NB_OK;
    for (struct dirent *e; st == NB_OK && (e = readdir(d));) {
        bool wanted = e->d_name[0] != '.' && !is_weights(e->d_name) && is_file(from, e->d_name);
        for (size_t i = 0; wanted && skip && skip[i]; i++) wanted = strcmp(e->d_name, skip[i]) != 0;
        if (wanted) st = copy(dir, from, e->d_name, err);
    }
    closedir(d);
    return st;
}
