"""The learner's process: `python -m trainer.cli RUN --redis URL`, which `offbeat learner attach` calls too.

Exit codes: 0 trained to the end, or stopped in order; 1 failed, the last line says how; 2 would fail in the same way again
(its configuration or checkpoint can't be used); 3 another learner has taken the run.
"""

import argparse
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from services.errors import ControlError, FencedError, RetryableError
from services.telemetry import configure_logging

if TYPE_CHECKING:
    from trainer.run import LearnerRun

logger = logging.getLogger(__name__)

DONE, FAILED, UNUSABLE, FENCED = 0, 1, 2, 3


def attach(run_id: str, redis_url: str) -> int:
    """Train a run until its last step or a signal; returns the exit code."""
    started = time.monotonic()
    from services.buffer.connection import connect
    from trainer.run import read_run

    redis = connect(redis_url)
    try:
        run = read_run(redis, run_id)
    except ControlError as error:
        return _fail(UNUSABLE, str(error))
    _prepare_process(run)
    from redis.exceptions import ConnectionError as RedisConnectionError

    from trainer.checkpoint import CheckpointError
    from trainer.process import LearnerProcess

    try:
        LearnerProcess(run, redis, redis_url, started).run()
    except FencedError as error:
        return _fail(FENCED, f"run {run_id}: {error}")
    except (CheckpointError, ControlError) as error:
        logger.exception("this would fail in the same way again")
        return _fail(UNUSABLE, f"run {run_id}: {error}")
    except (RetryableError, RedisConnectionError) as error:
        return _fail(FAILED, f"run {run_id}: {error}")
    except Exception as error:
        logger.exception("the learner failed")
        return _fail(FAILED, f"run {run_id}: {type(error).__name__}: {error}")
    finally:
        redis.close()
    return DONE


def _prepare_process(run: "LearnerRun") -> None:
    """What must be set before torch is loaded, and where the log goes."""
    rank = int(os.environ.get("RANK", "0"))
    os.environ["OMP_NUM_THREADS"] = str(run.config.actor_train.num_threads)
    if run.config.actor_train.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    name = "learner" if rank == 0 else f"learner-{rank}"
    configure_logging(name, Path(run.output_dir) / "logs")
    logger.info("learner of %s, pid %d on %s, rank %d", run.run_id, os.getpid(), socket.gethostname(), rank)


def _fail(code: int, message: str) -> int:
    logger.error("%s", message)
    sys.stderr.write(f"offbeat learner: {message}\n")
    return code


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(prog="trainer.cli", description="Train a run that the mesh plays.")
    parser.add_argument("run", help="the run's id")
    parser.add_argument("--redis", required=True, help="URL of the run's Redis")
    arguments = parser.parse_args()
    code = attach(arguments.run, arguments.redis)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo and DeepSpeed may outlive the work; nothing of theirs is worth waiting for
    os._exit(code)


if __name__ == "__main__":
    main()
