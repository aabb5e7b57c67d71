"""Rights: every key that names code, a program or a folder is compared with them."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from offbeat.deploy.config.loader import validate_tree
from offbeat.deploy.config.rights import check_rights
from offbeat.deploy.config.run import RunConfig
from offbeat.services.control.rights import Rights
from offbeat.trainer.config.aliases import ENGINE

OWN = {"custom_envs": {"A": {"env_type": "frozen_lake"}}}

NAMING: dict[str, tuple[dict[str, Any], str]] = {
    "custom_envs.*.env_type": ({"custom_envs": {"A": {"env_type": "evil:Env"}}}, "custom_envs.A.env_type"),
    "custom_envs.*.env_config": (
        {"custom_envs": {"A": {"env_type": "gymnasium", "env_config": {"id": "evil:Env-v0"}}}},
        "custom_envs.A.env_config.id",
    ),
    "custom_envs.*.agent_runner.path": (
        {"custom_envs": {"A": {"env_type": "frozen_lake", "agent_runner": {"path": "evil:play"}}}},
        "custom_envs.A.agent_runner.path",
    ),
    "custom_envs.*.agent_runner.command": (
        {"custom_envs": {"A": {"env_type": "frozen_lake", "agent_runner": {"command": ["sh"]}}}},
        "custom_envs.A.agent_runner.command",
    ),
    "custom_envs.*.agent_runner.python": (
        {
            "custom_envs": {
                "A": {"env_type": "frozen_lake", "agent_runner": {"path": "my_envs:play", "python": "/bin/evil"}}
            }
        },
        "custom_envs.A.agent_runner.python",
    ),
    "train_env_manager.task_sampler.path": (
        {"train_env_manager": {"task_sampler": {"path": "evil:Sampler"}}},
        "train_env_manager.task_sampler.path",
    ),
    "val_env_manager.task_sampler.path": (
        {"val_env_manager": {"task_sampler": {"path": "evil:Sampler"}}},
        "val_env_manager.task_sampler.path",
    ),
    "warm_start.demos": ({"warm_start": {"demos": "evil:demos", "tag": "A"}}, "warm_start.demos"),
    "group_filter_cls": (
        {"reward_normalization": {}, "group_filter_cls": "evil:Filter"},
        "group_filter_cls",
    ),
    "adv_estimator": ({"adv_estimator": "evil:estimate"}, "adv_estimator"),
    "pg_variant": ({"pg_variant": "evil:loss"}, "pg_variant"),
    "reward_shaping.function": ({"reward_shaping": {"function": "evil:shape"}}, "reward_shaping.function"),
    "train_infer_correction.function": (
        {"train_infer_correction": {"function": "evil:correct"}},
        "train_infer_correction.function",
    ),
    "track_with": ({"track_with": ["tensorboard", "evil:Tracker"]}, "track_with.1"),
    "tracker_kwargs": (
        {"tracker_kwargs": {"tensorboard": {"log_dir": "/etc/tb"}}},
        "tracker_kwargs.tensorboard.log_dir",
    ),
    "rewards.path": (
        {"pipeline": "rlvr", "rewards": [{"name": "r", "kind": "function", "path": "evil:score"}]},
        "rewards.0.path",
    ),
    "rewards.strategy_args.strategy_config": (
        {
            "pipeline": "rlvr",
            "rewards": [
                {
                    "name": "r",
                    "kind": "llm_judge",
                    "model_args": {"model_name_or_path": "judge"},
                    "strategy_args": {"strategy_config": {"worker_cls": "evil.Worker"}},
                }
            ],
        },
        "rewards.0.strategy_args.strategy_config.worker_cls",
    ),
    "rewards.api_key_env": (
        {"pipeline": "rlvr", "rewards": [{"name": "r", "kind": "http", "url": "http://x", "api_key_env": "SECRET"}]},
        "rewards.0.api_key_env",
    ),
    "redis.server": ({"redis": {"server": "/bin/evil"}}, "redis.server"),
    "actor_infer.strategy_args.python": (
        {"actor_infer": {"strategy_args": {"strategy_name": "sglang", "python": "/bin/evil"}}},
        "actor_infer.strategy_args.python",
    ),
    ENGINE: (
        {"actor_infer": {"strategy_args": {"strategy_config": {"worker_cls": "evil.Worker"}}}},
        f"{ENGINE}.worker_cls",
    ),
    "system_envs": ({"system_envs": {"PYTHONPATH": "/evil"}}, "system_envs.PYTHONPATH"),
    "checkpoint_config.output_dir": (
        {"checkpoint_config": {"output_dir": "s3://elsewhere/c"}},
        "checkpoint_config.output_dir",
    ),
    "logging_dir": ({"logging_dir": "/etc/logs"}, "logging_dir"),
    "render_save_dir": ({"render_save_dir": "/etc/episodes"}, "render_save_dir"),
    "actor_train.strategy_args.strategy_config": (
        {"actor_train": {"strategy_args": {"strategy_config": {"compile": {"backend": "evil.backend"}}}}},
        "actor_train.strategy_args.strategy_config.compile.backend",
    ),
    "output_dir": ({"output_dir": "/etc"}, "output_dir"),
    "telemetry.otlp_endpoint": ({"telemetry": {"otlp_endpoint": "http://evil:4318"}}, "telemetry.otlp_endpoint"),
    "weights.url": ({"weights": {"url": "s3://elsewhere/w"}}, "weights.url"),
    "resume_from_checkpoint": ({"resume_from_checkpoint": "/etc/checkpoint-1"}, "resume_from_checkpoint"),
}
"""Key -> a configuration that names something by it, and the key that is refused."""
PLAIN = {
    "teacher.*.model_args.model_name_or_path": "read as data",
    "critic.model_args.model_name_or_path": "read as data",
    "reference.model_args.model_name_or_path": "read as data",
    "reward_pretrain": "read as data",
    "checkpoint_config.type": "a protocol, restricted by a pattern",
    "custom_envs.*.env_instruction": "text",
    **dict.fromkeys(
        (f"{role}.generating_args.stop_strings" for role in ("actor_infer", "train_env_manager", "val_env_manager")),
        "text",
    ),
    "teacher.*.tag_included": "tags",
    "reward_shaping.format_metric": "a metric's name",
    "pretrain": "read as data",
    "data.tag_included": "values of a column",
    "rewards.name": "restricted by a pattern",
    "rewards.tags": "tags",
    "rewards.pattern": "a regular expression, matched within a time limit",
    "rewards.answer_pattern": "a regular expression",
    "rewards.args": "arguments of a function that `path` names",
    "rewards.ground_truth_field": "a key of a request",
    "rewards.url": "asked for scores",
    "rewards.model": "a name at the URL",
    "rewards.extra_body": "keys of a request",
    "rewards.template": "text with fixed fields",
    "rewards.system_prompt": "text",
    "rewards.model_args.model_name_or_path": "read as data",
    **dict.fromkeys((f"rewards.{key}_key" for key in ("score", "compared", "rubric", "tests")), "a column or key"),
    "data.dataset_name": "read as data",
    "data.val_dataset_name": "read as data",
    **dict.fromkeys(
        (
            f"data.{key}_key"
            for key in (
                "messages",
                "prompt",
                "query",
                "response",
                "system",
                "chosen",
                "rejected",
                "completion",
                "label",
                "tools",
                "tag",
                "images",
                "ground_truth",
                "margin",
            )
        ),
        "a column",
    ),
    "chat_template": "a name, text rendered in a sandbox, or a file *.jinja read as such",
    "warm_start.tag": "a tag",
    "actor_train.model_args.adapter_name_or_path": "read as data",
    "actor_train.model_args.lora_target": "names of layers",
    "actor_train.training_args.lr_scheduler_kwargs": "numbers by the names of a fixed table",
    "custom_envs.*.agent_system_template": "text",
    "custom_envs.*.agent_template": "text with fixed fields",
    "custom_envs.*.tool_call_parser": "a name in vLLM's registry",
    "custom_envs.*.agent_runner.tool_call_parser": "a name in vLLM's registry",
    "train_env_manager.tags": "tags",
    "train_env_manager.task_sampler.args": "arguments of a class that `path` names",
    "val_env_manager.tags": "tags",
    "val_env_manager.task_sampler.args": "arguments of a class that `path` names",
    "actor_infer.app": "a Serve application's name",
    "exp_name": "restricted by a pattern",
    "redis.url": "runs of a service use its Redis",
    "control.host": "of the run's own service",
    "control.token": "of the run's own service",
    "control.read_token": "of the run's own service",
    "control.allow_modules": "of the run's own service",
    "control.output_roots": "of the run's own service",
    "control.tokens.token": "of the run's own service",
    "control.tokens.token_file": "of the run's own service",
    "control.tokens.allow_modules": "of the run's own service",
    "control.tokens.output_roots": "of the run's own service",
    "tinker.host": "of `offbeat tinker`, which runs no configuration of others",
    "tinker.keys_file": "of `offbeat tinker`, which runs no configuration of others",
    "tinker.model_name": "a name for clients",
}
"""Keys that take a text and name neither code nor a place to write to, and why."""


def trial(**env_config: Any) -> dict[str, Any]:
    """Return an env whose episodes Harbor runs."""
    return {"env_type": "harbor", "env_config": {"played_by": "agent", **env_config}}


def text_keys(model: type[BaseModel], before: tuple[str, ...] = ()) -> set[str]:
    """Keys that take a text, a path or any JSON value."""
    keys = {".".join(before)} if model.model_config.get("extra") == "allow" else set[str]()
    for name, field in model.model_fields.items():
        if _takes_text(field.annotation):
            keys.add(".".join((*before, name)))
        for path, nested in _models(field.annotation, (*before, name)):
            keys |= text_keys(nested, path)
    return keys


def _takes_text(annotation: Any) -> bool:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return False
    if annotation is str or (isinstance(annotation, type) and issubclass(annotation, Path)):
        return True
    if "JsonValue" in str(annotation):
        return True
    if origin is dict:
        return _takes_text(arguments[1])  # names that the user chooses are labels
    return any(_takes_text(each) for each in (arguments[:1] if origin is Annotated else arguments))


def _models(annotation: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(path, annotation)]
    if get_origin(annotation) is dict:
        return _models(get_args(annotation)[1], (*path, "*"))
    return [found for each in get_args(annotation) for found in _models(each, path)]


def test_every_key_that_takes_a_text_is_known_to_name_code_or_not():
    """A new key belongs into `deploy/config/rights.py` and `NAMING`, or into `PLAIN` with a reason."""
    assert text_keys(RunConfig) == {*NAMING, *PLAIN}


@pytest.mark.parametrize("key", NAMING)
def test_code_programs_and_folders_beyond_the_rights_are_refused(key: str, tmp_path: Path):
    tree, path = NAMING[key]
    config = validate_tree({**OWN, "output_dir": str(tmp_path / "run"), **tree})
    assert [issue.path for issue in check_rights(config, Rights(("my_envs",), (str(tmp_path),)))] == [path]
    assert not list(check_rights(config, Rights()))


ENVS: list[tuple[dict[str, Any], str]] = [
    ({"env_type": "verifiers", "env_config": {"id": "primeintellect/evil-env"}}, "env_config.id"),
    (
        {"env_type": "verifiers", "env_config": {"id": "my_envs", "environment": {"id": "x"}}},
        "env_config.environment",
    ),
    (
        {"env_type": "tools", "env_config": {"env_type": "evil:Env", "tools": []}},
        "env_config.env_type",
    ),
    (
        {
            "env_type": "tools",
            "env_config": {"env_type": "math", "tools": [{"tool_id": "mcp", "command": ["sh", "-c", "id"]}]},
        },
        "env_config.tools.0.command",
    ),
    (
        {"env_type": "code", "env_config": {"dataset_name": "x", "sandbox": {"isolation": "warn"}}},
        "env_config.sandbox.isolation",
    ),
    ({"env_type": "harbor", "env_config": {"sandbox": {"image": "ubuntu:24.04"}}}, "env_config.sandbox.image"),
    ({"env_type": "harbor", "env_config": {"sandbox": {"network": "task"}}}, "env_config.sandbox.network"),
    (trial(agent={"import_path": "evil:Agent"}), "env_config.agent.import_path"),
    (trial(agent={"name": "evil:Agent"}), "env_config.agent.name"),
    (trial(agent={"name": "terminus-2", "mcp_servers": [{"command": "sh"}]}), "env_config.agent.mcp_servers"),
    (
        trial(agent={"import_path": "my_envs:Agent", "env": {"HEADER": "${SECRET}"}}),
        "env_config.agent.env.HEADER",
    ),
    (trial(environment={"import_path": "evil:Environment"}), "env_config.environment"),
    (trial(environment={"type": "docker"}), "env_config.environment"),
    (
        {
            "env_type": "tools",
            "env_config": {"env_type": "harbor", "env_config": {"agent": {"name": "evil:Agent"}}},
        },
        "env_config.env_config.agent.name",
    ),
    (
        {
            "env_type": "tools",
            "env_config": {
                "env_type": "math",
                "tools": [{"tool_id": "python_code", "limits": {"isolation": "warn"}}],
            },
        },
        "env_config.tools.0.limits.isolation",
    ),
    (
        {
            "env_type": "gymnasium",
            "env_config": {"id": "CartPole-v1", "wrappers": [{"path": "my_envs:Wrapper"}, {"path": "evil:f"}]},
        },
        "env_config.wrappers.1.path",
    ),
    ({"env_type": "pettingzoo", "env_config": {"id": "evil:env"}}, "env_config.id"),
    ({"env_type": "pettingzoo", "env_config": {"id": "classic/chess-v6", "board": "evil:f"}}, "env_config.board"),
    (
        {
            "env_type": "pettingzoo",
            "env_config": {
                "id": "classic/chess-v6",
                "opponents": {"a": {}, "b": {"path": "evil:Opponent"}, "c": {"path": "my_envs:Opponent"}},
            },
        },
        "env_config.opponents.b.path",
    ),
    (
        {
            "env_type": "pettingzoo",
            "env_config": {
                "id": "classic/chess-v6",
                "opponents": {"a": {"path": "my_envs:Opponent", "args": {"api_key_env": "SECRET"}}},
            },
        },
        "env_config.opponents.a.args.api_key_env",
    ),
    ({"env_type": "my_envs:sub.Env"}, "env_type"),
    ({"env_type": "my_envs_of_others:Env"}, "env_type"),
]
"""Settings of envs that name code or programs, and the key that is refused."""


@pytest.mark.parametrize(("env", "path"), ENVS)
def test_code_within_an_envs_settings_is_refused(env: dict[str, Any], path: str, tmp_path: Path):
    config = validate_tree({"custom_envs": {"A": env}, "output_dir": str(tmp_path)})
    (issue,) = check_rights(config, Rights(("my_envs",)))
    assert issue.path == f"custom_envs.A.{path}"


def test_a_trial_of_allowed_code_in_an_allowed_folder_passes(tmp_path: Path):
    agent = {"import_path": "my_envs:Agent", "model_name": "m", "kwargs": {"turns": 3}, "env": {"KEY": "{api_key}"}}
    rights = Rights(("my_envs",), (str(tmp_path),))

    def issues(folder: Path) -> list[str]:
        tree = {"custom_envs": {"A": trial(agent=agent, trials_dir=str(folder))}, "output_dir": str(tmp_path)}
        return [issue.path for issue in check_rights(validate_tree(tree), rights)]

    assert issues(tmp_path / "trials") == []
    assert issues(Path("/etc")) == ["custom_envs.A.env_config.trials_dir"]


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("my_envs", True),
        ("my_envs.lake", True),
        ("my_envs2", False),
        ("offbeat", True),
        ("offbeat.envs.math", True),
        ("offbeats", False),
        ("team_a", True),
        ("team", False),
        ("os", False),
    ],
)
def test_a_module_covers_its_submodules(module: str, allowed: bool):
    assert Rights(("my_envs", "offbeat.*", "team_*")).allows_module(module) is allowed


def test_a_place_is_compared_after_links_and_dots(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/out").symlink_to("/etc")
    rights = Rights(None, (str(tmp_path / "runs"), "s3://bucket/runs"))
    inside = [str(tmp_path / "runs/a"), f"file://{tmp_path}/runs/a", "s3://bucket/runs/a", str(tmp_path / "runs")]
    outside = [
        str(tmp_path / "runs/../other"),
        str(tmp_path / "runs/out/x"),
        str(tmp_path / "runs2"),
        "s3://bucket/runs2",
        "s3://bucket/runs/../other",
        "simplecache::s3://bucket/runs",
        "gs://bucket/runs",
    ]
    assert [rights.allows_folder(place) for place in inside + outside] == [True] * 4 + [False] * 7


def test_scores_are_written_only_beside_a_dataset_in_an_allowed_folder(tmp_path: Path):
    def paths(folder: Path, **dpo: Any) -> list[str]:
        data = {"dataset_name": str(folder / "rows.jsonl")}
        tree = {"pipeline": "dpo", "data": data, "dpo": dpo, "output_dir": str(tmp_path / "run")}
        return [issue.path for issue in check_rights(validate_tree(tree), Rights((), (str(tmp_path),)))]

    assert paths(Path("/etc"), precompute_ref_log_probs=True) == ["data.dataset_name"]
    assert paths(tmp_path, precompute_ref_log_probs=True) == paths(Path("/etc")) == []
