"""HTTP proxy of Ray Serve."""

from ray.serve.context import _get_global_client

from offbeat.services.errors import MeshError
from offbeat.services.ports import LOOPBACK_NAMES

LOOPBACK = "127.0.0.1"


def refuse_other_hosts(error: type[MeshError], advice: str) -> None:
    """Raise `error` with the advice if other machines reach the proxy."""
    client = _get_global_client()
    host = client.http_config.host if client else LOOPBACK
    if host and host not in LOOPBACK_NAMES:
        raise error(f"http_options.host is {host}, which other machines can reach: {advice}, or use {LOOPBACK}")
