/* Fuzz target: tokenizer.json, then text through it. The input is a file, a line feed and 0xFF, and
 * text; without that mark it is all file and some fixed texts are used. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const nbi_tokenizer *t, const char *text, size_t n, bool special)
{
    nbi_ids ids = {0};
    char *back = NULL;
    size_t n_back;
    nb_error err;
    if (nbi_tokenizer_encode(t, text, n, special, &ids, &err) == NB_OK &&
        nbi_tokenizer_decode(t, ids.data, ids.len, false, &back, &n_back, &err) != NB_OK)
        abort(); /* every id that encoding gives can be decoded */
    nbi_free(back);
    nbi_ids_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char fixed[] = "Hello, w\xC3\xB6rld 123\r\n\r\n  don't \xF0\x9F\x99\x82 <|user|> "
                                "\xFF\xE9\xBE aaaaaaaaaaaaaaaaaaaaaaaa"
                                "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\xCC\x81\xCC\xA3";
    const char *text = fixed;
    size_t n_file = size, n_text = sizeof fixed - 1;
    for (size_t i = 0; i + 1 < size; i++) {
        if (data[i] != '\n' || data[i + 1] != 0xFF) continue;
        n_file = i;
        text = (const char *)data + i + 2;
        n_text = size - i - 2;
        break;
    }
    nbi_tokenizer *t = NULL;
    nb_error err;
    if (nbi_tokenizer_parse(&t, (const char *)data, n_file, "fuzz", &err) != NB_OK) return 0;
    check(t, text, n_text, true);
    check(t, text, n_text, false);
    nbi_range plain = {n_text / 3, n_text / 2};
    nbi_ids ids = {0};
    (void)nbi_tokenizer_encode_guarded(t, text, n_text, &plain, n_text > 6, &ids, &err);
    nbi_ids_free(&ids);
    nbi_tokenizer_close(&t);
    return 0;
}
