/* Emulation of blocks, warps and matrix units on the CPU (emulate.h). Callers: kernels compiled by
 * a C++ compiler. One thread at a time.
 *
 * A block's threads are fibers. A fiber runs until it waits: at the block's barrier, at its warp's,
 * or at its end. A barrier opens when every thread of it that has not ended waits there. */
#include "backend/cuda/emulate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <deque>

#define MAX_THREADS 1024u
#define STACK_BYTES (128u << 10)
#define COPIES_MAX  512u
#define WGMMA_MAX   40u

namespace
{

struct pending_copy {
    void *to;
    const void *from;
    bool take;
    unsigned group;
};

struct pending_wgmma {
    float *d;
    const uint32_t *a; /* NULL: in shared memory */
    uint64_t a_shared, b;
    unsigned n, group;
    bool bf16, more;
    bool across; /* b: its columns lie side by side */
};

struct bulk_copy {
    void *to;
    const void *from;
    uint32_t bytes;
    uint64_t *bar;
};

/* An mbarrier: 64 bits of shared memory. */
struct bar_state {
    unsigned count : 12, left : 12, phase : 1, unused : 7;
    int32_t bytes; /* announced and not there yet */
};

enum fiber_state { READY, AT_BLOCK, AT_WARP, AT_BAR, ENDED };

struct fiber {
    nbi_emu_thread self;
    void *sp;
    fiber_state state;
    uint64_t *bar; /* AT_BAR: an mbarrier and the parity that it waits for, or a named barrier */
    uint32_t parity, named;
    unsigned n_copies, group; /* copies on their way; number of the open group */
    pending_copy copies[COPIES_MAX];
    unsigned n_wgmma, wgmma_group;
    pending_wgmma wgmma[WGMMA_MAX];
};

alignas(1024) unsigned char shared_memory[256u << 10];
alignas(16) unsigned char slots[MAX_THREADS / 32][32 * NBI_EMU_SLOT];
fiber *fibers;
unsigned char *stacks;
void *scheduler_sp;
unsigned n_threads;
unsigned named_count[16]; /* threads that wait at a named barrier */
std::deque<bulk_copy> bulk;
const std::function<void()> *kernel;

} // namespace

nbi_emu_thread *nbi_emu_self;
dim3 nbi_emu_block_dim, nbi_emu_grid_dim;

/* ---------------------------------------------------------------- fibers */

#if !defined(__x86_64__)
#error "the emulation of CUDA blocks switches stacks by hand and is written for x86-64"
#endif

/* Saves what a call must preserve and the stack pointer, and takes up another stack. */
extern "C" void nbi_emu_switch(void **save, void *load);
asm(".text\n"
    ".type nbi_emu_switch, @function\n"
    "nbi_emu_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size nbi_emu_switch, .-nbi_emu_switch\n");

static fiber *current()
{
    return reinterpret_cast<fiber *>(nbi_emu_self);
}

static void leave(fiber_state state)
{
    fiber *f = current();
    f->state = state;
    nbi_emu_switch(&f->sp, scheduler_sp);
}

static void fiber_main()
{
    (*kernel)();
    nbi_emu_copy_wait(0);
    if (current()->n_wgmma) {
        fprintf(stderr, "CUDA emulation: warpgroup products were never waited for\n");
        abort();
    }
    leave(ENDED);
    abort(); /* an ended fiber is never taken up again */
}

static void make_stacks()
{
    if (fibers) return;
    fibers = static_cast<fiber *>(calloc(MAX_THREADS, sizeof *fibers));
    void *p = mmap(NULL, (size_t)MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!fibers || p == MAP_FAILED) {
        fprintf(stderr, "CUDA emulation: no memory for %u stacks\n", MAX_THREADS);
        abort();
    }
    stacks = static_cast<unsigned char *>(p);
}

/* The first switch to a fiber returns into fiber_main with the stack as behind a call. */
static void start_fiber(unsigned i, dim3 thread, dim3 block)
{
    fiber *f = &fibers[i];
    f->self = {thread, block, i % 32, i / 32};
    f->state = READY;
    f->n_copies = f->group = f->named = f->n_wgmma = f->wgmma_group = 0;
    f->bar = NULL;
    void **top = reinterpret_cast<void **>(stacks + (size_t)(i + 1) * STACK_BYTES - 64);
    *--top = NULL; /* where fiber_main would return to */
    void (*entry)() = fiber_main;
    memcpy(--top, &entry, sizeof entry);
    for (int r = 0; r < 6; r++) *--top = NULL;
    f->sp = top;
}

static bar_state bar_load(const uint64_t *bar)
{
    bar_state s;
    memcpy(&s, bar, sizeof s);
    return s;
}

static void bar_store(uint64_t *bar, bar_state s)
{
    if (s.left == 0 && s.bytes == 0) { /* the next phase */
        s.phase ^= 1;
        s.left = s.count;
    }
    memcpy(bar, &s, sizeof s);
}

/* Threads whose mbarrier's phase has ended go on. */
static bool open_bars()
{
    bool ready = false;
    for (unsigned i = 0; i < n_threads; i++) {
        fiber *f = &fibers[i];
        if (f->state != AT_BAR || f->named || bar_load(f->bar).phase == f->parity) continue;
        f->state = READY;
        ready = true;
    }
    return ready;
}

static bool land_bulk_copy()
{
    if (bulk.empty()) return false;
    const bulk_copy c = bulk.front();
    bulk.pop_front();
    memcpy(c.to, c.from, c.bytes);
    bar_state s = bar_load(c.bar);
    s.bytes -= (int32_t)c.bytes;
    bar_store(c.bar, s);
    return true;
}

/* Opens the barriers whose threads are all there. Returns whether any thread can go on. */
static bool open_barriers()
{
    bool ready = open_bars(), block = true;
    for (unsigned w = 0; w * 32 < n_threads; w++) {
        const unsigned end = (w + 1) * 32 < n_threads ? (w + 1) * 32 : n_threads;
        bool all = true;
        for (unsigned i = w * 32; i < end; i++) {
            if (fibers[i].state == READY) ready = true;
            if (fibers[i].state != AT_WARP && fibers[i].state != ENDED) all = false;
            if (fibers[i].state != AT_BLOCK && fibers[i].state != ENDED) block = false;
        }
        for (unsigned i = w * 32; all && i < end; i++) {
            if (fibers[i].state != AT_WARP) continue;
            fibers[i].state = READY;
            ready = true;
        }
    }
    for (unsigned i = 0; block && i < n_threads; i++) {
        if (fibers[i].state != AT_BLOCK) continue;
        fibers[i].state = READY;
        ready = true;
    }
    while (!ready && land_bulk_copy()) ready = open_bars();
    return ready;
}

static void report_deadlock()
{
    unsigned block = 0, warp = 0, bar = 0, ended = 0;
    for (unsigned i = 0; i < n_threads; i++) {
        block += fibers[i].state == AT_BLOCK;
        bar += fibers[i].state == AT_BAR;
        warp += fibers[i].state == AT_WARP;
        ended += fibers[i].state == ENDED;
    }
    if (ended == n_threads) return;
    fprintf(stderr,
            "CUDA emulation: block (%u, %u, %u) cannot go on: of %u threads %u wait for the block, "
            "%u for their warp, %u at other barriers, %u have ended\n",
            fibers[0].self.block.x, fibers[0].self.block.y, fibers[0].self.block.z, n_threads,
            block, warp, bar, ended);
    abort();
}

static void run_block(dim3 idx)
{
    const dim3 dim = nbi_emu_block_dim;
    unsigned i = 0;
    for (unsigned z = 0; z < dim.z; z++)
        for (unsigned y = 0; y < dim.y; y++)
            for (unsigned x = 0; x < dim.x; x++) start_fiber(i++, dim3(x, y, z), idx);
    do {
        for (i = 0; i < n_threads; i++) {
            if (fibers[i].state != READY) continue;
            nbi_emu_self = &fibers[i].self;
            nbi_emu_switch(&scheduler_sp, fibers[i].sp);
        }
    } while (open_barriers());
    report_deadlock();
    if (!bulk.empty()) {
        fprintf(stderr, "CUDA emulation: %zu bulk copies were never waited for\n", bulk.size());
        abort();
    }
}

void nbi_emu_run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body)
{
    n_threads = block.x * block.y * block.z;
    if (!n_threads || n_threads > MAX_THREADS || shared_bytes > (227u << 10) || !grid.x ||
        !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) {
        fprintf(stderr,
                "CUDA emulation: a launch of (%u, %u, %u) blocks of %u threads with %zu bytes of "
                "shared memory is not possible\n",
                grid.x, grid.y, grid.z, n_threads, shared_bytes);
        abort();
    }
    make_stacks();
    kernel = &body;
    nbi_emu_block_dim = block;
    nbi_emu_grid_dim = grid;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                memset(shared_memory, 0xff, shared_bytes);
                run_block(dim3(x, y, z));
            }
    nbi_emu_self = NULL;
}

/* ---------------------------------------------------------------- inside a block */

void *nbi_emu_shared()
{
    return shared_memory;
}

void nbi_emu_sync_block()
{
    leave(AT_BLOCK);
}

void nbi_emu_sync_warp()
{
    leave(AT_WARP);
}

bool nbi_emu_lane_lives(unsigned lane)
{
    const unsigned i = nbi_emu_self->warp * 32 + lane;
    return i < n_threads && fibers[i].state != ENDED;
}

const unsigned char *nbi_emu_exchange(const void *value, size_t bytes)
{
    unsigned char *warp = slots[nbi_emu_self->warp];
    memcpy(warp + nbi_emu_self->lane * NBI_EMU_SLOT, value, bytes);
    nbi_emu_sync_warp();
    return warp;
}

void nbi_emu_copy_async(void *shared, const void *src, bool take)
{
    fiber *f = current();
    if (f->n_copies == COPIES_MAX || ((uintptr_t)shared & 15u) || ((uintptr_t)src & 15u)) {
        fprintf(stderr,
                "CUDA emulation: asynchronous copy %u from %p to %p: too many or unaligned\n",
                f->n_copies, src, shared);
        abort();
    }
    f->copies[f->n_copies++] = {shared, src, take, f->group};
}

void nbi_emu_copy_commit()
{
    current()->group++;
}

void nbi_emu_copy_wait(int left)
{
    fiber *f = current();
    unsigned kept = 0;
    for (unsigned i = 0; i < f->n_copies; i++) {
        const pending_copy c = f->copies[i];
        if (left && c.group + (unsigned)left >= f->group)
            f->copies[kept++] = c;
        else if (c.take)
            memcpy(c.to, c.from, 16);
        else
            memset(c.to, 0, 16);
    }
    f->n_copies = kept;
}

void nbi_emu_bar_init(uint64_t *bar, uint32_t count)
{
    const bar_state s = {count, count, 0, 0, 0};
    memcpy(bar, &s, sizeof s);
}

void nbi_emu_bar_arrive(uint64_t *bar, uint32_t bytes)
{
    bar_state s = bar_load(bar);
    if (s.left == 0) {
        fprintf(stderr, "CUDA emulation: more arrivals at a barrier than it counts\n");
        abort();
    }
    s.left--;
    s.bytes += (int32_t)bytes;
    bar_store(bar, s);
}

void nbi_emu_bar_wait(uint64_t *bar, uint32_t parity)
{
    fiber *f = current();
    if (bar_load(bar).phase != parity) return;
    f->bar = bar;
    f->parity = parity;
    leave(AT_BAR);
}

void nbi_emu_copy_bulk(void *shared, const void *src, uint32_t bytes, uint64_t *bar)
{
    if (((uintptr_t)shared | (uintptr_t)src | bytes) & 15u) {
        fprintf(stderr, "CUDA emulation: bulk copy of %u bytes from %p to %p is not aligned\n",
                bytes, src, shared);
        abort();
    }
    bulk.push_back({shared, src, bytes, bar});
}

void nbi_emu_sync_some(uint32_t id, uint32_t threads)
{
    fiber *f = current();
    if (++named_count[id] < threads) {
        f->named = id;
        leave(AT_BAR);
        return;
    }
    named_count[id] = 0;
    for (unsigned i = 0; i < n_threads; i++) {
        if (fibers[i].state != AT_BAR || fibers[i].named != id) continue;
        fibers[i].named = 0;
        fibers[i].state = READY;
    }
}

/* ---------------------------------------------------------------- formats */

float nbi_emu_from_f16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, e = x >> 10 & 31u, m = x & 1023u;
    float v;
    if (e == 31) {
        const uint32_t bits = sign | 0x7f800000u | m << 13;
        memcpy(&v, &bits, sizeof v);
        return v;
    }
    v = e ? ldexpf((float)(1024 + m), (int)e - 25) : ldexpf((float)m, -24);
    return sign ? -v : v;
}

uint16_t nbi_emu_to_f16(float x)
{
    const uint16_t sign = signbit(x) ? 0x8000u : 0;
    const float a = fabsf(x);
    if (a != a) return 0x7fffu;
    if (a >= 65520.0f) return sign | 0x7c00u;
    int e;
    frexpf(a, &e);
    if (e < -13) e = -13; /* subnormal: units of 2^-24 */
    const float q = nearbyintf(ldexpf(a, 11 - e));
    const float v = ldexpf(q, e - 11);
    if (v == 0) return sign;
    if (v < 6.103515625e-05f) return sign | (uint16_t)ldexpf(v, 24);
    frexpf(v, &e);
    return sign | (uint16_t)((e + 14) << 10 | ((unsigned)ldexpf(v, 11 - e) & 1023u));
}

/* ---------------------------------------------------------------- matrix units */

static void load_matrices(uint32_t r[4], const void *shared, bool trans)
{
    const unsigned lane = nbi_emu_self->lane;
    for (unsigned m = 0; m < 4; m++) {
        const unsigned char *slot = nbi_emu_exchange(&shared, sizeof shared);
        uint16_t pair[2];
        for (unsigned h = 0; h < 2; h++) {
            const unsigned row = trans ? lane % 4 * 2 + h : lane / 4;
            const unsigned col = trans ? lane / 4 : lane % 4 * 2 + h;
            const uint16_t *from;
            memcpy(&from, slot + (m * 8 + row) * NBI_EMU_SLOT, sizeof from);
            pair[h] = from[col];
        }
        nbi_emu_sync_warp();
        memcpy(&r[m], pair, sizeof pair);
    }
}

void nbi_emu_ldmatrix(uint32_t r[4], const void *shared)
{
    load_matrices(r, shared, false);
}

void nbi_emu_ldmatrix_trans(uint32_t r[4], const void *shared)
{
    load_matrices(r, shared, true);
}

static double value(uint32_t pair, unsigned h, bool bf16)
{
    const uint16_t x = (uint16_t)(pair >> 16 * h);
    if (!bf16) return (double)nbi_emu_from_f16(x);
    const uint32_t bits = (uint32_t)x << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return (double)v;
}

/* One rounding per element: the real unit aligns and cuts, which is within a few units of that. */
void nbi_emu_mma(float d[4], const uint32_t a[4], const uint32_t b[2], bool bf16)
{
    const unsigned lane = nbi_emu_self->lane, g = lane / 4, t = lane % 4;
    uint32_t as[32][4], bs[32][2];
    const unsigned char *slot = nbi_emu_exchange(a, 16);
    for (unsigned i = 0; i < 32; i++) memcpy(as[i], slot + i * NBI_EMU_SLOT, 16);
    nbi_emu_sync_warp();
    slot = nbi_emu_exchange(b, 8);
    for (unsigned i = 0; i < 32; i++) memcpy(bs[i], slot + i * NBI_EMU_SLOT, 8);
    nbi_emu_sync_warp();
    for (unsigned i = 0; i < 4; i++) {
        const unsigned high = i / 2, col = 2 * t + i % 2; /* row g + 8 high */
        double sum = (double)d[i];
        for (unsigned k = 0; k < 16; k++) {
            const unsigned q = k % 8 / 2, h = k % 2, upper = k / 8;
            sum += value(as[g * 4 + q][high + 2 * upper], h, bf16) *
                   value(bs[col * 4 + q][upper], h, bf16);
        }
        d[i] = (float)sum;
    }
}

/* A byte of a scale register as its lane's part of an FP4 product needs it. */
static double fp4_scale(const unsigned char *lanes, unsigned lane, unsigned which, unsigned byte)
{
    const unsigned char e = lanes[lane * NBI_EMU_SLOT + 4 * which + byte];
    if (e & 0x80u) {
        fprintf(stderr, "CUDA emulation: scale %#x of an FP4 product has a sign\n", e);
        abort();
    }
    if (e == 0x7f) return (double)NAN;
    return e >> 3 ? ldexp(8 + (e & 7), (int)(e >> 3) - 10) : ldexp(e, -9);
}

/* Exact but for the last step: the sum of a k-step and d in double, rounded once. Where what lies
 * is read from the tables of the PTX ISA: k / 32 is the register, k % 32 / 8 the lane. */
void nbi_emu_mma_fp4(float d[4], const uint32_t a[4], const uint32_t b[2], uint32_t scale_a,
                     uint32_t scale_b)
{
    static const double e2m1[16] = {0,   0.5,  1,  1.5,  2,  3,  4,  6,
                                    -0., -0.5, -1, -1.5, -2, -3, -4, -6};
    const unsigned g = nbi_emu_self->lane / 4, t = nbi_emu_self->lane % 4;
    unsigned char as[32 * NBI_EMU_SLOT], rest[32 * NBI_EMU_SLOT];
    const uint32_t other[4] = {b[0], b[1], scale_a, scale_b};
    memcpy(as, nbi_emu_exchange(a, 16), sizeof as);
    nbi_emu_sync_warp();
    memcpy(rest, nbi_emu_exchange(other, 16), sizeof rest);
    nbi_emu_sync_warp();
    for (unsigned i = 0; i < 4; i++) {
        const unsigned high = i / 2, column = 2 * t + i % 2; /* row g + 8 high */
        double sum = (double)d[i];
        for (unsigned group = 0; group < 4; group++) {
            double part = 0;
            for (unsigned k = 16 * group; k < 16 * group + 16; k++) {
                const unsigned lane = k % 32 / 8, half = k / 32, byte = k % 8 / 2,
                               shift = k % 2 * 4;
                const unsigned x = as[(g * 4 + lane) * NBI_EMU_SLOT + 4 * (high + 2 * half) + byte],
                               y = rest[(column * 4 + lane) * NBI_EMU_SLOT + 4 * half + byte];
                part += e2m1[x >> shift & 15u] * e2m1[y >> shift & 15u];
            }
            sum += part * fp4_scale(rest, g * 4 + high, 2, group) *
                   fp4_scale(rest, column * 4, 3, group);
        }
        d[i] = (float)sum;
    }
}

/* FP16 or BF16 to float. */
static const float *values(bool bf16)
{
    static float table[2][65536];
    static bool made;
    if (!made)
        for (unsigned i = 0; i < 65536; i++) {
            table[0][i] = nbi_emu_from_f16((uint16_t)i);
            const uint32_t bits = i << 16;
            memcpy(&table[1][i], &bits, sizeof bits);
        }
    made = true;
    return table[bf16];
}

static void wgmma_later(const pending_wgmma &w)
{
    fiber *f = current();
    const uint64_t a = w.a ? w.b : w.a_shared;
    if (f->n_wgmma == WGMMA_MAX || w.b >> 62 != 1 || (w.b >> 32 & 0x3fffu) != 1024 >> 4 ||
        a >> 32 != w.b >> 32) {
        fprintf(stderr, "CUDA emulation: warpgroup product %u: too many, or of descriptor %#llx\n",
                f->n_wgmma, (unsigned long long)w.b);
        abort();
    }
    f->wgmma[f->n_wgmma++] = w;
}

void nbi_emu_wgmma(float *d, const uint32_t *a, uint64_t b, unsigned n, bool bf16, bool more)
{
    wgmma_later({d, a, 0, b, n, current()->wgmma_group, bf16, more, false});
}

void nbi_emu_wgmma_shared(float *d, uint64_t a, uint64_t b, unsigned n, bool more)
{
    wgmma_later({d, NULL, a, b, n, current()->wgmma_group, true, more, false});
}

void nbi_emu_wgmma_across(float *d, uint64_t a, uint64_t b, unsigned n, bool more)
{
    wgmma_later({d, NULL, a, b, n, current()->wgmma_group, true, more, true});
}

void nbi_emu_wgmma_commit()
{
    current()->wgmma_group++;
}

/* 16 values along K of column n: descriptor b, 128-byte swizzle. */
static void column_values(double to[16], uint64_t b, unsigned n, const float *table)
{
    const uint32_t base = (uint32_t)(b & 0x3fffu) << 4, row = base + n / 8 * 1024 + n % 8 * 128;
    for (unsigned k = 0; k < 16; k++) {
        const uint32_t at = row + 2 * k;
        uint16_t x;
        memcpy(&x, shared_memory + (at ^ (at >> 7 & 7u) << 4), sizeof x);
        to[k] = (double)table[x];
    }
}

/* The same of columns side by side. */
static void column_across(double to[16], uint64_t b, unsigned n, const float *table)
{
    const uint32_t base = (uint32_t)(b & 0x3fffu) << 4, group = (uint32_t)(b >> 16 & 0x3fffu) << 4;
    for (unsigned k = 0; k < 16; k++) {
        const uint32_t at = base + n / 64 * group + k * 128 + n % 64 * 2;
        uint16_t x;
        memcpy(&x, shared_memory + (at ^ (at >> 7 & 7u) << 4), sizeof x);
        to[k] = (double)table[x];
    }
}

/* The lane's part of one product; additions as in nbi_emu_mma(). All lanes of the warp. */
static void wgmma_now(const pending_wgmma &w)
{
    const unsigned lane = nbi_emu_self->lane, g = lane / 4, t = lane % 4;
    const float *table = values(w.bf16);
    double a[2][16]; /* rows g, g + 8 */
    const unsigned row = threadIdx.x / 32 % 4 * 16 + g;
    for (unsigned high = 0; !w.a && high < 2; high++)
        column_values(a[high], w.a_shared, row + 8 * high, table);
    const unsigned char *slot = w.a ? nbi_emu_exchange(w.a, 16) : NULL;
    for (unsigned q = 0; w.a && q < 4; q++) {
        uint32_t words[4];
        memcpy(words, slot + (g * 4 + q) * NBI_EMU_SLOT, sizeof words);
        for (unsigned i = 0; i < 4; i++)
            for (unsigned h = 0; h < 2; h++)
                a[i % 2][i / 2 * 8 + 2 * q + h] = (double)table[words[i] >> 16 * h & 0xffffu];
    }
    if (w.a) nbi_emu_sync_warp();
    for (unsigned c = 0; c < w.n / 4; c++) { /* the lane's columns, in pairs of 8 */
        double b[16];
        (w.across ? column_across : column_values)(b, w.b, c / 2 * 8 + 2 * t + c % 2, table);
        for (unsigned high = 0; high < 2; high++) {
            float *d = w.d + c / 2 * 4 + high * 2 + c % 2;
            double sum = w.more ? (double)*d : 0;
            for (unsigned k = 0; k < 16; k++) sum += a[high][k] * b[k];
            *d = (float)sum;
        }
    }
}

void nbi_emu_wgmma_wait(int left)
{
    fiber *f = current();
    unsigned kept = 0;
    for (unsigned i = 0; i < f->n_wgmma; i++) {
        const pending_wgmma w = f->wgmma[i];
        if (w.group + (unsigned)left >= f->wgmma_group)
            f->wgmma[kept++] = w;
        else
            wgmma_now(w);
    }
    f->n_wgmma = kept;
}
