/* How much scratch attention, indexer and sampler need: enough for one row of the longest context,
 * more rows up to a ceiling (they are then worked off in blocks). Caller: cpu.c, in `reserve`. */
#include "backend/cpu/cpu_scratch.h"

#include "backend/cpu/cpu_mla.h"

/* Ceiling of the per-row part: beyond it larger blocks of rows gain nothing measurable. */
#define ROWS_BYTES_MAX ((size_t)32 << 20)

static size_t block_bytes(size_t fixed, size_t row, uint32_t n_rows)
{
    size_t rows = row * (n_rows ? n_rows : 1);
    if (rows > ROWS_BYTES_MAX) rows = row > ROWS_BYTES_MAX ? row : ROWS_BYTES_MAX;
    return fixed + rows + 64;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

size_t nbi_cpu_attention_workspace(const nbi_cpu *cpu, const nbi_limits *l)
{
    const uint32_t threads = nbi_pool_threads(cpu->pool), ctx = l->max_context;
    size_t bytes = 0;
    if (l->kv_lora)
        bytes = block_bytes(nbi_cpu_mla_fixed(threads, l), nbi_cpu_mla_row(ctx, l), l->max_rows);
    if (l->kv_lora && l->mla_expanded)
        bytes = larger(bytes, nbi_cpu_mla_expanded_bytes(threads, l));
    if (l->n_kv_heads && l->head_dim)
        bytes = larger(bytes, block_bytes(nbi_cpu_gqa_fixed(threads, l), nbi_cpu_gqa_row(ctx, l),
                                          l->max_rows));
    if (l->index_heads)
        bytes = larger(bytes, block_bytes(nbi_cpu_index_fixed(threads, l), nbi_cpu_index_row(ctx),
                                          l->max_rows));
    if (l->vocab) bytes = larger(bytes, threads * nbi_cpu_sample_thread(l->vocab));
    return (bytes + 63) / 64 * 64;
}
