/* .npy writer: a header of fixed size first, filled in again when the number of rows is known. */
#include "engine/npy.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

#define HEADER_BYTES 128 /* a multiple of 64, as the format asks */

static nb_status io_error(const nbi_npy *npy, nb_error *err)
{
    return nbi_fail(err, NB_IO, "%s: cannot write: %s", npy->path, strerror(errno));
}

static nb_status write_header(nbi_npy *npy, nb_error *err)
{
    char header[HEADER_BYTES];
    memset(header, ' ', sizeof header);
    static const unsigned char magic[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, HEADER_BYTES - 10,
                                            0};
    memcpy(header, magic, sizeof magic);
    char dict[HEADER_BYTES - 10];
    int n = snprintf(dict, sizeof dict,
                     "{'descr': '<f4', 'fortran_order': False, 'shape': (%llu, %u), }",
                     (unsigned long long)npy->rows, npy->cols);
    memcpy(header + 10, dict, (size_t)n);
    header[HEADER_BYTES - 1] = '\n';
    if (fseek(npy->file, 0, SEEK_SET) || fwrite(header, sizeof header, 1, npy->file) != 1)
        return io_error(npy, err);
    return NB_OK;
}

nb_status nbi_npy_create(nbi_npy *out, const char *path, uint32_t cols, nb_error *err)
{
    nbi_npy npy = {.cols = cols, .path = nbi_strdup(path)};
    if (!npy.path) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", path);
    npy.file = fopen(path, "wb");
    nb_status st = npy.file ? write_header(&npy, err) : io_error(&npy, err);
    if (st != NB_OK) {
        nbi_npy_abandon(&npy);
        return st;
    }
    *out = npy;
    return NB_OK;
}

nb_status nbi_npy_row(nbi_npy *npy, const float *row, nb_error *err)
{
    if (fwrite(row, sizeof *row, npy->cols, npy->file) != npy->cols) return io_error(npy, err);
    npy->rows++;
    return NB_OK;
}

nb_status nbi_npy_finish(nbi_npy *npy, nb_error *err)
{
    nb_status st = write_header(npy, err);
    if (fclose(npy->file) && st == NB_OK) st = io_error(npy, err);
    npy->file = NULL;
    if (st != NB_OK) unlink(npy->path);
    nbi_free(npy->path);
    *npy = (nbi_npy){0};
    return st;
}

void nbi_npy_abandon(nbi_npy *npy)
{
    if (npy->file) {
        fclose(npy->file);
        unlink(npy->path);
    }
    nbi_free(npy->path);
    *npy = (nbi_npy){0};
}
