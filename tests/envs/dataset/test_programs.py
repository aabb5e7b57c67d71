"""Made programs: the sandbox confirms both columns of demonstrations."""

from itertools import islice

import pytest

from offbeat.envs.dataset.programs import tasks
from tests.services.reward.samples import score


def test_held_out_tasks_are_not_trained():
    train, held_out = ({row["prompt"] for row in tasks(held_out=each)} for each in (False, True))
    assert not train & held_out
    assert 40 < len(train) / len(held_out) < 60
    words = {word for prompt in train for word in prompt.split()}
    assert {word for prompt in held_out for word in prompt.split()} <= words


@pytest.mark.parametrize(("column", "value"), [("response", 1.0), ("careless", 0.0)])
def test_only_the_program_with_brackets_passes(column: str, value: float):
    for row in islice(tasks(held_out=False), 0, None, 500):
        answer, pattern = row[column], "(def .+)"
        assert score("code_sandbox", answer, row=row, answer_pattern=pattern, reward="pass_rate") == value
