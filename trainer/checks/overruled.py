"""Checks for keys of the loss that another key overrules."""

from collections.abc import Iterator

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.estimators import BASELINES, TURN_WISE
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.roles import TeacherConfig
from offbeat.trainer.config.user_function import is_function

WITHOUT_RATIO_GRADIENT = ("tis", "cispo", "topr")


def check_overruled(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    yield from _check_ratio_type(config)
    yield from _check_whitening(config)
    yield from _check_scales(config)
    yield from _check_bounds(config)


def _check_ratio_type(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    if config.ratio_type == "sequence-token" and config.pg_variant in WITHOUT_RATIO_GRADIENT:
        reason = f"with pg_variant={config.pg_variant}, whose weight has no gradient"
        yield ConfigIssue("ratio_type", f"sequence-token equals sequence {reason}: take sequence")
    elif config.ratio_type == "sequence-token" and advantage_is_of_the_episode(config):
        reason = f"with adv_estimator={config.adv_estimator}, where all tokens of an episode have one advantage"
        yield ConfigIssue("ratio_type", f"sequence-token equals sequence {reason}: take sequence")
    if config.ratio_type != "token" and config.pg_variant == "topr" and not config.topr_negative_weight:
        yield ConfigIssue(
            "ratio_type",
            "has no effect with topr_negative_weight=0, because only negative advantages have a ratio: leave it out",
        )


def advantage_is_of_the_episode(config: AlgorithmConfig) -> bool:
    """Return whether a token's advantage and loss weight are its sequence's."""
    by_estimator = config.adv_estimator in ("gae", "opd", *TURN_WISE) or is_function(config.adv_estimator)
    by_token = by_estimator or config.use_opd or config.add_token_level_kl or not _has_reward_of_the_episode(config)
    correction = config.train_infer_correction
    weight = correction.is_weight
    if correction.filters or correction.m2_threshold or (weight and weight.weight_type in ("token", "turn")):
        return False
    return not by_token and config.gamma == 1


def _has_reward_of_the_episode(config: AlgorithmConfig) -> bool:
    """Return whether the estimator compares episodes' rewards; else it takes turns' rewards as they are."""
    return config.reward_method != "identity" or config.adv_estimator in BASELINES


def _check_whitening(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    if config.whiten_over != "batch" and not config.whitens_advantages and not config.whiten_rewards:
        message = "has no effect without whiten_advantages or whiten_rewards: set one, or leave this out"
        yield ConfigIssue("whiten_over", message)


def _check_scales(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Yield scales of rewards that whitening cancels."""
    has_scale = config.reward_clip is not None or config.add_token_level_kl or config.use_opd
    if not config.whitens_advantages or config.adv_estimator == "gae" or has_scale:
        return
    divided = "advantages are divided by their deviation (whiten_advantages)"
    cancelled = f"has no effect, because {divided}: leave it out, or set whiten_advantages=false"
    coefs = {teacher.opd_kl_coef for teacher in config.teacher.values()}
    if (
        config.adv_estimator == "opd"
        and len(coefs) == 1
        and coefs != {TeacherConfig.model_fields["opd_kl_coef"].default}
    ):
        for name in config.teacher:
            yield ConfigIssue(f"teacher.{name}.opd_kl_coef", cancelled)
    if config.whiten_rewards:
        yield ConfigIssue("whiten_rewards", cancelled)
    if config.reward_normalization.norm_std_type == "batch":
        yield ConfigIssue("reward_normalization.norm_std_type", cancelled)


def _check_bounds(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Yield ratio bounds that kept tokens never reach."""
    filters = [each for each in config.train_infer_correction.filters if each.agg_type == "token"]
    if config.old_logprobs != "behavior" or config.ratio_type != "token":
        return
    highest = min((each.ratio_high for each in filters if each.ratio_high is not None), default=None)
    lowest = max((each.ratio_low for each in filters if each.ratio_low is not None), default=None)
    low, high = _bounds(config)
    for key, bound in high.items():
        if highest is not None and highest <= bound and _is_changed(config, key):
            yield ConfigIssue(key, f"has no effect, because filters mask ratios above {highest:g}: leave it out")
    for key, bound in low.items():
        if lowest is not None and lowest >= bound and _is_changed(config, key):
            yield ConfigIssue(key, f"has no effect, because filters mask ratios below {lowest:g}: leave it out")


def _bounds(config: AlgorithmConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Return lower and upper bounds of the ratio by key."""
    match config.pg_variant:
        case "ppo":
            low, high = config.pg_clip_low, config.pg_clip_high
            return (
                {} if low is None else {"pg_clip_low": 1 - low},
                {} if high is None else {"pg_clip_high": 1 + high},
            )
        case "tis":
            return {"tis_lower_bound": config.tis_lower_bound}, {"tis_upper_bound": config.tis_upper_bound}
        case "cispo":
            return {"cispo_epsilon_low": 1 - config.cispo_epsilon_low}, {
                "cispo_epsilon_high": 1 + config.cispo_epsilon_high
            }
        case "aipo":
            return {}, {"aipo_rho": config.aipo_rho}
        case _:
            return {}, {}


def _is_changed(config: AlgorithmConfig, key: str) -> bool:
    return getattr(config, key) != AlgorithmConfig.model_fields[key].default
