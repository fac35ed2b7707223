"""nibble doctor on recorded machines: every rule has one where it fires and one where it does not; odd and broken files never crash it."""

import json
import subprocess

import pytest

from doctor_machines import CPU, MACHINES, ON_SERVER, ROOM, dimms, disk, kernel, limits, meminfo, nodes, nvml, server, transfers, write

LEVELS = ["ok", "note", "warning", "fault"]


@pytest.fixture
def doctor(nibble_bin, tmp_path):
    def run(tree, *arguments, name="machine"):
        root = write(tree, tmp_path / name)
        done = subprocess.run([nibble_bin, "doctor", "--root", root, "--model", "/model", *arguments], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode in (0, 1, 2), done.stderr
        assert done.stderr == ""
        return done

    return run


@pytest.fixture
def audit(doctor):
    def run(tree, *arguments, name="machine"):
        done = doctor(tree, "--json", *arguments, name=name)
        out = json.loads(done.stdout)
        assert out["status"] == done.returncode
        return out

    return run


def level_of(out, rule):
    """Worst level of a rule's findings; None without one."""
    found = [LEVELS.index(f["level"]) for f in out["findings"] if f["id"] == rule]
    return LEVELS[max(found)] if found else None


def tree_of(machine):
    return MACHINES[machine]() if isinstance(machine, str) else machine


def policies(file, value, n=16):
    return {f"{CPU}/cpufreq/policy{i}/{file}": value for i in range(n)}


def gpu(init=0, cuda_driver_version=13000, **first):
    """The server with another record of NVML."""
    return "server", nvml(ON_SERVER, first=first, init=init, cuda_driver_version=cuda_driver_version)


# rule -> (machine or its tree, what is changed of it, level, words of what is found)
FIRES = {
    "cpu-governor": ("server", policies("scaling_driver", "acpi-cpufreq") | policies("scaling_governor", "powersave"), "warning",
                     "16 of 16"),
    "cpu-driver": ("server", policies("scaling_driver", "acpi-cpufreq"), "note", "CPPC"),
    "cpu-boost": ("server", {f"{CPU}/cpufreq/boost": "0"}, "warning", "off"),
    "cpu-limit": ("server", {f"{CPU}/cpufreq/policy3/scaling_max_freq": "2000000"}, "warning", "2.00 GHz of 4.00 GHz on 1 of 16"),
    "cpu-idle": ("server", {f"{CPU}/cpu0/cpuidle/state2/disable": "0"}, "warning", "C2: 800 us"),
    "cpu-throttle": ("no_gpu", {f"{CPU}/cpu2/thermal_throttle/core_throttle_count": "12"}, "warning", "12 times"),
    "cpu-instructions": ("vm", {"proc/cpuinfo": "flags : sse2 hypervisor"}, "fault", "no AVX2"),
    "cpu-affinity": ("server", {"proc/self/status": "Cpus_allowed_list:\t0-3,8"}, "note", "5 of 16"),
    "cpu-quota": ("container", {}, "warning", "4.00 CPUs"),
    "cpu-offline": ("server", {f"{CPU}/online": "0-7", f"{CPU}/offline": "8-15"}, "note", "8-15"),
    "memory-thp": ("server", {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, "warning", "never"),
    "memory-reserved": ("server", {"proc/meminfo": meminfo(1000000, 500000, huge=100, huge_free=90)}, "warning", "0.2 GB of 1.0 GB"),
    "memory-balancing": ("server", {"proc/sys/kernel/numa_balancing": "1"}, "warning", "on, 2 nodes"),
    "memory-reclaim": ("server", {"proc/sys/vm/zone_reclaim_mode": "1"}, "warning", "1"),
    "memory-nodes": ("server", nodes(["0-7", "8-15"], [792000000, 0]), "warning", "differ"),
    "memory-modules": ("server", {"sys/firmware/dmi/tables/DMI": dimms(("A1", 65536, 4800, 4800), ("A2", 0, 0, 0),
                                                                      ("B1", 65536, 4800, 3600))}, "warning", "3600 MT/s"),
    "memory-errors": ("server", {"sys/devices/system/edac/mc/mc1/ue_count": "1"}, "fault", "1 uncorrected"),
    "memory-swap": ("no_gpu", {"proc/meminfo": meminfo(9000000, 8000000, 4000000, 1000000)}, "warning", "3.1 GB of 4.1 GB"),
    "memory-merging": ("server", {"sys/kernel/mm/ksm/run": "1"}, "note", "on"),
    "memory-room": ("container", {"nvml.json": None}, "warning", "0.0 GB"),
    "kernel-version": ("server", kernel("6.1.0-14-amd64", "#1 SMP Debian 6.1.64-1 (2023-11-30)"), "fault", "6.1.64"),
    "kernel-clock": ("server", kernel("6.8.1", "#1", clock="hpet"), "warning", "hpet"),
    "limit-files": ("container", {}, "note", "1024"),
    "limit-address-space": ("server", {"proc/self/limits": limits(space="17179869184")}, "fault", "17.2 GB"),
    "place-hypervisor": ("vm", {}, "note", "KVM"),
    "place-container": ("container", {}, "note", "docker"),
    "model-filesystem": ("server", {"proc/self/mountinfo": "40 1 0:60 / /model rw - nfs4 nas:/models rw"}, "warning", "nas:/models"),
    "cpu-kinds": ("laptop", {}, "note", "CPUs 2-3"),
    "pcie-link": (server(first={"now": (5, 8)}), {}, "warning", "32.0 GT/s x8 of 32.0 GT/s x16"),
    "pcie-slot": (server(first={"slot": (4, 16), "now": (4, 16)}), {}, "note", "the port gives 16.0 GT/s x16"),
    "pcie-payload": (server(drive={"payload": (512, 512)}), {}, "fault", "up to 512 bytes, a bridge above takes 256"),
    "pcie-read-request": (server(second={"request": 128}), {}, "note", "128 bytes"),
    "pcie-aspm": (server(drive={"aspm": 2}), {}, "note", "L1"),
    "pcie-acs": (server(first={"redirect": 0x1d}), {}, "warning", "1 of 2 bridges"),
    "pcie-errors": (server(drive={"errors": (250, 0, 0)}), {}, "warning", "250 corrected"),
    "pcie-bar": (server(second={"bar": 256}), {}, "warning", "256 MiB"),
    "pcie-power": ("laptop", {}, "note", "auto"),
    "iommu-mode": ("server", {"sys/kernel/iommu_groups/12/type": "DMA-FQ"}, "warning", "DMA-FQ"),
    "place-peers": ("vm", {}, "warning", "2 GPUs handed through"),
    "gpu-module": ("laptop", {}, "fault", "nouveau"),
    "gpu-nodes": ("container", {"dev/nvidia-uvm": "c 508:0 0666"}, "fault", "stale"),
    "gpu-placement": ("server", {"proc/self/status": "Cpus_allowed_list:\t0-7"}, "warning", "near CPUs 8-15"),
    "gpu-library": gpu(init=18) + ("fault", "different versions"),
    "gpu-cuda": gpu(cuda_driver_version=12080) + ("fault", "CUDA 12.8, nibble needs 13.0"),
    "gpu-answers": gpu(lost=15) + ("fault", "code 15"),
    "gpu-capability": gpu(capability_major=7, capability_minor=5) + ("fault", "7.5"),
    "gpu-persistence": gpu(persistence=0) + ("warning", "off"),
    "gpu-power": gpu(power_limit_mw=300000) + ("warning", "300 W of 600 W"),
    "gpu-throttle": gpu(clock_reasons=0x48) + ("warning", "too hot (hardware)"),
    "gpu-clocks": gpu(performance_state=2, memory_mhz=10501) + ("warning", "P2, memory at 10501 of 12481 MHz"),
    "gpu-temperature": gpu(temperature_c=90) + ("warning", "90 degrees"),
    "gpu-ecc": gpu(ecc_uncorrected=2) + ("fault", "2 uncorrected"),
    "gpu-remap": gpu(remap_pending=1) + ("warning", "reset"),
    "gpu-mig": gpu(mig=1) + ("warning", "slice"),
    "gpu-mode": gpu(compute_mode=2) + ("fault", "prohibited"),
    "gpu-processes": gpu(processes=3) + ("note", "3 processes"),
    "gpu-alike": gpu(name="NVIDIA GeForce RTX 5090") + ("note", "RTX 5090 beside"),
    "gpu-peers": ("vm", {}, "warning", "none on 2 of 2 directions; 0000:01:00.0 to 0000:02:00.0: chipset not supported"),
    "gpu-ancestors": ("server", {}, "note", "1 of 1 pairs"),
    "gpu-nvlink": gpu(nvlinks=[1, 1, 0, 1]) + ("warning", "3 of 4"),
    "measured-host": ("server", transfers(ON_SERVER, rate=12e9), "warning", "12.0 GB/s and 9.0 us, from it 12.0 GB/s and 8.0 us, of 63.0 GB/s"),
    "measured-peers": ("server", transfers(ON_SERVER, direct=False), "warning", "0 of 2 directions"),
    "model-disk": ("server", disk("sda", "8:0", rotational=1), "warning", "rotating"),
}

# Measured on the machine itself: see test_measures().
MEASURED = {"measured-memory", "measured-file"}


@pytest.mark.parametrize("rule", FIRES)
def test_fires(audit, rule):
    machine, change, level, words = FIRES[rule]
    out = audit(tree_of(machine) | change)
    assert level_of(out, rule) == level
    found = [f for f in out["findings"] if f["id"] == rule and f["level"] == level]
    assert any(words in f["found"] for f in found)
    commands = "\n".join(f["command"] for f in found if f["command"])
    assert not commands or subprocess.run(["sh", "-n", "-c", commands], check=False).returncode == 0, commands


def test_is_quiet(audit):
    """Every rule on a machine without a fault; the larger one has two nodes and a GPU at each, which is worth a note."""
    out = {machine: audit(MACHINES[machine](), name=machine) for machine in ("server", "no_gpu", "vm")}
    quiet = {"memory-nodes": "no_gpu", "gpu-ancestors": "vm"}
    assert {rule for rule in FIRES if level_of(out[quiet.get(rule, "server")], rule) not in ("ok", None)} == set()


def test_every_rule_is_tested_and_described(nibble_bin, repo):
    rules = subprocess.run([nibble_bin, "doctor", "--rules"], check=True, capture_output=True, text=True).stdout
    ids = [line.split()[0] for line in rules.splitlines()]
    assert len(ids) == len(set(ids)) and set(ids) == set(FIRES) | MEASURED
    text = (repo / "docs" / "doctor.md").read_text()
    assert [i for i in ids if f"| `{i}` |" not in text] == []


@pytest.mark.parametrize("machine, status, above", [
    ("server", 0, {"memory-nodes": "note", "gpu-ancestors": "note"}),
    ("no_gpu", 0, {}),
    ("vm", 1, {"place-hypervisor": "note", "place-peers": "warning", "gpu-peers": "warning", "cpu-instructions": "note", "model-disk": "note"}),
    ("container", 1, {"memory-nodes": "note", "gpu-ancestors": "note", "place-container": "note", "cpu-quota": "warning", "limit-files": "note", "model-filesystem": "note"}),
    ("laptop", 2, {"gpu-module": "fault", "pcie-link": "note", "pcie-aspm": "note", "pcie-bar": "note", "pcie-power": "note", "cpu-kinds": "note",
                   "cpu-governor": "warning", "cpu-boost": "warning", "cpu-idle": "warning", "cpu-throttle": "warning",
                   "cpu-instructions": "note", "memory-swap": "note", "limit-files": "note"}),
])
def test_whole_machine(audit, machine, status, above):
    out = audit(MACHINES[machine]())
    assert {f["id"]: f["level"] for f in out["findings"] if f["level"] != "ok"} == above
    assert out["status"] == status
    for f in out["findings"]:
        assert f["found"] and f["source"] and f["why"]
        assert f["level"] in ("ok", "note") or f["command"] or f["setting"]


def test_machine_is_named(audit):
    out = audit(MACHINES["vm"]())["machine"]
    assert (out["vendor"], out["hypervisor"], out["container"], out["cpus"]) == ("QEMU", "KVM", None, 8)
    assert out["memory_bytes"] == 131000000 * 1024


@pytest.mark.parametrize("change, level", [
    ({"scaling_governor": "performance", "energy_performance_preference": "power"}, "ok"),
    ({"scaling_governor": "powersave", "energy_performance_preference": "performance"}, "ok"),
    ({"scaling_governor": "powersave", "energy_performance_preference": "balance_performance"}, "note"),
    ({"scaling_governor": "powersave", "energy_performance_preference": "power"}, "warning"),
    ({"scaling_governor": "schedutil", "scaling_driver": "amd-pstate", "energy_performance_preference": None}, "note"),
    ({"scaling_governor": "powersave", "scaling_driver": "amd-pstate", "energy_performance_preference": None}, "warning"),
])
def test_governors(audit, change, level):
    """amd-pstate in its active mode has a "powersave" that is not the lowest clock."""
    tree = server()
    for file, value in change.items():
        tree[f"{CPU}/cpufreq/policy5/{file}"] = value
    assert level_of(audit(tree), "cpu-governor") == level


@pytest.mark.parametrize("tree, level", [
    (kernel("6.1.0-14-amd64", "#1 SMP Debian 6.1.66-1 (2023-12-09)"), "ok"),
    (kernel("6.1.65", "#1 SMP"), "fault"),
    (kernel("4.19.5", "#1 SMP"), "fault"),
    (kernel("5.15.0-91-generic", "#101-Ubuntu SMP") | {"proc/version_signature": "Ubuntu 5.15.0-91.101-generic 5.15.131"}, "note"),
    (kernel("6.8.0", "#1 SMP"), "ok"),
    (kernel("strange", "#1"), None),
])
def test_kernel_versions(audit, tree, level):
    assert level_of(audit(server() | tree), "kernel-version") == level


def test_fix_script(doctor, tmp_path):
    script = tmp_path / "fix.sh"
    change = {"proc/sys/kernel/numa_balancing": "1"} | kernel("6.1.65", "#1 SMP")
    done = doctor(server() | change, "--fix-script", script)
    assert done.returncode == 2 and "sysctl -w kernel.numa_balancing=0" in done.stdout
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/sh"
    assert [line for line in lines if line and not line.startswith("#")] == ["sysctl -w kernel.numa_balancing=0"]
    assert any("a later kernel" in line for line in lines)
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0


def test_container_mends_on_the_host(doctor, tmp_path):
    """A command for the kernel's settings is a comment in the script of a container."""
    script = tmp_path / "fix.sh"
    done = doctor(MACHINES["container"]() | {"proc/sys/kernel/numa_balancing": "1"}, "--fix-script", script)
    assert "on the host" in done.stdout
    assert "# sysctl -w kernel.numa_balancing=0" in script.read_text().splitlines()


def test_text_names_what_was_not_measured(doctor):
    text = doctor(server()).stdout
    assert "not measured: memory (a recorded machine)" in text
    assert text.splitlines()[-1].startswith("0 faults, 0 warnings, 2 notes")


def test_measures(nibble_bin, repo):
    """This machine: whatever it is, memory has a rate, and the small model's disk is not judged by it."""
    done = subprocess.run([nibble_bin, "doctor", "--model", repo / "models" / "glm5-tiny", "--json"], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode in (0, 1, 2), done.stderr
    out = json.loads(done.stdout)
    assert level_of(out, "measured-memory") == "ok" and out["measured"]["memory_bytes_per_s"] > 0
    assert level_of(out, "measured-file") is None and any(u["what"] == "disk" for u in out["unseen"])


def test_measures_a_file(nibble_bin, tmp_path):
    """Where the file system has no direct reads the report says so."""
    file = tmp_path / "large"
    file.write_bytes(bytes(ROOM) * 80)
    done = subprocess.run([nibble_bin, "doctor", "--file", file, "--json"], capture_output=True, text=True, timeout=120)
    out = json.loads(done.stdout)
    why = [u["reason"] for u in out["unseen"] if u["what"] == "disk"]
    assert (out["measured"]["file_bytes_per_s"] > 0) != bool(why)
    assert not why or "O_DIRECT" in why[0] or "page cache" in why[0]


@pytest.mark.parametrize("arguments, says", [
    (["--no-such"], "unknown option"),
    (["--model", "/nowhere/at/all"], "no such folder"),
    (["--root", "/nowhere/at/all", "--fix-script", "/nowhere/at/all/x"], "/nowhere/at/all/x"),
])
def test_could_not_run(nibble_bin, arguments, says):
    done = subprocess.run([nibble_bin, "doctor", "--no-measure", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and says in done.stderr


@pytest.mark.parametrize("change, rule, level, words", [
    ({"first": {"now": (5, 4)}}, "pcie-link", "fault", "x4 of"),
    ({"first": {"now": (1, 16)}}, "pcie-link", "note", "idle"),
    ({"drive": {"now": (3, 4)}}, "pcie-link", "warning", "8.0 GT/s x4 of 16.0 GT/s x4"),
    ({"drive": {"payload": (256, 128)}}, "pcie-payload", "note", "128 bytes a packet, 256 are possible"),
    ({"drive": {"errors": (3, 0, 0)}}, "pcie-errors", "note", "3 corrected"),
    ({"drive": {"errors": (0, 1, 0)}}, "pcie-errors", "fault", "1 not fatal"),
    ({"first": {"bars": None, "bar": 256}}, "pcie-bar", "warning", "256 MiB"),
    ({"first": {"driver": None}}, "gpu-module", "fault", "no driver"),
    ({"first": {"driver": "vfio-pci"}}, "gpu-module", "note", "virtual machine"),
])
def test_devices(audit, change, rule, level, words):
    out = audit(server(**change))
    assert level_of(out, rule) == level
    assert any(words in f["found"] for f in out["findings"] if f["id"] == rule)


@pytest.mark.parametrize("change, words", [
    ({"dev/nvidia1": None}, "not there"),
    ({"dev/nvidia0": "c 195:0 0660 EACCES"}, "EACCES"),
    ({"dev/nvidiactl": "c 195:255 0666 EPERM"}, "EPERM"),
])
def test_device_nodes(audit, change, words):
    out = audit(MACHINES["container"]() | change)
    found = [f for f in out["findings"] if f["id"] == "gpu-nodes" and f["level"] == "fault"]
    assert len(found) == 1 and words in found[0]["found"] and found[0]["setting"]


def test_without_root(audit):
    """The kernel gives 64 bytes of configuration space: the link is read from sysfs, capabilities are not seen."""
    tree = {path: content[:64] if path.endswith("/config") else content for path, content in server(first={"now": (5, 8)}).items()}
    out = audit(tree)
    assert level_of(out, "pcie-link") == "warning" and level_of(out, "pcie-payload") is None
    assert any(u["what"].endswith("0000:01:00.0/config") for u in out["unseen"])


def test_near_cpus_come_from_hwloc(audit):
    tree = {path: content for path, content in server().items() if not path.endswith("local_cpulist")}
    near = {f["subject"]: f["found"] for f in audit(tree)["findings"] if f["id"] == "gpu-placement"}
    assert near == {"GPU 0000:01:00.0": "near CPUs 0-7", "GPU 0000:81:00.0": "near CPUs 8-15"}


def test_virtual_ports_are_not_believed(audit):
    """QEMU's root ports say 2.5 GT/s x1 above a GPU at full speed."""
    assert level_of(audit(MACHINES["vm"]()), "pcie-link") == "ok"


def test_virtual_machine_whose_gpus_reach_each_other(audit):
    """Two GPUs with NVLink can be handed through together: then the driver says so."""
    out = audit(MACHINES["vm"]() | nvml(("0000:01:00.0", "0000:02:00.0"), peer=0))
    assert level_of(out, "place-peers") == "ok" and level_of(out, "gpu-peers") == "ok"


@pytest.mark.parametrize("first, rule, level", [
    ({"capability_major": 8, "capability_minor": 6}, "gpu-capability", "ok"),
    ({"capability_major": 12, "capability_minor": 1}, "gpu-capability", "fault"),
    ({"clock_reasons": 4}, "gpu-throttle", "note"),
    ({"clock_reasons": 0x80}, "gpu-throttle", "fault"),
    ({"performance_state": 0, "memory_mhz": 12481}, "gpu-clocks", "ok"),
    ({"performance_state": 8, "utilization": 90}, "gpu-clocks", "warning"),
    ({"ecc_corrected": 5}, "gpu-ecc", "note"),
    ({"ecc_pending": 0}, "gpu-ecc", "note"),
    ({"remap_failed": 1}, "gpu-remap", "fault"),
    ({"compute_mode": 3}, "gpu-mode", "note"),
    ({"mig": None}, "gpu-mig", "ok"),
])
def test_gpus(audit, first, rule, level):
    assert level_of(audit(server() | nvml(ON_SERVER, first=first)), rule) == level


def test_link_of_a_gpu_at_work(audit):
    """An idle GPU lowers the speed of its link; one at work has no reason to."""
    tree = server(first={"now": (3, 16)})
    assert level_of(audit(tree), "pcie-link") == "note"
    at_work = nvml(ON_SERVER, first={"performance_state": 1, "memory_mhz": 12481})
    assert level_of(audit(tree | at_work, name="at_work"), "pcie-link") == "warning"


def test_gpus_in_json(audit):
    gpus = audit(server())["gpus"]
    assert [g["pci"] for g in gpus] == list(ON_SERVER)
    assert gpus[0]["memory_bytes"] == 102641958912 and gpus[0]["peer_read"] == [None, 0] and "retired_pending" not in gpus[0]


@pytest.mark.parametrize("record, level, words", [
    ({"missing": "libnvidia-ml.so.1: cannot open shared object file"}, "fault", "cannot open"),
    ({"init": 9}, "fault", "not loaded"),
    ({"devices": "none"}, "ok", "0 GPUs"),
    ({"devices": [None, 3, {"name": 7, "peer_read": 1, "nvlinks": ["x"] * 99}]}, "ok", "3 GPUs"),
    ({"devices": [{}] * 100}, "ok", "64 GPUs"),
])
def test_records_of_nvml(audit, record, level, words):
    out = audit(server() | nvml(ON_SERVER, **record))
    assert level_of(out, "gpu-library") == level
    assert words in next(f["found"] for f in out["findings"] if f["id"] == "gpu-library")


def test_transfers_in_json(audit):
    first = audit(server())["measured"]["transfers"][0]
    assert first["pci"] == ON_SERVER[0] and first["to_host"]["bytes_per_s"] == 52e9 and first["peers"][0] is None
    assert first["peers"][1] == {"bytes_per_s": 45e9, "latency_s": 12e-6, "direct": True}


@pytest.mark.parametrize("text", ["[]", "{}", '{"devices": 3}', '{"devices": [null, {"pci": 1, "to_host": "x", "peers": [[-1, "y"]]}]}',
                                  '{"devices": [' + ", ".join(["{}"] * 40) + "]}"])
def test_records_of_transfers(audit, text):
    out = audit(server() | {"transfers.json": text})
    assert level_of(out, "measured-host") is None and level_of(out, "measured-peers") is None


def test_nothing_there(audit):
    out = audit({"etc/empty": ""})
    assert out["status"] == 0 and out["machine"]["cpus"] == 0
