"""Families of mixtures of experts whose routers can be told what to choose."""

REPLAYED_FAMILIES = (
    "deepseek_v3",
    "flex_olmo",
    "glm4_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
"""By `model_type` of transformers; tested against a plain computation with given experts."""
