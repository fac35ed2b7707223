/* MoE runners on the experts of one layer.
 *
 * Every row is a sum of two base vectors and uses some of a few experts, so that gate and up of
 * those experts are multiplied twice each and no more, whatever the number of rows; of the down
 * products some columns are computed. Rows alone must have the bits that they have together. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/gate_parts.h"
#include "model/split.h"
#include "moe/runners.h"

#define BASES      2u
#define ROWS_FULL  33u
#define ROWS_BRIEF 17u
#define ROWS_SLOW  3u /* of the reference runner */
#define COLS_FULL  128u
#define COLS_BRIEF 32u
#define PIECE      32u /* rows of gate and up that a thread takes */
#define TIME_ROWS  64u
#define SLOW_CALL  0.05 /* seconds: more rows are not timed */

typedef struct moe_case {
    nbi_gate *g;
    const nbi_moe_experts *e;
    uint32_t T, n_cols;
    uint32_t used;     /* experts; a shared one is the last of them */
    uint32_t n_slots;  /* of a row; the shared one's is the last */
    uint32_t *experts; /* [used] */
    uint32_t *cols;    /* [n_cols] */
    float *base;       /* [BASES][hidden] as the products see them */
    float (*mix)[BASES];
    double *products; /* [used][BASES][gate, up][inter] */
    float *h;         /* [T][n_slots][inter] */
    double *want;     /* [T][n_cols] */
    uint32_t *slot;   /* [T][n_slots] place in `experts` */
    nbi_gate_buffer x, ids, weights, out;
    const nbi_moe_runner_ops *like; /* the first runner that was right, */
    float *like_row;                /* [hidden] and its first row */
    void *block;
    bool no_memory;
} moe_case;

static nb_status open_case(moe_case *c, nb_error *err)
{
    const nbi_moe_shape *s = &c->e->shape;
    nbi_plan plan = {0};
    const struct {
        void *at; /* address of a pointer in *c */
        size_t bytes;
    } parts[] = {{&c->experts, c->used * sizeof *c->experts},
                 {&c->cols, c->n_cols * sizeof *c->cols},
                 {&c->base, (size_t)BASES * s->hidden * sizeof *c->base},
                 {&c->mix, c->T * sizeof *c->mix},
                 {&c->products, (size_t)c->used * BASES * 2 * s->inter * sizeof *c->products},
                 {&c->h, (size_t)c->T * c->n_slots * s->inter * sizeof *c->h},
                 {&c->want, (size_t)c->T * c->n_cols * sizeof *c->want},
                 {&c->slot, (size_t)c->T * c->n_slots * sizeof *c->slot},
                 {&c->like_row, s->hidden * sizeof *c->like_row}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) nbi_plan_add(&plan, parts[i].bytes);
    c->block = nbi_calloc(1, plan.bytes);
    if (!c->block) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    plan.bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        *(void **)parts[i].at = (char *)c->block + nbi_plan_add(&plan, parts[i].bytes);
    const size_t rows = (size_t)c->T * s->hidden * sizeof(float), k = (size_t)c->T * s->top_k;
    NB_TRY(nbi_gate_buffer_open(c->g, &c->x, rows, err));
    NB_TRY(nbi_gate_buffer_open(c->g, &c->out, rows, err));
    NB_TRY(nbi_gate_buffer_open(c->g, &c->ids, k * sizeof(int32_t), err));
    return nbi_gate_buffer_open(c->g, &c->weights, k * sizeof(float), err);
}

static void close_case(moe_case *c)
{
    nbi_gate_buffer_close(c->g, &c->x);
    nbi_gate_buffer_close(c->g, &c->out);
    nbi_gate_buffer_close(c->g, &c->ids);
    nbi_gate_buffer_close(c->g, &c->weights);
    nbi_free(c->block);
}

/* The first row has all its experts, later ones miss one in eight. Experts of a row are distinct.
 */
static void make_rows(moe_case *c)
{
    const nbi_moe_shape *s = &c->e->shape;
    float *x = c->x.host, *weights = c->weights.host;
    int32_t *ids = c->ids.host;
    nbi_gate_fill(c->g, c->base, (size_t)BASES * s->hidden);
    const uint32_t chosen = c->used - s->n_shared;
    for (uint32_t i = 0; i < chosen; i++) /* first and last among them */
        c->experts[i] =
            chosen > 1 ? (uint32_t)((uint64_t)i * (s->n_experts - 1) / (chosen - 1)) : 0;
    if (s->n_shared) c->experts[chosen] = s->n_experts;
    for (uint32_t i = 0; i < c->n_cols; i++)
        c->cols[i] =
            (uint32_t)((uint64_t)i * (s->hidden - 1) / (c->n_cols > 1 ? c->n_cols - 1 : 1));
    for (uint32_t t = 0; t < c->T; t++) {
        const uint32_t one = t % BASES;
        for (uint32_t b = 0; b < BASES; b++)
            c->mix[t][b] = s->w4a4 ? (float)(b == one) : nbi_gate_normal(c->g);
        for (uint32_t j = 0; j < s->hidden; j++)
            x[(size_t)t * s->hidden + j] =
                c->mix[t][0] * c->base[j] + c->mix[t][1] * c->base[s->hidden + j];
        NB_ASSERT(chosen);
        const uint32_t first = nbi_gate_below(c->g, chosen);
        uint32_t *slot = c->slot + (size_t)t * c->n_slots;
        if (s->n_shared) slot[s->top_k] = chosen;
        for (uint32_t i = 0; i < s->top_k; i++) {
            const uint32_t at = t * s->top_k + i;
            const bool none = t && nbi_gate_below(c->g, 8) == 0;
            slot[i] = (first + i) % chosen;
            ids[at] = none ? -1 : (int32_t)c->experts[slot[i]];
            weights[at] = 0.1f + 0.1f * (float)nbi_gate_below(c->g, 10);
        }
    }
}

/* ---------------------------------------------------------------- sums in double */

static void product_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    moe_case *c = arg;
    const nbi_moe_shape *s = &c->e->shape;
    const uint32_t pieces = (s->inter + PIECE - 1) / PIECE;
    (void)thread;
    float *row = nbi_malloc((1 + BASES) * (size_t)s->hidden * sizeof *row);
    if (!row) {
        c->no_memory = true;
        return;
    }
    float *x = row + s->hidden;
    for (uint32_t item = begin; item < end; item++) {
        const uint32_t u = item / pieces, r0 = item % pieces * PIECE, e = c->experts[u];
        const nbi_matrix *parts[2] = {&c->e->gate[e], &c->e->up[e]};
        const float scale = nbi_moe_gate_up_scale(s, parts[0], parts[1]);
        memcpy(x, c->base, BASES * (size_t)s->hidden * sizeof *x);
        for (uint32_t b = 0; b < BASES && scale > 0; b++)
            nbi_nvfp4_round_row(c->base + (size_t)b * s->hidden, s->hidden, scale,
                                x + (size_t)b * s->hidden);
        for (uint32_t p = 0; p < 2; p++)
            for (uint32_t r = r0; r < s->inter && r < r0 + PIECE; r++) {
                nbi_matrix_row(parts[p], r, row);
                for (uint32_t b = 0; b < BASES; b++)
                    c->products[((u * BASES + b) * 2 + p) * (size_t)s->inter + r] =
                        nbi_gate_dot(x + (size_t)b * s->hidden, row, s->hidden);
            }
    }
    nbi_free(row);
}

static void activate_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    moe_case *c = arg;
    const nbi_moe_shape *s = &c->e->shape;
    (void)thread;
    for (uint32_t at = begin; at < end; at++) {
        const uint32_t t = at / c->n_slots, u = c->slot[at];
        const double *p = c->products + (size_t)u * BASES * 2 * s->inter;
        float *h = c->h + (size_t)at * s->inter;
        for (uint32_t j = 0; j < s->inter; j++) {
            double gate = 0, up = 0;
            for (uint32_t b = 0; b < BASES; b++) {
                gate += (double)c->mix[t][b] * p[(size_t)b * 2 * s->inter + j];
                up += (double)c->mix[t][b] * p[((size_t)b * 2 + 1) * s->inter + j];
            }
            h[j] = (float)(gate / (1 + exp(-gate)) * up);
        }
        const float scale = nbi_moe_down_scale(s, &c->e->down[c->experts[u]]);
        if (scale > 0) nbi_nvfp4_round_row(h, s->inter, scale, h);
    }
}

/* Of a row's slot; 0: it has no expert. */
static float slot_weight(const moe_case *c, uint32_t t, uint32_t slot)
{
    const uint32_t top_k = c->e->shape.top_k, at = t * top_k + slot;
    if (slot == top_k) return 1;
    return ((const int32_t *)c->ids.host)[at] < 0 ? 0 : ((const float *)c->weights.host)[at];
}

static void down_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    moe_case *c = arg;
    const nbi_moe_shape *s = &c->e->shape;
    (void)thread;
    float *row = nbi_malloc(s->inter * sizeof *row);
    if (!row) {
        c->no_memory = true;
        return;
    }
    for (uint32_t i = begin; i < end; i++)
        for (uint32_t u = 0; u < c->used; u++) {
            nbi_matrix_row(&c->e->down[c->experts[u]], c->cols[i], row);
            for (uint32_t at = 0; at < c->T * c->n_slots; at++) {
                const uint32_t t = at / c->n_slots;
                const float weight = slot_weight(c, t, at % c->n_slots);
                if (c->slot[at] == u && weight > 0)
                    c->want[(size_t)t * c->n_cols + i] +=
                        (double)weight * nbi_gate_dot(c->h + (size_t)at * s->inter, row, s->inter);
            }
        }
    nbi_free(row);
}

static nb_status make_case(moe_case *c, nbi_gate *g, const nbi_moe_experts *e, nb_error *err)
{
    const nbi_moe_shape *s = &e->shape;
    const bool brief = g->opt->brief;
    *c = (moe_case){.g = g, .e = e};
    c->T = nbi_gate_rows(g, brief ? ROWS_BRIEF : ROWS_FULL);
    c->used = nbi_gate_least(s->n_experts, s->top_k + (brief ? 0 : 2)) + s->n_shared;
    c->n_slots = nbi_moe_n_slots(s);
    c->n_cols = nbi_gate_least(s->hidden, brief ? COLS_BRIEF : COLS_FULL);
    NB_ASSERT(c->T > 1);
    NB_TRY(open_case(c, err));
    make_rows(c);
    const uint32_t pieces = (s->inter + PIECE - 1) / PIECE;
    const uint64_t slots = (uint64_t)c->T * c->n_slots;
    nbi_gate_each(g, product_task, c, c->used * pieces, 1,
                  (uint64_t)c->used * 2 * BASES * s->inter * s->hidden);
    nbi_gate_each(g, activate_task, c, (uint32_t)slots, 1, slots * s->inter * 20);
    nbi_gate_each(g, down_task, c, c->n_cols, 4, slots * c->n_cols * s->inter);
    if (c->no_memory) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    nbi_gate_up(g, &c->x);
    nbi_gate_up(g, &c->ids);
    nbi_gate_up(g, &c->weights);
    return NB_OK;
}

/* ---------------------------------------------------------------- one runner */

static void call(moe_case *c, const nbi_moe_runner_ops *r, const nbi_moe_layer *layer,
                 uint32_t first, uint32_t n, void *workspace)
{
    const nbi_moe_shape *s = &c->e->shape;
    r->run(c->g->b, layer,
           &(nbi_moe_args){.out = (float *)c->out.device + (size_t)first * s->hidden,
                           .x = (const float *)c->x.device + (size_t)first * s->hidden,
                           .ids = (const int32_t *)c->ids.device + (size_t)first * s->top_k,
                           .weights = (const float *)c->weights.device + (size_t)first * s->top_k,
                           .n_rows = n,
                           .workspace = workspace});
}

/* The output is not what the call before left. */
static void poison(moe_case *c)
{
    memset(c->out.host, 0xff, c->out.bytes);
    nbi_gate_up(c->g, &c->out);
}

static double row_error(const moe_case *c, uint32_t t)
{
    const uint32_t hidden = c->e->shape.hidden;
    const float *out = (const float *)c->out.host + (size_t)t * hidden;
    float got[COLS_FULL];
    for (uint32_t j = 0; j < hidden; j++)
        if (!isfinite(out[j])) return INFINITY;
    for (uint32_t i = 0; i < c->n_cols; i++) got[i] = out[c->cols[i]];
    return nbi_gate_error(got, c->want + (size_t)t * c->n_cols, c->n_cols);
}

/* Runners of one class take turns in a model: the first row of each must have the same bits. */
static void compare_class(moe_case *c, const nbi_moe_runner_ops *r, const float *row,
                          nbi_gate_result *out)
{
    const size_t bytes = c->e->shape.hidden * sizeof *row;
    if (!c->like || !nbi_moe_same_class(r, c->like)) { /* those of a class stand together */
        c->like = r;
        memcpy(c->like_row, row, bytes);
    } else if (memcmp(c->like_row, row, bytes) != 0) {
        snprintf(out->why, sizeof out->why, "a row has other bits than with runner %s",
                 c->like->name);
    }
}

/* All rows together, then the first alone and the next two. */
static nb_status check_rows(moe_case *c, const nbi_moe_runner_ops *r, const nbi_moe_layer *layer,
                            uint32_t T, void *workspace, nbi_gate_result *out, nb_error *err)
{
    const size_t row = c->e->shape.hidden * sizeof(float);
    const uint32_t again = nbi_gate_least(T, 3);
    poison(c);
    call(c, r, layer, 0, T, workspace);
    nbi_gate_down(c->g, &c->out);
    NB_TRY(c->g->b->ops->sync(c->g->b, err));
    for (uint32_t t = 0; t < T; t++) out->error = fmax(out->error, row_error(c, t));
    void *together = nbi_malloc(again * row);
    if (!together) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    memcpy(together, c->out.host, again * row);
    poison(c);
    call(c, r, layer, 0, 1, workspace);
    call(c, r, layer, 1, again - 1, workspace);
    nbi_gate_down(c->g, &c->out);
    const nb_status st = c->g->b->ops->sync(c->g->b, err);
    for (uint32_t t = 0; t < again; t++) out->error = fmax(out->error, row_error(c, t));
    if (st == NB_OK && memcmp(together, c->out.host, again * row) != 0 && out->error <= out->bound)
        snprintf(out->why, sizeof out->why, "a row alone has other bits than the same row among %u",
                 T);
    else if (st == NB_OK && out->error <= out->bound)
        compare_class(c, r, together, out);
    nbi_free(together);
    return st;
}

static nb_status try_prepared(moe_case *c, const nbi_moe_runner_ops *r, const nbi_moe_layer *layer,
                              nbi_gate_result *out, nb_error *err)
{
    const bool slow = strcmp(r->name, "reference") == 0;
    const uint32_t T = slow ? ROWS_SLOW : c->T;
    nbi_gate_buffer ws = {0};
    NB_TRY(nbi_gate_buffer_open(c->g, &ws, r->workspace_bytes(c->g->b, &c->e->shape, T), err));
    out->rows = T;
    nb_status st = check_rows(c, r, layer, T, ws.device, out, err);
    nbi_gate_buffer_close(c->g, &ws);
    if (st != NB_OK || c->g->opt->brief) {
        if (st == NB_OK) nbi_gate_say(c->g, out);
        return st;
    }
    for (uint32_t rows = 1; st == NB_OK && rows <= (slow ? 1 : TIME_ROWS); rows *= 8) {
        st = nbi_gate_time(c->g, c->e, r, layer, rows, 1, out, err);
        if (st == NB_OK) nbi_gate_say(c->g, out);
        if (out->seconds > SLOW_CALL) break;
    }
    return st;
}

static nb_status try_runner(moe_case *c, const nbi_moe_runner_ops *r, bool run, nb_error *err)
{
    nbi_model *m = c->g->m;
    const nbi_moe_shape *s = &c->e->shape;
    nbi_gate_result out = {.kind = "runner",
                           .chosen = nbi_moe_table_has(&m->moe_table, r),
                           .not_run = !run,
                           .bound = nbi_gate_bound(s->w4a4)};
    snprintf(out.path, sizeof out.path, "%s", r->name);
    snprintf(out.where, sizeof out.where, "layer %u, %u experts%s of %u x %u, %s", c->e->layer,
             s->n_experts, s->n_shared ? " and a shared one" : "", s->inter, s->hidden,
             nbi_weight_kind_name(s->kind_gate_up));
    out.supported = r->supports(m->b, s, out.why, sizeof out.why);
    if (!out.supported || !run) {
        nbi_gate_say(c->g, &out);
        return NB_OK;
    }
    if (out.chosen) return try_prepared(c, r, m->layers[c->e->layer].moe.prepared, &out, err);
    nbi_moe_layer *layer = NULL;
    NB_TRY(r->prepare(m->b, &layer, c->e, err));
    const nb_status st = try_prepared(c, r, layer, &out, err);
    r->release(m->b, &layer);
    return st;
}

/* The runners that serving does not take: could they? */
static nb_status ask_others(moe_case *c, nb_error *err)
{
    const nbi_moe_table *t = &c->g->m->moe_table;
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); *r; r++) {
        bool taken = false;
        for (uint32_t i = 0; i < t->n; i++)
            taken = taken || strcmp((*r)->name, t->buckets[i].runner->name) == 0;
        if (!taken) NB_TRY(try_runner(c, *r, false, err));
    }
    return NB_OK;
}

static nb_status try_runners(moe_case *c, nb_error *err)
{
    nbi_model *m = c->g->m;
    const char *name = c->g->opt->runner;
    const nbi_moe_table *t = &m->moe_table;
    if (name && strcmp(name, "all") != 0) {
        const nbi_moe_runner_ops *named = NULL;
        NB_TRY(nbi_moe_runner_choose(&named, name, m->b, &c->e->shape, err));
        return try_runner(c, named, true, err);
    }
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); name && *r; r++)
        NB_TRY(try_runner(c, *r, true, err));
    for (uint32_t i = 0; !name && i < t->n; i++) {
        bool before = false;
        for (uint32_t k = 0; k < i; k++)
            before = before || t->buckets[k].runner == t->buckets[i].runner;
        if (!before) NB_TRY(try_runner(c, t->buckets[i].runner, true, err));
    }
    return c->g->opt->brief && !name ? ask_others(c, err) : NB_OK;
}

nb_status nbi_gate_moe(nbi_gate *g, nb_error *err)
{
    const nbi_moe_experts *e = NULL;
    for (uint32_t l = 0; l < g->m->n_layers && !e; l++)
        if (g->m->layers[l].moe.prepared) e = &g->m->layers[l].moe.experts;
    if (!e) return NB_OK;
    moe_case c;
    nb_status st = make_case(&c, g, e, err);
    if (st == NB_OK) st = try_runners(&c, err);
    close_case(&c);
    return st;
}

bool nbi_gate_runner_on_ranks(const nbi_model *m, const nbi_moe_runner_ops *r, uint32_t tp_size,
                              uint32_t ep_size, char *why, size_t why_bytes)
{
    char reason[200];
    for (uint32_t rank = 0; rank < tp_size; rank++) {
        nbi_shard shard;
        if (nbi_shard_make(&shard, rank, tp_size, ep_size, NULL) != NB_OK) return false;
        for (uint32_t l = 0; l < m->n_layers; l++) {
            if (!m->layers[l].moe.prepared) continue;
            nbi_moe_shape s = m->layers[l].moe.experts.shape;
            s.n_shared = 0; /* a rank whose runner does not take it runs it apart */
            const nbi_weight_kind kinds[3] = {s.kind_gate_up, s.kind_gate_up, s.kind_down};
            s.n_experts = nbi_split_part(s.n_experts, 1, shard.ep_rank, shard.ep_size).n;
            s.inter = nbi_split_inter(s.inter, kinds, nbi_shard_moe_rank(&shard),
                                      nbi_shard_moe_size(&shard))
                          .n;
            if (!s.n_experts || !s.inter) continue; /* a rank that adds nothing runs nothing */
            if (r->supports(m->b, &s, reason, sizeof reason)) continue;
            snprintf(why, why_bytes, "rank %u, %u experts of %u columns: %s", rank, s.n_experts,
                     s.inter, reason);
            return false;
        }
    }
    return true;
}
