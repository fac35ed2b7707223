/* KV cache memory: one block, carved per layer. Page = 64 tokens over all layers. */
#include "model/layer.h"

static size_t dtype_bytes(nbi_dtype dtype)
{
    return nbi_dtype_bits(dtype) / 8;
}

/* Values of one token in one layer: cache proper, and indexer key where the layer owns an indexer.
 */
static size_t layer_values(const nbi_config *c, uint32_t layer, size_t *index)
{
    *index = c->has_indexer && c->layer_full_indexer[layer] ? c->index_dim : 0;
    if (c->attention == NBI_ATTENTION_MLA) return (size_t)c->kv_lora + c->rope_dim;
    return 2 * (size_t)c->n_kv_heads * c->head_dim;
}

static uint32_t layer_count(const nbi_config *c)
{
    return c->n_layers + c->n_mtp_layers;
}

size_t nbi_kv_page_bytes(const nbi_config *c, nbi_dtype dtype)
{
    size_t values = 0;
    for (uint32_t l = 0; l < layer_count(c); l++) {
        size_t index;
        values += layer_values(c, l, &index);
        values += index;
    }
    return values * NBI_PAGE_TOKENS * dtype_bytes(dtype);
}

/* Sizes with base NULL, lays out otherwise: the same walk for both. */
static size_t carve(nbi_kv *kv, const nbi_config *c, char *base)
{
    nbi_plan plan = {0};
    size_t unit = dtype_bytes(kv->dtype) * NBI_PAGE_TOKENS * kv->n_pages;
    for (uint32_t l = 0; l < layer_count(c); l++) {
        size_t index, values = layer_values(c, l, &index);
        size_t at = nbi_plan_add(&plan, values * unit);
        size_t at_index = index ? nbi_plan_add(&plan, index * unit) : 0;
        if (!base) continue;
        nbi_kv_layer *layer = &kv->layers[l];
        layer->dtype = kv->dtype;
        if (c->attention == NBI_ATTENTION_MLA) {
            layer->latent = base + at;
        } else {
            layer->k = base + at;
            layer->v = base + at + values / 2 * unit;
        }
        if (index) layer->index_k = base + at_index;
    }
    return plan.bytes;
}

nb_status nbi_kv_create(nbi_kv *out, nbi_backend *b, const nbi_config *c, nbi_dtype dtype,
                        uint32_t n_pages, nb_error *err)
{
    nbi_kv kv = {.dtype = dtype, .n_pages = n_pages, .n_layers = layer_count(c)};
    kv.layers = nbi_calloc(kv.n_layers, sizeof *kv.layers);
    if (!kv.layers)
        return nbi_fail(err, NB_NO_MEMORY, "KV cache: no memory for %u layer entries", kv.n_layers);
    kv.bytes = carve(&kv, c, NULL);
    kv.memory = b->ops->alloc(b, kv.bytes);
    if (!kv.memory) {
        nbi_free(kv.layers);
        return nbi_fail(err, NB_NO_MEMORY,
                        "KV cache: cannot reserve %zu bytes for %u pages of %u tokens", kv.bytes,
                        n_pages, NBI_PAGE_TOKENS);
    }
    carve(&kv, c, kv.memory);
    *out = kv;
    return NB_OK;
}

void nbi_kv_destroy(nbi_kv *kv, nbi_backend *b)
{
    if (kv->memory) b->ops->release(b, kv->memory, kv->bytes);
    nbi_free(kv->layers);
    *kv = (nbi_kv){0};
}

static void copy_page(nbi_backend *b, void *buffer, size_t page_bytes, int32_t from, int32_t to)
{
    char *base = buffer;
    if (!base || !page_bytes) return;
    b->ops->copy(b, base + (size_t)to * page_bytes, base + (size_t)from * page_bytes, page_bytes);
}

void nbi_kv_copy_page(nbi_kv *kv, nbi_backend *b, const nbi_config *c, int32_t from, int32_t to)
{
    const size_t unit = dtype_bytes(kv->dtype) * NBI_PAGE_TOKENS;
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        const nbi_kv_layer *layer = &kv->layers[l];
        size_t index, values = layer_values(c, l, &index);
        copy_page(b, layer->latent, values * unit, from, to);
        copy_page(b, layer->k, values / 2 * unit, from, to);
        copy_page(b, layer->v, values / 2 * unit, from, to);
        copy_page(b, layer->index_k, index * unit, from, to);
    }
}
