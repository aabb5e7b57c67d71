import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from offbeat.deploy.config.yaml_limits import MAX_DEPTH, MAX_VALUES, check_yaml_limits, load_yaml, write_yaml
from offbeat.trainer.config.issue import ConfigIssue


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


def test_aliases_that_expand_to_billions_of_values_are_rejected():
    assert check_yaml_limits(bomb(3)) is None
    assert check_yaml_limits(bomb(12)) == ConfigIssue("", f"more than {MAX_VALUES:,} values with aliases expanded")


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 100_000, "- " * 1000 + "x", "{a: " * 1000])
def test_depth_is_limited_without_parsing_the_rest(text: str):
    assert check_yaml_limits(text) == ConfigIssue("", f"nested deeper than {MAX_DEPTH} levels")


def test_ordinary_documents_are_within_the_limits():
    assert check_yaml_limits("a: &x {b: [1, 2], c: *z}\nd: *x\n") is None
    assert check_yaml_limits("") is None


@given(st.text("0123456789.:-+_eExXaAfFnNiI~yYoOtTrRuUsSlL =<", max_size=12), st.floats(allow_nan=False))
def test_written_values_keep_their_types(text: str, number: float):
    """Texts that one of the dialects reads as a number, a date or a flag are quoted."""
    tree = {text: text, "list": [text, number, int(number) if abs(number) < 1e9 else 0, None, True]}
    written = write_yaml(tree)
    assert load_yaml(written) == tree
    assert yaml.safe_load(written) == tree
    assert OmegaConf.to_container(OmegaConf.create(written)) == tree
