// NVFP4 matrix times 1 to 16 vectors, weights from device memory: which unpacking, which loads, how
// many in flight. Every mma variant must give the same bits. See README.md for the question and
// prediction.
#include "fp4_check.h"
#include "gemv.cuh"

constexpr uint64_t SEED = 7;
static double stream; // bytes per microsecond

// The naive form: checkpoint order, one warp per row, half2 arithmetic. codes [expert][row][k/2],
// scales [expert][row][k/16]. A block has rows of one expert; x_stride 0: all experts share x.
__global__ void __launch_bounds__(512)
    gemv_row(const uint4 *codes, const uint16_t *scales, const float *x, int x_stride, int experts,
             int rows, int K, float global, float *y)
{
    extern __shared__ __align__(128) uint8_t smem[];
    __half *xs = (__half *)smem, *xp = xs + K; // natural, then in pairs (k, k + 4) within eights
    float *pow2 = (float *)(xp + K);
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int e = blockIdx.x % experts, blocks = gridDim.x / experts;
    x += (size_t)e * x_stride;
    codes += (size_t)e * rows * (K / 32);
    scales += (size_t)e * rows * (K / 32);
    for (int c = warp; c < K / CHUNK; c += warps) {
        float p = normalize_chunk(x + c * CHUNK, xs + c * CHUNK);
        if (lane == 0) pow2[c] = p;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < K; k += blockDim.x) xp[k / 8 * 8 + k % 4 * 2 + k / 4 % 2] = xs[k];
    __syncthreads();
    for (int row = blockIdx.x / experts * warps + warp; row < rows; row += blocks * warps) {
        float sum = 0;
        for (int i = lane; i < K / 32; i += 32) { // 32 weights a lane: two scale groups
            uint4 c = ld_stream(codes + (size_t)row * (K / 32) + i);
            uint32_t s = scales[(size_t)row * (K / 32) + i], w[4] = {c.x, c.y, c.z, c.w};
            const uint4 *px = (const uint4 *)(xp + i * 32);
            float p = pow2[i / 8];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                __half2 acc = as_half2(0);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    uint32_t a[4];
                    uint4 b = px[h * 2 + j];
                    unpack_fp16<U_NIB>(w[h * 2 + j], a);
                    acc = __hfma2(as_half2(a[0]), as_half2(b.x), acc);
                    acc = __hfma2(as_half2(a[1]), as_half2(b.y), acc);
                    acc = __hfma2(as_half2(a[2]), as_half2(b.z), acc);
                    acc = __hfma2(as_half2(a[3]), as_half2(b.w), acc);
                }
                float2 f = __half22float2(acc);
                __half_raw sr = {(unsigned short)((s >> (8 * h) & 0xFF) << 7)};
                sum = fmaf((f.x + f.y) * p, __half2float(__half(sr)), sum);
            }
        }
        for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, o);
        if (lane == 0)
            y[(size_t)e * rows + row] =
                sum * (global * 4194304.0f); // 2^14 of the codes, 2^8 of the scales
    }
}

// Natural order, as in a checkpoint.
__global__ void fill_rows(Matrix m, int rows_per_expert, size_t rows, int K, uint32_t *codes,
                          uint8_t *scales)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < rows * (size_t)(K / 8);
         i += (size_t)gridDim.x * blockDim.x) {
        size_t row = i / (K / 8);
        int k8 = (int)(i % (K / 8)), e = (int)(row / rows_per_expert),
            r = (int)(row % rows_per_expert);
        codes[i] = codes_at(m, e, r, k8);
        if (k8 % 2 == 0) scales[row * (K / 16) + k8 / 2] = (uint8_t)scale_at(m, e, r, k8 / 2);
    }
}

// One matrix shape: its pool of weights (at least 200 MB) and what the variants share.
template <int C, int TPE> struct Bench {
    static constexpr int K = C * CHUNK, ROWS = 16 * TPE, MAXN = 16;
    const char *name;
    int experts, sets, mode = -1;
    bool shared_x;
    Matrix m;
    size_t set_bytes;
    uint8_t *w;
    std::vector<float> hx;
    float *x, *y;
    const float global = 0.037f;
    std::vector<float> want[2][MAXN + 1]; // bits of the first variant, by scale placement and n

    Bench(const char *what, int n_experts, bool share)
        : name(what), experts(n_experts), shared_x(share)
    {
        m = {SEED, TPE, C, 0};
        set_bytes = packed_bytes(m, experts);
        sets = (int)(((size_t)240 << 20) / set_bytes + 1);
        w = device_alloc<uint8_t>(set_bytes * (size_t)sets);
        hx.resize((size_t)experts * MAXN * K);
        for (size_t i = 0; i < hx.size(); ++i) // magnitudes differ from chunk to chunk
            hx[i] = normal_at(3, i) * ldexpf(1, (int)(mix64(i / CHUNK) % 9) - 4);
        x = device_alloc<float>(hx.size());
        y = device_alloc<float>((size_t)experts * MAXN * ROWS);
    }
    ~Bench()
    {
        cudaFree(w);
        cudaFree(x);
        cudaFree(y);
    }

    const float *row_of_x(int e, int n) const
    {
        return &hx[((size_t)(shared_x ? 0 : e) * MAXN + (size_t)n) * K];
    }

    // Device copy of the first n rows of every expert.
    void upload(int n)
    {
        std::vector<float> v;
        for (int e = 0; e < (shared_x ? 1 : experts); ++e)
            v.insert(v.end(), row_of_x(e, 0), row_of_x(e, 0) + (size_t)n * K);
        CK(cudaMemcpy(x, v.data(), v.size() * 4, cudaMemcpyHostToDevice));
    }

    void poison()
    {
        CK(cudaMemset(y, 0xFF, (size_t)experts * MAXN * ROWS * 4));
        CK(cudaDeviceSynchronize());
    }

    // Relative norm error of a sample of rows, weights of set 0.
    double error(const std::vector<float> &got, int n)
    {
        double d = 0, s = 0;
        for (int e = 0; e < experts; ++e)
            for (int r = e % 5; r<ROWS; r += ROWS> 4096 ? 61 : 13)
                for (int j = 0; j < n; ++j) {
                    double o = oracle_row(m, e, r, row_of_x(e, j)) * global;
                    double v = got[((size_t)e * n + j) * ROWS + r];
                    d += (v - o) * (v - o);
                    s += o * o;
                }
        return sqrt(d / s);
    }

    void report(const char *what, const char *how, int n, double us, double err, const char *bits)
    {
        double rate = (double)set_bytes / us;
        printf("%-9s %-24s %-22s %3d %8.2f %7.0f %5.1f%% %9.2e %s\n", name, what, how, n, us,
               rate / 1e3, 100 * rate / stream, err, bits);
    }

    template <int U, bool AFTER, int NT, int LOAD, int D>
    void run(int warps, bool persistent, int n, bool pdl = false)
    {
        auto kernel = gemv<U, AFTER, NT, C, TPE, LOAD, D>;
        int packed_as = U == U_RAW ? U_PERM : U, tiles = experts * TPE;
        if (mode != packed_as) pack(mode = packed_as, m, experts * sets, w);
        upload(n);
        int grid = persistent ? sm_count() : tiles;
        GemvSmem lay = gemv_smem<NT, C, TPE>(LOAD, D, warps, grid, tiles, n, shared_x);
        char what[64], how[64];
        snprintf(what, sizeof what, "%s%s", unpack_name[U],
                 U == U_RAW ? ""
                 : AFTER    ? ", after"
                            : ", before");
        snprintf(how, sizeof how, "%s%s %d x%d %s", load_name[LOAD], pdl ? "+pdl" : "", D, warps,
                 persistent ? "pers" : "tile");
        if (lay.total > 227 * 1024) {
            printf("%-9s %-24s %-22s %3d does not fit in shared memory\n", name, what, how, n);
            return;
        }
        allow_smem(kernel, lay.total);
        GemvArgs a = {w, {}, tiles, n, x, shared_x ? 0 : (size_t)n * K, y, global};
        auto call = [&](int set, cudaStream_t s, bool after_another) {
            for (int e = 0; e < experts; ++e) a.pick[e] = set * experts + e;
            launch(kernel, grid, warps * 32, lay.total, pdl && after_another, s, a, lay);
        };
        poison();
        call(0, lab_stream(), false);
        CK(cudaStreamSynchronize(lab_stream()));
        std::vector<float> got = host_copy(y, (size_t)experts * n * ROWS);
        double err = 0;
        const char *bits = "-";
        if (U != U_RAW) {
            err = error(got, n);
            expect(err < 1e-3, "%s %s %s n=%d: error %g against float64", name, what, how, n, err);
            auto &ref = want[AFTER][n];
            if (ref.empty()) ref = got;
            bool same = !memcmp(ref.data(), got.data(), got.size() * 4);
            auto &one = want[AFTER][1];
            for (int e = 0; e < experts && !one.empty(); ++e)
                same =
                    same && !memcmp(&one[(size_t)e * ROWS], &got[(size_t)e * n * ROWS], ROWS * 4);
            expect(same, "%s %s %s n=%d: other bits than the first variant", name, what, how, n);
            bits = same ? "same" : "DIFFER";
        }
        cudaGraphExec_t graph = capture([&](cudaStream_t s) {
            for (int i = 0; i < 2 * sets; ++i) call(i % sets, s, i > 0);
        });
        report(what, how, n, time_graph_us(graph) / (2 * sets), err, bits);
        CK(cudaGraphExecDestroy(graph));
    }

    void run_rows()
    {
        size_t rows = (size_t)experts * ROWS * sets;
        uint32_t *codes = device_alloc<uint32_t>(rows * (K / 8));
        uint8_t *scales = device_alloc<uint8_t>(rows * (K / 16));
        fill_rows<<<sm_count() * 4, 512>>>(m, ROWS, rows, K, codes, scales);
        CK(cudaDeviceSynchronize());
        upload(1);
        poison();
        int per_set = experts * ROWS, smem = K * 4 + C * 4;
        auto call = [&](int set, cudaStream_t s) {
            launch(gemv_row, sm_count() * 4 / experts * experts, 512, (size_t)smem, false, s,
                   (const uint4 *)(codes + (size_t)set * per_set * (K / 8)),
                   (const uint16_t *)(scales + (size_t)set * per_set * (K / 16)), (const float *)x,
                   shared_x ? 0 : (int)K, experts, (int)ROWS, (int)K, global, y);
        };
        call(0, lab_stream());
        CK(cudaStreamSynchronize(lab_stream()));
        double err = error(host_copy(y, (size_t)per_set), 1);
        expect(err < 2e-3, "%s one warp per row: error %g against float64", name, err);
        cudaGraphExec_t g = capture([&](cudaStream_t s) {
            for (int i = 0; i < 2 * sets; ++i) call(i % sets, s);
        });
        report("one warp per row", "ld.global x16", 1, time_graph_us(g) / (2 * sets), err, "-");
        CK(cudaGraphExecDestroy(g));
        CK(cudaFree(codes));
        CK(cudaFree(scales));
    }
};

// Every unpacking and scale placement, one way of loading.
template <class B> static void unpacking(B &b)
{
    b.template run<U_NIB, false, 1, L_REG, 4>(16, true, 1);
    b.template run<U_NIB, true, 1, L_REG, 4>(16, true, 1);
    b.template run<U_RAW, false, 1, L_REG, 4>(16, true, 1);
    b.template run<U_E4M3, true, 1, L_REG, 4>(16, true, 1);
    b.template run<U_E4M3, false, 1, L_REG, 4>(16, true, 1);
    b.template run<U_PERM, true, 1, L_REG, 4>(16, true, 1);
    b.template run<U_PERM, false, 1, L_REG, 4>(16, true, 1);
}

// Every way of loading, permuted codes, scale before.
template <class B> static void loading(B &b)
{
    for (int persistent = 1; persistent >= 0; --persistent)
        for (int warps = 4; warps <= 16; warps *= 2) {
            b.template run<U_PERM, false, 1, L_REG, 2>(warps, persistent, 1);
            b.template run<U_PERM, false, 1, L_REG, 4>(warps, persistent, 1);
            if (warps <= 8) b.template run<U_PERM, false, 1, L_REG, 8>(warps, persistent, 1);
            if (!persistent) continue;
            b.template run<U_PERM, false, 1, L_CPASYNC, 3>(warps, true, 1);
            b.template run<U_PERM, false, 1, L_BULK, 3>(warps, true, 1);
            b.template run<U_PERM, false, 1, L_BULK, 6>(warps, true, 1);
        }
}

template <class B> static void tokens(B &b)
{
    for (int pdl = 0; pdl < 2; ++pdl)
        for (int n = 1; n <= 8; n *= 2) {
            b.template run<U_PERM, false, 1, L_REG, 4>(16, true, n, pdl);
            b.template run<U_PERM, false, 1, L_BULK, 3>(16, true, n, pdl);
        }
    b.template run<U_PERM, false, 2, L_REG, 4>(16, true, 16);
    b.template run<U_PERM, true, 2, L_REG, 4>(16, true, 16);
    b.template run<U_PERM, false, 2, L_BULK, 3>(16, true, 16);
}

int main()
{
    stream = lab_start("fp4_gemv");
    check_packing();
    printf("%-9s %-24s %-22s %3s %8s %7s %6s %9s bits\n", "matrix", "unpacking, scale",
           "loads, depth, warps", "n", "us", "GB/s", "share", "error");
    {
        Bench<8, 96> b("gate/up", 8, true);
        b.run_rows();
        unpacking(b);
        loading(b);
        tokens(b);
    }
    {
        Bench<3, 128> b("down", 8, false);
        b.run_rows();
        b.run<U_E4M3, false, 1, L_REG, 4>(16, true, 1);
        b.run<U_PERM, true, 1, L_REG, 4>(16, true, 1);
        for (int warps = 8; warps <= 16; warps += 4)
            b.run<U_PERM, false, 1, L_REG, 2>(warps, true, 1);
        for (int warps = 8; warps <= 16; warps += 4)
            b.run<U_PERM, false, 1, L_REG, 4>(warps, true, 1);
        for (int warps = 8; warps <= 16; warps += 4)
            b.run<U_PERM, false, 1, L_BULK, 3>(warps, true, 1);
        tokens(b);
    }
    {
        Bench<8, 2048> b("32768x2k", 1, true);
        b.run_rows();
        unpacking(b);
        b.run<U_PERM, false, 1, L_CPASYNC, 3>(16, true, 1);
        b.run<U_PERM, false, 1, L_BULK, 6>(8, true, 1);
        tokens(b);
    }
    return lab_exit();
}
