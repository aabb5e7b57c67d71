"""Process of an SGLang server, and its command line."""

# pyright: basic
import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
from pydantic import JsonValue

from offbeat.services.errors import GenerationError
from offbeat.services.generation.config import UTILIZATION, GenerationConfig, VllmConfig
from offbeat.services.generation.kv_cache import ITEMSIZE, bytes_per_token
from offbeat.services.process import bind_to_thread, free_port, terminate

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # /health would sample a token, which waits for as long as an update pauses the engine
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # for `CONTEXT_MARGIN`: sequences do not exceed the model's own
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "true",
}
PYTHON_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
"""Of this Python, and wrong for another one."""
CONTEXT_MARGIN = 8
"""Tokens: SGLang refuses prompts that nearly fill its context, and ends answers before they fill it."""
PROGRAM = ("-m", "sglang.launch_server")
SHARED_FILES = "/dev/shm/sglang_"
"""Start of the names of files that SGLang leaves when it ends."""
POLL_INTERVAL_S = 0.2
SHUTDOWN_TIMEOUT_S = 5.0


def server_arguments(config: GenerationConfig, model: Path, sequence_length: int, seed: int) -> list[str]:
    """Return the arguments of `sglang.launch_server`; keys of `strategy_config` that vLLM lacks are passed unchanged."""
    engine = config.engine
    arguments: dict[str, JsonValue] = {
        "model-path": str(model),
        "load-format": "dummy",
        "weight-version": "-1",
        "skip-tokenizer-init": not has_tokenizer(config),
        "dtype": config.model_args.dtype or "auto",
        "context-length": (engine.max_model_len or sequence_length) + CONTEXT_MARGIN,
        "max-running-requests": engine.max_num_seqs,
        "tp-size": engine.tensor_parallel_size,
        "pp-size": engine.pipeline_parallel_size,
        "random-seed": seed,
        "device": config.device,
        "disable-cuda-graph": config.enforces_eager,
        "disable-radix-cache": not engine.enable_prefix_caching,
        "enable-memory-saver": bool(engine.enable_sleep_mode),
        "enable-weights-cpu-backup": bool(engine.enable_sleep_mode),
        "log-level": "warning",
    }
    return _command_line(arguments | _cache_size(config, model) | _named_by_dashes(engine))


def has_tokenizer(config: GenerationConfig) -> bool:
    """Return whether the server decodes answers, which it needs for stop strings and does for all requests."""
    return bool(config.generating_args.stop_strings)


def _cache_size(config: GenerationConfig, model: Path) -> dict[str, JsonValue]:
    """Return the share of a GPU for weights, keys and values; on a CPU, the tokens of `kv_cache_gib`."""
    if config.device == "cuda":
        return {"mem-fraction-static": config.engine.gpu_memory_utilization or UTILIZATION}
    architecture = json.loads((model / "config.json").read_text(encoding="utf-8"))
    token_bytes = bytes_per_token(architecture, ITEMSIZE[config.model_args.dtype or "float32"])
    return {"max-total-tokens": int(config.kv_cache_gib * 2**30) // token_bytes}


def server_environment(config: GenerationConfig) -> dict[str, str]:
    """Return the environment of the server's process."""
    kept = dict(os.environ)
    if config.strategy_args.python:
        kept = {name: value for name, value in kept.items() if name not in PYTHON_VARIABLES}
    if config.device == "cpu":
        threads = str(max(1, round(config.cpus_per_replica)))
        kept |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": threads}
    return kept | ENVIRONMENT


def _named_by_dashes(engine: VllmConfig) -> dict[str, JsonValue]:
    return {name.replace("_", "-"): value for name, value in (engine.model_extra or {}).items()}


def _command_line(arguments: Mapping[str, JsonValue]) -> list[str]:
    words: list[str] = []
    for name, value in arguments.items():
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not False and value is not None:
            words += [f"--{name}", str(value)]
    return words


class SglangServer:
    """Child process that ends with the thread that started it."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        python: str = "",
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Raises GenerationError if there is no SGLang or no such Python."""
        if python and shutil.which(python) is None:
            raise GenerationError(f"actor_infer.strategy_args.python: there is no program {python!r} where engines run")
        if program == PROGRAM and not python and find_spec("sglang") is None:
            raise GenerationError(
                "SGLang is not installed: pip install sglang where engines run, name a Python that has it by "
                "strategy_args.python, or take vllm"
            )
        port = free_port()
        command = [python or sys.executable, *program, *arguments, "--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(bind_to_thread(command), env=environment, stdin=subprocess.DEVNULL)
        self._shared_files: set[str] = set()
        self.url = f"http://127.0.0.1:{port}"

    async def wait_ready(self) -> None:
        """Raise GenerationError if the server ends before it answers."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as http:
            while not await _is_ready(http):
                if self.exit_code is not None:
                    raise GenerationError(f"SGLang ended with code {self.exit_code} while it started: see its log")
                await asyncio.sleep(POLL_INTERVAL_S)
        self._shared_files.update(_open_files(self._process.pid))

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        terminate(self._process, SHUTDOWN_TIMEOUT_S)
        for path in self._shared_files:
            Path(path).unlink(missing_ok=True)


def _open_files(pid: int) -> Iterator[str]:
    """Yield the shared files of a server's processes."""
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                yield from (each.path for each in process.open_files() if each.path.startswith(SHARED_FILES))


async def _is_ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).is_success
    except httpx.TransportError:
        return False
