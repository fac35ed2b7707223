/* Grammars compiled away from the HTTP threads, which must never wait: a few threads of its own
 * take orders in turn and say when they are done.
 *
 * Threads: orders are given, taken and closed by any thread, each by one at a time. `notify` comes
 * from a thread of the pool; it must not block, and must not give or close orders. */
#pragma once

#include "text/grammar.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_ORDERS_MAX 256 /* waiting at once */

typedef struct nbi_grammar_pool nbi_grammar_pool;
typedef struct nbi_order nbi_order;

/* Threads are started with the first orders. The compiler must outlive the pool. */
nb_status nbi_grammar_pool_open(nbi_grammar_pool **out, nbi_grammar_compiler *compiler,
                                nb_error *err);
/* After all orders are closed. Waits for what is being compiled, which is bounded. */
void nbi_grammar_pool_close(nbi_grammar_pool **pool);

/* Orders n_grammars grammars of one source, which is copied. NB_BUSY: too many wait. */
nb_status nbi_order_give(nbi_order **out, nbi_grammar_pool *pool, nbi_grammar_kind kind,
                         const char *source, size_t n, const nbi_grammar_options *options,
                         uint32_t n_grammars, void (*notify)(void *user), void *user,
                         nb_error *err);
bool nbi_order_is_done(nbi_order *order);
/* What a done order came to: grammars[n_grammars], the caller's from then on, or the statuses of
 * nbi_grammar_compile(). Once. */
nb_status nbi_order_take(nbi_order *order, nbi_grammar **grammars, nb_error *err);
/* At any time; no notify comes after it. */
void nbi_order_close(nbi_order **order);

#ifdef __cplusplus
}
#endif
