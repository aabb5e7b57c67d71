"""What decides which scores are valid."""

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.trainer.training.score_keys import role_of_key, selection_digest
from tests.paths import QUICKSTART


@pytest.mark.parametrize(
    ("override", "is_other"),
    [
        ("zero_variance=train", True),
        ("adv_estimator=reinforce", True),
        ("difficulty_mask=true", True),
        ("max_steps=99", False),
        ("actor_train.num_processes=2", False),
    ],
)
def test_filters_and_estimator_decide_which_groups_need_scores(override: str, is_other: bool) -> None:
    digests = {selection_digest(load_run(QUICKSTART, overrides)) for overrides in ([], [override])}
    assert len(digests) == 1 + is_other


def test_a_role_may_contain_what_separates_it_from_its_digest() -> None:
    assert role_of_key("teacher.a@b@0123456789ab") == "teacher.a@b"
