"""The installed program as a service: its unit, a file system it cannot write to, and what it tells systemd."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request

import pytest

OPENS = re.compile(r'(?:open|openat|openat2|creat)\((?:AT_FDCWD, |\d+, )?"([^"]*)", ([^)]*)\)? = (\d+)')
CHANGES = re.compile(r"^\d+ +(mkdir\w*|rename\w*|unlink\w*|link\w*|symlink\w*|truncate|chmod|fchmodat\w*|mknod\w*)\(.*\) = 0", re.M)


def run(*command, **more):
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True, **more).stdout


@pytest.fixture(scope="module")
def place(request, repo):
    """An installation with DESTDIR, in a folder that every account can read: (DESTDIR, program)."""
    build = repo / request.config.getoption("--build")
    if not (build / "libnibble.so").exists():
        pytest.skip("sanitizer builds are not installed")
    if not (repo / "models/glm5-tiny/config.json").exists():
        pytest.skip("no embedded model in this tree")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="nibble-service-"))
    folder.chmod(0o755)
    run("cmake", "--install", build, env={**os.environ, "DESTDIR": str(folder)})
    run("chmod", "-R", "a+rX", folder)
    [program] = folder.glob("**/bin/nibble")
    yield folder, program
    shutil.rmtree(folder)


def unprivileged():
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"] if os.geteuid() == 0 else []


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode() if body else None,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


class Running:
    """`nibble serve` behind a command prefix, used once in every way; a context manager that ends it."""

    def __init__(self, prefix, program, cwd="/", env=None):
        self.port = free_port()
        self.process = subprocess.Popen([*map(str, prefix), str(program), "serve", "--port", str(self.port)], cwd=cwd, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={"PATH": os.environ["PATH"], **(env or {})})

    def __enter__(self):
        end = time.monotonic() + 60
        while True:
            try:
                if ask(self.port, "/health")["status"] == "ok":
                    return self
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise AssertionError(self.process.communicate()[0])
            time.sleep(0.05)

    def use(self):
        messages = [{"role": "user", "content": "What is 3+5?"}]
        assert ask(self.port, "/v1/chat/completions", {"messages": messages, "max_tokens": 8})["choices"]
        assert ask(self.port, "/v1/messages", {"messages": messages, "max_tokens": 8, "model": None})["content"]
        assert ask(self.port, "/v1/completions", {"prompt": "x", "max_tokens": 8})["choices"]
        self.process.send_signal(signal.SIGHUP)
        assert ask(self.port, "/v1/models")["data"]

    def __exit__(self, *what):
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(30) == 0, self.process.stdout.read()
        finally:
            self.process.kill()


def test_files(place):
    folder, program = place
    prefix = program.parent.parent
    unit = (prefix / "lib/systemd/system/nibble.service").read_text()
    assert not re.search(r"@\w+@", unit), "a variable was not filled in"
    assert f"ExecStart=/{program.relative_to(folder)} serve $NIBBLE_OPTIONS" in unit
    assert (prefix / "share/nibble/serve.conf").exists()


def test_unit_is_sound(place, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    _, program = place
    unit = (program.parent.parent / "lib/systemd/system/nibble.service").read_text()
    unit = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={program}", unit)
    (tmp_path / "nibble.service").write_text(unit)
    result = subprocess.run(["systemd-analyze", "verify", tmp_path / "nibble.service"], capture_output=True, text=True)
    about_us = [line for line in result.stderr.splitlines() if "nibble.service" in line]
    assert not about_us, result.stderr
    said = subprocess.run(["systemd-analyze", "security", "--offline=true", tmp_path / "nibble.service"], capture_output=True, text=True).stdout
    exposure = re.search(r"exposure level for nibble.service: ([\d.]+)", said)
    assert exposure and float(exposure.group(1)) < 2, said[-300:]


def allowed_calls(unit):
    """The system calls that SystemCallFilter lets through, by systemd's own lists."""
    lists, allowed = {}, set()
    for line in run("systemd-analyze", "syscall-filter", "--no-pager").splitlines():
        if line.startswith("@"):
            name = line.strip()
            lists[name] = set()
        elif line.startswith("    ") and not line.strip().startswith("#"):
            lists[name].add(line.strip())

    def calls(name):
        return set().union(*map(calls, lists[name])) if name in lists else {name}

    for words in re.findall(r"(?m)^SystemCallFilter=(.*)", unit):
        named = set().union(*map(calls, words.lstrip("~").split()))
        allowed = allowed - named if words.startswith("~") else allowed | named
    return allowed


def test_writes_nothing(place, tmp_path):
    """As an account without rights: every file is opened for reading, and every system call is one that the unit allows."""
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    _, program = place
    trace = tmp_path / "trace"
    with Running(["strace", "-D", "-f", "-qq", "-o", trace, *unprivileged()], program) as server:
        server.use()
    time.sleep(0.5) # the tracer writes its last lines
    text = trace.read_text()
    # What came before the program itself is setpriv's.
    text = text[text.rindex('execve("' + str(program)):]
    opened = OPENS.findall(text)
    assert len(opened) > 20
    written = {path for path, how, _ in opened if re.search("O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_TMPFILE", how)}
    assert not [path for path in written if not re.fullmatch(r"/dev/null|/proc/self/task/\d+/comm", path)], "only names of threads"
    assert not CHANGES.search(text), CHANGES.search(text).group(0)
    if shutil.which("systemd-analyze"):
        unit = (program.parent.parent / "lib/systemd/system/nibble.service").read_text()
        used = set(re.findall(r"(?m)^\d+ +(\w+)\(", text))
        assert len(used) > 20
        assert not used - allowed_calls(unit)


READ_ONLY = """
mount --make-rprivate / || exit 77
cut -d' ' -f5 /proc/self/mountinfo | sort -r | while read -r at; do mount -o remount,bind,ro "$at" 2>/dev/null; done
touch /tmp/nibble-probe 2>/dev/null && exit 77
exec "$@"
"""


def test_read_only_file_system(place):
    """Every file system read-only, no account: it serves all the same."""
    _, program = place
    inside = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", READ_ONLY, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode != 0:
        pytest.skip("no mounts allowed here")
    with Running([*inside, *unprivileged()], program) as server:
        server.use()


def test_no_writable_code(place):
    """What MemoryDenyWriteExecute= asks of a program, by the kernel's own switch."""
    _, program = place
    deny = "import ctypes, os, sys\nif ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): sys.exit(77)\nif len(sys.argv) > 1: os.execv(sys.argv[1], sys.argv[1:])"
    if subprocess.run(["/usr/bin/python3", "-c", deny]).returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE")
    with Running(["/usr/bin/python3", "-c", deny], program) as server:
        server.use()


@pytest.mark.parametrize("abstract", [False, True])
def test_tells_systemd(place, tmp_path, abstract):
    """READY=1 when, and not before, requests are served; STOPPING=1 at the end."""
    _, program = place
    path = f"@nibble-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind("\0" + path[1:] if abstract else path)
        s.settimeout(60)
        server = Running([], program, env={"NOTIFY_SOCKET": path})
        assert b"READY=1" in s.recv(1000)
        assert ask(server.port, "/health")["status"] == "ok"
        with server:
            pass
        assert b"STOPPING=1" in s.recv(1000)


def test_container_has_the_libraries(repo, place):
    """The second stage of the container file installs what the program is linked with (by the names of Debian 12)."""
    if 'VERSION_ID="12"' not in pathlib.Path("/etc/os-release").read_text():
        pytest.skip("packages have other names here")
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", place[1]))
    found = dict(re.findall(r"(\S+) => (\S+)", run("ldd", place[1])))
    packages = {run("dpkg", "-S", f"*/{name}").split(":")[0] for name in needed if name in found}
    stage = (repo / "packaging/Containerfile").read_text().split("FROM ")[2]
    missing = {p for p in packages - {"libc6", "libc6-i386", "zlib1g"} if not re.search(rf"\b{re.escape(p)}\b", stage)}
    assert packages and not missing
