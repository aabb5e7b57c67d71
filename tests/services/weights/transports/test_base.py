"""Weight files: whole or absent, verified, never another run's."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError
from safetensors.torch import load_file

from offbeat.services.errors import StoreUnavailableError, WeightsError
from offbeat.services.messages.types import Manifest
from offbeat.services.weights.transports.base import (
    READ_BYTES,
    WHOLE,
    Transport,
    _write_atomically,
    belongs_to,
    file_name,
    version_and_epoch,
    write_bytes,
)
from offbeat.services.weights.transports.delta import digest_of_bytes
from offbeat.services.weights.transports.factory import remove_all
from offbeat.services.weights.transports.filesystem import FilesystemTransport
from offbeat.services.weights.transports.shm import SharedMemoryTransport
from tests.copying import replace


@pytest.fixture(params=["shm", "fs", "fs-memory"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    match request.param:
        case "shm":
            return SharedMemoryTransport("run", tmp_path)
        case "fs":
            return FilesystemTransport("run", str(tmp_path))
        case _:
            return FilesystemTransport("run", f"memory://{tmp_path}")


def store(transport: Transport, version: int = 3) -> Manifest:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    stored = transport.stage(version, 1, tensors)
    return Manifest(
        "run", version, version, 1, transport.name, stored.location, stored.digest, stored.num_bytes, (), 0.0
    )


def test_what_was_stored_is_fetched_bit_for_bit(transport: Transport) -> None:
    manifest = store(transport)
    assert transport.readable(manifest)
    with transport.fetch(manifest) as path:
        tensors = load_file(path)
    assert torch.equal(tensors["a"], torch.arange(6.0).reshape(2, 3))
    assert tensors["b"].dtype == torch.bfloat16


EMPTY = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
ABC = "blake3:6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
"""Of BLAKE3's own test vectors and b3sum."""


@pytest.mark.parametrize(("content", "digest"), [(b"", EMPTY), (b"abc", ABC)])
def test_digests_are_blake3_of_the_whole_file(content: bytes, digest: str, tmp_path: Path) -> None:
    assert write_bytes(tmp_path / "file", content) == (digest, len(content))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600  # /dev/shm is everybody's
    assert digest_of_bytes(np.frombuffer(content, dtype=np.uint8)) == digest


def test_a_digest_of_several_reads_is_that_of_the_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * (READ_BYTES // 128 + 1)
    assert write_bytes(tmp_path / "file", content)[0] == f"blake3:{blake3(content).hexdigest()}"


def test_versions_of_earlier_builds_are_verified_by_their_algorithm(transport: Transport) -> None:
    manifest = store(transport)
    with transport.fetch(manifest) as path:
        old = f"blake2b:{blake2b(path.read_bytes(), digest_size=32).hexdigest()}"
    with transport.fetch(replace(manifest, digest=old)) as path:
        assert load_file(path).keys() == {"a", "b"}
    wrong = old[:-1] + ("0" if old[-1] != "0" else "1")
    with pytest.raises(WeightsError, match="damaged"), transport.fetch(replace(manifest, digest=wrong)):
        pass


def test_an_unknown_algorithm_is_refused(transport: Transport) -> None:
    manifest = replace(store(transport), digest="md5:00")
    with pytest.raises(WeightsError, match="'md5'"), transport.fetch(manifest):
        pass


def test_a_fetched_version_can_be_read_after_it_was_collected(transport: Transport) -> None:
    manifest = store(transport)
    with transport.fetch(manifest) as path:
        transport.delete(manifest.location)
        assert load_file(path)["a"].shape == (2, 3)
    assert not transport.readable(manifest)


def test_missing_bytes_are_refused(transport: Transport) -> None:
    manifest = store(transport)
    transport.delete(manifest.location)
    transport.delete(manifest.location)
    with pytest.raises(WeightsError, match="version 3 is gone"), transport.fetch(manifest):
        pass


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("run", tmp_path)
    manifest = store(transport)
    damaged = bytearray(Path(manifest.location).read_bytes())
    damaged[-1] ^= 1
    Path(manifest.location).write_bytes(damaged)
    assert transport.readable(manifest)
    with pytest.raises(WeightsError, match="damaged"), transport.fetch(manifest):
        pass


def test_a_location_outside_the_run_is_never_touched(transport: Transport, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    manifest = replace(store(transport), location=str(other))
    assert not transport.readable(manifest)
    with pytest.raises(WeightsError, match="no weight file"):
        transport.delete(str(other))
    with pytest.raises(WeightsError, match="no weight file"), transport.fetch(manifest):
        pass
    assert other.read_text() == "mine"


def test_a_file_belongs_to_one_run_alone() -> None:
    assert belongs_to("a.b", file_name("a.b", 10, 2))
    assert not belongs_to("axb", file_name("a.b", 10, 2))
    assert not belongs_to("a", file_name("a-v1-e1", 1, 1))


def test_a_file_is_named_by_its_version_and_epoch() -> None:
    assert version_and_epoch(f"memory://folder-v1-e1/{file_name('a-v1-e1', 10, 2)}.part") == (10, 2)


KILLED = """
import os, signal, sys
from pathlib import Path
from offbeat.services.weights.transports.base import WHOLE, _write_atomically
from offbeat.services.weights.transports.shm import SharedMemoryTransport

def write(part):
    part.with_name(".tmp0").write_bytes(b"half of a version")  # as safetensors does
    os.kill(os.getpid(), signal.SIGKILL)

SharedMemoryTransport("run", Path(sys.argv[1])).store(1, 1, WHOLE, lambda path: _write_atomically(path, write))
"""


def test_what_a_learner_killed_while_it_writes_leaves_is_found_and_removed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    transport = SharedMemoryTransport("run", tmp_path)
    (left,) = transport.stored()
    assert time.time() - 60 < left.modified_at <= time.time()
    assert remove_all(transport) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError("no space"), SafetensorError("I/O error: no space")])
def test_a_failed_write_raises_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def write(part: Path) -> None:
        part.write_bytes(b"half")
        raise error

    transport = SharedMemoryTransport("run", tmp_path)
    with pytest.raises(WeightsError, match=r"cannot write weights to .*no space"):
        transport.store(1, 1, WHOLE, lambda path: _write_atomically(path, write))
    assert list(tmp_path.iterdir()) == []


def test_a_full_store_is_left_without_half_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "mv", fail)
    with pytest.raises(StoreUnavailableError, match=r"cannot write weights to .*No space left"):
        store(FilesystemTransport("run", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


FILLED = """
import errno, sys, tempfile
from pathlib import Path
import torch
from offbeat.services.errors import MeshError
from offbeat.services.weights.transports.filesystem import FilesystemTransport
from offbeat.services.weights.transports.shm import SharedMemoryTransport

disk, elsewhere = Path(sys.argv[1]), Path(sys.argv[2])

def stage(transport, temporary, size=100_000):
    tempfile.tempdir = str(temporary)
    try:
        transport.stage(1, 1, {"w": torch.zeros(size)})
    except MeshError as error:
        return f"{type(error).__name__}: {error}"
    return "stored"

ballast = (disk / "ballast").open("wb", buffering=0)
try:
    while ballast.write(bytes(4096)):
        pass
except OSError as error:
    assert error.errno == errno.ENOSPC
file, shm = FilesystemTransport("run", str(elsewhere / "store")), SharedMemoryTransport("run", disk)
print(stage(file, disk))
print(stage(FilesystemTransport("run", str(disk / "store")), elsewhere))
print(stage(shm, elsewhere))
ballast.truncate(0)
print(stage(file, disk), stage(shm, elsewhere))
print(stage(shm, elsewhere, 1_000_000))
"""


def test_full_disks_are_waited_for_unless_a_version_never_fits(tmp_path: Path) -> None:
    """A real disk, of a megabyte: the temporary folder's, the store's and that of shared memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m tmpfs {disk}"
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], capture_output=True, check=False).returncode:
        pytest.skip("this platform does not allow mounting a tmpfs")
    command = f'{mount} && exec {sys.executable} -c "$SCRIPT" {disk} {tmp_path}'
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SCRIPT": FILLED}
    done = subprocess.run([*unshare, command], env=environment, capture_output=True, text=True, check=False)
    *full, stored, too_large = done.stdout.splitlines()
    assert len(full) == 3, done.stderr
    assert all(line.startswith("StoreUnavailableError: cannot write weights to") for line in full), full
    assert stored == "stored stored"
    assert re.match("WeightsError: .*: it holds 1048576 bytes, a version has 4000000", too_large), too_large
