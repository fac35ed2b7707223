#include "cuda/gpu_util.h"

#define GUARD 256u

static nbi_backend *open_with(const nbi_limits *limits, bool w4a4, bool graphs)
{
    nbi_backend *b = NULL;
    nb_error err = {0};
    /* most tests call one operator at a time, with other arguments each time: graphs off */
    const nbi_backend_options opt = {
        .cpu_level = NBI_CPU_LEVEL_COUNT, .w4a4 = w4a4, .disable_graphs = !graphs};
    if (nbi_backend_open(&b, "cuda", &opt, &err) != NB_OK ||
        b->ops->reserve(b, limits, &err) != NB_OK)
        fail_msg("%s", err.text);
    return b;
}

nbi_backend *gpu_open(const nbi_limits *limits)
{
    return open_with(limits, false, false);
}

nbi_backend *gpu_open_w4a4(const nbi_limits *limits)
{
    return open_with(limits, true, false);
}

nbi_backend *gpu_open_graphs(const nbi_limits *limits, bool w4a4)
{
    return open_with(limits, w4a4, true);
}

void gpu_close(nbi_backend *b)
{
    gpu_sync(b);
    nbi_backend_close(&b);
}

gpu_buffer gpu_poisoned(nbi_backend *b, size_t bytes)
{
    gpu_buffer g = {.b = b, .bytes = bytes};
    const size_t whole = bytes + 2 * GUARD;
    void *fill = malloc(whole);
    assert_non_null(fill);
    memset(fill, 0xff, whole);
    g.block = b->ops->alloc(b, whole);
    assert_non_null(g.block);
    g.p = (char *)g.block + GUARD;
    b->ops->upload(b, g.block, fill, whole);
    free(fill);
    return g;
}

gpu_buffer gpu_bytes(nbi_backend *b, const void *host, size_t bytes)
{
    gpu_buffer g = gpu_poisoned(b, bytes);
    b->ops->upload(b, g.p, host, bytes);
    return g;
}

gpu_buffer gpu_floats(nbi_backend *b, const float *host, size_t n)
{
    return gpu_bytes(b, host, n * sizeof *host);
}

void *gpu_read(const gpu_buffer *g)
{
    unsigned char *whole = malloc(g->bytes + 2 * GUARD);
    assert_non_null(whole);
    gpu_sync(g->b);
    g->b->ops->download(g->b, whole, g->block, g->bytes + 2 * GUARD);
    for (size_t i = 0; i < GUARD; i++) {
        if (whole[i] != 0xff || whole[GUARD + g->bytes + i] != 0xff)
            fail_msg("byte %zu %s a buffer of %zu bytes was written to", i,
                     whole[i] != 0xff ? "of the guard before" : "behind", g->bytes);
    }
    memmove(whole, whole + GUARD, g->bytes);
    return whole;
}

void gpu_free(gpu_buffer *g)
{
    free(gpu_read(g));
    g->b->ops->release(g->b, g->block, g->bytes + 2 * GUARD);
    *g = (gpu_buffer){0};
}

const nbi_batch *gpu_step(nbi_backend *b, const nbi_batch *host)
{
    const nbi_batch *device = NULL;
    assert_true(b->ops->step_begin(b, host, 0, &device));
    return device;
}

void gpu_step_end(nbi_backend *b)
{
    nb_error err = {0};
    if (b->ops->step_end(b, &err) != NB_OK) fail_msg("%s", err.text);
    gpu_sync(b);
}

void gpu_sync(nbi_backend *b)
{
    nb_error err = {0};
    if (b->ops->sync(b, &err) != NB_OK) fail_msg("%s", err.text);
}

double gpu_bandwidth(nbi_backend *b, size_t bytes)
{
    void *memory = b->ops->alloc(b, bytes);
    assert_non_null(memory);
    const double rate = b->ops->read_bandwidth(b, memory, bytes);
    b->ops->release(b, memory, bytes);
    print_message("%s: read %.0f GB/s\n", b->description, 1e-9 * rate);
    return rate;
}
