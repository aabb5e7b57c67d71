r"""Made arithmetic for `pipeline: rlvr`, as JSONL: `python -m offbeat.envs.dataset.arithmetic OUT.jsonl [--held-out]`.

Problems of three numbers below seven, such as `6 + 5 - 4`; one in eight is held out. Words are separated by spaces, for the
tiny policy's tokenizer; the answer is one word in `\boxed{ }`, after a step such as `11 - 4 =`.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.envs.dataset.prompt import PromptEnv

NUMBERS = 7
HELD_OUT_SHARE = 8
"""Inverse share of problems."""
DOMAINS = {"addition": ("+", "+"), "mixed": ("+", "-")}
"""Tag -> signs between the numbers."""
CARELESS_SHARE = 0.75
"""Of demonstrations that forget the last number."""


def problems(*, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield a split's problems, with nonnegative results."""
    for tag, signs in DOMAINS.items():
        for first, second, third in product(range(NUMBERS), range(NUMBERS), range(1, NUMBERS)):
            result = first + second + (third if signs[1] == "+" else -third)
            prompt = f"{first} {signs[0]} {second} {signs[1]} {third} ="
            if result >= 0 and is_held_out(prompt, HELD_OUT_SHARE) == held_out:
                yield {
                    "id": prompt,
                    "prompt": prompt,
                    "ground_truth": str(result),
                    "tag": tag,
                    "response": f"{first + second} {signs[1]} {third} = {box(result)}",
                    "careless": box(first + second),
                }


def box(result: int) -> str:
    return rf"\boxed{{ {result} }}"


def careless_answers(
    env: PromptEnv, rng: np.random.Generator, *, system_prompt: str | None = None
) -> list[dict[str, str]]:
    """Return a warm-start demonstration: the row's `careless` answer, or (one in four) its `response`."""
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    answer = env.row["careless" if rng.random() < CARELESS_SHARE else "response"]
    head = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*head, {"role": "user", "content": observation}, {"role": "assistant", "content": answer}]


def is_held_out(prompt: str, share: int) -> bool:
    """Return True for one prompt in `share`, by its hash."""
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big") % share == 0


def write_problems(path: Path, *, held_out: bool) -> None:
    write_rows(path, problems(held_out=held_out))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_command(description: str, make: Callable[..., Iterable[dict[str, Any]]]) -> None:
    """Write a split's rows to the file that the command line names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path)
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    write_rows(arguments.out, make(held_out=arguments.held_out))


if __name__ == "__main__":
    run_command(__doc__ or "", problems)
