/* Tables of linear_tables.h, built by the preprocessor from the definition of the formats.
 * A value is P * 2^E with an integer P < 256; its bf16 has P's leading bit moved to place 7. */
#include "backend/cpu/linear_tables.h"

/* floor(log2 p), 0 < p < 256 */
#define LOG2(p)      \
    ((p) >= 128  ? 7 \
     : (p) >= 64 ? 6 \
     : (p) >= 32 ? 5 \
     : (p) >= 16 ? 4 \
     : (p) >= 8  ? 3 \
     : (p) >= 4  ? 2 \
     : (p) >= 2  ? 1 \
                 : 0)
#define BF16(p, e) ((p) == 0 ? 0 : (127 + (e) + LOG2(p)) << 7 | ((p) << (7 - LOG2(p)) & 0x7f))

/* e4m3 = M * 2^(X - 10), e2m1 = W * 2^-1, signs apart */
#define E4M3_M(s) (((s) >> 3 & 15) ? 8 + ((s)&7) : ((s)&7))
#define E4M3_X(s) (((s) >> 3 & 15) ? ((s) >> 3 & 15) : 1)
#define E2M1_W(c) \
    (((c)&7) < 4 ? ((c)&7) : ((c)&7) == 4 ? 4 : ((c)&7) == 5 ? 6 : ((c)&7) == 6 ? 8 : 12)
#define E4M3_NAN(s) (((s)&0x7f) == 0x7f)
#define SIGN(s, c)  ((((s) >> 7) ^ ((c) >> 3)) << 15)

#define PRODUCT(s, c) \
    (uint16_t)(E4M3_NAN(s) ? 0x7fc0 : SIGN(s, c) | BF16(E4M3_M(s) * E2M1_W(c), E4M3_X(s) - 11))
#define CODES(s)                                                                                  \
    {                                                                                             \
        PRODUCT(s, 0), PRODUCT(s, 1), PRODUCT(s, 2), PRODUCT(s, 3), PRODUCT(s, 4), PRODUCT(s, 5), \
            PRODUCT(s, 6), PRODUCT(s, 7), PRODUCT(s, 8), PRODUCT(s, 9), PRODUCT(s, 10),           \
            PRODUCT(s, 11), PRODUCT(s, 12), PRODUCT(s, 13), PRODUCT(s, 14), PRODUCT(s, 15)        \
    }
#define FOUR(f, s)    f(s), f(s + 1), f(s + 2), f(s + 3)
#define SIXTEEN(f, s) FOUR(f, s), FOUR(f, s + 4), FOUR(f, s + 8), FOUR(f, s + 12)
#define ALL128(f, s)                                                                               \
    SIXTEEN(f, s), SIXTEEN(f, s + 16), SIXTEEN(f, s + 32), SIXTEEN(f, s + 48), SIXTEEN(f, s + 64), \
        SIXTEEN(f, s + 80), SIXTEEN(f, s + 96), SIXTEEN(f, s + 112)

const uint16_t nbi_lin_nvfp4_bf16[256][16]
    __attribute__((aligned(64))) = {ALL128(CODES, (0)), ALL128(CODES, (128))};

#define E4M3_BF16(s) (E4M3_NAN(s) ? 0x7fc0 : BF16(E4M3_M(s), E4M3_X(s) - 10))
#define HIGH(s)      (uint8_t)(E4M3_BF16(s) >> 8)
#define LOW(s)       (uint8_t)(E4M3_BF16(s) & 0xff)

const uint8_t nbi_lin_e4m3_high[128] __attribute__((aligned(64))) = {ALL128(HIGH, (0))};
const uint8_t nbi_lin_e4m3_low[128] __attribute__((aligned(64))) = {ALL128(LOW, (0))};
