"""Findings by what the steps of a run look like."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.services.diagnosis import RULES, decode_findings, describe_untrained, diagnose, encode_findings
from offbeat.services.errors import CodecError
from offbeat.services.findings import DiagnosisLimits, RunFinding

HEALTHY: dict[str, float] = {
    "groups": 8.0,
    "groups_without_signal": 4.0,
    "success": 0.4,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "episodes_truncated": 0.1,
    "episodes_without_tokens": 0.0,
    "staleness": 1.0,
    "actor/entropy": 0.8,
    "actor/grad_norm": 1.4,
    "actor/skipped_steps": 0.0,
    "actor/lr": 1e-3,
    "actor/mismatch_kl": 1e-3,
    "actor/mismatch_kl_fresh": 1e-13,
    "time/wait_s": 0.3,
    "time/step_s": 1.0,
}
LIMITS = DiagnosisLimits(mismatch_kl=1e-6, max_grad_norm=1.0)


def names(steps: list[dict[str, float]]) -> list[str]:
    return [finding.name for finding in diagnose(steps, LIMITS)]


def steps(count: int = 20, **changes: float) -> list[dict[str, float]]:
    return [HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()} for _ in range(count)]


SEEN: dict[str, dict[str, Any]] = {
    "not_finite": {"actor__skipped_steps": 1.0},
    "overflow": {"actor__skipped_steps": 1.0, "actor__overflow_steps": 1.0, "actor__loss_scale": 512.0},
    "prompts_too_long": {"episodes_without_tokens": 0.5},
    "prompts_too_long from the first turn": {
        "episodes_without_tokens": 1.0,
        "episodes_truncated": 1.0,
        "reward_max": 0.0,
    },
    "failures_left_out": {"shaped_reward__mean": 0.87, "reward": 0.5},
    "success_missing": {"success_missing": 0.1},
    "truncated": {"episodes_truncated": 0.6},
    "constant_reward": {"reward_max": 0.0, "groups_without_signal": 8.0},
    "no_signal": {"groups_without_signal": 7.5},
    "solved": {"groups_without_signal": 8.0, "success": 1.0},
    "mismatch": {"actor__mismatch_kl_fresh": 1e-5},
    "clipped": {"actor__grad_norm": 11.0},
    "no_effect": {"actor__mismatch_kl": 1e-10},
    "no_gradient": {"actor__grad_norm": 0.0, "episodes_truncated": 0.4},
    "stale": {"groups_dropped__stale": 4.0},
    "stale while they are played": {"groups_dropped__expired": 3.0, "groups_dropped__stale": 1.0},
    "idle_learner": {"time__wait_s": 0.8},
    "idle_rollouts": {"time__wait_s": 0.001},
}


@pytest.mark.parametrize(("name", "changes"), SEEN.items(), ids=SEEN)
def test_a_run_that_goes_wrong_has_this_finding_alone(name: str, changes: dict[str, Any]):
    assert names(steps(**changes)) == [name.split()[0]]


def test_steps_that_find_the_loss_scale_are_no_finding():
    searching = steps(3, actor__skipped_steps=1.0, actor__overflow_steps=1.0, actor__loss_scale=512.0)
    assert names(searching + steps(17)) == []


def test_every_rule_is_covered():
    assert (
        len(SEEN) == len(RULES) + 4
    )  # two twice; entropy collapse below; two of no signal, two of idleness; no gradient


def test_a_healthy_run_has_no_findings():
    assert names(steps()) == []
    assert names([]) == []
    assert names([{}] * 20) == []


@pytest.mark.parametrize("name", ["truncated", "constant_reward", "no_signal", "stale", "clipped", "no_effect"])
def test_a_few_steps_prove_nothing(name: str):
    assert name not in names(steps(4, **SEEN[name]))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("not_finite", {"actor__skipped_steps": 1.0}),
        ("overflow", {"actor__skipped_steps": 1.0, "actor__overflow_steps": 1.0}),
        ("prompts_too_long", {"episodes_without_tokens": 1.0}),
        ("constant_reward", {"reward_max": 0.0}),
        ("no_signal", {"groups_without_signal": 8.0}),
        ("solved", {"groups_without_signal": 8.0, "success": 1.0}),
    ],
)
def test_steps_without_a_gradient_have_the_rule_that_says_why(name: str, changes: dict[str, Any]):
    assert names(steps(actor__grad_norm=0.0, **changes)) == [name]


@pytest.mark.parametrize(
    ("changes", "distills", "expected"),
    [
        ({"shaped_reward__min": -0.5, "shaped_reward__max": 0.1}, False, []),
        ({"shaped_reward__min": 0.5, "shaped_reward__max": 0.5}, False, ["constant_reward"]),
        ({}, True, []),
        ({}, False, ["constant_reward"]),  # a critic's advantages are a signal of its errors alone
    ],
)
def test_equal_rewards_are_no_finding_where_other_rewards_or_teachers_train(
    changes: dict[str, Any], distills: bool, expected: list[str]
):
    equal = steps(reward_max=0.0, groups_without_signal=0.0, **changes)
    assert [finding.name for finding in diagnose(equal, replace(LIMITS, distills=distills))] == expected


def test_a_run_that_ends_after_few_steps_without_a_gradient_says_what_they_were():
    """ROLL's RLVR file with rows too hard for its policy: answers are cut and masked, a mismatch explains nothing."""
    untrained: dict[str, Any] = {"actor__grad_norm": 0.0, "actor__mismatch_kl_fresh": 2e-5, "episodes_truncated": 0.75}
    found = diagnose(steps(2, groups_without_signal=8.0, reward_max=0.0, **untrained), LIMITS)
    assert [(finding.name, finding.is_warning) for finding in found] == [("mismatch", True), ("no_gradient", False)]
    said = describe_untrained(found)
    assert said.startswith(
        "no token was trained: none of the last 2 steps had a gradient (16 of 16 groups without signal"
    )
    assert "every reward was 0, a token limit cut 75% of the episodes" in said
    assert "KL" not in said
    assert "start from a policy that succeeds sometimes" in said
    assert "max_new_tokens" in said
    untrained["episodes_truncated"] = 0.0
    assert "max_new_tokens" not in describe_untrained(
        diagnose(steps(2, groups_without_signal=8.0, reward_max=0.0, **untrained), LIMITS)
    )
    filtered = describe_untrained(diagnose(steps(2, groups_without_signal=8.0, reward_max=1.0, **untrained), LIMITS))
    assert "difficulty_mask" in filtered
    assert "start from" not in filtered


def test_what_a_learner_waits_for_is_reported():
    """Rows have no rewards, and no groups in play."""
    busy = {"time/wait_s": 0.9, "time/step_s": 1.0, "actor/grad_norm": 1.0, "groups": 8.0}
    rows = diagnose([busy] * 20)
    scored = diagnose([busy | {"time/score_wait_s": 0.8}] * 20)
    episodes = diagnose(steps(time__wait_s=0.9, time__score_wait_s=0.1))
    assert [finding.name for finding in (*rows, *scored, *episodes)] == ["idle_learner"] * 3
    assert rows[0].keys[0] == "rollout.num_workers"
    assert scored[0].seen == "the learner waits 90% of its time for scores"
    assert scored[0].keys[0] == "reference.strategy_args.num_replicas"
    assert "offbeat runs why" in episodes[0].cause
    assert episodes[0].keys[0] == "train_env_manager.num_env_groups"


def test_rows_without_a_gradient_have_no_rewards_to_speak_of():
    (finding,) = diagnose([{"groups": 8.0, "actor/grad_norm": 0.0}] * 20)
    assert finding.name == "no_gradient"
    assert "reward" not in str(finding)
    assert "nan" not in str(finding)
    assert finding.keys[0] == "data.dataset_name"


@pytest.mark.parametrize("name", ["no_signal", "failures_left_out", "clipped", "no_gradient"])
def test_keys_that_the_pipeline_refuses_are_not_advised(name: str):
    refused = frozenset({"entropy_loss_coef", "reward_normalization", "zero_variance"})
    (finding,) = diagnose(steps(**SEEN[name]), replace(LIMITS, without_effect=refused))
    assert finding.name == name
    assert finding.keys
    assert not {key.partition(".")[0] for key in finding.keys} & refused
    assert "scale rewards" not in finding.cause
    assert "entropy bonus" not in finding.cause or name == "failures_left_out"


def test_the_order_of_admission_is_not_advised_where_it_is_set():
    (finding,) = diagnose(steps(**SEEN["stale"]), replace(LIMITS, trains_by_admission=True))
    assert "order of admission" not in finding.cause
    assert "buffer.order" not in finding.keys


def test_one_gradient_of_policy_or_critic_is_training():
    silent = steps(9, actor__grad_norm=0.0)
    assert names(silent) == ["no_gradient"]
    assert names(steps(1) + silent) == []
    assert names([*silent, HEALTHY | {"actor/grad_norm": 0.0, "critic/grad_norm": 0.1}]) == []


@pytest.mark.parametrize("name", ["not_finite", "prompts_too_long", "mismatch"])
def test_the_first_step_proves_what_more_would_not_change(name: str):
    assert names(steps(1, **SEEN[name])) == [name]


def test_the_window_forgets_all_but_the_first_step():
    assert names(steps(5, episodes_truncated=1.0) + steps(20)) == []
    assert names(steps(1, actor__mismatch_kl_fresh=1e-2) + steps(30)) == ["mismatch"]


def test_answers_that_become_shorter_are_no_finding_yet():
    assert names(steps(8, episodes_truncated=0.8)) == []
    assert names(steps(5, episodes_truncated=0.95)) == ["truncated"]
    assert names(steps(15, episodes_truncated=0.9) + steps(5, episodes_truncated=0.3)) == []


def test_answers_of_one_token_are_not_cut():
    by_limit = {
        tokens: diagnose(steps(episodes_truncated=1.0), DiagnosisLimits(answer_tokens=tokens)) for tokens in (1, 2)
    }
    assert [bool(found) for found in by_limit.values()] == [False, True]


def test_limits_of_a_run_have_its_longest_answer():
    from offbeat.deploy.config.loader import read_run

    for name, longest in (("frozen_lake_smollm2", 1), ("quickstart", 4)):
        assert read_run(Path(name)).limits.answer_tokens == longest


def test_a_tiny_policy_that_vllm_samples_on_a_cpu_has_a_faster_engine():
    from offbeat.deploy.config.loader import read_run

    waiting = steps(time__wait_s=0.9, time__step_s=1.0, reward_max=1.0)
    for overrides, is_named in (
        ([], True),
        (["actor_infer.strategy_args.strategy_name=hf_infer"], False),
        (["+tiny.vision={}"], False),
        (["pretrain=/models/qwen"], False),
        (["actor_infer.app=engines"], False),
        (["actor_infer.strategy_args.strategy_config={max_num_seqs: 256, max_lora_rank: 8, max_loras: 2}"], False),
        (["+actor_infer.strategy_args.strategy_config.enable_log_requests=true"], False),
    ):
        limits = read_run(Path("quickstart"), overrides).limits
        (finding,) = (each for each in diagnose(waiting, limits) if each.name == "idle_learner")
        assert ("hf_infer" in str(finding)) == is_named == (finding.keys[-1].endswith("strategy_name")), overrides


def test_a_cut_distribution_is_no_mismatch():
    """The logprobs of an engine with top_p are of what is kept, the trainer's of all: no sign of types that differ."""
    from offbeat.deploy.config.loader import load_run
    from offbeat.services.generation.hf.sampler import truncate
    from offbeat.trainer.algorithms.kl import k3

    logits = 3 * torch.randn(500, 50, generator=torch.Generator().manual_seed(0))
    kept = truncate(logits, torch.zeros(500, 1, dtype=torch.int64), torch.full((500, 1), 0.99)).log_softmax(-1)
    worst = float(k3(kept, logits.log_softmax(-1))[kept.isfinite()].max())
    limits = load_run(Path("deploy/configs/quickstart.yaml"), ["actor_infer.generating_args.top_p=0.99"]).limits
    assert 1e-5 < worst < limits.mismatch_kl < 1e-4
    assert not [each for each in diagnose(steps(actor__mismatch_kl_fresh=worst), limits) if each.name == "mismatch"]
    cut = load_run(Path("deploy/configs/quickstart.yaml"), ["actor_infer.generating_args.top_k=100"]).limits
    assert limits.mismatch_kl < 1e-3 < cut.mismatch_kl < 2e-3
    (finding,) = diagnose(steps(actor__mismatch_kl_fresh=1e-3), limits)
    assert "top_p and top_k leave out" in str(finding)
    assert "top_p" not in str(diagnose(steps(actor__mismatch_kl_fresh=1e-3), LIMITS)[0])


def test_entropy_that_fell_while_groups_are_silent_is_a_collapse():
    fallen = steps(actor__entropy=0.02, groups_without_signal=6.0)
    assert names(steps(1) + fallen) == ["entropy_collapse"]
    assert names(fallen) == []  # it was never higher
    assert names(steps(1) + steps(actor__entropy=0.02, groups_without_signal=6.0, success=0.95)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"groups_without_signal": 1.0},  # few are left out
        {"shaped_reward__mean": 0.6},  # groups that are trained on are not solved, either
        {"reward": 0.8},  # solved ones are left out
        {"shaped_reward__mean": 3.0},  # a bonus: another scale than that of the env's rewards
    ],
)
def test_failures_that_are_left_out_are_distinguished_from_hard_tasks(changes: dict[str, Any]):
    seen = SEEN["failures_left_out"]
    assert names(steps(**seen)) == ["failures_left_out"]
    assert names(steps(9, **seen)) == []
    assert names(steps(**(seen | changes))) == []
    assert diagnose(steps(**seen), replace(LIMITS, masks_episodes=True)) == []


def test_without_a_learning_rate_nothing_is_expected_to_change():
    assert names(steps(actor__mismatch_kl=1e-13, actor__lr=0.0)) == []
    assert names(steps(actor__mismatch_kl=1e-13, staleness=0.0)) == []


def test_a_finding_says_what_was_seen_why_and_which_key_to_change():
    (finding,) = diagnose(steps(episodes_truncated=0.75), LIMITS)
    assert str(finding).startswith("a token limit cut 75% of the episodes: ")
    assert "custom_envs.TAG.max_tokens_per_step" in str(finding)
    assert describe_untrained([finding]) == f"no token was trained: {finding}"
    assert describe_untrained([]) == "no token was trained: no step had a gradient"


def test_findings_are_sent_as_json():
    found = diagnose(steps(episodes_truncated=0.75, time__wait_s=0.9), LIMITS)
    assert len(found) == 2
    assert decode_findings(encode_findings(found)) == tuple(found)
    for malformed in ("{", "[1]", '[{"name": "x"}]', "7"):
        with pytest.raises(CodecError):
            decode_findings(malformed)


def test_keys_of_findings_exist():
    causes = [*SEEN.values(), {"time__wait_s": 0.8, "time__score_wait_s": 0.8}]
    found = [finding for changes in causes for finding in diagnose(steps(**changes), LIMITS)]
    found += diagnose([{"time/wait_s": 0.8, "time/step_s": 1.0}] * 20)
    assert {key for finding in found for key in finding.keys} <= set(known_keys())
    assert all(isinstance(finding, RunFinding) and finding.keys for finding in found)


def known_keys() -> list[str]:
    from offbeat.deploy.config.run import RunConfig
    from offbeat.services.rollout.config import CustomEnv
    from offbeat.trainer.config.roles import TeacherConfig

    def walk(model: Any, prefix: str) -> list[str]:
        keys: list[str] = []
        for name, field in model.model_fields.items():
            keys.append(f"{prefix}{name}")
            if hasattr(field.annotation, "model_fields"):
                keys += walk(field.annotation, f"{prefix}{name}.")
        return keys

    return [*walk(RunConfig, ""), *walk(CustomEnv, "custom_envs.TAG."), *walk(TeacherConfig, "teacher.NAME.")]
