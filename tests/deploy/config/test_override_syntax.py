"""Overrides that Hydra can't read, as a user meets them."""

from pathlib import Path

import pytest

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree

FORM = "is no override: write KEY=VALUE, as in seed=2"
QUOTES = r"close each quote, and write those within a text as \' or \""
BRACKETS = "close its brackets, and write texts with brackets or punctuation in quotes"


@pytest.mark.parametrize(
    ("override", "key", "starts", "ends"),
    [
        ("max_steps", "", "'max_steps' ", FORM),
        ("50", "", "'50' ", FORM),
        ("=3", "", "'=3' ", FORM),
        ("max_steps:50", "", "'max_steps:50' ", FORM),
        ("--seed=1", "", "'--seed=1' ", FORM),
        ("défi=1", "", "'défi=1' ", FORM),
        (
            "exp_name=a,b",
            "exp_name",
            "a,b names several values: ",
            "write a list as [a,b], a text in quotes ('\"a,b\"')",
        ),
        ("exp_name=a;b", "exp_name", "a;b can't be read (", "in quotes ('exp_name=\"a;b\"')"),
        ("exp_name=a(b)", "exp_name", "a(b) can't be read (", "in quotes ('exp_name=\"a(b)\"')"),
        ('exp_name="x', "exp_name", "\"x can't be read (", QUOTES),
        ("exp_name=it's", "exp_name", "it's can't be read (", QUOTES),
        ("custom_envs={a: b", "custom_envs", "{a: b can't be read (", BRACKETS),
    ],
)
def test_what_cant_be_read_is_named_with_its_form(override: str, key: str, starts: str, ends: str):
    with pytest.raises(ConfigError) as error:
        compose_tree(Path("rlvr"), ["seed=3", override, "~warm_start"])
    (issue,) = error.value.issues
    assert issue.path == key
    assert issue.message.startswith(starts)
    assert issue.message.endswith(ends)
    assert "hydra.cc" not in issue.message


def test_what_the_messages_advise_is_read():
    overrides = ['exp_name="a;b"', r"output_dir='it\'s'", "max_steps=5"]
    tree = compose_tree(Path("rlvr"), overrides)
    assert (tree["exp_name"], tree["output_dir"], tree["max_steps"]) == ("a;b", "it's", 5)
