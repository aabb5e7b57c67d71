"""A learner proves what is trained from the numbers of its journal alone."""

from pathlib import Path

import pytest

from offbeat.services.buffer.api import Reconciled
from offbeat.services.errors import FencedError
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.learner.step_ledger import STEPS_FILE, StepLedger
from tests.fakes import make_group
from tests.memory import measure_memory


def write_steps(ledger: StepLedger, *steps: int, first: int = 0, per_step: int = 2) -> None:
    for i, step in enumerate(steps):
        begin = first + per_step * i
        groups = [make_group(number, rewards=(1.0, 0.0)) for number in range(begin, begin + per_step)]
        taken = StepGroups(groups=groups, trained=groups, masked=[])
        ledger.write_step(step, taken, max_staleness=1.0, skipped=False)


def test_repeated_steps_count_with_their_last_groups(tmp_path: Path) -> None:
    ledger = StepLedger(tmp_path, 1)
    ledger.write_lease()
    ledger.write_resumed(0, incarnation=3)
    write_steps(ledger, 1, 2, 3)
    later = StepLedger(tmp_path, 2)
    later.write_resumed(1, incarnation=4)
    write_steps(later, 2, 3, first=10)
    write_steps(ledger, 4, first=90)  # of the learner that was replaced
    later.write_reconciled(3, Reconciled(5, True))
    proof = later.prove(2, 4, 0, ["a"])
    assert [(step, list(numbers)) for step, numbers in proof.saved] == [(1, [0, 1]), (2, [10, 11])]
    assert (proof.incarnation, proof.entry_ids) == (5, ())
    assert later.prove(2, 5, 0, ["a"]).entry_ids == ("a",)
    with pytest.raises(FencedError, match="epoch 2 has taken the run from epoch 1"):
        ledger.prove(2, 4, 0)


def test_a_cut_line_and_one_that_waits_for_room_are_taken_as_they_are(tmp_path: Path) -> None:
    ledger = StepLedger(tmp_path, 1)
    write_steps(ledger, 1, 2)
    path = tmp_path / STEPS_FILE
    path.write_bytes(path.read_bytes() + b'{"step":3,"groups":[[4,')
    ledger._unwritten.append({"step": 3, "groups": [[8, 2, 1]], "epoch": 1, "max_staleness": None, "skipped": False})
    assert [(step, list(numbers)) for step, numbers in ledger.prove(3, 5, 0).saved] == [
        (1, [0, 1]),
        (2, [2, 3]),
        (3, [8]),
    ]


def test_a_group_of_long_ago_costs_a_few_bytes(tmp_path: Path) -> None:
    ledger = StepLedger(tmp_path, 1)
    write_steps(ledger, 1, per_step=128)
    path = tmp_path / STEPS_FILE
    path.write_bytes(b"".join(path.read_bytes().replace(b'"step":1,', b'"step":%d,' % step) for step in range(1, 201)))
    proof = ledger.prove(200, 200 * 128, 0)
    assert sum(len(numbers) for _, numbers in proof.saved) == 200 * 128
    assert measure_memory(lambda: ledger.prove(200, 200 * 128, 0))[1] < 30 * 200 * 128
