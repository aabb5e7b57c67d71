"""vLLM for several runs at once, each with an adapter of its own on one base.

Invariants: the base is loaded from the first run's file and replaced only while no other run has an adapter or loads one; a
run whose base differs is refused; whole weights of a run are never loaded.
"""

# pyright: basic
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offbeat.services.errors import GenerationError, WeightsError, WeightsRefusedError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import KvLoad, LoadTimes, SessionCounts
from offbeat.services.generation.vllm.adapters import VllmAdapterEngine
from offbeat.services.generation.vllm.arguments import WORKER_EXTENSION
from offbeat.services.messages.types import Completion, GenerateRequest
from offbeat.services.weights.transports.lora import FILES, base_digest

BASE = FILES[1]


class RunEngine:
    """`PolicyEngine` of one run of several."""

    def __init__(self, shared: "VllmSharedEngine", name: str) -> None:
        self._shared = shared
        self._name = name
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.has_adapter = False
        self.is_on_base = False
        """Whether it has an adapter, or loads one, for the engine's base."""

    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        """Sample by the run's adapter, whose versions the engine knows."""
        del version
        named = replace(request, request_id=self._own(request.request_id))
        self._num_running += 1
        self._idle.clear()
        try:
            # not repeated: the replica samples again, and counts it
            top = await self._shared.adapters.generate_with_top(named, self._name, 0, repeats=False)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
        return replace(top.completion, request_id=request.request_id)

    async def stage(self, path: Path) -> None:
        """Do nothing: an adapter is small, and a base is loaded before the run samples."""

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Load an adapter, after its base where the engine has none; raises WeightsRefusedError if it does not fit."""
        digest = base_digest(path)
        if not digest:
            raise WeightsRefusedError("the engine serves several runs, and loads no run's whole weights")
        await self._shared.take_base(self, path / BASE, digest)
        try:
            times = await self._shared.adapters.put_adapter(self._name, path, version)
        except WeightsError as error:
            self.is_on_base = self.has_adapter
            raise WeightsRefusedError(str(error)) from error
        self.has_adapter = True
        return times

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._shared.adapters.abort([self._own(each) for each in request_ids])

    async def sleep(self) -> None:
        raise GenerationError("an engine of several runs does not sleep")

    async def wake(self) -> None:
        raise GenerationError("an engine of several runs does not sleep")

    def session_counts(self) -> SessionCounts:
        return SessionCounts()

    def kv_load(self) -> KvLoad:
        return self._shared.adapters.kv_load()

    async def check(self) -> None:
        await self._shared.check()

    def close(self) -> None:
        """Do nothing: the engine is that of other runs, too."""

    async def leave(self) -> None:
        """Drop the adapter once no request uses it."""
        await self._idle.wait()
        await self._shared.adapters.drop_adapter(self._name)

    def _own(self, request_id: str) -> str:
        """Return an id that no other run's request has."""
        return f"{self._name}/{request_id}"


class VllmSharedEngine:
    def __init__(self, adapters: VllmAdapterEngine) -> None:
        self.adapters = adapters
        self._base = ""
        """Digest of the base's file."""
        self._taking_base = asyncio.Lock()
        self._runs: dict[str, RunEngine] = {}

    @classmethod
    async def start(
        cls, config: GenerationConfig, model: Path, *, sequence_length: int, seed: int, transport: str = "shm"
    ) -> "VllmSharedEngine":
        engine = config.engine
        assert engine.max_lora_rank is not None, "checked before the application is deployed"
        adapters = await VllmAdapterEngine.start(
            config,
            model,
            sequence_length=sequence_length,
            seed=seed,
            max_adapters=engine.max_loras,
            max_lora_rank=engine.max_lora_rank,
            max_top=1,
            worker_extension=WORKER_EXTENSION,
            transport=transport,
        )
        return cls(adapters)

    def salted(self, salt: str) -> RunEngine:
        self._runs[salt] = RunEngine(self, salt)
        return self._runs[salt]

    async def release(self, salt: str) -> None:
        await self._runs[salt].leave()
        del self._runs[salt]

    async def take_base(self, run: RunEngine, path: Path, digest: str) -> None:
        """Load the base of a run's adapter, unless it is there; raises WeightsRefusedError if others have another one."""
        async with self._taking_base:
            if digest == self._base:
                run.is_on_base = True
                return
            num_others = sum(each.is_on_base for each in self._runs.values() if each is not run)
            if num_others:
                raise WeightsRefusedError(
                    f"its base model is not that of the {num_others} run(s) which this engine serves: the weights differ"
                )
            self._base = ""
            await self.adapters.load(path, 0)
            self._base, run.is_on_base = digest, True

    async def check(self) -> None:
        await self.adapters.check()

    def close(self) -> None:
        self.adapters.close()
