"""Request bodies of the SDK (0.38); unknown fields are ignored."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from offbeat.services.tinker.records import Metadata

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+=-]{0,127}$")]
Id = Annotated[str, Field(min_length=1, max_length=256)]
SeqId = Annotated[int, Field(ge=0, lt=1 << 53)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
MAX_SEED = (1 << 63) - 1
MAX_TOP = 1000


class Body(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class LoraBody(Body):
    rank: int = Field(ge=1)
    seed: int | None = Field(default=None, ge=-MAX_SEED, le=MAX_SEED)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Body):
    type: str = "adamw"


class CreateSessionBody(Body):
    user_metadata: Metadata | None = None
    display_name: str | None = Field(default=None, max_length=1000)


class SessionBody(Body):
    session_id: Id


class CreateModelBody(Body):
    session_id: Id
    model_seq_id: SeqId
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: Metadata | None = None


class ModelBody(Body):
    model_id: Id


MIN_EPS = 1.2e-38
"""Smallest normal float32: Adam divides 0 by less where a gradient is 0."""


class AdamBody(Body):
    learning_rate: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=MIN_EPS, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, allow_inf_nan=False)


class OptimStepBody(Body):
    model_id: Id
    seq_id: SeqId
    adam_params: dict[str, object] | None = None
    """Validated as `AdamBody` in the command's turn."""
    optimizer_params: dict[str, object] | None = None


class SaveWeightsBody(Body):
    model_id: Id
    seq_id: SeqId
    path: str | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    ttl_seconds: int | None = None


class SamplerWeightsBody(SaveWeightsBody):
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeightsBody(Body):
    path: str
    """Any: a command that is refused keeps its place in the sequence."""
    optimizer: bool
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: SeqId | None = None
    user_metadata: Metadata | None = None


class CreateSamplerBody(Body):
    session_id: Id
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(Body):
    type: str = "encoded_text"
    tokens: list[TokenId] | None = None


class PromptBody(Body):
    chunks: list[ChunkBody]


class SamplingBody(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[TokenId] | list[str] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(Body):
    prompt: PromptBody
    sampling_params: SamplingBody
    sampling_session_id: Id
    seq_id: int = Field(ge=0, lt=1 << 63)
    """Copies of a client in other processes have blocks of 1e9 each, at random."""
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)
    target_prompt_logprobs: dict[str, object] | None = None
    prompt_alt_tokens_k: int = 0


class TtlBody(Body):
    ttl_seconds: int | None


class CopyWeightsBody(Body):
    source_path: Id
    ttl_seconds: int | None = None


class ExternalWeightsBody(Body):
    model_id: Id
    seq_id: SeqId


class FutureBody(Body):
    request_id: Id


class CheckpointBody(Body):
    tinker_path: Id
