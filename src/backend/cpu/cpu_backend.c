/* The CPU backend: opening, memory, and the table of its operators.
 * Callers: backend.c; everything else goes through the table.
 * Invariants: one operator runs at a time (one caller thread), so all of them share the scratch
 * that `reserve` makes; no operator allocates. */
#include <stdio.h>
#include <string.h>

#include "backend/cpu/cpu_backend.h"

/* As Linux names the processor; "" where it names none. */
static void read_model(char *out, size_t n)
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "re");
    out[0] = '\0';
    while (f && !out[0] && fgets(line, sizeof line, f)) {
        const char *name = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !name) continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(out, n, "%.90s", name + 1 + (name[1] == ' '));
    }
    if (f) fclose(f);
}

static nb_status cpu_open(nbi_backend **out, const nbi_backend_options *opt, nb_error *err)
{
    const nbi_backend_options defaults = {.cpu_level = NBI_CPU_LEVEL_COUNT};
    if (!opt) opt = &defaults;
    nb_status st;
    nbi_cpu *cpu = nbi_calloc(1, sizeof *cpu);
    if (!cpu) return nbi_fail(err, NB_NO_MEMORY, "cpu backend: out of memory");
    cpu->base.ops = &nbi_cpu_ops;
    cpu->base.act_dtype = NBI_F32;
    const nbi_cpu_level have = nbi_cpu_detect();
    cpu->level = opt->cpu_level < have ? opt->cpu_level : have;
    cpu->base.expands_fast = cpu->level != NBI_CPU_AMX; /* whose tiles are for the absorbed form */
    cpu->base.w4a4 = cpu->w4a4 = opt->w4a4;
    NB_TRY_OR(st, nbi_pool_create(&cpu->pool, opt->n_threads, err), fail);
    const unsigned n = nbi_pool_threads(cpu->pool);
    snprintf(cpu->base.description, sizeof cpu->base.description, "cpu (%s, %u thread%s)",
             nbi_cpu_level_name(cpu->level), n, n == 1 ? "" : "s");
    read_model(cpu->base.driver, sizeof cpu->base.driver);
    *out = &cpu->base;
    return NB_OK;
fail:
    nbi_free(cpu);
    return st;
}

static void cpu_release_scratch(nbi_cpu *cpu)
{
    if (cpu->scratch) nbi_pages_free(cpu->scratch, cpu->scratch_bytes);
    if (cpu->attention) nbi_pages_free(cpu->attention, cpu->attention_bytes);
    cpu->scratch = cpu->attention = NULL;
    cpu->scratch_bytes = cpu->attention_bytes = 0;
}

static void cpu_close(nbi_backend **b)
{
    if (!b || !*b) return;
    nbi_cpu *cpu = nbi_cpu_of(*b);
    cpu_release_scratch(cpu);
    nbi_pool_destroy(&cpu->pool);
    nbi_free(cpu);
    *b = NULL;
}

/* Committed: what was planned at the start is there when it is needed. */
static void *alloc_pages(size_t bytes)
{
    void *p = nbi_pages_alloc(bytes);
    if (!p || nbi_pages_commit(p, bytes)) return p;
    nbi_pages_free(p, bytes);
    return NULL;
}

static void *cpu_alloc(nbi_backend *b, size_t bytes)
{
    (void)b;
    return nbi_pages_alloc(bytes);
}

static bool cpu_commit(nbi_backend *b, void *p, size_t bytes)
{
    (void)b;
    return nbi_pages_commit(p, bytes);
}

static void cpu_release(nbi_backend *b, void *p, size_t bytes)
{
    (void)b;
    if (p) nbi_pages_free(p, bytes);
}

static void cpu_copy(nbi_backend *b, void *dst, const void *src, size_t bytes)
{
    (void)b;
    if (bytes && dst != src) memmove(dst, src, bytes);
}

static size_t cpu_workspace_bytes(const nbi_backend *b, const nbi_limits *limits)
{
    const nbi_cpu *cpu = (const nbi_cpu *)b;
    return nbi_cpu_linear_scratch(cpu, limits) + nbi_cpu_attention_workspace(cpu, limits);
}

/* Widths that attention kernels keep on the stack. */
static nb_status check_limits(const nbi_limits *l, nb_error *err)
{
    if (l->kv_lora + l->rope_dim > NBI_CPU_WIDTH_MAX)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "cpu backend: kv_lora_rank + qk_rope_head_dim is %u, at most %u works",
                        l->kv_lora + l->rope_dim, NBI_CPU_WIDTH_MAX);
    if (l->head_dim > NBI_CPU_WIDTH_MAX)
        return nbi_fail(err, NB_UNSUPPORTED, "cpu backend: head_dim is %u, at most %u works",
                        l->head_dim, NBI_CPU_WIDTH_MAX);
    if (l->index_dim > NBI_CPU_WIDTH_MAX)
        return nbi_fail(err, NB_UNSUPPORTED, "cpu backend: index_head_dim is %u, at most %u works",
                        l->index_dim, NBI_CPU_WIDTH_MAX);
    return NB_OK;
}

static nb_status cpu_reserve(nbi_backend *b, const nbi_limits *limits, nb_error *err)
{
    nbi_cpu *cpu = nbi_cpu_of(b);
    NB_TRY(check_limits(limits, err));
    const size_t linear = nbi_cpu_linear_scratch(cpu, limits);
    const size_t attention = nbi_cpu_attention_workspace(cpu, limits);
    cpu_release_scratch(cpu);
    if (linear && !(cpu->scratch = alloc_pages(linear))) goto fail;
    cpu->scratch_bytes = linear;
    if (attention && !(cpu->attention = alloc_pages(attention))) goto fail;
    cpu->attention_bytes = attention;
    return NB_OK;
fail:
    cpu_release_scratch(cpu);
    return nbi_fail(err, NB_NO_MEMORY, "cpu backend: no memory for %zu bytes of scratch",
                    linear + attention);
}

static bool cpu_step_begin(nbi_backend *b, const nbi_batch *host, uint32_t pass,
                           const nbi_batch **device)
{
    (void)b;
    (void)pass;
    *device = host;
    return true;
}

static nb_status cpu_sync(nbi_backend *b, nb_error *err)
{
    (void)b;
    (void)err;
    return NB_OK;
}

const nbi_backend_ops nbi_cpu_ops = {
    .version = 1,
    .size = sizeof(nbi_backend_ops),
    .name = "cpu",
    .mla_expanded = true,
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .commit = cpu_commit,
    .release = cpu_release,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .weight_prepare = nbi_cpu_weight_prepare,
    .weight_release = nbi_cpu_weight_release,
    .workspace_bytes = cpu_workspace_bytes,
    .reserve = cpu_reserve,
    .step_begin = cpu_step_begin,
    .step_end = cpu_sync,
    .embed = nbi_cpu_embed,
    .rope_table = nbi_cpu_rope_table,
    .rmsnorm = nbi_cpu_rmsnorm,
    .linear = nbi_cpu_linear,
    .swiglu = nbi_cpu_swiglu,
    .mla_append = nbi_cpu_mla_append,
    .mla_attend = nbi_cpu_mla_attend,
    .gqa_append = nbi_cpu_gqa_append,
    .gqa_attend = nbi_cpu_gqa_attend,
    .index_append = nbi_cpu_index_append,
    .index_select = nbi_cpu_index_select,
    .index_reuse = nbi_cpu_index_reuse,
    .route = nbi_cpu_route,
    .share_experts = nbi_cpu_share_experts,
    .own_experts = nbi_cpu_own_experts,
    .clear = nbi_cpu_clear,
    .gather = nbi_cpu_gather,
    .add = nbi_cpu_add,
    .sample = nbi_cpu_sample,
    .sync = cpu_sync,
};
