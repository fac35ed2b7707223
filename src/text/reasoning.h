/* Splits model output into reasoning and content. Callers: server, chat.
 *
 * Rules (kind glm45; the others differ only in that a tool call does not end reasoning):
 *  - Whether output begins inside reasoning is read off the rendered prompt: it does iff the prompt
 * ends with an open <think> (white space behind it does not matter). No request flag is looked at.
 *  - Inside: a <think> at the very start, after white space, is dropped with that space. Everything
 * is reasoning up to the first
 *    </think> (dropped) or <tool_call> (kept, it starts the content).
 *  - Outside: if the output starts with <think>, after white space, that is dropped and we are
 * inside; else all is content.
 *  - Behind the end of reasoning everything is content, whatever tags it holds. No white space is
 * trimmed.
 *  - An answer is never swallowed: when the model stops by itself (finish reason "stop") inside
 * reasoning, having never closed it, the reasoning is the answer too: its text is given once more,
 * whole, as content, and `unclosed` is set. Cut off by the length limit it stays reasoning and
 * content is empty. Plain and streamed agree: joined spans of each kind equal the two strings of
 * nbi_reasoning_split(). */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_reasoning_kind {
    NBI_REASONING_NONE, /* all is content */
    NBI_REASONING_GLM45,
    NBI_REASONING_THINK, /* DeepSeek-R1, Qwen3 */
    NBI_REASONING_COUNT
} nbi_reasoning_kind;

/* From the names users type: none; glm45, glm, glm4, glm47, glm4_moe, glm4-moe, glm5; deepseek-r1,
 * deepseek_r1, deepseek-v3, deepseek_v3, qwen3. NB_INVALID lists them. */
nb_status nbi_reasoning_by_name(nbi_reasoning_kind *out, const char *name, nb_error *err);

/* Does output after this prompt begin inside reasoning? */
bool nbi_reasoning_prompt_open(nbi_reasoning_kind kind, const char *prompt, size_t n);

typedef enum nbi_span_kind { NBI_SPAN_REASONING, NBI_SPAN_CONTENT } nbi_span_kind;

/* A piece of output. `text` points into the pushed text or to static memory: valid until the next
 * call. */
typedef struct nbi_span {
    nbi_span_kind kind;
    const char *text;
    size_t n; /* >= 1 */
} nbi_span;

#define NBI_REASONING_SPANS_MAX 6
#define NBI_REASONING_SPACE_MAX 16

/* Fixed-size state. Text held back is leading white space and the beginning of one tag. */
typedef struct nbi_reasoning {
    nbi_reasoning_kind kind;
    uint8_t phase;
    uint8_t n_space, n_tag;
    bool closed; /* content has begun */
    char space[NBI_REASONING_SPACE_MAX];
    char tag[16];
} nbi_reasoning;

void nbi_reasoning_init(nbi_reasoning *r, nbi_reasoning_kind kind, bool inside);

/* Adds text; returns how many spans were written to spans[NBI_REASONING_SPANS_MAX]. Neighbours may
 * be of the same kind. */
size_t nbi_reasoning_push(nbi_reasoning *r, const char *text, size_t n, nbi_span *spans);

/* End of output: releases what was held. `stopped`: finish reason "stop" (not length, not an
 * error). *unclosed says that the joined reasoning text must now be sent once more as content; a
 * streaming caller keeps it for that while nbi_reasoning_inside(). */
size_t nbi_reasoning_finish(nbi_reasoning *r, bool stopped, nbi_span *spans, bool *unclosed);

/* Is the state one in which coming text may be reasoning? */
bool nbi_reasoning_inside(const nbi_reasoning *r);

/* Whole text at once: both point into `text` (n_* 0 when there is none). */
typedef struct nbi_reasoning_parts {
    const char *reasoning, *content;
    size_t n_reasoning, n_content;
    bool unclosed; /* content repeats the reasoning */
} nbi_reasoning_parts;
void nbi_reasoning_split(nbi_reasoning_kind kind, bool inside, bool stopped, const char *text,
                         size_t n, nbi_reasoning_parts *out);

#ifdef __cplusplus
}
#endif
