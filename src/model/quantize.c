/* Quantises a checkpoint: goes through the source's tensors in their order, replaces the weights in
 * scope, copies the rest. Called by `nibble quantize` and by tests.
 *
 * The numbers (global and input scales) come last in the output, so that all other tensors stay
 * aligned. Finished shards of an earlier run are kept; the largest magnitudes of their modules are
 * read again, because the numbers need them. */
#include "model/quantize.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "model/outdir.h"
#include "model/quantize_parts.h"

#define SHARD_BYTES ((uint64_t)4 << 30)

const char *nbi_quantize_scope_name(nbi_quantize_scope scope)
{
    static const char *const names[] = {
#define X(suffix, name, text) name,
        NBI_QUANTIZE_SCOPE_LIST(X)
#undef X
    };
    return scope < NBI_QUANTIZE_SCOPE_COUNT ? names[scope] : "unknown";
}

nbi_quantize_scope nbi_quantize_scope_parse(const char *name)
{
    int i = 0;
    while (i < NBI_QUANTIZE_SCOPE_COUNT &&
           strcmp(name, nbi_quantize_scope_name((nbi_quantize_scope)i)))
        i++;
    return (nbi_quantize_scope)i;
}

/* ---- the run */

typedef enum item_kind { COPY, CODES, SCALES, GLOBAL_SCALE, INPUT_SCALE } item_kind;

/* One output tensor. */
typedef struct item {
    item_kind kind;
    uint32_t module;             /* but COPY */
    const nbi_st_tensor *tensor; /* COPY */
} item;

/* State of one pass over the rows of a matrix, shared by the threads. */
typedef struct rows_pass {
    const nbi_matrix *m;
    float *rows; /* [threads][cols] */
    float *amax; /* [threads] */
    float group_amax;
    uint8_t *codes, *scales;
    nb_error *errors;  /* [threads] */
    nb_status *status; /* [threads] */
} rows_pass;

typedef struct run {
    const nbi_quantize_options *o;
    nbi_checkpoint *ckpt;
    nbi_q_list list;
    nbi_st_writer *writer;
    item *items;
    size_t n_items, cap_items;
    nbi_pool *pool;
    rows_pass pass;
    uint64_t widest, largest; /* columns, elements of a matrix */
    uint32_t ready;           /* module + 1 whose codes and scales are in `pass` */
    uint64_t done_bytes, total_bytes;
    nbi_quantize_result result;
    nb_error *err;
} run;

static nb_status add_item(run *r, item it, const char *name, nbi_dtype dtype, uint32_t n_dims,
                          const uint64_t *shape)
{
    if (r->n_items == r->cap_items) {
        size_t cap = r->cap_items ? r->cap_items * 2 : 1024;
        item *more = nbi_realloc(r->items, cap * sizeof *more);
        if (!more) return nbi_fail(r->err, NB_NO_MEMORY, "out of memory for %zu tensors", cap);
        r->items = more;
        r->cap_items = cap;
    }
    r->items[r->n_items++] = it;
    uint64_t bytes = nbi_dtype_bits(dtype);
    for (uint32_t i = 0; i < n_dims; i++) bytes *= shape[i];
    r->result.bytes += bytes / 8;
    return nbi_st_writer_add(r->writer, name, dtype, n_dims, shape, r->err);
}

static nb_status add_module_item(run *r, item_kind kind, uint32_t i)
{
    static const char *const suffix[] = {[CODES] = ".weight",
                                         [SCALES] = ".weight_scale",
                                         [GLOBAL_SCALE] = ".weight_scale_2",
                                         [INPUT_SCALE] = ".input_scale"};
    const nbi_matrix *m = &r->list.modules[i].matrix;
    const uint64_t shape[2] = {m->rows, kind == CODES ? m->cols / 2 : m->cols / NBI_NVFP4_BLOCK};
    char name[300];
    snprintf(name, sizeof name, "%s%s", m->name, suffix[kind]);
    nbi_dtype dtype = kind == CODES ? NBI_U8 : kind == SCALES ? NBI_F8_E4M3 : NBI_F32;
    return add_item(r, (item){.kind = kind, .module = i}, name, dtype, dtype == NBI_F32 ? 0 : 2,
                    shape);
}

static nb_status plan_items(run *r)
{
    size_t n = nbi_checkpoint_count(r->ckpt);
    for (size_t t = 0; t < n; t++) {
        const nbi_st_tensor *tensor = nbi_checkpoint_at(r->ckpt, t);
        r->total_bytes += tensor->bytes;
        if (!r->list.first[t])
            NB_TRY(add_item(r, (item){.kind = COPY, .tensor = tensor}, tensor->name, tensor->dtype,
                            tensor->n_dims, tensor->shape));
        for (uint32_t i = r->list.first[t]; i; i = r->list.modules[i - 1].chain) {
            NB_TRY(add_module_item(r, CODES, i - 1));
            NB_TRY(add_module_item(r, SCALES, i - 1));
        }
    }
    for (uint32_t i = 0; i < r->list.n; i++) {
        const nbi_matrix *m = &r->list.modules[i].matrix;
        uint64_t elements = (uint64_t)m->rows * m->cols;
        if (m->cols > r->widest) r->widest = m->cols;
        if (elements > r->largest) r->largest = elements;
        NB_TRY(add_module_item(r, GLOBAL_SCALE, i));
        if (r->list.modules[i].input_scale > 0) NB_TRY(add_module_item(r, INPUT_SCALE, i));
    }
    return NB_OK;
}

/* ---- one matrix */

static void amax_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    rows_pass *p = arg;
    float *row = p->rows + (size_t)thread * p->m->cols;
    for (uint32_t i = begin; i < end && p->status[thread] == NB_OK; i++) {
        float amax = 0;
        nbi_matrix_row(p->m, i, row);
        p->status[thread] = nbi_nvfp4_amax(&amax, row, p->m->cols, &p->errors[thread]);
        if (p->status[thread] != NB_OK)
            nbi_fail_prefix(&p->errors[thread], p->status[thread], "%s: row %u", p->m->name, i);
        if (amax > p->amax[thread]) p->amax[thread] = amax;
    }
}

static void codes_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    rows_pass *p = arg;
    uint32_t cols = p->m->cols;
    float *row = p->rows + (size_t)thread * cols, global;
    for (uint32_t i = begin; i < end && p->status[thread] == NB_OK; i++) {
        nbi_matrix_row(p->m, i, row);
        p->status[thread] = nbi_nvfp4_quantize(
            row, 1, cols, p->group_amax, p->codes + (size_t)i * (cols / 2),
            p->scales + (size_t)i * (cols / NBI_NVFP4_BLOCK), &global, &p->errors[thread]);
    }
}

/* Runs a task over the rows of a matrix; the first error of any thread. */
static nb_status over_rows(run *r, nbi_task task, const nbi_matrix *m)
{
    uint32_t threads = nbi_pool_threads(r->pool);
    r->pass.m = m;
    for (uint32_t i = 0; i < threads; i++) r->pass.status[i] = NB_OK;
    nbi_pool_run(r->pool, task, &r->pass, m->rows, 16);
    for (uint32_t i = 0; i < threads; i++)
        if (r->pass.status[i] != NB_OK)
            return nbi_fail(r->err, r->pass.status[i], "%s", r->pass.errors[i].text);
    return NB_OK;
}

/* The group's largest magnitude, read once. */
static nb_status know_amax(run *r, uint32_t i)
{
    nbi_q_module *modules = r->list.modules;
    if (modules[i].known) return NB_OK;
    uint32_t threads = nbi_pool_threads(r->pool), k = i;
    float amax = 0;
    for (uint32_t t = 0; t < threads; t++) r->pass.amax[t] = 0;
    do {
        NB_TRY(over_rows(r, amax_task, &modules[k].matrix));
    } while ((k = modules[k].next) != i);
    for (uint32_t t = 0; t < threads; t++) amax = r->pass.amax[t] > amax ? r->pass.amax[t] : amax;
    do {
        modules[k].amax = amax;
        modules[k].known = true;
    } while ((k = modules[k].next) != i);
    return NB_OK;
}

/* As nbi_nvfp4_quantize() makes it; 1 for a group of zeros. */
static float global_scale(const nbi_q_module *m)
{
    float scale = m->amax / 2688.0f;
    return scale > 0 ? scale : 1.0f;
}

static nb_status make_codes(run *r, uint32_t i)
{
    if (r->ready == i + 1) return NB_OK;
    NB_TRY(know_amax(r, i));
    r->pass.group_amax = r->list.modules[i].amax;
    r->ready = 0;
    NB_TRY(over_rows(r, codes_task, &r->list.modules[i].matrix));
    r->ready = i + 1;
    return NB_OK;
}

/* ---- all items */

static nb_status write_item(run *r, const item *it)
{
    if (it->kind == COPY)
        return nbi_st_writer_data(r->writer, it->tensor->data, it->tensor->bytes, r->err);
    const nbi_q_module *m = &r->list.modules[it->module];
    uint64_t elements = (uint64_t)m->matrix.rows * m->matrix.cols;
    if (it->kind == INPUT_SCALE)
        return nbi_st_writer_data(r->writer, &m->input_scale, sizeof m->input_scale, r->err);
    if (it->kind == GLOBAL_SCALE) {
        NB_TRY(know_amax(r, it->module));
        float scale = global_scale(m);
        return nbi_st_writer_data(r->writer, &scale, sizeof scale, r->err);
    }
    NB_TRY(make_codes(r, it->module));
    if (it->kind == CODES)
        return nbi_st_writer_data(r->writer, r->pass.codes, elements / 2, r->err);
    return nbi_st_writer_data(r->writer, r->pass.scales, elements / NBI_NVFP4_BLOCK, r->err);
}

/* Bytes of the source that an item uses up. */
static uint64_t source_bytes(const run *r, const item *it)
{
    if (it->kind == COPY) return it->tensor->bytes;
    const nbi_matrix *m = &r->list.modules[it->module].matrix;
    return it->kind == CODES ? m->rows * nbi_matrix_row_bytes(m) : 0;
}

static nb_status write_items(run *r)
{
    size_t done = 0;
    NB_TRY(nbi_st_writer_resume(r->writer, &done, r->err));
    if (done) nbi_log(NB_LOG_INFO, "continuing behind %zu of %zu tensors", done, r->n_items);
    r->result.resumed_tensors = done;
    for (size_t i = 0; i < r->n_items; i++) {
        if (i >= done) NB_TRY(write_item(r, &r->items[i]));
        r->done_bytes += source_bytes(r, &r->items[i]);
        if (r->o->progress) r->o->progress(r->o->progress_user, r->done_bytes, r->total_bytes);
    }
    return nbi_st_writer_finish(r->writer, r->err);
}

static nb_status reserve(run *r)
{
    uint32_t threads = nbi_pool_threads(r->pool);
    r->pass.rows = nbi_malloc(threads * r->widest * sizeof(float));
    r->pass.amax = nbi_calloc(threads, sizeof(float));
    r->pass.errors = nbi_calloc(threads, sizeof(nb_error));
    r->pass.status = nbi_calloc(threads, sizeof(nb_status));
    r->pass.codes = nbi_malloc(r->largest / 2);
    r->pass.scales = nbi_malloc(r->largest / NBI_NVFP4_BLOCK);
    bool all = r->pass.rows && r->pass.amax && r->pass.errors && r->pass.status && r->pass.codes &&
               r->pass.scales;
    return all ? NB_OK
               : nbi_fail(r->err, NB_NO_MEMORY, "out of memory for a matrix of %llu weights",
                          (unsigned long long)r->largest);
}

static nb_status write_output(run *r, const nbi_config *config, const char *dir)
{
    NB_TRY(nbi_st_writer_create(&r->writer, dir,
                                r->o->shard_bytes ? r->o->shard_bytes : SHARD_BYTES, r->err));
    NB_TRY(nbi_pool_create(&r->pool, r->o->n_threads, r->err));
    NB_TRY(plan_items(r));
    NB_TRY(reserve(r));
    NB_TRY(nbi_q_write_files(dir, r->o, config, &r->list, r->err));
    return write_items(r);
}

/* OUT.partial of this very source and options, continued, or an empty one. */
static nb_status open_output(run *r, nbi_outdir *dir)
{
    bool same;
    NB_TRY(nbi_outdir_open(dir, r->o->out_dir, r->err));
    NB_TRY(nbi_q_record(&same, dir->partial, r->o, r->ckpt, false, r->err));
    if (!same) {
        nbi_outdir_discard(dir);
        nbi_outdir_close(dir);
        NB_TRY(nbi_outdir_open(dir, r->o->out_dir, r->err));
    }
    return nbi_q_record(&same, dir->partial, r->o, r->ckpt, true, r->err);
}

static nb_status commit(run *r, nbi_outdir *dir)
{
    char *record = nbi_path_join(dir->partial, NBI_Q_RECORD);
    if (record) unlink(record);
    nbi_free(record);
    return nbi_outdir_commit(dir, r->err);
}

static void close_run(run *r)
{
    nbi_st_writer_destroy(&r->writer);
    nbi_pool_destroy(&r->pool);
    nbi_q_list_free(&r->list);
    nbi_checkpoint_close(&r->ckpt);
    nbi_free(r->items);
    nbi_free(r->pass.rows);
    nbi_free(r->pass.amax);
    nbi_free(r->pass.errors);
    nbi_free(r->pass.status);
    nbi_free(r->pass.codes);
    nbi_free(r->pass.scales);
}

nb_status nbi_quantize(nbi_quantize_result *out, const nbi_quantize_options *o, nb_error *err)
{
    run r = {.o = o, .err = err};
    nbi_config config = {0};
    nbi_outdir dir = {0};
    char name[96];
    nb_status st;
    NB_TRY(nbi_config_load(&config, o->model_dir, err));
    NB_TRY_OR(st, nbi_checkpoint_open(&r.ckpt, o->model_dir, err), done);
    snprintf(name, sizeof name, "model.layers.%u.eh_proj", config.n_layers);
    if (config.n_mtp_layers && !nbi_matrix_present(r.ckpt, name))
        config.n_mtp_layers = 0; /* named, but not stored */
    NB_TRY_OR(st, nbi_q_list_make(&r.list, r.ckpt, &config, o, err), done);
    if (o->input_scales)
        NB_TRY_OR(st, nbi_q_read_input_scales(&r.list, o->input_scales, err), done);
    NB_TRY_OR(st, open_output(&r, &dir), done);
    NB_TRY_OR(st, write_output(&r, &config, dir.partial), done);
    NB_TRY_OR(st, commit(&r, &dir), done);
    r.result.n_modules = r.list.n;
    r.result.n_kept = r.list.n_kept;
    r.result.source_bytes = r.total_bytes;
    *out = r.result;
done:
    close_run(&r);
    nbi_outdir_close(&dir);
    nbi_config_free(&config);
    return st;
}
