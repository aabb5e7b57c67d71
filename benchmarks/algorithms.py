"""Every estimator and every loss on FrozenLake, every recipe, and what staleness does to some: short runs of the whole mesh.

    python -m benchmarks.algorithms --out DIR [--only NAME ...] [--staleness | --recipes] [--steps 15] [--seeds 1,2]

Each run is the quickstart with other keys, or a file of deploy/configs/recipes as it stands, from a short warm start, on the
real mesh (`offbeat train`): success on held-out maps before and after, sampled at temperature 1 and greedy. A run whose
report is in DIR already is not repeated, so a table may be filled over several calls; what failed is in the table, with its
reason. `DIR/table.md` and `DIR/results.json` are written anew after each run.
"""

# pyright: basic
import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "deploy" / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
RECIPES = {path.stem: path for path in sorted((CONFIGS / "recipes").glob("*.yaml"))}
OWN_COMPARISON = "reward_normalization.method=null"
"""Leaves it to the estimator."""
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


@dataclass(frozen=True)
class Run:
    """One run of the mesh."""

    name: str
    seed: int
    staleness: int | None
    """None: of the recipe `name`, which has its own."""

    @property
    def label(self) -> str:
        bound = "recipe" if self.staleness is None else f"lag{self.staleness}"
        return f"{self.name}-s{self.seed}-{bound}"

    @property
    def config(self) -> Path:
        return RECIPES[self.name] if self.staleness is None else QUICKSTART

    def overrides(self, folder: Path, steps: int) -> list[str]:
        """Of `config`."""
        return [
            f"output_dir={folder}", f"exp_name={self.label.replace('_', '-')}", f"seed={self.seed}", f"max_steps={steps}",
            "warm_start.steps=120", "val_batch_size=32", "final_val_batch_size=128", "eval_steps=0", *self._own(),
        ]  # fmt: skip

    def _own(self) -> list[str]:
        """A bound of 16 needs enough groups in play; ten steps of the critic alone would leave five to the policy."""
        if self.staleness is None:
            return ["critic_warmup=4"] if self.name == "ppo" else []
        groups = 8 * (self.staleness + 2)
        return [f"max_staleness={self.staleness}", f"train_env_manager.num_env_groups={groups}", *ALGORITHMS[self.name]]


def measure(run: Run, folder: Path, steps: int, timeout_s: float) -> dict[str, Any]:
    """The report of a run, or why there is none."""
    report = folder / "report.json"
    if not report.is_file():
        command = [
            str(Path(sys.executable).with_name("offbeat")),
            "train",
            str(run.config),
            *run.overrides(folder, steps),
        ]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "said.log").open("w") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(60)
                said.write(f"not over after {timeout_s:g} s\n")
    if not report.is_file():
        lines = (folder / "said.log").read_text().strip().splitlines()
        return {
            "name": run.name,
            "seed": run.seed,
            "staleness": run.staleness,
            "failed": lines[-1] if lines else "silent",
        }
    found = json.loads(report.read_text())
    kept = (
        "success_before",
        "success_after",
        "greedy_before",
        "greedy_after",
        "wall_s",
        "max_staleness_seen",
        "mismatch_kl",
    )
    return {"name": run.name, "seed": run.seed, "staleness": run.staleness, "steps": found["steps"]} | {
        key: found.get(key) for key in kept
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| Algorithm | seed | bound | lag seen | before | after | greedy after | mismatch KL | wall, s |",
        "|---|" * 9,
    ]
    lines[1] = "|" + "---|" * 9
    for row in rows:
        bound = "its own" if row["staleness"] is None else row["staleness"]
        head = f"| `{row['name']}` | {row['seed']} | {bound} |"
        if "failed" in row:
            lines.append(f"{head} failed: {row['failed']} | | | | | |")
            continue
        numbers = [row["success_before"], row["success_after"], row["greedy_after"], row["mismatch_kl"]]
        shown = " | ".join("" if n is None else f"{n:.3f}" for n in numbers)
        lines.append(f"{head} {row['max_staleness_seen']:g} | {shown} | {row['wall_s']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--only", nargs="+", choices=sorted({*ALGORITHMS, *RECIPES}), help="these alone")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--staleness", action="store_true", help=f"{', '.join(STALE)} at {STALENESS}")
    which.add_argument("--recipes", action="store_true", help="the files of deploy/configs/recipes")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds of a run")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    names = args.only or (STALE if args.staleness else tuple(RECIPES if args.recipes else ALGORITHMS))
    bounds: tuple[int | None, ...] = STALENESS if args.staleness else (None,) if args.recipes else (1,)
    if unknown := sorted(set(names) - set(RECIPES if args.recipes else ALGORITHMS)):
        parser.error(f"{', '.join(unknown)}: {'no recipe' if args.recipes else 'a recipe: add --recipes'}")
    runs = [Run(name, seed, bound) for name in names for bound in bounds for seed in seeds]
    rows: list[dict[str, Any]] = []
    for number, run in enumerate(runs, start=1):
        began = time.monotonic()
        rows.append(measure(run, args.out.resolve() / run.label, args.steps, args.timeout))
        print(f"{number}/{len(runs)} {run.label}: {rows[-1]} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
        (args.out / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
        (args.out / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main()
