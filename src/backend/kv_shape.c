/* Layout and elements of the cache on the host's side. */
#include "backend/kv_shape.h"

#include <string.h>

#include "base/numfmt.h"

static uint32_t groups(uint32_t n)
{
    return (n + NBI_KV_GROUP - 1) / NBI_KV_GROUP;
}

static uint32_t round_up(uint32_t n, uint32_t to)
{
    return (n + to - 1) / to * to;
}

nbi_kv_shape nbi_kv_latent_shape(nbi_dtype dtype, uint32_t kv_lora, uint32_t rope)
{
    const uint32_t width = kv_lora + rope;
    nbi_kv_shape s = {.dtype = dtype, .width = width};
    if (dtype == NBI_F8_E4M3) {
        s.coded = kv_lora;
        s.scales = round_up(kv_lora, sizeof(float));
        s.tail = s.scales + groups(kv_lora) * (uint32_t)sizeof(float);
        s.slot = s.scale_slot = round_up(s.tail + rope * (uint32_t)sizeof(uint16_t), 16);
    } else {
        s.slot = width * nbi_dtype_bits(dtype) / 8;
    }
    s.head = s.page = NBI_PAGE_TOKENS * s.slot;
    return s;
}

nbi_kv_shape nbi_kv_head_shape(nbi_dtype dtype, uint32_t n_heads, uint32_t dim)
{
    nbi_kv_shape s = {.dtype = dtype, .width = dim, .slot = dim * nbi_dtype_bits(dtype) / 8};
    if (dtype == NBI_F8_E4M3) {
        s.coded = dim;
        s.scales = NBI_PAGE_TOKENS * dim;
        s.scale_slot = groups(dim) * (uint32_t)sizeof(float);
    }
    s.head = NBI_PAGE_TOKENS * (s.slot + s.scale_slot);
    s.page = n_heads * s.head;
    return s;
}

/* The scale of a group, and what its values are multiplied by. */
static float scale_of(const float *x, uint32_t n, float *inverse)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t u = nbi_f32_bits(x[i]) & 0x7fffffffu;
        most = u > most ? u : most;
    }
    *inverse = 0;
    if (most >= 0x7f800000u) return nbi_bits_f32(0x7fc00000u);
    /* 448 = 1.75 * 2^8 */
    int e = (int)(most >> 23) - 127 - 8 + ((most & 0x7fffffu) > 0x600000u);
    e = e < NBI_KV_EXP_MIN ? NBI_KV_EXP_MIN : e > NBI_KV_EXP_MAX ? NBI_KV_EXP_MAX : e;
    *inverse = nbi_bits_f32((uint32_t)(127 - e) << 23);
    return nbi_bits_f32((uint32_t)(127 + e) << 23);
}

static void write_codes(const nbi_kv_shape *s, uint8_t *codes, float *scales, const float *x,
                        uint32_t n)
{
    for (uint32_t i = 0; i < n; i += NBI_KV_GROUP) {
        const uint32_t m = n - i < NBI_KV_GROUP ? n - i : NBI_KV_GROUP;
        float inverse;
        const float scale = scale_of(x + i, m, &inverse);
        for (uint32_t j = 0; j < m; j++)
            codes[i + j] = scale == scale ? nbi_f32_e4m3(x[i + j] * inverse) : 0;
        scales[i / NBI_KV_GROUP] = scale;
    }
    (void)s;
}

static void write_bf16(uint16_t *to, const float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) to[i] = nbi_f32_bf16(x[i]);
}

void nbi_kv_write(const nbi_kv_shape *s, void *part, size_t page, uint32_t head, uint32_t slot,
                  uint32_t first, const float *x, uint32_t n)
{
    char *to = (char *)part + nbi_kv_at(s, page, head, slot);
    if (s->dtype == NBI_F32) {
        memcpy(to + first * sizeof *x, x, n * sizeof *x);
        return;
    }
    if (s->dtype == NBI_BF16) {
        write_bf16((uint16_t *)(void *)to + first, x, n);
        return;
    }
    const uint32_t coded = first >= s->coded ? 0 : n < s->coded - first ? n : s->coded - first;
    NB_ASSERT(!coded || first % NBI_KV_GROUP == 0);
    if (coded) {
        char *scales = (char *)part + nbi_kv_scales_at(s, page, head, slot);
        write_codes(s, (uint8_t *)to + first, (float *)(void *)scales + first / NBI_KV_GROUP, x,
                    coded);
    }
    if (coded < n)
        write_bf16((uint16_t *)(void *)(to + s->tail) + (first + coded - s->coded), x + coded,
                   n - coded);
}

void nbi_kv_read(const nbi_kv_shape *s, const void *part, size_t page, uint32_t head, uint32_t slot,
                 float *out)
{
    const char *from = (const char *)part + nbi_kv_at(s, page, head, slot);
    uint32_t i = 0;
    if (s->dtype == NBI_F32) {
        memcpy(out, from, s->width * sizeof *out);
        return;
    }
    if (s->dtype == NBI_F8_E4M3) {
        const char *at = (const char *)part + nbi_kv_scales_at(s, page, head, slot);
        const float *scales = (const float *)(const void *)at;
        for (; i < s->coded; i++)
            out[i] = nbi_e4m3_f32((uint8_t)from[i]) * scales[i / NBI_KV_GROUP];
        from += s->tail;
    }
    const uint16_t *h = (const uint16_t *)(const void *)from;
    for (uint32_t j = 0; i < s->width; i++, j++) out[i] = nbi_bf16_f32(h[j]);
}
