"""Keys that name code: each is in `OWN_CODE`, and each import by a path of the configuration belongs to one of them."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import validate_tree
from offbeat.deploy.config.rights import OWN_CODE, check_definitions, check_rights, code_paths
from offbeat.envs.class_path import ROOT, load_object
from offbeat.services.control.rights import Rights
from offbeat.trainer.config.aliases import ENGINE
from tests.deploy.config.test_rights import ENVS, NAMING, OWN

IMPORTS = ("load_object", "resolve_name", "import_module", "spec_from_file_location", "__import__", "run_path")
ENV = "custom_envs.*.env_config"
FUNCTIONS = ("adv_estimator", "pg_variant", "reward_shaping.function", "train_infer_correction.function")
BY_KEY: dict[str, tuple[str, ...]] = {
    "envs/registry.py: path": ("custom_envs.*.env_type",),
    "envs/adapters/gymnasium_env.py: wrapper.path": (f"{ENV}.wrappers.*.path",),
    "envs/adapters/pettingzoo.py: config.board": (f"{ENV}.board",),
    "envs/adapters/pettingzoo.py: config.id": (f"{ENV}.id",),
    "envs/adapters/pettingzoo.py: config.path": (f"{ENV}.opponents.*.path",),
    "services/rollout/agents/runner.py: module": ("custom_envs.*.agent_runner.path",),
    "deploy/config/checks/agents.py: module": ("custom_envs.*.agent_runner.path",),
    "services/rollout/tasks.py: sampler_config.path": ("*_env_manager.task_sampler.path",),
    "services/reward/kinds/user_function.py: config.path": ("rewards.*.path",),
    "trainer/checks/algorithm.py: module": ("group_filter_cls",),
    "trainer/data/user_functions.py: path": FUNCTIONS,
    "trainer/warm_start/demonstrations.py: config.demos": ("warm_start.demos",),
    "trainer/trackers/registry.py: module": ("track_with.*",),
}
"""Import by a path of a run's configuration -> its keys in `OWN_CODE`."""
BY_OTHERS = {
    "deploy/config/rights.py: code.path": "the check itself",
    "deploy/package/offbeat/__init__.py: f'offbeat.{_MODULES[name]}'": "a fixed table",
    "deploy/site/python_page.py: module": "a fixed list",
    "envs/class_path.py: current_path(path)": "`load_object` itself",
    "envs/dataset/bindings.py: LIBRARIES[name]": "a module of the standard library, numpy or pytest, that a test uses",
    "envs/dataset/bindings.py: STANDARD[name]": "a fixed table",
    "envs/dataset/bindings.py: str(node.module)": "a library from which a test imports all names",
    "envs/dataset/peer.py: module": "a fixed table",
    "envs/dataset/bindings.py: value": "a module of the standard library, or of numpy, that a policy's program imported",
    "envs/optional_imports.py: module": "named by code",
    "services/control/app.py: settings.factory": "named by code",
    "services/generation/vllm/without_torchvision.py: f'vllm.model_executor.models.{module}'": "a fixed table",
    "services/generation/vllm/without_torchvision.py: module.format('pil_')": "a fixed table",
    "services/redis/serve_app.py: self._before_end": "named by code",
    "services/rollout/agents/runner.py: TASK_MODULE": "a constant",
    "services/weights/transports/device.py: SENDERS": "a constant",
}
"""Import by a path from elsewhere, and from where."""
LIBRARIES = {f"{ENV}.agent.import_path", f"{ENV}.agent.name"}
"""Keys whose code another library imports."""


def find_imports() -> Iterator[str]:
    """Yield `file: argument` of each import by a path that is no literal."""
    for folder in ("deploy", "envs", "services", "trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if not any(name in text for name in IMPORTS):
                continue
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args]
            for call in calls:
                if _name(call.func) in IMPORTS and not isinstance(call.args[0], ast.Constant):
                    yield f"{path.relative_to(ROOT)}: {ast.unparse(call.args[0])}"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def trees() -> Iterator[dict[str, Any]]:
    """Yield the configurations of `test_rights`."""
    yield from (tree for tree, _ in NAMING.values())
    yield from ({"custom_envs": {"A": env}} for env, _ in ENVS)


def test_each_import_by_a_path_belongs_to_a_key_of_the_table_or_to_no_configuration():
    """A new import belongs into `BY_KEY`, its key into `OWN_CODE` and `code_paths`; or into `BY_OTHERS` with a reason."""
    assert set(find_imports()) == {*BY_KEY, *BY_OTHERS}
    assert {key for keys in BY_KEY.values() for key in keys} | LIBRARIES == set(OWN_CODE)


def test_each_key_that_names_code_is_in_the_table_and_is_compared(tmp_path: Path):
    keys = {
        code.key for tree in trees() for code in code_paths(validate_tree({**OWN, **tree, "output_dir": str(tmp_path)}))
    }
    assert [key for key in keys if not any(fnmatchcase(key, pattern) for pattern in OWN_CODE)] == []
    assert [pattern for pattern in OWN_CODE if not any(fnmatchcase(key, pattern) for key in keys)] == []


@pytest.mark.parametrize("path", sorted({path for own in OWN_CODE.values() for path in own}))
def test_what_the_table_names_is_defined_there(path: str):
    if "harbor_shell" in path:
        pytest.importorskip("harbor")
    value = load_object(path)
    assert f"{value.__module__}:{value.__qualname__}" == path


def refused(tree: dict[str, Any], folder: Path) -> list[str]:
    config = validate_tree({**OWN, **tree, "output_dir": str(folder)})

    def note(key: str, doing: str) -> None: ...

    return [issue.path for issue in check_definitions(config, Rights(("offbeat.*",)), note)]


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        (
            {"train_env_manager": {"task_sampler": {"path": "offbeat.deploy.cluster.offbeat_process:run_offbeat"}}},
            "train_env_manager.task_sampler.path",
        ),
        (
            {
                "pipeline": "rlvr",
                "rewards": [{"name": "r", "kind": "function", "path": "offbeat.envs.class_path:load_object"}],
            },
            "rewards.0.path",
        ),
        ({"custom_envs": {"A": {"env_type": "offbeat.envs.tools:ToolEnv"}}}, "custom_envs.A.env_type"),
        ({"track_with": ["offbeat.trainer.trackers.stdout:Stdout"]}, "track_with.0"),
        ({"warm_start": {"demos": "offbeat.envs.dataset.arithmetic:write_rows", "tag": "A"}}, "warm_start.demos"),
    ],
)
def test_functions_of_offbeats_are_callable_by_no_key(tree: dict[str, Any], key: str, tmp_path: Path):
    assert refused(tree, tmp_path) == [key]


def test_samplers_demonstrations_and_agents_of_offbeats_pass(tmp_path: Path):
    env = {"env_type": "frozen_lake", "agent_runner": {"path": "offbeat.deploy.agents.walker:play"}}
    demos = {"demos": "offbeat.envs.frozen_lake.demos:careful_wandering", "tag": "A"}
    sampler = {"task_sampler": {"path": "offbeat.envs.task_samplers:Levels"}}
    assert refused({"custom_envs": {"A": env}, "warm_start": demos, "train_env_manager": sampler}, tmp_path) == []


@pytest.mark.parametrize(
    ("env", "passes"),
    [
        ({"env_type": "harbor", "env_config": {"played_by": "agent"}}, True),
        ({"env_type": "harbor", "env_config": {"played_by": "agent"}, "agent_template": '{"task_dir": "/x"}'}, False),
        ({"env_type": "harbor"}, False),
        ({"env_type": "prompt", "env_config": {"dataset_name": "rows.jsonl"}}, False),
    ],
)
def test_an_agent_that_runs_what_observations_name_has_its_own_env(env: dict[str, Any], passes: bool, tmp_path: Path):
    """Another env's observation, or a template, would name any harness, environment and agent."""
    runner = {"path": "offbeat.deploy.agents.harbor_trial:play"}
    keys = [] if passes else ["custom_envs.A.agent_runner.path"]
    assert refused({"custom_envs": {"A": {**env, "agent_runner": runner}}}, tmp_path) == keys


@pytest.mark.parametrize(
    ("name", "value"),
    [("trust_remote_code", True), ("trust_remote", True), ("dtype", "--x"), ("kv_cache_dtype", ["auto", "--x"])],
)
def test_trusting_a_model_folders_code_is_refused(name: str, value: object, tmp_path: Path):
    """As options of SGLang, too: by their beginnings, or within a list."""
    arguments = {"max_num_seqs": 8, "kv_cache_dtype": "fp8_e5m2", "seed": None, name: value}
    infer = {"strategy_args": {"strategy_config": arguments}}
    config = validate_tree({**OWN, "output_dir": str(tmp_path), "actor_infer": infer})
    (issue,) = check_rights(config, Rights(()))
    assert issue.path == f"{ENGINE}.{name}"


@pytest.mark.parametrize("name", ["trust-remote-code", "tokenizer-path=/any", "a b", "é"])
def test_an_engines_argument_has_a_name(name: str):
    with pytest.raises(ConfigError, match="is no name of an argument"):
        validate_tree({**OWN, "actor_infer": {"strategy_args": {"strategy_config": {name: True}}}})
