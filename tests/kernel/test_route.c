/* Routing on the CPU. */
#include "route_util.h"

static nbi_cpu *cpu;

static int open_cpu(void **state)
{
    (void)state;
    cpu = op_open(nbi_cpu_detect(), 2, NULL);
    return 0;
}

static int close_cpu(void **state)
{
    (void)state;
    op_close(cpu);
    return 0;
}

static void route(const nbi_route_args *a)
{
    cpu->base.ops->route(&cpu->base, a);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    return route_test(route, open_cpu, close_cpu);
}
