"""Learner process: `python -m offbeat.trainer.cli RUN`.

The environment passes the Redis URL: a command line would expose its password.

Exit codes: 0 finished, detached or stopped; 1 failed, a retry may succeed; 2 failed for good (configuration, checkpoint
or host); 3 fenced by another learner; 4 the run is over; 5 hung.
"""

import argparse
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.services.errors import (
    ControlError,
    FencedError,
    MeshError,
    WeightsError,
)
from offbeat.services.log_format import set_process_log_fields
from offbeat.services.process import uncollected_imports
from offbeat.services.telemetry import configure_logging
from offbeat.trainer.engines.node_ranks import RANKS_PER_NODE, NodeRanks, decode_ranks, encode_ranks, split_ranks

if TYPE_CHECKING:
    from redis import Redis

    from offbeat.trainer.learner.progress_view import LearnerView
    from offbeat.trainer.process.learner_process import LearnerResult
    from offbeat.trainer.run import LearnerRun

logger = logging.getLogger(__name__)

REDIS_VARIABLE = "OFFBEAT_REDIS"
"""Environment variable: Redis URL."""
DONE, FAILED, UNUSABLE, FENCED, OVER = 0, 1, 2, 3, 4
MESSAGE = "offbeat learner: "
"""Beginning of the line that says why the process failed."""
END_CHECK_INTERVAL_S = 1.0


def attach(run_id: str, redis_url: str, *, num_processes: int | None = None, resume_command: str = "") -> int:
    """Train a run until its last step or a signal; return the exit code.

    num_processes: over all nodes; overrides `actor_train.num_processes`. resume_command: shown after a stop.
    """
    started = time.monotonic()
    with uncollected_imports():
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
            sizes = _ranks_per_node(run, num_processes)
            _check_host(run, int(os.environ.get("LOCAL_WORLD_SIZE", sizes[0].total)))
            check_reach(redis, run_id, run.config.weights)
        except (ControlError, WeightsError) as error:
            return _fail(UNUSABLE, str(error))
    _prepare_process(run)
    os.environ.update({REDIS_VARIABLE: redis_url, RANKS_PER_NODE: encode_ranks(sizes)})  # for the other ranks
    return _train(run, redis_url, sizes, resume_command, started)


_RESUME = "start it with resume_from_checkpoint=true, then attach"
_REMEDIES = {"finished": "all steps are trained; the policy is in its checkpoints/"}


def _ranks_per_node(run: "LearnerRun", num_processes: int | None) -> tuple[NodeRanks, ...]:
    """Return the ranks by node, rank 0's first."""
    if placed := os.environ.get(RANKS_PER_NODE):
        return decode_ranks(placed)
    train, num_critics = run.config.actor_train, run.config.num_critic_processes
    if "WORLD_SIZE" in os.environ:  # torchrun
        return (NodeRanks(int(os.environ["WORLD_SIZE"]) - num_critics, num_critics),)
    return split_ranks(
        num_processes or train.num_processes,
        run.config.num_gpus_per_node,
        train.device_mapping,
        num_critics,
        run.config.critic.device_mapping if num_critics else None,
    )


def follow(run_id: str, redis_url: str, node: int) -> int:
    """Host a node's ranks until the run ends or a signal; return the exit code."""
    from offbeat.trainer.process.heartbeat import HEARTBEAT_TIMEOUTS
    from offbeat.trainer.process.remote_ranks import FollowerHost
    from offbeat.trainer.process.signals import stop_on_signals
    from offbeat.trainer.run import ended_state, read_run

    redis, problem = _connect(redis_url)
    if redis is None:
        return _fail(UNUSABLE if problem.startswith("not a Redis URL") else FAILED, problem)
    with redis:
        try:
            run = read_run(redis, run_id)
            sizes = _ranks_per_node(run, None)
            if node >= len(sizes):
                raise ControlError(
                    f"the learner of {run_id} has {len(sizes)} node(s), numbered from 0: set num_gpus_per_node to "
                    "divide its processes"
                )
            _check_host(run, sizes[node].total)
        except ControlError as error:
            return _fail(UNUSABLE, str(error))
        os.environ[REDIS_VARIABLE] = redis_url  # for the ranks
        ended = threading.Event()
        timeout_s = HEARTBEAT_TIMEOUTS * run.config.buffer.learner_timeout_s
        host = FollowerHost(run_id, redis_url, node, timeout_s=timeout_s)
        sys.stderr.write(
            f"Node {node} of {len(sizes)} of {run_id}: {sizes[node].total} process(es) on {socket.gethostname()}\n"
        )
        with stop_on_signals(ended.set):
            host.start()
            # The ranks of a run that is over still complete its last call, until rank 0 leaves them.
            while not ended.wait(END_CHECK_INTERVAL_S) and (host.pids or ended_state(redis, run_id) is None):
                pass
            host.stop()
    return DONE


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


def _train(
    run: "LearnerRun", redis_url: str, ranks_per_node: tuple[NodeRanks, ...], resume_command: str, started: float
) -> int:
    with uncollected_imports():
        from redis.exceptions import ConnectionError as RedisConnectionError

        from offbeat.trainer.learner.progress_view import SilentView, open_view
        from offbeat.trainer.process.learner_process import LearnerProcess
        from offbeat.trainer.training.checkpoint import CheckpointError

    follower = [sys.executable, "-m", "offbeat.trainer.cli", run.run_id]
    count = sum(node.total for node in ranks_per_node)
    view = open_view(run.config.max_steps, logging_steps=run.config.logging_steps) if _is_leader() else SilentView()
    nodes = f" and {len(ranks_per_node) - 1} more node(s)" if len(ranks_per_node) > 1 else ""
    view.print(f"Learner of {run.run_id}: {count} process(es) on {socket.gethostname()}{nodes}, log in {_log_dir(run)}")
    try:
        process = LearnerProcess(
            run,
            redis_url,
            num_processes=count,
            follower=follower,
            view=view,
            started=started,
            ranks_per_node=ranks_per_node if _is_leader() else (),
        )
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
    """Set torch's environment before its import; open the log."""
    from offbeat.trainer.run import prepare_environment

    rank = int(os.environ.get("RANK", "0"))
    prepare_environment(run.config)
    name = "learner" if rank == 0 else f"learner-{rank}"
    configure_logging(name, _log_dir(run))
    set_process_log_fields(run=run.run_id)
    logger.info("learner of %s, pid %d on %s, rank %d", run.run_id, os.getpid(), socket.gethostname(), rank)


def _fail(code: int, message: str, view: "LearnerView | None" = None) -> int:
    if view is not None:
        view.close()
    logger.error("%s", message)
    if _is_leader():
        sys.stderr.write(f"{MESSAGE}{message}\n")
    return code


def end_process(code: int) -> None:
    """Exit without waiting for threads of gloo and DeepSpeed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(prog="offbeat.trainer.cli", description="Train a run of the mesh.")
    parser.add_argument("run", help="id of the run")
    parser.add_argument("--redis", help=f"URL of the run's Redis; default: {REDIS_VARIABLE}")
    parser.add_argument("--nproc", type=int, help="processes of the policy; default: actor_train.num_processes")
    arguments = parser.parse_args()
    if arguments.nproc is not None and arguments.nproc < 1:
        parser.error(f"--nproc {arguments.nproc}: must be at least 1")
    redis_url = arguments.redis or os.environ.get(REDIS_VARIABLE)
    if not redis_url:
        parser.error(f"the run's Redis is not set: use --redis URL or {REDIS_VARIABLE}")
    end_process(attach(arguments.run, redis_url, num_processes=arguments.nproc))


if __name__ == "__main__":
    main()
