"""Configuration of the env-worker pool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.envs.prompts import IMAGE
from offbeat.services.generation.config import GeneratingArgs, StopString
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.rollout.data.config import DataConfig, Pipeline
from offbeat.services.tracing.config import TelemetryConfig

PROMPT_ENV, TOOL_ENV = "prompt", "tools"


class AgentRunner(Config):
    """External agent of a tag."""

    path: str = ""
    """`module:function`, plain or `async`, called with an `AgentTask` in a reused process."""
    python: str = ""
    """Python of `path`, from 3.10 on (`/other/venv/bin/python`); empty: this one."""
    episodes_per_process: int = Field(default=1, ge=1)
    """Concurrent episodes in a process, for an `async` function."""
    command: tuple[str, ...] = ()
    """Program and arguments, a process per episode, with `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`,
    `ANTHROPIC_API_KEY` and `OFFBEAT_TASK`.
    """
    num_agents: int = Field(default=8, ge=1)
    """Concurrent agents of the tag per worker."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Time of an episode, s; then agent and children are killed and the episode fails."""
    cancel_grace_s: float = Field(default=2.0, ge=0)
    """Time of an `async` function to end after its timeout or cancellation, s; then its process is killed."""
    max_calls: int = Field(default=1024, ge=1)
    """Maximum completions per episode."""
    tool_call_parser: str | None = None
    """vLLM's tool call parser (`llama4_pythonic`, `mistral`, ...); None detects it from the chat template."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "AgentRunner":
        if bool(self.path) == bool(self.command):
            raise ValueError("name the agent by `path` (module:function) or by `command`, one of both")
        if self.path and ":" not in self.path:
            raise ValueError(f"path {self.path!r} must be `module:function`")
        of_path = {"python", "episodes_per_process", "cancel_grace_s"} & self.model_fields_set
        if self.command and any(getattr(self, key) != type(self).model_fields[key].default for key in of_path):
            raise ValueError(
                "python, episodes_per_process and cancel_grace_s are for `path`; a command is a process per episode, "
                "killed at once"
            )
        return self


class OnAgentError(Config):
    """Training of an episode that an agent's error ended, instead of a retry."""

    reward: float = Field(allow_inf_nan=False)
    """As if returned by the agent."""
    reasons: tuple[Literal["agent_error", "agent_result", "agent_timeout", "agent_crashed"], ...] = Field(
        default=("agent_error", "agent_result"), min_length=1
    )
    """Others are retried."""


class OnEnvError(Config):
    """Training of an episode that an error in the env's `step` ended, instead of a retry."""

    reward: float = Field(allow_inf_nan=False)
    """As if returned by the step."""
    reasons: tuple[Literal["step_error", "step_timeout", "env_crashed"], ...] = Field(
        default=("step_error",), min_length=1
    )
    """Others are retried."""


class CustomEnv(Config):
    """One tag: an env and its turn rules."""

    env_type: str
    """A built-in name, an entry point of group `offbeat.envs`, or `module:Class`."""
    max_steps: int = Field(default=10, ge=1)
    """Maximum turns per episode."""
    max_tokens_per_step: int = Field(default=64, ge=1)
    """Maximum tokens per answer, unless the sampling's `max_new_tokens` is set to less."""
    agent_system_template: str | None = None
    """System prompt; None: the env's `system_prompt`."""
    env_instruction: str | None = None
    """Task description after `agent_system_template`, replacing the env's `system_prompt`."""
    agent_template: str = "{observation}"
    """User message, with `{observation}`, `{step}` (or `{turn_idx}`), `{actions_left}`, `{max_response_length}`
    (tokens), `{image}` (the env's `rgb_array`) and `{history}` (last `history_length` turns).
    """
    env_manager_cls: Literal["TrajEnvManager", "StepEnvManager", "StepConcatEnvManager"] = "TrajEnvManager"
    """Context: the whole conversation, or a prompt per turn with earlier turns in `{history}` (`StepEnvManager`) or
    `{observation}` (`StepConcatEnvManager`).
    """
    history_length: int = Field(default=0, ge=0)
    """Turns in `{history}` of `StepEnvManager`."""
    env_config: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Settings of the env."""
    tool_call_parser: str | None = None
    """vLLM's parser for calls of the env's `functions`; None detects it. Agents use `agent_runner.tool_call_parser`."""
    agent_runner: AgentRunner | None = None
    """External agent, limited by `max_steps` (env) and `max_tokens_per_step` (completion); None: the policy answers
    observations.
    """
    on_agent_error: OnAgentError | None = None
    """Reward if the policy's answers make the agent fail; None: retry."""
    on_env_error: OnEnvError | None = None
    """Reward for exceptions of the env or its tools in `step`; None: retry."""
    execution: Literal["inline", "thread", "process"] = "thread"
    """Where reset and step run. `inline`: on the event loop, for microseconds; `thread`: for waiting envs; `process`:
    in a child process, killed if hung.
    """
    use_thread_lock: bool = False
    """Lock around constructors, resets, steps and images of such tags per worker, for envs that are not thread-safe."""
    max_env_step_concurrent: int | None = Field(default=None, ge=1)
    """Concurrent resets and steps in the run, divided evenly among workers (at least one each); None: unlimited."""
    memory_gib: float = Field(default=4.0, gt=0)
    """Memory limit of `execution: process`, GiB; beyond it the episode fails."""
    reset_timeout_s: float = Field(default=60.0, gt=0)
    step_timeout_s: float = Field(default=30.0, gt=0)
    episode_timeout_s: float = Field(default=600.0, gt=0)

    @field_validator("agent_template")
    @classmethod
    def _fill_constants(cls, template: str, info: ValidationInfo) -> str:
        length = str(info.data.get("max_tokens_per_step", ""))
        return template.replace("{turn_idx}", "{step}").replace("{max_response_length}", length)

    @model_validator(mode="after")
    def _history_is_told(self) -> "CustomEnv":
        stepwise, has_history = self.env_manager_cls == "StepEnvManager", "{history}" in self.agent_template
        if self.history_length and not stepwise:
            raise ValueError(
                f"history_length is for StepEnvManager; {self.env_manager_cls} has the whole history before it"
            )
        if has_history != bool(self.history_length):
            raise ValueError("history_length and {history} in agent_template go together: set both or neither")
        return self

    @property
    def continues_prompts(self) -> bool:
        """Return whether a turn's prompt continues the one before it, if the chat template is append-only."""
        return self.env_manager_cls == "TrajEnvManager" and self.max_steps > 1

    def system_prompt(self, default: str) -> str:
        """Return the system prompt. default: the env's."""
        if self.env_instruction is None:
            return default if self.agent_system_template is None else self.agent_system_template
        return "\n".join(part for part in (self.agent_system_template, self.env_instruction) if part)

    @model_validator(mode="after")
    def _an_agent_can_fail(self) -> "CustomEnv":
        if self.on_agent_error and not self.agent_runner:
            raise ValueError("on_agent_error needs an agent_runner; for exceptions of the env it is on_env_error")
        return self

    def with_rows(self, data: DataConfig) -> "CustomEnv":
        """Return a copy whose env of type `prompt`, also within `tools`, reads a dataset."""
        filled = _fill_rows(self.env_type, self.env_config, data)
        return self if filled is self.env_config else self.model_copy(update={"env_config": filled})

    @property
    def shows_images(self) -> bool:
        return IMAGE in self.agent_template


def _fill_rows(env_type: str, settings: dict[str, JsonValue], data: DataConfig) -> dict[str, JsonValue]:
    if env_type == PROMPT_ENV:
        val = data.val_dataset_name
        return {
            **settings,
            "dataset_name": str(data.dataset_name),
            "val_dataset_name": None if val is None else str(val),
            "messages_key": data.messages_key,
            "prompt_key": data.prompt_key,
            "images_key": data.images_key,
        }
    wrapped, inner = settings.get("env_type"), settings.get("env_config", {})
    if env_type != TOOL_ENV or not isinstance(wrapped, str) or not isinstance(inner, dict):
        return settings
    return {**settings, "env_config": _fill_rows(wrapped, inner, data)}


class TaskSamplerConfig(Config):
    """Task sampler of training, like `offbeat.TaskSampler`."""

    path: str
    """`module:Class`, constructed as `Class(tags, **args)`."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])

    @field_validator("path")
    @classmethod
    def _names_a_class(cls, path: str) -> str:
        if not all(path.partition(":")):
            raise ValueError(f"{path!r} must be `module:Class`")
        return path


class ManagerGeneratingArgs(Config):
    """Sampling of a manager's episodes; None: the default."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    stop_strings: tuple[StopString, ...] | None = Field(default=None, max_length=16)

    def over(self, args: GeneratingArgs) -> GeneratingArgs:
        return args.model_copy(update=self.model_dump(exclude_none=True))

    def for_evaluation(self, train: GeneratingArgs) -> GeneratingArgs:
        """Return the sampling of evaluations: temperature 1 without truncation, training's ends, with these changes."""
        return self.over(GeneratingArgs(max_new_tokens=train.max_new_tokens, stop_strings=train.stop_strings))


class EnvManagerConfig(Config):
    """Tags and groups; ROLL's `train_env_manager` and `val_env_manager`."""

    num_env_groups: int = Field(default=8, ge=1)
    """Maximum groups in flight; of evaluation, only the scale of `num_groups_partition`."""
    generating_args: ManagerGeneratingArgs = ManagerGeneratingArgs()
    """Training: those of `actor_infer.generating_args`, which sets the same keys alike or not at all; sampled evaluation:
    changes to temperature 1 without truncation.
    """
    group_size: int = Field(default=8, ge=1)
    """Episodes per task and seed."""
    max_env_num_per_worker: int | None = Field(default=None, ge=1)
    """Concurrent episodes of the manager per worker, within `rollout.max_env_num_per_worker`; None: that alone."""
    group_size_redundancy: int = Field(default=0, ge=0)
    """Extra episodes per group; the last are cancelled."""
    tags: tuple[str, ...] = ()
    """Keys of `custom_envs`; empty: all."""
    num_groups_partition: tuple[int, ...] = ()
    """Groups per tag, at least 1, summing to `num_env_groups` at the start; empty: equal shares."""
    task_sampler: TaskSamplerConfig | None = None
    """Sampler of training tags and seeds; None cycles through the tags."""

    @model_validator(mode="after")
    def _partition_fits(self) -> "EnvManagerConfig":
        partition = self.num_groups_partition
        if partition and self.task_sampler:
            raise ValueError("task_sampler draws the tags: leave num_groups_partition out")
        if partition and len(partition) != len(self.tags):
            raise ValueError(f"num_groups_partition has {len(partition)} entries for {len(self.tags)} tags")
        return self

    def tags_of(self, custom_envs: Mapping[str, CustomEnv]) -> tuple[str, ...]:
        return self.tags or tuple(custom_envs)


class RolloutConfig(Config):
    """The env-worker pool."""

    num_workers: int = Field(default=1, ge=1)
    """Worker processes."""
    max_env_num_per_worker: int = Field(default=128, ge=1)
    """Concurrent episodes per worker, evaluation included."""
    kv_usage_target: float | None = Field(default=None, gt=0, le=1)
    """Share of vLLM's KV cache below which workers keep what running turns hold, by the number of episodes that they play
    at a time, up to `max_env_num_per_worker`. None: that number alone.
    """
    cpus_per_worker: float = Field(default=0.5, gt=0)
    """Logical CPUs per worker in Ray."""
    num_threads: int = Field(default=8, ge=1)
    """Threads per worker for `execution: thread`."""
    keep_text: bool = False
    """Record the text of training episodes, as of evaluation."""
    max_generation_retry_s: float = Field(default=180.0, gt=0)
    """Time to retry a turn without a replica, s; then the episode fails."""
    coalesce_s: float = Field(default=0.01, ge=0)
    """Window for batching turns into a call, s; single turns do not wait."""
    max_turns_per_call: int | None = Field(default=None, ge=1)
    """Turns per generation call. None: all that are ready for a replica; episodes are spread over replicas anyway."""


class WorkerSettings(Config):
    run_id: str
    run_uid: str = ""
    """Unique id; writes for another run of the name are refused."""
    seed: int
    model_folder: Path
    """Tokenizer and chat template."""
    image_input: bool | None = None
    """Of the policy, `actor_train.model_args.image_input`."""
    output_dir: Path
    redis_url: str
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    """Of the worker and its children."""
    sequence_length: int = Field(ge=2)
    custom_envs: dict[str, CustomEnv]
    train_env_manager: EnvManagerConfig
    val_env_manager: EnvManagerConfig
    rollout: RolloutConfig = RolloutConfig()
    generating_args: GeneratingArgs = GeneratingArgs()
    generation_app: str
    """Serve application; empty: nothing is sampled."""
    names_run: bool = False
    """Whether calls name the run, as the application may serve others, too."""
    returns_routing: bool = False
    """Whether engines return the experts of each token."""
    pipeline: Pipeline = "agentic"
    data: DataConfig | None = None
    """Dataset whose rows are the training groups, or their prompts (`rlvr`); None: tasks of envs."""
    rewards: RewardsConfig | None = None
    """Scores added to the envs' rewards."""
    sampled_share: float = Field(default=0.0, ge=0, le=1)
    """Share of rows whose last response is sampled (`distill.lmbda`)."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """`actor_infer.request_timeout_s`."""
    worker_timeout_s: float = Field(default=15.0, gt=0)
    """`buffer.worker_timeout_s`; sets the heartbeat interval."""
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def agent_grace_s(self) -> float:
        """Longest time that a tag leaves a cancelled agent to end."""
        runners = [env.agent_runner for env in self.custom_envs.values() if env.agent_runner]
        return max((runner.cancel_grace_s for runner in runners), default=0.0)
