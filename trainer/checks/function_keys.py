"""Keys whose value is a function of the user's."""

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.user_function import is_function


def user_functions(config: AlgorithmConfig) -> dict[str, str]:
    """Return `module:function` by key."""
    values = {
        "adv_estimator": config.adv_estimator,
        "pg_variant": config.pg_variant,
        "train_infer_correction.function": config.train_infer_correction.function,
        "reward_shaping.function": config.reward_shaping.function,
    }
    return {key: value for key, value in values.items() if value is not None and is_function(value)}
