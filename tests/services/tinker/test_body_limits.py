"""Requests that would take much memory, over a real Redis."""

from collections.abc import AsyncIterator

import pytest

from offbeat.services.tinker.records import RefusedCommand, decode_command
from offbeat.services.tinker.refusals import MAX_METADATA_BYTES
from tests.services.tinker.api_server import KEY, Server
from tests.services.tinker.test_sampling import body as sample_body


@pytest.mark.parametrize(
    ("path", "headers", "status", "most_mib"),
    [
        ("/session_heartbeat", {}, 401, 0),
        ("/forward_backward", {"X-API-Key": "none"}, 401, 0),
        ("/no_such_route", {}, 401, 0),
        ("/session_heartbeat", KEY, 413, 17),
        ("/session_heartbeat", KEY | {"Content-Length": "900000000"}, 413, 0),
        ("/forward_backward", KEY, 413, 257),
        ("/forward_backward", KEY | {"Content-Length": "900000000"}, 413, 0),
    ],
)
async def test_a_long_body_is_read_up_to_a_limit(
    server: Server, path: str, headers: dict[str, str], status: int, most_mib: int
) -> None:
    """Without a key nothing is read."""
    taken = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(400):
            taken += 1
            yield bytes(1 << 20)

    answer = await server.client.post(path, content=content(), headers={"content-type": "application/json"} | headers)
    assert (answer.status_code, answer.json().keys()) == (status, {"detail"})
    assert taken <= most_mib


async def test_long_metadata_are_not_kept(server: Server) -> None:
    session, model = await server.create_model()
    metadata = {"a": "x" * MAX_METADATA_BYTES}
    refused = await server.post("/create_session", {"user_metadata": metadata}, 400)
    assert "user_metadata has" in refused["detail"]
    body = {"session_id": session, "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 2}}
    await server.post("/create_model", body | {"user_metadata": metadata}, 400)
    await server.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "a", "user_metadata": metadata})
    data = server.log.command(model, 1)
    assert data is not None
    command = decode_command(data)
    assert isinstance(command, RefusedCommand)
    assert "user_metadata has" in command.error


async def test_a_sample_returns_a_limited_number_of_likely_tokens(server: Server) -> None:
    session = (await server.post("/create_session", {}))["session_id"]
    made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    sampler = (await server.post("/create_sampling_session", made))["sampling_session_id"]
    few = sample_body(num_samples=2, topk_sample_logprobs=1000, topk_prompt_logprobs=1000).model_dump()
    asked = few | {"sampling_session_id": sampler, "seq_id": 0}
    await server.post("/asample", asked)
    refused = await server.post("/asample", asked | {"seq_id": 1, "num_samples": 1024, "sampling_params": {}}, 400)
    assert "lower topk_sample_logprobs" in refused["detail"]
