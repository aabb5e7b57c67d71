"""Audit of a model's commands: it is proven, and each way to lose or repeat one is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from offbeat.services.tinker.audit import ADAPTER, CommandEvidence, find_problems
from offbeat.services.tinker.records import AdapterVersion, AppliedCommand, CheckpointRecord, Lora, StepMetrics

STEP = StepMetrics(at=1.0, version=1, loss=0.0, num_sequences=5, num_tokens=9, grad_norm=1.0, learning_rate=0.1)
PATH = "tinker://m/weights/a"


def entry(kind: str, version: int, num_sequences: int = 0, num_added: int = 0, **settings: Any) -> AppliedCommand:
    return AppliedCommand(
        kind=kind, at=1.0, version=version, num_sequences=num_sequences, num_added=num_added, **settings
    )


@pytest.fixture
def evidence(tmp_path: Path) -> CommandEvidence:
    folder = tmp_path / "a@5"
    folder.mkdir()
    (folder / ADAPTER).touch()
    saved = CheckpointRecord(
        model_id="m",
        kind="training",
        created_at=1.0,
        adapter=AdapterVersion(folder=str(folder), version=1),
        lora=Lora(rank=1, seed=1),
    )
    commands = [
        entry("create_model", 0),
        entry("forward_backward", 0, 2, 2),
        entry("forward_backward", 0, 5, 3),
        entry("optim_step", 1),
        entry("optim_step", 1, is_refused=True),
        entry("save_weights", 1),
        entry("forward_backward", 1, 4, 4),
        entry("load_weights", 2),
    ]
    return CommandEvidence(7, dict(enumerate(commands)), {3: STEP}, {PATH: saved}, frozenset({0, 2}))


def with_command(evidence: CommandEvidence, seq_id: int, **fields: Any) -> CommandEvidence:
    return replace(evidence, commands={**evidence.commands, seq_id: changed(evidence.commands[seq_id], **fields)})


def test_each_command_once_is_proven(evidence: CommandEvidence) -> None:
    assert find_problems(evidence) == []


def test_a_refused_step_may_clear_its_gradient(evidence: CommandEvidence) -> None:
    """As it was not finite; nothing else of a refused step may change."""
    refused = entry("optim_step", 1, 0, is_refused=True)
    commands = {**evidence.commands, 7: refused, 8: entry("forward_backward", 1, 2, 2)}
    cleared = replace(evidence, applied=8, commands=commands, sampled=frozenset({0}))
    assert find_problems(cleared) == []
    for wrong in ({"version": 2}, {"num_sequences": 3}):
        assert find_problems(with_command(cleared, 7, **wrong))


def test_a_command_without_an_entry_is_named(evidence: CommandEvidence) -> None:
    assert find_problems(replace(evidence, applied=9))[0].startswith("command 8 has no entry, 2 in all")


@pytest.mark.parametrize(
    ("seq_id", "fields", "problem"),
    [
        (2, {"num_sequences": 7}, "command 2 (forward_backward) left version 0 and a gradient of 7 sequences"),
        (2, {"num_sequences": 3}, "command 2 (forward_backward) left version 0 and a gradient of 3 sequences"),
        (3, {"version": 2}, "command 3 (optim_step) left version 2"),
        (5, {"version": 2}, "command 5 (save_weights) left version 2"),
        (7, {"num_sequences": 4}, "command 7 (load_weights) left version 2 and a gradient of 4 sequences"),
        (4, {"is_refused": False}, "command 4 (optim_step) has no optimizer step among the metrics"),
    ],
)
def test_a_command_that_is_twice_or_not_in_the_weights_is_named(
    evidence: CommandEvidence, seq_id: int, fields: dict[str, Any], problem: str
) -> None:
    assert any(each.startswith(problem) for each in find_problems(with_command(evidence, seq_id, **fields)))


def test_metrics_of_other_weights_are_named(evidence: CommandEvidence) -> None:
    steps = {3: changed(STEP, num_sequences=4)}
    assert find_problems(replace(evidence, steps=steps)) == [
        "the metrics of command 3 are of version 1 and 4 sequences"
    ]


def test_a_checkpoint_without_its_weights_is_named(evidence: CommandEvidence) -> None:
    record = evidence.checkpoints[PATH]
    (Path(record.adapter.folder) / ADAPTER).unlink()
    other = changed(record, adapter=changed(record.adapter, version=2))
    problems = find_problems(replace(evidence, checkpoints={PATH: other}))
    assert problems[0] == f"{PATH} is of version 2, and its command saved 1"
    assert problems[1].startswith(f"{PATH} has no file")


def test_tokens_of_unknown_weights_are_named(evidence: CommandEvidence) -> None:
    sampled = replace(evidence, sampled=frozenset({1, 4}))
    assert find_problems(sampled) == ["tokens were sampled by version 4, and 2 is the newest"]


def test_a_command_that_was_refused_without_its_model_hides_no_other(evidence: CommandEvidence) -> None:
    """Its model was on disk, and stays as it was; what is twice after it is named."""
    refused = entry("forward_backward", 0, is_refused=True)
    commands = {**evidence.commands, 8: changed(refused, version=None), 9: entry("forward_backward", 2, 2, 2)}
    longer = replace(evidence, applied=9, commands=commands)
    assert find_problems(longer) == []
    assert find_problems(with_command(longer, 9, num_sequences=4))[0].startswith("command 9 (forward_backward) left")
