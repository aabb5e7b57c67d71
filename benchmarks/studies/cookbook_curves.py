"""Recipes of tinker-cookbook on a pretrained model: the supervised one on sums, then `rl.train` on arithmetic, both ways.

    make test-cookbook && offbeat model smollm2 models/smollm2
    python -m offbeat.benchmarks.studies.cookbook_curves models/smollm2 --out runs/cookbook [KEY=VALUE ...]

The synchronous and the asynchronous RL recipe (`max_steps_off_policy=1`) start from the supervised one's checkpoint. All
metrics are in `--out`.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from offbeat.benchmarks.harness.result import build
from offbeat.benchmarks.tinker.cookbook import last_checkpoint, read_lines, run_recipe, write_sums
from offbeat.benchmarks.tinker.server import running_server

KEY = "tml-curves"
COMMON = ("lora_rank=16", "save_every=0", "eval_every=0")
TIMEOUT_S = 7200.0
NLL = "train_mean_nll"
WAYS: dict[str, tuple[str, ...]] = {"synchronous": (), "asynchronous": ("max_steps_off_policy=1",)}
COLUMNS = {"reward": "env/all/reward/total", "right": "env/all/correct", "ended in time": "env/all/format"}


def train_supervised(url: str, model: Path, out: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    data, log = out / "sums.jsonl", out / "supervised"
    write_sums(data)
    run_recipe(
        *("chat_sl.train", url, KEY, model, log, *COMMON, f"dataset={data}", f"batch_size={options.batch}"),
        *("num_epochs=1", f"max_steps={options.supervised_steps}", f"learning_rate={options.learning_rate}"),
        timeout_s=TIMEOUT_S,
    )
    return [line for line in read_lines(log / "metrics.jsonl") if NLL in line]


def train_by_rewards(
    url: str, model: Path, log: Path, checkpoint: str, options: argparse.Namespace, settings: Sequence[str]
) -> list[dict[str, Any]]:
    run_recipe(
        *("math_rl.train", url, KEY, model, log, *COMMON, f"load_checkpoint_path={checkpoint}", "env=arithmetic"),
        *("loss_fn=ppo", f"groups_per_batch={options.groups}", f"group_size={options.group_size}", "max_tokens=8"),
        *(f"learning_rate={options.rl_learning_rate}", f"max_steps={options.rl_steps}", *settings),
        timeout_s=TIMEOUT_S,
    )
    return [line for line in read_lines(log / "metrics.jsonl") if COLUMNS["reward"] in line]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m offbeat.benchmarks.studies.cookbook_curves")
    parser.add_argument("model", type=Path, help="Folder of the base model.")
    parser.add_argument("--out", type=Path, required=True, help="Folder of the logs; must not exist.")
    parser.add_argument("--supervised-steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="Conversations of a supervised step.")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rl-steps", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8, help="Of an RL step.")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rl-learning-rate", type=float, default=3e-4)
    parser.add_argument("--only", choices=list(WAYS), help="One way of reinforcement learning. Default: both.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Of the server's configuration.")
    options = parser.parse_intermixed_args()
    model, out = options.model.resolve(), options.out.resolve()
    out.mkdir(parents=True)
    server_settings = (f"pretrain={model}", "warm_start=null", "sequence_length=512", *options.overrides)
    with running_server(out / "server", *server_settings) as server:
        console = Console()
        console.print(f"build {build()}, load {os.getloadavg()[0]:.2f}")
        began = time.monotonic()
        lines = train_supervised(server.url, model, out, options)
        console.print(
            f"supervised: {time.monotonic() - began:.0f} s; {NLL}: {' '.join(f'{line[NLL]:.2f}' for line in lines)}"
        )
        checkpoint = last_checkpoint(out / "supervised")
        for name in [options.only] if options.only else WAYS:
            began = time.monotonic()
            lines = train_by_rewards(server.url, model, out / name, checkpoint, options, WAYS[name])
            table = Table("step", *COLUMNS, title=f"{name}: {time.monotonic() - began:.0f} s")
            for line in lines:
                table.add_row(str(line["step"]), *(f"{line[key]:.2f}" for key in COLUMNS.values()))
            console.print(table)
        console.print(f"load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
