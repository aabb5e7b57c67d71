"""What a run pays for the console's annotations, and for traces of 1 group in 100; CPU time, on a run's recorded batches.

python -m offbeat.benchmarks.studies.observation_costs RUN_FOLDER [--rounds 20]
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
from rich.console import Console

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_folder import CONFIG, newest_checkpoint
from offbeat.services.messages.types import Completion, EpisodeKind, EpisodeTask, Group, Sampling, VersionSpan
from offbeat.services.process import free_port
from offbeat.services.tracing.config import TelemetryConfig
from offbeat.services.tracing.factory import open_episode_tracer, open_step_tracer
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.trackers.metrics_file import METRICS_FILE
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.policy_trainer import PolicyTrainer

SAMPLE_RATE = 0.01
REPEATED = 20
"""Times that a batch's episodes are traced for one measurement."""


def cpu_s(call: Callable[[], object]) -> float:
    """Return the CPU time of a call, of all threads."""
    began = time.process_time()
    call()
    return time.process_time() - began


def measure_annotations(
    config: RunConfig, folder: Path, batches: Sequence[StepBatch], rounds: int
) -> tuple[float, float, float]:
    """Return CPU seconds of a step, of its annotations in all, and of these on the training path."""
    shown = config.model_copy(update={"console": config.console.model_copy(update={"keep_steps": 16})})
    ranks = ranks_of_environment("cpu")
    torch.set_num_threads(config.actor_train.num_threads)
    steps: list[float] = []
    extra: list[float] = []
    path: list[float] = []
    with process_group(ranks), tempfile.TemporaryDirectory(prefix="offbeat-bench-") as out:
        trainer = PolicyTrainer(LearnerRun(config.exp_name, "bench", folder, shown), ranks)
        checkpoint = newest_checkpoint(folder)
        assert checkpoint is not None, f"{folder} has no checkpoint"
        trainer.load(checkpoint[1], 0.0)
        log = BatchLog(Path(out), num_shown=16)
        for number in range(rounds):
            batch = batches[number % len(batches)]

            def annotate(batch: StepBatch = batch) -> None:
                log.record(batch, config.actor_train.training_args.learning_rate)
                if trainer.last_step is not None:
                    log.record_tokens(trainer.last_step)

            steps.append(cpu_s(lambda batch=batch: trainer.train(batch)))
            began = time.thread_time()
            extra.append(cpu_s(lambda: (annotate(), log.flush())))
            path.append(time.thread_time() - began)
    return statistics.median(steps), statistics.median(extra), statistics.median(path)


def trace_episodes(groups: Sequence[Group], telemetry: TelemetryConfig) -> int:
    """Trace what the workers and the learner do with groups, with new names each time; return the number of episodes."""
    episodes = open_episode_tracer(telemetry, run_id="bench", run_uid="", worker_id="w")
    steps = open_step_tracer(telemetry, run_id="bench", algorithm="grpo")
    sampling, count = Sampling(), 0
    for repetition in range(REPEATED):
        for group in groups:
            for member in group.trajectories:
                name = f"{repetition}-{group.group_id}"
                task = EpisodeTask(EpisodeKind.TRAIN, name, group.number, member.index, 0, 0)
                with episodes.episode(task, member.tag, sampling, has_tools=False) as spans:
                    with spans.reset():
                        pass
                    for turn in member.turns:
                        length = turn.end - turn.start
                        with spans.chat((0,) * turn.start, length) as record:
                            record(Completion("", (0,) * length, versions=(VersionSpan(0, length, 1),)))
                        with spans.step():
                            pass
                    spans.finish(member)
                count += 1
        with steps.train(repetition, groups):
            pass
    episodes.close()
    steps.close()
    return count


def collect(port: int) -> None:
    """Serve a collector that keeps nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


def measure_traces(groups: Sequence[Group], rounds: int) -> tuple[float, float]:
    """Return CPU seconds of an episode's spans with export, at 1 in 100 and if every group is traced."""
    port = free_port()
    collector = multiprocessing.Process(target=collect, args=(port,), daemon=True)
    collector.start()
    try:
        medians: list[float] = []
        for rate in (SAMPLE_RATE, 1.0):
            telemetry = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}", sample_rate=rate)
            taken = []
            for _ in range(rounds):
                began = time.process_time()
                count = trace_episodes(groups, telemetry)
                taken.append((time.process_time() - began) / count)
            medians.append(statistics.median(taken))
    finally:
        collector.kill()
        collector.join()
    return medians[0], medians[1]


def read_rate(folder: Path) -> tuple[float, float]:
    """Return the run's median step time, and trajectories per second."""
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    steps = [row["values"] for row in rows if row["source"] == "learner" and row["step"]][1:]
    seconds = statistics.median(step["time/step_s"] for step in steps)
    return seconds, statistics.median(step["trajectories"] for step in steps) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    config = load_run(options.folder / CONFIG, started=True).model_copy(update={"output_dir": options.folder})
    log = BatchLog(options.folder)
    batches = [log.read(step, config).batch for step in log.steps()]
    step_s, rate = read_rate(options.folder)
    train, extra, path = measure_annotations(config, options.folder, batches, options.rounds)
    few, every = measure_traces([group for batch in batches for group in batch.groups], max(3, options.rounds // 4))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"run: a step in {step_s:.3f} s (median), {rate:.0f} trajectories/s; batches of {len(batches)} steps")
    console.print(
        f"annotations of a step: {1e3 * extra:.2f} ms of CPU, {1e3 * path:.2f} on the training path; "
        f"training it {1e3 * train:.0f} ms: {extra / train:.2%} of that, {extra / step_s:.2%} of the step's time"
    )
    console.print(
        f"spans of an episode: {1e6 * few:.0f} us of CPU at 1 in 100, {1e6 * every:.0f} us if all are traced: "
        f"{few * rate:.3%} and {every * rate:.2%} of a core at the run's rate"
    )


if __name__ == "__main__":
    main()
