/* cmocka with the headers it wants before it, in the order it wants them. Included first by every C
 * test. */
#pragma once

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */
