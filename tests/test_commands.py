"""Commands, configurations and files that the documentation prints are accepted by this build."""

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf import OmegaConf
from typer.core import TyperArgument, TyperCommand, TyperOption

from offbeat.deploy.cli.env_template import write_template
from offbeat.deploy.config.checks.run import check_settings
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, find_config, is_known, validate_tree
from offbeat.deploy.site.cli_page import all_commands
from offbeat.envs.registry import BUILT_IN
from tests.documented import commands_of, files_of, read_blocks, split_commands
from tests.paths import CONFIGS, ROOT

COMMANDS = dict(all_commands())
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SCHEMA = Draft7Validator(json.loads((CONFIGS / "run.schema.json").read_text(encoding="utf-8")))
TAKE_CONFIG = (
    "offbeat train",
    "offbeat config validate",
    "offbeat config show",
    "offbeat rollout",
    "offbeat runs start",
    "offbeat tinker",
)

INLINE = re.compile(r"`(offbeat [a-z][^`]*)`")
INDENTED = re.compile(r"^    (?:\$ )?(offbeat .+)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z]{2,}|\.\.\.|URL")


def documented(page: Path) -> list[list[str]]:
    """Return the words of each command of `offbeat` and `make` on a page, those within sentences included."""
    text = page.read_text(encoding="utf-8")
    inline = [words for line in INLINE.findall(text.replace("\n", " ")) for words in split_commands(line)]
    indented = [words for line in INDENTED.findall(text) for words in split_commands(line)]
    fenced = [[Path(words[0]).name, *words[1:]] for words in commands_of(page)]
    return [words for words in (*fenced, *indented, *inline) if words[0] in ("offbeat", "make")]


def find_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return a command and its arguments; a group of commands has none."""
    for length in (3, 2):
        if (name := " ".join(words[:length])) in COMMANDS:
            return name, list(words[length:])
    group = " ".join(words[:2])
    known = any(name.startswith(f"{group} ") for name in COMMANDS) or group == "offbeat COMMAND"
    assert known, f"no command `{' '.join(words)}`"
    return group, []


def read_arguments(command: TyperCommand, arguments: Sequence[str]) -> list[str]:
    """Return positional arguments; an option that the command lacks, or too many arguments, fail."""
    options = {
        name: each
        for each in command.params
        if isinstance(each, TyperOption)
        for name in (*each.opts, *each.secondary_opts)
    }
    positional: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, _, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        assert name in options or name == "--help", f"no option {name}; there are {sorted(options)}"
        if name in options and not options[name].is_flag and not value and waiting:
            waiting.pop(0)
    takes = [each for each in command.params if isinstance(each, TyperArgument)]
    assert len(positional) <= len(takes) or any(each.nargs == -1 for each in takes), f"too many arguments: {positional}"
    return positional


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_is_one_of_this_build(page: Path):
    for words in documented(page):
        if words[0] == "make":
            assert all(word in TARGETS for word in words[1:2] if word.isalpha()), " ".join(words)
            continue
        name, arguments = find_command(words)
        if name in COMMANDS:
            read_arguments(COMMANDS[name], arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_packaged_configuration_and_override_is_valid(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for words in documented(page):
        check_config(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_fragment_of_a_configuration_has_known_keys_and_types(page: Path):
    """A fragment with other keys than a run's is of another file."""
    for block in read_blocks(page):
        if block.language == "yaml":
            fragment = read_fragment(block.text)
            problems = [error.message for error in SCHEMA.iter_errors(fragment)]
            assert problems == [], f"{page.name}: {block.text}"


def read_fragment(text: str) -> dict[str, Any]:
    """Return a part of a run's file, or nothing if it is one of another file; `...` stands for more keys."""
    try:
        tree = yaml.safe_load(text.replace("...}", "}"))
    except yaml.composer.ComposerError:  # an alias of what the page leaves out
        return {}
    return tree if isinstance(tree, dict) and all(is_known(key) for key in tree) else {}


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorials_own_files_and_names_fit_its_commands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for words in commands_of(page):
        if words[:2] == ["offbeat", "init"]:
            (tmp_path / words[2]).mkdir()
            write_template(tmp_path / words[2], words[2])
        elif words[0] == "cd":
            monkeypatch.chdir(words[1])
        elif words[0] == "offbeat":
            check_config(words, must_exist=True)
            check_names(words)
    for block in read_blocks(page):
        if block.language == "python":
            compile(block.text, block.title or page.name, "exec")


@pytest.mark.parametrize("page", ["lora", "staleness"])
def test_a_tutorials_keys_work_beside_the_quickstarts(page: str):
    quickstart = OmegaConf.create(compose_tree(Path("quickstart")))
    blocks = read_blocks(ROOT / "docs" / "tutorials" / f"{page}.md")
    fragments = [block for block in blocks if block.language == "yaml"]
    assert fragments
    for block in fragments:
        merged = OmegaConf.to_container(OmegaConf.merge(quickstart, OmegaConf.create(block.text)))
        problems = check_settings(validate_tree(cast(dict[str, Any], merged)))
        assert problems == [], f"{page}.md: {block.text}"


def check_config(words: Sequence[str], *, must_exist: bool = False) -> None:
    """Validate the file and the overrides of a command, as far as no machine, model or code of a user is needed."""
    if words[0] != "offbeat":
        return
    name, arguments = find_command(words)
    positional = read_arguments(COMMANDS[name], arguments) if name in TAKE_CONFIG else []
    if not positional or PLACEHOLDER.search(" ".join(positional)) or ":" in positional[0]:
        return
    file, overrides = positional[0], [each for each in positional[1:] if "=" in each]
    try:
        find_config(Path(file))
    except ConfigError:
        is_expected = must_exist or file.startswith("deploy/") or not file.endswith((".yaml", ".yml"))
        assert not is_expected, f"{' '.join(words)}: no {file}"
        return
    validate_tree(compose_tree(Path(file), overrides), file)


def check_names(words: Sequence[str]) -> None:
    """Look for the env of a name, and for the class or function behind `module:Name`."""
    target = words[2] if len(words) > 2 and words[1] == "play" else "module:Name"
    assert ":" in target or target in BUILT_IN or Path(target).is_file(), f"{' '.join(words)}: no env {target}"
    for word in words[2:]:
        module, _, name = word.partition(":")
        if name.isidentifier() and module.isidentifier():
            tree = ast.parse(Path(f"{module}.py").read_text(encoding="utf-8"))
            defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            assert name in defined, f"{word}: {module}.py defines {sorted(defined)}"


def test_a_wrong_command_is_found(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(AssertionError, match="no command"):
        find_command(["offbeat", "trian", "x"])
    for arguments in (["x", "--fast"], ["a", "b"]):
        with pytest.raises(AssertionError, match=r"no option --fast|too many arguments"):
            read_arguments(COMMANDS["offbeat init"], arguments)
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="max_stalness"):
        check_config(["offbeat", "train", "quickstart", "max_stalness=2"])
    with pytest.raises(AssertionError, match="nowhere"):
        check_config(["offbeat", "train", "nowhere"])
