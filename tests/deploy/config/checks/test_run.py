import json
from pathlib import Path

import pytest

from offbeat.deploy.config.checks.run import check_run, check_settings
from offbeat.deploy.config.loader import compose_tree, validate_tree
from tests.paths import QUICKSTART


def problems(*overrides: str, cores: float = 2) -> dict[str, str]:
    config = validate_tree(compose_tree(QUICKSTART, overrides))
    return {problem.path: problem.message for problem in check_run(config, cores=cores)}


def test_the_quickstart_can_run_on_two_cores():
    assert problems() == {}


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        (["rollout_batch_size=60"], "rollout_batch_size", "take 56 or 64"),
        (["rollout_batch_size=4"], "rollout_batch_size", "take 8"),
        (["train_env_manager.num_env_groups=4"], "train_env_manager.num_env_groups", "take at least 8, or"),
        (["rollout.max_env_num_per_worker=4"], "rollout.max_env_num_per_worker", "take at least 8"),
        (["train_env_manager.max_env_num_per_worker=4"], "train_env_manager.max_env_num_per_worker", "take at least 8"),
        (["rollout.num_workers=9"], "rollout.num_workers", "take rollout.num_workers <= 2"),
        (["actor_train.num_threads=3"], "actor_train.num_processes", "must not exceed 2"),
        (["actor_infer.max_model_len=128"], "sequence_length", "take at most 128"),
        (["sequence_length=1024"], "sequence_length", "take at most 512"),
        (["custom_envs.FrozenLake.max_tokens_per_step=512"], "custom_envs.FrozenLake.max_tokens_per_step", "no room"),
        (["train_env_manager.tags=[Lake]"], "train_env_manager.tags.0", "there is FrozenLake"),
        (["val_env_manager.tags=[Lake]"], "val_env_manager.tags.0", "there is FrozenLake"),
        (["warm_start.tag=Lake"], "warm_start.tag", "there is FrozenLake"),
        (["warm_start.demos=nowhere:play"], "warm_start.demos", "'nowhere'"),
        (["warm_start.demos=offbeat.envs.frozen_lake.demos:nobody"], "warm_start.demos", "careful_wandering"),
        (["warm_start.demos=play"], "warm_start.demos", "module:function"),
        (["custom_envs.FrozenLake.env_config.sise=4"], "custom_envs.FrozenLake.env_config.sise", "size"),
        (["custom_envs.FrozenLake.env_config.p=2"], "custom_envs.FrozenLake.env_config.p", "less than or equal to 1"),
        (["custom_envs.FrozenLake.env_type=frozen_lakes"], "custom_envs.FrozenLake.env_type", "frozen_lake"),
        (["weights.transport=nccl"], "weights.transport", "take shm"),
        (["weights.transport=ipc"], "weights.transport", "take shm"),
        (["actor_infer.generating_args.temperature=0"], "actor_infer.generating_args.temperature", "positive"),
        (["control.host=0.0.0.0"], "control.host", "control.token"),
        (
            ["+custom_envs.FrozenLake.agent_runner.path=offbeat.deploy.agents.walker:run"],
            "custom_envs.FrozenLake.agent_runner.path",
            "it has play",
        ),
        (
            ["+custom_envs.FrozenLake.agent_runner={path: 'offbeat.deploy.agents.walker:play', timeout_s: 900}"],
            "custom_envs.FrozenLake.agent_runner.timeout_s",
            "the episode ends after episode_timeout_s, 600 s: take at most that, or episode_timeout_s: 900",
        ),
        (
            ["+custom_envs.FrozenLake.agent_runner.command=[no_such_program]"],
            "custom_envs.FrozenLake.agent_runner.command",
            "no program 'no_such_program'",
        ),
        (["pretrain=/nowhere"], "pretrain", "no such folder"),
        (["redis.url=http://x"], "redis.url", "redis://"),
        (["redis.server=/nowhere"], "redis.server", "no such file"),
        (["resume_from_checkpoint=true", "output_dir=/nowhere"], "resume_from_checkpoint", "no run in /nowhere"),
        (["resume_from_checkpoint=/nowhere"], "resume_from_checkpoint", "no such folder"),
        (["adv_estimator=gae", "+value_targets=vtrace"], "value_targets", "old_logprobs=recompute"),
        (["use_kl_loss=true"], "kl_loss_coef", "positive"),
        (["add_token_level_kl=true"], "init_kl_coef", "positive"),
        (["adv_estimator=gae", "critic_warmup=200"], "critic_warmup", "below max_steps"),
    ],
)
def test_invalid_combinations_are_rejected_with_a_remedy(overrides: list[str], path: str, says: str):
    found = problems(*overrides)
    assert path in found, found
    assert says in found[path]


def test_group_of_one_is_rejected():
    found = problems("train_env_manager.group_size=1", "train_env_manager.num_env_groups=64")
    assert "at least 2" in found["train_env_manager.group_size"]


def test_cuda_without_gpu_is_rejected():
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has one")
    assert problems("actor_train.device=cuda", "actor_infer.device=cuda").keys() >= {
        "actor_train.device",
        "actor_infer.device",
    }


def test_token_allows_other_interfaces():
    assert problems("control.host=0.0.0.0", "control.token=secret") == {}


@pytest.mark.parametrize("token", ["", " ", "\n"])
@pytest.mark.parametrize("name", ["token", "read_token"])
def test_an_empty_token_is_refused_but_read_of_a_recorded_run(name: str, token: str, caplog: pytest.LogCaptureFixture):
    """As of a variable of the environment that is not set; earlier builds accepted it."""
    tree = compose_tree(QUICKSTART, ["control.token=secret"])
    tree["control"][name] = token
    config = validate_tree(tree)
    (issue,) = check_run(config, cores=2)
    assert (issue.path, issue.message.partition(":")[0]) == (
        f"control.{name}",
        "is empty, so that calls would need none",
    )
    assert check_run(config, cores=2, started=True) == []
    assert f"{issue} (accepted, because the run was started with it)" in caplog.text


@pytest.mark.parametrize("token", ["schlüssel", "two\nlines", "secret ", "secret\n"])
@pytest.mark.parametrize("name", ["token", "read_token", "tokens.0.token"])
def test_a_token_that_no_call_can_carry_is_refused(name: str, token: str):
    tree = compose_tree(QUICKSTART, ["control.token=secret"])
    tree["control"] |= {"tokens": [{"token": token}]} if name == "tokens.0.token" else {name: token}
    config = validate_tree(tree)
    (issue,) = check_run(config, cores=2)
    assert issue.path == f"control.{name}"
    assert issue.message.startswith("has characters that no call can carry: take printable ASCII")
    assert check_run(config, cores=2, started=True) == []
    assert token in [grant.token for grant in config.control.to_tokens().grants], "the service of such a run starts"


def test_a_token_may_have_spaces():
    assert problems("control.token='correct horse battery'") == {}


def test_a_recorded_run_without_a_token_stays_on_its_host():
    config = validate_tree(compose_tree(QUICKSTART, ["control.host=0.0.0.0", "control.token=''"]))
    assert [issue.path for issue in check_run(config, cores=2, started=True)] == ["control.host"]


def test_more_cores_allow_more_workers():
    assert problems("rollout.num_workers=9", cores=6) == {}


def test_all_issues_are_returned_together():
    assert len(problems("rollout_batch_size=60", "sequence_length=1024", "control.host=0.0.0.0")) == 3


@pytest.mark.parametrize(
    ("files", "path", "says"),
    [
        ({}, "pretrain", "no tokenizer"),
        ({"tokenizer.json": "{}"}, "pretrain", "config.json"),
        ({"tokenizer.json": "{}", "config.json": "["}, "pretrain", "config.json"),
        (
            {"tokenizer.json": "{}", "config.json": json.dumps({"model_type": "qwen2"})},
            "pretrain",
            "not a valid tokenizer",
        ),
        (
            {"tokenizer.json": "{}", "config.json": json.dumps({"max_position_embeddings": 256})},
            "sequence_length",
            "at most 256",
        ),
        (
            {"tokenizer.json": "{}", "config.json": json.dumps({"hidden_size": 64, "num_attention_heads": 8})},
            "pretrain",
            "at least 32",
        ),
    ],
)
def test_model_folder_contents_are_checked(tmp_path: Path, files: dict[str, str], path: str, says: str):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    config = validate_tree(compose_tree(QUICKSTART, [f"pretrain={tmp_path}"]))
    found = [(problem.path, problem.message) for problem in check_run(config, cores=2)]
    assert any(where == path and says in message for where, message in found), found


def test_first_prompt_that_fills_the_context_is_rejected():
    found = problems("sequence_length=24", "custom_envs.FrozenLake.max_tokens_per_step=4")
    assert "first prompt" in found["sequence_length"]


def test_tiny_policy_needs_the_envs_words():
    found = problems(
        "custom_envs.FrozenLake.env_type=gymnasium.envs.classic_control:CartPoleEnv",
        "~custom_envs.FrozenLake.env_config",
    )
    assert "words" in found["pretrain"]


@pytest.mark.parametrize("text", ["def play(:\n", "raise RuntimeError('no licence')\n", "import nowhere\n"])
def test_errors_in_user_modules_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    (tmp_path / "broken_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = ("warm_start.demos", "custom_envs.FrozenLake.env_type", "group_filter_cls", "track_with")
    found = problems(*(f"++{path}=broken_module:Mine" for path in named))
    assert {path.removesuffix(".0") for path in found} >= set(named), found


def test_traces_need_opentelemetry(monkeypatch: pytest.MonkeyPatch):
    endpoint = "telemetry.otlp_endpoint=http://127.0.0.1:4318"
    assert "telemetry.otlp_endpoint" not in problems(endpoint)
    monkeypatch.setattr("offbeat.deploy.config.checks.run.find_spec", lambda _: None)
    assert "pip install 'offbeat[otel]'" in problems(endpoint)["telemetry.otlp_endpoint"]


@pytest.mark.parametrize("name", ["A=B", ""])
def test_an_impossible_environment_variable_is_refused(name: str):
    config = validate_tree({**compose_tree(QUICKSTART), "system_envs": {name: 1}})
    (issue,) = check_settings(config, cores=2)
    assert issue.path == "system_envs"
    assert issue.message.startswith(f"{name!r} is no name of an environment variable")
