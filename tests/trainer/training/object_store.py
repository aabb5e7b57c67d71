"""A local S3 server, with a bucket, as the environment's default."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import fsspec
import pytest
from moto.backends import get_backend
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from offbeat.services.process import free_port

BUCKET = "runs"
SECRET = "do-not-print-me"


def s3_environment(port: int) -> Mapping[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextmanager
def s3_server(port: int = 0) -> Iterator[int]:
    """Serve this process's S3; yield its port."""
    server = ThreadedMotoServer("127.0.0.1", port or free_port(), verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()
        S3FileSystem.clear_instance_cache()  # its keys do not hold the environment


@contextmanager
def s3_bucket() -> Iterator[int]:
    """Serve an S3 with an empty `BUCKET`, found through the environment."""
    get_backend("s3").reset()  # servers of a process share what they store
    with s3_server() as port, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(port).items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        fsspec.filesystem("s3").makedirs(BUCKET, exist_ok=True)
        yield port
