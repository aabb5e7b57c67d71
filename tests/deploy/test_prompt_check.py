"""A model that no conversation can be had with is refused before anything starts."""

from pathlib import Path

import pytest

from deploy.checks import check_run
from deploy.loading import compose_tree, validate_tree
from tests.pretrained import FORGETTING, write_llama

QUICKSTART = Path(__file__).parents[2] / "deploy" / "configs" / "quickstart.yaml"


def problems(folder: Path, *overrides: str) -> dict[str, str]:
    config = validate_tree(compose_tree(QUICKSTART, [f"pretrain={folder}", *overrides]))
    return {problem.path: problem.message for problem in check_run(config)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def test_any_local_model_with_an_append_only_template_is_accepted(llama: Path):
    assert problems(llama) == {}


def test_the_first_prompt_is_counted_with_the_templates_own_tokens(llama: Path):
    from envs.frozen_lake import FrozenLakeConfig, FrozenLakeEnv
    from services.rollout.chat import load_chat_format

    env = FrozenLakeEnv(FrozenLakeConfig())
    length = len(load_chat_format(llama).first_prompt(env.system_prompt, env.reset(seed=42)[0]))
    assert problems(llama, f"sequence_length={length + 1}") == {}
    assert f"has at least {length};" in problems(llama, f"sequence_length={length}")["sequence_length"]


def test_a_template_that_rewrites_earlier_turns_can_be_trained_and_not_warmed_up(tmp_path: Path):
    write_llama(tmp_path, FORGETTING)
    assert "the chat template is not append-only" in problems(tmp_path)["warm_start"]
    assert problems(tmp_path, "warm_start=null") == {}


def test_a_model_without_a_template_is_refused(llama: Path, tmp_path: Path):
    for path in llama.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    assert "without a chat template" in problems(tmp_path)["pretrain"]
