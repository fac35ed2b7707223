/* Rotary frequencies, plain and YaRN. Used once, when a model opens. */
#include <math.h>

#include "model/layer.h"

#define TWO_PI 6.283185307179586

/* Dimension at which `rotations` full turns happen over the original context (YaRN's correction
 * dimension). */
static double correction_dim(const nbi_rope_config *r, double rotations)
{
    return r->dim * log(r->original_max_positions / (rotations * TWO_PI)) / (2.0 * log(r->theta));
}

void nbi_rope_inv_freq(const nbi_rope_config *r, float *out)
{
    double low = 0, high = 1;
    if (r->yarn) {
        low = correction_dim(r, r->beta_fast);
        high = correction_dim(r, r->beta_slow);
        if (r->truncate) {
            low = floor(low);
            high = ceil(high);
        }
        low = fmax(low, 0.0);
        high = fmin(high, r->dim - 1.0);
        if (low == high) high += 0.001;
    }
    for (uint32_t i = 0; i < r->dim / 2; i++) {
        double plain = pow(r->theta, -2.0 * i / r->dim);
        if (!r->yarn) {
            out[i] = (float)plain;
            continue;
        }
        double ramp = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
        out[i] = (float)(plain / r->factor * ramp + plain * (1.0 - ramp));
    }
}
