"""Adapters that travel by themselves: what a replica gets is an adapter and its base, whole, each byte once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file
from torch import Tensor

from offbeat.services.errors import WeightsError
from offbeat.services.messages.types import Manifest
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.base import Stored, belongs_to, owner_of
from offbeat.services.weights.transports.factory import make_transport
from offbeat.services.weights.transports.lora import AdapterTransport

RUN = "adapting"
SETTINGS = {"r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj"]}
BASE = {"model.q_proj.weight": torch.arange(12.0).reshape(3, 4), "model.norm.weight": torch.ones(4)}
FACTORS = ("base_model.model.model.q_proj.lora_A.weight", "base_model.model.model.q_proj.lora_B.weight")


def adapter(version: int) -> dict[str, Tensor]:
    shapes = ((2, 4), (3, 2))
    return {name: torch.full(shape, float(version)) for name, shape in zip(FACTORS, shapes, strict=True)}


class Ends:
    """A learner's end and a replica's of one folder."""

    def __init__(self, folder: Path) -> None:
        self.config, self.folder = WeightsConfig(transport="fs", url=str(folder)), folder
        self.learner, self.replica = self.end(SETTINGS), self.end({})

    def end(self, settings: dict[str, object]) -> AdapterTransport:
        made = make_transport(self.config, RUN, Path(), adapter=settings)
        assert isinstance(made, AdapterTransport)
        return made

    def publish(self, version: int) -> Manifest:
        base = {} if self.learner.is_base_stored() else BASE
        tensors = self.learner.copies([*base.items(), *adapter(version).items()])
        return manifest_of(version, self.learner.stage(version, 1, tensors))

    @contextmanager
    def fetched(self, manifest: Manifest) -> Iterator[dict[str, dict[str, Tensor]]]:
        with self.replica.fetch(manifest) as folder:
            assert json.loads((folder / "adapter_config.json").read_text()) == SETTINGS
            yield {path.name: load_file(path) for path in folder.glob("*.safetensors")}


def manifest_of(version: int, stored: Stored) -> Manifest:
    return Manifest(
        RUN, version, version, 1, "fs", stored.location, stored.digest, stored.num_bytes, (), 0.0, stored.anchor
    )


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path / "weights")


def check(files: dict[str, dict[str, Tensor]], version: int, *, with_base: bool) -> None:
    wanted = {"adapter_model.safetensors": adapter(version)} | ({"model.safetensors": BASE} if with_base else {})
    assert files.keys() == wanted.keys()
    for name, tensors in wanted.items():
        assert files[name].keys() == tensors.keys()
        assert all(torch.equal(files[name][each], tensor) for each, tensor in tensors.items())


def test_the_base_travels_once_and_adapters_from_then_on(ends: Ends) -> None:
    manifests = [ends.publish(version) for version in range(3)]
    assert len({manifest.anchor for manifest in manifests}) == 1
    assert len(ends.learner.stored()) == 4
    for version, manifest in enumerate(manifests):
        with ends.fetched(manifest) as files:
            check(files, version, with_base=version == 0)


def test_a_late_replica_gets_base_and_adapter(ends: Ends) -> None:
    manifests = [ends.publish(version) for version in range(4)]
    with ends.fetched(manifests[3]) as files:
        check(files, 3, with_base=True)


def test_a_base_that_was_not_taken_in_comes_again(ends: Ends) -> None:
    manifest = ends.publish(0)
    with pytest.raises(RuntimeError, match="half loaded"), ends.fetched(manifest):
        raise RuntimeError("half loaded")
    for with_base in (True, False):
        with ends.fetched(manifest) as files:
            check(files, 0, with_base=with_base)


def test_a_replica_skips_the_base_that_it_already_holds(ends: Ends) -> None:
    """Another learner publishes its base again."""
    with ends.fetched(ends.publish(0)):
        pass
    ends.learner = ends.end(SETTINGS)
    manifest = ends.publish(1)
    assert manifest.anchor is not None
    assert Path(manifest.anchor.location).exists()
    with ends.fetched(manifest) as files:
        check(files, 1, with_base=False)


def test_a_base_that_was_lost_is_published_again(ends: Ends) -> None:
    first = ends.publish(0)
    assert first.anchor is not None
    Path(first.anchor.location).unlink()
    assert not ends.replica.readable(first)
    second = ends.publish(1)
    assert ends.replica.readable(second)
    with ends.fetched(second) as files:
        check(files, 1, with_base=True)


def test_a_base_counts_as_kept_while_its_store_is_down(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("Input/output error")

    first = ends.publish(0)
    with monkeypatch.context() as down:
        down.setattr(LocalFileSystem, "ls", fail)
        assert ends.publish(1).anchor == first.anchor


@pytest.mark.parametrize("damaged", ["adapter", "base"])
def test_damaged_bytes_are_refused(ends: Ends, damaged: str) -> None:
    manifest = ends.publish(0)
    assert manifest.anchor is not None
    path = Path(manifest.location if damaged == "adapter" else manifest.anchor.location)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="damaged"), ends.fetched(manifest):
        pass


def test_merged_weights_are_refused_where_adapters_are_expected(ends: Ends) -> None:
    merged = make_transport(ends.config, RUN, Path())
    manifest = manifest_of(0, merged.stage(0, 1, merged.copies(BASE.items())))
    assert not ends.replica.readable(manifest)
    with pytest.raises(WeightsError, match="merged"), ends.fetched(manifest):
        pass


def test_files_of_adapters_belong_to_their_run(ends: Ends) -> None:
    names = [Path(file.location).name for file in (ends.publish(0), ends.publish(1))]
    assert all(name.endswith(".adapter") and belongs_to(owner_of(RUN, Path()), name) for name in names)
