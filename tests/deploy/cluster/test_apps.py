from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from ray.serve.schema import ServeDeploySchema

from offbeat.deploy.cluster import apps
from offbeat.deploy.config import devices
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.tinker.serve_app import TinkerSettings
from offbeat.deploy.token_file import TOKEN_FILE
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.control.app import ControlSettings
from offbeat.services.control.config import ControlConfig, create_token
from offbeat.services.control.rights import Rights, TokenGrant
from offbeat.services.redis.serve_app import RedisSettings
from tests.hub import SHA

FOLDER = Path(apps.__file__).parents[1]
URL = "redis://127.0.0.1:6399/0"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def read(name: str, folder: Path) -> ServeDeploySchema:
    """Parse a deploy file by Serve's schema, with the folders that users have to set."""
    text = (FOLDER / name).read_text().replace("/etc/offbeat", str(folder)).replace("/shared", str(folder))
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    for app in schema.applications:
        if model := app.args.get("config", {}).get("pretrain"):
            Path(model).mkdir(parents=True, exist_ok=True)
            (Path(model) / "config.json").write_text("{}")
    return schema


def settings(schema: ServeDeploySchema) -> dict[str, Any]:
    """Return the settings of each application's deployment."""
    result: dict[str, Any] = {}
    for app in schema.applications:
        module, _, function = app.import_path.partition(":")
        assert module == apps.__name__
        deployment = getattr(apps, function)(app.args)._bound_deployment
        assert [override.name for override in app.deployments] in ([], [deployment.name])
        (result[app.name],) = deployment.init_args
    return result


def test_file_of_one_machine_builds_and_protects_redis_and_api(tmp_path: Path):
    schema = read("deploy.yaml", tmp_path)
    built = settings(schema)
    assert schema.http_options.host == "127.0.0.1"
    assert [type(value) for value in built.values()] == [RedisSettings, ControlSettings, TinkerSettings]
    assert built["redis"].port == 6390
    url = f"redis://:{built['redis'].password}@127.0.0.1:6390/0"
    assert {value.redis_url for name, value in built.items() if name != "redis"} == {url}
    assert len(built["redis"].password) >= 32
    token = built["control"].tokens.operate
    assert len(token) >= 32
    assert (TOKEN_FILE.read_text().strip(), TOKEN_FILE.stat().st_mode & 0o777) == (token, 0o600)
    assert settings(schema) == built, "the next deployment of the same file changes nothing"


def test_cluster_file_builds_and_requires_a_token(tmp_path: Path):
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "tinker-keys").write_text("tml-one\n")
    schema = read("cluster.yaml", tmp_path)
    built = settings(schema)
    assert built["control"].tokens.operate == "secret"
    assert built["tinker"].config.tinker.keys_file == tmp_path / "tinker-keys"
    big = built["generation-8b"]
    assert (big.tenant, big.config.engine.tensor_parallel_size, big.transport) == (None, 2, "nccl")
    override = next(app for app in schema.applications if app.name == "generation-8b").deployments[0]
    assert override.placement_group_bundles == [{"CPU": 4, "GPU": big.config.engine.tensor_parallel_size}]
    assert override.ray_actor_options.num_gpus == big.config.engine.tensor_parallel_size
    assert override.autoscaling_config["max_replicas"] == 4


def test_unknown_argument_is_rejected_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean `working_dir`"):
        apps.control({"redis_url": URL, "workingdir": "/tmp"})


def test_tinker_loads_no_model_before_it_is_called():
    deployment = apps.tinker({"redis_url": URL, "folder": "t", "run": "quickstart.yaml"})._bound_deployment
    assert deployment._deployment_config.autoscaling_config.min_replicas == 0
    assert not Path("t").exists()


def test_missing_file_of_tinker_keys_is_rejected():
    args = {"redis_url": URL, "folder": "t", "run": "quickstart.yaml", "config": {"tinker": {"keys_file": "none"}}}
    with pytest.raises(ConfigError, match=r"tinker.keys_file: none can't be read"):
        apps.tinker(args)


def test_invalid_key_of_a_run_is_rejected_with_its_path():
    with pytest.raises(ConfigError, match=r"actor_infer\.strategy_args\.strategy_config\.tensor_parallel_size"):
        apps.generation({"redis_url": URL, "folder": "g", "config": {"actor_infer": {"tensor_parallel_size": 0}}})


def test_hub_id_of_an_application_becomes_its_snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    cache = tmp_path / "hub" / "models--org--model"
    snapshot = cache / "snapshots" / SHA
    for file, text in (
        (cache / "refs" / "main", SHA),
        (snapshot / "config.json", "{}"),
        (snapshot / "a.safetensors", ""),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    args = {"redis_url": URL, "folder": "t", "run": "quickstart.yaml", "config": {"pretrain": "org/model"}}
    (bound,) = apps.tinker(args)._bound_deployment.init_args
    assert bound.config.pretrain == str(snapshot)


@pytest.mark.parametrize("build", [apps.generation, apps.tinker])
def test_folder_without_a_model_is_rejected(build: Callable[[dict[str, Any]], object]):
    args = {"redis_url": URL, "folder": "t", "run": "quickstart.yaml", "config": {"pretrain": "./models/typo"}}
    with pytest.raises(ConfigError, match=r"config\.pretrain: ./models/typo is no Hugging Face model folder"):
        build(args)
    Path("my.yaml").write_text("pretrain: ./models/typo\ncustom_envs: {}\n")
    with pytest.raises(ConfigError, match=r"run: pretrain: \./models/typo is no Hugging Face model folder"):
        build({"redis_url": URL, "folder": "t", "run": "my.yaml"})


@pytest.mark.parametrize("key", ["read_token_file", "tokens"])
def test_missing_file_of_a_token_that_someone_else_has_is_rejected(key: str, tmp_path: Path):
    value: Any = str(tmp_path / "none")
    value = [{"token_file": value}] if key == "tokens" else value
    with pytest.raises(ConfigError, match=rf"{key}.*No such file"):
        apps.control({"redis_url": URL, "token_file": str(tmp_path / "token"), key: value})


def test_token_file_that_is_empty_or_cannot_be_made_is_rejected(tmp_path: Path):
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        apps.control({"redis_url": URL, "token_file": str(tmp_path / "token")})
    with pytest.raises(ConfigError, match="token_file: can't be read"):
        apps.control({"redis_url": URL, "token_file": str(tmp_path / "token" / "token")})


@pytest.mark.parametrize("content", ["schlüssel\n", "one\ntwo\n"])
@pytest.mark.parametrize("key", ["token_file", "read_token_file", "tokens.0.token_file", "tokens.0.token"])
def test_a_token_that_no_call_can_carry_is_refused(key: str, content: str, tmp_path: Path):
    (tmp_path / "token").write_text("secret")
    (path := tmp_path / "wrong").write_text(content)
    args: dict[str, Any] = {"redis_url": URL, "token_file": str(tmp_path / "token")}
    of_others = {key.rpartition(".")[2]: content if key.endswith(".token") else str(path)}
    args |= {"tokens": [of_others]} if key.startswith("tokens") else {key: str(path)}
    with pytest.raises(ConfigError, match=rf"^{key}: .*has characters that no call can carry"):
        apps.control(args)


def test_shared_engine_that_names_no_device_takes_the_gpus_of_its_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "is_installed", lambda _: True)
    monkeypatch.setattr(apps, "count_gpus", lambda: 1)
    args = {"redis_url": URL, "folder": "g", "run": "quickstart.yaml"}
    deployment = apps.generation(args)._bound_deployment
    assert deployment.init_args[0].config.device == "cuda"
    assert deployment.ray_actor_options["num_gpus"] == 1
    (on_cpu,) = apps.generation({**args, "config": {"actor_infer": {"device": "cpu"}}})._bound_deployment.init_args
    assert on_cpu.config.device == "cpu"


def test_an_engine_of_several_runs_is_not_asked_for_experts():
    """It returned none, so that the learner trained without them."""
    strategy = {"strategy_config": {"enable_return_routed_experts": True, "max_loras": 2, "max_lora_rank": 8}}
    args = {"redis_url": URL, "folder": "g", "run": "quickstart.yaml"}
    with pytest.raises(ConfigError, match="max_loras: an engine of several runs returns no experts") as error:
        apps.generation({**args, "config": {"actor_infer": {"strategy_args": strategy}}})
    assert "router_replay" not in str(error.value)  # no key of a deploy file


def test_an_engine_of_a_dense_model_is_not_asked_for_experts():
    strategy = {"strategy_config": {"enable_return_routed_experts": True}}
    args = {"redis_url": URL, "folder": "g", "run": "quickstart.yaml"}
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts: the model \(tiny\) has no experts"):
        apps.generation({**args, "config": {"actor_infer": {"strategy_args": strategy}}})


def test_tokens_have_rights_of_their_own(tmp_path: Path):
    (tmp_path / "student").write_text("learn\n")
    rights = {"allow_modules": ["offbeat.*"], "output_roots": ["students", "s3://bucket/students"]}
    (tmp_path / "all").write_text("secret")
    application = apps.control(
        {
            "redis_url": URL,
            "working_dir": str(tmp_path),
            "token_file": str(tmp_path / "all"),
            "tokens": [{"token_file": str(tmp_path / "student"), **rights}, {"token": "look", "scope": "read"}],
        }
    )
    (bound,) = application._bound_deployment.init_args
    allowed = Rights(("offbeat.*",), (str(tmp_path / "students"), "s3://bucket/students"))
    assert bound.tokens.grants == (
        TokenGrant("secret"),
        TokenGrant("learn", "write", allowed),
        TokenGrant("look", "read"),
    )


def test_paths_of_tokens_may_start_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "student").write_text("learn")
    config = ControlConfig.model_validate({"output_roots": ("~/runs",), "tokens": ({"token_file": Path("~/student")},)})
    grants = config.to_tokens(Path("/work"))
    assert (grants.rights.output_roots, grants.others[0].token) == ((str(tmp_path / "runs"),), "learn")
    assert create_token(Path("~/all")) == (tmp_path / "all").read_text().strip()


def test_config_of_a_generation_application_overrides_its_run():
    application = apps.generation(
        {"redis_url": URL, "folder": "g", "run": "quickstart.yaml", "config": {"actor_infer": {"num_replicas": 3}}}
    )
    (bound,) = application._bound_deployment.init_args
    assert (bound.config.num_replicas, bound.config.model_args.dtype, bound.sequence_length) == (3, "float32", 512)


@pytest.mark.parametrize("url", ["redis://elsewhere:6390/0", "rediss://127.0.0.1:6390/0", "redis://127.0.0.1/0"])
def test_redis_url_that_clients_could_not_reach_is_rejected(url: str, tmp_path: Path):
    with pytest.raises(ValueError, match="redis_url"):
        RedisSettings.of(url, tmp_path, RedisConfig())


def test_redis_without_a_password_is_rejected():
    with pytest.raises(ConfigError, match=r"redis_url: every user of this machine .* set redis_url_file"):
        apps.redis({"redis_url": URL, "folder": "r"})


def test_url_with_its_password_may_be_in_a_file_alone(tmp_path: Path):
    (tmp_path / "url").write_text("rediss://:secret@redis.internal:6380/0\n")
    (bound,) = apps.control({"redis_url_file": str(tmp_path / "url")})._bound_deployment.init_args
    assert bound.redis_url == "rediss://:secret@redis.internal:6380/0"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "redis_url: required"),
        ({"redis_url_file": "/nowhere/url"}, "redis_url_file: .*No such file"),
        ({"redis_url": "redis://:pw@127.0.0.1:6390/0", "redis_url_file": "u"}, "redis_url_file: has no effect"),
    ],
)
def test_missing_or_double_redis_url_is_rejected(args: dict[str, str], says: str):
    with pytest.raises(ConfigError, match=says):
        apps.control(args)


def test_redis_port_and_password_come_from_the_url(tmp_path: Path):
    bound = RedisSettings.of("redis://:s%40fe@127.0.0.1:6390/0", tmp_path, RedisConfig())
    assert (bound.port, bound.password) == (6390, "s@fe")
