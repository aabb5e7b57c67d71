import errno
import socket

import psutil

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def find_port_problem(host: str, port: int) -> str:
    """Return why a server can't listen, or ""."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: ended connections do not count
        try:
            probe.bind((host, port))
            probe.listen(1)
        except socket.gaierror as error:
            return f"{host} is no address: {error.strerror}"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} of {host} is in use by {_describe_holder(port)}"
            return f"can't listen on port {port} of {host}: {error.strerror}"
    return ""


def _describe_holder(port: int) -> str:
    try:
        listeners = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
        pid = next((each.pid for each in listeners if each.laddr[1:2] == (port,)), None)
        command = " ".join(psutil.Process(pid).cmdline()) if pid is not None else ""
    except psutil.Error:
        return "another program"
    return f"process {pid} ({command[:80]})" if pid is not None else "another program"
