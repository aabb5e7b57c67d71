"""Configuration of the reward functions without a model, by `kind`."""

from typing import ClassVar, Literal

import regex
from pydantic import Field, JsonValue, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.envs.parsing import compile_pattern
from offbeat.envs.sandbox import Limits

Scope = Literal["episode", "group"]


class RewardConfig(Config):
    """What every kind has."""

    is_share: ClassVar[bool] = True
    """Whether values are between 0 and 1."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)
    """Column of the trajectory (`reward/<name>`)."""
    weight: float = 1.0
    """Factor in the score."""
    threshold: float | None = None
    """With `combine: gate`, a condition instead of a summand: below it the score is 0."""
    tags: tuple[str, ...] = ()
    """Tags that it scores; empty: all."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Timeout of an attempt."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts after a timeout or an answer without a score; then the episode fails."""
    max_retry_s: float = Field(default=180.0, ge=0)
    """Time to retry an unavailable or busy service, s; then the episode fails."""
    max_concurrent: int = Field(default=16, ge=1)
    """Concurrent calls per env worker."""
    cache_size: int = Field(default=0, ge=0)
    """Scores kept per env worker, by content; equal samples share one call."""
    num_replicas: int = Field(default=0, ge=0)
    """Replicas of a Ray Serve application, each with `max_concurrent` calls; 0: in the env worker."""
    queue_timeout_s: float = Field(default=120.0, ge=0)
    """Wait for a replica, s, besides `timeout_s`."""
    cpus_per_replica: float = Field(default=1.0, ge=0)
    """Logical CPUs reserved in Ray per replica."""

    @property
    def gpus_per_replica(self) -> int:
        return 0

    @property
    def is_of_group(self) -> bool:
        """Return whether it compares the members of a group."""
        return False


class _PatternConfig(RewardConfig):
    answer_pattern: str | None = None
    r"""Regular expression of an answer without `\boxed{}`, after the thoughts; the last match counts."""

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            compile_pattern(pattern)
        return pattern


class MathRuleConfig(_PatternConfig):
    r"""1 if the last `\boxed{}` equals `ground_truth` by math-verify; too costly answers are wrong."""

    kind: Literal["math_rule"]
    max_concurrent: int = Field(default=1, ge=1)
    """Concurrent calls per process (env worker or replica), which compares one by one: more wait within `timeout_s`."""


class MultipleChoiceConfig(_PatternConfig):
    r"""1 if the letter in the last `\boxed{}`, or of `answer_pattern`, is that of `ground_truth`."""

    kind: Literal["multiple_choice"]
    num_choices: int = Field(default=26, ge=2, le=26)


class RegexConfig(RewardConfig):
    """1 if a pattern of the package `regex` matches; `.` matches newlines."""

    kind: Literal["regex"]
    pattern: str
    match: Literal["search", "full"] = "search"
    text: Literal["response", "final"] = "response"
    """`final`: what follows the thoughts."""
    timeout_s: float = Field(default=1.0, gt=0)

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        try:
            regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern


class CrossThinkQAConfig(RewardConfig):
    r"""`<think>...</think>`, then one `<answer>` or `\boxed{}`, compared as a letter or as text."""

    kind: Literal["crossthink_qa"]
    mode: Literal["loose", "soft", "strict"] = "loose"
    """A correct answer outside of the format: 1, 0.5 or 0."""


class DetectionConfig(RewardConfig):
    """Boxes in a JSON list, `[{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}]`, against those of `ground_truth`."""

    kind: Literal["detection"]
    metric: Literal["iou", "map"] = "iou"
    """`iou`: IoU of matched boxes, over the larger number of boxes. `map`: mean average precision at IoU .5 to .95."""
    max_boxes: int = Field(default=300, ge=1)
    """A response with more scores 0."""


class IFEvalConfig(RewardConfig):
    """Constraints of IFEval (arXiv:2311.07911), in the row's `instruction_id_list` and `kwargs`, or in
    `ground_truth`."""

    kind: Literal["ifeval"]
    mode: Literal["strict", "loose"] = "strict"
    """`loose`: also met without asterisks, first or last line."""
    reward: Literal["pass_rate", "all"] = "pass_rate"


class UserFunctionConfig(RewardConfig):
    """User function `def score(sample, **args) -> float`, plain or `async`."""

    is_share: ClassVar[bool] = False
    kind: Literal["function"]
    scope: Scope = "episode"
    """`group`: `def score(samples, **args) -> list[float]` of a group's members (`GroupMember`), a number for each."""
    path: str
    """`module:function`."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])

    @property
    def is_of_group(self) -> bool:
        return self.scope == "group"

    @field_validator("path")
    @classmethod
    def _names_a_function(cls, path: str) -> str:
        if not all(path.partition(":")):
            raise ValueError(f"{path!r} must be `module:function`")
        return path


class HttpConfig(RewardConfig):
    """Remote service: POST of the sample as JSON, answered by `{"score": 0.5}`."""

    is_share: ClassVar[bool] = False
    kind: Literal["http"]
    scope: Scope = "episode"
    """`group`: POST of a group's members, answered by a number for each in a list."""
    url: str = Field(pattern=r"^https?://")
    score_key: str = "score"
    api_key_env: str | None = None
    """Environment variable with a bearer token."""

    @property
    def is_of_group(self) -> bool:
        return self.scope == "group"


class NemoGymConfig(RewardConfig):
    """`/verify` of a resources server of NeMo Gym, given the row's columns and the response."""

    is_share: ClassVar[bool] = False
    kind: Literal["nemo_gym"]
    url: str = Field(pattern=r"^https?://")
    """Base URL."""
    ground_truth_field: str = ""
    """Field that carries the row's `ground_truth`, such as `expected_answer`; empty: none."""
    api_key_env: str | None = None
    """Environment variable with a bearer token."""


class CodeSandboxConfig(_PatternConfig):
    """Tests of the response's last fenced program, in the sandbox."""

    kind: Literal["code_sandbox"]
    case_type: Literal["auto", "stdio", "assert", "pytest", "function"] = "auto"
    """`auto`: the row's `case_type`, or by the form of its tests."""
    tests_key: str = "test_cases"
    """Column of tests; without it, `ground_truth`."""
    reward: Literal["all", "pass_rate"] = "all"
    """1 if all tests pass, or the share that passes."""
    max_tests: int | None = Field(default=None, ge=1)
    """Maximum tests, from the first."""
    max_total_s: float = Field(default=60.0, gt=0)
    """Time, s, for the tests of a program that has failed one by its time limit; those that could take longer count as
    failed.
    """
    sandbox: Limits = Limits()
    """Per test, or per pytest file."""
    max_concurrent: int = Field(default=4, ge=1)
    timeout_s: float = Field(default=180.0, gt=0)

    @model_validator(mode="after")
    def _fits_the_timeout(self) -> "CodeSandboxConfig":
        if (longest := self.max_total_s + self.sandbox.timeout_s) >= self.timeout_s:
            raise ValueError(
                f"timeout_s {self.timeout_s:g} must exceed max_total_s + sandbox.timeout_s = {longest:g}: a slow program is "
                "a wrong one, not a failure of the sandbox"
            )
        return self
