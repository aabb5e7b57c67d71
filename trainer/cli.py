"""Learner process: `python -m offbeat.trainer.cli RUN`.

The Redis URL is passed through the environment, because a command line would expose its password.

Exit codes: 0 finished, detached or stopped; 1 failed, a retry may succeed; 2 failed for good (configuration, checkpoint
or host); 3 fenced by another learner; 4 the run is over; 5 hung (`offbeat.trainer.watchdog`).
"""

import argparse
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.services.errors import (
    ControlError,
    FencedError,
    MeshError,
    WeightsError,
)
from offbeat.services.telemetry import configure_logging

if TYPE_CHECKING:
    from redis import Redis

    from offbeat.trainer.learner.progress_view import LearnerView
    from offbeat.trainer.process.learner_process import LearnerResult
    from offbeat.trainer.run import LearnerRun

logger = logging.getLogger(__name__)

REDIS_VARIABLE = "OFFBEAT_REDIS"
"""Environment variable: Redis URL."""
DONE, FAILED, UNUSABLE, FENCED, OVER = 0, 1, 2, 3, 4


def attach(run_id: str, redis_url: str, *, num_processes: int | None = None, resume_command: str = "") -> int:
    """Train a run until its last step or a signal; return the exit code.

    num_processes: overrides `actor_train.num_processes`. resume_command: shown after a stop.
    """
    started = time.monotonic()
    from offbeat.services.weights.locality import check_reach
    from offbeat.trainer.run import ended_state, read_run

    redis, problem = _connect(redis_url)
    if redis is None:
        return _fail(UNUSABLE if problem.startswith("not a Redis URL") else FAILED, problem)
    with redis:
        try:
            run = read_run(redis, run_id)
            state = ended_state(redis, run_id)
            if state is not None:
                return _fail(OVER, f"run {run_id} is {state}: {_REMEDIES.get(state, _RESUME)}")
            _check_host(run, num_processes or run.config.actor_train.num_processes)
            check_reach(redis, run_id, run.config.weights)
        except (ControlError, WeightsError) as error:
            return _fail(UNUSABLE, str(error))
    _prepare_process(run)
    os.environ[REDIS_VARIABLE] = redis_url  # for the other ranks
    return _train(run, redis_url, num_processes, resume_command, started)


_RESUME = "start it with resume_from_checkpoint=true, then attach"
_REMEDIES = {"finished": "all steps are trained; the policy is in its checkpoints/"}


def _connect(redis_url: str) -> "tuple[Redis | None, str]":
    """Return a client, or None and the reason."""
    from offbeat.services.redis.connection import connect
    from offbeat.services.redis.url import address_problem, connection_problem

    if problem := address_problem(redis_url):
        return None, f"not a Redis URL: {problem}"
    if reason := connection_problem(redis_url):
        return None, reason
    return connect(redis_url), ""


def _check_host(run: "LearnerRun", num_processes: int) -> None:
    if run.config.pretrain != "tiny" and not run.model_folder.is_dir():
        raise ControlError(
            f"run {run.run_id} trains {run.model_folder}, but {socket.gethostname()} has no such folder: copy the model"
        )
    if run.config.actor_train.device == "cuda":
        import torch

        num_gpus = torch.cuda.device_count()
        if num_gpus < num_processes:
            raise ControlError(
                f"{num_processes} learner process(es) need a GPU each, but {socket.gethostname()} has {num_gpus}: "
                "use fewer (--nproc), or actor_train.device=cpu"
            )


def _train(run: "LearnerRun", redis_url: str, num_processes: int | None, resume_command: str, started: float) -> int:
    from redis.exceptions import ConnectionError as RedisConnectionError

    from offbeat.trainer.learner.progress_view import SilentView, open_view
    from offbeat.trainer.process.learner_process import LearnerProcess
    from offbeat.trainer.training.checkpoint import CheckpointError

    follower = [sys.executable, "-m", "offbeat.trainer.cli", run.run_id]
    count = num_processes or run.config.actor_train.num_processes
    view = open_view(run.config.max_steps, logging_steps=run.config.logging_steps) if _is_leader() else SilentView()
    view.print(f"Learner of {run.run_id}: {count} process(es) on {socket.gethostname()}, log in {_log_dir(run)}")
    try:
        process = LearnerProcess(run, redis_url, num_processes=count, follower=follower, view=view, started=started)
        result = process.run()
    except FencedError as error:
        return _fail(FENCED, f"run {run.run_id}: {error}", view)
    except (CheckpointError, ControlError, WeightsError) as error:
        logger.exception("a restart would fail in the same way")
        return _fail(UNUSABLE, f"run {run.run_id}: {error}", view)
    except (MeshError, RedisConnectionError) as error:
        return _fail(FAILED, f"run {run.run_id}: {error}", view)
    except Exception as error:
        logger.exception("the learner failed")
        return _fail(FAILED, f"run {run.run_id}: {type(error).__name__}: {error}", view)
    view.close()
    if _is_leader():
        view.print(_describe_result(run, result, resume_command))
    return DONE


def _describe_result(run: "LearnerRun", result: "LearnerResult", resume_command: str) -> str:
    checkpoint = f"; checkpoint: {result.checkpoint}" if result.checkpoint else ""
    if result.finished:
        return f"Trained all {run.config.max_steps} steps{checkpoint}"
    if result.step < 0 and not result.interrupted:
        return "The run ended while this learner was on standby."
    progress = f"at step {result.step} of {run.config.max_steps}" if result.step >= 0 else "before its first weights"
    if not result.interrupted:
        return f"The run was stopped {progress}{checkpoint}"
    hint = f"\nResume with: {resume_command}" if resume_command else ""
    return f"Detached {progress}; the lease is free{checkpoint}{hint}"


def _is_leader() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _log_dir(run: "LearnerRun") -> Path:
    return run.output_dir / "logs"


def _prepare_process(run: "LearnerRun") -> None:
    """Set torch's environment before its import, and open the log."""
    rank = int(os.environ.get("RANK", "0"))
    os.environ["OMP_NUM_THREADS"] = str(run.config.actor_train.num_threads)
    if run.config.actor_train.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.update(run.config.environment)
    name = "learner" if rank == 0 else f"learner-{rank}"
    configure_logging(name, _log_dir(run))
    logger.info("learner of %s, pid %d on %s, rank %d", run.run_id, os.getpid(), socket.gethostname(), rank)


def _fail(code: int, message: str, view: "LearnerView | None" = None) -> int:
    if view is not None:
        view.close()
    logger.error("%s", message)
    if _is_leader():
        sys.stderr.write(f"offbeat learner: {message}\n")
    return code


def end_process(code: int) -> None:
    """Exit without waiting for threads of gloo and DeepSpeed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(prog="offbeat.trainer.cli", description="Train a run of the mesh.")
    parser.add_argument("run", help="id of the run")
    parser.add_argument("--redis", help=f"URL of the run's Redis; default: {REDIS_VARIABLE}")
    parser.add_argument("--nproc", type=int, help="data-parallel processes; default: actor_train.num_processes")
    arguments = parser.parse_args()
    if arguments.nproc is not None and arguments.nproc < 1:
        parser.error(f"--nproc {arguments.nproc}: must be at least 1")
    redis_url = arguments.redis or os.environ.get(REDIS_VARIABLE)
    if not redis_url:
        parser.error(f"the run's Redis is not set: use --redis URL or {REDIS_VARIABLE}")
    end_process(attach(arguments.run, redis_url, num_processes=arguments.nproc))


if __name__ == "__main__":
    main()
