"""Certificates, keys and tokens for hosts and clients, made by openssl and `hotcell token`. Once per script."""
import os
import pathlib
import subprocess
import tempfile

made = {}


def openssl(*args):
    subprocess.run(["openssl", *args], check=True, capture_output=True)


def secrets():
    """A folder with an authority, a host's certificate and key, and a file of tokens with one token."""
    if "secrets" in made:
        return made["secrets"]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="hotcell-secrets-"))
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.pem", "-days", "2", "-subj", "/CN=tests")
    openssl("req", *key, "-keyout", f"{folder}/key.pem", "-out", f"{folder}/asked.pem", "-subj", "/CN=hotcell")
    (folder / "names").write_text("subjectAltName=DNS:hotcell,IP:127.0.0.1")
    by = ["-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key", "-CAcreateserial", "-days", "2"]
    openssl("x509", "-req", "-in", f"{folder}/asked.pem", *by, "-extfile", f"{folder}/names", "-out", f"{folder}/cert.pem")
    command = [os.path.join(os.environ["HOTCELL_BIN_DIR"], "hotcell"), "token", "new", "alice"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    token, lines = told.split("\n", 1)
    (folder / "tokens.toml").write_text(lines)
    for file in folder.iterdir():
        # The proxy may run as somebody else, who needs the authority only.
        file.chmod(0o644 if file.name == "ca.pem" else 0o600)
    folder.chmod(0o711)
    made["secrets"] = folder, token.strip()
    return made["secrets"]


def clients():
    """An authority of clients, with the certificate and key of one, and another authority's that nobody trusts."""
    if "clients" not in made:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="hotcell-clients-"))
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        for authority, name in (("clients", "bob"), ("strangers", "mallory")):
            openssl("req", "-x509", *key, "-keyout", f"{folder}/{authority}.key", "-out", f"{folder}/{authority}.pem", "-days", "2", "-subj", f"/CN={authority}")
            openssl("req", *key, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.csr", "-subj", f"/CN={name}")
            (folder / "names").write_text(f"subjectAltName=DNS:{name}\nextendedKeyUsage=clientAuth")
            by = ["-CA", f"{folder}/{authority}.pem", "-CAkey", f"{folder}/{authority}.key", "-CAcreateserial", "-days", "2"]
            openssl("x509", "-req", "-in", f"{folder}/{name}.csr", *by, "-extfile", f"{folder}/names", "-out", f"{folder}/{name}.pem")
        for file in folder.iterdir():
            file.chmod(0o600)
        made["clients"] = folder
    return made["clients"]
