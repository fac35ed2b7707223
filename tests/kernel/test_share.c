/* Opportunistic expert activation on the CPU. */
#include "share_util.h"

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

static void share(const nbi_share_experts_args *a)
{
    cpu->base.ops->route(&cpu->base, &a->route);
    cpu->base.ops->share_experts(&cpu->base, a);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    return share_test(share, open_cpu, close_cpu);
}
