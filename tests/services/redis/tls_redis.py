"""A Redis behind TLS: a redis-server on PATH that speaks it, and Python's ssl in front of one that does not."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.services.process import free_port
from tests.conftest import redis_server_binary

PASSWORD = "p@ss/word"  # needs quoting in a URL
QUOTED = "p%40ss%2Fword"


@dataclass(frozen=True, slots=True)
class Certificates:
    """An authority, and what it signed for 127.0.0.1."""

    authority: Path
    certificate: Path
    key: Path


def certificates(folder: Path) -> Certificates:
    """New ones, by the openssl command."""
    openssl, made = (
        shutil.which("openssl"),
        Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key"),
    )
    assert openssl, "no openssl"
    names, ca_key, request = folder / "names", folder / "ca.key", folder / "request.pem"
    names.write_text("subjectAltName=IP:127.0.0.1\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    signs = ("-CAcreateserial", "-days", "2", "-extfile", names)
    for command in (
        (
            "req",
            "-x509",
            *curve,
            "-keyout",
            ca_key,
            "-out",
            made.authority,
            "-subj",
            "/CN=test authority",
            "-days",
            "2",
        ),
        ("req", *curve, "-keyout", made.key, "-out", request, "-subj", "/CN=redis"),
        ("x509", "-req", "-in", request, "-CA", made.authority, "-CAkey", ca_key, "-out", made.certificate, *signs),
    ):
        subprocess.run([openssl, *map(str, command)], check=True, capture_output=True)
    return made


def server_with_tls() -> str | None:
    """A redis-server on PATH that was built with TLS."""
    server = shutil.which("redis-server")
    if server is None:
        return None
    answer = subprocess.run([server, "--tls-port", "no"], capture_output=True, text=True, check=False, timeout=10)
    return None if "Bad directive" in answer.stdout + answer.stderr else server


@contextmanager
def real_tls_redis(folder: Path, made: Certificates) -> Iterator[int]:
    """The port of a redis-server that speaks TLS alone, behind a password."""
    server, port = server_with_tls(), free_port()
    assert server
    files = ("--tls-cert-file", made.certificate, "--tls-key-file", made.key, "--tls-ca-cert-file", made.authority)
    listens = ("--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--tls-auth-clients", "no")
    with _running(server, folder, (*listens, *map(str, files))):
        yield port


@contextmanager
def proxied_tls_redis(folder: Path, made: Certificates) -> Iterator[int]:
    """The port of a proxy that speaks TLS to clients and plain Redis to a server behind it."""
    behind = free_port()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)
    with (
        _running(redis_server_binary(), folder, ("--port", str(behind), "--bind", "127.0.0.1")),
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        threading.Thread(target=_serve, args=(listener, context, behind), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def _running(server: str, folder: Path, listens: tuple[str, ...]) -> Iterator[None]:
    keeps = ("--dir", str(folder), "--save", "", "--appendonly", "yes", "--requirepass", PASSWORD)
    process = subprocess.Popen([server, *listens, *keeps], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=10)


def _serve(listener: socket.socket, context: ssl.SSLContext, behind: int) -> None:
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_relay, args=(plain, context, behind), daemon=True).start()


def _relay(plain: socket.socket, context: ssl.SSLContext, behind: int) -> None:
    try:
        client = context.wrap_socket(plain, server_side=True)
        server = socket.create_connection(("127.0.0.1", behind))
    except OSError:
        plain.close()
        return
    back = threading.Thread(target=_copy, args=(server, client), daemon=True)
    back.start()
    _copy(client, server)
    back.join()
    client.close()
    server.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
