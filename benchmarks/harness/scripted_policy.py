"""Policy of random directions, at once or delayed, behind the protocols of engine and generation service."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from offbeat.envs.frozen_lake.maps import ACTIONS
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.generation.engine import KvLoad, LoadTimes, SessionCounts
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.generation.routing import Unrouted
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    VersionSpan,
)

LOGPROB = -1.4
"""About one direction in four."""


class ScriptedPolicy:
    def __init__(self, chat: ChatFormat, seed: int) -> None:
        self._answers = [(*chat.encode(word), chat.end_id) for word in ACTIONS]
        self._random = random.Random(seed)

    def answer(self, request: GenerateRequest, version: int) -> Completion:
        ids = self._random.choice(self._answers)[: request.sampling.max_new_tokens]
        finish = FinishReason.STOP if ids[-1] in request.sampling.stop_token_ids else FinishReason.LENGTH
        spans = (VersionSpan(0, len(ids), version),)
        return Completion(request.request_id, ids, (LOGPROB,) * len(ids), spans, finish)


class ScriptedEngine:
    def __init__(self, policy: ScriptedPolicy, delay_s: float) -> None:
        self._policy = policy
        self._delay_s = delay_s

    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return self._policy.answer(request, version)

    async def stage(self, path: Path) -> None: ...

    async def load(self, path: Path, version: int) -> LoadTimes:
        del path, version
        return LoadTimes(0.0, 0.0)

    def session_counts(self) -> SessionCounts:
        return SessionCounts()

    def kv_load(self) -> KvLoad:
        return KvLoad()

    async def check(self) -> None: ...

    def close(self) -> None: ...


class ScriptedGeneration(Unrouted):
    def __init__(self, policy: ScriptedPolicy, delay_s: float) -> None:
        self._policy = policy
        self._delay_s = delay_s

    async def generate(
        self, requests: Sequence[GenerateRequest], replica_id: str = ""
    ) -> AsyncIterator[list[Completion]]:
        del replica_id
        await asyncio.sleep(self._delay_s)
        yield [self._policy.answer(request, request.min_version) for request in requests]

    async def abort(self, request_ids: Sequence[str]) -> None: ...


class ReplicaGeneration(Unrouted):
    """`GenerationClient` of a replica in this process."""

    def __init__(self, replica: GenerationReplica) -> None:
        self._replica = replica

    def generate(self, requests: Sequence[GenerateRequest], replica_id: str = "") -> AsyncIterator[list[Completion]]:
        del replica_id
        return self._replica.generate(requests)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._replica.abort(request_ids)
