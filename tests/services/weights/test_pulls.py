"""Weights in the learner's device memory: a replica pulls, the learner hands out, one at a time, as long as it lives."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import torch

from services.errors import WeightsError
from services.schema import Manifest
from services.weights import device
from services.weights.device import DeviceTransport, Held, checksum
from services.weights.pulls import Pull, PullDesk

RUN = "pulls"


def hand_over(held: Held, pull: Pull, desk: PullDesk) -> None:
    """A sender that moves nothing: the ticket says what the version holds."""
    update = {"names": sorted(held), "workers": pull.workers}
    desk.answer(pull, {"init": {"port": 1}, "update": update})
    desk.wait_done(pull)


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def learner(server: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DeviceTransport]]:
    monkeypatch.setattr(device, "DESK_WAIT_S", 0.05)
    made: list[DeviceTransport] = []

    def make(sender: Callable[[Held, Pull, PullDesk], None] = hand_over) -> DeviceTransport:
        made.append(DeviceTransport("ipc", RUN, server, sender=sender))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def replica(redis_url: str) -> Iterator[DeviceTransport]:
    with redis.Redis.from_url(redis_url) as client:
        yield DeviceTransport("ipc", RUN, client, workers=2)


def stage(transport: DeviceTransport, version: int) -> Manifest:
    copies = transport.copies([("w", torch.full((3,), float(version)))])
    stored = transport.stage(version, 1, copies)
    return Manifest(RUN, version, version, 1, transport.name, stored.location, stored.digest, stored.num_bytes, (), 0.0)


def test_a_replica_gets_a_ticket_with_the_versions_digest(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    transport = learner()
    manifest = stage(transport, 0)
    for _ in range(2):
        with replica.fetch(manifest) as path:
            ticket = json.loads(path.read_text())
        assert ticket["init"] == {"port": 1}
        assert ticket["update"] == {"names": ["w"], "workers": 2, "digest": manifest.digest}
        assert not path.exists()


def test_a_version_is_readable_while_the_learner_that_holds_it_is_there(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    transport = learner()
    manifest = stage(transport, 0)
    with replica.fetch(manifest):
        assert replica.readable(manifest)
        assert transport.readable(manifest)
    transport.close()
    assert not replica.readable(manifest)
    restarted = learner()
    again = stage(restarted, 0)
    with replica.fetch(again):
        assert replica.readable(again)
        assert not replica.readable(manifest)


def test_a_version_that_was_collected_is_refused(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    transport = learner()
    old, new = stage(transport, 0), stage(transport, 1)
    transport.delete(old.location)
    with pytest.raises(WeightsError, match="refused version 0: it is not held any more"), replica.fetch(old):
        pass
    with replica.fetch(new) as path:
        assert isinstance(path, Path)


def test_a_replica_that_fails_does_not_keep_others_waiting(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    manifest = stage(learner(), 0)
    with pytest.raises(RuntimeError, match="half loaded"), replica.fetch(manifest):
        raise RuntimeError("half loaded")
    with replica.fetch(manifest) as path:
        assert path.exists()


def test_what_goes_wrong_while_sending_is_told_to_the_replica(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    def broken(held: Held, pull: Pull, desk: PullDesk) -> None:
        raise RuntimeError(f"no peer for {len(held)} tensors of {pull.version} at {desk is not None}")

    manifest = stage(learner(broken), 0)
    with pytest.raises(WeightsError, match="no peer for 1 tensors of 0"), replica.fetch(manifest):
        pass


def test_the_checksum_sees_values_and_not_how_they_lie_in_memory() -> None:
    tensor = torch.randn(5, 7)
    assert checksum([("a", tensor)]) == checksum([("b", tensor.t().contiguous().t())])
    changed = tensor.clone()
    changed[2, 3] = -changed[2, 3]
    assert checksum([("a", tensor)]) != checksum([("a", changed)])
    assert checksum([("a", tensor.to(torch.bfloat16))]).startswith("sum64:")
