/* The router of a few rows in one launch (router.cu). Callers: linear.cu. */
#pragma once

#include "backend/cuda/cuda_backend.h"

/* Whether this product, of what the norm makes (nbi_cuda_norm_before()), can wait for the choice of
 * experts: exact, BF16 or F32 weights, up to 8 rows and 256 experts. */
bool nbi_cuda_router_waits(const nbi_cuda *c, const nbi_rmsnorm_args *norm,
                           const nbi_linear_args *linear);

/* Whether `route` is the choice by this product. */
bool nbi_cuda_router_fits(const nbi_linear_args *linear, const nbi_route_args *route);

/* All three; they fit. The bits are those of separate calls. peers: the norm sums its delta over
 * ranks; NULL. */
void nbi_cuda_router(nbi_cuda *c, const nbi_rmsnorm_args *norm, const nbi_linear_args *linear,
                     const nbi_route_args *route, const nbi_peer_view *peers);
