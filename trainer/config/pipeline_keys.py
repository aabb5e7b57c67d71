"""Keys that a pipeline does not read."""

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.learner import LearnerConfig

EPISODE_KEYS = (*(key for key in AlgorithmConfig.model_fields if key != "sequence_length"), "warm_start", "replay",
                "staleness_controller", "reward_pretrain", "critic")  # fmt: skip
ONLINE_KEYS = ("sequence_length", "reward_shaping", "zero_variance", "max_refill_ratio", "group_filter_cls",
               "difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold", "query_filter_config",
               "ref_model_sync_steps", "ref_model_mixup_alpha")  # fmt: skip
"""Keys that `online_dpo` uses."""


def keys_without_effect(config: LearnerConfig) -> tuple[str, ...]:
    """Return top-level keys that are refused with the pipeline."""
    if config.pipeline == "online_dpo":
        return tuple(key for key in AlgorithmConfig.model_fields if key not in ONLINE_KEYS)
    if config.reads_data:
        return tuple(key for key in EPISODE_KEYS if (config.pipeline, key) != ("distill", "teacher"))
    return ()
