/* The best logits of a part; candidates.h explains what for. */
#include "model/candidates.h"

#include <math.h>
#include <string.h>

#include "backend/backend.h"

#define BLOCK 1024u
/* Keys rise with their floats. */
#define KEY_LEAST    0x00800000u /* of the smallest finite one; below are -inf and NaN */
#define KEY_INFINITY 0xff800000u
#define NONE         (KEY_INFINITY - KEY_LEAST)

static uint32_t key_of(float x)
{
    uint32_t bits;
    x += 0.0f; /* -0 and 0 are the same */
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((uint32_t) - (int32_t)(bits >> 31) | 0x80000000u);
}

/* The key of the largest, and KEY_LEAST less than that of the least finite one, at least NONE
 * without one. Integers, which compilers reduce many at a time. False: NaN or +inf. */
static bool look_at(const float *x, uint32_t n, uint32_t *most, uint32_t *least)
{
    uint32_t high = 0, low = UINT32_MAX, bad = 0;
    for (uint32_t i = 0; i < n; i++) bad |= !(x[i] < INFINITY);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t key = key_of(x[i]), up = key - KEY_LEAST;
        high = key > high ? key : high;
        low = up < low ? up : low;
    }
    *most = high;
    *least = low;
    return !bad;
}

static void insert(nbi_candidate *list, uint32_t *have, uint32_t count, nbi_candidate c)
{
    if (*have == count && !(c.logit > list[count - 1].logit)) return;
    uint32_t at = *have < count ? (*have)++ : count - 1;
    for (; at > 0 && c.logit > list[at - 1].logit; at--) list[at] = list[at - 1];
    list[at] = c;
}

static nbi_candidate least_of(const float *x, uint32_t begin, uint32_t end, uint32_t least,
                              int32_t first)
{
    for (uint32_t i = begin; i < end; i++)
        if (key_of(x[i]) - KEY_LEAST == least)
            return (nbi_candidate){.id = first + (int32_t)i, .logit = x[i]};
    return (nbi_candidate){.id = -1};
}

void nbi_candidates_find(nbi_candidate *out, uint32_t count, const float *x, uint32_t n,
                         uint32_t n_valid, int32_t first)
{
    uint32_t have = 0, least = NONE, least_at = 0, most, low;
    bool well = true;
    NB_ASSERT(count && n_valid <= n);
    for (uint32_t i = 0; i <= count; i++) out[i] = (nbi_candidate){.id = -1};
    for (uint32_t at = 0; at < n_valid && well; at += BLOCK) {
        const uint32_t end = n_valid - at < BLOCK ? n_valid : at + BLOCK;
        well = look_at(x + at, end - at, &most, &low);
        if (low < least) {
            least = low;
            least_at = at;
        }
        if (have == count && most <= key_of(out[count - 1].logit)) continue;
        for (uint32_t i = at; i < end; i++)
            insert(out, &have, count, (nbi_candidate){.id = first + (int32_t)i, .logit = x[i]});
    }
    if (!well || !look_at(x + n_valid, n - n_valid, &most, &low)) {
        out[0] = (nbi_candidate){.id = first, .logit = NAN};
    } else if (least != NONE) {
        const uint32_t end = n_valid - least_at < BLOCK ? n_valid : least_at + BLOCK;
        out[count] = least_of(x, least_at, end, least, first);
    }
}

void nbi_candidates_put(float *row, uint32_t vocab, const nbi_candidate *in, uint32_t n, bool clear)
{
    for (uint32_t i = 0; clear && i < vocab; i++) row[i] = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        if (in[i].id < 0) continue;
        NB_ASSERT((uint32_t)in[i].id < vocab);
        row[in[i].id] = in[i].logit;
    }
}
