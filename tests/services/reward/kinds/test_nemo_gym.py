"""A server of NeMo Gym's protocol: `/verify` as `SimpleResourcesServer` declares it, with OpenAI's own response type."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel, TypeAdapter

from offbeat.services.reward.errors import Failure, RewardError
from tests.services.reward.samples import score
from tests.waiting import wait_until_sync

PARAMS: TypeAdapter[Any] = TypeAdapter(ResponseCreateParamsNonStreaming)


class VerifyRequest(BaseModel):
    """Of a verifier that compares the answer with a column of the row."""

    responses_create_params: dict[str, Any]
    response: Response
    expected_answer: str
    category: str = ""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[VerifyRequest]]]:
    app, received = FastAPI(), []

    @app.post("/verify")
    def verify(body: VerifyRequest) -> dict[str, Any]:
        PARAMS.validate_python(body.responses_create_params)
        received.append(body)
        reward = float(body.response.output_text == body.expected_answer)
        failed = {"mask_sample": True, "failure_reason": "the judge is away"} if body.category == "away" else {}
        return {**body.model_dump(), "reward": reward, **failed}

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_until_sync(lambda: running.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/", received
        running.should_exit = True
        thread.join()


def test_a_verifier_gets_the_row_the_prompt_and_the_response(server: tuple[str, list[VerifyRequest]]) -> None:
    url, received = server
    row = {"category": "sums", "responses_create_params": {"temperature": 0.5, "input": "another's"}}
    verify = {"url": url, "ground_truth_field": "expected_answer", "row": row}
    assert [score("nemo_gym", text, "4", **verify) for text in ("4", "5")] == [1.0, 0.0]
    assert received[0].category == "sums"
    sent = {"temperature": 0.5, "input": [{"role": "user", "content": "Why?"}]}
    assert received[0].responses_create_params == sent
    assert [item.type for item in received[0].response.output] == ["message"]


def test_a_column_of_the_row_is_sent_under_its_own_name(server: tuple[str, list[VerifyRequest]]) -> None:
    assert score("nemo_gym", "4", url=server[0], row={"expected_answer": "4"}) == 1.0


@pytest.mark.parametrize(
    ("row", "failure", "words"),
    [
        ({"expected_answer": "4", "category": "away"}, Failure.UNAVAILABLE, "no valid measurement: the judge is away"),
        ({}, Failure.ERROR, "HTTP 422"),
    ],
)
def test_a_reply_that_measures_nothing_is_a_failure(
    server: tuple[str, list[VerifyRequest]], row: dict[str, Any], failure: Failure, words: str
) -> None:
    with pytest.raises(RewardError, match=words) as raised:
        score("nemo_gym", "4", url=server[0], row=row)
    assert raised.value.failure is failure
