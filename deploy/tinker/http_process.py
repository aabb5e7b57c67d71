"""HTTP server and engine, `python -m offbeat.deploy.tinker.http_process`, with settings on stdin.

Invariant: the socket is the parent's, so that clients wait while it is replaced.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec
import uvicorn

from offbeat.services.chat.tokenizer import find_end_ids, load_tokenizer
from offbeat.services.errors import RetryableError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.hf.engine import HfEngine
from offbeat.services.generation.tenancy import read_architecture
from offbeat.services.redis.connection import connect_async
from offbeat.services.telemetry import configure_logging
from offbeat.services.tinker.app import create_app
from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.owners import read_keys
from offbeat.services.tinker.sampling import BASE_VERSION, Sampler
from offbeat.services.tinker.service import BaseModelInfo, TinkerService
from offbeat.services.tinker.store import TinkerStore

logger = logging.getLogger(__name__)

POLL_S, CHECK_INTERVAL_S = 0.1, 1.0
KEEP_ALIVE_S = 120
GRACE_S = 1
"""For calls in progress at shutdown, which clients repeat."""
REDIS_CONNECTIONS = 256
"""Waiting fetches hold none."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """descriptor: of the listening socket; weights: file of the base model, written by the learner; the JSON of
    configs."""

    name: str
    redis_url: str
    descriptor: int
    model: str
    model_name: str
    weights: str
    generation: str
    tinker: str
    context: int
    seed: int


class _ChildServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(settings: HttpSettings) -> None:
    """Serve until SIGTERM; raises RetryableError if the engine dies."""
    config = TinkerConfig.model_validate_json(settings.tinker)
    model = Path(settings.model)
    engine = await _start_engine(settings)
    tokenizer = load_tokenizer(model)
    sampler = Sampler(
        engine,
        tokenizer,
        find_end_ids(model, tokenizer),
        context=settings.context,
        max_adapters=config.max_adapters,
    )
    redis = connect_async(settings.redis_url, max_connections=REDIS_CONNECTIONS)
    architecture = str(read_architecture(model).get("model_type", ""))
    base = BaseModelInfo(settings.model_name, str(model), architecture, settings.context)
    service = TinkerService(TinkerStore(redis, settings.name, config), sampler, base, config)
    server = _ChildServer(
        uvicorn.Config(
            create_app(service, read_keys(config.keys_file), config),
            log_level="warning",
            access_log=False,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )

    def stop() -> None:
        server.should_exit = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    watch = asyncio.create_task(_watch(engine, stop))
    try:
        await server.serve(sockets=[socket.socket(fileno=settings.descriptor)])
        if watch.done():
            watch.result()
    finally:
        watch.cancel()
        engine.close()
        await redis.aclose()


async def _start_engine(settings: HttpSettings) -> HfEngine:
    config = GenerationConfig.model_validate_json(settings.generation)
    engine = await HfEngine.start(config, Path(settings.model), sequence_length=settings.context, seed=settings.seed)
    weights = Path(settings.weights)
    await asyncio.to_thread(_wait_for_file, weights)
    await engine.load(weights, BASE_VERSION)
    return engine


def _wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(POLL_S)


async def _watch(engine: HfEngine, stop: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        try:
            await engine.check()
        except RetryableError:
            stop()
            raise


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=HttpSettings)
    configure_logging("http", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    asyncio.run(serve(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
