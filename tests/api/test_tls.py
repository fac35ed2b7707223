"""HTTPS: real clients, bad files, and a certificate that is replaced while streams run."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import httpx
import openai
import pytest
from tls_files import Authority, openssl

BODY = {"prompt": "x", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """The files that the server reads: (certificate, key)."""
    folder = tmp_path_factory.mktemp("served")
    install(authority.issue("first"), folder)
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def https(serve, authority, files):
    server = serve("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]), "--log-level", "debug", ca=authority.ca)
    yield server
    assert server.stop() == 0, server.log
    assert "Sanitizer" not in server.log, server.log


def install(pair, folder):
    for source, name in zip(pair, ("cert.pem", "key.pem")):
        shutil.copy(source, folder / f"{name}.new")
        os.rename(folder / f"{name}.new", folder / name)


def subject(server):
    """The name in the certificate that a new connection gets."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        with server.verify.wrap_socket(raw, server_hostname="127.0.0.1") as s:
            return dict(item[0] for item in s.getpeercert()["subject"])["commonName"]


def hang_up(server, sentence):
    """SIGHUP; waits for a new line with the sentence."""
    seen = len(server.lines)
    server.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if any(sentence in line for line in server.lines[seen:]):
            return
        time.sleep(0.01)
    raise AssertionError(f"no \"{sentence}\" in:\n{server.log}")


def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=httpx.Client(verify=server.verify, timeout=120))


def test_openai_client(https):
    assert "https://" in https.log
    with client(https) as c:
        name = c.models.list().data[0].id
        whole = c.completions.create(model=name, prompt="x", max_tokens=40, temperature=0).choices[0].text
        stream = c.completions.create(model=name, prompt="x", max_tokens=40, temperature=0, stream=True)
        assert "".join(event.choices[0].text for event in stream) == whole
        long = c.completions.create(model=name, prompt="word " * 300, max_tokens=1, temperature=0, user="y" * 200000)
        assert long.usage.prompt_tokens >= 300


def test_unknown_root_is_refused_by_clients(https):
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(https.url + "/health")


@pytest.mark.parametrize("version", ["-tls1_2", "-tls1_3"])
def test_s_client(https, authority, version):
    """A client of another library: full verification, and the reply."""
    result = subprocess.run(["openssl", "s_client", "-connect", f"127.0.0.1:{https.port}", "-CAfile", authority.ca, "-verify_return_error",
                             "-verify_ip", "127.0.0.1", "-quiet", "-no_ign_eof", "-ign_eof", version],
                            input=b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", capture_output=True, timeout=30)
    assert b"HTTP/1.1 200" in result.stdout, result


def test_old_versions_are_refused(https):
    result = subprocess.run(["openssl", "s_client", "-connect", f"127.0.0.1:{https.port}", "-tls1_1", "-cipher", "ALL@SECLEVEL=0"],
                            stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert result.returncode != 0 and b"Cipher is (NONE)" in result.stdout, result


def test_plain_http_to_the_https_port(https):
    with socket.create_connection(("127.0.0.1", https.port), timeout=10) as s:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = s.recv(1000)
        assert b"HTTP/1.1 200" not in reply
    assert https.get("/health").status_code == 200


def test_many_streams(https):
    """TLS records and suspended connections together: every stream whole."""
    want = https.post("/v1/completions", {**BODY, "max_tokens": 60, "ignore_eos": True}).json()["choices"][0]["text"]
    texts = []

    def one():
        with client(https) as c:
            stream = c.completions.create(model=None, prompt="x", max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True})
            texts.append("".join(event.choices[0].text for event in stream))

    threads = [threading.Thread(target=one) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert texts == [want] * 16


def test_reload(https, authority, files, sanitized):
    """New connections get the new certificate; a stream and a kept connection go on; broken files change nothing."""
    assert subject(https) == "first"
    with client(https) as c, client(https) as kept:
        name = kept.models.list().data[0].id
        stream = c.completions.create(model=name, prompt="x", max_tokens=150 if sanitized else 700, temperature=0, stream=True, extra_body={"ignore_eos": True})
        events = iter(stream)
        next(events)
        install(authority.issue("second", kind="rsa"), files[0].parent)
        hang_up(https, "the certificate is a new one")
        assert subject(https) == "second"
        assert kept.models.list().data[0].id == name

        files[0].write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
        hang_up(https, "error: the certificate stays as it was: --ssl-certfile")
        assert subject(https) == "second"
        install((authority.issue("third")[0], authority.issue("fourth")[1]), files[0].parent)
        hang_up(https, "does not belong to the first certificate")
        assert subject(https) == "second"
        files[1].unlink()
        hang_up(https, "error: the certificate stays as it was: --ssl-keyfile")
        assert subject(https) == "second"

        install(authority.issue("fifth"), files[0].parent)
        hang_up(https, "the certificate is a new one")
        hang_up(https, "the certificate is what it was before")
        assert subject(https) == "fifth"
        rest = list(events)
        assert rest[-1].choices[0].finish_reason == "length"


def test_slow_handshakes_are_cut(serve, authority, tmp_path):
    install(authority.issue("slow"), tmp_path)
    server = serve("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"), "--header-timeout", "1",
                   ca=authority.ca)
    with socket.create_connection(("127.0.0.1", server.port), timeout=15) as s:
        begin = time.monotonic()
        s.sendall(b"\x16\x03\x01")
        s.recv(100)
        assert 0.8 < time.monotonic() - begin < 8
    assert server.get("/health").status_code == 200
    assert server.stop() == 0, server.log


def test_one_file_for_both(serve, authority, tmp_path):
    cert, key = authority.issue("both")
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    server = serve("--ssl-certfile", str(both), ca=authority.ca)
    assert subject(server) == "both"
    assert server.stop() == 0, server.log


def refused(nibble_bin, model_dir, *options):
    result = subprocess.run([nibble_bin, "serve", "--port", "0", "--model", str(model_dir), *map(str, options)], capture_output=True, text=True,
                            timeout=60)
    assert result.returncode in (1, 2), result
    return result.stderr


def test_bad_files(nibble_bin, model_dir, authority, tmp_path):
    cert, key = authority.issue("bad")
    locked, other = tmp_path / "locked.key", authority.issue("other")[1]
    old = tmp_path / "old.key"
    empty, noise = tmp_path / "empty.pem", tmp_path / "noise.pem"
    openssl("pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:secret")
    openssl("ec", "-aes256", "-in", key, "-out", old, "-passout", "pass:secret")
    empty.write_text("")
    noise.write_bytes(bytes(range(256)) * 40)
    cases = [((cert, locked), "protected by a passphrase"), ((cert, old), "protected by a passphrase"), ((cert, other), "does not belong"),
             ((cert, tmp_path / "none"), "--ssl-keyfile"), ((tmp_path / "none", key), "--ssl-certfile"), ((empty, key), "--ssl-certfile"),
             ((noise, key), "--ssl-certfile"), ((cert, noise), "--ssl-keyfile"), ((key, key), "--ssl-certfile"), ((cert, cert), "--ssl-keyfile")]
    for (c, k), sentence in cases:
        said = refused(nibble_bin, model_dir, "--ssl-certfile", c, "--ssl-keyfile", k)
        assert sentence in said and said.count("\n") <= 2, (c.name, k.name, said)
    assert "--ssl-certfile" in refused(nibble_bin, model_dir, "--ssl-keyfile", key)


def test_expired(serve, authority, tmp_path):
    """Served all the same, with a warning."""
    cert, key = authority.issue("expired", days=0)
    time.sleep(1.1)
    server = serve("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), ca=authority.ca, wait=False)
    end = time.monotonic() + 30
    while "expired" not in server.log and time.monotonic() < end:
        time.sleep(0.05)
    assert "warning: --ssl-certfile" in server.log and "has expired" in server.log, server.log
    with pytest.raises((ssl.SSLError, httpx.ConnectError)):
        server.get("/health")
    server.stop()
