"""Answers of the run's generation engine, without Ray, Redis or a learner.

Invariant: the engine and its processes end with the context.
"""

import atexit
import gc
import importlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

from pydantic import ValidationError

from offbeat.deploy.config.checks.model import check_engine_arguments
from offbeat.deploy.config.checks.recurrent import check_recurrent
from offbeat.deploy.config.devices import GPU_ENGINES, count_gpus, is_installed
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.doctor.libraries import INSTALL
from offbeat.deploy.play.policy import parse_version
from offbeat.deploy.play.target import PlayTarget
from offbeat.services.errors import EpisodeError, GenerationError, RetryableError
from offbeat.services.generation.config import EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.engine import PolicyEngine
from offbeat.services.generation.engines import start_serving
from offbeat.services.messages.types import Completion, GenerateRequest, PromptImage, Sampling, VersionSpan
from offbeat.services.process import uncollected_imports

ServedName = Literal["config", "vllm", "hf_infer", "sglang"]
"""Engine of `actor_infer`, or another one by its name there."""

INTERRUPTED = 130
"""Exit code."""


class EngineSampler:
    """Answers of an engine that serves one version."""

    def __init__(self, engine: PolicyEngine, sampling: Sampling, version: int) -> None:
        """sampling: with the limits of the run, which a turn's only lower."""
        self._engine = engine
        self._sampling = sampling
        self._version = version
        self._numbers = itertools.count()
        self.has_failed = False

    async def __call__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        images: tuple[PromptImage, ...] = (),
        *,
        stop_strings: tuple[str, ...] = (),
    ) -> Completion:
        """Sample, to the limit; raises EpisodeError if the engine refuses the prompt or has died."""
        sampling = replace(
            self._sampling,
            max_new_tokens=min(max_tokens, self._sampling.max_new_tokens),
            stop_strings=(*self._sampling.stop_strings, *stop_strings),
        )
        request = GenerateRequest(f"rollout-{next(self._numbers)}", prompt, sampling, self._version, images)
        try:
            completion = await self._engine.generate(request, self._version)
        except RetryableError as error:
            self.has_failed = True
            raise EpisodeError("generation_unavailable", str(error)) from error
        if completion.error:
            raise EpisodeError("generation_refused", completion.error)
        return replace(completion, versions=(VersionSpan(0, len(completion.token_ids), self._version),))


def prepare_engine(config: RunConfig, name: ServedName, folder: Path) -> GenerationConfig:
    """Return the configuration of an engine that serves a policy's folder, once what it needs is imported.

    Call before the event loop runs: errors that vLLM's imports keep refer to the frames of all callers, and so would keep an
    engine that these hold until the interpreter ends, when its client fails.

    Raises:
        ConfigError: it has no such arguments, or does not compute such a model.
        GenerationError: it is not installed.
    """
    infer = choose_engine(config.actor_infer, name)
    served = config.model_copy(update={"pretrain": str(folder), "actor_infer": infer})
    if issues := [*check_engine_arguments(served), *check_recurrent(served)]:
        raise ConfigError(issues)
    atexit.register(gc.collect)
    if infer.strategy_args.strategy_name == "vllm":
        from offbeat.services.generation.vllm.arguments import engine_environment

        os.environ.update(engine_environment(infer))
        with TemporaryFile() as printed, _stated_failures("vllm", printed), uncollected_imports():
            importlib.import_module("vllm.v1.engine.async_llm")
    return infer


def choose_engine(infer: GenerationConfig, name: ServedName) -> GenerationConfig:
    """Return the configuration of the named engine; one that is not the run's takes no arguments passed unchanged.

    Without `device`, it is on GPUs if there are enough, as there is no learner.
    """
    strategy = infer.strategy_args
    if name != "config" and name != strategy.strategy_name:
        known = {key: getattr(infer.engine, key) for key in VllmConfig.model_fields}
        strategy = EngineStrategy(strategy_name=name, strategy_config=VllmConfig(**known))
    infer = infer.model_copy(update={"strategy_args": strategy})
    package = GPU_ENGINES.get(strategy.strategy_name)
    if "device" in infer.model_fields_set or package is None or count_gpus() < infer.engine.world_size:
        return infer
    return infer.model_copy(update={"device": "cuda"}) if strategy.python or is_installed(package) else infer


@asynccontextmanager
async def open_sampler(
    infer: GenerationConfig, folder: Path, target: PlayTarget, stop_ids: tuple[int, ...], seed: int
) -> AsyncIterator[EngineSampler]:
    """Serve a policy's folder while the context lasts.

    Raises:
        GenerationError: the engine did not start.
    """
    version = parse_version(folder)
    with TemporaryFile() as printed:
        with _stated_failures(infer.strategy_args.strategy_name, printed), _interrupts():
            engine = await start_serving(infer, folder, version, sequence_length=target.sequence_length, seed=seed)
        sampling = Sampling(
            target.temperature, target.top_p, target.top_k, target.max_new_tokens, stop_ids, target.stop_strings
        )
        sampler = EngineSampler(engine, sampling, version)
        try:
            yield sampler
        finally:
            with _redirected_to(printed):
                engine.close()
            if sampler.has_failed:
                _show(printed)


@contextmanager
def _stated_failures(name: str, printed: IO[bytes]) -> Iterator[None]:
    """Raise failures of an engine's start as `GenerationError`; show what it printed if nothing in it names a cause."""
    try:
        with _redirected_to(printed):
            yield
    except ImportError as error:
        raise GenerationError(f"--engine {name}: {error}: {INSTALL}") from error
    except GenerationError as error:
        raise GenerationError(f"--engine {name}: {error}") from error
    except ValidationError as error:
        raise GenerationError(f"--engine {name}: it did not start: {error.errors()[0]['msg']}") from error
    except (RuntimeError, ValueError, OSError, RetryableError) as error:
        _show(printed)
        raise GenerationError(f"--engine {name}: it did not start: {error}") from error


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let Ctrl-C end an engine's start: vLLM catches the `KeyboardInterrupt` in it, and waits for what it has closed.

    Where asyncio waits for a thread meanwhile, the exit passes by this context.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


def _show(printed: IO[bytes]) -> None:
    printed.seek(0)
    sys.stderr.write(printed.read().decode(errors="replace"))


@contextmanager
def _redirected_to(file: IO[bytes]) -> Iterator[None]:
    """Write the standard streams to a file, those of processes that are started meanwhile to their end."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, original in zip((1, 2), kept, strict=True):
            os.dup2(original, stream)
            os.close(original)
