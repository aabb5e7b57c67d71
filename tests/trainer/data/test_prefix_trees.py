"""Prefix trees: common tokens are computed once, with the logprobs and gradients of separate forward passes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from offbeat.services.messages.types import (
    Group,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.roles import CriticModelArgs, RoleModelArgs
from offbeat.trainer.data import prefix_trees
from offbeat.trainer.data.batch import (
    Batch,
    MicroBatch,
    microbatches,
    minibatches,
    pack,
)
from offbeat.trainer.data.prefix_trees import shared_microbatches
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models import tree_attention
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedCritic, PackedPolicy
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.fakes import train_on
from tests.trainer.plain_engine import PlainEngine

WORDS = 11
ALONE = Ranks(0, 0, 1, torch.device("cpu"))


def member(prompt: list[int], turns: list[tuple[int, int]], index: int, draw: np.random.Generator) -> Trajectory:
    """turns: (tokens observed after the one before, tokens sampled)."""
    tokens, mask, made = list(prompt), [False] * len(prompt), list[Turn]()
    for observed, sampled in turns:
        tokens += draw.integers(0, WORDS, observed + sampled).tolist()
        mask += [False] * observed + [True] * sampled
        made.append(Turn(0, len(mask) - sampled, len(mask), float(draw.random())))
    spans = tuple(VersionSpan(turn.start, turn.end, 0) for turn in made)
    logprobs = np.where(mask, -2.0, 0.0).astype(np.float32)
    segment = Segment(np.array(tokens, dtype=np.int32), np.array(mask), logprobs, spans)
    return Trajectory("g", index, 0, "tag", 0, (segment,), tuple(made), StopReason.TERMINATED)


def siblings(number: int, prompt: int, shapes: list[list[tuple[int, int]]], seed: int = 0) -> Group:
    draw = np.random.default_rng([seed, number])
    words = draw.integers(0, WORDS, prompt).tolist()
    return Group("0-0", "g", number, "tag", 0, 0, tuple(member(words, t, i, draw) for i, t in enumerate(shapes)))


def ragged() -> list[Group]:
    """Two families with prompts of 12 and 30, one group of one, one whose prompt is too short to share."""
    return [
        siblings(0, 12, [[(0, 3), (2, 1)], [(0, 1)], [(0, 5), (1, 1), (4, 2)]]),
        siblings(1, 30, [[(0, 2)], [(0, 1), (1, 1)]]),
        siblings(2, 9, [[(0, 4), (3, 3)]]),
        siblings(3, 3, [[(0, 2)], [(0, 2)]]),
    ]


def read(micro: MicroBatch) -> PackedInput:
    return PackedInput.of(micro.tokens, micro.cu_seqlens, micro.positions, parents=micro.parents)


def everything(module: torch.nn.Module, parts: list[MicroBatch], size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of every sampled token, and the gradient of a sum with different weights."""
    weights = torch.sin(torch.arange(size, dtype=torch.float64))
    result = torch.zeros(size, dtype=torch.float64)
    module.zero_grad()
    for micro in parts:
        output = module(read(micro))
        values = output if isinstance(output, torch.Tensor) else output.logprobs
        result[micro.index] = values.detach().double()
        extra = 0 if isinstance(output, torch.Tensor) else (output.entropies * weights[micro.index]).sum()
        ((values * weights[micro.index]).sum() + extra).backward()
    return result, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def model(kind: Any, **more: Any) -> PackedPolicy:
    torch.manual_seed(0)
    config = kind(
        vocab_size=WORDS, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2, **more,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config, attn_implementation="offbeat_packed")
    return PackedPolicy(made).double()


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("max_tokens", [20, 4096])
def test_shared_prefix_gives_same_logprobs_and_gradients(kind: Any, max_tokens: int) -> None:
    policy, batch = model(kind), pack(ragged())
    unshared = everything(policy, microbatches(batch, range(batch.num_sequences), max_tokens), batch.num_sampled)
    shared = everything(policy, shared_microbatches(batch, range(batch.num_sequences), max_tokens), batch.num_sampled)
    # norms and rotations are float32 in every dtype
    torch.testing.assert_close(shared[0], unshared[0], rtol=0, atol=2e-6)
    for one, two in zip(shared[1], unshared[1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-6)


def of_sequences(sequences: list[list[tuple[int, bool]]], sizes: list[int]) -> list[Group]:
    """Groups of trajectories, each of one segment and one turn. sequences: (token, sampled); sizes: of the groups"""
    groups, rows = list[Group](), iter(sequences)
    for number, size in enumerate(sizes):
        members = list[Trajectory]()
        for index in range(size):
            tokens, mask = (np.array(column) for column in zip(*next(rows), strict=True))
            end = int(np.flatnonzero(mask)[-1]) + 1
            spans, turn = (VersionSpan(1, end, 0),), Turn(0, 1, end, float(index))
            logprobs = np.where(mask, -2.0, 0.0).astype(np.float32)
            segment = Segment(tokens.astype(np.int32), mask.astype(bool), logprobs, spans)
            members.append(Trajectory("g", index, 0, "tag", 0, (segment,), (turn,), StopReason.TERMINATED))
        groups.append(Group(f"{number}-0", "g", number, "tag", 0, 0, tuple(members)))
    return groups


def forest(seed: int) -> list[Group]:
    """Sequences that continue random prefixes of earlier ones, sampled tokens among them; some are equal."""
    draw = np.random.default_rng(seed)
    sequences: list[list[tuple[int, bool]]] = []
    for _ in range(draw.integers(2, 12)):
        earlier = sequences[draw.integers(len(sequences))] if sequences and draw.random() < 0.8 else []
        row = [(token, bool(draw.random() < 0.3)) for token, _ in earlier[: draw.integers(len(earlier) + 1)]]
        row += [(int(draw.integers(WORDS)), bool(draw.random() < 0.5)) for _ in range(draw.integers(0, 30))]
        row = row if len(row) > 1 else [(0, False), (0, True)]
        sequences.append([(row[0][0], False), *row[1:-1], (row[-1][0], True)])
    cut = int(draw.integers(1, len(sequences) + 1))
    return of_sequences(sequences, [size for size in (cut, len(sequences) - cut) if size])


def num_prefixes(batch: Batch) -> int:
    rows = [tuple(batch.tokens[start:end].tolist()) for start, end in pairwise(batch.cu_seqlens.tolist())]
    return len({row[: n + 1] for row in rows for n in range(len(row))})


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 10**6), st.sampled_from([1, 8]), st.sampled_from([40, 100, 4096]), st.sampled_from([0, 32, 10_000])
)
def test_forest_gives_same_logprobs_and_gradients(
    monkeypatch: pytest.MonkeyPatch, seed: int, shortest: int, max_tokens: int, key_cost: int
) -> None:
    """key_cost: blocks attend alone, some together, or all of a tree."""
    monkeypatch.setattr(prefix_trees, "MIN_BLOCK_TOKENS", shortest)
    monkeypatch.setattr(tree_attention, "KEY_COST", key_cost)
    monkeypatch.setattr(tree_attention, "MIN_SAVED_SCORES", 50)  # many batches of blocks
    policy, batch = model(Qwen2Config), pack(forest(seed))
    parts = shared_microbatches(batch, range(batch.num_sequences), max_tokens)
    separate = everything(policy, microbatches(batch, range(batch.num_sequences), 4096), batch.num_sampled)
    shared = everything(policy, parts, batch.num_sampled)
    torch.testing.assert_close(shared[0], separate[0], rtol=0, atol=2e-6)
    for one, two in zip(shared[1], separate[1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    longest = int(batch.cu_seqlens.diff().max())
    assert all(len(part.tokens) <= max(max_tokens, longest) for part in parts)
    num_computed = sum(len(part.tokens) for part in parts)
    assert num_prefixes(batch) <= num_computed <= batch.num_tokens
    if shortest == 1 and len(parts) == 1:
        assert num_computed == num_prefixes(batch)


def test_branches_of_branches_and_equal_sequences_are_computed_once() -> None:
    """An agent's history of 20 tokens, two continuations of 10, each with two answers, one of them given twice."""
    draw = np.random.default_rng(0)
    history, *turns = (draw.integers(0, 500, n).tolist() for n in (20, 10, 10))
    answers = [draw.integers(0, 500, 5).tolist() for _ in range(4)]
    rows = [history + turns[i // 2] + answers[i] for i in (0, 1, 2, 3, 3)]
    marked = [[(token, n >= 30) for n, token in enumerate(row)] for row in rows]
    batch = pack(of_sequences(marked, [5]))
    (micro,) = shared_microbatches(batch, range(5), 1000)
    assert len(micro.tokens) == 20 + 2 * 10 + 4 * 5
    assert micro.parents is not None
    assert sorted(micro.parents.tolist()) == [-1, 0, 0, *sorted([1, 1, 4, 4])]
    assert len(micro.positions) == 25
    assert len(micro.positions.unique()) == 20


def test_a_tree_that_is_too_large_is_divided_where_least_is_shared() -> None:
    """A system prompt of 10 tokens, four tasks of 40, two answers of 10 to each: 10 + 4 * (40 + 20) tokens."""
    draw = np.random.default_rng(0)
    system = draw.integers(0, 500, 10).tolist()
    tasks = [draw.integers(0, 500, 40).tolist() for _ in range(4)]
    rows = [system + tasks[i // 2] + draw.integers(0, 500, 10).tolist() for i in range(8)]
    batch = pack(of_sequences([[(token, n >= 50) for n, token in enumerate(row)] for row in rows], [2] * 4))
    assert [len(part.tokens) for part in shared_microbatches(batch, range(8), 250)] == [250]
    assert [len(part.tokens) for part in shared_microbatches(batch, range(8), 140)] == [130, 130]
    assert [len(part.tokens) for part in shared_microbatches(batch, range(8), 4096, multiple_of=2)] == [130, 130]
    assert [len(part.tokens) for part in shared_microbatches(batch, range(8), 1)] == [60] * 8


def test_a_prefix_of_another_sequence_needs_no_block() -> None:
    """Step-wise prompts with the whole history: each step continues the one before."""
    row = [(int(token), n % 7 > 4) for n, token in enumerate(np.random.default_rng(0).integers(0, 500, 63))]
    batch = pack(of_sequences([row[:21], row[:42], row], [3]))
    (micro,) = shared_microbatches(batch, range(3), 1000)
    assert len(micro.tokens) == 63
    assert micro.parents is None
    assert len(micro.positions) == batch.num_sampled


def test_short_blocks_attend_with_their_siblings_and_parent_and_long_ones_alone() -> None:
    """A root of 300 tokens; a child of 40 with two answers of 4; a child of 600."""
    borders = torch.tensor([0, 300, 40, 4, 4, 600]).cumsum(0)
    layout = tree_attention.TreeLayout.of(borders, torch.tensor([-1, 0, 1, 1, 0]))
    tiles = sorted(len(row.unique()) - (row == 0).any().item() for batch in layout.batches for row in batch.queries)
    assert tiles == [40 + 4 + 4, 300 - 1, 600]  # row 0 is the root's first token, and padding
    assert layout.longest == 300 + 600


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_tree_attention_equals_attention_of_each_path(kind: torch.dtype) -> None:
    """Against float64 of each path alone: the error is that of the separate sequences."""
    torch.manual_seed(0)
    borders, parents = torch.tensor([0, 12, 30, 33, 60, 64, 70]), torch.tensor([-1, 0, 1, 0, -1, 4])
    q, k, v = torch.randn(1, 4, 70, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
    layout = tree_attention.TreeLayout.of(borders, parents)
    out = tree_attention.tree_attention(q.to(kind), k.to(kind), v.to(kind), layout, None, 0.0)[0].double()
    paths = [[0, 1, 2], [0, 3], [4, 5]]
    for path in paths:
        rows = torch.cat([torch.arange(int(borders[block]), int(borders[block + 1])) for block in path])
        exact, plain = (
            torch.nn.functional.scaled_dot_product_attention(
                *(states[:, :, rows].to(dtype) for states in (q, k, v)), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1).double()
            for dtype in (torch.float64, kind)
        )  # fmt: skip
        error, plain_error = ((each - exact).abs().max() for each in (out[rows], plain))
        assert float(error) <= 1.5 * float(plain_error) + 1e-6
    assert layout.longest == 39


def test_a_block_before_its_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="precedes its parent"):
        tree_attention.TreeLayout.of(torch.tensor([0, 2, 4]), torch.tensor([1, -1]))


def test_shared_prefix_gives_same_critic_values() -> None:
    torch.manual_seed(0)
    policy, batch = model(Qwen2Config), pack(ragged())
    critic = PackedCritic(policy.model.model).double()
    torch.nn.init.normal_(critic.value_head.weight)
    values = [
        everything(critic, cut(batch, range(batch.num_sequences), 100), batch.num_sampled)
        for cut in (microbatches, shared_microbatches)
    ]
    torch.testing.assert_close(values[1][0], values[0][0], rtol=0, atol=2e-6)


shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3)
groups = st.lists(st.tuples(st.integers(1, 24), st.lists(shapes, min_size=1, max_size=4)), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(groups, st.integers(8, 120), st.integers(1, 3))
def test_each_sampled_token_occurs_once_after_its_history(
    drawn: list[tuple[int, list[list[tuple[int, int]]]]], max_tokens: int, ranks: int
) -> None:
    batch = pack([siblings(n, prompt, members) for n, (prompt, members) in enumerate(drawn)])
    parts = shared_microbatches(batch, range(batch.num_sequences), max_tokens, multiple_of=ranks)
    assert sorted(torch.cat([micro.index for micro in parts]).tolist()) == list(range(batch.num_sampled))
    for micro in parts:
        x = read(micro)
        for position, place, m in zip(x.positions.tolist(), x.predictors.tolist(), micro.index.tolist(), strict=True):
            assert int(x.tokens[position]) == int(batch.tokens[batch.positions[m]])
            start = int(batch.cu_seqlens[batch.sequence[m]])
            before = batch.tokens[start : batch.positions[m]].tolist()
            assert history(x, place) == before
            assert int(x.packing.position_ids[0, position]) == len(before)


def history(x: PackedInput, place: int) -> list[int]:
    """Return the tokens up to `place`, following each token's predecessor."""
    tree, out = x.packing.tree, list[int]()
    while True:
        out.append(int(x.tokens[place]))
        if int(x.packing.position_ids[0, place]) == 0:
            return out[::-1]
        place = place - 1 if tree is None else int(tree.before[place])


def test_prompt_is_computed_once_per_fitting_siblings() -> None:
    batch = pack([siblings(0, 40, [[(0, 2)]] * 8)])
    (unshared,) = shared_microbatches(batch, range(8), 1000)
    assert len(unshared.tokens) == 40 + 8 * 2
    halves = shared_microbatches(batch, range(8), 48)
    assert [len(part.tokens) for part in halves] == [48, 48]
    assert sum(len(micro.tokens) for micro in microbatches(batch, range(8), 1000)) == 8 * 42


def test_prefix_ends_before_first_differing_or_sampled_token() -> None:
    batch = pack([siblings(0, 20, [[(5, 2)], [(5, 2)]])])
    batch.tokens[27 + 20] = (batch.tokens[20] + 1) % WORDS
    (micro,) = shared_microbatches(batch, range(2), 1000)
    assert micro.cu_seqlens.tolist() == [0, 20, 27, 34]
    assert micro.parents is not None
    assert micro.parents.tolist() == [-1, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"adv_estimator": "gae", "zero_variance": "train"},
        {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "full", "ppo_epochs": 2},
        {"adv_estimator": "grpo", "old_logprobs": "recompute"},
    ],
)
def test_step_gives_same_weights_with_shared_prefixes(options: dict[str, Any], folder: Path) -> None:
    ends: list[list[torch.Tensor]] = []
    step_metrics: list[dict[str, float]] = []
    for shares in (False, True):
        tree = {"actor_train": {"model_args": {"shared_prefix": shares}, "training_args": {"num_minibatches": 2}}}
        config = LearnerConfig.model_validate(tree | options)
        args = config.actor_train.model_args
        policy = PlainEngine(load_policy(folder, args, seed=1))
        critic = PlainEngine(load_critic(folder, args, seed=1)) if config.adv_estimator == "gae" else None
        reference = FrozenModel(load_policy(folder, args, seed=2), ALONE) if config.needs_reference else None
        metrics = train_on(BatchTrainer(config, StepModels(policy, critic, reference), ALONE), ragged(), 0)
        step_metrics.append({name: metric.value for name, metric in metrics.items()})
        ends.append([tensor for _, tensor in policy.tensors()])
    for plain, shared in zip(*ends, strict=True):
        torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-6)
    assert step_metrics[0]["actor/grad_norm"] == pytest.approx(step_metrics[1]["actor/grad_norm"], rel=1e-4)
    assert step_metrics[0]["tokens/shared"] == 0
    assert step_metrics[1]["tokens/shared"] > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_roles_of_another_attention_give_same_outputs_with_shared_prefixes(attention: Any, folder: Path) -> None:
    batch, args = pack(ragged()), ModelArgs(shared_prefix=True)
    policy = load_policy(folder, args.of_role(RoleModelArgs(attn_implementation=attention)), seed=1)
    critic = load_critic(folder, args.of_role(CriticModelArgs(attn_implementation=attention)), seed=1)
    torch.nn.init.normal_(critic.value_head.weight)
    for role in (policy, critic):
        plain, shared = (
            everything(role.double(), cut(batch, range(batch.num_sequences), 4096), batch.num_sampled)[0]
            for cut in (microbatches, shared_microbatches)
        )
        torch.testing.assert_close(shared, plain, rtol=0, atol=2e-6)


def test_gradient_checkpointing_gives_same_result(folder: Path) -> None:
    batch, grads = pack(ragged()), []
    for disable in (True, False):
        args = ModelArgs(disable_gradient_checkpointing=disable, shared_prefix=True)
        policy = load_policy(folder, args, seed=3).double().train()
        grads.append(
            everything(policy, shared_microbatches(batch, range(batch.num_sequences), 999), batch.num_sampled)[1]
        )
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_minibatches_share_prefixes_of_their_sequences() -> None:
    batch: Batch = pack([siblings(0, 40, [[(0, 2)]] * 8)])
    parts = [shared_microbatches(batch, part, 1000) for part in minibatches(batch, 2)]
    assert [len(micro.tokens) for (micro,) in parts] == [48, 48]


def test_unverified_model_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gpt2.*shared_prefix=false"):
        load_policy(tmp_path, ModelArgs(shared_prefix=True), seed=0)


def test_sequence_longer_than_sliding_window_is_refused() -> None:
    policy = model(Qwen2Config, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    batch = pack(ragged())
    with pytest.raises(NotImplementedError, match="shared_prefix"):
        policy(read(shared_microbatches(batch, range(batch.num_sequences), 4096)[0]))


def test_other_attention_implementations_do_not_share() -> None:
    with pytest.raises(ValidationError, match="attn_implementation=auto"):
        ModelArgs(shared_prefix=True, attn_implementation="eager")
