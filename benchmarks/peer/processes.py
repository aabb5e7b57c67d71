"""Processes of both sides."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import offbeat
from offbeat.benchmarks.peer.cpu_meter import CPU, CpuMeter
from offbeat.benchmarks.peer.options import PeerSideError
from offbeat.benchmarks.peer.trl_worker import job as jobs
from offbeat.deploy.config.loader import dump_yaml
from offbeat.deploy.config.run import RunConfig
from offbeat.services.process import bind_to_thread

GUEST = "offbeat.benchmarks.peer.trl_worker"
BIG = str(1 << 32)


def guest_environment(folder: Path, threads: int) -> dict[str, str]:
    """Return the environment of TRL's venv: links to our packages, and malloc settings that keep memory between steps."""
    links = folder / "path"
    links.mkdir(parents=True, exist_ok=True)
    if not (links / "offbeat").exists():
        (links / "offbeat").symlink_to(Path(offbeat.__file__).parent)
    return {
        **os.environ,
        "PYTHONPATH": str(links.resolve()),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "MALLOC_MMAP_THRESHOLD_": BIG,
        "MALLOC_TRIM_THRESHOLD_": BIG,
        "MALLOC_TOP_PAD_": str(1 << 26),
    }


def run_trl(python: Path, job: jobs.TrainJob, folder: Path, timeout_s: float) -> None:
    jobs.write(folder / "job.json", job)
    command = [str(python), "-m", f"{GUEST}.train", str((folder / "job.json").resolve())]
    _run(command, folder / "trl.log", timeout_s, guest_environment(folder, job.threads), folder / CPU)


def evaluate(python: Path, job: jobs.EvaluateJob, folder: Path, timeout_s: float) -> list[float]:
    jobs.write(folder / "evaluate.json", job)
    command = [str(python), "-m", f"{GUEST}.evaluate", str((folder / "evaluate.json").resolve())]
    _run(command, folder / "evaluate.log", timeout_s, guest_environment(folder, job.threads))
    return json.loads(Path(job.output).read_text(encoding="utf-8"))


def run_offbeat(config: RunConfig, folder: Path, timeout_s: float) -> None:
    log = folder / "offbeat.log"
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", str(_written(config, log))]
    _run(command, log, timeout_s, dict(os.environ), folder / CPU)


def make_policy(config: RunConfig, out: Path, timeout_s: float) -> None:
    log = out.with_suffix(".log")
    command = [sys.executable, "-m", "offbeat.benchmarks.peer.policy", str(_written(config, log)), str(out)]
    _run(command, log, timeout_s, dict(os.environ))


def _written(config: RunConfig, log: Path) -> Path:
    log.parent.mkdir(parents=True, exist_ok=True)
    file = log.with_suffix(".yaml")
    file.write_text(dump_yaml(config), encoding="utf-8")
    return file


def _run(command: list[str], log: Path, timeout_s: float, environment: dict[str, str], cpu: Path | None = None) -> None:
    """Run to the end; interrupt, then kill on timeout. cpu: file for CPU times."""
    with log.open("wb") as out:
        mortal = bind_to_thread(command, by=signal.SIGTERM)
        process = subprocess.Popen(mortal, stdout=out, stderr=subprocess.STDOUT, env=environment)
        meter = CpuMeter(process.pid, cpu) if cpu is not None else None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise PeerSideError(f"not done in {timeout_s:g} s: {' '.join(command[1:4])}\nRead {log}") from None
        finally:
            if meter is not None:
                meter.stop()
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(20.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if code:
        raise PeerSideError(f"{' '.join(command[1:4])} ended with {code}\nRead {log}")
