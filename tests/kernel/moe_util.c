#include "moe_util.h"

void moe_make(moe_layer *l, nbi_weight_kind gate_up, nbi_weight_kind down, uint32_t n_experts,
              uint32_t top_k, uint32_t hidden, uint32_t inter, bool w4a4)
{
    l->gate = calloc(n_experts, sizeof *l->gate);
    l->up = calloc(n_experts, sizeof *l->up);
    l->down = calloc(n_experts, sizeof *l->down);
    l->views = calloc(3 * (size_t)n_experts, sizeof *l->views);
    for (uint32_t i = 0; i < n_experts; i++) {
        mat_make(&l->gate[i], gate_up, inter, hidden, i % 2);
        mat_make(&l->up[i], gate_up, inter, hidden, i % 3 == 0);
        mat_make(&l->down[i], down, hidden, inter, i % 2);
        l->gate[i].m.input_scale = op_uniform(0.001f, 0.002f);
        l->up[i].m.input_scale = op_uniform(0.001f, 0.002f);
        l->down[i].m.input_scale = op_uniform(0.001f, 0.002f);
        l->views[i] = l->gate[i].m;
        l->views[n_experts + i] = l->up[i].m;
        l->views[2 * n_experts + i] = l->down[i].m;
    }
    l->e = (nbi_moe_experts){.shape = {.n_experts = n_experts,
                                       .top_k = top_k,
                                       .hidden = hidden,
                                       .inter = inter,
                                       .kind_gate_up = gate_up,
                                       .kind_down = down,
                                       .w4a4 = w4a4},
                             .gate = l->views,
                             .up = l->views + n_experts,
                             .down = l->views + 2 * n_experts};
}

void moe_share_last(moe_layer *l)
{
    l->e.shape.n_experts--;
    l->e.shape.n_shared = 1;
}

void moe_free(moe_layer *l)
{
    for (uint32_t i = 0; i < nbi_moe_n_all(&l->e.shape); i++) {
        mat_free(&l->gate[i]);
        mat_free(&l->up[i]);
        mat_free(&l->down[i]);
    }
    free(l->gate);
    free(l->up);
    free(l->down);
    free(l->views);
}

void moe_routing(const moe_layer *l, int32_t *ids, float *weights, uint32_t n)
{
    const uint32_t k = l->e.shape.top_k;
    for (uint32_t t = 0; t < n; t++) {
        for (uint32_t i = 0; i < k; i++) {
            int32_t id;
            bool seen;
            do { /* distinct, as a router gives them; one in eight is missing */
                id = (int32_t)op_below(l->e.shape.n_experts);
                seen = false;
                for (uint32_t j = 0; j < i; j++) seen |= ids[t * k + j] == id;
            } while (seen);
            ids[t * k + i] = op_below(8) == 0 ? -1 : id;
            weights[t * k + i] = op_uniform(0.05f, 1);
        }
    }
}

/* out[hidden] of one row in double; NVFP4 activations rounded in float32 as the format does. */
void moe_oracle_row(const moe_layer *l, const float *x, const int32_t *ids, const float *weights,
                    double *out)
{
    const nbi_moe_shape *s = &l->e.shape;
    float *xr = malloc(s->hidden * sizeof *xr), *h = malloc(s->inter * sizeof *h);
    double *g = malloc(s->inter * sizeof *g), *u = malloc(s->inter * sizeof *u);
    double *y = malloc(s->hidden * sizeof *y);
    memset(out, 0, s->hidden * sizeof *out);
    for (uint32_t i = 0; i < nbi_moe_n_slots(s); i++) {
        const int32_t e = i < s->top_k ? ids[i] : (int32_t)s->n_experts;
        const double weight = i < s->top_k ? (double)weights[i] : 1;
        if (e < 0) continue;
        const nbi_matrix *gate = &l->e.gate[e], *up = &l->e.up[e], *down = &l->e.down[e];
        memcpy(xr, x, s->hidden * sizeof *xr);
        if (s->w4a4)
            nbi_nvfp4_round_row(
                x, s->hidden,
                gate->input_scale > up->input_scale ? gate->input_scale : up->input_scale, xr);
        mat_product(g, NULL, gate, xr, 1, s->hidden);
        mat_product(u, NULL, up, xr, 1, s->hidden);
        for (uint32_t j = 0; j < s->inter; j++) h[j] = (float)(g[j] / (1 + exp(-g[j])) * u[j]);
        if (s->w4a4) nbi_nvfp4_round_row(h, s->inter, down->input_scale, h);
        mat_product(y, NULL, down, h, 1, s->inter);
        for (uint32_t c = 0; c < s->hidden; c++) out[c] += weight * y[c];
    }
    free(xr);
    free(h);
    free(g);
    free(u);
    free(y);
}

void moe_same_bits(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        if (nbi_f32_bits(a[i]) == nbi_f32_bits(b[i])) continue;
        print_error("%s: value %zu is %a, expected %a\n", what, i, (double)a[i], (double)b[i]);
        fail();
    }
}
