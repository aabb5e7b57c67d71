"""Rules for what AReaL's actor learns by: rewards, advantages, loss and correction of staleness."""

from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.importing.areal_batches import answer_tokens, has_critic, has_kl
from offbeat.deploy.config.importing.areal_optimizer import LEARNING_RATE, warmup_steps
from offbeat.deploy.config.importing.numbers import get_number
from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import (
    Key,
    Rule,
    Rules,
    Tree,
    WrongTypeError,
    get,
    get_table,
    missing,
    no_effect,
    rename,
    same,
)

CORRECTION = "train_infer_correction"
KL = {"k1": "kl", "k2": "k2", "k3": "k3"}
ADVANTAGES = "actor.adv_norm"
REWARDS = "actor.reward_norm"
UPPER = 5.0
"""AReaL's default of `rejection_sampling.upper`."""
OLD_CAPS = ("behave_imp_weight_cap", "behav_imp_weight_cap")
"""Names of older AReaL, for a mask of tokens."""
OLD_MODES = ("behave_imp_weight_mode", "behav_imp_weight_mode")
OLD_ACTIONS = {"mask": "mask", "truncate": "clamp"}
SCALED_AWAY = "normalization divides it out"
OTHER_DEVIATION = "there the deviation of rewards less the mean of mean_level, here of raw rewards"
CENTERED = "normalization subtracts it"
UNWEIGHTED = "use_decoupled_loss is false"
Level = str | None


def levels(tree: Tree, name: str) -> tuple[Level, Level]:
    """Return the scopes of mean and deviation of a normalization, of which both are the batch by AReaL's default."""
    if not isinstance(get(tree, name), dict):
        return None, None
    return get(tree, f"{name}.mean_level", "batch"), get(tree, f"{name}.std_level", "batch")


def estimator(tree: Tree) -> str:
    if has_critic(tree):
        return "gae"
    mean, std = levels(tree, REWARDS)
    leaves_out = get(tree, f"{REWARDS}.mean_leave1out")
    match mean, std:
        case "group", "group" if not leaves_out:
            return "grpo"
        case "group", None:
            return "rloo" if leaves_out else "dr_grpo"
        case _:
            return "reinforce"


def whitens(tree: Tree) -> bool:
    return None not in levels(tree, ADVANTAGES)


def _norm(key: Key) -> Outcome:
    """Report a normalization of rewards, which the estimator and its scopes are."""
    name = key.path[-1]
    mean, std = levels(key.tree, REWARDS)
    leaves_out = get(key.tree, f"{REWARDS}.mean_leave1out")
    if name in ("mean_level", "std_level"):
        kind = "same" if estimator(key.tree) in ("grpo", "dr_grpo", "rloo") else "value"
        scope = "norm_mean_type" if name == "mean_level" else "norm_std_type"
        shown = "std_level" if "std_level" in get_table(key.tree, REWARDS) else "mean_level"
        note = OTHER_DEVIATION if name == shown and std is not None and mean != std else ""
        if kind == "value" and key.value is not None:
            return Outcome("renamed", ("reward_normalization", scope), key.value, note)
        return Outcome("same", note=f"adv_estimator {estimator(key.tree)}")
    if name == "mean_leave1out" and leaves_out and (mean, std) != ("group", None):
        return Outcome("no counterpart", note="adv_estimator rloo leaves one out, without a deviation")
    if name == "std_unbiased" and key.value is False and std is not None:
        return Outcome("no counterpart", note="deviations are unbiased")
    if name == "group_size":
        return Outcome("same", note="gconfig.n_samples")
    return Outcome("same", note="" if name != "eps" else "1e-6 here")


def _advantage_norm(key: Key) -> Outcome:
    mean, std = levels(key.tree, ADVANTAGES)
    if key.path[-1] in ("mean_level", "std_level"):
        if key.value == "batch" and whitens(key.tree):
            return Outcome("value", ("whiten_advantages",), True)
        if key.value is None and (mean, std) == (None, None):
            return Outcome("same", note="not normalized")
        return Outcome(
            "no counterpart", note="whiten_advantages subtracts the batch's mean and divides by its deviation"
        )
    if key.path[-1] == "mean_leave1out" and key.value:
        return Outcome("no counterpart", note="whiten_advantages takes the whole batch's mean")
    return Outcome("same")


def _is_centered(tree: Tree) -> bool:
    """Return whether a constant of all rewards changes nothing; a critic learns it."""
    return not has_critic(tree) and bool(levels(tree, REWARDS)[0] or levels(tree, ADVANTAGES)[0])


def _is_scaled(tree: Tree) -> bool:
    return not has_critic(tree) and not has_kl(tree) and bool(levels(tree, REWARDS)[1] or levels(tree, ADVANTAGES)[1])


def _scaling(key: Key) -> Outcome:
    if key.value in (1, 1.0) or _is_scaled(key.tree):
        return Outcome(
            "same" if key.value in (1, 1.0) else "no effect", note="" if key.value in (1, 1.0) else SCALED_AWAY
        )
    if levels(key.tree, REWARDS)[1]:
        return Outcome("no effect", note=SCALED_AWAY)
    return Outcome("no counterpart", note=f"multiply the weight of your rewards by {key.value}")


def _bias(key: Key) -> Outcome:
    if key.value in (0, 0.0):
        return Outcome("same")
    if _is_centered(key.tree) or levels(key.tree, REWARDS)[0]:
        return Outcome("no effect", note=CENTERED)
    return Outcome("no counterpart", note=f"add {key.value} in your reward")


def _kl(key: Key) -> Outcome:
    if not key.value:
        return Outcome("same", note="no KL")
    if not has_kl(key.tree):
        return Outcome("no counterpart", note="without `ref` AReaL rewards improbable tokens: entropy_loss_coef")
    note = "of the learner's logprobs, there of the engine's" if is_decoupled(key.tree) else ""
    return Outcome("renamed", ("init_kl_coef",), key.value, note)


def with_kl(rule: Rule) -> Rule:
    return lambda key: rule(key) if has_kl(key.tree) else Outcome("no effect", note="no KL needs the reference")


def is_decoupled(tree: Tree) -> bool:
    return bool(get(tree, "actor.use_decoupled_loss"))


def old_logprobs(tree: Tree) -> str:
    if is_decoupled(tree):
        return "loglinear" if get(tree, "actor.prox_logp_method") == "loglinear" else "recompute"
    return "recompute" if get(tree, "actor.recompute_logprob") else "behavior"


def old_mode(tree: Tree) -> str:
    """Return what older AReaL did with a weight beyond its cap."""
    return str(next((mode for name in OLD_MODES if (mode := get(tree, f"actor.{name}"))), "token_mask"))


def correction(tree: Tree) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Return the weight and filters of a decoupled loss; None without rejection sampling or a counterpart."""
    is_given, given = (
        isinstance(get(tree, "actor.rejection_sampling"), dict),
        get_table(tree, "actor.rejection_sampling"),
    )
    caps = [cap for name in OLD_CAPS if isinstance(cap := get(tree, f"actor.{name}"), int | float)]
    if not is_decoupled(tree) or not (is_given or caps) or given.get("metric", "ratio") != "ratio":
        return None
    if given.get("upper", UPPER) is None:
        raise WrongTypeError("actor.rejection_sampling.upper", None, "a number")
    upper = get_number(tree, "actor.rejection_sampling.upper", UPPER) if is_given else caps[0]
    lower, mode = get_number(tree, "actor.rejection_sampling.lower", 0.0), old_mode(tree)
    if not is_given and mode == "disabled":
        return None
    given = given if is_given else {"level": mode.partition("_")[0], "action": OLD_ACTIONS.get(mode.partition("_")[2])}
    is_sequence = given.get("level", "token") == "sequence"
    weight: dict[str, Any] = {"weight_type": "geometric" if is_sequence else "token", "upper_bound": float(upper)}
    if lower:
        weight["lower_bound"] = float(lower)
    if given.get("action", "mask") == "clamp":
        return weight, []
    unit = {"mean": "geometric", "sum": "sequence"}.get(given.get("agg", "mean")) if is_sequence else "token"
    if unit is None:
        return None
    bounds = {"ratio_high": float(upper), **({"ratio_low": float(lower)} if lower else {})}
    return weight, [{"agg_type": unit, **bounds}]


def _rejection(key: Key) -> Outcome:
    if not is_decoupled(key.tree):
        return Outcome("no effect", note=UNWEIGHTED)
    if correction(key.tree) is None and key.path[-1] in (*OLD_CAPS, *OLD_MODES) and old_mode(key.tree) == "disabled":
        return Outcome("same", note="not corrected")
    if correction(key.tree) is None:
        return Outcome(
            "no counterpart", note=f"{CORRECTION} weights and masks by ratios of tokens, turns and sequences"
        )
    return Outcome("same", note=f"{CORRECTION}.is_weight and filters")


def _clip(key: Key) -> Outcome:
    if get(key.tree, "actor.use_sapo_loss"):
        return Outcome("no effect", note="SAPO does not clip")
    if not isinstance(key.value, int | float) or key.value <= 0:
        return Outcome("no counterpart", note="a range above 0: set pg_clip")
    has_high = get(key.tree, "actor.eps_clip_higher") is not None
    return Outcome("renamed", ("pg_clip_low" if has_high else "pg_clip",), key.value)


def _overlong(key: Key) -> Outcome:
    if not get(key.tree, "actor.overlong_reward_penalty"):
        return Outcome("same" if not key.value else "no effect", note="overlong_reward_penalty is false")
    match key.path[-1]:
        case "overlong_reward_penalty":
            longest = get(key.tree, "actor.max_new_tokens")
            value = longest if isinstance(longest, int) else answer_tokens(key.tree)
            return Outcome("value", ("reward_shaping", "overlong_max_length"), value)
        case "overlong_tokens":
            return Outcome("renamed", ("reward_shaping", "overlong_buffer"), key.value)
        case _:
            return Outcome("renamed", ("reward_shaping", "overlong_penalty"), key.value)


def _with_sapo(target: str) -> Rule:
    return lambda key: (
        rename(target)(key)
        if get(key.tree, "actor.use_sapo_loss")
        else Outcome("no effect", note="use_sapo_loss is false")
    )


def _lambda(key: Key) -> Outcome:
    if has_critic(key.tree):
        return Outcome("renamed", ("lambd",), key.value)
    if key.value in (1, 1.0):
        return Outcome("same")
    return Outcome("no counterpart", note="without a critic a factor of the discount: gamma")


def _teacher_weight(key: Key) -> Outcome:
    if key.path[-1] == "rl_loss_weight":
        if key.value in (0, 0.0):
            return Outcome("value", ("adv_estimator",), "opd", "teachers alone")
        return Outcome("value", ("use_opd",), True, "" if key.value in (1, 1.0) else f"weight 1, {key.value} there")
    note = "of the KL that is subtracted from advantages; there the gradient of the mean log-ratio itself"
    return Outcome("renamed", ("teacher", "teacher", "opd_kl_coef"), key.value, note)


LOSS: Rules = (
    ("actor.ppo_n_minibatches", rename("actor_train.training_args.num_minibatches")),
    ("actor.eps_clip", _clip),
    ("actor.eps_clip_higher", rename("pg_clip_high")),
    ("actor.c_clip", rename("dual_clip")),
    ("actor.m2_threshold", rename(f"{CORRECTION}.m2_threshold")),
    ("actor.use_sapo_loss", lambda key: Outcome("value", ("pg_variant",), "sapo") if key.value else Outcome("same")),
    ("actor.sapo_tau_pos", _with_sapo("sapo_temperature_pos")),
    ("actor.sapo_tau_neg", _with_sapo("sapo_temperature_neg")),
    ("actor.importance_sampling_level", rename("ratio_type")),
    ("actor.recompute_logprob|use_decoupled_loss|prox_logp_method", lambda key:
     Outcome("same", note=f"old_logprobs: {old_logprobs(key.tree)}")),
    ("actor.rejection_sampling.*", _rejection),
    ("actor.rejection_sampling", _rejection),
    ("actor.reward_norm|adv_norm", same("of the batch, AReaL's default")),
    *((f"actor.{name}", _rejection) for name in (*OLD_CAPS, *OLD_MODES)),
    (f"{REWARDS}.*", _norm),
    (f"{ADVANTAGES}.*", _advantage_norm),
    ("actor.reward_scaling", _scaling),
    ("actor.reward_bias", _bias),
    ("actor.reward_clip", missing("of scaled rewards before they are normalized: bound your reward's values; reward_clip "
                                  "bounds normalized ones")),
    ("actor.overlong_*", _overlong),
    ("actor.mask_no_eos_with_zero", same("", False)),
    ("actor.mask_no_eos_with_zero", missing("a cut answer's reward is 0 there; max_len_mask leaves such answers out")),
    ("actor.discount", rename("gamma")),
    ("actor.gae_lambda", _lambda),
    ("actor.kl_ctl", _kl),
    ("actor.kl_estimator", with_kl(lambda key: Outcome("value", ("kl_penalty",), KL[key.value]) if key.value in KL
                                   else Outcome("no counterpart", note="set kl_penalty"))),
    ("actor.max_new_tokens", same("gconfig.max_new_tokens")),
    ("actor.log_agent_stats|log_agent_stats_keys", no_effect("metrics of envs are always recorded")),
    ("teacher.rl_loss_weight|distill_loss_weight", _teacher_weight),
    ("teacher.path", rename("teacher.teacher.model_args.model_name_or_path")),
    ("teacher.backend|scheduling_spec", same("beside the learner")),
    ("teacher.**", same("as the policy's, beside the learner")),
)  # fmt: skip


def loss_defaults(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield AReaL's defaults of the loss that differ from ours, and what several of its keys make."""
    if get_table(tree, "teacher"):
        yield "use_opd", True
        yield "teacher.teacher.opd_kl_coef", 0.005
    yield "adv_estimator", estimator(tree)
    mean, std = levels(tree, REWARDS)
    if estimator(tree) in ("reinforce", "gae"):
        scopes = {"norm_mean_type": mean, "norm_std_type": std}
        yield from ((f"reward_normalization.{name}", scope) for name, scope in scopes.items() if scope is not None)
    if whitens(tree):
        yield "whiten_advantages", True
    if has_critic(tree):
        yield "critic.training_args.learning_rate", LEARNING_RATE
        if steps := warmup_steps(tree, "critic"):
            yield "critic.training_args.warmup_steps", steps
        yield "lambd", 1.0
        yield "value_clip", 0.5
    if has_kl(tree):
        yield "init_kl_coef", 0.1
    if whitens(tree) or has_kl(tree) or std == "batch":
        yield "zero_variance", "train"  # groups with equal rewards count in these
    yield "old_logprobs", old_logprobs(tree)
    if (found := correction(tree)) is not None:
        weight, filters = found
        yield f"{CORRECTION}.is_weight", weight
        if filters:
            yield f"{CORRECTION}.filters", filters
