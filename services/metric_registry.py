"""Every metric: name, unit and a sentence; source of `docs/metrics.md`.

Invariant: each emitted metric is registered under one name; a renamed one is read under its new name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

Source = Literal["learner", "eval", "rollout", "generation", "weights", "scoring", "trackers", "command"]
Value = TypeVar("Value")
SPREAD = "{mean,min,max}"


@dataclass(frozen=True, slots=True)
class Metric:
    source: Source
    name: str
    """`{a,b}`: one of these; `{placeholder}`: a part without `/`; `{*}`: anything."""
    unit: str
    description: str
    roll: str = ""
    """ROLL's name."""

    def matches(self, name: str) -> bool:
        return _pattern(self.name).fullmatch(name) is not None

    def split(self, name: str) -> tuple[str, ...]:
        """Return what replaces each `{...}` in a matching name."""
        matched = _pattern(self.name).fullmatch(name)
        return matched.groups() if matched else ()


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(_expression(part) for part in re.split(r"(\{[^}]+\})", name)))


def _expression(part: str) -> str:
    if not part.startswith("{"):
        return re.escape(part)
    return f"({part[1:-1].replace(',', '|')})" if "," in part else "(.+)" if part == "{*}" else "([^/]+)"


METRICS: tuple[Metric, ...] = (
    Metric(
        "learner", "reward", "", "Mean reward of the step's trajectories, as their envs gave it.", "critic/score/mean"
    ),
    Metric("learner", "success", "", "Mean `success` of the trajectories whose envs report it.", "env/{tag}/success"),
    Metric(
        "learner",
        "success_missing",
        "",
        "Share of trajectories without `success`, where others of their tag report it: they count as 0.",
    ),
    Metric("learner", "reward_min", "", "Least reward of a trajectory."),
    Metric("learner", "reward_max", "", "Greatest reward of a trajectory."),
    Metric("learner", "episodes_truncated", "", "Share of trajectories that were cut at a limit."),
    Metric("learner", "episodes_without_tokens", "", "Share of trajectories without a sampled token."),
    Metric("learner", "turns", "turns", "Mean number of a trajectory's turns."),
    Metric("learner", "trajectories", "trajectories", "Trajectories that the step consumed."),
    Metric("learner", "groups", "groups", "Groups that the step consumed."),
    Metric(
        "learner",
        "groups_without_signal",
        "groups",
        "Consumed groups that are not trained: equal rewards, or filtered.",
    ),
    Metric(
        "learner",
        "groups_trained_stale",
        "groups",
        "Groups beyond the staleness bound that `stale_policy: train` kept.",
    ),
    Metric(
        "learner",
        "groups_dropped/{reason}",
        "groups",
        "Groups dropped while the step was filled; `expired`: by the buffer, since the step before.",
    ),
    Metric("learner", "groups_again", "groups", "Groups of earlier steps that the step trains again (`replay`)."),
    Metric("learner", "system/groups_left_out", "groups", "Groups with signal left out by `variance_filter_ratio`."),
    Metric(
        "learner", "staleness", "versions", "Mean lag of a group: the step's version less the oldest that sampled it."
    ),
    Metric("learner", "staleness_max", "versions", "Greatest lag of a group."),
    Metric("learner", "staleness_again", "versions", "Mean lag of the groups trained again."),
    Metric("learner", "staleness_again_max", "versions", "Greatest lag of the groups trained again."),
    Metric(
        "learner",
        "tokens_trained",
        "tokens",
        "Sampled tokens of the step's trained trajectories, whatever `ppo_epochs` is.",
    ),
    Metric("learner", "tokens/computed", "tokens", "Tokens of the trained sequences, prompts included."),
    Metric("learner", "tokens/shared", "tokens", "Tokens that `shared_prefix` did not compute again."),
    Metric("learner", "tokens_per_busy_s", "tokens/s", "`tokens/computed` per second of `time/train_s`."),
    Metric("learner", f"tokens/response_length/{SPREAD}", "tokens", "Sampled tokens of a trajectory."),
    Metric(
        "learner",
        f"shaped_reward/{SPREAD}",
        "",
        "Reward of a trained trajectory after shaping.",
        f"critic/rewards/{SPREAD}",
    ),
    Metric("learner", f"advantage/{SPREAD}", "", "Advantage of a trained token.", f"critic/advantages/{SPREAD}"),
    Metric("learner", f"critic/returns/{SPREAD}", "", "Return that the critic is trained on."),
    Metric("learner", f"critic/values/{SPREAD}", "", "Value that the critic predicted before the step."),
    Metric(
        "learner", "critic/explained_variance", "", "1 less the variance of returns - values over that of the returns."
    ),
    Metric("learner", "critic/loss", "", "Value loss."),
    Metric("learner", "critic/lr", "", "Learning rate of the critic, or of the value head."),
    Metric("learner", "critic/grad_norm", "", "Norm of the critic's gradient before clipping."),
    Metric(
        "learner", "critic/skipped_steps", "steps", "Steps of the critic skipped for a gradient that was not finite."
    ),
    Metric(
        "learner", "loss", "", "Mean loss of a data pipeline: nats per token (`sft`, `distill`), or per pair (`dpo`)."
    ),
    Metric(
        "learner", "sft_loss", "nats", "Negative log-likelihood per token of chosen responses, or of `distill`'s rows."
    ),
    Metric(
        "learner", "kl", "nats", "KL to the reference on mismatched responses, per response (`dpo.loss_type: kto`)."
    ),
    Metric("learner", "kd_loss", "nats", "Weighted divergence from the teachers per taught token (`distill`)."),
    *(
        Metric(source, f"{name}/{member}", unit, text.format(member))
        for source in ("learner", "eval")
        for name, unit, text in (
            ("rewards", "", "Mean implicit reward of {} responses, beta times their log-ratio to the reference."),
            ("logps", "nats", "Mean logprob of {} responses."),
        )
        for member in ("chosen", "rejected")
    ),
    *(
        metric
        for source in ("learner", "eval")
        for metric in (
            Metric(source, "rewards/margins", "", "Mean reward of chosen less that of rejected responses."),
            Metric(source, "rewards/accuracies", "", "Share of pairs whose chosen response has the greater reward."),
        )
    ),
    Metric("eval", "loss", "", "Mean loss of the validation rows, as the learner's."),
    Metric("eval", "sft_loss", "nats", "Negative log-likelihood per token of the validation rows, as the learner's."),
    Metric("eval", "kl", "nats", "KL to the reference on mismatched validation responses, per response."),
    Metric("eval", "kd_loss", "nats", "Divergence from the teachers per taught token of the validation rows."),
    Metric("eval", "rows", "rows", "Validation rows (pairs with `dpo`)."),
    Metric("eval", "rows_bad", "rows", "Validation rows that can't be read, which are left out."),
    Metric(
        "eval", "rows_too_long", "rows", "Validation rows of more than `sequence_length` tokens, which are left out."
    ),
    Metric("learner", "actor/pg_loss", "", "Policy loss, with its corrections."),
    Metric("learner", "actor/kl_loss", "nats", "KL to the reference in the loss, before its coefficient."),
    Metric("learner", "actor/total_loss", "", "Policy loss with entropy and KL terms."),
    Metric("learner", "actor/entropy", "nats", "Mean entropy of the policy's distribution at a token."),
    Metric("learner", "actor/lr", "", "Learning rate of the policy."),
    Metric("learner", "actor/grad_norm", "", "Norm of the policy's gradient before clipping."),
    Metric(
        "learner", "actor/skipped_steps", "steps", "Steps of the policy skipped for a gradient that was not finite."
    ),
    *(
        metric
        for model in ("actor", "critic")
        for metric in (
            Metric("learner", f"{model}/loss_scale", "", "Factor of the loss against underflow, with float16."),
            Metric(
                "learner",
                f"{model}/overflow_steps",
                "steps",
                "Of the skipped steps, those that may succeed at a lower loss scale, with float16.",
            ),
        )
    ),
    Metric("learner", "actor/ratio", "", "Mean ratio of the policy to the old policy.", "actor/ratio_mean"),
    Metric("learner", "actor/ratio_max", "", "Greatest such ratio."),
    Metric(
        "learner", "actor/approx_kl", "nats", "KL (k3) of the old policy to the policy, per token.", "actor/approxkl"
    ),
    Metric("learner", "actor/clipfrac_up", "", "Share of tokens with a positive advantage that are clipped."),
    Metric("learner", "actor/clipfrac_down", "", "Share of tokens with a negative advantage that are clipped."),
    Metric("learner", "actor/mismatch_kl", "nats", "KL (k3) of what sampled a token to the policy, per token."),
    Metric(
        "learner",
        "actor/mismatch_kl_fresh",
        "nats",
        "The same on tokens of the current version, in a batch's first optimizer step: engine against learner.",
    ),
    Metric(
        "learner", "actor/mismatch_abs", "nats", "Mean absolute difference of the learner's and the engine's logprobs."
    ),
    Metric("learner", "actor/mismatch_abs_max", "nats", "Greatest such difference."),
    Metric("learner", "actor/is_weight", "", "Mean ratio of the policy to what sampled a token."),
    Metric("learner", "actor/is_weight_max", "", "Greatest such ratio."),
    Metric("learner", "actor/is_weight_square", "", "Mean of its square, from which `actor/ess` follows."),
    Metric("learner", "actor/ess", "", "Effective sample size over the number of tokens: 1 is on-policy."),
    Metric("learner", "actor/correction_weight", "", "Mean weight of `train_infer_correction.is_weight`."),
    Metric(
        "learner", "actor/correction_clipfrac", "", "Share of tokens whose weight was cut.", "actor/is_weight_clipfrac"
    ),
    Metric("learner", "actor/maskfrac", "", "Share of tokens that `train_infer_correction.filters` mask."),
    Metric("learner", "actor/maskfrac_up", "", "The same among tokens with a positive advantage."),
    Metric("learner", "actor/maskfrac_down", "", "The same among tokens with a negative advantage."),
    Metric("learner", "actor/teacher_kl", "nats", "KL of the policy to its teachers, per token (k1)."),
    Metric(
        "learner", "actor/kl_in_reward", "nats", "KL to the reference that the rewards are penalized by.", "critic/kl"
    ),
    Metric("learner", "actor/kl_coef", "", "Coefficient of that penalty.", "critic/kl_coef"),
    Metric("learner", f"actor/token_staleness/{SPREAD}", "versions", "Lag of a trained token."),
    Metric("learner", f"actor/trajectory_age/{SPREAD}", "versions", "Lag of a trained trajectory's oldest token."),
    Metric(
        "learner",
        f"actor/version_span/{SPREAD}",
        "versions",
        "Versions between a trajectory's oldest and newest token.",
    ),
    Metric(
        "learner",
        "env/{tag}/{*}",
        "",
        "Mean of a metric that the tag's envs, tools or agents report, as `ended_by_error` or `masked_tokens`.",
    ),
    Metric(
        "learner",
        "time/{stage}_s",
        "s",
        "Time of a stage: wait, train, publish, evaluate, checkpoint, settle; step is all of them. upload is that of a "
        "checkpoint, beside them. score_wait is the part of wait for scores of complete groups. turn is the wait until "
        "engines on the learner's devices sleep, and the loading of its states.",
    ),
    Metric("learner", "startup/{phase}_s", "s", "Time of a phase of the learner's start."),
    Metric("learner", "checkpoints_failed", "checkpoints", "Checkpoints that could not be written at first."),
    Metric(
        "learner",
        "checkpoints_uploaded",
        "checkpoints",
        "Checkpoints that are complete in `checkpoint_config`'s store.",
    ),
    Metric("learner", "checkpoint_uploads_failed", "uploads", "Uploads that failed; they are repeated."),
    Metric(
        "learner",
        "checkpoint_uploads_skipped",
        "checkpoints",
        "Checkpoints that a newer one has overtaken before their upload.",
    ),
    Metric("learner", "not_finite", "metrics", "Metrics of the step left out because they are not finite."),
    Metric("learner", "staleness_controller/learner_idle", "", "Share of its time that the learner waits for groups."),
    Metric("learner", "staleness_controller/rollout_idle", "", "Share of group slots that are empty."),
    Metric("learner", "staleness_controller/max_staleness", "versions", "Bound in force."),
    Metric("learner", "staleness_controller/num_env_groups", "groups", "Group slots in force."),
    Metric("eval", "success", "", "Mean `success` of the episodes whose envs report it.", "val/env/{tag}/success"),
    Metric(
        "eval", "success_missing", "", "Share of episodes without `success`, where others report it: they count as 0."
    ),
    Metric("eval", "reward", "", "Mean reward of an episode.", "val/score/mean"),
    Metric("eval", "reward_min", "", "Least reward of an episode.", "val/score/min"),
    Metric("eval", "reward_max", "", "Greatest reward of an episode.", "val/score/max"),
    Metric(
        "eval",
        "pass@{k}",
        "",
        "Chance that one of k sampled episodes of a task succeeds (unbiased), for k up to `val_env_manager.group_size`.",
    ),
    Metric("eval", "turns", "turns", "Mean number of an episode's turns."),
    Metric("eval", f"tokens/response_length/{SPREAD}", "tokens", "Sampled tokens of an episode."),
    Metric("eval", "episodes_truncated", "", "Share of episodes that a token limit cut."),
    Metric("eval", "answers_truncated", "", "Share of answers that a token limit cut."),
    Metric("eval", "env/{tag}/{*}", "", "The same metrics of a tag's played episodes."),
    Metric("eval", "reward/{name}", "", "Mean of a reward function's values (`rewards`)."),
    Metric("eval", "prompts_too_long", "episodes", "Prompts beyond `data.prompt_length`, which are in no mean."),
    Metric("eval", "episodes", "episodes", "Episodes that were played."),
    Metric("eval", "episodes_failed", "episodes", "Episodes that failed and are in no mean."),
    Metric("eval", "version_min", "versions", "Oldest version that sampled a token."),
    Metric("eval", "version_max", "versions", "Newest version that sampled a token."),
    Metric("rollout", "episodes", "episodes", "Finished episodes."),
    Metric("rollout", "reward", "", "Mean reward of an episode."),
    Metric("rollout", "baseline_reward", "", "Mean reward of a greedy episode (`remax`)."),
    Metric("rollout", "turns", "turns", "Turns that were sampled."),
    Metric("rollout", "tokens_sampled", "tokens", "Tokens that workers received, those of failed episodes included."),
    Metric("rollout", "trajectory_tokens", "tokens", "Mean number of a trajectory's tokens, prompts included."),
    Metric("rollout", "episode_s", "s", "Mean time of an episode."),
    Metric("rollout", "generation_s", "s", "Mean time of a turn's sampling."),
    Metric("rollout", "generation_max_s", "s", "Longest such time."),
    Metric("rollout", "env_s", "s", "Mean time of a call of an env."),
    Metric("rollout", "env_max_s", "s", "Longest such time."),
    Metric(
        "rollout", "reward_s", "s", "Mean time of an episode's rewards, waits for a free call included (`rewards`)."
    ),
    Metric("rollout", "reward_max_s", "s", "Longest such time."),
    Metric(
        "rollout", "group_reward_s", "s", "Mean time of the rewards that compare a group's members (`scope: group`)."
    ),
    Metric("rollout", "group_reward_max_s", "s", "Longest such time."),
    Metric(
        "rollout",
        "reward_failed/{reward}/{reason}",
        "calls",
        "Calls of a reward that gave no value, by reason (`reward_malformed`: an answer that is no score), repeated or not.",
    ),
    Metric("rollout", "failures", "episodes", "Attempts that failed."),
    Metric("rollout", "failed/{reason}", "episodes", "The same by reason."),
    Metric(
        "rollout",
        "error/{kind}",
        "episodes",
        "Finished episodes that an exception ended (`on_agent_error`), by its kind.",
    ),
    Metric("rollout", "stop/{reason}", "episodes", "Finished episodes by what ended them."),
    Metric("rollout", "submitted/{result}", "episodes", "Submitted trajectories by the buffer's answer."),
    Metric("rollout", "cancelled", "episodes", "Episodes that were cancelled."),
    Metric("rollout", "playing", "episodes", "Episodes that a worker is playing."),
    Metric(
        "rollout", "episode_limit", "episodes", "Episodes that it may play by the KV cache's load (`kv_usage_target`)."
    ),
    Metric("rollout", "hung_threads", "threads", "Threads whose env or reward has not returned."),
    Metric(
        "rollout", "generation_calls", "requests", "Calls of the generation service; each samples a batch of turns."
    ),
    Metric("rollout", "cpu_s", "s", "CPU time of the workers' processes, with the envs that run in them."),
    Metric("rollout", "env/{name}", "", "Mean of an env's metric whose name is one of those above."),
    Metric("rollout", "{env_metric}", "", "Mean of any other metric that an env or agent reports."),
    Metric("generation", "tokens", "tokens", "Tokens that engines sampled, those of evaluations included."),
    Metric("generation", "requests", "requests", "Requests that were answered."),
    Metric("generation", "errors", "requests", "Requests that were refused."),
    Metric(
        "generation",
        "resampled",
        "requests",
        "Requests that new weights started again (`on_weight_update: recompute`).",
    ),
    Metric("generation", "running", "requests", "Requests in the engine."),
    Metric("generation", "waiting", "requests", "Requests that wait for the engine."),
    Metric("generation", "sessions", "episodes", "Episodes that stay in vLLM until their next turn (`keep_sessions`)."),
    Metric("generation", "continued", "requests", "Turns of such episodes that computed their new tokens alone."),
    Metric("generation", "kv_usage", "", "Share of vLLM's KV cache that running requests hold."),
    Metric(
        "generation", "preemptions", "requests", "Running requests whose keys and values vLLM dropped to make room."
    ),
    Metric(
        "generation",
        "prefix_cache_hit_rate",
        "",
        "Share of the prompts' tokens whose keys and values the engine had (prefix cache or session).",
    ),
    Metric("generation", "version", "versions", "Version that the replica serves."),
    Metric("generation", "weight_updates", "updates", "Versions that the replica loaded."),
    Metric("generation", "refused_weights", "updates", "Versions that the replica could not load."),
    Metric("generation", "load_s", "s", "Mean time to load a version."),
    Metric("generation", "pause_s", "s", "Mean pause of the engine for a version."),
    Metric("generation", "pause_max_s", "s", "Longest such pause."),
    Metric("weights", "lag", "versions", "Versions that a replica is behind."),
    Metric("weights", "lag_max", "versions", "Greatest such lag."),
    Metric("scoring", "{role}/groups", "groups", "Groups that a replica has scored."),
    Metric("scoring", "{role}/tokens", "tokens", "Tokens of these groups, prompts included."),
    Metric("scoring", "{role}/tokens_per_busy_s", "tokens/s", "The same per second of scoring."),
    Metric("scoring", "{role}/queue_depth", "groups", "Complete groups without this role's score, at most."),
    Metric("trackers", "{tracker}/failures", "failures", "Times that a tracker accepted no rows."),
    Metric("trackers", "{tracker}/refused", "rows", "Rows that a tracker rejected for good."),
    Metric(
        "trackers", "metrics_lost_s", "s", "Time whose records were trimmed in Redis before `metrics.jsonl` had them."
    ),
    Metric("command", "began", "s", "Start of the command (Unix time)."),
)

RENAMED: Mapping[str, Mapping[str, str]] = {
    "learner": {
        "tokens/trained": "tokens_trained",
        "mismatch_kl": "actor/mismatch_kl",
        "mismatch_kl_fresh": "actor/mismatch_kl_fresh",
        "mismatch_abs_max": "actor/mismatch_abs_max",
        **{f"critic/rewards/{suffix}": f"shaped_reward/{suffix}" for suffix in ("mean", "min", "max")},
        **{f"critic/advantages/{suffix}": f"advantage/{suffix}" for suffix in ("mean", "min", "max")},
    }
}
"""Old name -> name, of builds before 0.2."""


def find_metric(source: str, name: str) -> Metric | None:
    """Return the row of a metric, preferably without placeholders."""
    rows = [metric for metric in METRICS if metric.source == source and metric.matches(name)]
    return min(rows, key=lambda metric: (metric.name != name, metric.name.count("{")), default=None)


def current_names(source: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return a stored record's values under current names. The old `tokens/trained` replaces `tokens_trained`, which
    counted computed tokens.
    """
    renamed = RENAMED.get(source, {})
    old = {renamed[name]: value for name, value in values.items() if name in renamed}
    return {name: value for name, value in values.items() if name not in renamed} | old if old else dict(values)
