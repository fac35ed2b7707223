/* KV cache memory: one block, carved per layer. Page = 64 tokens over all layers. */
#include "backend/kv_shape.h"
#include "model/layer.h"

/* Parts of one layer's cache; bytes of a page, 0: the layer has none. */
typedef struct layer_parts {
    size_t latent, heads, index; /* heads: keys; as many values */
} layer_parts;

static layer_parts parts_of(const nbi_config *c, uint32_t layer, nbi_dtype dtype)
{
    layer_parts p = {0};
    if (c->attention == NBI_ATTENTION_MLA)
        p.latent = nbi_kv_latent_shape(dtype, c->kv_lora, c->rope_dim).page;
    else
        p.heads = nbi_kv_head_shape(dtype, c->n_kv_heads, c->head_dim).page;
    if (c->has_indexer && c->layer_full_indexer[layer])
        p.index = nbi_kv_head_shape(dtype, 1, c->index_dim).page;
    return p;
}

static uint32_t layer_count(const nbi_config *c)
{
    return c->n_layers + c->n_mtp_layers;
}

size_t nbi_kv_page_bytes(const nbi_config *c, nbi_dtype dtype)
{
    size_t bytes = 0;
    for (uint32_t l = 0; l < layer_count(c); l++) {
        const layer_parts p = parts_of(c, l, dtype);
        bytes += p.latent + 2 * p.heads + p.index;
    }
    return bytes;
}

/* Sizes with base NULL, lays out otherwise: the same walk for both. */
static size_t carve(nbi_kv *kv, const nbi_config *c, char *base)
{
    nbi_plan plan = {0};
    for (uint32_t l = 0; l < layer_count(c); l++) {
        const layer_parts p = parts_of(c, l, kv->dtype);
        const size_t at = nbi_plan_add(&plan, (p.latent + 2 * p.heads) * kv->n_pages);
        const size_t at_index = p.index ? nbi_plan_add(&plan, p.index * kv->n_pages) : 0;
        if (!base) continue;
        nbi_kv_layer *layer = &kv->layers[l];
        layer->dtype = kv->dtype;
        if (p.latent) {
            layer->latent = base + at;
        } else {
            layer->k = base + at;
            layer->v = base + at + p.heads * kv->n_pages;
        }
        if (p.index) layer->index_k = base + at_index;
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
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        const nbi_kv_layer *layer = &kv->layers[l];
        const layer_parts p = parts_of(c, l, kv->dtype);
        copy_page(b, layer->latent, p.latent, from, to);
        copy_page(b, layer->k, p.heads, from, to);
        copy_page(b, layer->v, p.heads, from, to);
        copy_page(b, layer->index_k, p.index, from, to);
    }
}
