import pytest

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, apply_aliases, leaves, matches, put, remove


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a|b.c", "b.c", True),
        ("a.**", "a.b.c", True),
        ("a.**", "a", False),
        ("*.c|d", "a.d", True),
    ],
)
def test_a_pattern_matches_parts(pattern: str, path: str, expected: bool):
    assert matches(pattern, tuple(path.split("."))) is expected


def test_tables_that_are_values_stay_whole():
    tree = {"envs": {"A": {"config": {"grid": {"0": "W"}}}}, "empty": {}}
    assert list(leaves(tree, ("envs.*.config.*",))) == [(("envs", "A", "config", "grid"), {"0": "W"}), (("empty",), {})]


def test_the_first_of_two_values_of_a_key_stays():
    tree = {"a": {"b": 1}}
    assert "1" in put(tree, ("a", "b"), 2)
    assert put(tree, ("a", "c"), 3) == ""
    assert tree == {"a": {"b": 1, "c": 3}}
    remove(tree, ("a", "b"))
    remove(tree, ("a", "c"))
    assert tree == {}


@pytest.mark.parametrize(
    ("key", "value", "outcome"),
    [
        ("seed", 3, Outcome("same", ("seed",), 3)),
        ("max_grad_norm", 1.0, Outcome("renamed", ("actor_train", "training_args", "max_grad_norm"), 1.0)),
        ("adv_estimator", "reinforce++", Outcome("value", ("adv_estimator",), "reinforce_plus_plus")),
        ("reference.model_args.model_type", None, Outcome("same", note="changes nothing")),
    ],
)
def test_the_aliases_of_a_run_are_those_of_an_import(key: str, value: object, outcome: Outcome):
    assert apply_aliases(Key(tuple(key.split(".")), value, {})) == outcome
