"""Runs of each pipeline's shipped configuration over seeds, and a plot of each pipeline.

    python -m offbeat.benchmarks.studies.pipeline_curves --out DIR [--only NAME ...] [--seeds 42,1,2] [--plot FOLDER]

A run is `DIR/NAME-sSEED`: a finished one is kept, a stopped one resumed. `dpo` and `dpo_episodes` start from the first
seed's `sft`; `distill` has a teacher for each seed. `--plot` plots the finished runs and starts none.
"""

# pyright: basic
import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from offbeat import Run, RunFailedError, train
from offbeat.benchmarks.harness.result import build
from offbeat.benchmarks.studies.pipeline_plot import PANELS, draw

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
LAKES = CONFIGS / "quickstart.yaml"
FROZEN_LAKE, ARITHMETIC, PROGRAMS = (
    f"offbeat.envs.{name}" for name in ("frozen_lake.rows", "dataset.arithmetic", "dataset.programs")
)
ROW_EPISODES, VALIDATION_EPISODES = 1024, 64
PAIR_SEEDS = (21, 22, 23)


@dataclass(frozen=True)
class Study:
    out: Path
    timeout_s: float
    first_seed: int

    def run(self, name: str, seed: int) -> Run:
        """Return a finished run, trained if it is not there."""
        folder = self.out / f"{name}-s{seed}"
        if (folder / "report.json").exists() and (run := Run.open(folder)).state == "finished":
            return run
        file, overrides = STUDIES[name](self, seed)
        resume = folder.is_dir() and bool(Run(folder).checkpoints)
        load, version = os.getloadavg()[0], build()
        run = train(
            file, [f"seed={seed}", f"exp_name={name.replace('_', '-')}-s{seed}", f"output_dir={folder}", *overrides],
            resume=resume,
        )  # fmt: skip
        try:
            report = run.wait(self.timeout_s)
        except TimeoutError:
            run.stop()
            raise
        if report is None:
            raise RunFailedError(f"{folder} was stopped")
        row = {"name": name, "seed": seed, "build": version, "load": [load, os.getloadavg()[0]], "resumed": resume}
        folder.with_suffix(".json").write_text(json.dumps(row | report, indent=2) + "\n")
        return run

    def data(self, name: str, module: str, *options: str) -> Path:
        """Return a file of made rows, written once."""
        return self._written(f"{name}.jsonl", lambda path: [sys.executable, "-m", module, path, *options])

    def episodes(self, name: str, policy: Path, count: int, *options: str) -> Path:
        """Return a file of a policy's episodes, played once."""
        offbeat = [sys.executable, "-m", "offbeat.deploy.cli.app", "rollout", str(LAKES), "--agent", str(policy)]
        return self._written(
            f"{name}.jsonl", lambda path: [*offbeat, "--episodes", str(count), "--out", path, *options]
        )

    def _written(self, name: str, command: Callable[[str], list[str]]) -> Path:
        path = self.out / "data" / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"part-{name}")
            with path.with_suffix(".log").open("w") as log:
                subprocess.run(command(str(part)), check=True, stdout=log, stderr=log)
            part.rename(path)
        return path


Prepared = tuple[Path, list[str]]
"""Configuration and overrides."""


def evaluated() -> list[str]:
    """Return overrides by which a pipeline of rows is evaluated on the quickstart's held-out lakes."""
    config = yaml.safe_load(LAKES.read_text(encoding="utf-8"))
    shared = {name: config[name] for name in ("custom_envs", "val_env_manager", "actor_infer")}
    flow = {name: yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize) for name, value in shared.items()}
    return [
        *(f"{name}={value.strip()}" for name, value in flow.items()),
        "val_batch_size=256", "final_val_batch_size=512", "rollout.max_env_num_per_worker=256",
    ]  # fmt: skip


def teacher(_study: Study, _seed: int) -> Prepared:
    return LAKES, []


def sft(study: Study, _seed: int) -> Prepared:
    rows = study.data("walks", FROZEN_LAKE, "--rows", "512")
    validation = study.data("walks_val", FROZEN_LAKE, "--rows", "64", "--seed", "1")
    return CONFIGS / "sft.yaml", [
        f"data.dataset_name={rows}", f"data.val_dataset_name={validation}", *evaluated(),
    ]  # fmt: skip


def dpo(study: Study, _seed: int) -> Prepared:
    policy = study.run("sft", study.first_seed).checkpoints[-1]
    rows = study.data("pairs", FROZEN_LAKE, "--pairs", "--rows", "1024")
    validation = study.data("pairs_val", FROZEN_LAKE, "--pairs", "--rows", "128", "--seed", "1")
    return CONFIGS / "dpo.yaml", [
        f"pretrain={policy}", f"data.dataset_name={rows}", f"data.val_dataset_name={validation}", *evaluated(),
    ]  # fmt: skip


def dpo_episodes(study: Study, _seed: int) -> Prepared:
    policy = study.run("sft", study.first_seed).checkpoints[-1]
    options = ("--split", "train", "--group-size", "8", "--per", "pair")
    parts = [
        study.episodes(f"pairs-r{seed}", policy, ROW_EPISODES, "--seed", str(seed), *options) for seed in PAIR_SEEDS
    ]
    rows = study.out / "data" / "episode_pairs.jsonl"
    rows.write_bytes(b"".join(part.read_bytes() for part in parts))
    return CONFIGS / "dpo.yaml", [
        f"pretrain={policy}", f"data.dataset_name={rows}", "data.val_dataset_name=null", "data.num_train_epochs=6",
        "dpo.precompute_ref_log_probs=true", "eval_steps=16", *evaluated(),
    ]  # fmt: skip


def distill(study: Study, seed: int) -> Prepared:
    policy = study.run("teacher", seed).checkpoints[-1]
    rows = study.episodes(f"lake-s{seed}", policy, ROW_EPISODES, "--split", "train")
    validation = study.episodes(f"lake_val-s{seed}", policy, VALIDATION_EPISODES, "--split", "held_out")
    return CONFIGS / "distill.yaml", [
        f"teacher.lake.model_args.model_name_or_path={policy}", f"data.dataset_name={rows}",
        f"data.val_dataset_name={validation}", *evaluated(),
    ]  # fmt: skip


def rlvr(study: Study, _seed: int) -> Prepared:
    return CONFIGS / "rlvr.yaml", [
        f"data.dataset_name={study.data('arithmetic', ARITHMETIC)}",
        f"data.val_dataset_name={study.data('arithmetic_val', ARITHMETIC, '--held-out')}",
    ]  # fmt: skip


def rlvr_code(study: Study, _seed: int) -> Prepared:
    return CONFIGS / "rlvr_code.yaml", [
        f"data.dataset_name={study.data('programs', PROGRAMS)}",
        f"data.val_dataset_name={study.data('programs_val', PROGRAMS, '--held-out')}",
    ]  # fmt: skip


STUDIES: dict[str, Callable[[Study, int], Prepared]] = {
    function.__name__: function for function in (teacher, sft, dpo, dpo_episodes, distill, rlvr, rlvr_code)
}


def plot(out: Path, folder: Path, seeds: Sequence[int]) -> None:
    """Write a plot for each pipeline that has finished runs."""
    for name in PANELS:
        runs = {seed: out / f"{name}-s{seed}" for seed in seeds if (out / f"{name}-s{seed}.json").exists()}
        if runs:
            teachers = [out / f"teacher-s{seed}.json" for seed in runs] if name == "distill" else []
            shares = [json.loads(path.read_text())["success_after"] for path in teachers]
            draw(name, {seed: Run.open(path) for seed, path in runs.items()}, folder / f"{name}.svg", teachers=shares)


def summary(run: Run) -> dict[str, Any]:
    """Return a run's figures: success of each evaluation by sampling, time, load and build."""
    stored = json.loads(run.folder.with_suffix(".json").read_text())
    shares = [round(share, 3) for share in PANELS["rlvr"][0].curve(run)[1]]
    fields = ("success_before", "success_after", "greedy_before", "greedy_after", "wall_s", "load", "build", "resumed")
    return {"run": run.folder.name, "sampled": shares, **{field: stored.get(field) for field in fields}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pipelines"))
    parser.add_argument("--only", nargs="+", choices=sorted(STUDIES), default=sorted(STUDIES), metavar="NAME")
    parser.add_argument("--seeds", default="42,1,2")
    parser.add_argument("--plot", type=Path, help="folder of the SVG files")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of a run")
    args = parser.parse_args()
    out, seeds = args.out.resolve(), [int(seed) for seed in args.seeds.split(",")]
    if args.plot:
        plot(out, args.plot, seeds)
        return
    study = Study(out, args.timeout, seeds[0])
    for name in args.only:
        for seed in seeds:
            print(json.dumps(summary(study.run(name, seed))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
