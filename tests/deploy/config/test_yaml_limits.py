import pytest

from offbeat.deploy.config.yaml_limits import MAX_DEPTH, MAX_VALUES, limit_problem


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


def test_a_few_lines_that_stand_for_billions_of_values_are_refused():
    assert limit_problem(bomb(3)) == ""
    assert limit_problem(bomb(12)) == f"more than {MAX_VALUES:,} values, with aliases written out"


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 1000 + "x", "{a: " * 1000])
def test_depth_is_limited_without_reading_on(text: str):
    assert limit_problem(text) == f"nested deeper than {MAX_DEPTH} levels"


def test_what_a_configuration_looks_like_is_read():
    assert limit_problem("a: &x {b: [1, 2], c: *z}\nd: *x\n") == ""
    assert limit_problem("") == ""
