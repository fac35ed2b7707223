/* Rows of option tables that name attention backends, alike in every command that runs a model. */
#pragma once

#include "backend/attention_path.h"
#include "cli/cli.h"

/* `form` is a const char *, `block` a uint32_t. */
#define NBI_MLA_OPTION_ROWS(form, block)                                                         \
    {"mla-prefill",                                                                              \
     NBI_OPT_STRING,                                                                             \
     &(form),                                                                                    \
     "FORM",                                                                                     \
     "latent attention of prompts: absorbed, or expanded: faster\nfor long prompts, but "        \
     "answers are computed again when they\ncome back as part of a prompt; auto (default): "     \
     "expanded where\nthe prefix cache is off",                                                  \
     false},                                                                                     \
    {                                                                                            \
        "mla-prefill-block", NBI_OPT_U32, &(block), "N",                                         \
            "expanded as far as whole blocks of N tokens of the\nprompt go (default 512)", false \
    }

/* The fields are const char *. */
#define NBI_ATTENTION_OPTION_ROWS(both, prefill, decode, dsa_prefill, dsa_decode)                 \
    {"attention-backend",                                                                         \
     NBI_OPT_STRING,                                                                              \
     &(both),                                                                                     \
     "NAME",                                                                                      \
     "auto (default), or a name of SGLang's (flashinfer, fa3, flashmla,\ntrtllm_mla, dsa, ...): " \
     "refused with the reason where it\ncannot be meant on this device and model",                \
     false},                                                                                      \
        {"prefill-attention-backend",  NBI_OPT_STRING, &(prefill), "NAME",                        \
         "the same for prompts alone", false},                                                    \
        {"decode-attention-backend",   NBI_OPT_STRING, &(decode), "NAME",                         \
         "the same for answers alone", false},                                                    \
        {"dsa-prefill-backend",                                                                   \
         NBI_OPT_STRING,                                                                          \
         &(dsa_prefill),                                                                          \
         "NAME",                                                                                  \
         "the same for sparse attention: flashmla_sparse, fa3, tilelang, ...",                    \
         false},                                                                                  \
        {"dsa-decode-backend", NBI_OPT_STRING, &(dsa_decode), "NAME", "the same", false},         \
        {"nsa-prefill-backend", NBI_OPT_STRING, &(dsa_prefill), "NAME", "older name", false},     \
    {                                                                                             \
        "nsa-decode-backend", NBI_OPT_STRING, &(dsa_decode), "NAME", "older name", false          \
    }
