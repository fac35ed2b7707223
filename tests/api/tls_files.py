"""Certificates for tests, made by the openssl program. Imported by the tests."""

import subprocess


def openssl(*args, **kwargs):
    return subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, **kwargs)


class Authority:
    """A root certificate that lives in a folder, and server certificates of 127.0.0.1 signed by it."""

    def __init__(self, folder):
        self.folder = folder
        self.ca, self.key = folder / "ca.pem", folder / "ca.key"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", self.key, "-out", self.ca,
                "-subj", "/CN=test root", "-days", 2, "-addext", "keyUsage=critical,keyCertSign,cRLSign")

    def issue(self, name, days=1, kind="ec"):
        """(certificate, key) files; `name` is the subject."""
        cert, key, request, extensions = (self.folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext"))
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"] if kind == "ec" else ["-newkey", "rsa:2048"]
        openssl("req", *new, "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth\n")
        openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.key, "-CAcreateserial", "-days", days, "-out", cert,
                "-extfile", extensions)
        return cert, key
