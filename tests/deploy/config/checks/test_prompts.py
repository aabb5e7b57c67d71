"""A model that no conversation can be had with is refused before anything starts."""

import json
import re
from pathlib import Path

import pytest

from offbeat.benchmarks.harness.pretrained import FORGETTING, write_llama
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.config.vocabulary import collect_words
from offbeat.envs.frozen_lake import WORDS, FrozenLakeEnv
from tests.paths import QUICKSTART
from tests.services.gateway.templates import HERMES

pytestmark = pytest.mark.slow


class Offering(FrozenLakeEnv):
    """A lake with a map that can be looked at."""

    words = WORDS
    functions = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)


def problems(folder: Path, *overrides: str) -> dict[str, str]:
    config = validate_tree(compose_tree(QUICKSTART, [f"pretrain={folder}", *overrides]))
    return {problem.path: problem.message for problem in check_run(config)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def test_append_only_chat_template_is_accepted(llama: Path):
    assert problems(llama) == {}


def test_first_prompt_length_includes_template_tokens(llama: Path):
    from offbeat.envs.frozen_lake import FrozenLakeConfig, FrozenLakeEnv
    from offbeat.services.chat.append_only import load_chat_format

    env = FrozenLakeEnv(FrozenLakeConfig())
    length = len(load_chat_format(llama).first_prompt(env.system_prompt, env.reset(seed=42)[0]))
    assert problems(llama, f"sequence_length={length + 1}") == {}
    assert f"has at least {length};" in problems(llama, f"sequence_length={length}")["sequence_length"]


def test_rewriting_template_rejects_only_the_warm_start(tmp_path: Path):
    write_llama(tmp_path, FORGETTING)
    assert "the chat template is not append-only" in problems(tmp_path)["warm_start"]
    assert problems(tmp_path, "warm_start=null") == {}


@pytest.mark.parametrize(("words", "refused"), [([], True), ([str(cell) for cell in range(16)], False)])
def test_gymnasium_names_its_words_for_the_tiny_policy(words: list[str], refused: bool):
    tag = f"{{env_type: gymnasium, env_config: {{id: FrozenLake-v1, words: {json.dumps(words)}}}}}"
    tags = ("train_env_manager.tags=[Walk]", "val_env_manager.tags=[Walk]")
    config = ("~custom_envs.FrozenLake", f"+custom_envs.Walk={tag}", *tags, "warm_start=null")
    found = problems(Path("tiny"), *config)
    assert ("env_config.words" in found["pretrain"]) if refused else found == {}
    if not refused:
        vocabulary = collect_words(validate_tree(compose_tree(QUICKSTART, config)))
        assert {"15", "0,", "Answer", "3"} <= set(vocabulary)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("env_type: frozen_lake", None),
        (
            "env_type: gymnasium, env_config: {id: FrozenLake-v1}",
            "gymnasium does not .*: set env_config.env_config.words, or",
        ),
        ("env_type: math, env_config: {dataset_name: ROWS}", "math does not declare .* needs: set pretrain"),
    ],
)
def test_tools_have_the_words_of_the_env_within(inner: str, message: str | None, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("\n".join('{"question": "1 + 1?", "answer": "2"}' for _ in range(16)))
    (tmp_path / "corpus.txt").write_text("a passage\n")
    tool = f"{{tool_id: search, corpus: {tmp_path / 'corpus.txt'}}}"
    inner = inner.replace("ROWS", str(tmp_path / "rows.jsonl"))
    tag = f"{{env_type: tools, env_config: {{{inner}, tools: [{tool}]}}}}"
    tags = ("train_env_manager.tags=[Tools]", "val_env_manager.tags=[Tools]")
    config = ("~custom_envs.FrozenLake", f"+custom_envs.Tools={tag}", *tags, "warm_start=null", "sequence_length=400")
    found = problems(Path("tiny"), *config)
    if message:
        assert re.match(message, found["pretrain"])
        return
    assert found == {}
    assert {"Left", "<search>words</search>"} <= set(collect_words(validate_tree(compose_tree(QUICKSTART, config))))


def with_tools(folder: Path, *overrides: str) -> dict[str, str]:
    corpus = folder / "corpus.txt"
    corpus.write_text("a passage\n")
    env = f"{{env_type: frozen_lake, tools: [{{tool_id: search, corpus: {corpus}}}], function_calling: template}}"
    tag = f"+custom_envs.Tools={{env_type: tools, env_config: {env}}}"
    tags = ("train_env_manager.tags=[Tools]", "val_env_manager.tags=[Tools]")
    changes = ("~custom_envs.FrozenLake", tag, *tags, "warm_start=null", "sequence_length=900", *overrides)
    return problems(folder, *changes)


def test_functions_without_template_support_are_rejected(llama: Path):
    parser = "custom_envs.Tools.tool_call_parser"
    assert "does not show functions" in with_tools(llama)[parser]
    tiny = problems(Path("tiny"), f"custom_envs.FrozenLake.env_type={__name__}:Offering", "warm_start=null")
    assert "has no functions" in tiny["custom_envs.FrozenLake.tool_call_parser"]
    without = problems(llama, "+custom_envs.FrozenLake.tool_call_parser=hermes")
    assert "frozen_lake offers no functions" in without["custom_envs.FrozenLake.tool_call_parser"]


def test_functions_count_as_prompt_and_reject_invalid_combinations(tmp_path: Path):
    write_llama(tmp_path, HERMES)
    tag = "custom_envs.Tools"
    assert with_tools(tmp_path) == {}
    assert "leave no room" in with_tools(tmp_path, "sequence_length=100")["sequence_length"]
    step_wise = with_tools(tmp_path, f"+{tag}.env_manager_cls=StepEnvManager")
    assert "take TrajEnvManager" in step_wise[f"{tag}.env_manager_cls"]
    agent = with_tools(tmp_path, f"+{tag}.agent_runner={{path: 'offbeat.deploy.agents.walker:play'}}")
    assert "tools of its own" in agent[f"{tag}.agent_runner"]
    other = with_tools(tmp_path, f"+{tag}.tool_call_parser=hermez")
    assert "did you mean 'hermes'" in other[f"{tag}.tool_call_parser"]


def test_model_without_chat_template_is_rejected(llama: Path, tmp_path: Path):
    for path in llama.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    assert "without a chat template" in problems(tmp_path)["pretrain"]
