"""Process of one env (`process_env`)."""

import resource
from typing import Any

import numpy as np

from offbeat.envs.contract import random_answer
from offbeat.envs.registry import SeedSearch, TextEnv, make
from offbeat.services.rollout.child_main import serve
from offbeat.services.rollout.envs.runners import (
    close_quietly,
    do_reset,
    do_step,
    read_traits,
    render_png,
)


class EnvProcessServer:
    def __init__(self) -> None:
        self._env: TextEnv | None = None
        self._search: SeedSearch | None = None
        self.commands = {
            "make": self._make,
            "task_id": self._search_seeds,
            "reset": lambda seed: do_reset(self._made, seed),
            "step": lambda action: do_step(self._made, action),
            "random_answer": lambda seed: random_answer(self._made, np.random.default_rng(seed)),
            "image": lambda: render_png(self._made),
            "close": lambda: close_quietly(self._made),
        }

    @property
    def _made(self) -> TextEnv:
        if self._env is None:
            raise RuntimeError("call make first")
        return self._env

    def _make(self, env_type: str, env_config: dict[str, Any], memory_bytes: int) -> Any:
        # Limits writable memory only: libraries map far more than they use
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._env = make(env_type, env_config)
        self._search = SeedSearch(self._env)
        return read_traits(self._env)

    def _search_seeds(self, n: int, start: int) -> list[int] | None:
        assert self._search is not None, "call make first"
        return self._search.run(n, start)


if __name__ == "__main__":
    serve(EnvProcessServer().commands)
