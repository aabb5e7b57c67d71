"""Configuration of the reward functions with a model, in the form of the roles: reward models and judges."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.services.devices import DeviceMapping
from offbeat.services.generation.config import AttentionName, Dtype, VllmConfig
from offbeat.services.reward.kinds.config import RewardConfig, Scope

_ENGINE_KEYS = ("model_args", "strategy_args", "device", "device_mapping", "kv_cache_gib")
_COMPARED = {"pairs": ("response_a", "response_b"), "ranking": ("responses",)}
"""Placeholders of a group's answers."""
_VERDICT_KEYS = ("verdict", "max_score", "criteria", "rubric_key", "compared_key")
_GROUP_KEYS = ("compare", "num_partners")
_API_KEYS = ("model", "api_key_env", "extra_body", "sees_images")


class ModelRewardConfig(RewardConfig):
    """Reward with a model, on CPUs or GPUs."""

    device: Literal["cpu", "cuda"] = "cpu"
    device_mapping: DeviceMapping | None = None
    """Devices of its own, as many for each replica as its engine takes, shared with no role; `num_replicas` follows."""

    @property
    def model_folder(self) -> Path | None:
        """Folder of its model; None: a service has it."""
        return None

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


class JudgeModelArgs(Config):
    """Model that the mesh serves; ROLL's `model_args`."""

    model_name_or_path: Path | None = None
    """Local Hugging Face folder with a chat template, or a model of the hub; None: that of `url`."""
    dtype: Dtype | None = None
    """None: the model's."""


class JudgeGeneratingArgs(Config):
    """Sampling of verdicts; ROLL's `generating_args`."""

    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int = Field(default=1024, ge=1)


class JudgeStrategyArgs(Config):
    """Engine of a judge's model; ROLL's `strategy_args`."""

    strategy_name: Literal["vllm"] = "vllm"
    strategy_config: VllmConfig = VllmConfig()
    """`max_model_len` None: the model's."""

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_supported(cls, value: object) -> object:
        if isinstance(value, str) and value != "vllm":
            raise ValueError(f"{value} can't serve a judge: take vllm, or set url and model of a server of your own")
        return value


class LlmJudgeConfig(ModelRewardConfig):
    """Language model that judges the response, behind an OpenAI-compatible API or in replicas of the mesh."""

    kind: Literal["llm_judge"]
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Base of the API (`http://host:8000/v1`)."""
    model: str | None = None
    """Name of the API's model."""
    model_args: JudgeModelArgs = JudgeModelArgs()
    """In place of `url`: a model that each of the reward's replicas serves."""
    generating_args: JudgeGeneratingArgs = JudgeGeneratingArgs()
    strategy_args: JudgeStrategyArgs = JudgeStrategyArgs()
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of the engine on a CPU, GiB."""
    api_key_env: str | None = None
    """Environment variable with the API's key."""
    scope: Scope = "episode"
    """`group`: the judge compares the answers of a group; the value is the share of the others that an answer beats, a tie
    counting half.
    """
    compare: Literal["pairs", "ranking"] = "pairs"
    """With `scope: group`. `pairs`: which of two answers is better, asked in both orders (a contradiction is a tie).
    `ranking`: the order of all answers, shown shuffled, in one call.
    """
    num_partners: int | None = Field(default=None, ge=1)
    """With `compare: pairs`, answers that each is compared with, drawn by the group's number; None: all others."""
    verdict: Literal["score", "yes_no", "pairwise", "rubric"] = "score"
    """Form of the verdict; each value is between 0 and 1.

    `score`: a number up to `max_score`. `yes_no`. `pairwise`: the better of the response and the one in `compared_key`,
    asked in both orders (a contradiction is 0.5). `rubric`: a number per criterion, averaged by weight.
    """
    template: str | None = None
    """The question, with `{prompt}`, `{response}` (`pairwise` and pairs of a group: `{response_a}`, `{response_b}`; a
    ranking: `{responses}`), `{ground_truth}` and `{criteria}` (`rubric`). The form of the answer is added. None: a general
    one.
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
    extra_body: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Further keys of the request."""
    timeout_s: float = Field(default=120.0, gt=0)
    cache_size: int = Field(default=4096, ge=0)

    @property
    def gpus_per_replica(self) -> int:
        return self.strategy_args.strategy_config.world_size if self.device == "cuda" else 0

    @property
    def is_of_group(self) -> bool:
        return self.scope == "group"

    @property
    def model_folder(self) -> Path | None:
        return self.model_args.model_name_or_path

    @model_validator(mode="after")
    def _serves_its_model(self) -> "LlmJudgeConfig":
        is_implied = "num_replicas" not in self.model_fields_set and self.device_mapping is None
        if self.model_folder is not None and is_implied:
            object.__setattr__(self, "num_replicas", 1)
        return self

    @model_validator(mode="after")
    def _has_one_source(self) -> "LlmJudgeConfig":
        if (self.url is None) == (self.model_folder is None):
            raise ValueError("a judge needs either url and model, or model_args.model_name_or_path")
        if self.url is not None:
            if self.model is None:
                raise ValueError("model: name the model that the API at url serves")
            unused, where = _ENGINE_KEYS, "an API at url"
        else:
            if not self.num_replicas:
                raise ValueError("num_replicas: a judge with a model of its own needs at least 1")
            unused, where = _API_KEYS, "a judge with a model of its own"
        self._refuse_changes(unused, where)
        return self

    @model_validator(mode="after")
    def _has_one_scope(self) -> "LlmJudgeConfig":
        if not self.is_of_group:
            self._refuse_changes(_GROUP_KEYS, "scope: episode")
        else:
            self._refuse_changes(_VERDICT_KEYS, "scope: group, whose answers are compared by `compare`")
        if self.compare == "ranking" and self.num_partners is not None:
            raise ValueError("num_partners has no effect with compare: ranking, which compares all: leave it out")
        return self

    def _refuse_changes(self, keys: tuple[str, ...], where: str) -> None:
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} has no effect with {where}: leave it out")

    @model_validator(mode="after")
    def _shows_the_response(self) -> "LlmJudgeConfig":
        names = ("response",)
        if self.is_of_group:
            names = _COMPARED[self.compare]
        elif self.verdict == "pairwise":
            names = _COMPARED["pairs"]
        missing = [name for name in names if self.template is not None and f"{{{name}}}" not in self.template]
        if missing:
            raise ValueError(f"template has no {{{missing[0]}}}: the judge would not see the response")
        if self.criteria and self.verdict != "rubric":
            raise ValueError("criteria need verdict: rubric")
        if any(weight <= 0 for weight in self.criteria.values()):
            raise ValueError("criteria need weights above 0")
        return self


class RewardModelArgs(Config):
    """Model that scores; ROLL's `model_args`."""

    model_name_or_path: Path
    """Local Hugging Face folder of an `AutoModelForSequenceClassification`, or a model of the hub."""
    dtype: Dtype = "float32"
    attn_implementation: AttentionName = "auto"
    """`auto`: transformers' choice."""


class RewardModelStrategyArgs(Config):
    """Engine of a reward model; ROLL's `strategy_args`."""

    strategy_name: Literal["hf_infer"] = "hf_infer"

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_supported(cls, value: object) -> object:
        if isinstance(value, str) and value != "hf_infer":
            raise ValueError(
                f"{value} is not supported (transformers computes logits of whole conversations): take hf_infer"
            )
        return value


class RewardModelConfig(ModelRewardConfig):
    """Logit of a sequence-classification model over the conversation, in the model's chat template."""

    is_share: ClassVar[bool] = False
    kind: Literal["reward_model"]
    model_args: RewardModelArgs
    strategy_args: RewardModelStrategyArgs = RewardModelStrategyArgs()
    label: int = Field(default=0, ge=0)
    """Logit of a model with several labels."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens of a conversation, the earliest cut; None: the model's maximum."""
    max_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens of a forward pass, padding included."""
    includes_thoughts: bool = False
    """Whether the model reads the response's thoughts."""
    num_replicas: int = Field(default=1, ge=0)
    max_concurrent: int = Field(default=64, ge=1)
    timeout_s: float = Field(default=120.0, gt=0)
    cache_size: int = Field(default=4096, ge=0)

    @property
    def gpus_per_replica(self) -> int:
        return 1 if self.device == "cuda" else 0

    @property
    def model_folder(self) -> Path:
        return self.model_args.model_name_or_path

    @model_validator(mode="after")
    def _has_a_process_with_a_gpu(self) -> "RewardModelConfig":
        if self.device == "cuda" and not self.num_replicas:
            raise ValueError("num_replicas: env workers have no GPU: take at least 1, or device cpu")
        if self.device == "cpu" and self.model_args.attn_implementation == "flash_attention_2":
            raise ValueError("model_args.attn_implementation: flash_attention_2 needs device cuda: take auto or sdpa")
        return self
