/* The text calls of nibble.h: a thin cover over the tokenizer. */
#include "engine/engine.h"

static nb_status need_tokenizer(const nb_engine *e, nb_error *err)
{
    if (e->tokenizer) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED, "%s has no tokenizer.json: only token ids can be used",
                    e->options.model_dir);
}

nb_status nb_tokenize(const nb_engine *e, const char *text, size_t n_bytes, bool parse_special,
                      size_t max_ids, int32_t **ids, size_t *n_ids, nb_error *err)
{
    NB_TRY(need_tokenizer(e, err));
    nbi_ids out = {.max = max_ids};
    nb_status st = nbi_tokenizer_encode(e->tokenizer, text, n_bytes, parse_special, &out, err);
    if (st != NB_OK) {
        nbi_ids_free(&out);
        return st;
    }
    *ids = out.data;
    *n_ids = out.len;
    return NB_OK;
}

nb_status nb_detokenize(const nb_engine *e, const int32_t *ids, size_t n_ids, bool skip_special,
                        char **text, size_t *n_bytes, nb_error *err)
{
    NB_TRY(need_tokenizer(e, err));
    return nbi_tokenizer_decode(e->tokenizer, ids, n_ids, skip_special, text, n_bytes, err);
}

const char *nb_token_bytes(const nb_engine *e, int32_t id, size_t *n_bytes)
{
    return e->tokenizer ? nbi_token_bytes(e->tokenizer, id, n_bytes) : NULL;
}
