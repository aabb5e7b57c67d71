import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from offbeat.deploy.config.checks.unused import check_unused
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import (
    compose_document,
    compose_tree,
    dump_yaml,
    load_run,
    packaged_configs,
    parse_document,
    read_document,
    read_run,
    show_yaml,
)
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.target import load_config
from offbeat.deploy.run_marker import mark
from offbeat.envs.dataset.arithmetic import problems
from offbeat.envs.dataset.dots import write_dots
from offbeat.envs.dataset.programs import tasks
from offbeat.envs.frozen_lake.rows import conversations, pairs, write_rows
from offbeat.trainer.config.aliases import canonicalize
from tests.paths import CONFIGS, ROOT

QUICKSTART = CONFIGS / "quickstart.yaml"


def refused(*overrides: str, path: Path = QUICKSTART) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return {problem.path: problem.message for problem in caught.value.issues}


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_of_the_project_can_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of data pipelines name the files that their first lines say to make."""
    monkeypatch.chdir(tmp_path)
    for name, make in (("walks", conversations), ("lake", conversations), ("pairs", pairs)):
        for file in (name, f"{name}_val"):
            write_rows(tmp_path / "runs" / "data" / f"{file}.jsonl", make(2))
    for name, make in (("arithmetic", problems), ("programs", tasks)):
        for file, held_out in ((name, False), (f"{name}_val", True)):
            write_rows(tmp_path / "runs" / "data" / f"{file}.jsonl", make(held_out=held_out))
    for file, held_out in (("dots", False), ("dots_val", True)):
        write_dots(tmp_path / "runs" / "data" / f"{file}.jsonl", 8, held_out=held_out)
    (tmp_path / "runs" / "quickstart" / "checkpoints" / "step-000160").mkdir(parents=True)
    pretrain = compose_tree(path).get("pretrain", "tiny")
    unprepared = pretrain != "tiny" and not Path(pretrain).is_dir()
    tiny = ["pretrain=tiny", "++tiny.max_position_embeddings=8192", "++chat_template=null"]
    without = tiny if unprepared else []
    assert isinstance(load_run(path, without), RunConfig)


def test_the_file_of_every_key_is_accepted(tmp_path: Path):
    """Trained at night (tests/integration/test_every_key.py)."""
    overrides = [f"checkpoint_config.output_dir={tmp_path}", "rollout_batch_size=8", "sequence_length=1024"]
    config = read_run(ROOT / "tests" / "integration" / "data" / "every_key.yaml", overrides)
    assert [str(issue) for issue in check_unused(config)] == []


def parse_part(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.composer.ComposerError:  # part of a deploy file, with an alias of what is not shown
        return None


def test_files_and_documents_of_the_project_have_the_one_form():
    """No older or other spelling of a key, nor a value without effect."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [(page, block) for page in pages for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
    texts += [(path, path.read_text()) for path in sorted(CONFIGS.rglob("*.yaml"))]
    trees = [(path, tree) for path, text in texts if isinstance(tree := parse_part(text), dict)]
    assert len(trees) > 60
    assert [path for path, tree in trees if canonicalize(tree) != (tree, [])] == []


def test_overrides_replace_values_with_yaml_types():
    config = load_run(
        QUICKSTART,
        [
            "seed=7",
            "actor_train.training_args.learning_rate=1e-6",
            "output_dir=/tmp/somewhere",
            "whiten_advantages=true",
            "custom_envs.FrozenLake.env_config.size=5",
            "train_env_manager.num_groups_partition=[24]",
            "redis.url=redis://127.0.0.1:1234/0",
        ],
    )
    assert config.seed == 7
    assert config.actor_train.training_args.learning_rate == 1e-6
    assert config.output_dir == Path("/tmp/somewhere")
    assert config.whiten_advantages is True
    assert config.custom_envs["FrozenLake"].env_config["size"] == 5
    assert config.train_env_manager.num_groups_partition == (24,)
    assert config.redis.url == "redis://127.0.0.1:1234/0"


def test_small_floats_and_interpolations_are_parsed(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "custom_envs: {L: {env_type: frozen_lake}}\n"
        "actor_train: {training_args: {learning_rate: 1e-6}}\n"
        "train_env_manager: {num_env_groups: 8}\n"
        "max_steps: 10\nsave_steps: ${max_steps}\n"
    )
    config = load_run(path)
    assert config.actor_train.training_args.learning_rate == 1e-6
    assert config.save_steps == 10


def test_a_file_may_build_on_another_one(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("custom_envs: {L: {env_type: frozen_lake}}\nmax_steps: 5\nseed: 1\n")
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nseed: 2\n")
    config = load_run(tmp_path / "mine.yaml", ["train_env_manager.num_env_groups=8"])
    assert (config.max_steps, config.seed) == (5, 2)


def test_a_url_with_options_is_an_override_like_any_other():
    url = "rediss://:p%40ss@redis.example:6380/0?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=false"
    assert load_run(QUICKSTART, [f"redis.url={url}"]).redis.url == url
    assert load_run(QUICKSTART, [f"redis.url='{url}'"]).redis.url == url


def test_unknown_override_reports_path_and_nearest_key():
    found = refused("max_stepz=3", "actor_train.training_args.learning_rat=1.0", "nothing.like.it=1")
    assert found["max_stepz"] == "unknown key; did you mean `max_steps`?"
    assert "`actor_train.training_args.learning_rate`" in found["actor_train.training_args.learning_rat"]
    assert "nothing" in found


def test_wrong_type_reports_path_expectation_and_value():
    assert refused("seed=soon") == {"seed": "expected an integer, got 'soon' (a string)"}
    assert "`offbeat rollout CONFIG --engine config`" in refused("max_steps=0")["max_steps"]
    assert refused("max_steps=2.5") == {"max_steps": "expected an integer, got 2.5 (a number)"}


@pytest.mark.parametrize("override", ["seed", "=3", "seed=[1", "custom_envs.FrozenLake.env_type.x=1"])
def test_unparsable_override_is_rejected(override: str):
    assert all(refused(override).values())


def test_a_file_that_is_missing_or_no_mapping_is_refused(tmp_path: Path):
    assert "no such file" in refused(path=tmp_path / "nothing.yaml")[""]
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    assert refused(path=tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    assert refused(path=tmp_path / "broken.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]\n", "line 1: alias *a contains itself"),
        ("\nseed: " + "9" * 5000 + "\n", "a value of type int has at most 400 characters"),
        ("seed: !!int abc\n", "'abc' is no valid int"),
    ],
)
def test_a_file_that_python_could_not_parse_is_refused_in_words(tmp_path: Path, text: str, message: str):
    (tmp_path / "x.yaml").write_text(text)
    assert message in refused(path=tmp_path / "x.yaml")[""]


def test_an_override_of_too_many_digits_is_refused_in_words():
    assert "digits" in refused("seed=" + "9" * 5000)[""]


def test_numbers_dates_and_duplicate_keys_are_read_as_omegaconf_does():
    text = "a: 1e-6\nb: 2026-01-01\nc: .5\nd: on\ne: 0x1f\nf: 1_000\ng: ~\nh: [1.5e3, -.inf]\n"
    assert parse_document(text) == OmegaConf.to_container(OmegaConf.create(text))
    with pytest.raises(ConfigError, match="duplicate key 'a'"):
        parse_document("a: 1\na: 2")


def test_a_missing_value_of_an_interpolation_is_refused(tmp_path: Path):
    (tmp_path / "x.yaml").write_text("seed: ${nowhere}\n")
    assert "nowhere" in refused(path=tmp_path / "x.yaml")[""]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rewards.answer.weight=2", "rewards is a list: rewards.0.weight=2 (0 is answer)"),
        ("rewards.math.threshold=0.5", "rewards is a list: rewards.0.threshold=0.5 (0 is answer)"),
        ("rewards.9.weight=2", "rewards is a list: rewards.0.weight=2 (0 is answer)"),
        ("~rewards.answer", "rewards is a list: set it as a whole (rewards=[...])"),
        ("~rewards.0", "rewards is a list: set it as a whole (rewards=[...])"),
    ],
)
def test_an_element_of_a_list_has_a_number(override: str, says: str):
    """ROLL's `rewards` are a mapping."""
    with pytest.raises(ConfigError) as error:
        compose_tree(Path("rlvr"), ["seed=3", override])
    assert [issue.message for issue in error.value.issues] == [says]
    assert compose_tree(Path("rlvr"), ["rewards.0.weight=2"])["rewards"][0]["weight"] == 2


@pytest.mark.parametrize("write", [dump_yaml, show_yaml])
def test_the_shown_configuration_loads_as_the_same_one(tmp_path: Path, write: Callable[[RunConfig], str]):
    answers = ["custom_envs.FrozenLake.max_tokens_per_step=64", "actor_infer.generating_args.max_new_tokens=32"]
    config = load_run(QUICKSTART, ["seed=9", *answers])
    path = tmp_path / "shown.yaml"
    path.write_text(write(config))
    assert load_run(path) == config


@pytest.mark.parametrize("name", ["1e-5", "2e4", "1.5e3", "12e4567"])
def test_texts_that_look_like_numbers_stay_texts(tmp_path: Path, name: str):
    given = {"exp_name": name, "output_dir": str(tmp_path), "system_envs": {"COMMIT": name}}
    env = {"env_type": "frozen_lake", "env_config": {"answer": name, name: [name]}}
    config = read_document({**given, "custom_envs": {"A": env}})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert read_run(tmp_path / "config.yaml") == config
    assert read_run(tmp_path / "config.yaml", ["max_steps=3"]).exp_name == name


def test_documents_are_accepted_as_yaml_or_tree():
    config = load_run(QUICKSTART)
    assert read_document(dump_yaml(config)) == config


@pytest.mark.parametrize("overrides", [(), ("max_steps=3",)])
@pytest.mark.parametrize(
    "text",
    ["costs ${price}", "${oc.env:HOME}", "${${oc.env:HOME}}", "\\${x} \\\\${y} \\z {w} $HOME", "${", "}$", "a\\"],
)
def test_texts_of_a_written_configuration_are_not_resolved(tmp_path: Path, text: str, overrides: tuple[str, ...]):
    """`POST /runs` takes texts of others as JSON, and processes with the service's environment read the file."""
    env = {"env_type": "frozen_lake", "env_instruction": text}
    config = read_document({"exp_name": "x", "output_dir": str(tmp_path), "custom_envs": {"A": env}})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert read_run(tmp_path / "config.yaml", overrides).custom_envs["A"].env_instruction == text
    assert read_document(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "text", ["seed: ${oc.env:HOME}", "- 1", "a: [", "x" * 1_000_001, "", "!!python/object:os.system {}"]
)
def test_a_hostile_or_broken_document_is_refused(text: str):
    with pytest.raises(ConfigError):
        read_document(text)


@pytest.mark.parametrize("seed", [-1, 2**31, 2**64])
def test_seed_out_of_numpys_range_is_rejected(seed: int):
    assert "seed" in refused(f"seed={seed}")


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_infinite_numbers_of_free_tables_are_refused(value: str):
    """A run's record would have null in their place."""
    env = "custom_envs: {L: {env_type: gymnasium, env_config: {id: x, kwargs: {sizes: [1, VALUE]}}}}"
    with pytest.raises(ConfigError) as caught:
        read_document(env.replace("VALUE", value))
    (issue,) = caught.value.issues
    assert issue.path == "custom_envs.L.env_config.kwargs.sizes.1"
    assert issue.message.startswith(f"expected a finite number, got {float(value.replace('.', ''))}")


@pytest.mark.parametrize("content", [b"1", b"true", b"- a", b"words", b"\xff\xfe\x01", b"a: [", b""])
def test_file_without_mapping_is_rejected(tmp_path: Path, content: bytes):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert all(problem.message for problem in caught.value.issues)


def test_file_without_yaml_suffix_is_rejected(tmp_path: Path):
    path = tmp_path / "run.yml"
    path.write_text("custom_envs: {L: {env_type: frozen_lake}}\n")
    assert "only *.yaml files: rename run.yml" in refused(path=path)[""]


ROLL_ENVS = """
max_tokens_per_step: 64
turns: 3
unread: 1
custom_env:
  Lake:
    env_type: frozen_lake
    max_steps: ${turns}
    max_tokens_per_step: ${max_tokens_per_step}
    env_manager_cls: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
    agent_runner_cls: null
    use_thread_lock: true
    agent_template: "Turn {turn_idx}: {observation}, at most {max_response_length} tokens"
"""
ROLL_RUN = """
defaults: [envs@_here_]
max_tokens_per_step: 8
custom_envs: {Lake: "${custom_env.Lake}"}
train_env_manager: {num_env_groups: 8}
"""


def test_keys_that_only_other_keys_read_are_variables(tmp_path: Path):
    """As in ROLL's files: of a file in the defaults list, or read by `${name}`."""
    (tmp_path / "envs.yaml").write_text(ROLL_ENVS)
    path = tmp_path / "run.yaml"
    path.write_text(ROLL_RUN + "batch: 32\nrollout_batch_size: ${batch}\n")
    config = load_run(path)
    env = config.custom_envs["Lake"]
    assert (env.max_steps, env.max_tokens_per_step, config.rollout_batch_size) == (3, 8, 32)
    assert env.agent_template == "Turn {step}: {observation}, at most 8 tokens"
    assert load_run(path, ["turns=5"]).custom_envs["Lake"].max_steps == 5
    path.write_text(ROLL_RUN + "batch: 32\n")
    assert set(refused(path=path)) == {"batch"}
    assert set(refused("turnz=5", path=path)) == {"batch", "turnz"}


def test_a_document_for_a_mesh_has_absolute_paths_and_no_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(QUICKSTART.parent)
    tree = json.loads(compose_document(Path(QUICKSTART.name), ["exp_name=lake"]))
    assert (tree["exp_name"], tree["output_dir"]) == ("lake", str(QUICKSTART.parent / "runs/quickstart"))
    assert not any("device" in tree.get(role, {}) for role in ("actor_train", "actor_infer"))


def test_first_comments_are_whole_sentences():
    abouts = packaged_configs()
    assert abouts["rlvr_vision"].endswith("from random weights. Two CPU cores")
    assert all(abouts.values())


def test_the_saved_configuration_of_a_moved_run_names_its_new_folder(tmp_path: Path):
    config = load_run(QUICKSTART, [f"output_dir={tmp_path / 'first'}", "seed=7"])
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "config.yaml").write_text(dump_yaml(config))
    assert load_run(moved / "config.yaml").output_dir == tmp_path / "first", "nothing shows that it is a run's folder"
    mark(moved, "quickstart")
    assert load_run(moved / "config.yaml") == config.model_copy(update={"output_dir": moved})
    assert read_run(moved / "config.yaml").output_dir == moved
    assert load_run(moved / "config.yaml", [f"output_dir={tmp_path / 'other'}"]).output_dir == tmp_path / "other"
    assert load_config(moved / "config.yaml").output_dir == moved, "`offbeat rollout` plays its checkpoints"
    assert json.loads(compose_document(moved / "config.yaml"))["output_dir"] == str(moved)


def test_another_machine_is_told_the_saved_folder_unless_that_is_another_one_here(tmp_path: Path):
    saved, here = tmp_path / "saved", tmp_path / "here"
    here.mkdir()
    (here / "config.yaml").write_text(dump_yaml(load_run(QUICKSTART, [f"output_dir={saved}"])))
    mark(here, "quickstart")

    def sent(*overrides: str) -> str:
        return json.loads(compose_document(here / "config.yaml", overrides, is_remote=True))["output_dir"]

    assert sent() == str(saved), "a shared folder that has another name here"
    assert sent("output_dir=/mesh/x") == "/mesh/x"
    saved.symlink_to(here)
    assert sent() == str(saved)
    saved.unlink()
    saved.mkdir()
    assert sent() == str(here), "a copy"


def test_files_are_composed_by_several_threads_at_once():
    names = ("quickstart", "recipes/ppo", "recipes/dapo", "sokoban") * 3
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(lambda name: compose_tree(Path(name)), names))
    assert [tree["exp_name"] for tree in trees] == [Path(name).name for name in names]


def test_mistakes_in_an_included_file_are_refused(tmp_path: Path):
    """Its other keys are variables, as in ROLL's `examples/config/traj_envs.yaml`."""
    mistakes = "max_stepz: 7\nadv_estimatr: gae\ndual_clip_loss: true\nactor_trian: {num_threads: 2}\n"
    envs = "all_envs: {F: {env_type: frozen_lake}}\ncustom_env: {F: {env_type: frozen_lake}}\n"
    variables = "single_prompt_agent_template: x\nnum_nodes: 1\n"
    (tmp_path / "base.yaml").write_text(f"seed: 3\n{variables}{envs}{mistakes}")
    (tmp_path / "exp.yaml").write_text("defaults: [base, _self_]\ncustom_envs: {F: {env_type: frozen_lake}}\n")
    assert {*refused(path=tmp_path / "exp.yaml")} == {"max_stepz", "adv_estimatr", "dual_clip_loss", "actor_trian"}
    (tmp_path / "base.yaml").write_text(f"seed: 3\n{variables}{envs}")
    assert compose_tree(tmp_path / "exp.yaml") == {"seed": 3, "custom_envs": {"F": {"env_type": "frozen_lake"}}}
    (tmp_path / "base.yaml").write_text("max_stepz: 7\n")
    (tmp_path / "exp.yaml").write_text("defaults: [base, _self_]\nmax_steps: ${max_stepz}\n")
    assert compose_tree(tmp_path / "exp.yaml") == {"max_steps": 7}
