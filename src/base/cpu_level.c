/* CPU features by CPUID, checked against what the kernel saves on a context switch (XCR0). Called
 * at start; cached. */
#include "base/cpu.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define XCR0_AVX            0x6u     /* XMM, YMM */
#define XCR0_AVX512         0xe6u    /* and opmask, ZMM */
#define XCR0_AMX            0x60000u /* XTILECFG, XTILEDATA */
#define XTILEDATA           18
#define ARCH_REQ_XCOMP_PERM 0x1023

static uint64_t xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool has(uint32_t value, uint32_t bits)
{
    return (value & bits) == bits;
}

/* The names of the bits are Intel's (SDM volume 2, CPUID). */
static nbi_cpu_level detect(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return NBI_CPU_REFERENCE;
    const uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    if (!has(c, fma | osxsave | avx | f16c)) return NBI_CPU_REFERENCE;
    uint64_t state = xcr0();
    if ((state & XCR0_AVX) != XCR0_AVX) return NBI_CPU_REFERENCE;

    uint32_t b7, c7, d7, a7_1;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return NBI_CPU_REFERENCE;
    uint32_t subleaves = a;
    const uint32_t bmi1 = 1u << 3, avx2 = 1u << 5, bmi2 = 1u << 8;
    if (!has(b7, avx2 | bmi1 | bmi2)) return NBI_CPU_REFERENCE;

    const uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
    const uint32_t vbmi = 1u << 1, vnni = 1u << 11;
    if ((state & XCR0_AVX512) != XCR0_AVX512 || !has(b7, f | dq | bw | vl) ||
        !has(c7, vbmi | vnni) || subleaves < 1 || !__get_cpuid_count(7, 1, &a7_1, &b, &c, &d)) {
        return NBI_CPU_AVX2;
    }
    const uint32_t bf16 = 1u << 5;
    if (!has(a7_1, bf16)) return NBI_CPU_AVX2;

    const uint32_t amx_bf16 = 1u << 22, amx_tile = 1u << 24, amx_int8 = 1u << 25;
    if ((state & XCR0_AMX) != XCR0_AMX || !has(d7, amx_bf16 | amx_tile | amx_int8)) {
        return NBI_CPU_AVX512;
    }
    /* Linux grants the 8 KiB of tile data only on request, once for the whole process. */
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) != 0) return NBI_CPU_AVX512;
    return NBI_CPU_AMX;
}
#else
static nbi_cpu_level detect(void)
{
    return NBI_CPU_REFERENCE;
}
#endif

static const char *const level_names[NBI_CPU_LEVEL_COUNT] = {"reference", "avx2", "avx512", "amx"};

static pthread_once_t detect_once = PTHREAD_ONCE_INIT;
static nbi_cpu_level detected;

static void detect_now(void)
{
    detected = detect();
}

nbi_cpu_level nbi_cpu_detect(void)
{
    pthread_once(&detect_once, detect_now);
    return detected;
}

const char *nbi_cpu_level_name(nbi_cpu_level level)
{
    return (unsigned)level < NBI_CPU_LEVEL_COUNT ? level_names[level] : "unknown";
}

nb_status nbi_cpu_level_parse(nbi_cpu_level *out, const char *name, nb_error *err)
{
    nbi_cpu_level here = nbi_cpu_detect();
    if (strcmp(name, "auto") == 0) {
        *out = here;
        return NB_OK;
    }
    for (unsigned i = 0; i < NBI_CPU_LEVEL_COUNT; i++) {
        if (strcmp(name, level_names[i]) != 0) continue;
        if (i > (unsigned)here) {
            return nbi_fail(err, NB_UNSUPPORTED,
                            "CPU level \"%s\" is above what this machine has (\"%s\")", name,
                            level_names[here]);
        }
        *out = (nbi_cpu_level)i;
        return NB_OK;
    }
    return nbi_fail(err, NB_INVALID,
                    "unknown CPU level \"%s\", expected auto, reference, avx2, avx512 or amx",
                    name);
}
