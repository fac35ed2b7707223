/* Packets between the GPUs of one host: what kernels share that exchange by them (cuda_peers.cu,
 * norm.h). A packet is two values and the number of the exchange (its epoch) twice, as in NCCL's LL
 * protocol; a buffer has room for TURN_PACKETS of each rank in each of two turns, which alternate
 * with the epoch.
 *
 * A packet of epoch e may overwrite that of e - 2: its sender has seen the receiver's packets of
 * e - 1, which were sent by a kernel behind the one that took e - 2. */
#pragma once

#include "backend/cuda/device.h"

#define NBI_PEERS_MAX    8u /* ranks of a one-shot exchange */
#define NBI_TURN_PACKETS 65536u
#define NBI_TURN_BYTES   ((size_t)NBI_TURN_PACKETS * sizeof(nbi_u32x4))
/* Looks at packets between two at `stop`: some 16 ms. All warps that wait then read the host's
 * memory, which takes far longer than a look: where that is no small part of the time between, one
 * rank's reading is the other's waiting, and a chain of sums stays in it. */
#define NBI_PEER_LOOKS 32768u

/* What kernels need of it. */
struct nbi_peer_view {
    uint32_t rank, size;
    const uint32_t *stop;
    uint32_t *epochs;             /* exchanges so far, of each part that counts by itself */
    char *buffers[NBI_PEERS_MAX]; /* where the other ranks' buffers lie here; the own one */
};

/* Where a rank's packets begin in a buffer. */
NBI_DEV nbi_u32x4 *nbi_peer_turn(char *buffer, uint32_t from, uint32_t epoch)
{
    return reinterpret_cast<nbi_u32x4 *>(buffer + (2 * from + (epoch & 1u)) * NBI_TURN_BYTES);
}

NBI_DEV nbi_u32x4 nbi_peer_packet(float a, float b, uint32_t epoch)
{
    return {{nbi_bits(a), epoch, nbi_bits(b), epoch}};
}

NBI_DEV bool nbi_peer_is(const nbi_u32x4 &packet, uint32_t epoch)
{
    return packet.v[1] == epoch && packet.v[3] == epoch;
}

/* Behind so many looks: is it to wait no longer? */
NBI_DEV bool nbi_peer_stops(const nbi_peer_view &v, uint32_t looks)
{
    return (NBI_EMULATED || looks % NBI_PEER_LOOKS == 0) && nbi_host_word(v.stop);
}
