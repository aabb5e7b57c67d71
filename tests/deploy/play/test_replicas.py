"""Several engines of one policy."""

import asyncio
from pathlib import Path

import msgspec
import psutil
import pytest

from offbeat.deploy.play import replica_main
from offbeat.deploy.play.engine import BROKEN_AFTER, EngineSampler
from offbeat.deploy.play.replica_main import LENGTH_BYTES, EngineOrder, EngineReply, TurnOrder, pack
from offbeat.deploy.play.replicas import MODULE, EngineProcess, ReplicaSampler, open_replicas, replica_environment
from offbeat.deploy.play.target import build_target, load_config
from offbeat.services.devices import VISIBLE
from offbeat.services.errors import EpisodeError, RetryableError
from offbeat.services.generation.config import EngineStrategy, GenerationConfig
from offbeat.services.messages.codec import encode_requests
from offbeat.services.messages.types import Completion, GenerateRequest, PromptImage, Sampling


class FakeEngine:
    def __init__(self) -> None:
        self.is_dead = False

    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        del version
        if self.is_dead:
            raise RetryableError("it died")
        return Completion(request.request_id)


def sampler_of(engine: FakeEngine) -> EngineSampler:
    return EngineSampler(engine, Sampling(), 0)


async def fail(engine: FakeEngine, sampler: EngineSampler, turns: int) -> None:
    engine.is_dead = True
    for _ in range(turns):
        with pytest.raises(EpisodeError, match="generation_unavailable: it died"):
            await sampler((3,), 2)
    engine.is_dead = False


def test_an_episode_gets_the_engine_with_the_fewest() -> None:
    first, second = sampler_of(FakeEngine()), sampler_of(FakeEngine())
    replicas = ReplicaSampler([first, second], lambda _: False)
    with replicas.episode() as one, replicas.episode() as other:
        assert (one, other) == (first, second)
        with replicas.episode() as third:
            assert third is first
    with replicas.episode() as one, replicas.episode():
        assert one is first


async def test_a_dead_engine_gets_no_more_episodes() -> None:
    """It would have the fewest."""
    engines = [FakeEngine(), FakeEngine()]
    first, second = map(sampler_of, engines)
    replicas = ReplicaSampler([first, second], lambda _: False)
    await fail(engines[0], first, BROKEN_AFTER)
    with replicas.episode() as one, replicas.episode() as other:
        assert one is other is second
    await fail(engines[1], second, BROKEN_AFTER)
    with replicas.episode() as one:
        assert one is first, "all have died: an episode says so"


async def test_an_engine_that_failed_a_turn_and_answers_gets_episodes() -> None:
    engines = [FakeEngine(), FakeEngine()]
    first, second = map(sampler_of, engines)
    replicas = ReplicaSampler([first, second], lambda _: False)
    for _ in range(BROKEN_AFTER):
        await fail(engines[0], first, 1)
        await first((3,), 2)
    with replicas.episode() as one:
        assert one is first


def test_an_engine_whose_process_has_ended_gets_no_episode() -> None:
    first, second = sampler_of(FakeEngine()), sampler_of(FakeEngine())
    with ReplicaSampler([first, second], [True, False].__getitem__).episode() as one:
        assert one is second


def test_each_engine_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6,7")
    strategy = {"strategy_config": {"tensor_parallel_size": 2}}
    infer = GenerationConfig.model_validate({"strategy_args": strategy, "device": "cuda"})
    assert [replica_environment(infer, index, "")[VISIBLE] for index in (0, 1)] == ["4,5", "6,7"]
    assert VISIBLE not in replica_environment(infer.model_copy(update={"device": "cpu"}), 0, "")


class Endless:
    """Engine whose turns end by their cancellation alone."""

    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def generate(self, *_: object) -> Completion:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError

    def close(self) -> None: ...


class Orders:
    """Connection without a parent process."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[TurnOrder] = asyncio.Queue()

    def start_reading(self, loop: asyncio.AbstractEventLoop) -> None: ...

    def send(self, reply: EngineReply) -> None: ...


async def test_a_cancelled_turn_ends_in_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, connection = Endless(), Orders()

    async def start(*_: object, **__: object) -> Endless:
        return engine

    monkeypatch.setattr(replica_main, "start_serving", start)
    order = EngineOrder(GenerationConfig().model_dump_json().encode(), "", 0, 8, 0)
    serving = asyncio.create_task(replica_main._serve(order, connection))  # type: ignore[arg-type]
    connection.orders.put_nowait(TurnOrder(0, encode_requests([GenerateRequest("r", (3,), Sampling())])))
    await engine.began.wait()
    connection.orders.put_nowait(TurnOrder(0))
    await engine.cancelled.wait()
    connection.orders.put_nowait(TurnOrder(0))  # of a turn that has ended: nothing
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def cancel_a_turn(sampler: EngineSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that its engine gets the cancellation, and answers the next turn."""
    sent: list[bytes] = []
    send = EngineProcess._send

    def record(process: EngineProcess, message: bytes) -> None:
        sent.append(message)
        send(process, message)

    with monkeypatch.context() as patches:
        patches.setattr(EngineProcess, "_send", record)
        turn = asyncio.create_task(sampler((3, 4), 400))
        await asyncio.sleep(0)
        assert len(sent) == 1
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        number = msgspec.msgpack.decode(sent[0][LENGTH_BYTES:], type=TurnOrder).number
        assert sent[1:] == [pack(TurnOrder(number))]
    assert len((await sampler((3, 4), 2)).token_ids) <= 2


async def test_an_engine_that_dies_is_named_and_the_others_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(folder / "run.yaml")
    strategy = EngineStrategy(strategy_name="hf_infer")
    infer = config.actor_infer.model_copy(update={"strategy_args": strategy, "num_replicas": 2})
    async with open_replicas(infer, folder / "policy", build_target(config, "Boxes"), (0,), seed=1) as replicas:
        processes = [each for each in psutil.Process().children() if MODULE in each.cmdline()]
        assert len(processes) == 2
        with replicas.episode() as first, replicas.episode() as second:
            assert first is not second
            assert len((await second((3, 4), 2)).token_ids) <= 2
            with pytest.raises(EpisodeError, match="generation_refused: a token id is outside the vocabulary"):
                await second((3, 10**6), 2)
            with pytest.raises(EpisodeError, match=r"generation_refused: .* an image is not a PNG"):
                await second((3, 4), 2, (PromptImage(0, 1, b""),))
            await cancel_a_turn(second, monkeypatch)
            processes[1].kill()
            processes[1].wait()
            with pytest.raises(EpisodeError, match="generation_unavailable: engine 2 of 2: the engine's process ended"):
                await second((3, 4), 2)
            assert len((await first((3, 4), 2)).token_ids) <= 2
        with replicas.episode() as one, replicas.episode() as other:
            assert one is other is first
    assert not any(each.is_running() for each in processes)
