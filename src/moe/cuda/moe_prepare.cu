/* Experts of a layer in one block of device memory, packed (backend/cuda/tile.h). Callers: the
 * tables of the CUDA runners, when a model opens. A shared expert is the last of the experts.
 *
 * The block: gate and up of expert 0, of expert 1, ...; then down of expert 0, ...; with NVFP4
 * activations the input scales. */
#include <stdio.h>
#include <string.h>

#include "backend/cuda/pack.h"
#include "moe/cuda/moe_cuda.h"

static bool known_kind(nbi_weight_kind kind)
{
    return kind == NBI_WEIGHT_NVFP4 || kind == NBI_WEIGHT_BF16 || kind == NBI_WEIGHT_F16 ||
           kind == NBI_WEIGHT_FP8_BLOCK || kind == NBI_WEIGHT_FP8_TENSOR || kind == NBI_WEIGHT_F32;
}

bool nbi_moe_cuda_supports(const nbi_backend *b, const nbi_moe_shape *s, char *why, size_t n)
{
    if (strcmp(b->ops->name, "cuda") != 0) {
        snprintf(why, n, "it runs on the CUDA backend, this is %s", b->description);
        return false;
    }
    const nbi_weight_kind kinds[2] = {s->kind_gate_up, s->kind_down};
    for (const nbi_weight_kind kind : kinds) {
        if (known_kind(kind)) continue;
        snprintf(why, n, "it has no product for %s experts", nbi_weight_kind_name(kind));
        return false;
    }
    if (s->hidden % 8 || s->inter % 8) {
        snprintf(why, n, "experts of %u x %u: both sides must be multiples of 8", s->inter,
                 s->hidden);
        return false;
    }
    if (s->top_k > NBI_MOE_TOP_K_MAX || s->n_experts > NBI_MOE_EXPERTS_MAX) {
        snprintf(why, n, "%u of %u experts; %u of %u is the most", s->top_k, s->n_experts,
                 NBI_MOE_TOP_K_MAX, NBI_MOE_EXPERTS_MAX);
        return false;
    }
    if (!s->n_shared) return true;
    if (s->w4a4 || nbi_moe_has_f32(s)) {
        snprintf(why, n,
                 "a shared expert is among the others only where activations are not "
                 "rounded to NVFP4 and weights are not f32");
        return false;
    }
    if (nbi_moe_n_slots(s) > NBI_MOE_TOP_K_MAX || nbi_moe_n_all(s) > NBI_MOE_EXPERTS_MAX) {
        snprintf(why, n, "%u of %u experts and %u shared; %u of %u is the most", s->top_k,
                 s->n_experts, s->n_shared, NBI_MOE_TOP_K_MAX, NBI_MOE_EXPERTS_MAX);
        return false;
    }
    return true;
}

void nbi_moe_cuda_release(nbi_backend *b, nbi_moe_layer **layer)
{
    if (!*layer) return;
    nbi_rt_free(&nbi_cuda_of(b)->rt, (*layer)->block);
    nbi_free(*layer);
    *layer = NULL;
}

/* Where the experts of both products go; sizes only while the block is not there. */
static size_t place(nbi_moe_layer *l)
{
    const nbi_moe_shape *s = &l->shape;
    char *base = static_cast<char *>(l->block);
    const bool f32 = s->kind_gate_up == NBI_WEIGHT_F32;
    l->gate_up.first =
        nbi_packed_at(base, s->kind_gate_up, f32 ? 2 * s->inter : s->inter, s->hidden, !f32);
    l->gate_up.stride = nbi_packed_bytes(&l->gate_up.first);
    if (base) base += nbi_moe_n_all(s) * l->gate_up.stride;
    l->down.first = nbi_packed_at(base, s->kind_down, s->hidden, s->inter, false);
    l->down.stride = nbi_packed_bytes(&l->down.first);
    const size_t packed = nbi_moe_n_all(s) * (l->gate_up.stride + l->down.stride);
    if (!s->w4a4) return packed;
    const float *scales = reinterpret_cast<const float *>(static_cast<char *>(l->block) + packed);
    if (s->kind_gate_up == NBI_WEIGHT_NVFP4) l->gate_up.input_scale = scales;
    if (s->kind_down == NBI_WEIGHT_NVFP4) l->down.input_scale = scales + s->n_experts;
    return packed + 2 * s->n_experts * sizeof(float);
}

/* Input scales of all experts: gate and up, then down. */
static void upload_scales(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_experts *e, float *to)
{
    const uint32_t n = l->shape.n_experts;
    for (uint32_t i = 0; i < n; i++) {
        to[i] = nbi_moe_gate_up_scale(&l->shape, &e->gate[i], &e->up[i]);
        to[n + i] = nbi_moe_down_scale(&l->shape, &e->down[i]);
    }
    char *block = static_cast<char *>(l->block);
    nbi_cuda_upload(c, block + n * (l->gate_up.stride + l->down.stride), to, 2 * n * sizeof(float));
}

static void pack_experts(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_experts *e,
                         nbi_cuda_pack_item *items)
{
    const uint32_t n_all = nbi_moe_n_all(&l->shape);
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_all; i++) {
        const nbi_cuda_packed to = nbi_moe_expert(l->gate_up, i);
        if (to.kind != NBI_WEIGHT_F32) {
            items[n++] = {&e->gate[i], &e->up[i], to};
            continue;
        }
        const size_t bytes = (size_t)l->shape.inter * l->shape.hidden * sizeof(float);
        char *data = static_cast<char *>(const_cast<void *>(to.data));
        nbi_cuda_upload(c, data, e->gate[i].data, bytes);
        nbi_cuda_upload(c, data + bytes, e->up[i].data, bytes);
    }
    for (uint32_t i = 0; i < n_all; i++)
        items[n++] = {&e->down[i], NULL, nbi_moe_expert(l->down, i)};
    nbi_cuda_pack(c, items, n);
}

nb_status nbi_moe_cuda_prepare(nbi_backend *b, nbi_moe_layer **out, const nbi_moe_experts *e,
                               nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_TRY(nbi_moe_experts_check(e, err));
    nbi_moe_layer *l = static_cast<nbi_moe_layer *>(nbi_calloc(1, sizeof *l));
    nbi_cuda_pack_item *items = static_cast<nbi_cuda_pack_item *>(
        nbi_calloc(2 * (size_t)nbi_moe_n_all(&e->shape), sizeof *items));
    nb_status st = NB_OK;
    float *scales =
        static_cast<float *>(nbi_calloc(2 * (size_t)e->shape.n_experts, sizeof *scales));
    size_t bytes = 0;
    if (l && items && scales) {
        l->shape = e->shape;
        l->layer = e->layer;
        bytes = place(l);
        l->block = nbi_rt_alloc(&c->rt, bytes);
    }
    if (!l || !items || !scales) {
        st = nbi_fail(err, NB_NO_MEMORY, "layer %u: out of memory", e->layer);
    } else if (!l->block) {
        st = nbi_fail(err, NB_NO_MEMORY,
                      "layer %u: no device memory for %u experts of %zu bytes, %zu in all",
                      e->layer, nbi_moe_n_all(&e->shape), bytes / nbi_moe_n_all(&e->shape), bytes);
    } else {
        place(l);
        pack_experts(c, l, e, items);
        if (l->shape.w4a4) upload_scales(c, l, e, scales);
        if (c->rt.error[0])
            st = nbi_fail(err, NB_INTERNAL, "layer %u: packing experts: %s", e->layer, c->rt.error);
    }
    nbi_free(items);
    nbi_free(scales);
    if (st == NB_OK)
        *out = l;
    else if (l)
        nbi_moe_cuda_release(b, &l);
    return st;
}
