"""What the tests of ranks share."""

import json
import os
import pathlib
import time

MPIEXEC = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-q", "--mca", "pml", "ob1", "--mca", "btl",
           "self,tcp", "--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"]


def environ(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(item.split(b"=", 1) for item in text.split(b"\0") if b"=" in item)


def name(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def children(pid):
    try:
        return [int(p) for t in pathlib.Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
    except OSError:
        return []


def family(pid):
    """pid and all below it."""
    found = [pid]
    for p in found:
        found += children(p)
    return found


def ranks_of(launcher):
    """{rank: pid} of the nibble processes below a launcher."""
    found = {}
    for pid in family(launcher):
        rank = environ(pid).get(b"OMPI_COMM_WORLD_RANK")
        if rank is not None and name(pid) != "nibble-end":
            found[int(rank)] = pid
    return found


def is_there(pid):
    """Not so what has ended and init has not fetched yet."""
    try:
        state, parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return False
    return (state, parent) != ("Z", "1")


def gone(pids, seconds=30):
    """Waits until none of the processes is left; returns those that are."""
    end = time.monotonic() + seconds
    while True:
        left = [p for p in pids if is_there(p)]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)


def leftovers():
    """What a job could leave behind in memory and on disk."""
    names = {str(p) for folder in ("/dev/shm", "/tmp") for p in pathlib.Path(folder).glob("*")}
    return {n for n in names if any(w in n for w in ("ompi", "osc_", "vader", "nibble-job"))}


def completion(server, prompt, **options):
    reply = server.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 24, **options})
    assert reply.status_code == 200, reply.text
    return json.loads(reply.text)["choices"][0]


def over_hosts(hosts, grace=1):
    """What starts a command on len(hosts) ranks that take hosts[rank] for the name of theirs; each has a core, as far as they go.
    `grace`: seconds that mpiexec leaves the others when one is gone; a host that is lost is noticed after 2.5."""
    cores = sorted(os.sched_getaffinity(0))
    script = (f"set -- $OMPI_COMM_WORLD_RANK \"$@\"; hosts='{' '.join(hosts)}'; cores='{' '.join(map(str, cores))}'\n"
              "nth() { shift $(($1 + 1)); echo $1; }\n"
              "export NIBBLE_COMM_HOST=$(nth $1 $hosts); core=$(nth $(($1 % " + str(len(cores)) + ")) $cores)\n"
              "shift; exec taskset -c $core \"$@\"")
    return [*MPIEXEC, "--mca", "odls_base_sigkill_timeout", str(grace), "-n", str(len(hosts)), "sh", "-c", script, "sh"]
