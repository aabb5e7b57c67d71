"""Generation service over HTTP: OpenAI completions at an env worker's gateway."""

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.benchmarks.harness.load import Prompts, RoundLoad, under_load
from offbeat.benchmarks.harness.process_actor import ProcessActor
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling

if TYPE_CHECKING:
    from offbeat.services.generation.client import GenerationClient

SEQUENCE_LENGTH = 512
TIMEOUT_S = 300.0


class GatewayHost:
    """Gateway with an open episode per agent."""

    def __init__(self, ray_address: str, run_id: str, model: Path, coalesce_s: float) -> None:
        self._ray_address = ray_address
        self._run_id = run_id
        self._model = model
        self._coalesce_s = coalesce_s

    async def start(self) -> None:
        import ray

        from offbeat.services.generation.client import ServeGenerationClient
        from offbeat.services.generation.config import app_name

        ray.init(address=self._ray_address, log_to_driver=False)
        self.serve(ServeGenerationClient(app_name(self._run_id)))

    def serve(self, client: "GenerationClient") -> None:
        from offbeat.services.chat.template import load_chat_template
        from offbeat.services.gateway.server import Gateway
        from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher

        self._batcher = TurnBatcher(client, self._coalesce_s)
        self._template = load_chat_template(self._model)
        self._episodes = ExitStack()
        self._numbers = itertools.count()
        self._gateway = Gateway()
        self._gateway.start()

    async def open(self, agents: int, tokens: int, calls: int) -> tuple[str, list[str]]:
        """Replace the open episodes; return URL and keys. calls: of all agents."""
        from offbeat.services.gateway.session import EpisodeSession, SessionLimits

        self._episodes.close()
        bounds = SessionLimits(SEQUENCE_LENGTH, tokens, max_calls=calls)
        sessions = [EpisodeSession(self._template, self._sample, bounds) for _ in range(agents)]
        for session in sessions:
            self._episodes.enter_context(self._gateway.open_session(session))
        return self._gateway.origin, [session.key for session in sessions]

    async def _sample(self, prompt: tuple[int, ...], num_tokens: int) -> Completion:
        request = GenerateRequest(f"http-{next(self._numbers)}", prompt, Sampling(max_new_tokens=num_tokens))
        return await self._batcher.sample(request)

    def close(self) -> None:
        import ray

        self.end()
        ray.shutdown()

    def end(self) -> None:
        self._episodes.close()


class Agents:
    def __init__(self, host: ProcessActor, vocab_size: int, tokens: int) -> None:
        self._host = host
        self._tokens = tokens
        self._prompts = Prompts(vocab_size, tokens, seed=3)

    async def measure(self, concurrency: int, count: int) -> RoundLoad:
        # vLLM's load generator uses it, too; a call of httpx takes more CPU than the gateway, which is what is measured
        import aiohttp

        origin, keys = self._host.call("open", concurrency, self._tokens, count)
        idle = [{"Authorization": f"Bearer {key}"} for key in keys]
        connections = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(origin, connector=connections, timeout=timeout) as client:

            async def call(request: GenerateRequest) -> int:
                body = {"model": "policy", "prompt": list(request.prompt), "max_tokens": self._tokens}
                headers = idle.pop()
                async with client.post("/v1/completions", json=body, headers=headers) as response:
                    answer = await response.json()
                    response.raise_for_status()
                idle.append(headers)
                return answer["usage"]["completion_tokens"]

            return await under_load(call, self._prompts.take(count), concurrency)
