/* Several ranks: rank 0 schedules and samples, the others do what it says.
 *
 * Before each pass over the model rank 0 broadcasts one order: what to do and the batch, packed.
 * The others wait for orders, run the same pass with the same batch, and drop the logits. Whatever
 * is decided from clocks, clients or random numbers is decided on rank 0 alone, so no two ranks can
 * come to different collective calls. */
#include <string.h>

#include "base/clock.h"
#include "engine/beam.h"

/* What every order has room for in its first message; a longer one needs a second. */
#define FIRST_BYTES ((size_t)8192)
#define TIMES_USUAL 20u
#define LIMIT_NS    3000000000u

typedef struct order {
    uint32_t kind;
    uint32_t n_rows, n_seqs, n_logit_rows, max_len;
    int32_t from, to; /* pages of NBI_ORDER_COPY_PAGE */
    uint32_t bytes;   /* of all, with this head */
} order;

static uint32_t pages_of(int32_t length)
{
    return ((uint32_t)length + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS;
}

static bool is_draft(uint32_t kind)
{
    return kind == NBI_ORDER_DRAFT || kind == NBI_ORDER_DRAFT_ON;
}

bool nbi_ranks_lead(const nb_engine *e)
{
    return e->options.ranks && nbi_comm_size(e->options.ranks) > 1 &&
           nbi_comm_rank(e->options.ranks) == 0;
}

size_t nbi_ranks_order_bytes(uint32_t rows, uint32_t seqs, uint32_t logits, uint32_t max_context)
{
    const size_t pages = pages_of((int32_t)max_context);
    size_t values = 6 * (size_t)rows + (3 + pages) * seqs + 1 + 2 * (size_t)logits;
    size_t bytes = sizeof(order) + values * sizeof(int32_t);
    return bytes > FIRST_BYTES ? bytes : FIRST_BYTES;
}

nb_status nbi_ranks_init(nb_engine *e, uint32_t rows, uint32_t logits, nb_error *err)
{
    if (!e->options.ranks || nbi_comm_size(e->options.ranks) == 1) return NB_OK;
    e->order_bytes = nbi_ranks_order_bytes(rows, e->max_running, logits, e->max_context);
    e->order = nbi_calloc(1, e->order_bytes);
    if (!e->order) return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    return NB_OK;
}

/* ---------------------------------------------------------------- packing */

typedef struct cursor {
    char *at;
    const char *end;
    bool writes;
} cursor;

/* Moves n values between the array and the order. False when the order is too short for them. */
static bool move(cursor *c, int32_t *array, size_t n)
{
    if ((size_t)(c->end - c->at) < n * sizeof *array) return false;
    if (c->writes) {
        memcpy(c->at, array, n * sizeof *array);
    } else {
        memcpy(array, c->at, n * sizeof *array);
    }
    c->at += n * sizeof *array;
    return true;
}

/* The arrays of a batch in the order in which they are sent: the same walk both ways. */
static bool move_batch(cursor *c, nbi_step_batch *b, const order *o)
{
    const size_t rows = o->n_rows, seqs = o->n_seqs;
    bool fits = move(c, b->ids, rows) && move(c, b->pos, rows) && move(c, b->row_seq, rows) &&
                move(c, b->shares, rows) && move(c, b->seq_first, seqs + 1) &&
                move(c, b->seq_len, seqs) && move(c, b->expanded, seqs) &&
                move(c, b->logit_rows, o->n_logit_rows) && move(c, b->candidates, o->n_logit_rows);
    if (is_draft(o->kind))
        fits = fits && move(c, b->hidden_rows, rows) && move(c, b->list_rows, rows);
    for (uint32_t s = 0; s < seqs && fits; s++) {
        const uint32_t pages = pages_of(b->seq_len[s]);
        fits =
            pages <= b->page_stride && move(c, b->page_table + (size_t)s * b->page_stride, pages);
    }
    return fits;
}

/* ---------------------------------------------------------------- leading */

static nb_status send(nb_engine *e, order *o, size_t bytes, nb_error *err)
{
    o->bytes = (uint32_t)bytes;
    memcpy(e->order, o, sizeof *o);
    nbi_timing *t = e->backend->timing;
    if (t) nbi_timing_collective_begin(t);
    nb_status st = nbi_comm_broadcast(e->options.ranks, e->order, FIRST_BYTES, err);
    if (st == NB_OK && bytes > FIRST_BYTES)
        st = nbi_comm_broadcast(e->options.ranks, e->order + FIRST_BYTES, bytes - FIRST_BYTES, err);
    if (t) nbi_timing_collective_end(t, NBI_TIMED_BROADCAST, (double)bytes);
    return st;
}

static uint64_t *usual_of(nb_engine *e, const nbi_step_batch *b)
{
    uint32_t bits = 0;
    while (bits + 1 < NBI_PASS_SIZES && b->view.n_rows >> bits) bits++;
    return &e->usual_ns[bits];
}

/* A rank that makes no call for 20 times what a whole pass of this size took of late, and for some
 * seconds, is stuck. */
static void expect(nb_engine *e, const nbi_step_batch *b)
{
    const uint64_t usual = *usual_of(e, b);
    e->pass_begin_ns = nbi_now_ns();
    if (usual)
        nbi_comm_expect(e->options.ranks,
                        usual * TIMES_USUAL > LIMIT_NS ? usual * TIMES_USUAL : LIMIT_NS, usual);
}

void nbi_ranks_done(nb_engine *e, const nbi_step_batch *b)
{
    if (!nbi_ranks_lead(e)) return;
    nbi_comm_expect(e->options.ranks, 0, 0);
    uint64_t *usual = usual_of(e, b), ns = nbi_now_ns() - e->pass_begin_ns;
    *usual = *usual ? *usual - *usual / 8 + ns / 8 : ns;
}

nb_status nbi_ranks_order(nb_engine *e, nbi_order kind, nbi_step_batch *b, nb_error *err)
{
    if (!nbi_ranks_lead(e)) return NB_OK;
    order o = {.kind = kind,
               .n_rows = b->view.n_rows,
               .n_seqs = b->view.n_seqs,
               .n_logit_rows = b->view.n_logit_rows,
               .max_len = b->view.max_len};
    cursor c = {.at = e->order + sizeof o, .end = e->order + e->order_bytes, .writes = true};
    const bool fits = move_batch(&c, b, &o);
    NB_ASSERT(fits);
    expect(e, b);
    return send(e, &o, (size_t)(c.at - e->order), err);
}

nb_status nbi_ranks_copy_page(nb_engine *e, int32_t from, int32_t to, nb_error *err)
{
    if (!nbi_ranks_lead(e)) return NB_OK;
    return send(e, &(order){.kind = NBI_ORDER_COPY_PAGE, .from = from, .to = to}, sizeof(order),
                err);
}

void nbi_ranks_end(nb_engine *e)
{
    nb_error dropped;
    if (e->order && nbi_ranks_lead(e))
        (void)!send(e, &(order){.kind = NBI_ORDER_END}, sizeof(order), &dropped);
}

/* ---------------------------------------------------------------- following */

static nb_status receive(nb_engine *e, order *o, nb_error *err)
{
    NB_TRY(nbi_comm_broadcast(e->options.ranks, e->order, FIRST_BYTES, err));
    memcpy(o, e->order, sizeof *o);
    if (o->bytes < sizeof *o || o->bytes > e->order_bytes)
        return nbi_fail(err, NB_INTERNAL, "an order of %u bytes; expected at most %zu", o->bytes,
                        e->order_bytes);
    if (o->bytes <= FIRST_BYTES) return NB_OK;
    return nbi_comm_broadcast(e->options.ranks, e->order + FIRST_BYTES, o->bytes - FIRST_BYTES,
                              err);
}

static nb_status unpack(nb_engine *e, const order *o, nbi_step_batch *b, nb_error *err)
{
    nbi_step_batch_clear(b);
    if (is_draft(o->kind)) {
        b->view.hidden_rows = b->hidden_rows;
        b->view.list_rows = b->list_rows;
    }
    cursor c = {.at = e->order + sizeof *o, .end = e->order + o->bytes};
    bool fits = o->n_rows <= b->max_rows && o->n_seqs <= b->max_seqs &&
                o->n_logit_rows <= b->max_logit_rows;
    if (!fits || !move_batch(&c, b, o))
        return nbi_fail(err, NB_INTERNAL,
                        "an order of %u rows of %u sequences does not fit this rank's batches",
                        o->n_rows, o->n_seqs);
    b->view.n_rows = o->n_rows;
    b->view.n_seqs = o->n_seqs;
    b->view.n_logit_rows = o->n_logit_rows;
    b->view.max_len = o->max_len;
    memset(b->row_fault, 0, o->n_rows * sizeof *b->row_fault);
    return NB_OK;
}

/* Rank 0 sees the same faults: what the ranks compute together is the same everywhere. */
static nb_status obey(nb_engine *e, const order *o, nb_error *err)
{
    float *logits;
    if (o->kind == NBI_ORDER_COPY_PAGE) {
        nbi_kv_copy_page(&e->kv, e->backend, nbi_model_local(e->model), o->from, o->to);
        return NB_OK;
    }
    nbi_step_batch *b = is_draft(o->kind) ? &e->drafting : &e->batch;
    NB_TRY(unpack(e, o, b, err));
    if (o->kind == NBI_ORDER_FORWARD) {
        NB_TRY(nbi_model_forward(e->model, &e->kv, &b->view, &logits, err));
    } else {
        NB_TRY(nbi_model_draft(e->model, &e->kv, &b->view, o->kind == NBI_ORDER_DRAFT_ON, &logits,
                               err));
    }
    return nbi_model_sync(e->model, err);
}

nb_status nb_engine_follow(nb_engine *e, nb_error *err)
{
    nb_error why = {0};
    nb_status st = NB_OK;
    NB_ASSERT(e->order && !nbi_ranks_lead(e));
    nbi_heap_forbid();
    for (order o = {0}; st == NB_OK;) {
        st = receive(e, &o, &why);
        if (st == NB_OK && o.kind == NBI_ORDER_END) break;
        if (st == NB_OK) st = obey(e, &o, &why);
    }
    nbi_heap_allow();
    if (st == NB_OK) return NB_OK;
    nbi_comm_fail(e->options.ranks, why.text);
    return nbi_fail(err, st, "%s", why.text);
}
