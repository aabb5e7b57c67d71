"""Checks of `pipeline: rlvr`, and of rewards, before the start."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from offbeat.benchmarks.harness.pretrained import FORGETTING
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import load_run, read_document, read_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import collect_words
from offbeat.envs.dataset.arithmetic import write_problems
from offbeat.services.chat.vision import encode_png
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.tiny import VISION_TEMPLATE, write_tiny_policy
from tests.fakes_rollout import SeatsEnv
from tests.paths import CONFIGS, QUICKSTART

MIXED = "custom_envs.mixed"
SEES = "tiny.vision={}"
LEVELS = "offbeat.envs.task_samplers:Levels"


def load(folder: Path, *overrides: str, source: Path = CONFIGS / "rlvr.yaml") -> RunConfig:
    for name, held_out in (("rows", False), ("val", True)):
        if not (folder / f"{name}.jsonl").exists():
            write_problems(folder / f"{name}.jsonl", held_out=held_out)
    files = [f"data.dataset_name={folder / 'rows.jsonl'}", f"data.val_dataset_name={folder / 'val.jsonl'}"]
    return load_run(source, [*files, f"output_dir={folder / 'run'}", *overrides])


def refused(folder: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides)
    return {issue.path: issue.message for issue in caught.value.issues}


def test_envs_of_type_prompt_read_the_dataset(tmp_path: Path):
    config = load(tmp_path)
    read = config.custom_envs["mixed"].env_config
    assert (read["dataset_name"], read["val_dataset_name"]) == (
        str(tmp_path / "rows.jsonl"),
        str(tmp_path / "val.jsonl"),
    )
    assert config.uses_engine
    assert not config.reads_data
    assert {"18", r"\boxed{", "}", "+", "-", "="} <= {*collect_words(config)}
    (tmp_path / "saved.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    assert read_run(tmp_path / "saved.yaml") == config


def test_epochs_count_the_rows_of_the_domains(tmp_path: Path):
    rows = sum(1 for _ in (tmp_path / "rows.jsonl").open()) if load(tmp_path) else 0
    epochs = ("data.num_train_epochs=2", "~max_steps")
    assert load(tmp_path, *epochs).max_steps == -(-2 * rows // 8)
    one = (
        "train_env_manager.tags=[mixed]",
        "~data.domain_interleave_probs.addition",
        "data.domain_interleave_probs.mixed=1.0",
        "val_env_manager.tags=[mixed]",
    )
    assert load(tmp_path, *epochs, *one, "data.tag_included={mixed: [mixed]}").max_steps < 2 * rows // 8


@pytest.mark.parametrize(
    ("override", "path", "message"),
    [
        ("rewards=[]", "rewards", "nothing scores the answers"),
        ("rewards=[{name: a, kind: math_rule, tags: [mixed]}]", "rewards", "no reward scores tag 'addition'"),
        ("rewards=[{name: a, kind: function, path: 'nowhere:f'}]", "rewards.0", "nowhere"),
        ("rewards=[{name: a, kind: reward_model, model_args: {model_name_or_path: nowhere}}]",
         "rewards.0.model_args.model_name_or_path", "no model in nowhere"),
        ("combine=product", None, ""),
        ("adv_estimator=gdpo", None, ""),
        ("combine=gate", "combine", "gate needs a reward with a threshold"),
        ("~data.domain_interleave_probs.mixed", "data.domain_interleave_probs", "name each training tag once"),
        ("data.domain_interleave_probs.mixed=0.6", "data.domain_interleave_probs", "sum to 1, not to 1.1"),
        ("data.tag_included.minus=[mixed]", "data.tag_included.minus", "no tag 'minus' in custom_envs"),
        ("data.tag_included.addition=[mixed]", "data.tag_included.mixed", "'mixed' belongs to addition, too"),
        ("data.tag_key=kind", "data.dataset_name", "no row is of addition: none has addition in the column 'kind'"),
        ("data.prompt_key=question", "data.dataset_name", "rows.jsonl:1: question: expected a text or a list"),
        ("data.images_key=image", "data.images_key", "no row of"),
        ("data.ground_truth_key=reward_model.ground_truth", "data.ground_truth_key", "there is id, prompt"),
        ("data.prompt_length=64", "data.prompt_length", "leave no room for an answer in a sequence_length of 64"),
        ("data.train_on=last", "data.train_on", "has no effect with pipeline: rlvr"),
        ("data.response_key=answer", "data.response_key", "has no effect with pipeline: rlvr"),
        ("val_batch_size=32", "val_batch_size", "each evaluation takes every validation row once"),
        (f"train_env_manager.task_sampler.path={LEVELS}", "train_env_manager.task_sampler", "rows are the tasks"),
    ],
)  # fmt: skip
def test_what_can_not_work_is_refused(override: str, path: str | None, message: str, tmp_path: Path):
    if path is None:
        load(tmp_path, override)
        return
    issues = refused(tmp_path, override)
    assert message in issues[path], issues


def test_rewards_that_are_not_added_can_not_be_compared_one_by_one(tmp_path: Path):
    assert "take weighted in place of product" in refused(tmp_path, "adv_estimator=gdpo", "combine=product")["combine"]
    with pytest.raises(ConfigError, match=r"adv_estimator: gdpo compares each of the rewards: name some"):
        load_run(QUICKSTART, ["adv_estimator=gdpo"])


def test_replicas_of_rewards_need_cpus(tmp_path: Path):
    issues = refused(tmp_path, "rewards.0.num_replicas=64")
    assert "and rewards of 64 CPUs, need" in issues["rollout.num_workers"]


def test_keys_of_prompts_have_no_effect_elsewhere(tmp_path: Path):
    write_problems(tmp_path / "rows.jsonl", held_out=False)
    with pytest.raises(ConfigError, match=r"data.prompt_length: has no effect with pipeline: sft"):
        load(tmp_path, "data.prompt_length=24", source=CONFIGS / "sft.yaml")
    with pytest.raises(ConfigError, match=r"rewards.*has no effect with pipeline=\"?sft"):
        load(tmp_path, "rewards=[{name: a, kind: regex, pattern: a}]", source=CONFIGS / "sft.yaml")


JUDGE = "{name: judge, kind: llm_judge, url: 'http://127.0.0.1:1/v1', model: m, weight: 0.5, tags: [FrozenLake]}"
COUNT = "{name: left, kind: regex, pattern: Left}"


@pytest.mark.parametrize("pipeline", ["agentic", "online_dpo"])
def test_episodes_of_envs_have_rewards(pipeline: str):
    changes = ["pipeline=online_dpo", "~adv_estimator", "~reward_normalization", "~pg_variant", "~pg_clip", "~zero_variance",
               "~entropy_loss_coef", "~entropy_loss_scheduler_type"] if pipeline == "online_dpo" else []  # fmt: skip
    config = load_run(QUICKSTART, [f"rewards=[{JUDGE}, {COUNT}]", *changes])
    assert config.scoring is not None
    assert [reward.name for reward in config.scoring.of_tag("FrozenLake")] == ["judge", "left"]


def test_rewards_of_episodes_can_be_compared_one_by_one():
    assert load_run(QUICKSTART, [f"rewards=[{JUDGE}, {COUNT}]", "adv_estimator=gdpo"]).reward_weights["judge"] == 0.5
    with pytest.raises(ConfigError, match="take weighted in place of product"):
        load_run(QUICKSTART, [f"rewards=[{COUNT}]", "adv_estimator=gdpo", "combine=product"])


def test_a_combination_without_rewards_is_refused():
    with pytest.raises(ConfigError, match="combine: gate has no effect without rewards: name some, or leave it out"):
        load_run(QUICKSTART, ["combine=gate"])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("{name: a, kind: math_rule}", r"rewards.0.kind: math_rule compares with a row of data"),
        ("{name: a, kind: ifeval}", r"rewards.0.kind: ifeval compares with a row of data"),
        ("{name: a, kind: nemo_gym, url: 'http://a'}", r"rewards.0.kind: nemo_gym compares with a row of data"),
        ("{name: a, kind: regex, pattern: a, tags: [Lake]}", r"rewards: reward 'a': there is no tag 'Lake'; there is Froz"),
        ("{name: a, kind: function, path: 'nowhere:f'}", r"rewards.0: reward 'a': nowhere:f can't be imported"),
    ],
)  # fmt: skip
def test_rewards_that_can_not_score_episodes_are_refused(reward: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_run(QUICKSTART, [f"rewards=[{reward}]"])


class WordySeatsEnv(SeatsEnv):
    words = ("Go", "P", "G", "O", "Left")


def test_rewards_of_a_game_of_seats_are_refused():
    env = f"{{env_type: '{__name__}:WordySeatsEnv', max_steps: 4, max_tokens_per_step: 4, execution: inline}}"
    changes = ["~warm_start", f"custom_envs.Game={env}", "train_env_manager.tags=[Game]", "val_env_manager.tags=[Game]"]
    with pytest.raises(
        ConfigError, match=r"rewards: reward 'left' scores one conversation, and Game has one of each seat"
    ):
        load_run(QUICKSTART, [f"rewards=[{COUNT}]", *changes])
    assert load_run(QUICKSTART, ["rewards=[{name: left, kind: regex, pattern: a, tags: [FrozenLake]}]", *changes[:2]])


def test_agents_answer_rows(tmp_path: Path):
    agents = [
        f"custom_envs.{tag}.agent_runner.path=tests.played_agents:answers_messages" for tag in ("mixed", "addition")
    ]
    assert load(tmp_path, *agents[:1], "data.prompt_length=40").custom_envs["mixed"].agent_runner
    assert load(tmp_path, *agents, "~data.prompt_length")
    issues = refused(tmp_path, *agents)
    assert "agents, which write the prompts" in issues["data.prompt_length"]


def test_a_reward_models_folder_is_relative_to_the_services(tmp_path: Path):
    rewards = [{"name": "a", "kind": "reward_model", "model_args": {"model_name_or_path": "models/a"}}]
    (tmp_path / "models/a").mkdir(parents=True)
    config = read_document({"pipeline": "rlvr", "rewards": rewards}, working_dir=tmp_path)
    assert config.rewards[0].model_dump()["model_args"]["model_name_or_path"] == tmp_path / "models/a"


def write_shown(folder: Path, side: int = 64) -> None:
    png = base64.b64encode(encode_png(np.zeros((side, side, 3), dtype=np.uint8))).decode()
    for name in ("rows", "val"):
        rows = [{"prompt": "what", "ground_truth": "red", "tag": tag, "images": [f"data:image/png;base64,{png}"]}
                for tag in ("addition", "mixed")]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_with_images_are_valid_for_a_policy_that_sees(tmp_path: Path):
    write_shown(tmp_path)
    config = load(tmp_path, SEES, "~warm_start", "data.images_key=images")
    assert config.custom_envs["mixed"].env_config["images_key"] == "images"


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        ((), "data.dataset_name", "its rows have images, and the policy has no image input: set tiny.vision"),
        ((SEES, "warm_start.steps=1"), "warm_start", "demonstrations have no images of rows"),
        ((SEES, f"{MIXED}.agent_template='{{image}} {{observation}}'"), f"{MIXED}.agent_template", "leave {image} out"),
        ((SEES, f"{MIXED}.env_manager_cls=StepEnvManager"), f"{MIXED}.env_manager_cls", "take TrajEnvManager"),
        ((SEES, f"{MIXED}={{env_type: frozen_lake, max_steps: 1, max_tokens_per_step: 1}}"), f"{MIXED}.env_type",
         "frozen_lake does not show the rows' images: take prompt"),
        ((SEES, "data.prompt_length=4"), "data.dataset_name", "of mixed take at least 4 tokens, and prompts have 4"),
    ],
)  # fmt: skip
def test_prompts_with_images_that_can_not_be_shown_are_refused(
    overrides: tuple[str, ...], path: str, message: str, tmp_path: Path
):
    write_shown(tmp_path)
    warm = () if any("warm_start" in each for each in overrides) else ("~warm_start",)
    issues = refused(tmp_path, *overrides, *warm)
    assert message in issues[path], issues


def test_an_image_that_can_not_be_read_is_reported_with_its_line(tmp_path: Path):
    write_shown(tmp_path)
    line = {"prompt": "what", "tag": "mixed", "images": ["none.png"]}
    with (tmp_path / "val.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    issues = refused(tmp_path, SEES, "~warm_start")
    assert "val.jsonl:3: images[0]: " in issues["data.val_dataset_name"]


def test_images_of_rows_are_shown_by_the_configured_template(tmp_path: Path):
    write_shown(tmp_path)
    write_tiny_policy(tmp_path / "policy", TinyPolicyConfig(vision=TinyVisionConfig(depth=1)), ("what", "red"))
    (tmp_path / "policy" / "chat_template.jinja").write_text(FORGETTING)
    (tmp_path / "vision.jinja").write_text(VISION_TEMPLATE)
    model = (f"pretrain={tmp_path / 'policy'}", "~tiny", "~warm_start")
    assert "keeps earlier turns" in refused(tmp_path, *model)["pretrain"]
    assert load(tmp_path, *model, f"chat_template={tmp_path / 'vision.jinja'}").chat_template
    (tmp_path / "vision.jinja").write_text(FORGETTING)
    issues = refused(tmp_path, *model, f"chat_template={tmp_path / 'vision.jinja'}")
    assert "keeps earlier turns" in issues["chat_template"]


def group_reward(**changes: object) -> str:
    entry = {"name": "better", "kind": "llm_judge", "scope": "group", "url": "'http://a/v1'", "model": "m", **changes}
    return f"rewards=[{{{', '.join(f'{key}: {value}' for key, value in entry.items())}}}]"


def test_rewards_that_compare_need_members_to_compare(tmp_path: Path):
    one = ("train_env_manager.group_size=1", "adv_estimator=reinforce", "~zero_variance", "~max_refill_ratio")
    issues = refused(tmp_path, group_reward(), *one, "reward_normalization.method=identity")
    assert "take a train_env_manager.group_size of at least 2" in issues["rewards.0.scope"]
    remax = ("adv_estimator=remax", "reward_normalization.method=identity")
    for more in ((), ("train_env_manager.group_size=1",)):
        issues = refused(tmp_path, group_reward(), *remax, *more)
        assert "needs the reward of a greedy episode" in issues["rewards.0.scope"]
    few = refused(tmp_path, group_reward(num_partners=8))
    assert few["rewards.0.num_partners"] == "a group of 8 has 7 others: take at most these, or leave it out for all"
    assert load(tmp_path, group_reward(num_partners=7), "eval_steps=0").rewards[0].is_of_group


def test_evaluations_need_a_reward_that_scores_an_answer_alone(tmp_path: Path):
    message = refused(tmp_path, group_reward())["rewards"]
    assert message.startswith("evaluations have no groups, and all rewards of mixed compare them"), message
    length = "{name: length, kind: regex, pattern: a, weight: 0}"
    assert len(load(tmp_path, f"{group_reward()[:-1]}, {length}]").rewards) == 2
    assert load(tmp_path, group_reward(), "eval_steps=0").rewards
    assert load_run(QUICKSTART, [group_reward()]).rewards, "episodes of envs have the env's own"


def test_a_reward_of_groups_that_only_evaluations_could_have_is_refused(tmp_path: Path):
    train = ("train_env_manager.tags=[addition]", "~data.domain_interleave_probs")
    rewards = "rewards=[{name: answer, kind: math_rule}, " + group_reward(tags="[mixed]").removeprefix("rewards=[")
    issues = refused(tmp_path, rewards, *train)
    assert issues == {
        "rewards.1.tags": "it compares groups, which only training has: name one of addition, or leave tags out"
    }


def test_what_a_judges_template_lacks_is_named(tmp_path: Path):
    issues = refused(tmp_path, group_reward(compare="ranking", template="'{prompt}'"))
    assert any("template has no {responses}" in message for message in issues.values()), issues
