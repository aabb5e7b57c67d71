from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OFFBEAT, TRL = "offbeat", "trl"
WARM_START_S = "warm_start_s"
"""In the file of a warm-started policy."""
DATA_SETTINGS = ("sft", "dpo")
SETTING_NAMES = ("a", "b", "c", "d", *DATA_SETTINGS)


class PeerError(Exception):
    """Impossible comparison, with reason and remedy."""


class PeerSideError(PeerError):
    """Failed side; names its log."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    settings: tuple[str, ...] = ("a", "b", "c")
    seeds: tuple[int, ...] = (1, 2, 3)
    sides: tuple[str, ...] = (OFFBEAT, TRL)
    steps: int | None = None
    """None: the setting's own."""
    overrides: tuple[str, ...] = ()
    """`key=value`, after the setting's."""
    folder: Path = Path("runs/bench-peer")
    venv: Path = Path()
    smollm2: Path = Path("models/smollm2")
    plot: Path | None = None
    threads: int = 2
    """Of TRL."""
    together: bool = False
    """TRL's turns wait for all episodes."""
    max_seconds: float = 330.0
    """Limit of TRL's training."""
    fresh: bool = False


def parse(*, settings: str, seeds: str, sides: str, venv: Path | None, **rest: Any) -> PeerOptions:
    """Parse command line values; lists have commas.

    Raises:
        PeerError: an unknown name or an invalid number.
    """
    from offbeat.benchmarks.peer.venv import TRL_VENV

    return PeerOptions(
        settings=_names("settings", settings, SETTING_NAMES),
        seeds=_numbers(seeds),
        sides=_names("sides", sides, (OFFBEAT, TRL)),
        venv=TRL_VENV.default_folder() if venv is None else venv,
        **rest,
    )


def _names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PeerError(f"--{option} {text}: there is no {unknown[0]!r}, there is {', '.join(known)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal()]
    if wrong:
        raise PeerError(f"--seeds {text}: {wrong[0]!r} is no whole number")
    return tuple(int(part) for part in dict.fromkeys(parts))
