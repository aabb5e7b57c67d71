"""Sampling of many adapters: slots, stops and futures, with an engine that answers at once."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tinker.proto.response_conv import deserialize_sample_response

from offbeat.services.chat.stops import StopStrings
from offbeat.services.errors import MeshError, WeightsError
from offbeat.services.generation.engine import MostLikely, PromptScores, TopCompletion
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, VersionSpan
from offbeat.services.tinker.errors import QueueFullError, TinkerError, UnauthorizedError
from offbeat.services.tinker.futures import MAX_TOP_VALUES, SampleFutures, SampleSize
from offbeat.services.tinker.owners import read_keys
from offbeat.services.tinker.records import AdapterVersion, Result
from offbeat.services.tinker.sampling import AdapterSlots, Sampler
from offbeat.services.tinker.schemas import SampleBody
from offbeat.services.tinker.stops import read_stops
from offbeat.services.tinker.wire import encode_sample_response
from tests.waiting import wait_until


class FakeEngine:
    """Answers 1, 2, 3, ..., written as `<1><2><3>`; calls are recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.requests: list[GenerateRequest] = []

    async def generate_with_top(self, request: GenerateRequest, adapter: str, num_top: int) -> TopCompletion:
        del adapter
        self.requests.append(request)
        count = request.sampling.max_new_tokens
        tokens, reason = tuple(range(1, count + 1)), FinishReason.LENGTH
        texts = request.sampling.stop_strings
        if texts and (end := StopStrings(_decode, texts).find_end(tokens)) is not None:
            tokens, count, reason = tokens[:end], end, FinishReason.STOP
        spans = (VersionSpan(0, 2, 7), VersionSpan(2, count, 8))
        completion = Completion(request.request_id, tokens, (-0.5,) * count, spans, reason)
        return TopCompletion(completion, _top(tokens, num_top))

    async def score(self, prompt: Sequence[int], adapter: str = "", num_top: int = 0) -> PromptScores:
        del adapter
        return PromptScores([-float(token) for token in prompt[1:]], _top(prompt[1:], num_top))

    async def put_adapter(self, name: str, folder: Path, version: int) -> None:
        del folder
        self.calls.append(("put", f"{name}@{version}"))
        await asyncio.sleep(0)

    async def drop_adapter(self, name: str) -> None:
        self.calls.append(("drop", name))

    async def check(self) -> None: ...


def _top(tokens: Sequence[int], count: int) -> list[MostLikely]:
    """Return each token and those after it."""
    first = range(count)
    return [MostLikely([token + i for i in first], [-float(i) for i in first]) for token in tokens] if count else []


def _decode(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def adapter(version: int = 0) -> AdapterVersion:
    return AdapterVersion(folder="/adapter", version=version)


async def test_the_least_recently_used_adapter_makes_room_and_comes_back() -> None:
    engine = FakeEngine()
    slots = AdapterSlots(engine, 2)
    for name in ("a", "b", "a", "c", "b"):
        async with slots.hold(name, adapter()):
            pass
    assert engine.calls == [
        *(("put", "a@0"), ("put", "b@0"), ("drop", "b"), ("put", "c@0")),
        *(("drop", "a"), ("put", "b@0")),
    ]


async def test_an_adapter_in_use_stays_while_others_wait_in_their_order() -> None:
    engine = FakeEngine()
    slots = AdapterSlots(engine, 2)
    async with slots.hold("a", adapter()), slots.hold("b", adapter()):
        waiting = [asyncio.create_task(_use(slots, name)) for name in ("c", "c", "a")]
        await asyncio.sleep(0.01)
        assert engine.calls == [("put", "a@0"), ("put", "b@0")]
    await asyncio.gather(*waiting)
    assert engine.calls[2:] == [("drop", "a"), ("put", "c@0"), ("drop", "b"), ("put", "a@0")]


async def test_an_adapter_used_again_while_it_is_dropped_is_loaded_again() -> None:
    dropping, may_drop = asyncio.Event(), asyncio.Event()

    class SlowEngine(FakeEngine):
        async def drop_adapter(self, name: str) -> None:
            dropping.set()
            await may_drop.wait()
            await super().drop_adapter(name)

    engine = SlowEngine()
    slots = AdapterSlots(engine, 1)
    await _use(slots, "a")
    other = asyncio.create_task(_use(slots, "b"))
    await dropping.wait()
    again = asyncio.create_task(_use(slots, "a"))
    may_drop.set()
    await asyncio.gather(other, again)
    assert engine.calls == [("put", "a@0"), ("drop", "a"), ("put", "b@0"), ("drop", "b"), ("put", "a@0")]


async def test_an_adapter_whose_drop_was_cancelled_is_loaded_again() -> None:
    dropping = asyncio.Event()

    class SlowEngine(FakeEngine):
        async def drop_adapter(self, name: str) -> None:
            await super().drop_adapter(name)
            dropping.set()
            await asyncio.sleep(0.01)

    engine = SlowEngine()
    slots = AdapterSlots(engine, 1)
    await _use(slots, "a")
    other = asyncio.create_task(_use(slots, "b"))
    await dropping.wait()
    other.cancel()
    await asyncio.wait({other})
    await _use(slots, "a")
    assert engine.calls == [("put", "a@0"), ("drop", "a"), ("put", "a@0")]


async def test_a_call_that_stops_waiting_lets_others_take_the_room() -> None:
    slots = AdapterSlots(FakeEngine(), 1)
    async with slots.hold("a", adapter()):
        waiting = asyncio.create_task(_use(slots, "b"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        await _use(slots, "a")


@pytest.mark.parametrize("error", [FileNotFoundError("adapter_config.json"), WeightsError("of another model")])
async def test_an_adapter_that_cannot_be_loaded_is_a_refusal(error: Exception) -> None:
    """As of a deleted checkpoint: the SDK would repeat a sample that fails with a 5xx or 410."""

    class BrokenEngine(FakeEngine):
        async def put_adapter(self, name: str, folder: Path, version: int) -> None:
            del name, folder, version
            raise error

    with pytest.raises(TinkerError, match="was deleted"):
        await make_sampler(BrokenEngine()).sample(body(), "r", "a", adapter())


async def _use(slots: AdapterSlots, name: str) -> None:
    async with slots.hold(name, adapter()):
        await asyncio.sleep(0)


async def test_a_newer_version_is_loaded_and_an_older_one_never() -> None:
    engine = FakeEngine()
    slots = AdapterSlots(engine, 2)
    for version in (1, 1, 3, 2):
        async with slots.hold("a", adapter(version)):
            pass
    assert engine.calls == [("put", "a@1"), ("put", "a@3")]


def body(**changes: Any) -> SampleBody:
    sampling = {"max_tokens": 6, **changes.pop("sampling", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [9]}]}
    return SampleBody.model_validate(
        {"prompt": prompt, "sampling_params": sampling, "sampling_session_id": "s", "seq_id": 0, **changes}
    )


def make_sampler(engine: FakeEngine) -> Sampler:
    return Sampler(engine, [50], context=100, max_adapters=2)


async def test_samples_keep_versions_and_end_after_a_stop_text() -> None:
    engine = FakeEngine()
    stop = {"stop": ["3><4"], "max_tokens": 60}
    answer = await make_sampler(engine).sample(body(num_samples=2, sampling=stop), "r", "", None)
    assert answer.prompt_logprobs is None
    assert [(each.tokens, each.versions, each.stop_reason) for each in answer.sequences] == [
        ((1, 2, 3, 4), [7, 7, 8, 8], "stop")
    ] * 2
    sampling = engine.requests[0].sampling
    assert (sampling.stop_token_ids, sampling.stop_strings) == ((50,), ("3><4",))
    assert [each.request_id for each in engine.requests] == ["r:0", "r:1"]


@pytest.mark.parametrize(("last_n", "expected"), [(None, [None, -2, -3]), (1, [None, None, -3]), (9, [None, -2, -3])])
async def test_the_prompt_is_scored_or_its_last_tokens(last_n: int | None, expected: list[float | None]) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}, {"type": "encoded_text", "tokens": [2, 3]}]}
    asked = body(prompt=prompt, prompt_logprobs=True, prompt_logprobs_last_n=last_n)
    answer = await make_sampler(FakeEngine()).sample(asked, "r", "", None)
    assert deserialize_sample_response(encode_sample_response(answer)).prompt_logprobs == expected


async def test_top_tokens_are_read_by_the_sdk() -> None:
    """Of the scored part of a prompt and of an answer, up to its stop."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    asked = body(
        prompt=prompt,
        prompt_logprobs_last_n=1,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
        sampling={"stop": ["<2>"]},
    )
    answer = deserialize_sample_response(
        encode_sample_response(await make_sampler(FakeEngine()).sample(asked, "r", "", None))
    )
    assert answer.prompt_logprobs is None
    assert answer.topk_prompt_logprobs == [None, None, [(3, 0.0), (4, -1.0)]]
    assert answer.sequences[0].topk_logprobs == [[(1, 0.0)], [(2, 0.0)]]


async def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(TinkerError, match=r"chunks\[0\] is image"):
        await make_sampler(FakeEngine()).sample(body(prompt={"chunks": [{"type": "image"}]}), "r", "", None)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ((50,), ())),
        ([], ((), ())),
        ([4, 5], ((4, 5), ())),
        ("<2>", ((50,), ("<2>",))),
        (["x", "", "<9>"], ((50,), ("x", "<9>"))),
    ],
)
def test_stops_are_those_of_the_sdk(stop: Any, expected: tuple[tuple[int, ...], tuple[str, ...]]) -> None:
    assert read_stops(stop, [50]) == expected


def test_more_stop_texts_than_an_engine_compares_are_refused() -> None:
    with pytest.raises(TinkerError, match=r"stop has 65 texts: a request can have 64"):
        read_stops(["x"] * 65, [50])
    with pytest.raises(TinkerError, match=r"stop has a text of 513 characters: it can have 512"):
        read_stops(["x" * 513], [50])


async def _answer() -> Result:
    return Result(b"x")


async def test_a_sample_is_started_once_and_forgotten_later() -> None:
    futures = SampleFutures(4, keep_s=0.05)
    futures.start("r", "me", SampleSize(1), _answer())
    futures.start("r", "me", SampleSize(1), _answer())
    task = futures.find("r", "me")
    assert task is not None
    assert await task == Result(b"x")
    assert futures.find("r", "other") is None
    await wait_until(lambda: futures.find("r", "me") is None)


async def test_an_owner_with_too_many_samples_is_asked_to_wait() -> None:
    futures = SampleFutures(4)
    futures.start("large", "me", SampleSize(9), asyncio.sleep(60, Result(b"x")))
    with pytest.raises(QueueFullError, match="9 sequences"):
        futures.start("more", "me", SampleSize(1), _answer())
    futures.start("other", "you", SampleSize(4), _answer())
    futures.cancel("large", "me")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    futures.start("more", "me", SampleSize(1), _answer())
    futures.close()


async def test_an_owner_with_too_many_likely_tokens_is_asked_to_wait() -> None:
    futures = SampleFutures(4)
    futures.start("large", "me", SampleSize(1, MAX_TOP_VALUES), asyncio.sleep(60, Result(b"x")))
    with pytest.raises(QueueFullError, match=f"{MAX_TOP_VALUES} likely tokens"):
        futures.start("more", "me", SampleSize(1, 1), _answer())
    futures.start("none", "me", SampleSize(1), _answer())
    futures.start("other", "you", SampleSize(1, MAX_TOP_VALUES), _answer())
    futures.close()


async def test_an_owner_s_oldest_answers_make_room() -> None:
    futures = SampleFutures(4, max_kept_bytes=3)
    for name, owner in (("a", "me"), ("b", "me"), ("other", "you"), ("c", "me")):
        futures.start(name, owner, SampleSize(1), asyncio.sleep(0, Result(b"x" * 2)))
        await wait_until(lambda name=name, owner=owner: (task := futures.find(name, owner)) is not None and task.done())
    await wait_until(lambda: futures.find("b", "me") is None)
    assert futures.find("a", "me") is None
    for name, owner in (("c", "me"), ("other", "you")):
        assert futures.find(name, owner) is not None
    futures.start("a", "me", SampleSize(1), asyncio.sleep(0, Result(b"y" * 9)))
    task = futures.find("a", "me")
    assert task is not None
    assert await task == Result(b"y" * 9)
    await wait_until(lambda: futures.find("c", "me") is None)
    assert futures.find("a", "me") is task


def test_keys_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("tml-a\ntml-b\n")
    keys = read_keys(path)
    assert keys.owner("tml-a") != keys.owner("tml-b")
    for key in ("tml-c", "tml-", "b", ""):
        with pytest.raises(UnauthorizedError):
            keys.owner(key)
    assert read_keys(None).owner("tml-a") == keys.owner("tml-a")
    with pytest.raises(UnauthorizedError, match="begins with tml-"):
        read_keys(None).owner("a")


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("tml-a\nb", "key 2"), (None, "can't be read")])
def test_a_bad_file_of_keys_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MeshError, match=message):
        read_keys(path)
