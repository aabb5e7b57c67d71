"""Short runs of every estimator, loss and recipe on FrozenLake, and of some under different staleness.

    python -m offbeat.benchmarks.studies.algorithms --out DIR [--only NAME ...] [--staleness | --recipes] [--mesh]

A seed's runs share the warm start in `DIR/policies`, and an engine or, with `--mesh`, have a mesh each. Success: on
held-out maps, at temperature 1 and greedy. Results in DIR are reused.
"""

# pyright: basic
import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.benchmarks.peer.processes import make_policy
from offbeat.benchmarks.studies.algorithm_runs import shared_engine, summarize_steps
from offbeat.deploy.config.loader import load_run
from offbeat.services.errors import MeshError

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
RECIPES = {path.stem: path for path in sorted((CONFIGS / "recipes").glob("*.yaml"))}
OWN_COMPARISON = "reward_normalization.method=null"
WHITENED = "whiten_advantages=true"
RECOMPUTE = ("old_logprobs=recompute", "train_infer_correction.is_weight={upper_bound: 2.0}")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    **{
        name: (f"adv_estimator={name}", OWN_COMPARISON)
        for name in ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "remax", "gigpo")
    },
    **{
        name: (f"adv_estimator={name}", OWN_COMPARISON, WHITENED)
        for name in ("reinforce", "step_reinforce", "agentic_reinforce")
    },
    **{
        name: (f"adv_estimator={name}", OWN_COMPARISON)
        for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    },
    "gae": ("adv_estimator=gae", OWN_COMPARISON, "critic_warmup=2"),
    "gae_turn": ("adv_estimator=gae", OWN_COMPARISON, "critic_warmup=2", "gae_level=turn"),
    "vtrace": ("adv_estimator=gae", OWN_COMPARISON, "critic_warmup=2", "value_targets=vtrace", *RECOMPUTE),
    **{
        name: (f"pg_variant={name}", "~pg_clip") if name != "ppo" else ("pg_variant=ppo",)
        for name in ("ppo", "vanilla", "tis", "cispo", "topr", "kimi15", "aipo", "dppo_tv", "sapo", "gpg")
    },
    "gspo": ("ratio_type=sequence", "loss_agg_mode=seq-mean-token-mean", "pg_clip_low=0.03", "pg_clip_high=0.04"),
    "decoupled_ppo": RECOMPUTE,
    "full_kl": ("use_kl_loss=true", "kl_loss_coef=0.01", "kl_loss_type=full"),
    "replay": ("replay.samples_per_insert=2", "replay.max_staleness=4"),
    "lora": ("actor_train.model_args.lora_target=all-linear", "actor_train.training_args.learning_rate=5e-3"),
}
STALE = ("ppo", "decoupled_ppo", "tis", "cispo", "topr")
STALENESS = (0, 1, 4, 16)
STEPS = 20
"""More than the largest bound."""
RESULT = "result.json"


@dataclass(frozen=True)
class StudyRun:
    name: str
    seed: int
    staleness: int | None
    """None: the recipe's own."""
    steps: int

    @property
    def label(self) -> str:
        bound = "recipe" if self.staleness is None else f"lag{self.staleness}"
        return f"{self.name}-s{self.seed}-{bound}-{self.steps}"

    @property
    def config(self) -> Path:
        return RECIPES[self.name] if self.staleness is None else QUICKSTART

    def overrides(self, folder: Path, policy: Path) -> list[str]:
        return [
            f"output_dir={folder}", f"exp_name={self.label.replace('_', '-')}", f"pretrain={policy}", "warm_start=null",
            f"seed={self.seed}", f"max_steps={self.steps}", "final_val_batch_size=128", "eval_steps=0",
            *self._own_overrides(),
        ]  # fmt: skip

    def _own_overrides(self) -> list[str]:
        """Return overrides: a bound of 16 needs enough groups, and the critic fewer than its ten steps."""
        if self.staleness is None:
            return ["critic_warmup=4"] if self.name in ("ppo", "ppo_value_head") else []
        groups = 8 * (self.staleness + 2)
        return [f"max_staleness={self.staleness}", f"train_env_manager.num_env_groups={groups}", *ALGORITHMS[self.name]]


Play = Callable[[StudyRun, Path], dict[str, Any]]


def start(folder: Path, seed: int, timeout_s: float) -> Path:
    policy = folder / "policies" / f"seed-{seed}"
    if not (policy / "model.safetensors").exists():
        shutil.rmtree(policy, ignore_errors=True)
        names = [f"seed={seed}", f"exp_name=warm-{seed}", f"output_dir={policy.with_name(f'warm-{seed}')}"]
        make_policy(load_run(QUICKSTART, names), policy, timeout_s)
    return policy


def on_mesh(run: StudyRun, folder: Path, policy: Path, timeout_s: float) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("offbeat")), "train", str(run.config), *run.overrides(folder, policy)]
    folder.mkdir(parents=True, exist_ok=True)
    load, log_path = os.getloadavg()[0], folder / "said.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            raise TimeoutError(f"not over after {timeout_s:g} s") from None
    report = folder / "report.json"
    if not report.is_file():
        raise RuntimeError((log_path.read_text().strip().splitlines() or ["silent"])[-1])
    report_json = json.loads(report.read_text())
    fields = ("steps", "success_before", "success_after", "greedy_before", "greedy_after", "eval_episodes", "wall_s")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record["values"] for record in records if record["source"] == "learner" and "reward" in record["values"]]
    return {key: report_json[key] for key in fields} | summarize_steps(steps) | {"load": [load, os.getloadavg()[0]]}


def measure(run: StudyRun, folder: Path, play: Play) -> dict[str, Any]:
    row = {"name": run.name, "seed": run.seed, "staleness": run.staleness}
    result_path = folder / RESULT
    if result_path.is_file():
        return row | json.loads(result_path.read_text())
    try:
        result = play(run, folder)
    except (MeshError, RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
        return row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    result_path.write_text(json.dumps(result) + "\n")
    return row | result


@contextmanager
def study_runner(out: Path, seed: int, *, mesh: bool, needed: bool, timeout_s: float) -> Iterator[Play]:
    policy = start(out, seed, timeout_s)
    if mesh or not needed:
        yield lambda run, folder: on_mesh(run, folder, policy, timeout_s)
        return
    with shared_engine(QUICKSTART, [f"seed={seed}", f"pretrain={policy}", "warm_start=null"], policy) as ready:
        yield lambda run, folder: ready.run(run.config, run.overrides(folder, policy), folder, timeout_s)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table; ± is the standard error."""
    lines = [
        "| Algorithm | seed | bound | lag (most) | before | after | greedy after | mismatch KL | ESS | wall, s (load) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bound = "its own" if row["staleness"] is None else row["staleness"]
        head = f"| `{row['name']}` | {row['seed']} | {bound} |"
        if "failed" in row:
            lines.append(f"{head} failed: {row['failed']} | | | | | | |")
            continue
        episodes = row["eval_episodes"]
        shares = " | ".join(share(row[key], episodes) for key in ("success_before", "success_after", "greedy_after"))
        lag, kl, ess = f"{row['lag']:.1f} ({row['lag_max']:g})", f"{row['mismatch_kl']:.3f}", f"{row['ess']:.2f}"
        wall = f"{row['wall_s']:.0f} ({min(row['load']):.0f} to {max(row['load']):.0f})"
        lines.append(f"{head} {lag} | {shares} | {kl} | {ess} | {wall} |")
    return "\n".join(lines) + "\n"


def share(successes: float, episodes: int) -> str:
    return f"{successes:.3f} ± {math.sqrt(successes * (1 - successes) / episodes):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--only", nargs="+", choices=sorted({*ALGORITHMS, *RECIPES}), help="these alone")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--staleness", action="store_true", help=f"{', '.join(STALE)} at {STALENESS}")
    which.add_argument("--recipes", action="store_true", help="the files of deploy/configs/recipes")
    parser.add_argument("--mesh", action="store_true", help="each run on a whole mesh of its own")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a run")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    names = args.only or (STALE if args.staleness else tuple(RECIPES if args.recipes else ALGORITHMS))
    bounds: tuple[int | None, ...] = STALENESS if args.staleness else (None,) if args.recipes else (1,)
    if unknown := sorted(set(names) - set(RECIPES if args.recipes else ALGORITHMS)):
        parser.error(f"{', '.join(unknown)}: {'no recipe' if args.recipes else 'a recipe: add --recipes'}")
    kind = "staleness" if args.staleness else "recipes" if args.recipes else "algorithms"
    suffix = "-mesh" if args.mesh else ""
    kind += suffix
    out, rows = args.out.resolve(), []
    for seed in seeds:
        runs = [StudyRun(name, seed, bound, args.steps) for name in names for bound in bounds]
        folders = {run: out / f"{run.label}{suffix}" for run in runs}
        needed = not all((folder / RESULT).is_file() for folder in folders.values())
        with study_runner(out, seed, mesh=args.mesh, needed=needed, timeout_s=args.timeout) as play:
            for run, folder in folders.items():
                rows.append(measure(run, folder, play))
                print(f"{len(rows)}/{len(runs) * len(seeds)} {run.label}: {rows[-1]}", flush=True)  # noqa: T201
                (out / f"results-{kind}.json").write_text(json.dumps(rows, indent=2) + "\n")
                (out / f"table-{kind}.md").write_text(table(rows))


if __name__ == "__main__":
    main()
