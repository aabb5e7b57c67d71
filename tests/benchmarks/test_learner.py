"""The learner's benchmark compares like with like: one batch, one loss, one budget."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.benchmarks import learner
from offbeat.benchmarks.learner_backends import (
    CLIP,
    MAX_NORM,
    RATE,
    BackendTask,
    _bare_loss,
    _groups,
    data_of,
    passes,
)
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.fakes import train_on
from tests.trainer.plain_engine import PlainEngine

SMALL = learner.LearnerOptions(sequences=8, longest=64, vocabulary=64)


def task(model: str = "", lengths: tuple[int, ...] = (20, 64, 33, 40, 64, 18, 25, 50)) -> BackendTask:
    return BackendTask(model, list(lengths), 16, 128, 1, 1, "cpu")


def test_passes_cover_all_sequences_within_the_padded_token_budget() -> None:
    for backend_task in (task(), task(lengths=(64,) * 8), task(lengths=(200, 30, 30, 30))):
        bins = passes(backend_task)
        assert sorted(i for rows in bins for i in rows) == list(range(len(backend_task.lengths)))
        for rows in bins:
            assert len(rows) == 1 or len(rows) * max(backend_task.lengths[i] for i in rows) <= backend_task.budget


def test_ragged_lengths_span_the_range() -> None:
    lengths = learner._ragged(learner.LearnerOptions(sequences=32, longest=256))
    assert (min(lengths), max(lengths), len(lengths)) == (learner.SHORTEST, 256, 32)


@pytest.mark.parametrize(
    ("options", "says"), [({"sequences": 6}, "groups of 4"), ({"longest": 8}, "at least 32"), ({}, "")]
)
def test_check_returns_the_reason_for_unsupported_options(options: dict[str, int], says: str) -> None:
    reason = learner.check(learner.LearnerOptions(**options))
    assert says in reason
    assert bool(reason) == bool(says)


def test_the_bare_loop_and_ours_have_one_loss_and_one_gradient(tmp_path: Path) -> None:
    backend_task = task(learner.make_model(tmp_path / "model", SMALL))
    policy = load_policy(Path(backend_task.model), ModelArgs(), seed=1)
    engine = PlainEngine(policy)
    args = {"learning_rate": RATE, "max_grad_norm": MAX_NORM, "max_tokens_per_microbatch": backend_task.budget}
    config = LearnerConfig.model_validate({"pg_clip": CLIP, "actor_train": {"training_args": args}})
    data = data_of(backend_task, policy.model.config.get_text_config().vocab_size)
    trainer = BatchTrainer(config, StepModels(engine), Ranks(0, 0, 1, torch.device("cpu")))
    gauges = train_on(trainer, _groups(backend_task, data), 0)
    twin = AutoModelForCausalLM.from_pretrained(backend_task.model, dtype=torch.float32)
    sampled = sum(n - backend_task.prompt for n in backend_task.lengths)
    loss = torch.stack(
        [_bare_loss(twin, backend_task, data, rows).sum() / sampled for rows in passes(backend_task)]
    ).sum()
    assert gauges["actor/total_loss"].value == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), MAX_NORM)
    assert gauges["actor/grad_norm"].value == pytest.approx(float(norm), rel=1e-4)
