/* Facts of GPUs by NVML, opened at run time: declarations of its documented interface, as much as
 * is used (NVML API Reference Guide). A recorded machine has them in the file nvml.json. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "perf/doctor_facts.h"
#include "perf/library.h"

#define RECORD_BYTES (8u << 20)

static nbi_gpu *gpu_rows(nbi_facts *f, uint32_t n)
{
    nbi_nvml_facts *nvml = &f->nvml;
    if (n > NBI_GPUS_MAX) n = NBI_GPUS_MAX;
    nvml->gpus = n ? nbi_arena_alloc(&f->reader.arena, n * sizeof *nvml->gpus) : NULL;
    if (n && !nvml->gpus) f->reader.no_memory = true;
    if (!nvml->gpus) return NULL;
    nvml->n_gpus = n;
    for (uint32_t i = 0; i < n; i++) {
        nbi_gpu *g = &nvml->gpus[i];
        g->name = g->address = "?";
#define X(field) g->field = NBI_UNKNOWN;
        NBI_GPU_NUMBERS(X)
#undef X
        for (uint32_t k = 0; k < NBI_GPUS_MAX; k++)
            g->peer_read[k] = g->peer_write[k] = g->ancestor[k] = NBI_UNKNOWN;
    }
    return nvml->gpus;
}

const nbi_gpu *nbi_facts_gpu_at(const nbi_facts *f, const char *address)
{
    for (uint32_t i = 0; i < f->nvml.n_gpus; i++)
        if (!strcmp(f->nvml.gpus[i].address, address)) return &f->nvml.gpus[i];
    return NULL;
}

/* ---------------------------------------------------------------- the library */

typedef struct nvmlDevice_st *device; /* opaque */

enum {
    NVML_SUCCESS = 0,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_CLOCK_SM = 1,
    NVML_CLOCK_MEM = 2,
    NVML_THRESHOLD_SLOWDOWN = 1,
    NVML_P2P_READ = 0,
    NVML_P2P_WRITE = 1,
    N_U32 = 6,
    N_OF = 6,
    N_PAIR = 3,
};

/* nvmlPciInfo_t */
typedef struct pci_info {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} pci_info;

/* nvmlMemory_t and nvmlBAR1Memory_t: total, free, used. */
typedef struct memory_info {
    unsigned long long bytes[3];
} memory_info;

typedef struct nvml_api {
    int (*init)(void); /* of version 2: a GPU that does not answer is no reason to fail */
    int (*shutdown)(void);
    int (*driver_version)(char *text, unsigned n);
    int (*cuda_version)(int *version);
    int (*count)(unsigned *n);
    int (*handle)(unsigned i, device *out);
    int (*name)(device d, char *text, unsigned n);
    int (*pci)(device d, pci_info *out);
    int (*u32[N_U32])(device d, unsigned *out);
    int (*of[N_OF])(device d, unsigned what, unsigned *out);
    int (*pair[N_PAIR])(device d, unsigned *a, unsigned *b);
    int (*memory)(device d, memory_info *out);
    int (*bar1)(device d, memory_info *out);
    int (*reasons)(device d, unsigned long long *out);
    int (*old_reasons)(device d, unsigned long long *out);
    int (*utilization)(device d, unsigned out[2]);
    int (*ecc_errors)(device d, unsigned type, unsigned counter, unsigned long long *out);
    int (*remapped)(device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                    unsigned *failed);
    int (*link)(device d, unsigned link, unsigned *active);
    int (*peer)(device a, device b, unsigned what, unsigned *out);
    int (*ancestor)(device a, device b, unsigned *out);
    int (*processes)(device d, unsigned *n, void *infos);
} nvml_api;

/* Getters of one shape, and the fields that they fill. */
static const struct getter {
    const char *symbol;
    size_t field, second;
    unsigned what;
} u32_getters[N_U32] =
    {
#define FIELD(name) offsetof(nbi_gpu, name)
        {"nvmlDeviceGetPersistenceMode", FIELD(persistence), 0, 0},
        {"nvmlDeviceGetEnforcedPowerLimit", FIELD(power_limit_mw), 0, 0},
        {"nvmlDeviceGetPowerManagementDefaultLimit", FIELD(power_default_mw), 0, 0},
        {"nvmlDeviceGetPerformanceState", FIELD(performance_state), 0, 0},
        {"nvmlDeviceGetComputeMode", FIELD(compute_mode), 0, 0},
        {"nvmlDeviceGetRetiredPagesPendingStatus", FIELD(retired_pending), 0, 0}},
  of_getters[N_OF] = {{"nvmlDeviceGetTemperature", FIELD(temperature_c), 0, 0},
                      {"nvmlDeviceGetTemperatureThreshold", FIELD(temperature_slowdown_c), 0,
                       NVML_THRESHOLD_SLOWDOWN},
                      {"nvmlDeviceGetClockInfo", FIELD(sm_mhz), 0, NVML_CLOCK_SM},
                      {"nvmlDeviceGetClockInfo", FIELD(memory_mhz), 0, NVML_CLOCK_MEM},
                      {"nvmlDeviceGetMaxClockInfo", FIELD(sm_max_mhz), 0, NVML_CLOCK_SM},
                      {"nvmlDeviceGetMaxClockInfo", FIELD(memory_max_mhz), 0, NVML_CLOCK_MEM}},
  pair_getters[N_PAIR] = {
      {"nvmlDeviceGetCudaComputeCapability", FIELD(capability_major), FIELD(capability_minor), 0},
      {"nvmlDeviceGetEccMode", FIELD(ecc), FIELD(ecc_pending), 0},
      {"nvmlDeviceGetMigMode", FIELD(mig), 0, 0}};
#undef FIELD

static bool load(nvml_api *api, nb_error *err)
{
#define SYMBOL(member, name, optional)                    \
    {                                                     \
        "nvml" name, offsetof(nvml_api, member), optional \
    }
    static const nbi_symbol symbols[] = {
        SYMBOL(init, "Init_v2", 0),
        SYMBOL(shutdown, "Shutdown", 0),
        SYMBOL(count, "DeviceGetCount_v2", 0),
        SYMBOL(handle, "DeviceGetHandleByIndex_v2", 0),
        SYMBOL(driver_version, "SystemGetDriverVersion", 0),
        SYMBOL(cuda_version, "SystemGetCudaDriverVersion_v2", 1),
        SYMBOL(name, "DeviceGetName", 0),
        SYMBOL(pci, "DeviceGetPciInfo_v3", 0),
        SYMBOL(memory, "DeviceGetMemoryInfo", 1),
        SYMBOL(bar1, "DeviceGetBAR1MemoryInfo", 1),
        SYMBOL(reasons, "DeviceGetCurrentClocksEventReasons", 1),
        SYMBOL(old_reasons, "DeviceGetCurrentClocksThrottleReasons", 1),
        SYMBOL(utilization, "DeviceGetUtilizationRates", 1),
        SYMBOL(ecc_errors, "DeviceGetTotalEccErrors", 1),
        SYMBOL(remapped, "DeviceGetRemappedRows", 1),
        SYMBOL(link, "DeviceGetNvLinkState", 1),
        SYMBOL(peer, "DeviceGetP2PStatus", 1),
        SYMBOL(ancestor, "DeviceGetTopologyCommonAncestor", 1),
        SYMBOL(processes, "DeviceGetComputeRunningProcesses_v3", 1),
        {0},
    };
#undef SYMBOL
    nbi_symbol more[N_U32 + N_OF + N_PAIR + 1] = {0};
    size_t n = 0;
    for (size_t i = 0; i < N_U32; i++)
        more[n++] = (nbi_symbol){u32_getters[i].symbol,
                                 offsetof(nvml_api, u32) + i * sizeof api->u32[0], true};
    for (size_t i = 0; i < N_OF; i++)
        more[n++] = (nbi_symbol){of_getters[i].symbol,
                                 offsetof(nvml_api, of) + i * sizeof api->of[0], true};
    for (size_t i = 0; i < N_PAIR; i++)
        more[n++] = (nbi_symbol){pair_getters[i].symbol,
                                 offsetof(nvml_api, pair) + i * sizeof api->pair[0], true};
    static const char file[] = "libnvidia-ml.so.1";
    return nbi_library_load(api, symbols, file, err) == NB_OK &&
           nbi_library_load(api, more, file, err) == NB_OK;
}

static int64_t *field(nbi_gpu *g, size_t offset)
{
    return (int64_t *)(void *)((char *)g + offset);
}

static void read_numbers(const nvml_api *api, device d, nbi_gpu *g)
{
    unsigned a, b;
    for (size_t i = 0; i < N_U32; i++)
        if (api->u32[i] && api->u32[i](d, &a) == NVML_SUCCESS) *field(g, u32_getters[i].field) = a;
    for (size_t i = 0; i < N_OF; i++)
        if (api->of[i] && api->of[i](d, of_getters[i].what, &a) == NVML_SUCCESS)
            *field(g, of_getters[i].field) = a;
    for (size_t i = 0; i < N_PAIR; i++)
        if (api->pair[i] && api->pair[i](d, &a, &b) == NVML_SUCCESS) {
            *field(g, pair_getters[i].field) = a;
            if (pair_getters[i].second) *field(g, pair_getters[i].second) = b;
        }
}

static void read_others(const nvml_api *api, device d, nbi_gpu *g)
{
    memory_info m;
    unsigned long long wide;
    unsigned u[4], n = 0;
    if (api->memory && api->memory(d, &m) == NVML_SUCCESS) g->memory_bytes = (int64_t)m.bytes[0];
    if (api->bar1 && api->bar1(d, &m) == NVML_SUCCESS) g->bar1_bytes = (int64_t)m.bytes[0];
    if ((api->reasons && api->reasons(d, &wide) == NVML_SUCCESS) ||
        (api->old_reasons && api->old_reasons(d, &wide) == NVML_SUCCESS))
        g->clock_reasons = (int64_t)wide;
    if (api->utilization && api->utilization(d, u) == NVML_SUCCESS) g->utilization = u[0];
    if (api->ecc_errors && api->ecc_errors(d, 0, 0, &wide) == NVML_SUCCESS)
        g->ecc_corrected = (int64_t)wide;
    if (api->ecc_errors && api->ecc_errors(d, 1, 0, &wide) == NVML_SUCCESS)
        g->ecc_uncorrected = (int64_t)wide;
    if (api->remapped && api->remapped(d, &u[0], &u[1], &u[2], &u[3]) == NVML_SUCCESS) {
        g->remapped = (int64_t)u[0] + u[1];
        g->remap_pending = u[2];
        g->remap_failed = u[3];
    }
    if (api->processes) {
        const int said = api->processes(d, &n, NULL);
        if (said == NVML_SUCCESS || said == NVML_INSUFFICIENT_SIZE) g->processes = n;
    }
    for (unsigned i = 0; api->link && i < NBI_LINKS_MAX; i++)
        if (api->link(d, i, &u[0]) == NVML_SUCCESS) g->links[g->n_links++] = u[0];
}

static void read_library(nbi_facts *f)
{
    nbi_nvml_facts *nvml = &f->nvml;
    nbi_reader *r = &f->reader;
    nvml_api api = {0};
    device devices[NBI_GPUS_MAX] = {0};
    nb_error err;
    char text[128];
    unsigned n = 0, a;
    int version;
    if (!load(&api, &err)) {
        nvml->missing = nbi_reader_text(r, "%s", err.text);
        return;
    }
    nvml->init = api.init();
    if (nvml->init != NVML_SUCCESS) return;
    if (api.driver_version(text, sizeof text) == NVML_SUCCESS)
        nvml->driver = nbi_reader_text(r, "%s", text);
    if (api.cuda_version && api.cuda_version(&version) == NVML_SUCCESS) nvml->cuda = version;
    if (api.count(&n) != NVML_SUCCESS) n = 0;
    nbi_gpu *rows = gpu_rows(f, n);
    for (uint32_t i = 0; rows && i < nvml->n_gpus; i++) {
        nbi_gpu *g = &rows[i];
        pci_info pci;
        g->lost = api.handle(i, &devices[i]);
        if (g->lost != NVML_SUCCESS) {
            devices[i] = NULL;
            continue;
        }
        if (api.name(devices[i], text, sizeof text) == NVML_SUCCESS)
            g->name = nbi_reader_text(r, "%s", text);
        if (api.pci(devices[i], &pci) == NVML_SUCCESS)
            g->address = nbi_reader_text(r, "%04x:%02x:%02x.0", pci.domain, pci.bus, pci.device);
        read_numbers(&api, devices[i], g);
        read_others(&api, devices[i], g);
    }
    for (uint32_t i = 0; i < nvml->n_gpus; i++)
        for (uint32_t k = 0; k < nvml->n_gpus; k++) {
            nbi_gpu *g = &nvml->gpus[i];
            if (i == k || !devices[i] || !devices[k]) continue;
            if (api.peer && api.peer(devices[i], devices[k], NVML_P2P_READ, &a) == NVML_SUCCESS)
                g->peer_read[k] = a;
            if (api.peer && api.peer(devices[i], devices[k], NVML_P2P_WRITE, &a) == NVML_SUCCESS)
                g->peer_write[k] = a;
            if (api.ancestor && api.ancestor(devices[i], devices[k], &a) == NVML_SUCCESS)
                g->ancestor[k] = a;
        }
    api.shutdown();
}

/* ---------------------------------------------------------------- a record */

static int64_t number_of(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_integer(v) ? json_integer_value(v) : NBI_UNKNOWN;
}

/* Printable text of a string; `none` for anything else. */
static const char *text_of(nbi_reader *r, const json_t *object, const char *key, const char *none)
{
    const char *s = json_string_value(json_object_get(object, key));
    if (!s) return none;
    char text[128];
    size_t n = 0;
    for (; s[n] && n + 1 < sizeof text; n++) text[n] = s[n] >= 0x20 && s[n] < 0x7f ? s[n] : '?';
    text[n] = 0;
    return nbi_reader_text(r, "%s", text);
}

static uint32_t numbers_of(const json_t *object, const char *key, int64_t *out, uint32_t most)
{
    const json_t *list = json_object_get(object, key);
    uint32_t n = 0;
    for (; n < most && n < json_array_size(list); n++) {
        const json_t *v = json_array_get(list, n);
        out[n] = json_is_integer(v) ? json_integer_value(v) : NBI_UNKNOWN;
    }
    return n;
}

static void read_record(nbi_facts *f, const json_t *root)
{
    nbi_nvml_facts *nvml = &f->nvml;
    nbi_reader *r = &f->reader;
    const json_t *devices = json_object_get(root, "devices");
    const int64_t init = number_of(root, "init");
    nvml->init = init == NBI_UNKNOWN ? 0 : init;
    nvml->missing = text_of(r, root, "missing", NULL);
    nvml->driver = text_of(r, root, "driver_version", NULL);
    nvml->cuda = number_of(root, "cuda_driver_version");
    const size_t n = json_array_size(devices);
    nbi_gpu *rows = gpu_rows(f, n < NBI_GPUS_MAX ? (uint32_t)n : NBI_GPUS_MAX);
    for (uint32_t i = 0; rows && i < nvml->n_gpus; i++) {
        const json_t *from = json_array_get(devices, i);
        nbi_gpu *g = &rows[i];
        g->name = text_of(r, from, "name", "?");
        g->address = text_of(r, from, "pci", "?");
        const int64_t lost = number_of(from, "lost");
        g->lost = lost == NBI_UNKNOWN ? 0 : lost;
#define X(name) g->name = number_of(from, #name);
        NBI_GPU_NUMBERS(X)
#undef X
        g->n_links = numbers_of(from, "nvlinks", g->links, NBI_LINKS_MAX);
        numbers_of(from, "peer_read", g->peer_read, NBI_GPUS_MAX);
        numbers_of(from, "peer_write", g->peer_write, NBI_GPUS_MAX);
        numbers_of(from, "ancestor", g->ancestor, NBI_GPUS_MAX);
    }
}

/* "to_host": [rate, latency], "peers": [null, [rate, latency, direct]] */
static void read_transfer(nbi_transfer *out, const json_t *from)
{
    const double rate = json_number_value(json_array_get(from, 0)),
                 latency = json_number_value(json_array_get(from, 1));
    *out = (nbi_transfer){.rate = rate > 0 ? rate : 0,
                          .latency = latency > 0 ? latency : 0,
                          .direct = json_is_true(json_array_get(from, 2))};
}

void nbi_facts_transfers(nbi_facts *f)
{
    nbi_transfers *t = &f->measured.transfers;
    nb_error err;
    size_t n = 0;
    json_t *root = NULL;
    const uint8_t *text = nbi_read_bytes(&f->reader, RECORD_BYTES, &n, "/transfers.json");
    if (!text || nbi_json_parse(&root, (const char *)text, n, "transfers.json", &err) != NB_OK)
        return;
    const json_t *devices = json_object_get(root, "devices");
    for (; t->n < NBI_TRANSFERS_MAX && t->n < json_array_size(devices); t->n++) {
        const json_t *from = json_array_get(devices, t->n);
        const json_t *peers = json_object_get(from, "peers");
        snprintf(t->address[t->n], sizeof t->address[0], "%s",
                 text_of(&f->reader, from, "pci", "?"));
        read_transfer(&t->to_host[t->n], json_object_get(from, "to_host"));
        read_transfer(&t->from_host[t->n], json_object_get(from, "from_host"));
        for (uint32_t k = 0; k < NBI_TRANSFERS_MAX; k++)
            read_transfer(&t->peer[t->n][k], json_array_get(peers, k));
    }
    json_decref(root);
}

void nbi_facts_nvml(nbi_facts *f)
{
    nbi_nvml_facts *nvml = &f->nvml;
    nbi_reader *r = &f->reader;
    nvml->cuda = NBI_UNKNOWN;
    if (f->live) {
        /* Without a module NVML would try to load it. */
        nvml->asked = f->pci.driver_version != NULL;
        if (nvml->asked) read_library(f);
        return;
    }
    nb_error err;
    size_t n = 0;
    json_t *root = NULL;
    const uint8_t *text = nbi_read_bytes(r, RECORD_BYTES, &n, "/nvml.json");
    if (!text) return;
    if (nbi_json_parse(&root, (const char *)text, n, "nvml.json", &err) == NB_OK) {
        nvml->asked = true;
        read_record(f, root);
        json_decref(root);
    } else {
        nbi_reader_unseen(r, "NVML", "nvml.json is not JSON");
    }
}
