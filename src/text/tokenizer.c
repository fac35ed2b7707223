/* Encoding and decoding with a parsed tokenizer (see tokenizer.h).
 *
 * Text passes: added tokens of the raw text -> valid and invalid UTF-8 -> normalizer -> added
 * tokens of the normal text -> pre-tokenizer -> BPE. Working memory comes from a small stock that
 * encodes of all threads take from and give back to. */
#include "text/tokenizer.h"

#include <string.h>

#include "text/tokenizer_impl.h"
#include "text/unicode.h"

#define IDLE_MAX         16                /* encoders kept for later */
#define KEEP_BYTES       ((size_t)4 << 20) /* larger buffers are not kept */

#define LONG_PIECE_BYTES ((size_t)1 << 16) /* merging one takes milliseconds */

nb_status nbi_ids_grow(nbi_ids *ids)
{
    size_t cap = ids->cap ? ids->cap * 2 : 64;
    int32_t *data = nbi_realloc(ids->data, cap * sizeof *data);
    if (!data) return NB_NO_MEMORY;
    ids->data = data;
    ids->cap = cap;
    return NB_OK;
}

void nbi_ids_free(nbi_ids *ids)
{
    nbi_free(ids->data);
    memset(ids, 0, sizeof *ids);
}

/* ---------------------------------------------------------------- encoders */

static void encoder_destroy(nbi_encoder **encoder)
{
    nbi_encoder *e = *encoder;
    if (!e) return;
    nbi_matcher_free(&e->matcher);
    nbi_bpe_scratch_destroy(&e->bpe);
    nbi_buf_free(&e->normal);
    nbi_buf_free(&e->spare);
    nbi_buf_free(&e->prefix);
    nbi_free(e);
    *encoder = NULL;
}

static nb_status encoder_take(nbi_encoder_stock *t, nbi_encoder **out, nb_error *err)
{
    pthread_mutex_lock(&t->lock);
    nbi_encoder *e = t->idle;
    if (e) {
        t->idle = e->next;
        t->n_idle--;
    }
    pthread_mutex_unlock(&t->lock);
    if (!e) {
        e = nbi_calloc(1, sizeof *e);
        if (!e || nbi_bpe_scratch_create(&e->bpe) != NB_OK ||
            nbi_matcher_create(&e->matcher, NULL) != NB_OK) {
            encoder_destroy(&e);
            return nbi_fail(err, NB_NO_MEMORY, "out of memory for encoding");
        }
    }
    *out = e;
    return NB_OK;
}

static void trim(nbi_buf *buf)
{
    if (buf->cap > KEEP_BYTES) nbi_buf_free(buf);
}

static void encoder_give(nbi_encoder_stock *t, nbi_encoder *e)
{
    trim(&e->normal);
    trim(&e->spare);
    trim(&e->prefix);
    nbi_bpe_scratch_trim(e->bpe, KEEP_BYTES);
    pthread_mutex_lock(&t->lock);
    if (t->n_idle < IDLE_MAX) {
        e->next = t->idle;
        t->idle = e;
        t->n_idle++;
        e = NULL;
    }
    pthread_mutex_unlock(&t->lock);
    encoder_destroy(&e);
}

void nbi_tokenizer_destroy(nbi_tokenizer *t)
{
    while (t->stock && t->stock->idle) {
        nbi_encoder *e = t->stock->idle;
        t->stock->idle = e->next;
        encoder_destroy(&e);
    }
    if (t->stock) pthread_mutex_destroy(&t->stock->lock);
    nbi_free(t->stock);
    nbi_arena_free(&t->texts);
    nbi_free(t->added);
    nbi_added_free(&t->raw);
    nbi_added_free(&t->normal);
    nbi_normalizer_free(&t->normalizer);
    nbi_pretok_free(&t->pretok);
    nbi_bpe_destroy(&t->bpe);
    nbi_free(t->flags);
    nbi_free(t);
}

/* ---------------------------------------------------------------- encoding */

typedef struct job {
    const nbi_tokenizer *t;
    nbi_encoder *e;
    nbi_ids *ids;
    const nbi_range *plain; /* no added token may touch these bytes of the original text */
    size_t n_plain;
    bool special;
    nb_error *err;
} job;

static nb_status no_memory(job *j)
{
    return nbi_fail(j->err, NB_NO_MEMORY, "out of memory while encoding");
}

static nb_status too_many(job *j)
{
    return nbi_fail(j->err, NB_TOO_LARGE, "the text has more than %zu tokens", j->ids->max);
}

/* A piece without end need not be merged to see that it is too long, if no byte of it can vanish.
 */
static bool is_hopeless(const job *j, size_t n)
{
    if (n < LONG_PIECE_BYTES || j->ids->len + n / nbi_bpe_bytes_max(j->t->bpe) <= j->ids->max)
        return false;
    for (int byte = 0; byte < 256; byte++) {
        if (nbi_bpe_find(j->t->bpe, &(char){(char)byte}, 1) < 0) return false;
    }
    return true;
}

static nb_status encode_piece(void *arg, const uint8_t *piece, size_t n)
{
    job *j = arg;
    if (j->ids->max && is_hopeless(j, n)) return too_many(j);
    if (nbi_bpe_encode(j->t->bpe, j->e->bpe, piece, n, j->ids) != NB_OK) return no_memory(j);
    return j->ids->max && j->ids->len > j->ids->max ? too_many(j) : NB_OK;
}

/* Valid, normalized text without added tokens. `base` is unused: the signature is that of a
 * part_fn. */
static nb_status encode_words(job *j, const char *text, size_t n, size_t base)
{
    (void)base;
    return nbi_pretok_run(j->t->pretok, j->e->matcher, &j->e->prefix, text, n, encode_piece, j,
                          j->err);
}

static bool touches_plain(const job *j, size_t begin, size_t end)
{
    size_t low = 0, high = j->n_plain; /* the first range that ends behind `begin` */
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (j->plain[mid].end > begin)
            high = mid;
        else
            low = mid + 1;
    }
    return low < j->n_plain && j->plain[low].begin < end;
}

static bool word_before(const char *text, size_t at)
{
    uint32_t cp;
    if (at == 0) return false;
    size_t k = nbi_utf8_back((const uint8_t *)text, at);
    return nbi_utf8_read(&cp, (const uint8_t *)text + at - k, k) && nbi_unicode_is_word(cp);
}

static bool word_after(const char *text, size_t n, size_t at)
{
    uint32_t cp;
    return at < n && nbi_utf8_read(&cp, (const uint8_t *)text + at, n - at) &&
           nbi_unicode_is_word(cp);
}

static size_t spaces_before(const char *text, size_t from, size_t at)
{
    uint32_t cp;
    while (at > from) {
        size_t k = nbi_utf8_back((const uint8_t *)text + from, at - from);
        if (!nbi_utf8_read(&cp, (const uint8_t *)text + at - k, k) || !nbi_unicode_is_space(cp))
            break;
        at -= k;
    }
    return at;
}

static size_t spaces_after(const char *text, size_t n, size_t at)
{
    uint32_t cp;
    while (at < n) {
        size_t k = nbi_utf8_read(&cp, (const uint8_t *)text + at, n - at);
        if (k == 0 || !nbi_unicode_is_space(cp)) break;
        at += k;
    }
    return at;
}

typedef nb_status (*part_fn)(job *j, const char *text, size_t n, size_t base);

/* Emits the added tokens of `set` in text[0..n) and hands what lies between them to `part`. `base`
 * is the place of text[0] in the original. Matches are those of the reference: leftmost, longest,
 * the next search begins behind the bare match. */
static nb_status split_added(job *j, const nbi_added_set *set, const char *text, size_t n,
                             size_t base, part_fn part)
{
    size_t done = 0, from = 0, start, length;
    int32_t index;
    while ((index = nbi_added_next(set, text, n, from, &start, &length)) >= 0) {
        const nbi_added_token *a = &j->t->added[index];
        size_t end = start + length;
        if (j->n_plain && touches_plain(j, base + start, base + end)) {
            from = start + 1;
            continue;
        }
        from = end;
        if (a->single_word && (word_before(text, start) || word_after(text, n, end))) continue;
        if (a->lstrip && start > done) start = spaces_before(text, done, start);
        if (a->rstrip) end = spaces_after(text, n, end);
        if (done < start) NB_TRY(part(j, text + done, start - done, base + done));
        if (nbi_ids_add(j->ids, a->id) != NB_OK) return no_memory(j);
        if (j->ids->max && j->ids->len > j->ids->max) return too_many(j);
        done = end;
    }
    return done < n ? part(j, text + done, n - done, base + done) : NB_OK;
}

/* Valid text between raw added tokens. */
static nb_status encode_valid(job *j, const char *text, size_t n, size_t base)
{
    bool look = j->special && j->t->normal.n > 0;
    if (j->t->normalizer) {
        /* Guarded ranges are places in the original; normal text has none, so a touched part gets
         * no such tokens at all. */
        if (j->n_plain && touches_plain(j, base, base + n)) look = false;
        nbi_buf_clear(&j->e->normal);
        if (nbi_buf_add(&j->e->normal, text, n) != NB_OK) return no_memory(j);
        NB_TRY(nbi_normalizer_run(j->t->normalizer, j->e->matcher, &j->e->normal, &j->e->spare,
                                  j->err));
        text = j->e->normal.data;
        n = j->e->normal.len;
        if (n == 0) return NB_OK;
        if (look && j->n_plain) { /* untouched: places do not matter */
            job free_job = *j;
            free_job.n_plain = 0;
            return split_added(&free_job, &j->t->normal, text, n, base, encode_words);
        }
    }
    return look ? split_added(j, &j->t->normal, text, n, base, encode_words)
                : encode_words(j, text, n, base);
}

static nb_status encode_part(job *j, const char *text, size_t n, size_t base)
{
    const uint8_t *s = (const uint8_t *)text;
    for (size_t i = 0; i < n;) {
        size_t good = nbi_utf8_valid_prefix(s + i, n - i);
        if (good) NB_TRY(encode_valid(j, text + i, good, base + i));
        size_t bad = i += good;
        uint32_t cp;
        while (bad < n && nbi_utf8_read(&cp, s + bad, n - bad) == 0) bad++;
        if (bad > i) NB_TRY(encode_piece(j, s + i, bad - i));
        i = bad;
    }
    return NB_OK;
}

static nb_status encode(const nbi_tokenizer *tokenizer, const char *text, size_t n, bool special,
                        const nbi_range *plain, size_t n_plain, nbi_ids *ids, nb_error *err)
{
    if (n >= (size_t)1 << 31)
        return nbi_fail(err, NB_TOO_LARGE, "%zu bytes of text, expected less than 2^31", n);
    job j = {.t = tokenizer,
             .ids = ids,
             .plain = plain,
             .n_plain = n_plain,
             .special = special,
             .err = err};
    NB_TRY(encoder_take(tokenizer->stock, &j.e, err));
    size_t before = ids->len;
    nb_status st = special ? split_added(&j, &tokenizer->raw, text, n, 0, encode_part)
                           : encode_part(&j, text, n, 0);
    if (st != NB_OK) ids->len = before;
    encoder_give(tokenizer->stock, j.e);
    return st;
}

nb_status nbi_tokenizer_encode(const nbi_tokenizer *tokenizer, const char *text, size_t n,
                               bool parse_special, nbi_ids *ids, nb_error *err)
{
    return encode(tokenizer, text, n, parse_special, NULL, 0, ids, err);
}

nb_status nbi_tokenizer_encode_guarded(const nbi_tokenizer *tokenizer, const char *text, size_t n,
                                       const nbi_range *plain, size_t n_plain, nbi_ids *ids,
                                       nb_error *err)
{
    return encode(tokenizer, text, n, true, plain, n_plain, ids, err);
}

/* ---------------------------------------------------------------- facts and decoding */

uint32_t nbi_tokenizer_size(const nbi_tokenizer *tokenizer)
{
    return nbi_bpe_size(tokenizer->bpe);
}

const char *nbi_token_bytes(const nbi_tokenizer *tokenizer, int32_t id, size_t *n)
{
    return id < 0 ? NULL : nbi_bpe_bytes(tokenizer->bpe, (uint32_t)id, n);
}

size_t nbi_token_bytes_max(const nbi_tokenizer *tokenizer)
{
    return nbi_bpe_bytes_max(tokenizer->bpe);
}

static bool has_flag(const nbi_tokenizer *t, int32_t id, uint8_t flag)
{
    return id >= 0 && (uint32_t)id < nbi_bpe_size(t->bpe) && (t->flags[id] & flag);
}

bool nbi_token_is_special(const nbi_tokenizer *tokenizer, int32_t id)
{
    return has_flag(tokenizer, id, NBI_TOKEN_SPECIAL);
}

bool nbi_token_is_added(const nbi_tokenizer *tokenizer, int32_t id)
{
    return has_flag(tokenizer, id, NBI_TOKEN_ADDED);
}

int32_t nbi_token_find(const nbi_tokenizer *tokenizer, const char *text, size_t n)
{
    for (size_t i = 0; i < tokenizer->n_added; i++) {
        const nbi_added_token *a = &tokenizer->added[i];
        if (a->n == n && memcmp(a->text, text, n) == 0) return a->id;
    }
    return nbi_bpe_find(tokenizer->bpe, text, n);
}

size_t nbi_added_tokens(const nbi_tokenizer *tokenizer, const nbi_added_token **tokens)
{
    *tokens = tokenizer->added;
    return tokenizer->n_added;
}

nb_status nbi_tokenizer_decode(const nbi_tokenizer *tokenizer, const int32_t *ids, size_t n,
                               bool skip_special, char **text, size_t *n_bytes, nb_error *err)
{
    nbi_buf out = {0};
    nb_status st = nbi_buf_reserve(&out, n * 4 + 1);
    for (size_t i = 0; i < n && st == NB_OK; i++) {
        size_t len;
        if (ids[i] < 0 || (uint32_t)ids[i] >= nbi_tokenizer_size(tokenizer)) {
            st = nbi_fail(err, NB_INVALID, "token id %d at position %zu, expected 0 to %u", ids[i],
                          i, nbi_tokenizer_size(tokenizer) - 1);
            nbi_buf_free(&out);
            return st;
        }
        const char *bytes = nbi_token_bytes(tokenizer, ids[i], &len);
        if (bytes && !(skip_special && nbi_token_is_special(tokenizer, ids[i])))
            st = nbi_buf_add(&out, bytes, len);
    }
    if (st != NB_OK) {
        nbi_buf_free(&out);
        return nbi_fail(err, st, "out of memory while decoding %zu tokens", n);
    }
    out.data[out.len] = 0;
    *text = out.data;
    *n_bytes = out.len;
    return NB_OK;
}
