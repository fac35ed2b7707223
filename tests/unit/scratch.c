/* Scratch folders and small checkpoints for unit tests. Failures here abort the test program. */
#include "scratch.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

char *scratch_make(void)
{
    char *dir = strdup("/tmp/nibble-test-XXXXXX");
    NB_ASSERT(dir && mkdtemp(dir));
    return dir;
}

void scratch_remove(char *dir)
{
    char command[300];
    NB_ASSERT(!strncmp(dir, "/tmp/nibble-test-", 17));
    snprintf(command, sizeof command, "rm -rf -- '%s'", dir);
    NB_ASSERT(system(command) == 0);
    free(dir);
}

const char *scratch_path(const char *dir, const char *name)
{
    static char paths[8][320];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

void scratch_write(const char *dir, const char *name, const void *data, size_t n)
{
    FILE *f = fopen(scratch_path(dir, name), "wb");
    NB_ASSERT(f && fwrite(data, 1, n, f) == n);
    NB_ASSERT(fclose(f) == 0);
}

void scratch_write_text(const char *dir, const char *name, const char *text)
{
    scratch_write(dir, name, text, strlen(text));
}

unsigned char *scratch_safetensors(const char *header, const void *data, size_t n_data,
                                   size_t *n_bytes)
{
    size_t n = strlen(header);
    unsigned char *file = calloc(1, 8 + n + n_data + 1);
    NB_ASSERT(file);
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)((unsigned long long)n >> (8 * i));
    memcpy(file + 8, header, n);
    if (data) memcpy(file + 8 + n, data, n_data);
    *n_bytes = 8 + n + n_data;
    return file;
}

void scratch_write_safetensors(const char *dir, const char *name, const char *header,
                               const void *data, size_t n_data)
{
    size_t n;
    unsigned char *file = scratch_safetensors(header, data, n_data, &n);
    scratch_write(dir, name, file, n);
    free(file);
}

json_t *scratch_json(const char *text)
{
    char *copy = strdup(text);
    json_t *json;
    NB_ASSERT(copy);
    for (char *p = copy; *p; p++)
        if (*p == '\'') *p = '"';
    json_error_t error;
    json = json_loads(copy, JSON_DECODE_ANY, &error);
    if (!json) fprintf(stderr, "%s: %s\n", text, error.text);
    NB_ASSERT(json != NULL);
    free(copy);
    return json;
}
