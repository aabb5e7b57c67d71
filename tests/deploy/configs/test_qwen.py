"""Qwen's configurations: what the model reads, how its answers end, and whether they can win."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from offbeat.deploy.config.checks.run import check_settings
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.loader import compose_tree, load_run, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.envs.prompts import fill_template
from offbeat.envs.registry import make
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.chat.tokenizer import load_tokenizer
from tests.paths import CONFIGS
from tests.qwen2 import END, STOP, write_qwen2

QWEN = [path for folder in ("qwen2.5-0.5b", "qwen3.5") for path in sorted((CONFIGS / folder).glob("*.yaml"))]
ONE_GPU = ("actor_infer.device=cuda", "actor_train.device=cuda")
each_config = pytest.mark.parametrize("path", QWEN, ids=lambda path: f"{path.parent.name}/{path.stem}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    write_qwen2(folder, [path.read_text() for path in QWEN])
    return folder


def load(path: Path, model: Path) -> RunConfig:
    return load_run(path, [f"pretrain={model}"])


@each_config
def test_the_model_reads_the_instruction_in_its_own_format(path: Path, model: Path):
    config = load(path, model)
    ((_, env),) = config.custom_envs.items()
    assert env.env_instruction
    user = fill_template(env.agent_template, observation="LAKE", step=1, actions_left=env.max_steps)
    ids = load_chat_format(model).first_prompt(env.system_prompt(""), user)
    assert load_tokenizer(model).decode(ids) == (
        f"<|im_start|>system\n{env.agent_system_template}\n{env.env_instruction}<|im_end|>\n"
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "{" not in user


def test_an_answer_ends_at_each_token_that_ends_a_text(model: Path):
    assert load_chat_format(model).stop_ids == tuple(load_tokenizer(model).convert_tokens_to_ids([STOP, END]))


@each_config
def test_an_answer_in_the_asked_form_counts_and_others_cost(path: Path, model: Path):
    config = load(path, model)
    ((_, custom),) = config.custom_envs.items()
    rng = np.random.default_rng(0)
    env = make(custom.env_type, custom.env_config)
    env.reset(seed=0)
    _, reward, _, _, info = env.step(env.random_answer(rng))
    assert (info["action_is_valid"], reward < 0) == (False, True), "without the tag"
    _, _, _, _, info = env.step(f"I choose <answer>{env.random_answer(rng)}</answer>")
    assert info["action_is_valid"]
    assert env.random_answer(rng) in ("Up", "Down", "Left", "Right") or path.stem == "webshop"


@each_config
def test_an_episode_of_longest_answers_fits_the_sequence(path: Path, model: Path):
    config = load(path, model)
    ((_, custom),) = config.custom_envs.items()
    chat, rng = load_chat_format(model), np.random.default_rng(0)
    env = make(custom.env_type, custom.env_config)
    observation, _ = env.reset(seed=0)
    length = 0
    for turn in range(custom.max_steps):
        user = fill_template(
            custom.agent_template, observation=observation, step=turn + 1, actions_left=custom.max_steps - turn
        )
        prompt = chat.next_prompt(user) if turn else chat.first_prompt(custom.system_prompt(""), user)
        length += len(prompt) + custom.max_tokens_per_step
        observation, *_ = env.step(f"<answer>{env.random_answer(rng)}</answer>")
    assert config.sequence_length / 4 < length <= config.sequence_length


@each_config
def test_the_commands_in_the_header_fit_one_gpu(path: Path, model: Path):
    lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines()]
    commands = [shlex.split(line)[3:] for line in lines if line.startswith("offbeat train ")]
    assert [len(overrides) for overrides in commands] == [1, 2]
    for overrides in commands:
        config = validate_tree(compose_tree(path, [*overrides, f"pretrain={model}", *ONE_GPU]))
        assert check_settings(config, cores=8.0, nodes=[ClusterNode("", "here", 1)]) == []
