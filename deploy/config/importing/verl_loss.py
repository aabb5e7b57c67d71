"""Rules for the keys of verl's losses, advantages and rewards."""

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, Rule, Rules, Tree, become, get, missing, no_effect, rename, same
from offbeat.deploy.config.importing.verl_trainers import ACTOR, ROLLOUT, bypasses

CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
MISSING_ESTIMATORS = ("grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline")
DISCOUNTED = ("gae", "reinforce_plus_plus")
"""Estimators that read gamma in verl."""
PER_TOKEN = (*DISCOUNTED, "remax")
"""Estimators that read the reward token by token; others sum it up first."""
ALONE = {"reinforce_plus_plus_baseline": "reinforce_plus_plus"}
COMPARING = ("grpo", "rloo", "opo", "gpg")
"""Estimators that leave the reward of a prompt's only response as it is."""
KL_COEF = 0.001
"""verl's default of kl_loss_coef."""
KL_LOSSES = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "abs": "abs"}
KL_PENALTIES = {**KL_LOSSES, "kl": "kl", "k1": "kl"}
LOSSES = {"gspo": ("ratio_type", "sequence-token"), "sapo": ("pg_variant", "sapo"), "cispo": ("pg_variant", "cispo")}
PER_SEQUENCE = ("gspo", "sapo")
"""Losses that verl always aggregates by seq-mean-token-mean."""


def is_set(tree: Tree, name: str) -> bool:
    return bool(get(tree, name))


def loss_mode(tree: Tree) -> str:
    """Return the loss, which verl's bypass mode replaces by PPO's."""
    return "vanilla" if bypasses(tree) else get(tree, f"{ACTOR}.policy_loss.loss_mode") or "vanilla"


def estimator(tree: Tree) -> str:
    return get(tree, "algorithm.adv_estimator") or "gae"


def trains_equal_rewards(tree: Tree) -> bool:
    """Return whether a group with equal rewards has a gradient, of a KL or the entropy, or counts in whitening."""
    return has_reference(tree) or is_set(tree, f"{ACTOR}.entropy_coeff") or estimator(tree) in ALONE


def has_reference(tree: Tree) -> bool:
    return has_kl_loss(tree) or is_set(tree, "algorithm.use_kl_in_reward")


def has_kl_loss(tree: Tree) -> bool:
    return is_set(tree, f"{ACTOR}.use_kl_loss") and get(tree, f"{ACTOR}.kl_loss_coef", KL_COEF) != 0


def only_with(switch: str, rule: Rule) -> Rule:
    """Apply a rule only if another key is set."""
    name = switch.rpartition(".")[2]
    return lambda key: rule(key) if is_set(key.tree, switch) else Outcome("no effect", note=f"{name} is not set")


def _estimator(key: Key) -> Outcome | None:
    if key.value in MISSING_ESTIMATORS:
        note = f"no {key.value} here: grpo is written in its place, or write your own (docs/algorithms.md)"
        return Outcome("no counterpart", ("adv_estimator",), "grpo", note)
    name = ESTIMATORS.get(key.value, key.value)
    if (get(key.tree, f"{ROLLOUT}.n") or 1) == 1 and (name in COMPARING or name in ALONE):
        note = "rollout.n is 1: verl compares a response with no other"
        return Outcome("value", ("adv_estimator",), ALONE.get(name, "reinforce"), note)
    if key.value == "gpg":
        note = "its scale is that of pg_variant gpg, by groups with a signal instead of scores above 0"
        return Outcome("value", ("adv_estimator",), "dr_grpo", note)
    if name == "grpo" and get(key.tree, "algorithm.norm_adv_by_std_in_grpo") is False:
        return Outcome("value", ("adv_estimator",), "dr_grpo", "norm_adv_by_std_in_grpo: false")
    return Outcome("renamed" if name == key.value else "value", ("adv_estimator",), name)


def _loss(key: Key) -> Outcome:
    if key.value == "vanilla":
        return Outcome("same", note="pg_variant: ppo")
    if bypasses(key.tree):
        return Outcome("no effect", note="bypass_mode takes PPO's loss")
    if key.value == "gpg":
        return Outcome("value", ("pg_variant",), "gpg" if estimator(key.tree) == "gpg" else "vanilla")
    if key.value not in LOSSES:
        note = f"no loss {key.value} here: pg_variant: ppo is taken, or write your own (docs/algorithms.md)"
        return Outcome("no counterpart", note=note)
    name, value = LOSSES[key.value]
    if value == "sequence-token" and estimator(key.tree) not in PER_TOKEN:
        value = "sequence"  # the same where tokens of a response have one advantage
    return Outcome("value", (name,), value)


def _aggregation(key: Key) -> Outcome:
    if (loss := loss_mode(key.tree)) in PER_SEQUENCE:
        return Outcome("no effect", note=f"verl's {loss} takes seq-mean-token-mean")
    note = "over sequences, whose sum verl takes" if key.value == "seq-mean-token-sum-norm" else ""
    return Outcome("same", ("loss_agg_mode",), key.value, note)


def _discount(key: Key) -> Outcome:
    name = estimator(key.tree)
    if name not in DISCOUNTED:
        return Outcome("same" if key.value == 1 else "no effect", note=f"verl's {name} discounts nothing")
    return Outcome("renamed", ("gamma",), key.value)


def _clip(key: Key) -> Outcome | None:
    """Take a bound of the ratio by the loss that reads it."""
    side, loss = key.path[-1].removeprefix("clip_ratio_"), loss_mode(key.tree)
    if loss == "sapo":
        return Outcome("no effect", note="verl's sapo clips nothing")
    target = f"cispo_epsilon_{side}" if loss == "cispo" else f"pg_clip_{side}"
    return Outcome("renamed", (target,), key.value)


def _symmetric_clip(key: Key) -> Outcome:
    """Report that verl reads `clip_ratio` only in place of a null bound, and both bounds are 0.2 by default."""
    bounds = [get(key.tree, f"{ACTOR}.clip_ratio_{side}", 0.2) for side in ("low", "high")]
    if None not in bounds:
        low, high = bounds
        return Outcome("no effect", note=f"in verl clip_ratio_low ({low}) and clip_ratio_high ({high}) count")
    return Outcome("renamed", ("pg_clip",), key.value)


def _kl_loss(key: Key) -> Outcome:
    if not has_kl_loss(key.tree):
        return Outcome("no effect", note="kl_loss_coef is 0")
    if key.path[-1] == "kl_loss_coef":
        return Outcome("renamed", ("kl_loss_coef",), key.value)
    name = str(key.value)
    if name.endswith("+"):
        return Outcome("value", ("kl_loss_type",), "k2", "whose gradient verl takes")
    if name not in KL_LOSSES:
        unusable = {"kl": "its mean gradient is 0", "k1": "its mean gradient is 0"}.get(name, "verl has none, either")
        return Outcome("no counterpart", note=f"{unusable}: take kl_loss_type k3")
    return Outcome("value", ("kl_loss_type",), KL_LOSSES[name])


def _penalty(key: Key) -> Outcome | None:
    """Convert a KL estimator; `+` changes gradients, which rewards do not have."""
    name = KL_PENALTIES.get(str(key.value).removesuffix("+"))
    return None if name is None else Outcome("value", ("kl_penalty",), name)


def _kl_in_reward(key: Key) -> Outcome:
    name = estimator(key.tree)
    if not key.value or name in PER_TOKEN:
        return Outcome("same", note="init_kl_coef")
    note = f"verl's {name} compares rewards less their KL; here rewards are compared, and each token's KL is subtracted then"
    return Outcome("value", ("add_token_level_kl",), True, note)


def _adaptive(target: str) -> Rule:
    def rule(key: Key) -> Outcome:
        if get(key.tree, "algorithm.kl_ctrl.type") != "adaptive":
            return Outcome("no effect", note="kl_ctrl.type is fixed")
        return Outcome("renamed", (target,), key.value)

    return only_with("algorithm.use_kl_in_reward", rule)


def _weight(target: str) -> Rule:
    """Take a key of the importance weights, which verl's bypass mode with PPO's loss computes without applying."""

    def rule(key: Key) -> Outcome:
        if bypasses(key.tree):
            return Outcome("no effect", note="bypass_mode: the ratio is to the behavior policy")
        if not get(key.tree, f"{CORRECTION}.rollout_is"):
            return Outcome("no effect", note="rollout_is is not set")
        return Outcome("renamed", ("train_infer_correction", "is_weight", target), key.value)

    return rule


LOSS: Rules = (
    (f"{ACTOR}.policy_loss.loss_mode", _loss),
    (f"{ACTOR}.policy_loss.clip_cov_*|kl_cov_*|ppo_kl_coef", no_effect("of losses that are not here")),
    (f"{ACTOR}.tau_pos|tau_neg", lambda key: Outcome("no effect", note="of loss_mode sapo") if loss_mode(key.tree) != "sapo"
     else Outcome("renamed", (f"sapo_temperature_{key.path[-1].removeprefix('tau_')}",), key.value)),
    (f"{ACTOR}.clip_ratio", _symmetric_clip),
    (f"{ACTOR}.clip_ratio_low|clip_ratio_high", _clip),
    (f"{ACTOR}.clip_ratio_c", lambda key: Outcome("renamed", ("dual_clip",), key.value)
     if loss_mode(key.tree) == "vanilla" else Outcome("no effect", note="of loss_mode vanilla")),
    (f"{ACTOR}.loss_agg_mode", _aggregation),
    (f"{ACTOR}.loss_scale_factor", rename("loss_agg_length")),
    (f"{ACTOR}.entropy_coeff", rename("entropy_loss_coef")),
    (f"{ACTOR}.use_kl_loss", lambda key: no_effect("kl_loss_coef is 0")(key)
     if key.value and not has_kl_loss(key.tree) else rename("use_kl_loss")(key)),
    (f"{ACTOR}.kl_loss_coef|kl_loss_type", only_with(f"{ACTOR}.use_kl_loss", _kl_loss)),
    ("algorithm.adv_estimator", _estimator),
    ("algorithm.norm_adv_by_std_in_grpo", same("adv_estimator")),
    ("algorithm.gamma", _discount),
    ("algorithm.lam", rename("lambd")),
    ("algorithm.use_kl_in_reward", _kl_in_reward),
    ("algorithm.kl_penalty", only_with("algorithm.use_kl_in_reward", _penalty)),
    ("algorithm.kl_ctrl.kl_coef", only_with("algorithm.use_kl_in_reward", rename("init_kl_coef"))),
    ("algorithm.kl_ctrl.type", same("adaptive: target_kl")),
    ("algorithm.kl_ctrl.target_kl", _adaptive("target_kl")),
    ("algorithm.kl_ctrl.horizon", _adaptive("kl_horizon")),
    ("algorithm.filter_groups.enable", become("zero_variance", lambda on: "refill" if on else None)),
    ("algorithm.filter_groups.**", missing("zero_variance: refill takes groups until a batch is full")),
    (f"{CORRECTION}.bypass_mode", become("old_logprobs", lambda on: "behavior" if on else None)),
    (f"{CORRECTION}.bypass_mode", same("old_logprobs: recompute")),
    (f"{CORRECTION}.rollout_is", _weight("weight_type")),
    (f"{CORRECTION}.rollout_is_threshold", _weight("upper_bound")),
    (f"{CORRECTION}.rollout_is_batch_normalize", same("", False)),
    (f"{CORRECTION}.rollout_is_batch_normalize", missing("weights are not divided by their mean")),
    (f"{CORRECTION}.loss_type", same("", "ppo_clip")),
    (f"{CORRECTION}.loss_type", missing("pg_variant: tis, with tis_upper_bound")),
    (f"{CORRECTION}.**", missing("set train_infer_correction.filters (docs/algorithms.md)")),
    (f"{OVERLONG}.enable|log", same("reward_shaping")),
    (f"{OVERLONG}.len", only_with(f"{OVERLONG}.enable", rename("reward_shaping.overlong_buffer"))),
    (f"{OVERLONG}.penalty_factor", only_with(f"{OVERLONG}.enable", rename("reward_shaping.overlong_penalty"))),
    ("reward_model.reward_kwargs.max_resp_len",
     only_with(f"{OVERLONG}.enable", rename("reward_shaping.overlong_max_length"))),
)  # fmt: skip
