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
from typing import IO, Literal, Protocol

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
from offbeat.services.generation.engines import start_serving
from offbeat.services.messages.types import Completion, GenerateRequest, PromptImage, Sampling, VersionSpan
from offbeat.services.process import uncollected_imports
from offbeat.trainer.config.issue import ConfigIssue

ServedName = Literal["config", "vllm", "hf_infer", "sglang"]
"""Engine of `actor_infer`, or another one by its name there."""

INTERRUPTED = 130
"""Exit code."""
BROKEN_AFTER = 3
"""Failed turns in a row."""
START_FAILURES = (ImportError, ValidationError, GenerationError, RetryableError, RuntimeError, ValueError, OSError)
"""Errors of an engine's start."""


class SamplingEngine(Protocol):
    """Part of `PolicyEngine` that samples."""

    async def generate(self, request: GenerateRequest, version: int) -> Completion: ...


class EngineSampler:
    """Answers of an engine that serves one version."""

    def __init__(self, engine: SamplingEngine, sampling: Sampling, version: int) -> None:
        """sampling: with the limits of the run, which a turn's only lower."""
        self._engine = engine
        self._sampling = sampling
        self._version = version
        self._numbers = itertools.count()
        self.has_failed = False
        self._failed_in_a_row = 0

    @property
    def is_broken(self) -> bool:
        """Whether its last turns have all failed; an engine may recover from one."""
        return self._failed_in_a_row >= BROKEN_AFTER

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
            self._failed_in_a_row += 1
            raise EpisodeError("generation_unavailable", str(error)) from error
        except GenerationError as error:
            raise EpisodeError("generation_refused", str(error)) from error
        self._failed_in_a_row = 0
        if completion.error:
            raise EpisodeError("generation_refused", completion.error)
        return replace(completion, versions=(VersionSpan(0, len(completion.token_ids), self._version),))


def prepare_engine(config: RunConfig, name: ServedName, folder: Path, replicas: int | None = None) -> GenerationConfig:
    """Return the configuration of engines that serve a policy's folder; of a single one, once what it needs is imported.

    replicas: as in `choose_engine`.

    Call before the event loop runs: errors that vLLM's imports keep refer to the frames of all callers, and so would keep an
    engine that these hold until the interpreter ends, when its client fails.

    Raises:
        ConfigError: it has no such arguments, does not compute such a model, or there are too few GPUs.
        GenerationError: it is not installed.
    """
    infer = choose_engine(config.actor_infer, name, replicas)
    served = config.model_copy(update={"pretrain": str(folder), "actor_infer": infer})
    if issues := [*check_engine_arguments(served), *check_recurrent(served)]:
        raise ConfigError(issues)
    atexit.register(gc.collect)
    if infer.strategy_args.strategy_name == "vllm" and infer.num_replicas == 1:
        from offbeat.services.generation.vllm.arguments import engine_environment

        os.environ.update(engine_environment(infer))
        with TemporaryFile() as printed, _stated_failures("vllm", printed), uncollected_imports():
            importlib.import_module("vllm.v1.engine.async_llm")
    return infer


def choose_engine(infer: GenerationConfig, name: ServedName, replicas: int | None = None) -> GenerationConfig:
    """Return the configuration of the named engine; one that is not the run's takes no arguments passed unchanged.

    Without `device`, it is on GPUs if there are enough, as there is no learner. replicas: None for `num_replicas`, as far
    as this machine's GPUs suffice, and for one on CPUs.

    Raises:
        ConfigError: there are not as many GPUs as `replicas` need.
    """
    strategy = infer.strategy_args
    if name != "config" and name != strategy.strategy_name:
        known = {key: getattr(infer.engine, key) for key in VllmConfig.model_fields}
        strategy = EngineStrategy(strategy_name=name, strategy_config=VllmConfig(**known))
    infer = infer.model_copy(update={"strategy_args": strategy})
    if _takes_gpus(infer):
        infer = infer.model_copy(update={"device": "cuda"})
    return infer.model_copy(update={"num_replicas": _count_replicas(infer, replicas)})


def _takes_gpus(infer: GenerationConfig) -> bool:
    package = GPU_ENGINES.get(infer.strategy_args.strategy_name)
    if "device" in infer.model_fields_set or package is None or count_gpus() < infer.engine.world_size:
        return False
    return bool(infer.strategy_args.python) or is_installed(package)


def _count_replicas(infer: GenerationConfig, replicas: int | None) -> int:
    size = infer.engine.world_size
    if infer.device == "cuda":
        gpus = count_gpus()
        room = gpus // size
        if replicas is not None and replicas > max(1, room):
            each = f"{size} GPUs each (tensor_parallel_size x pipeline_parallel_size)" if size > 1 else "one GPU each"
            remedy = f"take at most {room}" if room else "take fewer GPUs for each, or an engine on the CPU"
            problem = f"{replicas} engines of {each} are more than this machine's {gpus} hold: {remedy}"
            raise ConfigError([ConfigIssue("--replicas", problem)])
    else:
        room = 1  # they would share the CPUs, and each has the weights in memory
    return min(infer.num_replicas, max(1, room)) if replicas is None else replicas


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
        sampler = EngineSampler(engine, sampling_of(target, stop_ids), version)
        try:
            yield sampler
        finally:
            with _redirected_to(printed):
                engine.close()
            if sampler.has_failed:
                show_printed(printed)


def sampling_of(target: PlayTarget, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(
        target.temperature, target.top_p, target.top_k, target.max_new_tokens, stop_ids, target.stop_strings
    )


@contextmanager
def _stated_failures(name: str, printed: IO[bytes]) -> Iterator[None]:
    """Raise failures of an engine's start as `GenerationError`; show what it printed if nothing in it names a cause."""
    try:
        with _redirected_to(printed):
            yield
    except START_FAILURES as error:
        message, shows_output = describe_failure(error)
        if shows_output:
            show_printed(printed)
        raise GenerationError(f"--engine {name}: {message}") from error


def describe_failure(error: Exception) -> tuple[str, bool]:
    """Describe one of `START_FAILURES`, and return whether what the engine printed may say more."""
    match error:
        case ImportError():
            return f"{error}: {INSTALL}", False
        case GenerationError():
            return str(error), False
        case ValidationError():
            return f"it did not start: {error.errors()[0]['msg']}", False
        case _:
            return f"it did not start: {error}", True


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


def show_printed(printed: IO[bytes]) -> None:
    """Write an engine's output to standard error."""
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
