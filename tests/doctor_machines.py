"""Machines as `nibble doctor --root` reads them: small trees of /sys, /proc and /dev, made by hand from the kernel's Documentation/ABI
and admin-guide, proc(5), and DMTF's SMBIOS reference. A tree is a dict of path -> text, bytes or Link; None takes a path away.
"""

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


def cpus(n, vendor, model, flags, driver, governor, preference, khz=4000000):
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
        tree[f"{CPU}/cpu{i}/topology/core_id"] = str(i)
    return tree


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


def server():
    """Two sockets, as it should be."""
    return (cpus(16, "AuthenticAMD", "AMD EPYC 9654 96-Core Processor", AVX512, "amd-pstate-epp", "performance", "performance")
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
    """KVM with a GPU handed through; a processor type without AVX-512."""
    return (cpus(8, "AuthenticAMD", "AMD EPYC-Milan Processor", "fpu sse2 avx2 fma hypervisor", None, None, None)
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
    """Saves power."""
    return (cpus(4, "GenuineIntel", "13th Gen Intel(R) Core(TM) i7-1370P", "fpu sse2 avx2 fma", "intel_pstate", "powersave",
                 "balance_power")
            | {f"{CPU}/intel_pstate/status": "active", f"{CPU}/intel_pstate/no_turbo": "1"}
            | {f"{CPU}/cpu{i}/thermal_throttle/core_throttle_count": "7" for i in range(4)}
            | idle(("POLL", 0, 0), ("C1E", 4, 0), ("C8", 300, 0), ("C10", 600, 0))
            | {"proc/meminfo": meminfo(32000000, 20000000, swap=8000000, swap_free=7900000)}
            | nodes(["0-3"], [32000000]) | kernel("6.12.5", "#1 SMP PREEMPT_DYNAMIC")
            | {"proc/self/limits": limits(1024), "proc/self/cgroup": "0::/user.slice"}
            | settings() | dmi("LENOVO", "21HQCTO1WW") | disk("dm-0", "253:0", kind="btrfs") | MODEL
            | {"sys/firmware/dmi/tables/DMI": dimms(("ChannelA", 16384, 6400, 6400), ("ChannelB", 16384, 6400, 6400))})


MACHINES = {m.__name__: m for m in (server, no_gpu, vm, container, laptop)}
