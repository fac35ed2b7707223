/* The tests of routing, for every backend. */
#pragma once

#include "operator_util.h"

/* Runs them with `route`, whose arguments are all host memory; returns cmocka's status. */
int route_test(void (*route)(const nbi_route_args *a), int (*open)(void **), int (*close)(void **));
