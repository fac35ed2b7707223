/* Writes synthetic checkpoints. Called by `nibble synth` and by tests.
 *
 * Order: configuration, size (cut to the limit), list of tensors, data in large pieces made by all
 * threads, then the small files; the folder is renamed into place at the end. */
#include "model/synth.h"

#include <stdlib.h>
#include <string.h>

#include "base/thread.h"
#include "model/copy_files.h"
#include "model/outdir.h"
#include "model/synth_parts.h"

#define CHUNK       ((size_t)32 << 20) /* bytes made at once */
#define PIECE       ((size_t)64 << 10) /* bytes a thread takes at once */
#define SHARD_BYTES ((uint64_t)4 << 30)

/* ---- size */

typedef struct sizing {
    json_t *json;
    const nbi_synth_options *o;
    nb_error *err;
} sizing;

static nb_status count(const sizing *z, uint32_t n_layers, uint32_t n_experts, uint64_t *bytes,
                       uint64_t *tensors)
{
    nbi_config config;
    NB_TRY(nbi_synth_resize(z->json, n_layers, n_experts, z->err));
    NB_TRY(nbi_config_parse(&config, z->json, NULL, z->o->like, z->err));
    nbi_synth_plan plan = {.config = &config, .weights = z->o->weights, .err = z->err};
    nb_status st = nbi_synth_plan_run(&plan);
    nbi_config_free(&config);
    *bytes = plan.bytes;
    *tensors = plan.n_tensors;
    return st;
}

/* Experts, halved until `n_layers` layers fit; groups and the number chosen per token must stay
 * possible. */
static nb_status fit_experts(const sizing *z, const nbi_config *full, uint32_t n_layers,
                             nbi_synth_result *r)
{
    for (r->n_experts = full->n_experts;; r->n_experts /= 2) {
        NB_TRY(count(z, n_layers, r->n_experts, &r->bytes, &r->n_tensors));
        if (r->bytes <= z->o->max_bytes) return NB_OK;
        uint32_t next = r->n_experts / 2;
        if (next < full->top_k * 2 || next % full->n_group ||
            next / full->n_group * full->topk_group < full->top_k)
            return nbi_fail(z->err, NB_INVALID,
                            "--max-bytes %llu: %u layers with %u experts of %s take %llu bytes",
                            (unsigned long long)z->o->max_bytes, n_layers, r->n_experts, z->o->like,
                            (unsigned long long)r->bytes);
    }
}

/* Layers and experts that fit max_bytes: as many layers as possible, at least one with experts
 * behind the dense ones. */
static nb_status fit(const sizing *z, const nbi_config *full, nbi_synth_result *r)
{
    r->n_layers = full->n_layers;
    r->n_experts = full->n_experts;
    NB_TRY(count(z, r->n_layers, r->n_experts, &r->bytes, &r->n_tensors));
    if (!z->o->max_bytes || r->bytes <= z->o->max_bytes) return NB_OK;
    uint32_t least = 1;
    while (least < full->n_layers && !full->layer_sparse[least - 1]) least++;
    uint32_t low = least, high = full->n_layers; /* `low` may not fit, `high` does not */
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        NB_TRY(count(z, mid, full->n_experts, &r->bytes, &r->n_tensors));
        *(r->bytes <= z->o->max_bytes ? &low : &high) = mid;
    }
    r->n_layers = low;
    return fit_experts(z, full, low, r);
}

/* ---- data */

typedef struct run {
    const nbi_fill *fills;
    size_t tensor;   /* of the chunk's first byte */
    uint64_t offset; /* in it */
    uint8_t *data;   /* [CHUNK] */
    size_t bytes;    /* of the chunk */
} run;

/* Pieces never cross a tensor's end: a chunk is a part of one tensor. */
static void fill_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    const run *r = arg;
    (void)thread;
    for (uint32_t i = begin; i < end; i++) {
        size_t at = (size_t)i * PIECE, n = r->bytes - at < PIECE ? r->bytes - at : PIECE;
        nbi_fill_bytes(&r->fills[r->tensor], r->offset + at, r->data + at, n);
    }
}

static nb_status write_data(nbi_st_writer *w, const nbi_synth_plan *plan,
                            const nbi_synth_options *o, nbi_pool *pool, nb_error *err)
{
    run r = {.fills = plan->fills, .data = nbi_malloc(CHUNK)};
    if (!r.data) return nbi_fail(err, NB_NO_MEMORY, "out of memory for %zu bytes", CHUNK);
    nb_status st = NB_OK;
    uint64_t done = 0, told = 0;
    for (size_t i = 0; i < plan->n_fills && st == NB_OK; i++) {
        r.tensor = i;
        for (r.offset = 0; r.offset < r.fills[i].bytes && st == NB_OK; r.offset += r.bytes) {
            uint64_t left = r.fills[i].bytes - r.offset;
            r.bytes = left < CHUNK ? (size_t)left : CHUNK;
            nbi_pool_run(pool, fill_task, &r, (uint32_t)((r.bytes + PIECE - 1) / PIECE), 1);
            st = nbi_st_writer_data(w, r.data, r.bytes, err);
            done += r.bytes;
        }
        if (o->progress && (done - told > CHUNK || i + 1 == plan->n_fills)) {
            o->progress(o->progress_user, done, plan->bytes);
            told = done;
        }
    }
    nbi_free(r.data);
    return st;
}

static nb_status write_tensors(const nbi_config *config, const nbi_synth_options *o,
                               const char *dir, nb_error *err)
{
    nbi_synth_plan plan = {.config = config, .weights = o->weights, .seed = o->seed, .err = err};
    nbi_pool *pool = NULL;
    nb_status st =
        nbi_st_writer_create(&plan.writer, dir, o->shard_bytes ? o->shard_bytes : SHARD_BYTES, err);
    if (st == NB_OK) st = nbi_pool_create(&pool, o->n_threads, err);
    if (st == NB_OK) st = nbi_synth_plan_run(&plan);
    if (st == NB_OK) st = write_data(plan.writer, &plan, o, pool, err);
    if (st == NB_OK) st = nbi_st_writer_finish(plan.writer, err);
    nbi_pool_destroy(&pool);
    nbi_st_writer_destroy(&plan.writer);
    nbi_free(plan.fills);
    return st;
}

/* ---- all together */

static nb_status write_folder(json_t *json, const nbi_config *config, const nbi_synth_options *o,
                              const char *dir, nb_error *err)
{
    json_t *hf = NULL;
    NB_TRY(nbi_synth_describe(json, &hf, o->weights, err));
    nb_status st = nbi_write_json(dir, "config.json", json, err);
    if (st == NB_OK && hf) st = nbi_write_json(dir, "hf_quant_config.json", hf, err);
    json_decref(hf);
    if (st == NB_OK && o->tokenizer_dir) st = nbi_copy_tokenizer(dir, o->tokenizer_dir, err);
    return st == NB_OK ? write_tensors(config, o, dir, err) : st;
}

nb_status nbi_synth(nbi_synth_result *out, const nbi_synth_options *o, nb_error *err)
{
    json_t *json = NULL;
    nbi_config full = {0}, config = {0};
    nbi_outdir dir = {0};
    nbi_synth_result r = {0};
    nb_status st;
    NB_TRY(nbi_synth_config(&json, o, err));
    NB_TRY_OR(st, nbi_config_parse(&full, json, NULL, o->like, err), done);
    NB_TRY_OR(st, fit(&(sizing){json, o, err}, &full, &r), done);
    NB_TRY_OR(st, nbi_synth_resize(json, r.n_layers, r.n_experts, err), done);
    NB_TRY_OR(st, nbi_config_parse(&config, json, NULL, o->like, err), done);
    NB_TRY_OR(st, nbi_outdir_open(&dir, o->out_dir, err), done);
    nbi_outdir_discard(&dir); /* what an interrupted run left */
    nbi_outdir_close(&dir);
    NB_TRY_OR(st, nbi_outdir_open(&dir, o->out_dir, err), done);
    st = write_folder(json, &config, o, dir.partial, err);
    if (st == NB_OK) st = nbi_outdir_commit(&dir, err);
    if (st != NB_OK) nbi_outdir_discard(&dir);
    if (st == NB_OK) *out = r;
done:
    nbi_outdir_close(&dir);
    nbi_config_free(&full);
    nbi_config_free(&config);
    json_decref(json);
    return st;
}
