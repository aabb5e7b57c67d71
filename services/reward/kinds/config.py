"""Configuration of the reward functions, by `kind`."""

from pathlib import Path
from typing import ClassVar, Literal

import regex
from pydantic import Field, JsonValue, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.envs.parsing import compile_pattern
from offbeat.envs.sandbox import Limits
from offbeat.services.devices import DeviceMapping
from offbeat.services.generation.config import Dtype, VllmConfig


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


class ModelRewardConfig(RewardConfig):
    """Reward with a model, on CPUs or GPUs."""

    device: Literal["cpu", "cuda"] = "cpu"
    device_mapping: DeviceMapping | None = None
    """Devices of its own, as many for each replica as its engine takes, shared with no role; `num_replicas` follows."""

    @model_validator(mode="after")
    def _has_a_replica_per_device(self) -> "ModelRewardConfig":
        if self.device_mapping is None:
            return self
        if self.device == "cpu":
            raise ValueError("device_mapping has no effect on a CPU: leave it out, or take device cuda")
        number, size = len(self.device_mapping), self.gpus_per_replica
        if number % size:
            raise ValueError(f"device_mapping of {number} device(s) is no multiple of the {size} of each replica")
        if self.num_replicas != number // size and "num_replicas" in self.model_fields_set:
            raise ValueError(
                f"num_replicas: {self.num_replicas} of {size} device(s) disagree with device_mapping of {number}: leave one "
                "of them out"
            )
        # A validator before the fields would see a JSON list as Python's, which a strict tuple refuses
        object.__setattr__(self, "num_replicas", number // size)
        return self


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
    path: str
    """`module:function`."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])

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
    url: str = Field(pattern=r"^https?://")
    score_key: str = "score"
    api_key_env: str | None = None
    """Environment variable with a bearer token."""


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
    """Time for a program's tests, s; those not started count as failed."""
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


_ENGINE_KEYS = ("strategy_config", "dtype", "device", "device_mapping", "kv_cache_gib")
_API_KEYS = ("model", "api_key_env", "extra_body", "sees_images")


class LlmJudgeConfig(ModelRewardConfig):
    """Language model that judges the response, behind an OpenAI-compatible API or in replicas of the mesh."""

    kind: Literal["llm_judge"]
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Base of the API (`http://host:8000/v1`)."""
    model: str | None = None
    """Name of the API's model."""
    model_name_or_path: Path | None = None
    """In place of `url`: folder of a model with a chat template, which each of the reward's replicas serves by vLLM."""
    strategy_config: VllmConfig = VllmConfig()
    """Arguments of that engine; `max_model_len` None: the model's."""
    dtype: Dtype | None = None
    """Of the engine; None: the model's."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of the engine on a CPU, GiB."""
    api_key_env: str | None = None
    """Environment variable with the API's key."""
    verdict: Literal["score", "yes_no", "pairwise", "rubric"] = "score"
    """Form of the verdict; each value is between 0 and 1.

    `score`: a number up to `max_score`. `yes_no`. `pairwise`: the better of the response and the one in `compared_key`,
    asked in both orders (a contradiction is 0.5). `rubric`: a number per criterion, averaged by weight.
    """
    template: str | None = None
    """The question, with `{prompt}`, `{response}` (`pairwise`: `{response_a}`, `{response_b}`), `{ground_truth}` and
    `{criteria}` (`rubric`). The form of the answer is added. None: a general one.
    """
    system_prompt: str | None = None
    sees_images: bool = False
    """Whether the judge is shown the prompt's images, before the question."""
    max_score: int = Field(default=10, ge=1, le=100)
    criteria: dict[str, float] = Field(default_factory=dict[str, float])
    """Criteria of a rubric with weights; empty: the row's."""
    rubric_key: str = "rubric"
    """Column of a rubric: texts, or objects with `criterion` and `weight`."""
    compared_key: str | None = None
    """Column of the response to compare with; None: `ground_truth`."""
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=1024, ge=1)
    extra_body: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Further keys of the request."""
    timeout_s: float = Field(default=120.0, gt=0)
    cache_size: int = Field(default=4096, ge=0)

    @property
    def gpus_per_replica(self) -> int:
        return self.strategy_config.world_size if self.device == "cuda" else 0

    @model_validator(mode="after")
    def _serves_its_model(self) -> "LlmJudgeConfig":
        is_implied = "num_replicas" not in self.model_fields_set and self.device_mapping is None
        if self.model_name_or_path is not None and is_implied:
            object.__setattr__(self, "num_replicas", 1)
        return self

    @model_validator(mode="after")
    def _has_one_source(self) -> "LlmJudgeConfig":
        if (self.url is None) == (self.model_name_or_path is None):
            raise ValueError("a judge needs either url and model, or model_name_or_path")
        if self.url is not None:
            if self.model is None:
                raise ValueError("model: name the model that the API at url serves")
            unused, where = _ENGINE_KEYS, "an API at url"
        else:
            if not self.num_replicas:
                raise ValueError("num_replicas: a judge with model_name_or_path needs at least 1")
            unused, where = _API_KEYS, "a judge with model_name_or_path"
        for key in unused:
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} has no effect with {where}: leave it out")
        return self

    @model_validator(mode="after")
    def _shows_the_response(self) -> "LlmJudgeConfig":
        names = ("response_a", "response_b") if self.verdict == "pairwise" else ("response",)
        missing = [name for name in names if self.template is not None and f"{{{name}}}" not in self.template]
        if missing:
            raise ValueError(f"template has no {{{missing[0]}}}: the judge would not see the response")
        if self.criteria and self.verdict != "rubric":
            raise ValueError("criteria need verdict: rubric")
        if any(weight <= 0 for weight in self.criteria.values()):
            raise ValueError("criteria need weights above 0")
        return self


class RewardModelConfig(ModelRewardConfig):
    """Logit of a sequence-classification model over the conversation, in the model's chat template."""

    is_share: ClassVar[bool] = False
    kind: Literal["reward_model"]
    model_name_or_path: Path
    """Folder of an `AutoModelForSequenceClassification`."""
    label: int = Field(default=0, ge=0)
    """Logit of a model with several labels."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens of a conversation, the earliest cut; None: the model's maximum."""
    max_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens of a forward pass, padding included."""
    dtype: Dtype = "float32"
    includes_thoughts: bool = False
    """Whether the model reads the response's thoughts."""
    num_replicas: int = Field(default=1, ge=0)
    max_concurrent: int = Field(default=64, ge=1)
    timeout_s: float = Field(default=120.0, gt=0)
    cache_size: int = Field(default=4096, ge=0)

    @property
    def gpus_per_replica(self) -> int:
        return 1 if self.device == "cuda" else 0

    @model_validator(mode="after")
    def _has_a_process_with_a_gpu(self) -> "RewardModelConfig":
        if self.device == "cuda" and not self.num_replicas:
            raise ValueError("num_replicas: env workers have no GPU: take at least 1, or device cpu")
        return self
