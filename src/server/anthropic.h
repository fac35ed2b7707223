/* What a request of Anthropic's Messages API asks of the chat template. Called by anthropic.c. */
#pragma once

#include "server/fields.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks system, messages, tools, tool_choice, thinking and output_config, and says the same as a
 * chat body that nbi_chat_request_read() takes; errors name the fields of `body`. *out is a new
 * object, released by json_decref().
 *  - Text blocks of a system prompt, a user's message or a tool result are joined by newlines,
 *    those of an assistant's message by nothing.
 *  - A tool_result becomes a tool message, in its place between the texts of the user.
 *  - thinking blocks become reasoning; signatures are not looked at, redacted_thinking and
 *    cache_control have no effect. Without `thinking` the template decides whether the model
 *    thinks; anthropic.c enforces a budget. */
nb_status nbi_anthropic_chat(json_t **out, const json_t *body, nbi_api_error *e);

#ifdef __cplusplus
}
#endif
