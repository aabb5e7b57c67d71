"""The agents of `offbeat bench generation` reach the policy through a real gateway."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

from offbeat.benchmarks.generation_http import Agents, GatewayHost
from offbeat.envs.frozen_lake import WORDS
from offbeat.services.generation.routing import Unrouted
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    VersionSpan,
)
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy


class Answering(Unrouted):
    """A `GenerationClient` that says one word until the end."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(
        self, requests: Sequence[GenerateRequest], replica_id: str = ""
    ) -> AsyncIterator[list[Completion]]:
        del replica_id
        self.requests += requests
        for request in requests:
            num_tokens = request.sampling.max_new_tokens
            spans = (VersionSpan(0, num_tokens, 0),)
            yield [Completion(request.request_id, (5,) * num_tokens, (-0.5,) * num_tokens, spans, FinishReason.LENGTH)]

    async def abort(self, request_ids: Sequence[str]) -> None:
        raise AssertionError(request_ids)


class Beside:
    """A `ProcessActor` whose object lives in this process; its methods must not wait for anything."""

    def __init__(self, host: GatewayHost) -> None:
        self._host = host

    def call(self, method: str, *args: Any) -> Any:
        coroutine = getattr(self._host, method)(*args)
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError(f"{method} waits")


async def test_agents_get_every_token_that_they_ask_for_over_http(tmp_path: Path) -> None:
    client, host = Answering(), GatewayHost("", "run", tmp_path, 0.001)
    write_tiny_policy(tmp_path, TinyPolicyConfig(), WORDS)
    host.serve(client)
    load = await Agents(cast(Any, Beside(host)), 16, tokens=7).measure(3, 12)
    assert len(client.requests) == 12
    assert {request.sampling.max_new_tokens for request in client.requests} == {7}
    assert len({request.prompt for request in client.requests}) == 12, "no prompt is sent twice"
    assert load.tokens_per_s > 0
    assert 0 < load.p50_s <= load.p99_s
    limits = {session.bounds.max_calls for session in host._gateway._sessions.values()}
    assert limits == {12}, "one agent may make all calls of a round"
    host.end()
