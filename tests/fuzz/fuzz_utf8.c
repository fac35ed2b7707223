/* Fuzz target: bytes through the incremental decoder, a stop matcher and the reasoning parser in
 * pieces of random size; the result must equal doing it at once. The first three bytes choose sizes
 * and rules. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "text/decode.h"
#include "text/reasoning.h"
#include "text/unicode.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(cond)            \
    do {                      \
        if (!(cond)) abort(); \
    } while (0)

static size_t decode(const uint8_t *s, size_t n, size_t step, char *out)
{
    nbi_decoder d = {0};
    size_t len = 0;
    for (size_t i = 0; i < n; i += step) {
        size_t k = step < n - i ? step : n - i;
        size_t wrote = nbi_decoder_push(&d, (const char *)s + i, k, out + len);
        MUST(wrote <= NBI_DECODER_ROOM(k));
        MUST(nbi_utf8_valid_prefix((const uint8_t *)out + len, wrote) == wrote);
        len += wrote;
    }
    return len + nbi_decoder_flush(&d, out + len);
}

static void check_stop(const char *text, size_t n, size_t step)
{
    static const char *const strings[] = {"aab", "</s>", "\xC3\xA9", "aaab"};
    nbi_stop *once = NULL, *parts = NULL;
    char *a = malloc(n + 64), *b = malloc(n + 64);
    int matched_a, matched_b = -1;
    MUST(a && b);
    MUST(nbi_stop_create(&once, strings, 4, NULL) == NB_OK &&
         nbi_stop_create(&parts, strings, 4, NULL) == NB_OK);
    size_t n_a = nbi_stop_push(once, text, n, false, a, &matched_a), n_b = 0;
    n_a += nbi_stop_flush(once, a + n_a);
    for (size_t i = 0; i < n && matched_b < 0; i += step)
        n_b +=
            nbi_stop_push(parts, text + i, step < n - i ? step : n - i, false, b + n_b, &matched_b);
    n_b += nbi_stop_flush(parts, b + n_b);
    MUST(n_a == n_b && matched_a == matched_b && memcmp(a, b, n_a) == 0);
    nbi_stop_destroy(&once);
    nbi_stop_destroy(&parts);
    free(a);
    free(b);
}

static void check_reasoning(const char *text, size_t n, size_t step, uint8_t rules)
{
    nbi_reasoning r;
    nbi_reasoning_parts whole;
    nbi_span spans[NBI_REASONING_SPANS_MAX];
    bool inside = rules & 1, stopped = rules & 2, unclosed;
    nbi_reasoning_kind kind = (nbi_reasoning_kind)((rules >> 2) % NBI_REASONING_COUNT);
    nbi_reasoning_split(kind, inside, stopped, text, n, &whole);
    nbi_reasoning_init(&r, kind, inside);
    size_t n_reasoning = 0, n_content = 0;
    for (size_t i = 0; i <= n; i += step) {
        size_t k =
            i == n ? 0 : nbi_reasoning_push(&r, text + i, step < n - i ? step : n - i, spans);
        for (size_t j = 0; j < k; j++) {
            bool is_content = spans[j].kind == NBI_SPAN_CONTENT;
            const char *want =
                is_content ? whole.content + n_content : whole.reasoning + n_reasoning;
            size_t *total = is_content ? &n_content : &n_reasoning;
            MUST(*total + spans[j].n <= (is_content ? whole.n_content : whole.n_reasoning));
            MUST(memcmp(want, spans[j].text, spans[j].n) == 0);
            *total += spans[j].n;
        }
    }
    size_t k = nbi_reasoning_finish(&r, stopped, spans, &unclosed);
    for (size_t j = 0; j < k; j++)
        *(spans[j].kind == NBI_SPAN_CONTENT ? &n_content : &n_reasoning) += spans[j].n;
    if (unclosed) n_content += n_reasoning;
    MUST(n_reasoning == whole.n_reasoning && n_content == whole.n_content);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3) return 0;
    size_t step = 1 + data[0] % 16;
    const uint8_t *s = data + 3;
    size_t n = size - 3;
    char *once = malloc(NBI_DECODER_ROOM(n)), *parts = malloc(NBI_DECODER_ROOM(n) + 16);
    MUST(once && parts);
    size_t n_once = decode(s, n, n ? n : 1, once), n_parts = decode(s, n, step, parts);
    MUST(n_once == n_parts && memcmp(once, parts, n_once) == 0);
    check_stop(once, n_once, 1 + data[1] % 8);
    check_reasoning(once, n_once, 1 + data[1] % 24, data[2]);
    free(once);
    free(parts);
    return 0;
}
