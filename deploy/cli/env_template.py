"""Files of `offbeat env new`."""

import importlib.util
import keyword
import re
import sys
from pathlib import Path

ENV = '''"""{title}: say what the task is."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Text

WORDS = ("Say", "the", "larger", "number", ".", "right", "wrong", *map(str, range(10)))
"""Every word that the env shows or takes; only the built-in tiny policy needs to know them."""

PRINTABLE = "".join(map(chr, range(32, 127))) + "\\n\\t"


class {cls}(gymnasium.Env[str, str]):
    """Two numbers are shown, the larger one is wanted."""

    metadata = {{"render_modes": ["ansi"]}}
    observation_space = Text(max_length=100, charset=PRINTABLE)  # of the class: a worker holds thousands of envs
    action_space = Text(min_length=0, max_length=100_000, charset=PRINTABLE)
    words = WORDS
    system_prompt = "Say the larger number ."

    def __init__(self, largest: int = 9, render_mode: str | None = None) -> None:
        """`env_config` of a tag holds these arguments."""
        if not 1 <= largest <= 9:
            raise ValueError(f"largest must lie between 1 and 9, got {{largest}}")
        self.largest, self.render_mode = largest, render_mode
        self._shown = (0, 0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        first, second = self.np_random.choice(self.largest + 1, size=2, replace=False)
        self._shown = int(first), int(second)
        return f"{{first}} {{second}}", {{}}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, and metrics; `success` is what evaluations show."""
        answer = action.strip()
        success = answer == str(max(self._shown))
        info = {{"success": success, "action_is_valid": answer.isdecimal()}}
        return ("right" if success else "wrong"), float(success), True, False, info

    def render(self) -> str:
        return f"{{self._shown[0]}} {{self._shown[1]}}"

    def random_answer(self, rng: np.random.Generator) -> str:
        """Return a random answer."""
        return str(rng.integers(self.largest + 1))


def random_episode(env: {cls}, rng: np.random.Generator) -> list[dict[str, str]]:
    """Return an episode with a random answer; `warm_start` shows a policy without pretraining what answers look like."""
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    return [
        {{"role": "system", "content": env.system_prompt}},
        {{"role": "user", "content": observation}},
        {{"role": "assistant", "content": env.random_answer(rng)}},
    ]
'''

TEST = """from {name} import {cls}

from offbeat.testing import assert_env


def test_the_env_holds_the_contract():
    assert_env("{name}:{cls}")


def test_the_larger_number_is_paid():
    env = {cls}()
    first, second = env.reset(seed=1)[0].split()
    observation, reward, terminated, _, info = env.step(max(first, second))
    assert (observation, reward, terminated, info["success"]) == ("right", 1.0, True, True)
"""

RUN = """# offbeat train {name}.yaml
exp_name: {name}
output_dir: runs/{name}
custom_envs:
  {cls}:
    env_type: "{name}:{cls}"
    max_steps: 1
    max_tokens_per_step: 2
    execution: inline
    env_config: {{largest: 9}}
warm_start: {{demos: "{name}:random_episode", tag: {cls}, steps: 60}}
train_env_manager: {{num_env_groups: 64, group_size: 8}}
rollout_batch_size: 256
sequence_length: 64
max_steps: 150
reward_normalization: {{method: mean}}
zero_variance: train       # groups that agree have no signal but the entropy bonus
entropy_loss_coef: 0.02    # or the policy always says 9, which is right for a fifth
"""


class BadNameError(ValueError):
    """Invalid module name."""


def write_template(folder: Path, name: str) -> list[Path]:
    """Write an env, its test and a run configuration.

    Raises:
        BadNameError: not snake_case, a keyword, or a module of Python or of an installed package.
        FileExistsError: a file exists; nothing is written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise BadNameError(f"{name!r} can't name a module: take snake_case, such as `word_game`")
    if name in sys.stdlib_module_names:
        raise BadNameError(
            f"{name} is a module of Python, which {name}.py would hide: take another name, such as `{name}_game`"
        )
    if (
        (spec := importlib.util.find_spec(name))
        and spec.origin
        and not Path(spec.origin).is_relative_to(folder.resolve())
    ):
        raise BadNameError(f"{name} is an installed module, which {name}.py would hide: take another name")
    cls = class_name(name)
    title = name.replace("_", " ").capitalize()
    texts = {f"{name}.py": ENV, f"test_{name}.py": TEST, f"{name}.yaml": RUN}
    for path in (folder / file for file in texts):
        if path.exists():
            raise FileExistsError(f"{path} exists already: take another name, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (folder / file).write_text(text.format(name=name, cls=cls, title=title), encoding="utf-8")
    return [folder / file for file in texts]


def class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
