// Do wgmma and mma.sync give the same bits? A 64x64 product over K = 256 by three routes: mma.sync
// m16n8k16 chained in FP32, wgmma m64n64k16 with A from registers, and with A from shared memory.
// 262 products of random data with a wide spread of exponents: 1.07 million elements for each type.
#include "lab.h"
#include "ptx.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int M = 64, N = 64, K = 256, STEPS = K / 16, PRODUCTS = 262, ELEMENTS = PRODUCTS * M * N;

__device__ inline int frag_row(
    int i) // row and column of accumulator i of a thread, 64x64 by 4 warps
{
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}

__device__ inline int frag_col(int i)
{
    return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

// A [product][M][K] and B [product][N][K] as 16-bit words.
__device__ inline void load_a(const uint16_t *a, int step, uint32_t r[4])
{
    const uint16_t *p =
        a + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * K + step * 16 + threadIdx.x % 4 * 2;
    r[0] = *(const uint32_t *)p;
    r[1] = *(const uint32_t *)(p + 8 * K);
    r[2] = *(const uint32_t *)(p + 8);
    r[3] = *(const uint32_t *)(p + 8 * K + 8);
}

template <bool BF16>
__device__ inline void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// PERMUTE_K: within each 16, lane t takes k = 4t .. 4t + 3, as the packed weights do.
template <bool BF16, bool PERMUTE_K>
__global__ void __launch_bounds__(128) by_mma(const uint16_t *a, const uint16_t *b, float *out)
{
    a += (size_t)blockIdx.x * M * K;
    b += (size_t)blockIdx.x * N * K;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float d[32] = {};
    for (int s = 0; s < STEPS; ++s) {
        uint32_t r[4];
        if (PERMUTE_K) {
            const uint16_t *p = a + (threadIdx.x / 32 * 16 + g) * K + s * 16 + 4 * t;
            r[0] = *(const uint32_t *)p;
            r[1] = *(const uint32_t *)(p + 8 * K);
            r[2] = *(const uint32_t *)(p + 2);
            r[3] = *(const uint32_t *)(p + 8 * K + 2);
        } else {
            load_a(a, s, r);
        }
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
            const uint16_t *p = b + (n * 8 + g) * K + s * 16 + (PERMUTE_K ? 4 : 2) * t;
            mma<BF16>(d + n * 4, r, *(const uint32_t *)p,
                      *(const uint32_t *)(p + (PERMUTE_K ? 2 : 8)));
        }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i)
        out[(size_t)blockIdx.x * M * N + frag_row(i) * N + frag_col(i)] = d[i];
}

// ---- wgmma ----

// Descriptor of a K-major operand without swizzle: core matrices of 8 rows x 16 bytes, 128
// contiguous bytes each. lead: bytes from one core matrix to the next along K; stride: along the
// rows.
__device__ inline uint64_t descriptor(const void *p, int lead, int stride)
{
    return (uint64_t)(smem_addr(p) >> 4 & 0x3FFF) | (uint64_t)(lead >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32;
}

#define ACC8(i)                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define ACC32 ACC8(0), ACC8(8), ACC8(16), ACC8(24)
#define D32                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,"                                                                                      \
    "%27,%28,%29,%30,%31}"
#define WGMMA_RS(type)                                                               \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"                            \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " D32 \
                 ", {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"                           \
                 : ACC32                                                             \
                 : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(db))
#define WGMMA_SS(type)                                                               \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"                            \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " D32 \
                 ", %32, %33, p, 1, 1, 0, 0; }"                                      \
                 : ACC32                                                             \
                 : "l"(da), "l"(db))

// One k-step of 16: 64 rows as 8 x 2 core matrices, the two along K next to each other.
__device__ inline void stage16(uint16_t *to, const uint16_t *from, int step)
{
    int row = threadIdx.x / 2, half = threadIdx.x % 2;
    *(uint4 *)(to + (row / 8 * 2 + half) * 64 + row % 8 * 8) =
        *(const uint4 *)(from + row * K + step * 16 + half * 8);
}

// SWAP exchanges lead and stride, should the other reading of the descriptor be the right one.
template <bool BF16, bool A_SHARED, bool SWAP>
__global__ void __launch_bounds__(128) by_wgmma(const uint16_t *a, const uint16_t *b, float *out)
{
    __shared__ __align__(128) uint16_t sa[M * 16], sb[N * 16];
    a += (size_t)blockIdx.x * M * K;
    b += (size_t)blockIdx.x * N * K;
    const int lead = SWAP ? 256 : 128, stride = SWAP ? 128 : 256;
    float d[32] = {};
    for (int s = 0; s < STEPS; ++s) {
        uint32_t r[4];
        stage16(sa, a, s);
        stage16(sb, b, s);
        load_a(a, s, r);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        const uint64_t da = descriptor(sa, lead, stride), db = descriptor(sb, lead, stride);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        if (A_SHARED) {
            if (BF16)
                WGMMA_SS("bf16");
            else
                WGMMA_SS("f16");
        } else {
            if (BF16)
                WGMMA_RS("bf16");
            else
                WGMMA_RS("f16");
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
        (void)da;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 32; ++i)
        out[(size_t)blockIdx.x * M * N + frag_row(i) * N + frag_col(i)] = d[i];
}

// ---- host ----

template <bool BF16> static double value(uint16_t v)
{
    if (BF16) {
        uint32_t u = (uint32_t)v << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    double x = v & 0x7C00 ? ldexp(1024 + (v & 1023), (v >> 10 & 31) - 25) : ldexp(v & 1023, -24);
    return v & 0x8000 ? -x : x;
}

// Random sign and mantissa, exponents over 16 (FP16) or 40 (BF16) powers of two.
template <bool BF16> static std::vector<uint16_t> random_operand(uint64_t seed, size_t n)
{
    std::vector<uint16_t> v(n);
    for (size_t i = 0; i < n; ++i) {
        uint64_t h = mix64(seed << 40 ^ i);
        uint32_t e = (uint32_t)(h >> 32);
        v[i] = BF16 ? (uint16_t)((h & 0x807F) | (127 - 20 + e % 40) << 7)
                    : (uint16_t)((h & 0x83FF) | (15 - 8 + e % 16) << 10);
    }
    return v;
}

using Kernel = void (*)(const uint16_t *, const uint16_t *, float *);

static std::vector<float> run(Kernel k, const std::vector<uint16_t> &a,
                              const std::vector<uint16_t> &b)
{
    uint16_t *da = device_copy(a), *db = device_copy(b);
    float *out = device_alloc<float>(ELEMENTS);
    k<<<PRODUCTS, 128>>>(da, db, out);
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
    std::vector<float> v = host_copy(out, ELEMENTS);
    CK(cudaFree(da));
    CK(cudaFree(db));
    CK(cudaFree(out));
    return v;
}

struct Reference {
    std::vector<double> sum,
        magnitude; // of product 0 .. 7: the sum and the sum of absolute products
};

template <bool BF16>
static Reference reference(const std::vector<uint16_t> &a, const std::vector<uint16_t> &b)
{
    Reference r;
    for (int p = 0; p < 8; ++p)
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) {
                double s = 0, t = 0;
                for (int k = 0; k < K; ++k) {
                    double v = value<BF16>(a[(size_t)(p * M + m) * K + k]) *
                               value<BF16>(b[(size_t)(p * N + n) * K + k]);
                    s += v;
                    t += fabs(v);
                }
                r.sum.push_back(s);
                r.magnitude.push_back(t);
            }
    return r;
}

// Largest error as a share of the sum of absolute products.
static double worst(const std::vector<float> &v, const Reference &r)
{
    double w = 0;
    for (size_t i = 0; i < r.sum.size(); ++i) {
        double e = fabs(v[i] - r.sum[i]) / r.magnitude[i];
        if (!(e <= w)) w = e; // NaN stays
    }
    return w;
}

static void compare(const char *type, const char *what, const std::vector<float> &want,
                    const std::vector<float> &got, const Reference &ref, bool must)
{
    int differ = 0;
    double largest = 0;
    for (int i = 0; i < ELEMENTS; ++i)
        if (memcmp(&want[i], &got[i], 4)) {
            ++differ;
            largest = std::max(largest, fabs((double)want[i] - got[i]) /
                                            std::max(1e-300, (double)fabs(want[i])));
        }
    double err = worst(got, ref);
    printf("%-5s %-46s %9d of %d %11.3g %11.3g\n", type, what, differ, ELEMENTS, largest, err);
    expect(err < 1e-5, "%s %s: error %g of the sum of absolute products", type, what, err);
    if (must) expect(!differ, "%s %s: %d elements differ", type, what, differ);
}

// Rows of A and of B in another order; the result is put back in order.
static std::vector<float> permuted(Kernel k, const std::vector<uint16_t> &a,
                                   const std::vector<uint16_t> &b)
{
    std::vector<uint16_t> pa(a.size()), pb(b.size());
    auto at = [](int p, int i) {
        return (i * 37 + p * 11 + 5) % 64;
    }; // 37 is odd: a permutation of 64
    for (int p = 0; p < PRODUCTS; ++p)
        for (int i = 0; i < 64; ++i) {
            memcpy(&pa[(size_t)(p * M + at(p, i)) * K], &a[(size_t)(p * M + i) * K], K * 2);
            memcpy(&pb[(size_t)(p * N + at(p + 7, i)) * K], &b[(size_t)(p * N + i) * K], K * 2);
        }
    std::vector<float> r = run(k, pa, pb), v(r.size());
    for (int p = 0; p < PRODUCTS; ++p)
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n)
                v[(size_t)(p * M + m) * N + n] = r[(size_t)(p * M + at(p, m)) * N + at(p + 7, n)];
    return v;
}

template <bool BF16> static void test(const char *type)
{
    std::vector<uint16_t> a = random_operand<BF16>(1, (size_t)PRODUCTS * M * K);
    std::vector<uint16_t> b = random_operand<BF16>(2, (size_t)PRODUCTS * N * K);
    Reference ref = reference<BF16>(a, b);
    Kernel mma_k = by_mma<BF16, false>, rs = by_wgmma<BF16, false, false>,
           ss = by_wgmma<BF16, true, false>;
    std::vector<float> base = run(mma_k, a, b), r = run(rs, a, b);
    double err = worst(base, ref);
    expect(err < 1e-5, "%s mma.sync: error %g", type, err);
    printf("%-5s %-46s %26s %11s %11.3g\n", type, "mma.sync against float64", "", "", err);
    if (!(worst(r, ref) < 1e-5)) {
        printf("%-5s descriptor: lead and stride exchanged\n", type);
        rs = by_wgmma<BF16, false, true>;
        ss = by_wgmma<BF16, true, true>;
        r = run(rs, a, b);
    }
    std::vector<float> s = run(ss, a, b);
    compare(type, "wgmma, A in registers, against mma.sync", base, r, ref, false);
    compare(type, "wgmma, A in shared memory, against mma.sync", base, s, ref, false);
    compare(type, "wgmma, A in registers against shared memory", r, s, ref, false);
    compare(type, "mma.sync, k permuted inside 16", base, run(by_mma<BF16, true>, a, b), ref,
            false);
    compare(type, "mma.sync, rows and columns permuted", base, permuted(mma_k, a, b), ref, true);
    compare(type, "wgmma, rows and columns permuted", r, permuted(rs, a, b), ref, true);
}

int main()
{
    lab_start("mma_bits", false);
    printf("%-5s %-46s %26s %11s %11s\n", "type", "what", "elements that differ", "largest rel",
           "error");
    test<false>("f16");
    test<true>("bf16");
    return lab_exit();
}
