/* The table of devices. Callers: roofline. */
#include "perf/devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GB 1e9
#define TB 1e12
#define TF 1e12

/* One channel: transfers per second times 8 bytes. */
#define DDR5(mega_transfers) ((mega_transfers)*8e6)

static const nbi_device devices[] = {
    {"a100-80g", "NVIDIA A100 SXM 80 GB", 80 * GB, 2.039 * TB, 312 * TF, 0, 0, 300 * GB,
     "NVIDIA A100 data sheet (NVLink 600 GB/s both ways)"},
    {"h100", "NVIDIA H100 SXM", 80 * GB, 3.35 * TB, 989 * TF, 1979 * TF, 0, 450 * GB,
     "NVIDIA H100 data sheet (dense; NVLink 900 GB/s both ways)"},
    {"h100-pcie", "NVIDIA H100 PCIe", 80 * GB, 2.0 * TB, 756 * TF, 1513 * TF, 0, 64 * GB,
     "NVIDIA H100 data sheet (dense; PCIe 5.0 x16)"},
    {"h200", "NVIDIA H200 SXM", 141 * GB, 4.8 * TB, 989 * TF, 1979 * TF, 0, 450 * GB,
     "NVIDIA H200 data sheet (dense; NVLink 900 GB/s both ways)"},
    {"b200", "NVIDIA B200", 180 * GB, 8 * TB, 2250 * TF, 4500 * TF, 9000 * TF, 900 * GB,
     "NVIDIA DGX B200 data sheet (an eighth; dense; NVLink 1.8 TB/s both ways)"},
    {"l40s", "NVIDIA L40S", 48 * GB, 0.864 * TB, 362 * TF, 733 * TF, 0, 32 * GB,
     "NVIDIA L40S data sheet (dense; PCIe 4.0 x16)"},
    {"rtx-4090", "NVIDIA GeForce RTX 4090", 24 * GB, 1.008 * TB, 165.2 * TF, 330.3 * TF, 0, 32 * GB,
     "NVIDIA Ada architecture paper (float32 accumulation; PCIe 4.0 x16)"},
    {"rtx-5090", "NVIDIA GeForce RTX 5090", 32 * GB, 1.792 * TB, 209.5 * TF, 419 * TF, 1676 * TF,
     64 * GB, "NVIDIA RTX Blackwell architecture paper (float32 accumulation; PCIe 5.0 x16)"},
    {"rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell", 96 * GB, 1.792 * TB, 500 * TF, 1000 * TF,
     2000 * TF, 64 * GB,
     "NVIDIA RTX PRO 6000 data sheet (4,000 AI TOPS are sparse FP4; PCIe 5.0 x16)"},
    {"dgx-spark", "NVIDIA DGX Spark (GB10)", 128 * GB, 0.273 * TB, 125 * TF, 250 * TF, 500 * TF,
     25 * GB, "NVIDIA DGX Spark data sheet (1 PFLOP of sparse FP4; two 200 Gb/s ports as one)"},
    {"epyc-9004", "AMD EPYC 9004 (DDR5-4800)", 0, 12 * DDR5(4800), 0, 0, 0, 0,
     "AMD EPYC 9004 data sheet (12 channels; name:N for fewer)"},
    {"epyc-9005", "AMD EPYC 9005 (DDR5-6400)", 0, 12 * DDR5(6400), 0, 0, 0, 0,
     "AMD EPYC 9005 data sheet (12 channels; name:N for fewer)"},
    {"xeon-6900p", "Intel Xeon 6900P (DDR5-6400)", 0, 12 * DDR5(6400), 0, 0, 0, 0,
     "Intel Xeon 6 product brief (12 channels; MRDIMM-8800 gives 1.375 times)"},
};

#define CHANNELS 12u

const nbi_device *nbi_device_at(size_t i)
{
    return i < sizeof devices / sizeof *devices ? &devices[i] : NULL;
}

/* The part behind ':' of a name: memory channels in use. */
static nb_status set_channels(nbi_device *d, const char *name, const char *text, nb_error *err)
{
    char *end;
    const unsigned long n = strtoul(text, &end, 10);
    if (d->memory > 0)
        return nbi_fail(err, NB_INVALID, "device \"%s\": only processors are counted by channels",
                        name);
    if (end == text || *end || n < 1 || n > CHANNELS)
        return nbi_fail(err, NB_INVALID,
                        "device \"%s\": expected 1 to %u channels behind the colon", name,
                        CHANNELS);
    d->bandwidth *= (double)n / CHANNELS;
    return NB_OK;
}

nb_status nbi_device_find(nbi_device *out, const char *name, nb_error *err)
{
    const char *colon = strchr(name, ':');
    const size_t n = colon ? (size_t)(colon - name) : strlen(name);
    for (size_t i = 0; nbi_device_at(i); i++) {
        if (strncmp(devices[i].name, name, n) != 0 || devices[i].name[n]) continue;
        *out = devices[i];
        return colon ? set_channels(out, name, colon + 1, err) : NB_OK;
    }
    char known[256] = "";
    for (size_t i = 0, at = 0; nbi_device_at(i) && at < sizeof known; i++)
        at +=
            (size_t)snprintf(known + at, sizeof known - at, "%s%s", i ? ", " : "", devices[i].name);
    return nbi_fail(err, NB_INVALID, "device \"%s\" is not in the table: %s", name, known);
}
