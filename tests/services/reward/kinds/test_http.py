import json
import threading
from typing import Any

import pytest

from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.factory import make_scorer
from tests.services.reward.kinds.conftest import Service
from tests.services.reward.samples import group_of, score


def test_the_sample_goes_out_as_json_and_the_score_comes_back(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    assert score("http", "ü", {"a": 1}, row={"x": 2}, url=service.url, api_key_env="A_TOKEN") == 0.5
    (request,) = service.requests
    assert request["response"] == "ü"
    assert (request["ground_truth"], request["row"]) == ({"a": 1}, {"x": 2})
    assert request["prompt"] == [{"role": "user", "content": "Why?"}]
    assert service.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "content", "failure"),
    [
        (200, b"oops", Failure.MALFORMED),
        (200, b'{"reward": 1}', Failure.MALFORMED),
        (200, b"[1]", Failure.MALFORMED),
        (200, b'{"score": "1"}', Failure.MALFORMED),
        (200, b'{"score": NaN}', Failure.MALFORMED),
        (200, b'{"score": null}', Failure.MALFORMED),
        (200, b"[" * 100_000, Failure.MALFORMED),
        (200, b'{"score": 1}' + b" " * (1 << 20), Failure.MALFORMED),
        (200, b"\xff\xfe", Failure.MALFORMED),
        (503, b"busy", Failure.UNAVAILABLE),
        (429, b"slow down", Failure.UNAVAILABLE),
        (404, b"no", Failure.ERROR),
        (302, b"", Failure.ERROR),
    ],
)
def test_every_other_reply_is_a_failure(service: Service, status: int, content: bytes, failure: Failure):
    service.reply = lambda: (status, content)
    with pytest.raises(RewardError) as raised:
        score("http", "r", url=service.url)
    assert raised.value.failure is failure


def test_a_service_that_is_down_is_unavailable(service: Service):
    service.close()
    with pytest.raises(RewardError) as raised:
        score("http", "r", url=service.url)
    assert raised.value.failure is Failure.UNAVAILABLE


def test_a_service_that_does_not_answer_times_out(service: Service):
    released = threading.Event()
    service.reply = lambda: (released.wait(20), b"")  # pyright: ignore[reportReturnType]
    with pytest.raises(RewardError) as raised:
        score("http", "r", url=service.url, timeout_s=0.2)
    released.set()
    assert raised.value.failure is Failure.TIMEOUT


def test_a_missing_token_is_refused(service: Service):
    with pytest.raises(ValueError, match="NO_SUCH_TOKEN is not set"):
        score("http", "r", url=service.url, api_key_env="NO_SUCH_TOKEN")


def test_bytes_in_the_row_fail_it(service: Service):
    with pytest.raises(RewardError) as raised:
        score("http", "r", row={"image": b"\0"}, url=service.url)
    assert raised.value.failure is Failure.BAD_ROW


async def compare(service: Service, *responses: str, **settings: Any) -> list[dict[str, float]]:
    reward = {"name": "r", "kind": "http", "scope": "group", "url": service.url, **settings}
    scorer = make_scorer(RewardsConfig.model_validate({"rewards": [reward]}, strict=False), local=True)
    try:
        return await scorer.score_group(group_of(*responses, seed=3))
    finally:
        await scorer.close()


async def test_a_group_goes_out_whole_and_a_list_of_scores_comes_back(service: Service):
    def answer(asked: Any) -> tuple[int, bytes]:
        marks = [member["rewards"]["length"] / 4 for member in asked["members"]]
        return 200, json.dumps({"marks": marks}).encode()

    service.answer = answer
    values = await compare(service, "a", "abc", score_key="marks")
    assert [value["r"] for value in values] == [0.25, 0.75]
    (request,) = service.requests
    assert request["seed"] == 3
    assert [member["response"] for member in request["members"]] == ["a", "abc"]
    assert request["members"][0]["prompt"] == [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("scores", [0.5, "ab", [0.5], [0.5, None], [0.5, "1"], {"0": 0.5, "1": 0.25}, None])
async def test_a_reply_without_a_number_for_each_member_is_a_failure(service: Service, scores: Any):
    service.reply = lambda: (200, json.dumps({"score": scores}).encode())
    with pytest.raises(RewardError) as raised:
        await compare(service, "a", "b")
    assert raised.value.failure is Failure.MALFORMED
