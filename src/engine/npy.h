/* NumPy .npy files of float32 matrices, version 1.0. Source: numpy.lib.format. */
#pragma once

#include <stdio.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A file being written: rows are appended, the shape is set at the end. */
typedef struct nbi_npy {
    FILE *file;
    char *path;
    uint64_t rows;
    uint32_t cols;
} nbi_npy;

nb_status nbi_npy_create(nbi_npy *out, const char *path, uint32_t cols, nb_error *err);
nb_status nbi_npy_row(nbi_npy *npy, const float *row, nb_error *err);
/* Writes the shape [rows, cols] and closes. */
nb_status nbi_npy_finish(nbi_npy *npy, nb_error *err);
/* Closes and removes an unfinished file. */
void nbi_npy_abandon(nbi_npy *npy);

#ifdef __cplusplus
}
#endif
