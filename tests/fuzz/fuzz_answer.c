/* Fuzz target: an answer of a foreign server as the load client reads it, in pieces of random size;
 * the result must equal reading it at once. The first two bytes choose sizes, kind and status. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "perf/load_answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(cond)            \
    do {                      \
        if (!(cond)) abort(); \
    } while (0)

static nbi_load_answer read_answer(const uint8_t *s, size_t n, size_t step, uint8_t rules)
{
    nbi_load_answer a = {.sse = rules & 1, .http = rules & 2 ? 500 : 200};
    for (size_t i = 0; i < n; i += step)
        if (!nbi_load_answer_feed(&a, (const char *)s + i, step < n - i ? step : n - i, 7)) break;
    nbi_load_answer_end(&a, rules & 4 ? NBI_LOAD_CUT : NBI_LOAD_NONE, "cut", 8);
    return a;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    const uint8_t *s = data + 2;
    size_t n = size - 2;
    nbi_load_answer once = read_answer(s, n, n ? n : 1, data[1]);
    nbi_load_answer parts = read_answer(s, n, 1 + data[0] % 32, data[1]);
    MUST(once.failure == parts.failure && !strcmp(once.why, parts.why));
    MUST(once.n_chunks == parts.n_chunks && once.n_gaps == parts.n_gaps);
    MUST(once.output_tokens == parts.output_tokens && once.input_tokens == parts.input_tokens);
    MUST(once.finished == parts.finished && once.done == parts.done);
    nbi_load_answer_free(&once);
    nbi_load_answer_free(&parts);
    return 0;
}
