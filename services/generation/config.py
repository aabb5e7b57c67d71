"""Configuration of the generation service (`actor_infer` in a run's YAML)."""

from typing import Literal

from pydantic import Field, JsonValue

from offbeat.envs.config import Config


class GeneratingArgs(Config):
    """Sampling parameters of the policy; ROLL's `generating_args`."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy, for evaluation only; the trainer divides its logits by it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1, recorded logprobs are of the truncated distribution and the trainer's of the full one, so a ratio to
    them starts at the kept probability mass: needs `old_logprobs: recompute`, or a loss without ratio.
    """
    top_k: int = Field(default=-1, ge=-1)
    """-1 keeps every token; otherwise as `top_p`."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum tokens per turn; a tag's `max_tokens_per_step` may be lower."""


class GenerationConfig(Config):
    """The vLLM engines behind the deployment."""

    generating_args: GeneratingArgs = GeneratingArgs()
    app: str | None = None
    """Serve application that samples for the run, with the run's model. None: a free deployed one that matches these
    keys, else one of the run's own.
    """
    num_replicas: int = Field(default=1, ge=1)
    """vLLM engines, each with all of the weights."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    cpus_per_replica: float = Field(default=1.0, gt=0)
    """Logical CPUs that Ray reserves per replica; on a CPU also the engine's OpenMP threads (rounded, at least 1)."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Unset in a run: the learner's `model_args.dtype`. `auto`: vLLM's choice for the model folder, bfloat16 for float32."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum context, tokens; None: the run's `sequence_length`."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Turns that one engine batches."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache on a CPU, GiB per replica."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    max_lora_rank: int | None = Field(default=None, ge=1, le=512)
    """Largest `lora_rank` served as an adapter (vLLM's key); the learner then publishes adapters alone. None: merged
    weights.
    """
    engine_kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Further vLLM engine arguments, passed as they are."""
    on_weight_update: Literal["keep", "recompute"] = "keep"
    """Whether running requests keep their KV cache under new weights or recompute it. New requests never reuse older
    entries.
    """
    request_timeout_s: float = Field(default=60.0, gt=0)
    """Time after which a turn is aborted and its episode retried."""
    update_timeout_s: float = Field(default=120.0, gt=0)
    """Time of loading weights after which a replica leaves routing. Reading is limited by `weights.fetch_timeout_s`."""


def app_name(run_id: str) -> str:
    """Return the name of a run's own Serve application."""
    return f"generation-{run_id}"
