/* Element types of tensors, as safetensors names them. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* enum suffix, safetensors name, bits */
#define NBI_DTYPE_LIST(X)    \
    X(F32, "F32", 32)        \
    X(F16, "F16", 16)        \
    X(BF16, "BF16", 16)      \
    X(F8_E4M3, "F8_E4M3", 8) \
    X(F8_E5M2, "F8_E5M2", 8) \
    X(F8_E8M0, "F8_E8M0", 8) \
    X(F4, "F4", 4)           \
    X(U8, "U8", 8)           \
    X(I8, "I8", 8)           \
    X(U16, "U16", 16)        \
    X(I16, "I16", 16)        \
    X(U32, "U32", 32)        \
    X(I32, "I32", 32)        \
    X(U64, "U64", 64)        \
    X(I64, "I64", 64)        \
    X(F64, "F64", 64)        \
    X(BOOL, "BOOL", 8)

typedef enum nbi_dtype {
#define X(suffix, name, bits) NBI_##suffix,
    NBI_DTYPE_LIST(X)
#undef X
        NBI_DTYPE_COUNT
} nbi_dtype;

const char *nbi_dtype_name(nbi_dtype dtype);
uint32_t nbi_dtype_bits(nbi_dtype dtype);
/* NBI_DTYPE_COUNT for an unknown name. */
nbi_dtype nbi_dtype_parse(const char *name, size_t n);

#ifdef __cplusplus
}
#endif
