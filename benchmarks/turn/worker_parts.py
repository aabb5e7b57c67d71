"""Parts of a turn in the env worker's process."""

from pathlib import Path

from offbeat.benchmarks.turn.part_times import PartTimes

WORKER_PARTS = ("env", "prompt", "call", "back", "record", "submit")
TURN = "record"
"""Part that is called once a turn."""


def measure_worker(path: Path) -> None:
    from ray.serve import handle

    from offbeat.envs.frozen_lake.env import FrozenLakeEnv
    from offbeat.services.buffer import worker_client
    from offbeat.services.generation import client
    from offbeat.services.rollout.episodes import episode, recorder

    parts = PartTimes(path, WORKER_PARTS)
    for name in ("reset", "step"):
        parts.measure(FrozenLakeEnv, name, "env")
    parts.measure(episode, "fill_template", "prompt")
    parts.measure(recorder.AppendOnlyRecorder, "ask", "prompt")
    parts.measure(client, "encode_requests", "call")
    parts.measure(handle.DeploymentHandle, "remote", "call")
    parts.measure(client, "decode_completions", "back")
    parts.measure(recorder.AppendOnlyRecorder, "add_completion", TURN)
    parts.measure(recorder.AppendOnlyRecorder, "record", "submit")
    parts.measure(worker_client, "encode_trajectory", "submit")
