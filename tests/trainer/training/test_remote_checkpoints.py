"""Checkpoints in a store are complete or absent, and only the newest epoch changes what readers find."""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from offbeat.services.errors import FencedError
from offbeat.trainer.training.checkpoint import Checkpoint, CheckpointError, LearnerState, read_checkpoint
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.remote_checkpoints import RemoteFolder, SourceError, StoreError, fetch_by_url
from tests.trainer.training.fenced_learner import write
from tests.trainer.training.object_store import BUCKET, s3_bucket

pytestmark = pytest.mark.slow
CALLS = ("put_file", "pipe_file", "rm_file", "rm", "ls", "info", "cat_file")


@pytest.fixture(scope="module")
def s3() -> Iterator[int]:
    with s3_bucket() as port:
        yield port


numbers = itertools.count()


@pytest.fixture(params=["s3", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store" / "run")
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/test-{next(numbers)}/run"


@pytest.fixture
def local(tmp_path: Path) -> Callable[[int], Checkpoint]:
    """Return a function that saves a local checkpoint."""
    store = CheckpointStore(tmp_path / "checkpoints", 9, 1)
    return lambda step: read_checkpoint(store.save(LearnerState(step, "now"), write).result())


def taken(url: str, epoch: int) -> RemoteFolder:
    remote = RemoteFolder(url, epoch)
    remote.take_over()
    return remote


def steps(url: str) -> list[int]:
    return [each.step for each in RemoteFolder(url).read_list()]


class InterruptedUpload(BaseException):
    """Stands for the death of the process."""


def interrupt(remote: RemoteFolder, at: int, what: Callable[[], None]) -> None:
    """Call `what` before the store's access number `at`."""
    count = itertools.count(1)
    fs: Any = remote._fs
    wrapped = type(fs)(skip_instance_cache=True)

    def make(call: Any) -> Any:
        def access(*args: Any, **kwargs: Any) -> Any:
            if next(count) == at:
                what()
            return call(*args, **kwargs)

        return access

    for name in CALLS:
        setattr(wrapped, name, make(getattr(wrapped, name)))
    remote._fs = wrapped


def die() -> None:
    raise InterruptedUpload


def fail() -> None:
    raise OSError("the store answers no more")


def test_what_was_uploaded_is_found_by_every_url(url: str, local: Callable[[int], Checkpoint], tmp_path: Path) -> None:
    remote = taken(url, 1)
    for step in (4, 8):
        saved = local(step)
        new = remote.upload(saved, ["step-000004"], read_back=True)
    for place in (url, url.rpartition("/")[0], f"{url}/{new.name}", f"{url}/step-000008"):
        fetched = fetch_by_url(place, tmp_path / "restored")
        assert fetched.state == saved.state
        assert (fetched.path / "state/policy/optimizer.pt").read_bytes() == b"moments"
    assert fetch_by_url(f"{url}/step-000004", tmp_path / "restored").state.step == 4
    assert [path.name for path in (tmp_path / "restored").iterdir()] == ["step-000004"]


def test_only_the_retained_are_left(url: str, local: Callable[[int], Checkpoint]) -> None:
    remote = taken(url, 1)
    for step, retained in ((4, []), (8, ["step-000004"]), (12, ["step-000008"])):
        remote.upload(local(step), retained, read_back=False)
    assert steps(url) == [8, 12]
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    assert len([path for path in fs.ls(root, detail=False) if "/step-" in path]) == 2


def test_what_is_best_once_an_upload_is_stored_is_left(url: str, local: Callable[[int], Checkpoint]) -> None:
    remote = taken(url, 1)
    for step in (4, 8):
        remote.upload(local(step), ["step-000004"], read_back=False)
    checkpoint = local(12)
    store, best = remote._store, ["step-000004"]

    def store_slowly(*args: Any, **options: Any) -> None:
        best[0] = "step-000008"  # its evaluation ends
        store(*args, **options)

    remote._store = store_slowly
    remote.upload(checkpoint, [], read_back=False, best=lambda: best[0])
    assert steps(url) == [8, 12]


def test_an_upload_that_breaks_off_anywhere_is_absent(
    url: str, local: Callable[[int], Checkpoint], tmp_path: Path
) -> None:
    """The process dies before each access; its successor uploads the same checkpoint."""
    first, second = local(4), local(8)
    for at in itertools.count(1):
        place = f"{url}-{at}"
        remote = taken(place, 1)
        remote.upload(first, [], read_back=False)
        interrupt(remote, at, die)
        try:
            remote.upload(second, [], read_back=True)
        except InterruptedUpload:
            assert steps(place) in ([4], [8])
            assert fetch_by_url(place, tmp_path / str(at)).state.step == steps(place)[0]
        else:
            break
        successor = taken(place, 2)
        successor.upload(second, [], read_back=False)
        assert steps(place) == [8]
        fetch_by_url(place, tmp_path / f"{at}-again")
    assert at > 8


def test_an_upload_that_fails_anywhere_is_repeated_and_leaves_nothing(
    url: str, local: Callable[[int], Checkpoint]
) -> None:
    saved = [local(step) for step in (4, 8, 12)]
    for at in itertools.count(1):
        place = f"{url}-{at}"
        remote = taken(place, 1)
        remote.upload(saved[0], [], read_back=False)
        interrupt(remote, at, fail)
        try:
            remote.upload(saved[1], [], read_back=True)
        except StoreError:
            assert steps(place) == [each.step for each in remote.checkpoints]
        else:
            break
        if steps(place) == [4]:
            remote.upload(saved[1], [], read_back=True)
        remote.upload(saved[2], [], read_back=True)
        assert steps(place) == [12]
        assert len([name for name in remote._names() if name.startswith("step-")]) == 1
        assert len([name for name in remote._names() if name.startswith("manifest-")]) == 2
    assert at > 8


def test_a_learner_that_wakes_anywhere_changes_nothing_of_its_successors(
    url: str, local: Callable[[int], Checkpoint], tmp_path: Path
) -> None:
    """Between any two accesses of its upload, a successor takes over, adopts what is listed and uploads."""
    first, second, third = local(4), local(8), local(12)
    num_fenced = 0
    for at in itertools.count(1):
        place = f"{url}-{at}"
        remote = taken(place, 1)
        remote.upload(first, [], read_back=False)
        left: list[list[Any]] = []

        def take_over(place: str = place, left: list[list[Any]] = left) -> None:
            successor = taken(place, 2)
            successor.upload(third, [each.local_name for each in successor.checkpoints], read_back=False)
            left.append(RemoteFolder(place).read_list())

        interrupt(remote, at, take_over)
        try:
            remote.upload(second, [], read_back=False)
        except FencedError:
            num_fenced += 1
        if not left:
            break
        listed = RemoteFolder(place).read_list()
        assert [listed] == left, at
        for each in listed:
            assert RemoteFolder(place).fetch(each.name, tmp_path / f"{at}").state.step == each.step
    assert num_fenced > 5


def test_an_earlier_epoch_can_not_take_over(url: str) -> None:
    taken(url, 3)
    with pytest.raises(FencedError, match="epoch 3"):
        taken(url, 2)


def test_a_half_written_list_is_passed_over(url: str, local: Callable[[int], Checkpoint]) -> None:
    remote = taken(url, 1)
    remote.upload(local(4), [], read_back=False)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/manifest-000001-000009.json", b'{"epoch": 1, "checkp')
    assert steps(url) == [4]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"schema": 1, "epoch": 1}'])
def test_an_unreadable_list_deletes_no_complete_checkpoint(
    url: str, local: Callable[[int], Checkpoint], tmp_path: Path, content: bytes
) -> None:
    """Its content was lost in a power cut, and that of a file of an incomplete checkpoint."""
    remote = taken(url, 1)
    for step, retained in ((4, []), (8, ["step-000004"]), (12, ["step-000008"])):
        remote.upload(local(step), retained, read_back=False)
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    fs.pipe_file(f"{root}/{max(name for name in remote._names() if name.startswith('manifest-'))}", content)
    fs.copy(f"{root}/step-000012.000001-000003", f"{root}/step-000016.000001-000004", recursive=True)
    fs.pipe_file(f"{root}/step-000016.000001-000004/model.safetensors", b"")
    assert steps(url) == [8, 12]
    successor = taken(url, 2)
    assert steps(url) == [8, 12]
    assert sorted(name for name in successor._names() if name.startswith("step-")) == [
        "step-000008.000001-000002",
        "step-000012.000001-000003",
    ]
    assert fetch_by_url(url, tmp_path / "restored").state.step == 12


def rewrite_list(url: str, schema: int) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    name = max(path for path in fs.ls(root, detail=False) if "/manifest-" in path)
    tree = json.loads(fs.cat_file(name))
    fs.rm_file(name)
    tree["schema"] = schema
    tree["checkpoints"] = [{**each, "num_tokens": 5} for each in tree["checkpoints"]]
    fs.pipe_file(name, json.dumps(tree).encode())


def test_a_list_of_a_later_build_deletes_no_checkpoint(url: str, local: Callable[[int], Checkpoint]) -> None:
    """Unknown fields are ignored; a later schema is refused before anything changes."""
    taken(url, 1).upload(local(4), [], read_back=False)
    rewrite_list(url, schema=1)
    assert steps(url) == [4]
    taken(url, 2)
    assert steps(url) == [4]
    rewrite_list(url, schema=2)
    later = RemoteFolder(url, 3)
    for access in (later.take_over, later.read_list):
        with pytest.raises(CheckpointError, match="has schema 2, this build reads 1"):
            access()
    assert [name for name in later._names() if name.startswith("step-")] == ["step-000004.000001-000001"]


def test_a_list_is_synced_before_a_checkpoint_is_deleted(
    local: Callable[[int], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store" / "run"
    remote = taken(str(root), 1)
    remote.upload(local(4), [], read_back=False)
    changes: list[str] = []
    fsync, rm = os.fsync, remote._fs.rm_file

    def sync(descriptor: int) -> None:
        changes.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def remove(path: str) -> None:
        changes.append("removed")
        rm(path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(remote._fs, "rm_file", remove)
    remote.upload(local(8), [], read_back=False)
    before = changes[: changes.index("removed")]
    assert before[-2:] == [str(root / "manifest-000001-000003.json"), str(root)]


def test_steps_of_seven_digits_have_copies(url: str, local: Callable[[int], Checkpoint], tmp_path: Path) -> None:
    remote = taken(url, 1)
    for step in (999_999, 1_000_000):
        remote.upload(local(step), [], read_back=False)
    assert [each.step for each in taken(url, 2).checkpoints] == [1_000_000]
    assert fetch_by_url(url, tmp_path / "restored").state.step == 1_000_000


@pytest.mark.parametrize("harm", ["damaged", "truncated", "missing"])
def test_a_damaged_copy_is_refused(url: str, local: Callable[[int], Checkpoint], tmp_path: Path, harm: str) -> None:
    remote = taken(url, 1)
    new = remote.upload(local(4), [], read_back=False)
    fs, root = fsspec.core.url_to_fs(url)
    path = f"{root}/{new.name}/model.safetensors"
    content = fs.cat_file(path)
    fs.rm_file(path)
    if harm != "missing":
        fs.pipe_file(path, content[:-1] if harm == "truncated" else b"x" + content[1:])
    with pytest.raises(CheckpointError, match=r"damaged|lacks"):
        fetch_by_url(url, tmp_path / "restored")
    assert not list((tmp_path / "restored").glob("step-*"))


def test_a_store_that_changes_bytes_is_found_out(url: str, local: Callable[[int], Checkpoint]) -> None:
    remote = taken(url, 1)
    fs: Any = remote._fs
    put = fs.put_file

    def put_other(source: str, target: str) -> None:
        put(source, target)
        if target.endswith(".safetensors"):
            fs.pipe_file(target, bytes(fs.info(target)["size"]))

    fs.put_file = put_other
    try:
        with pytest.raises(StoreError, match="differs"):
            remote.upload(local(4), [], read_back=True)
    finally:
        del fs.put_file
    assert steps(url) == []


def test_a_damaged_local_copy_is_not_uploaded(url: str, local: Callable[[int], Checkpoint]) -> None:
    saved = local(4)
    (saved.path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(SourceError):
        taken(url, 1).upload(saved, [], read_back=False)
    assert steps(url) == []


def test_several_runs_in_a_place_are_named(url: str, local: Callable[[int], Checkpoint], tmp_path: Path) -> None:
    for name in ("a", "b"):
        taken(f"{url}/{name}", 1).upload(local(4), [], read_back=False)
    with pytest.raises(CheckpointError, match=r"several runs: name one: .*/a \(step 4\), .*/b"):
        fetch_by_url(url, tmp_path)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint"):
        fetch_by_url(f"{url}/c", tmp_path)


def test_a_name_outside_of_the_checkpoint_is_refused(
    url: str, local: Callable[[int], Checkpoint], tmp_path: Path
) -> None:
    new = taken(url, 1).upload(local(4), [], read_back=False)
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/{new.name}/manifest.json")
    fs.pipe_file(f"{root}/{new.name}/manifest.json", json.dumps({"../../evil": [1, 1]}).encode())
    with pytest.raises(CheckpointError, match="outside"):
        fetch_by_url(url, tmp_path / "restored")


@pytest.mark.parametrize("name", ["../../../planted", "/tmp/planted", "planted", "checkpoint-000004.000001-000001/.."])
def test_a_list_with_a_name_that_is_no_checkpoints_is_refused(tmp_path: Path, name: str) -> None:
    """Files of another's store would be written, and folders deleted, outside of `restored`."""
    planted, run = tmp_path / "planted", tmp_path / "a/b/run"
    for folder in (planted, run):
        folder.mkdir(parents=True)
    (planted / "manifest.json").write_text("{}")
    entry = {"name": name, "step": 4, "lineage": "", "serial": 1, "epoch": 1}
    (run / "manifest-000001-000001.json").write_text(json.dumps({"schema": 1, "epoch": 1, "checkpoints": [entry]}))
    mine = tmp_path / "x/y/z/restored"
    with pytest.raises(CheckpointError, match="which is no checkpoint's name"):
        fetch_by_url(f"file://{run}", mine)
    assert not mine.exists()
