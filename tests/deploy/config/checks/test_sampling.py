import pytest

from offbeat.trainer.config.aliases import ENGINE
from tests.deploy.config.checks.test_run import problems

ARGS = "actor_infer.generating_args"
CUT = f"{ARGS}.top_p=0.9"


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        ([CUT, "+old_logprobs=behavior"], f"{ARGS}.top_p", "old_logprobs=recompute"),
        ([f"{ARGS}.top_k=20", "+old_logprobs=behavior"], f"{ARGS}.top_k", "kept probability mass"),
        ([CUT, "pg_variant=aipo", "~pg_clip"], f"{ARGS}.top_p", "kept probability mass"),
        (
            [CUT, "pg_variant=vanilla", "~pg_clip", "+train_infer_correction.filters=[{ratio_high: 5.0}]"],
            f"{ARGS}.top_p",
            "kept probability mass",
        ),
        (["+actor_infer.engine_kwargs.logprobs_mode=raw_logprobs"], f"{ENGINE}.logprobs_mode", "leave"),
    ],
)
def test_a_cut_distribution_is_not_trained_on_as_the_whole_one(overrides: list[str], path: str, says: str):
    assert says in problems(*overrides).get(path, "")


@pytest.mark.parametrize(
    "overrides",
    [
        [CUT, "+old_logprobs=recompute", "+train_infer_correction.is_weight={}", "~pg_clip"],
        [CUT, "pg_variant=vanilla", "~pg_clip"],
        [CUT, "~pg_clip"],
        [f"{ARGS}.top_k=20", "~pg_clip"],
        [f"{ARGS}.top_k=-1"],
        [f"{ARGS}.top_k=0"],
    ],
)
def test_losses_that_do_not_compare_with_the_cut_distribution_are_accepted(overrides: list[str]):
    assert problems(*overrides) == {}
