/* Runner `cpu`: rows are grouped by expert, each expert's weights are read once per step from where
 * the file has them. Callers: the registry.
 *
 * A step, for at most CHUNK_ROWS rows at a time:
 *   group    slots (row, i) are sorted by expert, stable
 *   pack     each expert's rows into the form of its gate and up
 *   up       items (expert, rows of inter): gate and up panels, SwiGLU
 *   pack     the same for down
 *   down     items (expert, rows of hidden): one result row per slot
 *   combine  out[t] = sum over i of weight * result, i ascending
 * Small steps do both packs and the combination in the calling thread: two parallel regions remain.
 * Invariant: what is computed for a slot depends on its row and expert alone, so neighbours,
 * threads and cuts do not change bits; an expert without slots is never read. */
#include <stdio.h>
#include <string.h>

#include "backend/cpu/cpu_kernels.h"
#include "backend/cpu/linear.h"
#include "moe/mapped.h"

#define CHUNK_ROWS 512u
#define SERIAL     (1u << 15) /* values that the caller handles faster than a region starts */

/* Slots of one expert. */
typedef struct group {
    uint32_t expert, first, n; /* places [first, first + n) in grouped order */
    nbi_lin_x x, h;
    float x_scale, h_scale; /* input scales for NVFP4 activations, 0: off */
} group;

/* Memory of one run; sized and laid out by plan_work(). */
typedef struct work {
    uint32_t *count;   /* [n_experts + 1] */
    group *groups;     /* [n_experts] */
    int32_t *slot_row; /* [slots] row of x of each place */
    uint32_t *place;   /* [slots] place of slot (row, i); UINT32_MAX: none */
    int32_t *identity; /* [slots] place itself: rows of h */
    void *x;           /* packed rows of every place */
    void *hp;          /* packed h of every place */
    float *h;          /* [slots, inter] */
    float *y;          /* [slots, hidden] */
    char *threads;
    size_t thread_bytes, gate_up; /* gate_up: offset of the panel results in a thread's scratch */
} work;

typedef struct step {
    const nbi_cpu *cpu;
    const nbi_moe_layer *layer;
    const nbi_moe_args *a;
    uint32_t row0, n_rows; /* rows of the chunk */
    uint32_t n_groups, n_slots;
    uint32_t item_rows, n_row_items;
    bool of_h; /* pack: h instead of x */
    work w;
} step;

static size_t plan_work(work *w, char *base, const nbi_cpu *cpu, const nbi_moe_shape *s,
                        uint32_t max_rows)
{
    const uint32_t rows = max_rows < CHUNK_ROWS ? max_rows : CHUNK_ROWS;
    const size_t slots = (size_t)rows * s->top_k;
    const uint32_t side = s->hidden > s->inter ? s->hidden : s->inter;
    const uint32_t tokens = rows < NBI_LIN_TOKENS ? rows : NBI_LIN_TOKENS;
    const nbi_lin_form fx = nbi_lin_form_of(cpu->level, s->kind_gate_up, false);
    const nbi_lin_form fh = nbi_lin_form_of(cpu->level, s->kind_down, false);
    nbi_plan thread = {0};
    nbi_plan_add(&thread, nbi_lin_thread_bytes(side));
    const size_t gate_up = nbi_plan_add(&thread, 2 * sizeof(float) * tokens * NBI_LIN_ROWS);

    nbi_plan plan = {0};
    const size_t count = nbi_plan_add(&plan, (s->n_experts + 1) * sizeof(uint32_t));
    const size_t groups = nbi_plan_add(&plan, s->n_experts * sizeof(group));
    const size_t slot_row = nbi_plan_add(&plan, slots * sizeof(int32_t));
    const size_t place = nbi_plan_add(&plan, slots * sizeof(uint32_t));
    const size_t identity = nbi_plan_add(&plan, slots * sizeof(int32_t));
    const size_t x = nbi_plan_add(&plan, nbi_lin_pack_bytes(fx, (uint32_t)slots, s->hidden));
    const size_t hp = nbi_plan_add(&plan, nbi_lin_pack_bytes(fh, (uint32_t)slots, s->inter));
    const size_t h = nbi_plan_add(&plan, slots * s->inter * sizeof(float));
    const size_t y = nbi_plan_add(&plan, slots * s->hidden * sizeof(float));
    const size_t threads = nbi_plan_add(&plan, thread.bytes * nbi_pool_threads(cpu->pool));
    if (w) {
        *w = (work){.count = (void *)(base + count),
                    .groups = (void *)(base + groups),
                    .slot_row = (void *)(base + slot_row),
                    .place = (void *)(base + place),
                    .identity = (void *)(base + identity),
                    .x = base + x,
                    .hp = base + hp,
                    .h = (void *)(base + h),
                    .y = (void *)(base + y),
                    .threads = base + threads,
                    .thread_bytes = thread.bytes,
                    .gate_up = gate_up};
    }
    return plan.bytes;
}

/* ---------------------------------------------------------------- table entries but run */

static bool supports(const nbi_backend *b, const nbi_moe_shape *shape, char *why, size_t why_bytes)
{
    if (strcmp(b->ops->name, "cpu") != 0) {
        snprintf(why, why_bytes, "runner cpu runs on the CPU backend, this is %s", b->description);
        return false;
    }
    if (shape->n_shared) {
        snprintf(why, why_bytes, "a shared expert is not among the others on the CPU");
        return false;
    }
    const nbi_weight_kind kinds[2] = {shape->kind_gate_up, shape->kind_down};
    const uint32_t cols[2] = {shape->hidden, shape->inter};
    for (int i = 0; i < 2; i++) {
        if (kinds[i] <= NBI_WEIGHT_NONE || kinds[i] >= NBI_WEIGHT_KIND_COUNT) {
            snprintf(why, why_bytes, "weight kind %s is not one it knows",
                     nbi_weight_kind_name(kinds[i]));
            return false;
        }
        if (kinds[i] == NBI_WEIGHT_NVFP4 && cols[i] % NBI_NVFP4_BLOCK) {
            snprintf(why, why_bytes, "%u columns, NVFP4 needs a multiple of %u", cols[i],
                     NBI_NVFP4_BLOCK);
            return false;
        }
    }
    return true;
}

static size_t workspace_bytes(const nbi_backend *b, const nbi_moe_shape *shape, uint32_t max_rows)
{
    return plan_work(NULL, NULL, (const nbi_cpu *)b, shape, max_rows);
}

/* ---------------------------------------------------------------- group */

static bool valid_id(const nbi_moe_experts *e, int32_t id)
{
    return id >= 0 && (uint32_t)id < e->shape.n_experts;
}

static void make_group(step *s, uint32_t expert, uint32_t first, uint32_t n)
{
    const nbi_moe_experts *e = &s->layer->experts;
    const nbi_moe_shape *shape = &e->shape;
    group *g = &s->w.groups[s->n_groups++];
    *g = (group){.expert = expert, .first = first, .n = n};
    g->x_scale = nbi_moe_gate_up_scale(shape, &e->gate[expert], &e->up[expert]);
    g->h_scale = nbi_moe_down_scale(shape, &e->down[expert]);
    g->x = (nbi_lin_x){.form = nbi_lin_form_of(s->cpu->level, shape->kind_gate_up, false),
                       .n = n,
                       .cols = shape->hidden,
                       .scale = g->x_scale > 0 ? g->x_scale : 1};
    g->h = (nbi_lin_x){.form = nbi_lin_form_of(s->cpu->level, shape->kind_down, false),
                       .n = n,
                       .cols = shape->inter,
                       .scale = g->h_scale > 0 ? g->h_scale : 1};
    g->x.data = (char *)s->w.x + nbi_lin_pack_bytes(g->x.form, first, shape->hidden);
    g->h.data = (char *)s->w.hp + nbi_lin_pack_bytes(g->h.form, first, shape->inter);
}

/* Counting sort of the chunk's slots by expert. */
static void group_slots(step *s)
{
    const nbi_moe_experts *e = &s->layer->experts;
    const uint32_t n_experts = e->shape.n_experts, top_k = e->shape.top_k;
    const int32_t *ids = s->a->ids + (size_t)s->row0 * top_k;
    const uint32_t n = s->n_rows * top_k;
    uint32_t *count = s->w.count;
    memset(count, 0, (n_experts + 1) * sizeof *count);
    for (uint32_t i = 0; i < n; i++)
        if (valid_id(e, ids[i])) count[ids[i]]++;
    s->n_groups = 0;
    s->n_slots = 0;
    for (uint32_t x = 0; x < n_experts; x++) {
        const uint32_t here = count[x];
        if (here) make_group(s, x, s->n_slots, here);
        count[x] = s->n_slots;
        s->n_slots += here;
    }
    for (uint32_t i = 0; i < n; i++) {
        s->w.place[i] = UINT32_MAX;
        if (!valid_id(e, ids[i])) continue;
        const uint32_t place = count[ids[i]]++;
        s->w.place[i] = place;
        s->w.slot_row[place] = (int32_t)(s->row0 + i / top_k);
        s->w.identity[place] = (int32_t)place;
    }
}

/* ---------------------------------------------------------------- pack */

/* Items: groups. */
static void pack_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    step *s = arg;
    const nbi_moe_shape *shape = &s->layer->experts.shape;
    void *scratch = s->w.threads + thread * s->w.thread_bytes;
    for (uint32_t i = begin; i < end; i++) {
        const group *g = &s->w.groups[i];
        if (s->of_h)
            nbi_lin_pack(s->cpu->level, &g->h, 0, g->n, s->w.h, shape->inter,
                         s->w.identity + g->first, g->h_scale, scratch);
        else
            nbi_lin_pack(s->cpu->level, &g->x, 0, g->n, s->a->x, shape->hidden,
                         s->w.slot_row + g->first, g->x_scale, scratch);
    }
}

static void pack(step *s, bool of_h)
{
    const nbi_moe_shape *shape = &s->layer->experts.shape;
    s->of_h = of_h;
    const uint64_t values = (uint64_t)s->n_slots * (of_h ? shape->inter : shape->hidden);
    nbi_pool_run(values <= SERIAL ? NULL : s->cpu->pool, pack_task, s, s->n_groups, 1);
}

/* ---------------------------------------------------------------- panels */

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Panel of rows [row, row + n) of w for all tokens of a group, 256 at a time. */
static nbi_lin_panel panel_of(const step *s, const nbi_matrix *w, uint32_t row, uint32_t n,
                              uint32_t thread)
{
    return (nbi_lin_panel){
        .w = w, .row = row, .n_rows = n, .scratch = s->w.threads + thread * s->w.thread_bytes};
}

/* Item i: rows of inter (i % n_row_items) of group i / n_row_items. */
static void up_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    step *s = arg;
    const nbi_moe_experts *e = &s->layer->experts;
    const uint32_t inter = e->shape.inter;
    const nbi_cpu_kernels *k = nbi_cpu_kernels_of(s->cpu->level);
    float *gate_out = (void *)(s->w.threads + thread * s->w.thread_bytes + s->w.gate_up);
    for (uint32_t i = begin; i < end; i++) {
        const group *g = &s->w.groups[i / s->n_row_items];
        const uint32_t row = i % s->n_row_items * s->item_rows;
        const uint32_t n = min_u32(s->item_rows, inter - row);
        nbi_lin_panel gate = panel_of(s, &e->gate[g->expert], row, n, thread);
        nbi_lin_panel up = panel_of(s, &e->up[g->expert], row, n, thread);
        gate.x = up.x = &g->x;
        gate.next = up.w, gate.next_row = row, gate.next_rows = n;
        if (i + 1 < end) {
            const uint32_t j = i + 1;
            up.next = &e->gate[s->w.groups[j / s->n_row_items].expert];
            up.next_row = j % s->n_row_items * s->item_rows;
            up.next_rows = min_u32(s->item_rows, inter - up.next_row);
        }
        for (uint32_t t0 = 0; t0 < g->n; t0 += NBI_LIN_TOKENS) {
            gate.t0 = up.t0 = t0;
            gate.n = up.n = min_u32(NBI_LIN_TOKENS, g->n - t0);
            gate.out = gate_out;
            up.out = gate_out + (size_t)gate.n * n;
            gate.out_stride = up.out_stride = n;
            nbi_lin_run_panel(s->cpu->level, &gate);
            nbi_lin_run_panel(s->cpu->level, &up);
            for (uint32_t t = 0; t < gate.n; t++)
                k->swiglu(s->w.h + (size_t)(g->first + t0 + t) * inter + row,
                          gate.out + (size_t)t * n, up.out + (size_t)t * n, n);
        }
    }
}

/* Item i: rows of hidden (i % n_row_items) of group i / n_row_items. */
static void down_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    step *s = arg;
    const nbi_moe_experts *e = &s->layer->experts;
    const uint32_t hidden = e->shape.hidden;
    for (uint32_t i = begin; i < end; i++) {
        const group *g = &s->w.groups[i / s->n_row_items];
        const uint32_t row = i % s->n_row_items * s->item_rows;
        nbi_lin_panel p =
            panel_of(s, &e->down[g->expert], row, min_u32(s->item_rows, hidden - row), thread);
        p.x = &g->h;
        p.out_stride = hidden;
        if (i + 1 < end) {
            const uint32_t j = i + 1;
            p.next = &e->down[s->w.groups[j / s->n_row_items].expert];
            p.next_row = j % s->n_row_items * s->item_rows;
            p.next_rows = min_u32(s->item_rows, hidden - p.next_row);
        }
        for (uint32_t t0 = 0; t0 < g->n; t0 += NBI_LIN_TOKENS) {
            p.t0 = t0;
            p.n = min_u32(NBI_LIN_TOKENS, g->n - t0);
            p.out = s->w.y + (size_t)(g->first + t0) * hidden + row;
            nbi_lin_run_panel(s->cpu->level, &p);
        }
    }
}

static void run_items(step *s, nbi_task task, uint32_t rows)
{
    const uint32_t n_threads = nbi_pool_threads(s->cpu->pool);
    const uint32_t tokens = (s->n_slots + s->n_groups - 1) / s->n_groups;
    s->item_rows = nbi_lin_rows_per_item((uint64_t)rows * s->n_groups, tokens, n_threads);
    s->n_row_items = (rows + s->item_rows - 1) / s->item_rows;
    const uint32_t n_items = s->n_row_items * s->n_groups;
    nbi_pool_run(s->cpu->pool, task, s, n_items, nbi_lin_grain(n_items, tokens, n_threads));
}

/* ---------------------------------------------------------------- combine */

/* Items: rows of the chunk. */
static void combine_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    step *s = arg;
    const uint32_t hidden = s->layer->experts.shape.hidden, top_k = s->layer->experts.shape.top_k;
    for (uint32_t t = begin; t < end; t++) {
        const size_t row = s->row0 + t;
        float *out = (float *)s->a->out + row * hidden;
        memset(out, 0, hidden * sizeof *out);
        for (uint32_t i = 0; i < top_k; i++) {
            const uint32_t place = s->w.place[(size_t)t * top_k + i];
            if (place == UINT32_MAX) continue;
            const float weight = s->a->weights[row * top_k + i];
            const float *y = s->w.y + (size_t)place * hidden;
            for (uint32_t c = 0; c < hidden; c++) out[c] += weight * y[c];
        }
    }
}

static void run(nbi_backend *b, const nbi_moe_layer *layer, const nbi_moe_args *a)
{
    const nbi_cpu *cpu = nbi_cpu_of(b);
    const nbi_moe_shape *shape = &layer->experts.shape;
    step s = {.cpu = cpu, .layer = layer, .a = a};
    plan_work(&s.w, a->workspace, cpu, shape, a->n_rows);
    for (s.row0 = 0; s.row0 < a->n_rows; s.row0 += s.n_rows) {
        s.n_rows = min_u32(CHUNK_ROWS, a->n_rows - s.row0);
        group_slots(&s);
        if (s.n_groups) {
            pack(&s, false);
            run_items(&s, up_task, shape->inter);
            pack(&s, true);
            run_items(&s, down_task, shape->hidden);
        }
        const bool small = (uint64_t)s.n_slots * shape->hidden <= SERIAL;
        nbi_pool_run(small ? NULL : cpu->pool, combine_task, &s, s.n_rows, 4);
    }
}

const nbi_moe_runner_ops nbi_moe_runner_cpu = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cpu",
    .summary = "rows grouped by expert, weights read once per step from the mapped file",
    .numerics = "cpu",
    .supports = supports,
    .prepare = nbi_moe_mapped_prepare,
    .release = nbi_moe_mapped_release,
    .workspace_bytes = workspace_bytes,
    .run = run,
};
