"""Configuration of the generation service (`actor_infer` in a run's YAML)."""

import re
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.services.devices import DeviceMapping

Dtype = Literal["float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "sdpa", "eager", "flash_attention_2"]
StopString = Annotated[str, Field(min_length=1, max_length=128)]
ROUTED_EXPERTS = "enable_return_routed_experts"
"""vLLM's argument by which it returns the experts of each token."""
UTILIZATION = 0.85
"""Default `gpu_memory_utilization` of a GPU without a learner."""


class GeneratingArgs(Config):
    """Sampling parameters of the policy; ROLL's `generating_args`."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy, for evaluation only; the trainer divides its logits by it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1, recorded logprobs are of the truncated distribution, the trainer's of the full one: needs `old_logprobs:
    recompute`, or a loss without ratio.
    """
    top_k: int = Field(default=-1, ge=-1)
    """-1 keeps every token; else as `top_p`."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum tokens per turn; a tag's `max_tokens_per_step` may be lower. A run that leaves it out has its tags' largest
    one, at least 64.
    """
    stop_strings: tuple[StopString, ...] = Field(default=(), max_length=16)
    """Texts that end an answer, which keeps the text and the whole token that completes it. Special tokens count as their
    text.
    """


class EngineModelArgs(Config):
    """Model of the engines; ROLL's `model_args`."""

    dtype: Dtype | None = None
    """None: `actor_train.model_args.dtype`, so that sampled and trained logprobs agree."""
    image_input: bool | None = None
    """None: `actor_train.model_args.image_input`."""


class VllmConfig(Config):
    """Engine arguments of vLLM (`AsyncEngineArgs`), under vLLM's names; others are passed unchanged."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum context, tokens; None: the run's `sequence_length`."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Turns that one engine batches."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory. None: 0.85, and 0.45 beside the learner on the same GPU."""
    enable_sleep_mode: bool | None = None
    """Whether engines on the learner's devices sleep during its steps, and it leaves the devices between them; on a CPU, all
    engines. None: if engines and learner share GPUs, and the run is synchronous (`max_staleness` 0) or other engines have
    GPUs of their own.
    """
    enforce_eager: bool | None = None
    """Whether the model is not compiled, and has no CUDA graphs. None: with vLLM on a CPU, and where it serves adapters
    (`max_lora_rank`). Compiling lengthens an engine's first start on a GPU by up to a minute.
    """
    enable_prefix_caching: bool = True
    max_lora_rank: int | None = Field(default=None, ge=1, le=512)
    """Largest `lora_rank` served as an adapter, instead of merged weights."""
    max_loras: int = Field(default=1, ge=1, le=256)
    """Runs that an application of the deploy file serves at once, each by its own adapter on one base. Above 1 it needs
    `max_lora_rank`, vLLM and `on_weight_update: keep`. A run's own application serves that run alone.
    """

    @model_validator(mode="after")
    def _others_have_names_of_arguments(self) -> Self:
        """SGLang's become options of a command line, where `a=b` would set a text."""
        for name in self.model_extra or ():
            if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
                raise ValueError(f"{name!r} is no name of an argument: letters, digits and `_`")
        return self

    @property
    def world_size(self) -> int:
        """Devices of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


HF_ARGUMENTS = ("max_model_len", "max_num_seqs", "enable_prefix_caching", "max_lora_rank")
"""`VllmConfig`'s fields that `hf_infer` has, too."""


def arguments_beyond_hf(engine: VllmConfig) -> list[str]:
    """Return the set arguments that `hf_infer` does not have."""
    fields = type(engine).model_fields.items()
    changed = [name for name, field in fields if name not in HF_ARGUMENTS and getattr(engine, name) != field.default]
    if engine.enforce_eager:  # as it does, and as records of earlier builds say
        changed.remove("enforce_eager")
    return [*changed, *(engine.model_extra or ())]


def sampling_mask_limit(engine: VllmConfig) -> int:
    """Return the `top_k` below which SGLang records logprobs of the tokens kept; 0: it records none of them."""
    others = engine.model_extra or {}
    if others.get("speculative_algorithm") or others.get("sampling_backend") == "ascend":
        return 0
    limit = others.get("sampling_mask_max_tokens")
    return limit if isinstance(limit, int) else 4096


UNSUPPORTED = {
    "megatron_infer": "vLLM shards engines by tensor_parallel_size and pipeline_parallel_size",
    **dict.fromkeys(
        ("deepspeed_infer", "fsdp2_infer"),
        "it computes logprobs of frozen models, for `reference` and a `teacher`",
    ),
}


class EngineStrategy(Config):
    """Engine; ROLL's `strategy_args`."""

    strategy_name: Literal["vllm", "hf_infer", "sglang"] = "vllm"
    """`hf_infer`: transformers in the replica's process, for small models on a CPU. `sglang`: an SGLang server."""
    python: str = ""
    """Python with SGLang (`/other/venv/bin/python`), whose requirements are not vLLM's; empty: this one."""
    strategy_config: VllmConfig = VllmConfig()

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_supported(cls, value: object) -> object:
        if isinstance(value, str) and value in UNSUPPORTED:
            raise ValueError(f"{value} can't sample ({UNSUPPORTED[value]}): take vllm, hf_infer or sglang")
        return value


class GenerationConfig(Config):
    """The engines behind the deployment."""

    model_args: EngineModelArgs = EngineModelArgs()
    generating_args: GeneratingArgs = GeneratingArgs()
    strategy_args: EngineStrategy = EngineStrategy()
    app: str | None = None
    """Serve application that samples with the run's model; None: a free one that matches these keys, else one of the
    run's own.
    """
    num_replicas: int = Field(default=1, ge=1)
    """Engines, each with all of the weights; derived from `device_mapping` if set."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Default: `cuda` if there are GPUs for all engines and CUDA's vLLM is installed."""
    device_mapping: DeviceMapping | None = None
    """Devices of the cluster, as a list or ROLL's `list(range(0, 8))`; `tensor_parallel_size` x
    `pipeline_parallel_size` per engine. None: those that `actor_train` leaves, shared where there are too few.
    """
    cpus_per_replica: float = Field(default=1.0, gt=0)
    """Logical CPUs per replica in Ray; on a CPU also the engine's OpenMP threads (rounded, at least 1)."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache on a CPU, GiB per replica."""
    on_weight_update: Literal["keep", "recompute"] = "keep"
    """Whether running requests keep or recompute their KV cache under new weights; new requests reuse no older
    entries."""
    keep_sessions: bool | None = None
    """Whether an episode stays in vLLM between its turns, so that a turn computes its new tokens alone; until the next
    version, within `max_num_seqs` and the KV cache. Needs `on_weight_update: keep` and prefix caching, and no
    `enable_sleep_mode`. None: on a CPU, where all of these hold.
    """
    request_timeout_s: float = Field(default=60.0, gt=0)
    """Time until a turn is aborted and its episode retried."""
    update_timeout_s: float = Field(default=120.0, gt=0)
    """Time to load weights after which a replica leaves routing. Reading is limited by `weights.fetch_timeout_s`."""

    def with_mapped_replicas(self) -> "GenerationConfig":
        """Set the number of replicas by `device_mapping`.

        Raises:
            ValueError: it is no multiple of an engine's devices, or `num_replicas` disagrees.
        """
        if self.device_mapping is None:
            return self
        size, number = self.engine.world_size, len(self.device_mapping)
        if number % size:
            raise ValueError(
                f"device_mapping: {number} device(s) are no multiple of {size}, those of an engine (tensor_parallel_size "
                f"{self.engine.tensor_parallel_size} x pipeline_parallel_size {self.engine.pipeline_parallel_size})"
            )
        if "num_replicas" in self.model_fields_set and self.num_replicas != number // size:
            raise ValueError(
                f"num_replicas: {self.num_replicas} engine(s) of {size} device(s) disagree with device_mapping of {number}, "
                f"which implies {number // size}: leave one of them out"
            )
        return self.model_copy(update={"num_replicas": number // size})

    @property
    def engine(self) -> VllmConfig:
        return self.strategy_args.strategy_config

    def with_engine(self, **arguments: JsonValue) -> "GenerationConfig":
        """Return a copy with other arguments of the engine, those that are passed unchanged included."""
        engine = self.engine.model_copy(update=arguments)
        strategy = self.strategy_args.model_copy(update={"strategy_config": engine})
        return self.model_copy(update={"strategy_args": strategy})

    @property
    def enforces_eager(self) -> bool:
        """Whether the model is not compiled."""
        if self.engine.enforce_eager is not None:
            return self.engine.enforce_eager
        is_vllm = self.strategy_args.strategy_name == "vllm"
        return is_vllm and (self.device == "cpu" or self.engine.max_lora_rank is not None)

    @property
    def returns_routing(self) -> bool:
        """Whether engines return the experts of each token."""
        return bool((self.engine.model_extra or {}).get(ROUTED_EXPERTS))

    @property
    def can_keep_sessions(self) -> bool:
        """Whether keys and values outlast a turn, and turns end by themselves alone."""
        # An engine that goes to sleep aborts turns by their ids, which vLLM knows of a session's first turn alone
        # nor does a block of a session have rows of experts by which a later request finds them
        engine = self.engine
        caches = self.on_weight_update == "keep" and engine.enable_prefix_caching
        return caches and not engine.enable_sleep_mode and not self.returns_routing

    @property
    def keeps_sessions(self) -> bool:
        is_wanted = self.device == "cpu" if self.keep_sessions is None else self.keep_sessions
        return is_wanted and self.can_keep_sessions


def app_name(run_id: str) -> str:
    return f"generation-{run_id}"
