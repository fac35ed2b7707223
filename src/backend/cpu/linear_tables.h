/* Constant tables that unpack weights to BF16. Callers: linear_unpack.h. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* bf16 of e2m1(code) * e4m3(scale), exact (six significant bits): [scale byte][code]. A NaN scale
 * gives NaN for every code. 8 KB, of which a model touches a few hundred bytes at a time. */
extern const uint16_t nbi_lin_nvfp4_bf16[256][16];

/* bf16 of e4m3(byte), exact, for bytes 0..127: high and low byte of the value. */
extern const uint8_t nbi_lin_e4m3_high[128];
extern const uint8_t nbi_lin_e4m3_low[128];

#ifdef __cplusplus
}
#endif
