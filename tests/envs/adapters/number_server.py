"""An OpenEnv server, as openenv-core makes one: guess a number from 0 to 9. `python number_server.py PORT SESSIONS`."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class NumberGame(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._number = 0
        self._state = State()

    def reset(self, seed=None, top=10, **_):
        self._number = random.Random(seed).randrange(top)
        return Hint(text=f"0 to {top - 1}")

    def step(self, action, **_):
        if action.number > 99:
            raise ValueError("the game breaks")
        hit = action.number == self._number
        return Hint(text="yes" if hit else "higher" if action.number < self._number else "lower", done=hit, reward=hit)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(NumberGame, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
