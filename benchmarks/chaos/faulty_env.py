"""FrozenLake that misbehaves on request: an order is a file, executed once, by the env that removes it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from offbeat.envs.frozen_lake.env import WORDS, FrozenLakeConfig, FrozenLakeEnv

BLOCK_BYTES = 64 * 2**20


class FaultyLakeConfig(FrozenLakeConfig):
    orders: Path


def _hang() -> NoReturn:
    while True:
        time.sleep(60.0)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _flood() -> NoReturn:
    line = b"an env that does not stop talking\n" * 1000
    while True:
        os.write(1, line)


def _hog() -> NoReturn:
    blocks: list[bytearray] = []
    while True:
        blocks.append(bytearray(b"\1") * BLOCK_BYTES)


MISDEEDS: dict[str, Callable[[], None]] = {"hang": _hang, "crash": _crash, "flood": _flood, "hog": _hog}


class FaultyLakeEnv(FrozenLakeEnv):
    config_class: ClassVar[type[FrozenLakeConfig]] = FaultyLakeConfig
    words: ClassVar[tuple[str, ...]] = WORDS

    def __init__(self, config: FaultyLakeConfig) -> None:
        super().__init__(config)
        self._orders = config.orders

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        for name, misdeed in MISDEEDS.items():
            if _claimed(self._orders / name):
                misdeed()
        return super().step(action)


def _claimed(order: Path) -> bool:
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    return True
