/* tokenizer.json -> tokenizer (see tokenizer.h for what is understood). Every member is checked
 * before use. */
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/json.h"
#include "text/tokenizer_impl.h"
#include "text/unicode.h"

#define FILE_MAX  ((size_t)256 << 20)
#define ADDED_MAX 65536

typedef struct parser {
    nbi_tokenizer *t;
    const char *name;
    nb_error *err;
    int16_t byte_of[512]; /* code point of the byte alphabet -> byte, -1 outside */
    nbi_buf left, right;
} parser;

static nb_status corrupt(parser *p, const char *what)
{
    return nbi_fail(p->err, NB_CORRUPT, "%s: %s", p->name, what);
}

static nb_status no_memory(parser *p)
{
    return nbi_fail(p->err, NB_NO_MEMORY, "%s: out of memory", p->name);
}

/* The printable stand-ins of GPT-2: Latin-1's printable bytes stand for themselves, the others
 * follow from U+0100. */
static void make_alphabet(parser *p)
{
    int next = 0x100;
    memset(p->byte_of, -1, sizeof p->byte_of);
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        p->byte_of[printable ? b : next++] = (int16_t)b;
    }
}

/* Appends the bytes that `text` stands for to *out: mapped, or as they are when a character is
 * outside the alphabet. */
static nb_status map_text(parser *p, nbi_buf *out, const char *text, size_t n, bool *mapped)
{
    size_t begin = out->len;
    for (size_t i = 0; i < n;) {
        uint32_t cp = UINT32_MAX;
        size_t len = nbi_utf8_read(&cp, (const uint8_t *)text + i, n - i);
        if (len == 0 || cp >= sizeof p->byte_of / sizeof *p->byte_of || p->byte_of[cp] < 0) {
            *mapped = false;
            out->len = begin;
            return nbi_buf_add(out, text, n);
        }
        char byte = (char)p->byte_of[cp];
        NB_TRY(nbi_buf_add(out, &byte, 1));
        i += len;
    }
    *mapped = true;
    return NB_OK;
}

static nb_status add_token(parser *p, const char *text, size_t n, json_int_t id)
{
    bool mapped;
    if (id < 0 || id >= NBI_ID_MAX)
        return nbi_fail(p->err, NB_CORRUPT, "%s: token \"%.64s\" has id %lld, expected 0 to %u",
                        p->name, text, (long long)id, NBI_ID_MAX - 1);
    nbi_buf_clear(&p->left);
    if (map_text(p, &p->left, text, n, &mapped) != NB_OK) return no_memory(p);
    nb_status st =
        nbi_bpe_add(p->t->bpe, (uint32_t)id, p->left.data ? p->left.data : "", p->left.len, mapped);
    if (st == NB_INVALID)
        return nbi_fail(p->err, NB_CORRUPT, "%s: id %lld is used twice", p->name, (long long)id);
    return st == NB_OK ? NB_OK : no_memory(p);
}

static nb_status parse_vocab(parser *p, json_t *model)
{
    json_t *vocab = json_object_get(model, "vocab"), *value;
    const char *key;
    size_t n;
    if (!json_is_object(vocab)) return corrupt(p, "model.vocab is not an object");
    json_object_keylen_foreach(vocab, key, n, value)
    {
        if (!json_is_integer(value))
            return corrupt(p, "model.vocab has a value that is not an integer");
        NB_TRY(add_token(p, key, n, json_integer_value(value)));
    }
    return NB_OK;
}

/* One side of a merge: its id, or -1 when it cannot occur in text. */
static nb_status merge_side(parser *p, nbi_buf *out, const char *text, size_t n, size_t index,
                            int32_t *id)
{
    bool mapped;
    nbi_buf_clear(out);
    *id = -1;
    if (map_text(p, out, text, n, &mapped) != NB_OK) return no_memory(p);
    if (!mapped) return NB_OK;
    *id = nbi_bpe_find(p->t->bpe, out->data ? out->data : "", out->len);
    if (*id >= 0) return NB_OK;
    return nbi_fail(p->err, NB_CORRUPT, "%s: merge %zu: \"%.*s\" is not in the vocabulary", p->name,
                    index, (int)(n > 64 ? 64 : n), text);
}

static nb_status parse_merge(parser *p, const json_t *merge, size_t index)
{
    const char *left, *right;
    size_t n_left, n_right;
    if (json_is_string(merge)) {
        left = json_string_value(merge);
        right = memchr(left, ' ', json_string_length(merge));
        if (!right)
            return nbi_fail(p->err, NB_CORRUPT, "%s: merge %zu has no space", p->name, index);
        n_left = (size_t)(right - left);
        right++;
        n_right = json_string_length(merge) - n_left - 1;
    } else {
        const json_t *a = json_array_get(merge, 0), *b = json_array_get(merge, 1);
        if (json_array_size(merge) != 2 || !json_is_string(a) || !json_is_string(b))
            return nbi_fail(p->err, NB_CORRUPT,
                            "%s: merge %zu is neither a string nor a pair of strings", p->name,
                            index);
        left = json_string_value(a);
        n_left = json_string_length(a);
        right = json_string_value(b);
        n_right = json_string_length(b);
    }
    int32_t l, r;
    NB_TRY(merge_side(p, &p->left, left, n_left, index, &l));
    NB_TRY(merge_side(p, &p->right, right, n_right, index, &r));
    if (l < 0 || r < 0) return NB_OK;
    if (nbi_buf_add(&p->left, p->right.data, p->right.len) != NB_OK) return no_memory(p);
    int32_t id = nbi_bpe_find(p->t->bpe, p->left.data, p->left.len);
    if (id < 0)
        return nbi_fail(p->err, NB_CORRUPT, "%s: the result of merge %zu is not in the vocabulary",
                        p->name, index);
    return nbi_bpe_add_merge(p->t->bpe, (uint32_t)l, (uint32_t)r, (uint32_t)id);
}

static nb_status refuse_member(parser *p, const json_t *model, const char *key)
{
    const json_t *v = json_object_get(model, key);
    bool off = !v || json_is_null(v) || json_is_false(v) ||
               (json_is_string(v) && json_string_length(v) == 0) ||
               (json_is_number(v) && json_number_value(v) == 0);
    return off ? NB_OK
               : nbi_fail(p->err, NB_UNSUPPORTED, "%s: model.%s is set, which is not supported",
                          p->name, key);
}

static nb_status parse_model(parser *p, json_t *model)
{
    if (!json_is_object(model)) return corrupt(p, "there is no \"model\" object");
    const char *type = json_string_value(json_object_get(model, "type"));
    if (type && strcmp(type, "BPE") != 0)
        return nbi_fail(p->err, NB_UNSUPPORTED,
                        "%s: model type \"%.64s\" is not supported, only BPE", p->name, type);
    const char *refused[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix",
                             "byte_fallback"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        NB_TRY(refuse_member(p, model, refused[i]));
    const json_t *merges = json_object_get(model, "merges");
    if (!json_is_array(merges)) return corrupt(p, "model.merges is not an array");
    NB_TRY(parse_vocab(p, model));
    nb_status st = nbi_bpe_index(p->t->bpe, json_array_size(merges));
    if (st != NB_OK) return no_memory(p);
    for (size_t i = 0; i < json_array_size(merges); i++)
        NB_TRY(parse_merge(p, json_array_get(merges, i), i));

    bool ignore_merges = false, fuse_unk = false;
    const char *unk = NULL;
    int32_t unk_id = -1;
    NB_TRY(nbi_json_bool(&ignore_merges, model, "ignore_merges", p->name, p->err));
    NB_TRY(nbi_json_bool(&fuse_unk, model, "fuse_unk", p->name, p->err));
    NB_TRY(nbi_json_str(&unk, model, "unk_token", p->name, p->err));
    if (unk) {
        const json_t *id = json_object_get(json_object_get(model, "vocab"), unk);
        if (!json_is_integer(id))
            return nbi_fail(p->err, NB_CORRUPT, "%s: unk_token \"%.64s\" is not in the vocabulary",
                            p->name, unk);
        unk_id = (int32_t)json_integer_value(id);
    }
    nbi_bpe_set(p->t->bpe, ignore_merges, unk_id, fuse_unk);
    return NB_OK;
}

static nb_status read_added(parser *p, nbi_added_token *a, const json_t *spec, const json_t *vocab)
{
    const json_t *content = json_object_get(spec, "content"), *id = json_object_get(spec, "id");
    if (!json_is_string(content) || !json_is_integer(id))
        return corrupt(p,
                       "an entry of added_tokens has no string \"content\" or no integer \"id\"");
    const char *text = json_string_value(content);
    a->n = json_string_length(content);
    a->normalized = true;
    NB_TRY(nbi_json_bool(&a->special, spec, "special", p->name, p->err));
    a->normalized = !a->special;
    NB_TRY(nbi_json_bool(&a->normalized, spec, "normalized", p->name, p->err));
    NB_TRY(nbi_json_bool(&a->lstrip, spec, "lstrip", p->name, p->err));
    NB_TRY(nbi_json_bool(&a->rstrip, spec, "rstrip", p->name, p->err));
    NB_TRY(nbi_json_bool(&a->single_word, spec, "single_word", p->name, p->err));
    if (!(a->text = nbi_arena_strndup(&p->t->texts, text, a->n))) return no_memory(p);
    const json_t *known = json_object_get(vocab, text);
    if (!known) {
        NB_TRY(add_token(p, text, a->n, json_integer_value(id)));
    } else if (json_integer_value(known) != json_integer_value(id)) {
        return nbi_fail(
            p->err, NB_CORRUPT, "%s: added token \"%.64s\" has id %lld but %lld in the vocabulary",
            p->name, text, (long long)json_integer_value(id), (long long)json_integer_value(known));
    }
    a->id = (int32_t)json_integer_value(id);
    return NB_OK;
}

/* The normalized text of a token that is looked for after normalizing. */
static nb_status index_added(parser *p, size_t i, nbi_matcher *matcher)
{
    const nbi_added_token *a = &p->t->added[i];
    nbi_buf_clear(&p->left);
    if (nbi_buf_add(&p->left, a->text, a->n) != NB_OK) return no_memory(p);
    if (a->normalized)
        NB_TRY(nbi_normalizer_run(p->t->normalizer, matcher, &p->left, &p->right, p->err));
    nbi_added_set *set = a->normalized ? &p->t->normal : &p->t->raw;
    return nbi_added_add(set, p->left.data, p->left.len, (int32_t)i) == NB_OK ? NB_OK
                                                                              : no_memory(p);
}

static nb_status parse_added(parser *p, const json_t *root)
{
    const json_t *list = json_object_get(root, "added_tokens");
    size_t n = json_array_size(list);
    if (list && !json_is_null(list) && !json_is_array(list))
        return corrupt(p, "added_tokens is not an array");
    if (n > ADDED_MAX) return corrupt(p, "more than 65536 added tokens");
    if (!(p->t->added = nbi_calloc(n + 1, sizeof *p->t->added))) return no_memory(p);
    const json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    for (size_t i = 0; i < n; i++) {
        p->t->n_added = i + 1;
        NB_TRY(read_added(p, &p->t->added[i], json_array_get(list, i), vocab));
    }
    uint32_t size = nbi_bpe_size(p->t->bpe);
    if (!(p->t->flags = nbi_calloc(size + 1, 1))) return no_memory(p);
    nbi_matcher *matcher = NULL;
    NB_TRY(nbi_matcher_create(&matcher, p->err));
    nb_status st = NB_OK;
    for (size_t i = 0; i < n && st == NB_OK; i++) {
        p->t->flags[p->t->added[i].id] |=
            NBI_TOKEN_ADDED | (p->t->added[i].special ? NBI_TOKEN_SPECIAL : 0);
        st = index_added(p, i, matcher);
    }
    nbi_matcher_free(&matcher);
    return st;
}

/* Post-processors only add tokens or move offsets, and decoders must be the inverse of the byte
 * alphabet. */
static nb_status check_types(parser *p, const json_t *spec, const char *key, const char *list_key,
                             const char *const *known)
{
    if (!spec || json_is_null(spec)) return NB_OK;
    const char *type = json_string_value(json_object_get(spec, "type"));
    if (!type) return nbi_fail(p->err, NB_CORRUPT, "%s: %s without a \"type\"", p->name, key);
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(spec, list_key);
        for (size_t i = 0; i < json_array_size(list); i++)
            NB_TRY(check_types(p, json_array_get(list, i), key, list_key, known));
        return NB_OK;
    }
    for (; *known; known++)
        if (strcmp(type, *known) == 0) return NB_OK;
    return nbi_fail(p->err, NB_UNSUPPORTED, "%s: %s \"%.64s\" is not supported", p->name, key,
                    type);
}

static nb_status parse_all(parser *p, json_t *root)
{
    static const char *const post[] = {"ByteLevel", "TemplateProcessing", "BertProcessing",
                                       "RobertaProcessing", NULL};
    static const char *const decoders[] = {"ByteLevel", "Fuse", NULL};
    if (!json_is_object(root)) return corrupt(p, "the file is not a JSON object");
    make_alphabet(p);
    NB_TRY(nbi_normalizer_parse(&p->t->normalizer, json_object_get(root, "normalizer"), p->name,
                                p->err));
    NB_TRY(
        nbi_pretok_parse(&p->t->pretok, json_object_get(root, "pre_tokenizer"), p->name, p->err));
    NB_TRY(check_types(p, json_object_get(root, "post_processor"), "post_processor", "processors",
                       post));
    NB_TRY(check_types(p, json_object_get(root, "decoder"), "decoder", "decoders", decoders));
    NB_TRY(parse_model(p, json_object_get(root, "model")));
    return parse_added(p, root);
}

nb_status nbi_tokenizer_parse(nbi_tokenizer **out, const char *json, size_t n, const char *name,
                              nb_error *err)
{
    json_t *root = NULL;
    NB_TRY(nbi_json_parse(&root, json, n, name, err));
    parser p = {.name = name, .err = err};
    nb_status st = NB_OK;
    nbi_encoder_stock *stock = nbi_calloc(1, sizeof *stock);
    if (stock && pthread_mutex_init(&stock->lock, NULL) == 0 && (p.t = nbi_calloc(1, sizeof *p.t)))
        p.t->stock = stock;
    else
        nbi_free(stock);
    if (!p.t || nbi_bpe_create(&p.t->bpe) != NB_OK) st = no_memory(&p);
    if (st == NB_OK) st = parse_all(&p, root);
    json_decref(root);
    nbi_buf_free(&p.left);
    nbi_buf_free(&p.right);
    if (st == NB_OK)
        *out = p.t;
    else if (p.t)
        nbi_tokenizer_destroy(
            p.t); /* nobody else has it, and the caller may hold the lock of close() */
    return st;
}

/* ---------------------------------------------------------------- files */

/* Tokenizers that are open, so that engine and server share one. Held while a file is read: who
 * asks for it meanwhile waits for it. */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static nbi_tokenizer *open_first;

static bool identify(nbi_tokenizer_file *out, const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0) return false;
    *out = (nbi_tokenizer_file){.device = (uint64_t)st.st_dev,
                                .inode = (uint64_t)st.st_ino,
                                .bytes = (uint64_t)st.st_size,
                                .seconds = (int64_t)st.st_mtim.tv_sec,
                                .nanoseconds = (int64_t)st.st_mtim.tv_nsec};
    return true;
}

/* Called with the lock held. */
static nb_status open_file(nbi_tokenizer **out, const char *path, nb_error *err)
{
    nbi_tokenizer_file file;
    char *text = NULL;
    size_t n = 0;
    if (!identify(&file, path)) return nbi_fail(err, NB_NOT_FOUND, "%s: no such file", path);
    for (nbi_tokenizer *t = open_first; t; t = t->next) {
        if (memcmp(&t->file, &file, sizeof file) != 0) continue;
        t->refs++;
        *out = t;
        return NB_OK;
    }
    NB_TRY(nbi_file_read(&text, &n, path, FILE_MAX, err));
    nbi_tokenizer *t = NULL;
    nb_status st = nbi_tokenizer_parse(&t, text, n, path, err);
    nbi_free(text);
    if (st != NB_OK) return st;
    t->file = file;
    t->refs = 1;
    t->next = open_first;
    open_first = *out = t;
    return NB_OK;
}

nb_status nbi_tokenizer_open(nbi_tokenizer **out, const char *dir, nb_error *err)
{
    char *path = nbi_path_join(dir, "tokenizer.json");
    if (!path) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    pthread_mutex_lock(&open_lock);
    nb_status st = open_file(out, path, err);
    pthread_mutex_unlock(&open_lock);
    nbi_free(path);
    return st;
}

/* Takes one reference; true when it was the last. */
static bool is_last(nbi_tokenizer *t)
{
    pthread_mutex_lock(&open_lock);
    bool last = !t->refs || --t->refs == 0;
    for (nbi_tokenizer **at = &open_first; last && *at; at = &(*at)->next) {
        if (*at != t) continue;
        *at = t->next;
        break;
    }
    pthread_mutex_unlock(&open_lock);
    return last;
}

void nbi_tokenizer_close(nbi_tokenizer **tokenizer)
{
    nbi_tokenizer *t = *tokenizer;
    *tokenizer = NULL;
    if (t && is_last(t)) nbi_tokenizer_destroy(t);
}
