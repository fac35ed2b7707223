"""Machines as `nibble doctor --root` reads them: small trees of /sys, /proc and /dev, made by hand from the kernel's Documentation/ABI
and admin-guide, proc(5), and DMTF's SMBIOS reference. A tree is a dict of path -> text, bytes or Link; None takes a path away.
"""

import json
import os
import struct

CPU = "sys/devices/system/cpu"
AVX512 = "fpu sse2 cppc avx2 fma avx512f avx512_vnni avx512vbmi avx512_bf16"
ROOM = 1 << 20


class Link(str):
    """A symbolic link to that target."""


def write(tree, folder):
    for path, content in tree.items():
        if content is None:
            continue
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Link):
            os.symlink(content, file)
        elif isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content + "\n")
    return folder


def cpus(n, vendor, model, flags, driver, governor, preference, khz=4000000, sockets=1):
    """One frequency policy and one idle state table per CPU."""
    tree = {
        "proc/cpuinfo": "\n".join(f"processor\t: {i}\nvendor_id\t: {vendor}\nmodel name\t: {model}\nflags\t\t: {flags}\n" for i in range(n)),
        f"{CPU}/online": f"0-{n - 1}",
        f"{CPU}/possible": f"0-{n - 1}",
        f"{CPU}/offline": "",
        f"{CPU}/cpuidle/current_driver": "acpi_idle" if vendor == "AuthenticAMD" else "intel_idle",
        f"{CPU}/cpuidle/current_governor": "menu",
        "proc/self/status": f"Name:\tnibble\nCpus_allowed_list:\t0-{n - 1}\nMems_allowed_list:\t0\n",
    }
    for i in range(n):
        if driver:
            policy = f"{CPU}/cpufreq/policy{i}"
            tree |= {f"{policy}/scaling_driver": driver, f"{policy}/scaling_governor": governor,
                     f"{policy}/scaling_max_freq": str(khz), f"{policy}/cpuinfo_max_freq": str(khz)}
            if preference:
                tree[f"{policy}/energy_performance_preference"] = preference
        at = f"{CPU}/cpu{i}"
        tree |= {f"{at}/topology/core_id": str(i), f"{at}/topology/physical_package_id": str(i * sockets // n),
                 f"{at}/topology/core_cpus": mask({i}), f"{at}/topology/package_cpus": mask(k for k in range(n) if k * sockets // n == i * sockets // n),
                 f"{at}/cpufreq": Link(f"../cpufreq/policy{i}")}
    return tree


def mask(members):
    return f"{sum(1 << i for i in members):08x}"


def idle(*states):
    """(name, microseconds, disabled) of cpu0."""
    tree = {}
    for i, (name, latency, disabled) in enumerate(states):
        at = f"{CPU}/cpu0/cpuidle/state{i}"
        tree |= {f"{at}/name": name, f"{at}/latency": str(latency), f"{at}/disable": str(disabled)}
    return tree


def meminfo(total, available, swap=0, swap_free=0, huge=0, huge_free=0):
    return (f"MemTotal:       {total} kB\nMemFree:        {available} kB\nMemAvailable:   {available} kB\n"
            f"SwapTotal:      {swap} kB\nSwapFree:       {swap_free} kB\n"
            f"HugePages_Total:   {huge}\nHugePages_Free:    {huge_free}\nHugepagesize:       2048 kB\n")


def nodes(lists, kb):
    """lists: the CPUs of each node; kb: their memory."""
    tree = {"sys/devices/system/node/online": f"0-{len(lists) - 1}" if len(lists) > 1 else "0"}
    for i, (cpulist, size) in enumerate(zip(lists, kb)):
        at = f"sys/devices/system/node/node{i}"
        tree |= {f"{at}/cpulist": cpulist, f"{at}/meminfo": f"Node {i} MemTotal:       {size} kB\nNode {i} MemFree:   1 kB",
                 f"{at}/distance": " ".join("10" if i == k else "32" for k in range(len(lists)))}
    return tree


def dimms(*modules):
    """SMBIOS structures of type 17 (version 3.2: 84 bytes) from (locator, MiB, rated, configured), and the end."""
    table = b""
    for i, (locator, mib, rated, configured) in enumerate(modules):
        body = bytearray(84)
        body[0], body[1] = 17, len(body)
        struct.pack_into("<H", body, 2, 0x1100 + i)
        struct.pack_into("<H", body, 0x0c, 0x7fff if mib >= 0x7fff else mib)
        struct.pack_into("<I", body, 0x1c, mib if mib >= 0x7fff else 0)
        struct.pack_into("<H", body, 0x15, rated)
        struct.pack_into("<H", body, 0x20, configured)
        body[0x10] = 1
        table += bytes(body) + locator.encode() + b"\0BANK 0\0\0"
    return table + bytes([127, 4, 0, 0, 0, 0])


def limits(files=1048576, space="unlimited"):
    return ("Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max open files            {files:<20} {files:<20} files     \n"
            f"Max locked memory         8388608              8388608              bytes     \n"
            f"Max address space         {space:<20} unlimited            bytes     ")


def kernel(release, version, cmdline="root=/dev/nvme0n1p2 ro", clock="tsc"):
    at = "sys/devices/system/clocksource/clocksource0"
    return {"proc/sys/kernel/osrelease": release, "proc/version": f"Linux version {release} (gcc (Debian 12.2.0-14) 12.2.0) {version}",
            "proc/cmdline": cmdline, f"{at}/current_clocksource": clock, f"{at}/available_clocksource": "tsc hpet acpi_pm"}


def settings(thp="always [madvise] never", balancing=0, swappiness=60, ksm=0):
    return {"sys/kernel/mm/transparent_hugepage/enabled": thp, "proc/sys/kernel/numa_balancing": str(balancing),
            "proc/sys/vm/zone_reclaim_mode": "0", "proc/sys/vm/swappiness": str(swappiness), "sys/kernel/mm/ksm/run": str(ksm)}


def dmi(vendor, product):
    return {"sys/class/dmi/id/sys_vendor": vendor, "sys/class/dmi/id/product_name": product, "sys/class/dmi/id/bios_version": "2.1"}


# ---------------------------------------------------------------- PCI Express

GENERATION = {1: 25, 2: 50, 3: 80, 4: 160, 5: 320, 6: 640}  # tenths of GT/s
ENDPOINT, ROOT_PORT, UPSTREAM, DOWNSTREAM = 0, 4, 5, 6
PORT = 0x060400
GPU = 0x030200
NVME = 0x010802


def config(vendor, device, kind, port, possible, now, payload, request, aspm=0, acs=None, bars=None, buses=(0, 0, 0)):
    """Configuration space: header, the PCI Express capability at 0x60, AER at 0x100, ACS at 0x150, resizable BAR at 0x200.

    possible, now: (generation, lanes); payload: (possible, now) in bytes; bars: sizes of BAR 1 in MiB that are possible."""
    space = bytearray(4096)
    struct.pack_into("<HHHH", space, 0, vendor, device, 0x0006, 0x0010)
    struct.pack_into("<I", space, 8, kind << 8)
    space[0x0e] = 1 if kind == PORT else 0
    if kind == PORT:
        space[0x18:0x1b] = bytes(buses)
    space[0x34] = 0x60
    code = {128: 0, 256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
    struct.pack_into("<BBHIHHIHH", space, 0x60, 0x10, 0, 2 | port << 4, code[payload[0]], code[payload[1]] << 5 | code[request] << 12, 0,
                     possible[0] | possible[1] << 4, aspm, now[0] | now[1] << 4)
    chain = [(0x100, 0x01)] + ([(0x150, 0x0d)] if acs is not None else []) + ([(0x200, 0x15)] if bars else [])
    for i, (at, name) in enumerate(chain):
        struct.pack_into("<I", space, at, name | 1 << 16 | (chain[i + 1][0] << 20 if i + 1 < len(chain) else 0))
    if acs is not None:
        struct.pack_into("<HH", space, 0x154, 0x5f, acs)
    if bars:
        struct.pack_into("<II", space, 0x204, sum(size << 4 for size in bars), 1 | 1 << 5)
    return bytes(space)


def device(path, vendor, number, kind, possible, now, payload=(256, 256), request=512, node=0, cpulist="0-7", members=range(8), port=None,
           driver=None, group=None, bar=None, extra=None, errors=(0, 0, 0), **more):
    """path: addresses from the root port down."""
    address = path.rsplit("/", 1)[-1]
    home = f"devices/pci{address[:4]}:00/{path}" if "/" in path else f"devices/pci{address[:7]}/{path}"
    at = f"sys/{home}"
    port = (ROOT_PORT if "/" not in path else DOWNSTREAM) if kind == PORT else ENDPOINT
    gts = [f"{GENERATION[g] / 10:.1f} GT/s PCIe" for g, _ in (possible, now)]
    tree = {f"sys/bus/pci/devices/{address}": Link(f"../../../{home}"), f"{at}/vendor": f"0x{vendor:04x}", f"{at}/device": f"0x{number:04x}",
            f"{at}/class": f"0x{kind:06x}", f"{at}/numa_node": str(node), f"{at}/local_cpulist": cpulist, f"{at}/local_cpus": mask(members),
            f"{at}/max_link_speed": gts[0], f"{at}/current_link_speed": gts[1], f"{at}/max_link_width": str(possible[1]),
            f"{at}/current_link_width": str(now[1]), f"{at}/power/control": "on",
            f"{at}/config": config(vendor, number, kind, port, possible, now, payload, request, **more),
            f"{at}/aer_dev_correctable": f"RxErr {errors[0]}\nBadTLP 0\nTOTAL_ERR_COR {errors[0]}",
            f"{at}/aer_dev_nonfatal": f"Undefined 0\nTOTAL_ERR_NONFATAL {errors[1]}",
            f"{at}/aer_dev_fatal": f"Undefined 0\nTOTAL_ERR_FATAL {errors[2]}"}
    if driver:
        tree[f"{at}/driver"] = Link(f"/sys/bus/pci/drivers/{driver}")
    if group is not None:
        tree |= {f"{at}/iommu_group": Link(f"/sys/kernel/iommu_groups/{group}"), f"sys/kernel/iommu_groups/{group}/type": "identity"}
    if bar:
        start = 0x20000000000
        tree[f"{at}/resource"] = (f"0x0000000080000000 0x0000000080ffffff 0x0000000000040200\n"
                                  f"0x{start:016x} 0x{start + (bar << 20) - 1:016x} 0x000000000014220c\n"
                                  "0x0000000000000000 0x0000000000000000 0x0000000000000000")
    return tree | (extra or {})


def gpu(root, bus, node, cpulist, members, minor, driver="nvidia", now=(5, 16), group=None, slot=(5, 16), redirect=0, **more):
    """A GPU of 96 GiB behind a root port, and what the driver says of it."""
    address = f"{bus}:00.0"
    number = int(bus[-2:], 16)
    where = dict(node=node, cpulist=cpulist, members=members)
    tree = (device(root, 0x1022, 0x14ab, PORT, slot, now, payload=(512, 256), acs=redirect, buses=(int(root[5:7], 16), number, number), **where)
            | device(f"{root}/{address}", 0x10de, 0x2bb1, GPU, (5, 16), now, driver=driver, group=group,
                     **(dict(bar=131072, bars=[65536, 131072]) | where | more)))
    if driver == "nvidia":
        tree |= {f"proc/driver/nvidia/gpus/{address}/information": f"Model: \t\t NVIDIA RTX PRO 6000\nDevice Minor: \t {minor}",
                 f"dev/nvidia{minor}": f"c 195:{minor} 0666"}
    return tree


def nvidia(uvm=510):
    return {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
            "proc/devices": f"Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n{uvm} nvidia-uvm\n\nBlock devices:\n  7 loop\n",
            "dev/nvidiactl": "c 195:255 0666", "dev/nvidia-uvm": f"c {uvm}:0 0666"}


def nvml(addresses, first=None, peer=0, ancestor=30, **top):
    """nvml.json: what NVML says of idle GPUs without a fault; first: what is different about the first of them, top: about the library."""
    well = dict(name="NVIDIA RTX PRO 6000 Blackwell Server Edition", capability_major=12, capability_minor=0, memory_bytes=102641958912,
                bar1_bytes=137438953472, persistence=1, power_limit_mw=600000, power_default_mw=600000, temperature_c=35,
                temperature_slowdown_c=92, sm_mhz=180, sm_max_mhz=2430, memory_mhz=405, memory_max_mhz=12481, clock_reasons=1,
                performance_state=8, utilization=0, ecc=1, ecc_pending=1, ecc_corrected=0, ecc_uncorrected=0, remapped=0, remap_pending=0,
                remap_failed=0, mig=0, compute_mode=0, processes=0, nvlinks=[])
    n = len(addresses)
    devices = [well | {"pci": a, "peer_read": [None if i == k else peer for k in range(n)],
                       "peer_write": [None if i == k else peer for k in range(n)],
                       "ancestor": [None if i == k else ancestor for k in range(n)]} | (first or {} if i == 0 else {})
               for i, a in enumerate(addresses)]
    return {"nvml.json": json.dumps({"init": 0, "driver_version": "580.95.05", "cuda_driver_version": 13000, "devices": devices} | top)}


def transfers(addresses, rate=52e9, peer=45e9, direct=True):
    """transfers.json: what copies reached."""
    n = len(addresses)
    return {"transfers.json": json.dumps({"devices": [
        {"pci": a, "to_host": [rate, 9e-6], "from_host": [rate, 8e-6],
         "peers": [None if i == k else [peer, 12e-6, direct] for k in range(n)]} for i, a in enumerate(addresses)]})}


def nvme(root, bus, now=(4, 4), **more):
    number = int(bus[-2:], 16)
    return (device(root, 0x1022, 0x14ad, PORT, (4, 4), now, payload=(512, 256), buses=(int(root[5:7], 16), number, number))
            | device(f"{root}/{bus}:00.0", 0x144d, 0xa80a, NVME, (4, 4), now, driver="nvme", **more))


def disk(name, number, part=None, pci=None, rotational=0, ahead=128, kind="ext4", mount="/"):
    """A disk, perhaps with a partition, and the mount of it."""
    home = f"devices/pci0000:00/{pci}/nvme/{name[:5]}/{name}" if pci else f"devices/virtual/block/{name}"
    tree = {f"sys/{home}/queue/rotational": str(rotational), f"sys/{home}/queue/read_ahead_kb": str(ahead)}
    if part:
        tree[f"sys/{home}/{part}/partition"] = "2"
    target = f"{home}/{part}" if part else home
    tree |= {f"sys/dev/block/{number}": Link(f"../../{target}"), f"sys/class/block/{part or name}": Link(f"../../{target}"),
             "proc/self/mountinfo": f"22 27 0:21 / /proc rw - proc proc rw\n27 1 {number} / {mount} rw,relatime shared:1 - {kind} "
                                    f"/dev/{part or name} rw"}
    return tree


MODEL = {"model/model-00001-of-00002.safetensors": bytes(ROOM), "model/model-00002-of-00002.safetensors": bytes(ROOM // 2)}


ON_SERVER = ("0000:01:00.0", "0000:81:00.0")
SOCKET0, SOCKET1 = ("0-7", range(8)), ("8-15", range(8, 16))


def server(first=None, second=None, drive=None):
    """Two sockets with a GPU each, as it should be. first, second, drive: what is different about a GPU or the NVMe."""
    return (gpu("0000:00:01.1", "0000:01", 0, *SOCKET0, 0, group=11, **(first or {}))
            | gpu("0000:80:01.1", "0000:81", 1, *SOCKET1, 1, group=12, **(second or {}))
            | nvme("0000:00:03.1", "0000:02", **(drive or {})) | nvidia() | nvml(ON_SERVER, ancestor=50) | transfers(ON_SERVER)
            | {"sys/class/iommu/ivhd0/amd-iommu/cap": "80b40f"}
            | cpus(16, "AuthenticAMD", "AMD EPYC 9654 96-Core Processor", AVX512, "amd-pstate-epp", "performance", "performance",
                 sockets=2)
            | {f"{CPU}/amd_pstate/status": "active", f"{CPU}/cpufreq/boost": "1"}
            | idle(("POLL", 0, 0), ("C1", 1, 0), ("C2", 800, 1))
            | {"proc/meminfo": meminfo(1585000000, 1500000000)}
            | nodes(["0-7", "8-15"], [792000000, 793000000])
            | {"sys/devices/system/edac/mc/mc0/ce_count": "0", "sys/devices/system/edac/mc/mc0/ue_count": "0"}
            | {"sys/firmware/dmi/tables/DMI": dimms(*[(f"DIMM {c}1", 65536, 4800, 4800) for c in "ABCDEFGH"])}
            | kernel("6.1.0-28-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.119-1 (2024-11-22)", "root=/dev/nvme0n1p2 ro iommu=pt")
            | {"proc/self/limits": limits(), "proc/self/cgroup": "0::/user.slice"}
            | settings() | dmi("Supermicro", "AS -4125GS-TNRT")
            | disk("nvme0n1", "259:2", "nvme0n1p2", "0000:02:00.0") | MODEL)


def no_gpu():
    """One socket without a GPU."""
    return (cpus(8, "GenuineIntel", "Intel(R) Xeon(R) Platinum 8592+", AVX512 + " amx_bf16 amx_tile amx_int8", "intel_pstate",
                 "performance", "performance")
            | {f"{CPU}/intel_pstate/status": "active", f"{CPU}/intel_pstate/no_turbo": "0"}
            | {f"{CPU}/cpu{i}/thermal_throttle/core_throttle_count": "0" for i in range(8)}
            | idle(("POLL", 0, 0), ("C1", 1, 0), ("C1E", 2, 0), ("C6", 290, 1))
            | {"proc/meminfo": meminfo(528000000, 520000000)}
            | nodes(["0-7"], [528000000])
            | kernel("6.8.0-51-generic", "#52-Ubuntu SMP PREEMPT_DYNAMIC") | {"proc/version_signature": "Ubuntu 6.8.0-51.52-generic 6.8.12"}
            | {"proc/self/limits": limits(), "proc/self/cgroup": "0::/system.slice/nibble.service"}
            | settings() | dmi("Dell Inc.", "PowerEdge R760") | disk("nvme0n1", "259:0", pci="0000:c1:00.0") | MODEL)


def vm():
    """KVM with two GPUs handed through; a processor type without AVX-512. The ports are the hypervisor's invention."""
    near = ("0-7", range(8))
    return (gpu("0000:00:02.0", "0000:01", -1, *near, 0, slot=(1, 1)) | gpu("0000:00:02.1", "0000:02", -1, *near, 1, slot=(1, 1)) | nvidia()
            | nvml(("0000:01:00.0", "0000:02:00.0"), peer=1)
            | cpus(8, "AuthenticAMD", "AMD EPYC-Milan Processor", "fpu sse2 avx2 fma hypervisor", None, None, None)
            | {"proc/meminfo": meminfo(131000000, 120000000)} | nodes(["0-7"], [131000000])
            | kernel("6.1.0-28-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.119-1 (2024-11-22)", clock="kvm-clock")
            | {"proc/self/limits": limits(), "proc/self/cgroup": "0::/user.slice"}
            | settings() | dmi("QEMU", "Standard PC (Q35 + ICH9, 2009)") | disk("vda", "254:0", rotational=1) | MODEL)


def container():
    """The server, seen from a container with a quota and a limit of memory."""
    group = "sys/fs/cgroup"
    mounts = ("30 20 0:50 / / rw - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c\n"
              "31 30 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw")
    return server() | {".dockerenv": "", "proc/self/cgroup": "0::/", "proc/self/mountinfo": mounts, f"{group}/cpu.max": "400000 100000",
                       f"{group}/memory.max": str(ROOM), f"{group}/memory.current": "0", "proc/self/limits": limits(1024)}


def laptop():
    """Saves power; two kinds of cores; a GPU that nouveau has, in its sleep."""
    at = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    return (device("0000:00:01.0", 0x8086, 0xa70d, PORT, (4, 8), (1, 8), acs=0, buses=(0, 1, 1), cpulist="0-3", members=range(4))
            | device("0000:00:01.0/0000:01:00.0", 0x10de, 0x28a0, GPU, (4, 8), (1, 8), driver="nouveau", bar=256, bars=[256, 8192], aspm=3,
                     cpulist="0-3", members=range(4), extra={f"{at}/power/control": "auto"})
            | cpus(4, "GenuineIntel", "13th Gen Intel(R) Core(TM) i7-1370P", "fpu sse2 avx2 fma", "intel_pstate", "powersave",
                 "balance_power")
            | {f"{CPU}/cpufreq/policy{i}/base_frequency": str(1900000 if i < 2 else 1400000) for i in range(4)}
            | {f"{CPU}/cpufreq/policy{i}/{file}": "3900000" for i in (2, 3) for file in ("cpuinfo_max_freq", "scaling_max_freq")}
            | {f"{CPU}/intel_pstate/status": "active", f"{CPU}/intel_pstate/no_turbo": "1"}
            | {f"{CPU}/cpu{i}/thermal_throttle/core_throttle_count": "7" for i in range(4)}
            | idle(("POLL", 0, 0), ("C1E", 4, 0), ("C8", 300, 0), ("C10", 600, 0))
            | {"proc/meminfo": meminfo(32000000, 20000000, swap=8000000, swap_free=7900000)}
            | nodes(["0-3"], [32000000]) | kernel("6.12.5", "#1 SMP PREEMPT_DYNAMIC")
            | {"proc/self/limits": limits(1024), "proc/self/cgroup": "0::/user.slice"}
            | settings() | dmi("LENOVO", "21HQCTO1WW") | disk("dm-0", "253:0", kind="btrfs") | MODEL
            | {"sys/firmware/dmi/tables/DMI": dimms(("ChannelA", 16384, 6400, 6400), ("ChannelB", 16384, 6400, 6400))})


MACHINES = {m.__name__: m for m in (server, no_gpu, vm, container, laptop)}
