"""PPO with a value head on the policy: one loss, one step, the same however the batch is cut; and its warm-up."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from offbeat.services.messages.types import Group
from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.roles import CriticConfig
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import Packing
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.value_head import ValueHead
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.fakes import make_group, train_on
from tests.trainer.plain_engine import PlainEngine

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
GROUPS = [make_group(n, rewards=(0.0, 1.0, 1.0, 0.5)) for n in range(3)]
LAMBDA, VF_COEF, VALUE_CLIP = 0.8, 0.3, 0.05


def config(budget: int = 1000, **settings: object) -> LearnerConfig:
    training = {"learning_rate": 1e-2, "max_tokens_per_microbatch": budget, "warmup_steps": 0}
    tree: dict[str, object] = {
        "adv_estimator": "gae",
        "lambd": LAMBDA,
        "value_clip": VALUE_CLIP,
        "entropy_loss_coef": 0.01,
        "critic": {"backbone": "policy", "vf_coef": VF_COEF, "training_args": {"learning_rate": 3e-2}},
        "actor_train": {"training_args": training},
    }
    return LearnerConfig.model_validate(tree | settings)


def policy_with_head(folder: Path) -> PackedPolicy:
    """Its head is not zero, so that values, and what they owe to the policy, are not either."""
    policy = load_policy(folder, ModelArgs(), seed=1, value_head=True)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        torch.nn.init.normal_(head_of(policy).weight, std=0.1)
    return policy


def head_of(policy: PackedPolicy) -> ValueHead:
    assert policy.value_head is not None
    return policy.value_head


def trainer(folder: Path, settings: LearnerConfig) -> tuple[BatchTrainer, PlainEngine, PackedPolicy]:
    policy = policy_with_head(folder)
    engine = PlainEngine(policy)
    return BatchTrainer(settings, StepModels(engine), ALONE), engine, policy


def everything(policy: PackedPolicy) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


def said_by_hand(policy: PackedPolicy, tokens: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies and values of one trajectory's sampled tokens."""
    packing = Packing.of(torch.tensor([0, len(tokens)]))
    hidden = policy.model.base_model(tokens[None], packing=packing, use_cache=False).last_hidden_state[0]
    rows, head, words = hidden[where - 1], head_of(policy), cast(nn.Linear, policy.model.get_output_embeddings())
    logp = (rows @ words.weight.T).log_softmax(-1)
    chosen = logp.gather(1, tokens[where][:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(1), (rows * head.weight[0]).sum(1) + head.bias


def loss_by_hand(policy: PackedPolicy, old: PackedPolicy, groups: Sequence[Group]) -> Tensor:
    """PPO, entropy bonus and clipped value loss, trajectory by trajectory; old: the policy at the step's start."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for trajectory in (each for group in groups for each in group.trajectories):
        (segment,) = trajectory.segments
        tokens, where = torch.from_numpy(segment.tokens).long(), torch.from_numpy(segment.loss_mask).nonzero()[:, 0]
        logprobs, entropies, values = said_by_hand(policy, tokens, where)
        with torch.no_grad():
            before = said_by_hand(old, tokens, where)[2]
        rewards = torch.zeros(len(tokens), dtype=torch.float64)
        for turn in trajectory.turns:
            rewards[turn.end - 1] += turn.reward
        advantages, ahead, later = torch.zeros(len(where), dtype=torch.float64), 0.0, 0.0
        for t in reversed(range(len(where))):
            ahead = float(rewards[where[t]]) + later - float(before[t]) + LAMBDA * ahead
            advantages[t], later = ahead, float(before[t])
        ratio = (logprobs - torch.from_numpy(segment.logprobs).double()[where]).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        returns, near = advantages + before, before + (values - before).clamp(-VALUE_CLIP, VALUE_CLIP)
        of_values = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        total = total + (VF_COEF * of_values - surrogate - 0.01 * entropies).sum()
        count += len(where)
    return total / count


def test_two_passes_over_a_batch_are_a_plain_float64_loop(folder: Path) -> None:
    """The second pass clips values: they have moved by then."""
    batches, _, policy = trainer(folder, config(ppo_epochs=2, gamma=1.0))
    twin, old = policy_with_head(folder).double(), policy_with_head(folder).double()
    rest = [parameter for name, parameter in twin.named_parameters() if not name.startswith("value_head")]
    groups = [{"params": rest, "lr": 1e-2}, {"params": list(head_of(twin).parameters()), "lr": 3e-2}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss_by_hand(twin, old, GROUPS).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
    gauges = train_on(batches, GROUPS, 0)
    torch.testing.assert_close(everything(policy).double(), everything(twin), rtol=0, atol=2e-5)
    assert not torch.allclose(head_of(policy).weight, head_of(policy_with_head(folder)).weight, atol=1e-2)
    assert (gauges["actor/lr"].value, gauges["critic/lr"].value) == (1e-2, 3e-2)


def test_values_and_old_logprobs_share_one_pass_before_training(folder: Path) -> None:
    batches, _, policy = trainer(folder, config(old_logprobs="recompute"))
    passes: list[int] = []
    policy.model.base_model.get_submodule("layers.0").register_forward_hook(lambda *_: passes.append(1))
    gauges = train_on(batches, GROUPS, 0)
    assert len(passes) == 2
    assert gauges["actor/ratio"].value == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"gae_level": "turn", "value_clip": None}, {"value_targets": "vtrace", "old_logprobs": "recompute"}],
    ids=["gae", "turns", "vtrace"],
)
def test_the_token_budget_does_not_change_the_step(folder: Path, settings: dict[str, object]) -> None:
    (whole, _, one), (cut, engine, two) = (trainer(folder, config(b, **settings)) for b in (1000, 20))
    found = [train_on(batches, GROUPS, 0) for batches in (whole, cut)]
    assert len(engine.seen[0]) == 6
    torch.testing.assert_close(everything(one), everything(two), rtol=0, atol=2e-6)
    for name in ("critic/loss", "critic/values/mean", "actor/total_loss"):
        assert found[0][name].value == pytest.approx(found[1][name].value, abs=1e-6)


def test_gauges_of_turn_values_cover_the_first_token_of_each_turn(folder: Path) -> None:
    batches, _, _ = trainer(folder, config(gae_level="turn", value_clip=None))
    gauges = train_on(batches, GROUPS, 0)
    num_turns = sum(len(each.turns) for group in GROUPS for each in group.trajectories)
    assert num_turns < gauges["tokens_trained"].total
    assert gauges["critic/values/mean"].count == gauges["critic/returns/mean"].count == num_turns


def test_warmup_trains_only_the_value_head(folder: Path) -> None:
    """The policy and its optimizer moments stay unchanged."""
    batches, engine, policy = trainer(folder, config(critic_warmup=3))
    start = [parameter.detach().clone() for parameter in policy.model.parameters()]
    gauges = [train_on(batches, GROUPS, step) for step in range(3)]
    assert all(torch.equal(old, new) for old, new in zip(start, policy.model.parameters(), strict=True))
    assert gauges[2]["critic/loss"].value < gauges[0]["critic/loss"].value
    assert "actor/pg_loss" not in gauges[2]
    train_on(batches, GROUPS, 3)
    assert not torch.equal(start[0], next(policy.model.parameters()))
    first, head = (group["params"][0] for group in engine.optimizer.param_groups)
    assert [int(engine.optimizer.state[each]["step"]) for each in (first, head)] == [1, 4]


def test_critic_keys_without_effect_are_refused_with_a_correction() -> None:
    with pytest.raises(ValueError, match=r"vf_coef\n.*backbone=policy"):
        CriticConfig(vf_coef=0.5)
    schedule = {"training_args": {"learning_rate": 3e-2, "warmup_steps": 4}}
    for given, keys in (
        ({"backbone": "policy", "vf_coef": 0.5}, ["backbone", "vf_coef"]),
        (schedule, ["training_args.learning_rate", "training_args.warmup_steps"]),
    ):
        found = list(check_learner(config(adv_estimator="grpo", lambd=0.95, value_clip=None, critic=given)))
        assert [issue.path for issue in found] == [f"critic.{key}" for key in keys]
        assert all("take adv_estimator gae" in issue.message for issue in found)


def test_a_policy_without_a_head_is_refused(folder: Path) -> None:
    engine = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    with pytest.raises(ValueError, match="value head"):
        train_on(BatchTrainer(config(), StepModels(engine), ALONE), GROUPS, 0)
