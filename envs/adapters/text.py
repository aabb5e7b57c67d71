"""Shared parts of the adapters."""

import random
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Text

MAX_CHARS = 1_000_000
CHARSET = "".join(map(chr, (*range(9, 14), *range(27, 0xD800), *range(0x1F000, 0x1FC00))))
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n\t"


class TextEnv(gymnasium.Env[str, str]):
    system_prompt: str = ""

    def __init__(self, system_prompt: str = "") -> None:
        self.system_prompt = system_prompt or self.system_prompt

    @cached_property
    def observation_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Lazy: the character tables are larger than the env."""
        return Text(min_length=0, max_length=MAX_CHARS, charset=CHARSET)

    @cached_property
    def action_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_CHARS, charset=PRINTABLE)


def select_numbers(info: Mapping[str, Any]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for key, value in info.items():
        number: object = value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value
        if isinstance(number, bool | int | float):
            numbers[str(key)] = float(number)
    return numbers


_global_generators = threading.Lock()


class PrivateRandomState:
    """Private state of the global `random` and `numpy` generators, which one thread uses at a time."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    def seed(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        twister = np.random.RandomState(int(rng.integers(2**32)))
        self._states = random.Random(int(rng.integers(2**63))).getstate(), twister.get_state()

    @contextmanager
    def __call__(self) -> Generator[None]:
        with _global_generators:
            saved = random.getstate(), np.random.get_state()
            if self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(saved[0])
                np.random.set_state(saved[1])
