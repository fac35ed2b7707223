// One MoE layer at batch 1 in the shape of Qwen3-30B-A3B, router output given: two kernels in a
// graph, or one persistent kernel whose down projection waits for counters. A chain of 48 layers,
// each with its own experts, so that weights come from device memory. Both forms must give the same
// bits.
#include "fp4_check.h"
#include "moe.cuh"

static const Matrix m_gate = {11, GT, GC, INTER}, m_down = {12, DT, DC, 0};

// Output of a layer in float64 from the device's own input of it.
static double layer_error(const std::vector<float> &x, const std::vector<int> &ids,
                          const std::vector<float> &weights, const std::vector<float> &residual,
                          int layer)
{
    const float *in = &x[(size_t)layer * HIDDEN], *out = in + HIDDEN;
    std::vector<double> y(HIDDEN, 0.0);
    for (int e = 0; e < TOP; ++e) {
        int slot = ids[layer * TOP + e];
        std::vector<float> h(INTER);
        for (int i = 0; i < INTER; ++i) {
            double gate = oracle_row(m_gate, slot, i, in) * (double)GLOBAL_GATE;
            double up = oracle_row(m_gate, slot, INTER + i, in) * (double)GLOBAL_UP;
            h[i] = (float)(gate / (1 + exp(-gate)) * up);
        }
        for (int r = 0; r < HIDDEN; ++r)
            y[r] += weights[layer * TOP + e] *
                    (oracle_row(m_down, slot, r, h.data()) * (double)GLOBAL_DOWN);
    }
    double d = 0, s = 0;
    for (int r = 0; r < HIDDEN; ++r) {
        double v = out[r] - 0.5 * residual[r];
        d += (v - y[r]) * (v - y[r]);
        s += y[r] * y[r];
    }
    return sqrt(d / s);
}

int main()
{
    double rate = lab_start("moe_layer");
    check_packing();
    const int sms = sm_count(), experts = LAYERS * POOL;
    expect(sms >= DT && (G_TILES + sms - 1) / sms <= MAX_TILES,
           "%d SMs: this program needs 128 to 768", sms);
    if (lab_failures) return lab_exit();
    std::vector<int> ids(LAYERS * TOP);
    std::vector<float> weights(LAYERS * TOP), residual(HIDDEN), first(HIDDEN);
    for (int l = 0; l < LAYERS; ++l)
        for (int e = 0; e < TOP; ++e) { // 8 different ones of the layer's 16
            ids[l * TOP + e] = l * POOL + (int)((e * 7 + mix64((uint64_t)l) % 16) % POOL);
            weights[l * TOP + e] =
                0.05f + 0.15f * (float)(mix64((uint64_t)(l * TOP + e)) % 1000) / 1000;
        }
    for (int i = 0; i < HIDDEN; ++i) {
        residual[i] = normal_at(21, (uint64_t)i);
        first[i] = normal_at(22, (uint64_t)i);
    }
    size_t gate_bytes = packed_bytes(m_gate, experts), down_bytes = packed_bytes(m_down, experts);
    uint8_t *gate_up = device_alloc<uint8_t>(gate_bytes), *down = device_alloc<uint8_t>(down_bytes);
    pack(U_PERM, m_gate, experts, gate_up);
    pack(U_PERM, m_down, experts, down);
    const size_t n_x = (size_t)(LAYERS + 1) * HIDDEN;
    Layer a = {gate_up,
               down,
               device_copy(ids),
               device_copy(weights),
               device_copy(residual),
               device_alloc<float>(n_x),
               device_alloc<float>(TOP * INTER),
               device_alloc<unsigned>(N_COUNTERS * 32)};
    const size_t g_smem = (size_t)((G_TILES + sms - 1) / sms * GC) * UNIT,
                 d_smem = (size_t)D_UNITS * UNIT;
    const size_t p_smem = (size_t)SLOTS * UNIT;
    allow_smem(gate_up_kernel<true>, g_smem);
    allow_smem(gate_up_kernel<false>, g_smem);
    allow_smem(down_kernel, d_smem);

    auto pair = [&](bool early, bool pdl) {
        return [=](cudaStream_t s) {
            for (int l = 0; l < LAYERS; ++l) {
                auto k = early ? gate_up_kernel<true> : gate_up_kernel<false>;
                launch(k, sms, THREADS, g_smem, pdl && l > 0, s, a, l);
                launch(down_kernel, DT, D_WARPS * 32, d_smem, pdl, s, a, l);
            }
        };
    };
    auto persistent = [&](void (*k)(Layer)) {
        allow_smem(k, p_smem);
        return [=](cudaStream_t s) {
            Layer arg = a;
            void *args[] = {&arg};
            CK(cudaMemsetAsync(a.counters, 0, N_COUNTERS * 32 * 4, s));
            CK(cudaLaunchCooperativeKernel((const void *)k, dim3((unsigned)sms), dim3(THREADS + 32),
                                           args, p_smem, s));
        };
    };
    const double bytes = (double)(gate_bytes + down_bytes) / POOL * TOP / LAYERS;
    printf("%.1f MB a layer, floor %.2f us\n", bytes / 1e6, bytes / rate);
    printf("%-44s %10s %7s %9s bits\n", "form", "us/layer", "share", "error");
    std::vector<float> want;
    auto test = [&](const char *name, std::function<void(cudaStream_t)> body, bool graph) {
        CK(cudaMemset(a.x, 0xFF, n_x * 4));
        CK(cudaMemset(a.h, 0xFF, TOP * INTER * 4));
        CK(cudaMemcpy(a.x, first.data(), HIDDEN * 4, cudaMemcpyHostToDevice));
        CK(cudaDeviceSynchronize());
        cudaGraphExec_t g = graph ? capture(body) : nullptr;
        auto once = [&](cudaStream_t s) {
            if (graph)
                CK(cudaGraphLaunch(g, s));
            else
                body(s);
        };
        once(lab_stream());
        CK(cudaStreamSynchronize(lab_stream()));
        std::vector<float> got = host_copy(a.x, n_x);
        double err = 0;
        if (want.empty()) {
            want = got;
            for (int l : {0, 1, LAYERS / 2, LAYERS - 1}) {
                double e = layer_error(got, ids, weights, residual, l);
                expect(e < 2e-3, "layer %d: error %g against float64", l, e);
                err = std::max(err, e);
            }
        }
        double us = time_us(once) / LAYERS;
        std::vector<float> again = host_copy(a.x, n_x); // of the last of the timed runs
        bool same =
            !memcmp(want.data(), got.data(), n_x * 4) && !memcmp(got.data(), again.data(), n_x * 4);
        expect(same, "%s: other bits than the first form, or other ones the second time", name);
        printf("%-44s %10.2f %6.1f%% %9.2e %s\n", name, us, 100 * bytes / rate / us, err,
               same ? "same" : "DIFFER");
        if (g) CK(cudaGraphExecDestroy(g));
    };
    test("two kernels, graph", pair(false, false), true);
    test("two kernels, PDL, known late", pair(false, true), true);
    test("two kernels, PDL, known early", pair(true, true), true);
    test("persistent, one counter, known late", persistent(persistent_kernel<false, false>), false);
    test("persistent, counter per chunk, known late", persistent(persistent_kernel<false, true>),
         false);
    test("persistent, one counter, known early", persistent(persistent_kernel<true, false>), false);
    test("persistent, counter per chunk, known early", persistent(persistent_kernel<true, true>),
         false);
    return lab_exit();
}
