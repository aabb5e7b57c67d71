"""vLLM's engine processes, which start at once: forks of a process that has imported vLLM.

An interpreter of its own would import it for eight seconds of CPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any
from unittest.mock import patch

from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.vllm.arguments import engine_environment
from tests.paths import ROOT


class EngineProcess(ForkServerProcess):
    """A fork with the variables, standard output and standard error that its parent has when it starts."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_environment": dict(os.environ), "_outputs": (DupFd(1), DupFd(2))}

    def run(self) -> None:
        import torch

        os.environ.clear()
        os.environ.update(self._environment)
        for number, output in enumerate(self._outputs, start=1):
            descriptor = output.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP read the server's
        super().run()


class EngineContext(ForkServerContext):
    Process = EngineProcess


CONTEXT = EngineContext()
CONTEXT.set_forkserver_preload(["tests.engine_imports"])


@contextmanager
def forked_engines() -> Iterator[None]:
    """Make forks of what vLLM starts as processes of this one."""
    from multiprocessing.forkserver import ensure_running

    with patch.dict(os.environ, engine_environment(GenerationConfig()) | {"PYTHONPATH": str(ROOT)}):
        ensure_running()
    with patch("vllm.v1.engine.utils.get_mp_context", lambda: CONTEXT):
        yield
