/* Loading llguidance (see grammar_library.h). Caller: grammar.c. */
#include "text/grammar_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"

#define MODULE       "/llguidance/_lib.abi3.so"
#define VERSION      "llguidance@1.9."
#define PATH_BYTES   4096
#define TREE_LEVELS  4 /* <tree>/build/<name>/tests/<program> */
#define INSTALL_WITH "python3 -m pip install --target <folder> " NBI_GRAMMAR_PACKAGE

#if NBI_WITH_PYTHON
/* The module's undefined symbols are libpython's: refer to it, so that the linker keeps it in
 * programs that render no template. */
extern const char *Py_GetVersion(void);
#define PYTHON_VERSION Py_GetVersion()
#else
#define PYTHON_VERSION "none"
#endif

static struct {
    pthread_mutex_t lock;
    bool loaded;
    nbi_llg table;
    char path[PATH_BYTES];
} library = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---------------------------------------------------------------- where it is */

static bool has_module(char *path, const char *folder)
{
    int n = snprintf(path, PATH_BYTES, "%s" MODULE, folder);
    return n > 0 && n < PATH_BYTES && access(path, R_OK) == 0;
}

/* The first match of a pattern of folders. */
static bool has_module_glob(char *path, const char *pattern)
{
    glob_t found = {0};
    bool ok = glob(pattern, 0, NULL, &found) == 0;
    bool any = false;
    for (size_t i = 0; ok && !any && i < found.gl_pathc; i++)
        any = has_module(path, found.gl_pathv[i]);
    globfree(&found);
    return any;
}

/* A source tree is known by its setup script, so that no other parent folder is ever searched. */
static bool in_tree(char *path, const char *root)
{
    char file[PATH_BYTES + 64];
    snprintf(file, sizeof file, "%s/scripts/setup", root);
    if (access(file, X_OK) != 0) return false;
    snprintf(file, sizeof file, "%s/build/python", root);
    if (has_module(path, file)) return true;
    snprintf(file, sizeof file, "%s/.venv/lib/python3.*/site-packages", root);
    return has_module_glob(path, file);
}

static bool look_for(char *path)
{
    char folder[PATH_BYTES], prefix[PATH_BYTES + 32];
    ssize_t n = readlink("/proc/self/exe", folder, sizeof folder - 1);
    if (n <= 0) return false;
    folder[n] = 0;
    for (int level = 0; level <= TREE_LEVELS; level++) {
        char *slash = strrchr(folder, '/');
        if (!slash || slash == folder) return false;
        *slash = 0;
        if (level == 1) {
            snprintf(prefix, sizeof prefix, "%s/lib/nibble/python", folder);
            if (has_module(path, prefix)) return true;
        }
        if (level > 0 && in_tree(path, folder)) return true;
    }
    return false;
}

/* ---------------------------------------------------------------- what it exports */

static const struct {
    const char *name;
    size_t offset;
} symbols[] = {
#define SYMBOL(name, member)            \
    {                                   \
        name, offsetof(nbi_llg, member) \
    }
    SYMBOL("llg_get_version", version),
    SYMBOL("llg_new_tokenizer_v2", new_tokenizer),
    SYMBOL("llg_free_tokenizer", free_tokenizer),
    SYMBOL("llg_new_matcher", new_matcher),
    SYMBOL("llg_clone_matcher", clone_matcher),
    SYMBOL("llg_free_matcher", free_matcher),
    SYMBOL("llg_matcher_compute_mask_into", compute_mask),
    SYMBOL("llg_matcher_consume_token", consume),
    SYMBOL("llg_matcher_rollback", rollback),
    SYMBOL("llg_matcher_is_accepting", is_accepting),
    SYMBOL("llg_matcher_is_stopped", is_stopped),
    SYMBOL("llg_matcher_is_error", is_error),
    SYMBOL("llg_matcher_get_error", error),
#undef SYMBOL
};

static nb_status resolve(nbi_llg *table, void *handle, const char *path, nb_error *err)
{
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = dlsym(handle, symbols[i].name);
        if (!address)
            return nbi_fail(err, NB_UNSUPPORTED,
                            "%s has no %s; nibble knows %s, install it with: " INSTALL_WITH, path,
                            symbols[i].name, NBI_GRAMMAR_PACKAGE);
        /* POSIX lets a function's address be taken as an object pointer; ISO C does not. */
        memcpy((char *)table + symbols[i].offset, &address, sizeof address);
    }
    /* The structs of its C interface carry no version of their own. */
    const char *version = table->version();
    if (strncmp(version, VERSION, strlen(VERSION)) != 0)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s is \"%.80s\"; nibble knows %s, install it with: " INSTALL_WITH, path,
                        version, NBI_GRAMMAR_PACKAGE);
    return NB_OK;
}

static nb_status open_module(nbi_llg *table, const char *path, nb_error *err)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "the grammar library does not load (Python: %.16s): %s", PYTHON_VERSION,
                        dlerror());
    nb_status st = resolve(table, handle, path, err);
    if (st != NB_OK) dlclose(handle);
    return st;
}

/* With the lock held. */
static nb_status load(const char *path, nb_error *err)
{
    if (library.loaded) {
        if (strcmp(library.path, path) == 0) return NB_OK;
        return nbi_fail(err, NB_UNSUPPORTED,
                        "the grammar library was already loaded from %s, not from %s", library.path,
                        path);
    }
    nbi_llg table;
    NB_TRY(open_module(&table, path, err));
    library.table = table;
    library.loaded = true;
    snprintf(library.path, sizeof library.path, "%s", path);
    nbi_log(NB_LOG_INFO, "grammars: %s from %s", table.version(), path);
    return NB_OK;
}

nb_status nbi_llg_load(const nbi_llg **out, const char *folder, nb_error *err)
{
    char path[PATH_BYTES];
    if (folder ? !has_module(path, folder) : !look_for(path))
        return nbi_fail(err, NB_UNSUPPORTED,
                        "structured output needs the package llguidance, which is not installed "
                        "in %s; install it with: scripts/setup grammar, or " INSTALL_WITH,
                        folder ? folder : "<prefix>/lib/nibble/python (the <folder> below)");
    pthread_mutex_lock(&library.lock);
    nb_status st = load(path, err);
    pthread_mutex_unlock(&library.lock);
    if (st == NB_OK) *out = &library.table;
    return st;
}
