/* The tests of opportunistic expert activation, for every backend. */
#pragma once

#include "operator_util.h"

/* Runs them with `share`, whose arguments are all host memory: it routes (ops->route), and then
 * shares the experts. Returns cmocka's status. */
int share_test(void (*share)(const nbi_share_experts_args *a), int (*open)(void **),
               int (*close)(void **));
