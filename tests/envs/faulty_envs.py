# ruff: noqa: ARG002 -- the signatures are gymnasium's
"""Envs that each break one rule of the contract."""

import os
import random
import time

import gymnasium

COLORS = ("red", "green", "blue")


class Sound(gymnasium.Env):
    """Say the word that is shown."""

    system_prompt = "say it"
    words = ("say", "it", *COLORS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = COLORS[int(self.np_random.integers(3))]
        return self.word, {}

    def step(self, action):
        return "it", float(action == self.word), True, False, {"success": action == self.word}


class GlobalDraw(Sound):
    def step(self, action):
        random.random()
        return super().step(action)


class Unseeded(Sound):
    def reset(self, *, seed=None, options=None):
        observation, info = super().reset()
        return f"{observation} {self.np_random.random()}", info


class Constant(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "red"
        return self.word, {}


class Heavy(Sound):
    def __init__(self):
        self.table = bytearray(3 << 20)


class NotText(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "red"
        return 1, {}


class NotFinite(Sound):
    def step(self, action):
        return "it", float("nan"), True, False, {}


class FourValues(Sound):
    def step(self, action):
        return "it", 0.0, True, {}


class Choosy(Sound):
    def step(self, action):
        COLORS.index(action)
        return super().step(action)


class Hashing(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = COLORS[hash(f"task {seed}") % 3]
        return self.word, {}


class Hanging(Sound):
    def step(self, action):
        time.sleep(60)
        return super().step(action)


class Dying(Sound):
    def step(self, action):
        os._exit(3)


class LeakySplit(Sound):
    def __init__(self, split="train"):
        self.split = split

    def task_id(self, seed):
        return seed % 3
