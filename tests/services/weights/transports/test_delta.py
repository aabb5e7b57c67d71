"""Versions that hold only what changed since their anchor."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from safetensors.torch import load_file

from offbeat.services.errors import WeightsError
from offbeat.services.messages.codec import decode_manifest, encode_manifest
from offbeat.services.messages.types import Manifest
from offbeat.services.weights.broker import WeightBroker
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from offbeat.services.weights.transports.base import Stored, belongs_to, owner_of, version_and_epoch
from offbeat.services.weights.transports.delta import (
    DeltaTransport,
    Difference,
    apply_difference,
    compute_difference,
    pack,
    unpack,
)
from offbeat.services.weights.transports.factory import make_transport
from tests.services.weights.publishing import give_lease

RUN = "delta-test"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(64, 33, generator=generator).bfloat16(),
        "b.bias": torch.randn(7, generator=generator).bfloat16(),
    }


def stepped(tensors: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """A few elements moved by a little."""
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    moved["a.weight"].view(-1)[step * 5 : step * 5 + 9] *= 1.01
    return moved


def manifest_of(stored: Stored, version: int) -> Manifest:
    return Manifest(
        RUN, version, version, 1, "fs", stored.location, stored.digest, stored.num_bytes, (), 0.0, stored.anchor
    )


@pytest.fixture
def config(tmp_path: Path) -> WeightsConfig:
    return WeightsConfig(transport="fs", url=str(tmp_path / "versions"), anchor_every=4)


def transport(config: WeightsConfig) -> DeltaTransport:
    made = make_transport(config, RUN, Path())
    assert isinstance(made, DeltaTransport)
    return made


@given(
    st.sampled_from([2, 4]),
    st.lists(st.integers(0, 255), min_size=4, max_size=400).map(lambda x: x[: len(x) // 4 * 4]),
    st.data(),
)
def test_a_difference_leads_from_the_old_bytes_to_the_new_ones(width: int, old: list[int], data: st.DataObject) -> None:
    new = [data.draw(st.sampled_from([byte, 255 - byte])) for byte in old]
    before, after = (np.array(x, dtype=np.uint8) for x in (old, new))
    change, digest = unpack(pack(compute_difference(before, after, width), "blake2b:00"))
    assert digest == "blake2b:00"
    assert apply_difference(before, change).tolist() == new
    assert before.tolist() == old


@pytest.mark.parametrize("positions", [[2**32 - 2, 2**32 - 1], [2**32 - 1], [3, 2**33 + 7, 2**33 + 8, 7 * 2**32]])
def test_changes_far_apart_keep_their_places(positions: list[int]) -> None:
    """Between changes of large models' adapters lie experts that are frozen: more elements than 32 bits count."""
    flips = np.arange(1, len(positions) + 1, dtype="<u2")
    change, _ = unpack(pack(Difference(2, 2**36, np.array(positions), flips), "blake2b:00"))
    changed = change.flips != 0
    assert change.positions[changed].tolist() == positions
    assert change.flips[changed].tolist() == flips.tolist()


@pytest.mark.parametrize("blob", [b"", b"\x93\x01\x02\x03", b"\xff" * 40])
def test_bytes_that_are_no_difference_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(blob)


def test_every_delta_is_fetched_as_the_file_of_a_full_version(config: WeightsConfig) -> None:
    learner, replica = transport(config), transport(config)
    sizes: list[int] = []
    tensors = weights()
    for version in range(9):
        stored = learner.stage(version, 1, tensors)
        sizes.append(stored.num_bytes)
        with replica.fetch(manifest_of(stored, version)) as path:
            found = load_file(path)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        tensors = stepped(tensors, version)
    whole = [size > 4000 for size in sizes]
    assert whole == [True, False, False, False, True, False, False, False, True]
    assert max(size for size, is_whole in zip(sizes, whole, strict=True) if not is_whole) < sizes[0] / 4


def test_a_late_replica_needs_the_anchor_and_one_difference(config: WeightsConfig) -> None:
    learner = transport(config)
    versions = [weights(), stepped(weights(), 0), newest := stepped(weights(), 1)]
    *_, stored = [learner.stage(version, 1, tensors) for version, tensors in enumerate(versions)]
    assert stored.anchor is not None
    for file in learner.stored():
        if file.location not in (stored.location, stored.anchor.location):
            Path(file.location).unlink()
    with transport(config).fetch(manifest_of(stored, 2)) as path:
        assert torch.equal(load_file(path)["a.weight"], newest["a.weight"])


def test_a_version_that_changed_altogether_is_stored_whole(config: WeightsConfig) -> None:
    learner = transport(config)
    learner.stage(0, 1, weights(0))
    assert learner.stage(1, 1, weights(1)).anchor is None


def test_another_layout_starts_from_a_whole_version(config: WeightsConfig) -> None:
    learner = transport(config)
    learner.stage(0, 1, weights())
    assert learner.stage(1, 1, {"other": torch.zeros(3, dtype=torch.bfloat16)}).anchor is None


@pytest.mark.parametrize("victim", ["compute_difference", "anchor"])
def test_damage_to_either_file_is_noticed(config: WeightsConfig, victim: str) -> None:
    learner = transport(config)
    learner.stage(0, 1, weights())
    stored = learner.stage(1, 1, stepped(weights(), 0))
    assert stored.anchor is not None
    path = Path(stored.location if victim == "compute_difference" else stored.anchor.location)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="damaged"), transport(config).fetch(manifest_of(stored, 1)):
        pass


def test_a_version_is_unreadable_without_its_anchor(config: WeightsConfig) -> None:
    learner = transport(config)
    learner.stage(0, 1, weights())
    stored = learner.stage(1, 1, stepped(weights(), 0))
    assert stored.anchor is not None
    assert transport(config).readable(manifest_of(stored, 1))
    Path(stored.anchor.location).unlink()
    assert not transport(config).readable(manifest_of(stored, 1))


def test_an_anchor_stays_until_the_last_version_that_needs_it_is_gone(config: WeightsConfig, redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        give_lease(redis, RUN, 1)
        publisher = RedisWeightPublisher(redis, RUN, config, 1, Path())
        tensors = weights()
        for version in range(7):
            publisher.publish(version, version, tensors.items())
            publisher.flush()
            newest = publisher.newest()
            assert newest is not None
            assert newest.version == version
            with transport(config).fetch(newest) as path:
                assert torch.equal(load_file(path)["a.weight"], tensors["a.weight"])
            tensors = stepped(tensors, version)
        kept = {Path(file.location).name.split("-v")[1].split("-")[0] for file in transport(config).stored()}
        publisher.close()
    assert kept == {"4", "5", "6"}  # versions 5 and 6 are kept, and 4 is their anchor


def test_an_earlier_learners_anchor_stays_until_no_kept_version_needs_it(config: WeightsConfig, redis_url: str) -> None:
    """Its successor begins with a version that is complete."""
    with Redis.from_url(redis_url) as redis:
        for epoch, versions in ((1, (0, 1)), (2, (2, 3))):
            give_lease(redis, RUN, epoch)
            publisher = RedisWeightPublisher(redis, RUN, config, epoch, Path())
            for version in versions:
                publisher.publish(version, version, stepped(weights(), version).items())
                publisher.flush()
                assert all(transport(config).readable(each) for each in publisher._manifests().values())
            publisher.close()
    assert {version_and_epoch(file.location) for file in transport(config).stored()} == {(2, 2), (3, 2)}


def test_weights_may_be_rounded_before_they_travel(tmp_path: Path) -> None:
    config = WeightsConfig(transport="fs", url=str(tmp_path), dtype="bfloat16")
    made = make_transport(config, RUN, Path())
    source = {"w": torch.tensor([[1.0, 1.001]]), "n": torch.tensor([3]), "router.bias": torch.tensor([2.003])}
    copies = made.copies(source.items())
    types = {"w": torch.bfloat16, "n": torch.int64, "router.bias": torch.float32}
    assert {name: tensor.dtype for name, tensor in copies.items()} == types


def test_a_manifest_keeps_its_anchor_on_the_way(config: WeightsConfig) -> None:
    learner = transport(config)
    learner.stage(0, 1, weights())
    manifest = manifest_of(learner.stage(1, 1, stepped(weights(), 0)), 1)
    assert manifest.anchor is not None
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert belongs_to(owner_of(RUN, Path()), Path(manifest.location).name)


def test_anchors_need_a_transport_of_files() -> None:
    with pytest.raises(ValueError, match="anchor_every 4 needs transport shm or fs"):
        WeightsConfig(transport="nccl", anchor_every=4)


async def test_the_broker_collects_no_anchor_that_an_announced_version_needs(
    config: WeightsConfig, redis_url: str
) -> None:
    with Redis.from_url(redis_url) as redis:
        give_lease(redis, RUN, 1)
        publisher = RedisWeightPublisher(redis, RUN, config.model_copy(update={"keep_versions": 1}), 1, Path())
        for version, tensors in enumerate((weights(), stepped(weights(), 0))):
            publisher.publish(version, version, tensors.items())
        publisher.close()
    async with AsyncRedis.from_url(redis_url) as redis:
        broker = WeightBroker(redis, RUN, config, Path(), clock=lambda: time.time() + 3600)
        assert await broker.collect() == 0
        newest = await RedisWeightSubscriber(redis, RUN, config, Path()).newest()
    assert newest is not None
    assert newest.version == 1
    assert newest.anchor is not None
