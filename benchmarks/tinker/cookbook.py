"""Recipes of tinker-cookbook, unchanged, against `offbeat tinker`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PYTHON = Path(sys.prefix) / "cookbook" / "bin" / "python"
"""`make test-cookbook` installs it."""
SHOWN = 4000


class RecipeError(Exception):
    """Recipe that has failed, or can't be started."""


def run_recipe(recipe: str, url: str, key: str, model: Path, log: Path, *settings: str, timeout_s: float) -> None:
    """Run a recipe to its end. model: folder with the base model's tokenizer.

    Raises:
        RecipeError: with the end of the output.
    """
    if not PYTHON.exists():
        raise RecipeError(f"{PYTHON} is missing: `make test-cookbook` installs tinker-cookbook")
    done = subprocess.run(
        [
            *(str(PYTHON), "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={url}", f"model_name={model}"),
            *(f"log_path={log}", "renderer_name=role_colon", "behavior_if_log_dir_exists=raise", *settings),
        ],
        env=os.environ | {"TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RecipeError(f"{recipe} has ended with {done.returncode}: {done.stdout[-SHOWN:]}{done.stderr[-SHOWN:]}")


def write_sums(path: Path) -> None:
    """Write 256 conversations about sums."""
    turns = (
        [_turn("user", f"What is {a} + {b}?"), _turn("assistant", str(a + b))] for a in range(16) for b in range(16)
    )
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_checkpoint(log: Path) -> str:
    """Return the path of a recipe's last checkpoint."""
    return read_lines(log / "checkpoints.jsonl")[-1]["state_path"]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
