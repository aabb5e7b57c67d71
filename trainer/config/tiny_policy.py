"""Keys of the tiny policy, a small Qwen2 with random weights."""

from pydantic import Field, model_validator

from offbeat.envs.config import Config


class TinyVisionConfig(Config):
    """Vision tower of a tiny Qwen2-VL. An image token covers `2 * patch_size` pixels per side."""

    depth: int = Field(default=2, ge=1)
    embed_dim: int = Field(default=64, ge=32)
    num_heads: int = Field(default=2, ge=1)
    patch_size: int = Field(default=16, ge=4)
    """Pixels per side."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyVisionConfig":
        if self.embed_dim % (4 * self.num_heads):
            raise ValueError(
                f"embed_dim {self.embed_dim} is not a multiple of {4 * self.num_heads}: a head's dimensions are halved for "
                "rows and columns, and rotated in pairs"
            )
        return self


class TinyPolicyConfig(Config):
    """Qwen2 for two CPU cores, with a word-level tokenizer and a ChatML template."""

    hidden_size: int = Field(default=64, ge=32)
    num_hidden_layers: int = Field(default=4, ge=1)
    intermediate_size: int = Field(default=256, ge=1)
    num_attention_heads: int = Field(default=2, ge=1)
    num_key_value_heads: int = Field(default=2, ge=1)
    max_position_embeddings: int = Field(default=512, ge=16)
    """Context length in tokens."""
    initializer_range: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial weights."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    vision: TinyVisionConfig | None = None
    """Image input (`{image}` in `agent_template`); None is text only."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyPolicyConfig":
        head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
        if rest or head_dim < 32 or head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_attention_heads} attention heads: "
                "a head needs an even number of dimensions, at least 32 (the minimum of vLLM on a CPU)"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        return self
