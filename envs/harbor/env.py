"""Tasks in Harbor's format as episodes: commands in a shell, then the task's verifier."""

import json
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Text
from gymnasium.utils import seeding

from offbeat.envs.dataset.env import last_group
from offbeat.envs.harbor.config import HarborConfig
from offbeat.envs.harbor.images import check_machine
from offbeat.envs.harbor.machine import TaskError
from offbeat.envs.harbor.task import HarborTask, TaskStep
from offbeat.envs.harbor.task_set import load_split
from offbeat.envs.harbor.trial import TaskTrial, TaskVerdict
from offbeat.envs.harbor.vocabulary import task_words
from offbeat.envs.sandbox.shell import CommandResult, ShellError
from offbeat.envs.tools.functions import Call, Function, read_calls, write_results

PROMPT = (
    "Solve the task in a Linux terminal. Answer with one command in a fenced block (```bash). "
    "Each runs in a new bash in the task's folder. When the task is done, answer with the command submit ."
)
FUNCTION_PROMPT = "Solve the task in a Linux terminal by the function bash. When the task is done, call submit."
SUBMIT = "submit"
NO_COMMAND = "(no command)"
BASH = Function(
    "bash",
    "Run a command in a new bash and see its output.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
DONE = Function(SUBMIT, "End the task and have it verified.", {"type": "object", "properties": {}, "required": []})
MAX_CHARS = 1_000_000
MAX_COMMAND_BYTES = 100_000
"""Linux takes arguments of up to 128 KiB."""
CHARSET = "".join(map(chr, (9, 10, 13, *range(32, 0xD800))))


class BashCommand(NamedTuple):
    text: str
    error: str = ""
    """Of a call that is none of bash, for the policy."""


class HarborEnv(gymnasium.Env[str, str]):
    """A terminal task in Harbor's format; its verifier's reward at the end."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class: ClassVar[type[HarborConfig]] = HarborConfig
    metrics_agg_mode: ClassVar[dict[str, str]] = {"verifier_failed": "last", "submitted": "last"}

    def __init__(self, config: HarborConfig | None = None) -> None:
        """Raises ValueError if a task or this machine's kernel does not fit."""
        self.config = config or HarborConfig()
        self.render_mode = "ansi"
        self._tasks = load_split(self.config)
        if self.config.needs_shell:
            check_machine(self._tasks, self.config.sandbox)
        by_template = self.config.function_calling == "template"
        self.functions = tuple(function.schema() for function in (BASH, DONE)) if by_template else ()
        self.system_prompt = FUNCTION_PROMPT if by_template else PROMPT
        self._trial: TaskTrial | None = None
        self._rewards: list[dict[str, float]] = []
        self._num_answers, self._spent_s = 0, 0.0
        self._last = ""

    @cached_property
    def observation_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_CHARS, charset=CHARSET)

    @cached_property
    def action_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_CHARS, charset=CHARSET[3:98])

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words of all tasks, for the tiny policy."""
        return tuple(
            dict.fromkeys([*self.system_prompt.split(), SUBMIT, *NO_COMMAND.split(), *task_words(self._tasks)])
        )

    @property
    def task(self) -> HarborTask:
        """Return the episode's task; raises RuntimeError before `reset`."""
        return self._current().task

    @property
    def tasks(self) -> tuple[HarborTask, ...]:
        return self._tasks

    @property
    def current_step(self) -> TaskStep:
        return self.task.steps[len(self._rewards)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.close()
        task = self._tasks[self._index(seed, self.np_random)]
        if self.config.played_by == "agent":
            return self._observe(describe_trial(self.config, task)), {}
        self._trial = TaskTrial(task, self.config.sandbox)
        self._num_answers, self._rewards = 0, []
        self._begin_step()
        return self._observe(self.current_step.instruction), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.config.played_by == "agent":
            raise RuntimeError("Harbor runs the episodes of this env: it takes no answers")
        trial = self._current()
        self._num_answers += 1
        is_last = self._num_answers >= self.config.max_steps
        commands = self._read(action)
        valid = bool(commands) and not any(command.error for command in commands)
        submits = any(command.text == SUBMIT for command in commands)
        try:
            outputs = [each.error or self._run(trial, each.text) for each in commands if each.text != SUBMIT]
        except ShellError as error:
            return self._end(TaskVerdict({}, str(error)), valid=valid, submitted=False)
        if is_last or submits or self._left_s() <= 0:
            return self._verify(trial, valid=valid, submitted=submits)
        text = "\n".join(outputs) if commands else NO_COMMAND
        if self.functions and commands:
            text = write_results(outputs)
        info = {"success": False, **self._metrics(valid=valid)}
        return self._observe(text), info["format_penalty"], False, False, info

    def task_id(self, seed: int) -> str:
        return str(self._tasks[self._index(seed, seeding.np_random(seed)[0])].folder)

    def random_answer(self, rng: np.random.Generator) -> str:
        command = ("ls", "wc -l *", "touch done.txt", SUBMIT)[int(rng.integers(4))]
        return f"```bash\n{command}\n```"

    def render(self) -> str:
        return self._last

    def close(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None

    def _current(self) -> TaskTrial:
        if self._trial is None:
            raise RuntimeError("call reset() before step()")
        return self._trial

    def _begin_step(self) -> None:
        self._spent_s = 0.0
        self._current().begin_step(self.current_step)

    def _read(self, answer: str) -> list[BashCommand]:
        """Return an answer's commands."""
        if self.functions:
            return [_command_of(call) for call in read_calls(answer)]
        command = last_group(self.config.action_pattern, answer)
        return [BashCommand(command)] if command else []

    def _run(self, trial: TaskTrial, command: str) -> str:
        timeout_s = max(0.1, min(self.config.command_timeout_s, self._left_s()))
        if "\0" in command or len(command.encode(errors="surrogatepass")) > MAX_COMMAND_BYTES:
            what = "has a null character" if "\0" in command else "is too long"
            return f"bash: the command {what}\n[exit code 126]"
        result = trial.run(command, timeout_s)
        self._spent_s += result.wall_s
        return format_output(result, timeout_s)

    def _left_s(self) -> float:
        """Return the step's time for commands; the policy's own takes none."""
        limit_s = self.current_step.agent_timeout_s
        return float("inf") if limit_s is None else limit_s - self._spent_s

    def _verify(
        self, trial: TaskTrial, *, valid: bool, submitted: bool
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        step = self.current_step
        verdict = trial.verify(step, min(step.verifier_timeout_s, self.config.max_verifier_timeout_s))
        passes = all(verdict.rewards.get(name, -np.inf) >= least for name, least in step.min_reward.items())
        is_last = len(self._rewards) + 1 == len(trial.task.steps) or self._num_answers >= self.config.max_steps
        if verdict.error or is_last or not passes:
            return self._end(verdict, valid=valid, submitted=submitted)
        self._rewards.append(verdict.rewards)
        try:
            self._begin_step()
        except (ShellError, TaskError) as error:  # of what the policy left there
            return self._end(TaskVerdict({}, str(error)), valid=valid, submitted=submitted)
        info = {"success": False, **self._metrics(valid=valid)}
        return self._observe(self.current_step.instruction), info["format_penalty"], False, False, info

    def _end(
        self, verdict: TaskVerdict, *, valid: bool, submitted: bool
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        strategy = self.task.file.multi_step_reward_strategy or "mean"
        reached = [*self._rewards, verdict.rewards]
        # Harbor gives every step its time; answers that ran out leave the others unsolved
        is_short = self._num_answers >= self.config.max_steps
        missed = [dict[str, float]()] * (len(self.task.steps) - len(reached)) if is_short else []
        rewards = combine([*reached, *missed], strategy)
        if rewards and self.config.reward_key not in rewards:
            raise ValueError(
                f"reward_key: the verifier of {self.task.name} has no reward {self.config.reward_key!r}; it has "
                f"{', '.join(rewards)}"
            )
        reward = rewards.pop(self.config.reward_key, 0.0)
        info = {
            "success": reward >= self.config.success_reward,
            "submitted": submitted,
            "verifier_failed": bool(verdict.error),
            **self._metrics(valid=valid),
            **{f"reward_{name}": value for name, value in rewards.items()},
        }
        self.close()
        return self._observe(verdict.error), reward + info["format_penalty"], True, False, info

    def _metrics(self, *, valid: bool) -> dict[str, Any]:
        return {"action_is_valid": valid, "format_penalty": 0.0 if valid else self.config.format_penalty}

    def _observe(self, text: str) -> str:
        self._last = text
        return text

    def _index(self, seed: int | None, rng: np.random.Generator) -> int:
        if self.config.split == "held_out" and seed is not None:
            return seed % len(self._tasks)
        return int(rng.integers(len(self._tasks)))


def _command_of(call: Call) -> BashCommand:
    if call.name == SUBMIT:
        return BashCommand(SUBMIT)
    if call.name != BASH.name:
        return BashCommand("", f"there is no function {call.name!r}; there is {BASH.name}, {SUBMIT}")
    text = call.arguments.get("command")
    return BashCommand(text) if isinstance(text, str) else BashCommand("", "bash needs the argument 'command', a text")


def describe_trial(config: HarborConfig, task: HarborTask) -> str:
    """Return what the agent that runs Harbor reads, as JSON."""
    keys = {"agent", "environment", "trials_dir", "reward_key", "success_reward"}
    limits = config.sandbox.model_dump(mode="json", exclude_unset=True)
    settings = {**config.model_dump(mode="json", include=keys), "limits": limits}
    return json.dumps({"task_dir": str(task.folder.resolve()), **settings})


def format_output(result: CommandResult, timeout_s: float) -> str:
    lines = [result.output.rstrip()] if result.output.strip() else []
    if result.timed_out:
        lines.append(f"[timed out after {timeout_s:g} s]")
    elif result.exit_code:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines) or "(no output)"


def combine(steps: list[dict[str, float]], strategy: str) -> dict[str, float]:
    """Return a trial's rewards from its steps': their means, missing ones as 0, or the last's."""
    if strategy == "final" or len(steps) == 1:
        return dict(steps[-1])
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
