import threading

import pytest

from offbeat.services.reward.errors import Failure, RewardError
from tests.services.reward.kinds.conftest import Service
from tests.services.reward.samples import score


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
