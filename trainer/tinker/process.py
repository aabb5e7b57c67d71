"""Learner of a Tinker server, `python -m offbeat.trainer.tinker.process`, with settings on stdin.

Invariant: a folder has one learner at a time.
"""

import fcntl
import logging
import signal
import sys
from pathlib import Path

import msgspec
import torch

from offbeat.services.errors import FencedError
from offbeat.services.redis.connection import connect
from offbeat.services.telemetry import configure_logging
from offbeat.services.tinker.log import CommandLog
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.tinker.adapters import AdapterPool
from offbeat.trainer.tinker.base_model import export_base, load_base
from offbeat.trainer.tinker.executor import Executor, ExecutorLimits
from offbeat.trainer.tinker.folders import TinkerFolder
from offbeat.trainer.tinker.learner import TinkerLearner

logger = logging.getLogger(__name__)

LOCK = "learner.lock"
EXIT_FENCED = 3


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """folder: of the server; model: of the base model; weights: file for the engine; model_args: JSON of `ModelArgs`."""

    name: str
    redis_url: str
    folder: str
    model: str
    weights: str
    model_args: str
    seed: int
    context: int
    max_tokens: int
    max_models: int
    shared_pass_tokens: int
    num_threads: int
    device: str


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=LearnerSettings)
    configure_logging("learner", None)
    torch.set_num_threads(settings.num_threads)
    root, model = Path(settings.folder), Path(settings.model)
    with (root / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        policy = load_base(model, ModelArgs.model_validate_json(settings.model_args), settings.seed).to(settings.device)
        export_base(policy, root, Path(settings.weights), model)

        def should_retry(error: Exception) -> bool:
            return learner.should_retry(error)

        log = CommandLog(connect(settings.redis_url, should_retry=should_retry), settings.name)
        limits = ExecutorLimits(settings.context, settings.max_tokens, settings.max_models)
        executor = Executor(AdapterPool(policy, model), log, TinkerFolder(root), limits)
        learner = TinkerLearner(log, executor, min(settings.shared_pass_tokens, settings.max_tokens))
        signal.signal(signal.SIGTERM, learner.stop_by_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends its learner
        try:
            learner.run()
        except FencedError as error:
            logger.error("%s", error)
            return EXIT_FENCED
    return 0


if __name__ == "__main__":
    sys.exit(main())
