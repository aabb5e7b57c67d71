"""Findings about a run's training, from the learner's step metrics.

Invariant: the same steps give the same findings in learner, REST API and report.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from offbeat.services.errors import CodecError
from offbeat.services.findings import NO_LIMITS, DiagnosisLimits, RunFinding, StepWindow

WINDOW_STEPS = 20
MIN_STEPS = 5
"""Fewest steps for a finding about shares."""
MANY_STEPS = 10
"""Fewest steps for a finding about speed and sizes."""
EQUAL_REWARDS = (
    "the policy never reaches another reward, or the env gives none: check the env or the rewards, start from a policy that "
    "succeeds sometimes (warm_start, an easier task), or reward parts of the way"
)
KEYS_OF_EQUAL_REWARDS = ("custom_envs.TAG.env_config", "warm_start", "reward_shaping")
ANSWER_KEYS = (
    "custom_envs.TAG.max_tokens_per_step",
    "actor_infer.generating_args.max_new_tokens",
    "sequence_length",
)
CUTS = ("actor_infer.generating_args.top_p", "actor_infer.generating_args.top_k")
KEYS_OF_CUTS = ("max_len_mask", *ANSWER_KEYS)


def diagnose(steps: Sequence[Mapping[str, float]], limits: DiagnosisLimits = NO_LIMITS) -> list[RunFinding]:
    """Return the findings about the newest `WINDOW_STEPS` steps, gravest first.

    steps: metrics by name, oldest first.
    """
    if not steps:
        return []
    window = StepWindow(steps[-WINDOW_STEPS:], steps[0], limits)
    findings = [finding for rule in RULES if (finding := rule(window)) is not None]
    if not any(finding.name in CAUSES_OF_NO_GRADIENT for finding in findings):
        findings += [finding for finding in (_no_gradient(window),) if finding is not None]
    return [replace(finding, keys=_with_effect(finding.keys, limits)) for finding in findings]


def _with_effect(keys: Sequence[str], limits: DiagnosisLimits) -> tuple[str, ...]:
    return tuple(key for key in keys if key.partition(".")[0] not in limits.without_effect)


def _not_finite(window: StepWindow) -> RunFinding | None:
    skipped, bad = window.sum("actor/skipped_steps") - window.sum("actor/overflow_steps"), window.sum("not_finite")
    if not skipped and not bad:
        return None
    seen = f"{skipped:.0f} of the last {len(window.steps)} steps had gradients that are not finite"
    return RunFinding(
        "not_finite",
        seen if skipped else f"{bad:.0f} metrics of the last {len(window.steps)} steps were not finite",
        "the update is too large for the weights: lower the learning rate, or train in float32",
        ("actor_train.training_args.learning_rate", "actor_train.model_args.dtype"),
    )


def _overflows(window: StepWindow) -> RunFinding | None:
    """Check overflows; a few at the start find the scale."""
    overflows, scale = window.sum("actor/overflow_steps"), [math.nan, *window.values("actor/loss_scale")][-1]
    if not window.has(MIN_STEPS) or overflows < max(MIN_STEPS, len(window.steps) / 4):
        return None
    return RunFinding(
        "overflow",
        f"{overflows:.0f} of the last {len(window.steps)} steps overflowed float16 and were skipped (scale {scale:g})",
        "gradients exceed float16's range: train in bfloat16 or float32, or start at a lower loss scale",
        ("actor_train.model_args.dtype", "actor_train.strategy_args.strategy_config"),
    )


def _no_tokens(window: StepWindow) -> RunFinding | None:
    share = window.mean("episodes_without_tokens")
    if not share >= 0.5:
        return None
    return RunFinding(
        "prompts_too_long",
        f"{share:.0%} of the episodes have no sampled token",
        "their first prompt leaves no room for an answer",
        ("sequence_length", "custom_envs.TAG.agent_system_template"),
    )


def _success_missing(window: StepWindow) -> RunFinding | None:
    share = window.mean("success_missing")
    if not share >= 0.1:
        return None
    return RunFinding(
        "success_missing",
        f"{share:.0%} of the episodes report no success, where others of their env do; they count as failures",
        "the env reports `success` on some ways to end only: set it in the info of every last step",
        ("custom_envs.TAG.env_config",),
    )


def _truncated(window: StepWindow) -> RunFinding | None:
    """Check truncation; a policy from scratch learns to end its answers, and one token is all of an answer."""
    if window.limits.answer_tokens == 1:
        return None
    newest = window.values("episodes_truncated")[-MIN_STEPS:]
    share = math.fsum(newest) / len(newest) if newest else 0.0
    if share < (0.5 if window.has(WINDOW_STEPS) else 0.9) or len(newest) < MIN_STEPS or _no_tokens(window):
        return None
    return RunFinding(
        "truncated",
        f"a token limit cut {share:.0%} of the episodes",
        "answers or conversations do not fit: raise the limit that they reach",
        ANSWER_KEYS,
    )


def _constant_reward(window: StepWindow) -> RunFinding | None:
    """Check that nothing that the run trains on differs: the envs' rewards, shaped ones, or teachers."""
    lowest, highest = min(window.values("reward_min"), default=0.0), max(window.values("reward_max"), default=1.0)
    shaped = window.values("shaped_reward/min"), window.values("shaped_reward/max")
    differs = lowest < highest or min(shaped[0], default=0.0) < max(shaped[1], default=0.0)
    if differs or window.limits.distills or not window.has(MIN_STEPS) or _no_tokens(window):
        return None
    return RunFinding(
        "constant_reward",
        f"every reward of the last {len(window.steps)} steps was {lowest:g}",
        EQUAL_REWARDS,
        KEYS_OF_EQUAL_REWARDS,
    )


def _no_signal(window: StepWindow) -> RunFinding | None:
    share = window.share("groups_without_signal", "groups")
    if not share >= 0.9 or not window.has(MIN_STEPS) or _constant_reward(window):
        return None
    has_bonus = "entropy_loss_coef" not in window.limits.without_effect
    seen = f"{share:.0%} of the groups had no signal: their rewards are equal, or a filter leaves them out"
    if window.mean("success") >= 0.95:
        return RunFinding(
            "solved", seen, "the task is solved: take harder tasks, or fewer steps", ("max_steps",), False
        )
    return RunFinding(
        "no_signal",
        seen,
        "its members answer alike, or the task is too hard or too easy: raise the temperature or the group size"
        + (", or the entropy bonus (with zero_variance=train it reaches these groups, too)" if has_bonus else ""),
        (
            "train_env_manager.group_size",
            "actor_infer.generating_args.temperature",
            "entropy_loss_coef",
            "zero_variance",
            "difficulty_mask",
            "query_filter_config",
        ),
    )


def _entropy_collapse(window: StepWindow) -> RunFinding | None:
    before, now = window.first.get("actor/entropy", math.nan), window.mean("actor/entropy")
    silent = window.share("groups_without_signal", "groups")
    bonus = "" if "entropy_loss_coef" in window.limits.without_effect else "raise the entropy bonus, or "
    if not now < min(0.1 * before, 0.3) or not silent >= 0.5 or window.mean("success", 0.0) >= 0.9:
        return None
    return RunFinding(
        "entropy_collapse",
        f"the policy's entropy fell from {before:.2g} to {now:.2g} nats, and {silent:.0%} of the groups have no signal",
        f"it no longer explores: {bonus}lower the learning rate",
        ("entropy_loss_coef", "actor_train.training_args.learning_rate", "zero_variance"),
    )


def _failures_left_out(window: StepWindow) -> RunFinding | None:
    """Check that the groups that are trained on are nearly solved, while others fail and are left out.

    A shaped reward above the env's greatest is on another scale, and not compared; nor is one without masked episodes.
    """
    if window.limits.masks_episodes:
        return None
    share = window.share("groups_without_signal", "groups")
    lowest, highest = min(window.values("reward_min"), default=0.0), max(window.values("reward_max"), default=0.0)
    trained, everywhere = window.mean("shaped_reward/mean"), window.mean("reward")
    range_of_rewards = highest - lowest
    is_nearly_solved = lowest + 0.75 * range_of_rewards <= trained <= highest
    is_above_the_others = trained - everywhere >= 0.25 * range_of_rewards
    if not (window.has(MANY_STEPS) and 0.25 <= share < 0.9 and range_of_rewards > 0):
        return None
    if not (is_nearly_solved and is_above_the_others):
        return None
    return RunFinding(
        "failures_left_out",
        f"groups that are trained on have a mean reward of {trained:.2g} (greatest: {highest:.2g}), all groups one of "
        f"{everywhere:.2g}, as {share:.0%} have no signal",
        "the policy fails in groups that equal rewards or a filter leave out, where not even the entropy bonus reaches it: "
        "leave out solved groups instead of failed ones, train on all (zero_variance=train), or explore more",
        ("group_filter_cls", "zero_variance", "difficulty_mask", "query_filter_config", "entropy_loss_coef"),
    )


def _mismatch(window: StepWindow) -> RunFinding | None:
    name, limit = "actor/mismatch_kl_fresh", window.limits.mismatch_kl
    worst = max([*window.values(name), window.first.get(name, 0.0)])
    if not worst > limit:
        return None
    return RunFinding(
        "mismatch",
        f"on the same weights the engine's logprobs differ from the trainer's by a KL of {worst:.1g} nats per token (at "
        f"most {limit:.2g} is expected)",
        "they compute in different types, or differently"
        + (
            ", or the tokens that top_p and top_k leave out have much of the mass"
            if window.limits.is_sampling_cut
            else ""
        ),
        (
            *(CUTS if window.limits.is_sampling_cut else ()),
            "actor_infer.model_args.dtype",
            "actor_train.model_args.dtype",
            "actor_infer.strategy_args.strategy_config",
            "train_infer_correction",
        ),
    )


def _clipped(window: StepWindow) -> RunFinding | None:
    limit = window.limits.max_grad_norm
    norms = window.values("actor/grad_norm")
    if len(norms) < MANY_STEPS or min(norms) <= 10 * limit:
        return None
    remedy, keys = "scale rewards down", ("reward_normalization.method",)
    if "reward_normalization" in window.limits.without_effect:
        remedy, keys = "lower the learning rate", ("actor_train.training_args.learning_rate",)
    return RunFinding(
        "clipped",
        f"every gradient norm was above {10 * limit:g}, ten times max_grad_norm (mean {window.mean('actor/grad_norm'):.2g})",
        f"gradients are always clipped to a fraction: {remedy}, or raise the limit",
        (*keys, "actor_train.training_args.max_grad_norm"),
    )


def _no_effect(window: StepWindow) -> RunFinding | None:
    """Compare off-policy data with the weights' change."""
    rate, kl = window.mean("actor/lr"), window.mean("actor/mismatch_kl")
    is_visible = window.mean("staleness") >= 0.5 and len(window.values("actor/mismatch_kl")) >= MANY_STEPS
    if not is_visible or not rate > 0 or not kl < 1e-8:
        return None
    return RunFinding(
        "no_effect",
        f"a step at learning rate {rate:.1g} changes nothing that can be seen (KL between versions {kl:.1g})",
        "the learning rate is too small",
        ("actor_train.training_args.learning_rate", "actor_train.training_args.warmup_steps"),
    )


def _stale(window: StepWindow) -> RunFinding | None:
    dropped = window.sum("groups_dropped/stale") + window.sum("groups_dropped/expired")
    kept = window.sum("groups")
    if dropped <= 0.2 * (dropped + kept) or not window.has(MIN_STEPS):
        return None
    return RunFinding(
        "stale",
        f"{dropped / (dropped + kept):.0%} of the groups were dropped as stale",
        "allow more lag, or play fewer groups at a time"
        if window.limits.trains_by_admission
        else "quicker groups overtake them: train in order of admission, or allow more lag",
        ("max_staleness", "buffer.stale_policy", "train_env_manager.num_env_groups")
        if window.limits.trains_by_admission
        else ("buffer.order", "max_staleness", "buffer.stale_policy"),
    )


def _idle(window: StepWindow) -> RunFinding | None:
    share = window.share("time/wait_s", "time/step_s")
    if not window.has(MANY_STEPS) or 0.02 <= share <= 0.7 or math.isnan(share):
        return None
    if share > 0.7:
        waits_for, cause, keys = _slowest_source(window)
        seen = f"the learner waits {share:.0%} of its time for {waits_for}"
        return RunFinding("idle_learner", seen, cause, keys, False)
    cause = "training is the bottleneck, engines and envs may wait for it: give the learner more compute"
    keys = (
        "actor_train.num_processes",
        "actor_train.num_threads",
        "actor_train.training_args.max_tokens_per_microbatch",
    )
    return RunFinding("idle_rollouts", f"the learner waits {share:.1%} of its time for groups", cause, keys, False)


def _slowest_source(window: StepWindow) -> tuple[str, str, tuple[str, ...]]:
    """Return what the learner waits for, the remedy and the keys."""
    if window.sum("time/score_wait_s") > 0.5 * window.sum("time/wait_s"):
        cause = "services of frozen models are the bottleneck: give them more replicas"
        keys = ("reference.strategy_args.num_replicas", "teacher.NAME.strategy_args.num_replicas", "max_staleness")
        return "scores", cause, keys
    if not window.values("reward_max"):  # groups are rows
        cause = "reading rows, or sampling responses to them, is the bottleneck: add workers or engines"
        return "groups", cause, ("rollout.num_workers", "actor_infer.num_replicas", "max_staleness")
    cause = (
        "rollouts are the bottleneck (`offbeat runs why` names the engine, env, worker or reward): run more episodes at a "
        "time, or let them run further ahead"
    )
    keys = ("train_env_manager.num_env_groups", "rollout.num_workers", "actor_infer.num_replicas", "max_staleness")
    if window.limits.has_faster_engine:
        cause += ", or sample this tiny policy by hf_infer, which takes less CPU a turn than vLLM"
        keys = (*keys, "actor_infer.strategy_args.strategy_name")
    return "groups", cause, keys


def _no_gradient(window: StepWindow) -> RunFinding | None:
    """Check that no step trained a token; a few steps prove it only of a run that has ended."""
    num_groups = window.sum("groups")
    norms = [value for step in (window.first, *window.steps) for name, value in step.items() if "grad_norm" in name]
    if not num_groups or any(norm > 0 for norm in norms):
        return None
    if not window.values("reward_max"):  # groups are rows
        return RunFinding(
            "no_gradient",
            f"none of the last {len(window.steps)} steps had a gradient",
            "the loss of every row is at its minimum (equal pairs, margins that are reached, a teacher of the same "
            "weights), or no token of the rows is trained",
            ("data.dataset_name", "data.train_on", "sequence_length"),
            window.has(MIN_STEPS),
        )
    silent, cut = window.sum("groups_without_signal"), window.mean("episodes_truncated", 0.0)
    lowest, highest = (
        min(window.values("reward_min"), default=math.nan),
        max(window.values("reward_max"), default=math.nan),
    )
    rewards = f"every reward was {lowest:g}" if lowest == highest else f"rewards were {lowest:g} to {highest:g}"
    cause, keys = (
        (EQUAL_REWARDS, KEYS_OF_EQUAL_REWARDS)
        if lowest == highest
        else (
            "equal rewards in a group and filters of groups leave no token to train",
            ("difficulty_mask", "query_filter_config", "zero_variance"),
        )
    )
    if cut:
        cause, keys = f"{cause}; answers that a limit cuts may have no score, or be masked", (*keys, *KEYS_OF_CUTS)
    return RunFinding(
        "no_gradient",
        f"none of the last {len(window.steps)} steps had a gradient ({silent:.0f} of {num_groups:.0f} groups without "
        f"signal, {rewards}, a token limit cut {cut:.0%} of the episodes)",
        cause,
        keys,
        window.has(MIN_STEPS),
    )


CAUSES_OF_NO_GRADIENT = (
    *("not_finite", "overflow", "prompts_too_long"),
    *("truncated", "constant_reward", "no_signal", "solved"),
)
RULES: tuple[Callable[[StepWindow], RunFinding | None], ...] = (
    _not_finite,
    _overflows,
    _no_tokens,
    _success_missing,
    _truncated,
    _constant_reward,
    _no_signal,
    _entropy_collapse,
    _failures_left_out,
    _mismatch,
    _clipped,
    _no_effect,
    _stale,
    _idle,
)


def describe_untrained(findings: Sequence[RunFinding]) -> str:
    """Return the run's error, with those findings that can be its cause."""
    names = (*CAUSES_OF_NO_GRADIENT, "no_gradient")
    causes = "; ".join(str(finding) for finding in findings if finding.name in names)
    return f"no token was trained: {causes or 'no step had a gradient'}"


def encode_findings(findings: Sequence[RunFinding]) -> str:
    return json.dumps([asdict(finding) for finding in findings])


def decode_findings(text: str | bytes) -> tuple[RunFinding, ...]:
    """Decode `encode_findings`. Raises `CodecError`."""
    try:
        return tuple(RunFinding(**{**row, "keys": tuple(row["keys"])}) for row in json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise CodecError(f"malformed findings: {error}") from error
