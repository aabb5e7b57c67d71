# ruff: noqa: ARG002 -- the signatures are gymnasium's
"""Envs that each break one rule of the contract."""

import atexit
import os
import random
import subprocess
import threading
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


class Slow(Sound):
    def reset(self, *, seed=None, options=None):
        time.sleep(0.05)
        return super().reset(seed=seed)


class NotText(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "red"
        return 1, {}


class NotFinite(Sound):
    def step(self, action):
        return "it", float("nan"), True, False, {}


class WithoutSuccess(Sound):
    def step(self, action):
        return "it", 1.0, True, False, {}


class SuccessOfTheEnd(Sound):
    def reset(self, *, seed=None, options=None):
        self.is_second = False
        return super().reset(seed=seed)

    def step(self, action):
        if self.is_second:
            return super().step(action)
        self.is_second = True
        return "it", 0.0, False, False, {}


class SuccessOfASeat(Sound):
    seats = ("a",)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"seat": "a"}

    def step(self, action):
        return "it", 1.0, True, False, {"seat": "a", "seats": {"a": {"reward": 1.0, "success": True}}}


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


class LeavingAThread(Sound):
    def __init__(self):
        threading.Thread(target=time.sleep, args=(60,)).start()


class LeavingAProcess(Sound):
    """One that holds the check's stdout and stderr."""

    def step(self, action):
        subprocess.Popen(["sleep", "60"])
        os._exit(4)


class Printing(Sound):
    def step(self, action):
        os.write(1, b"step\n")
        atexit.register(print, "the end")
        return super().step(action)


class Dying(Sound):
    def step(self, action):
        os._exit(3)


class LeakySplit(Sound):
    def __init__(self, split="train"):
        self.split = split

    def task_id(self, seed):
        return seed % 3
