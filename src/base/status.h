/* Errors: every fallible function returns nb_status and takes `nb_error *err` last (may be NULL).
 * Results go through out-parameters, untouched on failure. */
#pragma once

#include "nibble.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define NBI_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define NBI_MUST_CHECK        __attribute__((warn_unused_result))
#else
#define NBI_PRINTF(fmt, args)
#define NBI_MUST_CHECK
#endif

/* Stores status and sentence in *err (when given) and returns status. Long text is cut at a UTF-8
 * boundary. */
nb_status nbi_fail(nb_error *err, nb_status status, const char *fmt, ...) NBI_PRINTF(3, 4);

/* Puts "prefix: " before the sentence already in *err; returns err's status (or `status` when err
 * is NULL). */
nb_status nbi_fail_prefix(nb_error *err, nb_status status, const char *fmt, ...) NBI_PRINTF(3, 4);

/* The static analyzer does not see into status.c: tell it that a failure is not NB_OK. */
#ifdef __clang_analyzer__
#define nbi_fail(err, status, ...)        (nbi_fail(err, status, __VA_ARGS__), (status))
#define nbi_fail_prefix(err, status, ...) (nbi_fail_prefix(err, status, __VA_ARGS__), (status))
#endif

#define NB_TRY(expr)                                \
    do {                                            \
        nb_status nb_try_st_ = (expr);              \
        if (nb_try_st_ != NB_OK) return nb_try_st_; \
    } while (0)

#define NB_TRY_OR(st, expr, label)     \
    do {                               \
        (st) = (expr);                 \
        if ((st) != NB_OK) goto label; \
    } while (0)

/* Broken invariant: prints the condition and aborts, in every build. */
#define NB_ASSERT(cond) ((cond) ? (void)0 : nbi_assert_failed(#cond, __FILE__, __LINE__))
void nbi_assert_failed(const char *cond, const char *file, int line) __attribute__((noreturn));

#ifdef __cplusplus
}
#endif
