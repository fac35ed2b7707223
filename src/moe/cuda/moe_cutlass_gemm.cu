/* The products of moe_cutlass.h by CUTLASS: its grouped product of 2.x, mma.sync with float32 sums,
 * which runs on 8.0 and all later devices and compiles in seconds. The sizes are read on the
 * device, so that steps can be recorded. The emulated build has a plain product in its place, which
 * tests what is around it. */
#include "moe/cuda/moe_cutlass.h"

#if NBI_EMULATED

#define THREADS 64u

template <nbi_weight_kind KIND> static float value(const void *from, size_t i)
{
    const uint16_t bits = static_cast<const uint16_t *>(from)[i];
    return KIND == NBI_WEIGHT_BF16 ? nbi_from_bf16(bits) : nbi_from_f16(bits);
}

template <nbi_weight_kind KIND> static __global__ void product_kernel(const nbi_moe_problems p)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t i = blockIdx.x;
    const int32_t m = p.size[3 * i], n = p.size[3 * i + 1], k = p.size[3 * i + 2];
    for (int32_t at = (int32_t)threadIdx.x; at < m * n; at += (int32_t)THREADS) {
        const size_t row = (size_t)(at / n) * k, weights = (size_t)(at % n) * k;
        float sum = 0;
        for (int32_t c = 0; c < k; c++)
            sum += value<KIND>(p.a[i], row + c) * value<KIND>(p.b[i], weights + c);
        p.d[i][at] = sum;
    }
}

void nbi_moe_cutlass_product(nbi_cuda *c, const nbi_moe_problems &p, uint32_t n_problems, bool bf16,
                             bool few)
{
    (void)few;
    if (bf16)
        nbi_launch(&c->rt, dim3(n_problems), dim3(THREADS), 0, product_kernel<NBI_WEIGHT_BF16>, p);
    else
        nbi_launch(&c->rt, dim3(n_problems), dim3(THREADS), 0, product_kernel<NBI_WEIGHT_F16>, p);
}

#else

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm_grouped.h>

using namespace cutlass;

/* Tiles of M rows; every size has tiles of 32 columns of k, whose first is the short one where k is
 * no multiple: then the steps of 16 are the same ones, and so the bits. */
template <class T, int M, int WARP, int STAGES>
using product = typename gemm::kernel::DefaultGemmGrouped<
    T, layout::RowMajor, ComplexTransform::kNone, 8, T, layout::ColumnMajor,
    ComplexTransform::kNone, 8, float, layout::RowMajor, float, arch::OpClassTensorOp, arch::Sm80,
    gemm::GemmShape<M, 128, 32>, gemm::GemmShape<WARP, WARP, 32>, gemm::GemmShape<16, 8, 16>,
    epilogue::thread::LinearCombination<float, 4, float, float,
                                        epilogue::thread::ScaleType::Nothing>,
    gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, STAGES,
    gemm::kernel::GroupScheduleMode::kDeviceOnly>::GemmKernel;

template <class P, uint32_t BLOCKS>
static __global__ void __launch_bounds__(P::kThreadCount, BLOCKS)
    product_kernel(const typename P::Params params)
{
    nbi_wait_before();
    nbi_let_next();
    P run;
    run(params, *nbi_shared<typename P::SharedStorage>());
}

/* BLOCKS of a multiprocessor at once take tiles in turn. */
template <class P, uint32_t BLOCKS>
static void launch(nbi_cuda *c, const nbi_moe_problems &p, uint32_t n_problems)
{
    static_assert(sizeof(gemm::GemmCoord) == 3 * sizeof(int32_t), "how sizes lie");
    const uint32_t blocks = BLOCKS * (uint32_t)c->rt.n_sms;
    typename P::Arguments a = {};
    a.problem_sizes = reinterpret_cast<gemm::GemmCoord *>(p.size);
    a.problem_count = (int)n_problems;
    a.threadblock_count = (int)blocks;
    a.ptr_A = reinterpret_cast<typename P::ElementA **>(p.a);
    a.ptr_B = reinterpret_cast<typename P::ElementB **>(p.b);
    a.ptr_C = a.ptr_D = p.d; /* the first is not read */
    a.lda = a.ldb = p.k;
    a.ldc = a.ldd = p.n;
    const typename P::Params params(a);
    nbi_launch(&c->rt, dim3(blocks), dim3(P::kThreadCount), sizeof(typename P::SharedStorage),
               product_kernel<P, BLOCKS>, params);
}

template <class T>
static void launch_of(nbi_cuda *c, const nbi_moe_problems &p, uint32_t n_problems, bool few)
{
    if (few)
        launch<product<T, 32, 32, 4>, 3>(c, p, n_problems);
    else
        launch<product<T, 128, 64, 4>, 2>(c, p, n_problems);
}

void nbi_moe_cutlass_product(nbi_cuda *c, const nbi_moe_problems &p, uint32_t n_problems, bool bf16,
                             bool few)
{
    if (bf16)
        launch_of<bfloat16_t>(c, p, n_problems, few);
    else
        launch_of<half_t>(c, p, n_problems, few);
}

#endif
