/* The chat part of a request: messages, tools and template arguments, checked and brought into the
 * form that nbi_chat_encode() takes. Pure: JSON in, JSON out. */
#pragma once

#include "server/fields.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_MESSAGES_MAX      16384
#define NBI_CHAT_TEMPLATE_MAX (256 << 10) /* bytes of a template in a request */

/* Reads messages, tools, tool_choice, chat_template_kwargs, reasoning_effort, enable_thinking,
 * thinking ({"type": "enabled" | "disabled"}), documents, chat_template, add_generation_prompt and
 * continue_final_message; refuses what would change the prompt and is not supported. The messages
 * of `body` are normalised in place (nbi_chat_normalise()). *out is a new object, released by
 * json_decref(). */
nb_status nbi_chat_request_read(json_t **out, const json_t *body, nbi_api_error *e);

#ifdef __cplusplus
}
#endif
