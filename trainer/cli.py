"""Learner process: `python -m offbeat.trainer.cli RUN`, started by the mesh and by `offbeat learner attach`.

The URL of the run's Redis is passed through the environment, because a command line would expose its password.

Exit codes: 0 finished, detached or stopped; 1 failed (the last line says why; a retry may succeed); 2 a retry would
fail again (invalid configuration, checkpoint or host); 3 fenced by another learner; 4 the run is over; 5 the main
thread hung (`offbeat.trainer.watchdog`).
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
"""Environment variable: URL of the run's Redis."""
DONE, FAILED, UNUSABLE, FENCED, OVER = 0, 1, 2, 3, 4


def attach(run_id: str, redis_url: str, *, num_processes: int | None = None, again: str = "") -> int:
    """Train a run until its last step or a signal; return the exit code.

    num_processes: data-parallel processes, overrides `actor_train.num_processes`. again: command that resumes the run,
    shown after a stop; empty to show none.
    """
    started = time.monotonic()
    from offbeat.services.weights.locality import check_reach
    from offbeat.trainer.run import over, read_run

    redis, complaint = _connected(redis_url)
    if redis is None:
        return _fail(UNUSABLE if complaint.startswith("not a Redis URL") else FAILED, complaint)
    with redis:
        try:
            run = read_run(redis, run_id)
            ended = over(redis, run_id)
            if ended is not None:
                return _fail(OVER, f"run {run_id} is {ended}: {_REMEDIES.get(ended, _RESUME)}")
            _check_host(run, num_processes or run.config.actor_train.num_processes)
            check_reach(redis, run_id, run.config.weights)
        except (ControlError, WeightsError) as error:
            return _fail(UNUSABLE, str(error))
    _prepare_process(run)
    os.environ[REDIS_VARIABLE] = redis_url  # for the other ranks
    return _train(run, redis_url, num_processes, again, started)


_RESUME = "start it again with resume_from_checkpoint=true, then attach"
_REMEDIES = {"finished": "nothing is left to train; its checkpoints/ hold the policy"}


def _connected(redis_url: str) -> "tuple[Redis | None, str]":
    """A client that answers, or why there is none."""
    from offbeat.services.redis.connection import connect
    from offbeat.services.redis.url import address_problem, refusal

    if problem := address_problem(redis_url):
        return None, f"not a Redis URL: {problem}"
    if why := refusal(redis_url):
        return None, why
    return connect(redis_url), ""


def _check_host(run: "LearnerRun", num_processes: int) -> None:
    """Raises ControlError where this host lacks what the run's learner needs."""
    if run.config.pretrain != "tiny" and not run.model_folder.is_dir():
        raise ControlError(
            f"run {run.run_id} trains {run.model_folder}, and {socket.gethostname()} has no such folder: put the model there"
        )
    if run.config.actor_train.device == "cuda":
        import torch

        found = torch.cuda.device_count()
        if found < num_processes:
            raise ControlError(
                f"{num_processes} learner process(es) want a GPU each, and {socket.gethostname()} has {found}: "
                "take fewer (--nproc), or actor_train.device=cpu"
            )


def _train(run: "LearnerRun", redis_url: str, num_processes: int | None, again: str, started: float) -> int:
    from redis.exceptions import ConnectionError as RedisConnectionError

    from offbeat.trainer.learner.progress_view import SilentView, open_view
    from offbeat.trainer.process.learner_process import LearnerProcess
    from offbeat.trainer.training.checkpoint import CheckpointError

    follower = [sys.executable, "-m", "offbeat.trainer.cli", run.run_id]
    number = num_processes or run.config.actor_train.num_processes
    view = open_view(run.config.max_steps) if _is_leader() else SilentView()
    view.print(f"Learner of {run.run_id}: {number} process(es) on {socket.gethostname()}, log in {_log_dir(run)}")
    try:
        process = LearnerProcess(run, redis_url, num_processes=number, follower=follower, view=view, started=started)
        ended = process.run()
    except FencedError as error:
        return _fail(FENCED, f"run {run.run_id}: {error}", view)
    except (CheckpointError, ControlError, WeightsError) as error:
        logger.exception("this would fail in the same way again")
        return _fail(UNUSABLE, f"run {run.run_id}: {error}", view)
    except (MeshError, RedisConnectionError) as error:
        return _fail(FAILED, f"run {run.run_id}: {error}", view)
    except Exception as error:
        logger.exception("the learner failed")
        return _fail(FAILED, f"run {run.run_id}: {type(error).__name__}: {error}", view)
    view.close()
    if _is_leader():
        view.print(_last_words(run, ended, again))
    return DONE


def _last_words(run: "LearnerRun", ended: "LearnerResult", again: str) -> str:
    held = f"; {ended.checkpoint} holds it" if ended.checkpoint else ""
    if ended.finished:
        return f"Trained all {run.config.max_steps} steps{held}."
    if ended.step < 0 and not ended.interrupted:
        return "The run ended while this learner stood by."
    where = f"at step {ended.step} of {run.config.max_steps}{held}" if ended.step >= 0 else "before it had weights"
    if not ended.interrupted:
        return f"The run was stopped, and this learner with it, {where}."
    return f"Detached {where}. The lease is free." + (f"\nGo on with: {again}" if again else "")


def _is_leader() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _log_dir(run: "LearnerRun") -> Path:
    return run.output_dir / "logs"


def _prepare_process(run: "LearnerRun") -> None:
    """Set the environment that torch reads at import, and open the log."""
    rank = int(os.environ.get("RANK", "0"))
    os.environ["OMP_NUM_THREADS"] = str(run.config.actor_train.num_threads)
    if run.config.actor_train.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
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
    """Exit with `code` at once, without waiting for threads of gloo and DeepSpeed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(prog="offbeat.trainer.cli", description="Train a run that the mesh plays.")
    parser.add_argument("run", help="the run's id")
    parser.add_argument("--redis", help=f"URL of the run's Redis; default: {REDIS_VARIABLE}")
    parser.add_argument("--nproc", type=int, help="data-parallel processes; default: actor_train.num_processes")
    arguments = parser.parse_args()
    if arguments.nproc is not None and arguments.nproc < 1:
        parser.error(f"--nproc {arguments.nproc}: at least 1")
    redis_url = arguments.redis or os.environ.get(REDIS_VARIABLE)
    if not redis_url:
        parser.error(f"name the Redis that holds the run: {REDIS_VARIABLE}, or --redis URL")
    end_process(attach(arguments.run, redis_url, num_processes=arguments.nproc))


if __name__ == "__main__":
    main()
