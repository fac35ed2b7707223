"""mpiexec with a host file across two network namespaces that stand for hosts: results, and the link between them cut.

What a cluster would do by ssh is a script that enters the other namespace. Needs root and `ip netns`."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import pytest
from ranks_util import gone
from test_comm_mpi import rank_calls  # noqa: F401

NET = "10.97.5"
AGENT = """#!/bin/sh
host=$1; shift
exec ip netns exec nibble-$host unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$host" "$@"
"""
# Rank 0 has the time to tell its clients. Keep-alives stay as they are: mpiexec itself would notice a link that is cut after minutes.
OPTIONS = ["--mca", "odls_base_sigkill_timeout", "5"]


def ip(*args):
    return subprocess.run(["ip", *args], capture_output=True, text=True, timeout=10)


class Hosts:
    def __init__(self, folder):
        self.names = [f"{os.getpid()}-{h}" for h in "ab"]
        self.spaces = [f"nibble-{n}" for n in self.names]
        self.links = [f"nib{os.getpid()}{h}" for h in "ab"]
        self.agent, self.file = folder / "agent", folder / "hosts"
        self.agent.write_text(AGENT)
        self.agent.chmod(0o755)
        self.file.write_text("".join(f"{n} slots=2\n" for n in self.names))

    def up(self):
        """What failed, or nothing."""
        steps = [["netns", "add", s] for s in self.spaces]
        steps += [["-n", s, "link", "set", "lo", "up"] for s in self.spaces]
        steps.append(["link", "add", self.links[0], "netns", self.spaces[0], "type", "veth", "peer", "name", self.links[1], "netns",
                      self.spaces[1]])
        for i in range(2):
            steps.append(["-n", self.spaces[i], "addr", "add", f"{NET}.{i + 1}/24", "dev", self.links[i]])
            steps.append(["-n", self.spaces[i], "link", "set", self.links[i], "up"])
        for step in steps:
            done = ip(*step)
            if done.returncode:
                return f"ip {' '.join(step)}: {done.stderr.strip()}"
        done = subprocess.run([self.agent, self.names[0], "hostname"], capture_output=True, text=True, timeout=10)
        return "" if done.stdout.strip() == self.names[0] else f"no host name of its own: {done.stderr.strip()}"

    def down(self):
        for s in self.spaces:
            ip("netns", "del", s)

    def mpiexec(self, *command):
        """On the first host."""
        line = ["mpiexec", "--allow-run-as-root", "--hostfile", self.file, "--mca", "plm_rsh_agent", self.agent, "--mca", "pml", "ob1",
                "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", f"{NET}.0/24", "--mca", "oob_tcp_if_include", f"{NET}.0/24",
                *OPTIONS, "--map-by", "node", "--bind-to", "none", *command]
        return [str(self.agent), self.names[0], " ".join(map(str, line))]

    def curl(self, *args):
        return ["ip", "netns", "exec", self.spaces[0], "curl", "-sN", *args]

    def pids(self):
        return [int(p) for s in self.spaces for p in ip("netns", "pids", s).stdout.split()]


@pytest.fixture
def hosts(tmp_path):
    for tool in ("ip", "unshare", "curl"):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool}")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    two = Hosts(tmp_path)
    why = two.up()
    if why:
        two.down()
        pytest.skip(why)
    yield two
    two.down()


def test_results(hosts, rank_calls):  # noqa: F811
    done = subprocess.run(hosts.mpiexec("-n", 4, rank_calls), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ok\n", done


def test_link_cut(hosts, nibble_bin, model_dir, tmp_path):
    """The client is told why, then both hosts are empty, mpiexec, its daemon and their files, too."""
    url, log = "http://127.0.0.1:8000", tmp_path / "log"
    body = {"prompt": "one two", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    command = hosts.mpiexec("-n", 2, nibble_bin, "serve", "--model", model_dir, "--tp-size", 2, "--port", 8000)
    with log.open("w") as out:
        job = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 60
        while subprocess.run(hosts.curl("-f", f"{url}/health"), capture_output=True).returncode:
            assert time.monotonic() < end and job.poll() is None, log.read_text()
            time.sleep(0.1)
        client = subprocess.Popen(hosts.curl("--max-time", "60", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d",
                                             json.dumps(body)), stdout=subprocess.PIPE, text=True)
        assert client.stdout.readline().startswith("data: ")
        processes = hosts.pids()
        assert len(processes) > 5
        begin = time.monotonic()
        ip("-n", hosts.spaces[1], "link", "set", hosts.links[1], "down")
        told = client.communicate(timeout=60)[0]
        print(f"told after {time.monotonic() - begin:.1f} s")
        sentence = f"rank 1 on host {hosts.names[1]}: not heard of for .* s: down, or cut off"
        assert re.search(sentence, told), told[-300:]
        assert job.wait(60) not in (0, None)
        assert not gone(processes, 30)
        print(f"all over after {time.monotonic() - begin:.1f} s")
        assert len(re.findall(sentence, log.read_text())) == 1, log.read_text()
        assert not [p for n in hosts.names for p in pathlib.Path("/tmp").glob(f"ompi.{n}*")]
    finally:
        for pid in hosts.pids():
            os.kill(pid, 9)
        job.wait(30)
