from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis as AsyncRedis

from offbeat.deploy import run_folder
from offbeat.deploy.cluster import ray_run_factory
from offbeat.deploy.cluster.ray_run_factory import Cluster, RayRunFactory, check_cluster
from offbeat.deploy.components import learner
from offbeat.deploy.config import devices
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, read_document, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.validation import check_in_process
from offbeat.deploy.run_folder import CLAIM
from offbeat.deploy.run_marker import FolderInUseError
from offbeat.deploy.run_setup import run_spec
from offbeat.services.control.console.archive import NotRecordedError
from offbeat.services.control.run import RunRecord
from offbeat.services.control.service import ControlService, InvalidRunError
from offbeat.services.control.store import RunStore
from offbeat.services.errors import ControlError
from offbeat.services.weights.transports.base import file_name, owner_of
from tests.fakes_rollout import HERE
from tests.paths import QUICKSTART

pytestmark = pytest.mark.slow
NO_GPU = ClusterNode("a", "10.0.0.1", 0)
URL = "redis://127.0.0.1:6390/0"


def run_config(*overrides: str) -> RunConfig:
    return validate_tree(compose_tree(QUICKSTART, overrides))


def paths(config: RunConfig, hosts: int = 1) -> list[str]:
    return [problem.path for problem in check_cluster(config, Cluster(8.0, (NO_GPU,), hosts), URL)]


def test_run_uses_the_redis_of_its_mesh():
    assert paths(run_config()) == []
    assert paths(run_config(f"redis.url={URL}")) == []
    assert paths(run_config("redis.url=redis://elsewhere:6379/0")) == ["redis.url"]


def test_shared_memory_is_rejected_with_several_hosts():
    assert paths(run_config(), hosts=2) == ["weights.transport"]
    assert paths(run_config("weights.transport=fs"), hosts=2) == []
    sft = validate_tree(compose_tree(QUICKSTART.with_name("sft.yaml")))
    assert paths(sft, hosts=2) == [], "no engine gets its weights"


def test_relative_paths_start_at_the_folder_of_the_mesh(tmp_path: Path):
    config = read_document(QUICKSTART.read_text(), working_dir=tmp_path)
    assert config.output_dir == tmp_path / "runs/quickstart"


async def test_run_is_checked_against_the_cluster_not_the_service_host():
    workers = read_document(QUICKSTART.read_text().replace("num_workers: 1", "num_workers: 40"))
    with pytest.raises(ConfigError, match=r"rollout\.num_workers"):
        await check_in_process(workers, cores=4.0, nodes=[NO_GPU])
    await check_in_process(workers, cores=32.0, nodes=[NO_GPU])
    on_gpus = read_document(QUICKSTART.read_text().replace("  num_threads: 1", "  num_threads: 1\n  device: cuda"))
    with pytest.raises(ConfigError, match=r"actor_train\.device"):
        await check_in_process(on_gpus, cores=32.0, nodes=[NO_GPU])
    await check_in_process(on_gpus, cores=32.0, nodes=[NO_GPU._replace(gpus=8)])


@pytest.fixture
def factory(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> RayRunFactory:
    monkeypatch.setattr(ray_run_factory, "ensure_reaper", lambda: None)
    monkeypatch.setattr(learner, "kill_actor", lambda _name: None)  # it would start Ray
    return RayRunFactory(AsyncRedis.from_url(redis_url), redis_url, tmp_path)


async def test_runs_over_rest_are_tried_before_they_start(factory: RayRunFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Cluster, "from_ray", classmethod(lambda cls: cls(8.0, (NO_GPU,), 1)))
    monkeypatch.setattr(ray_run_factory, "read_app_statuses", dict)
    tree = compose_tree(QUICKSTART)
    tree["warm_start"] = None
    assert (await factory.validate(tree)).run_id == "quickstart"
    lake = tree["custom_envs"]["FrozenLake"]
    bad = {**lake, "env_type": HERE + "BadEnv", "env_config": {"how": "raise"}}
    with pytest.raises(InvalidRunError, match="can't be stepped: RuntimeError: broken"):
        await factory.validate({**tree, "custom_envs": {"FrozenLake": bad}})
    silent = {**lake, "agent_runner": {"path": "tests.played_agents:silent"}}
    with pytest.raises(InvalidRunError, match="must call the policy"):
        await factory.validate({**tree, "custom_envs": {"FrozenLake": silent}})


@pytest.mark.parametrize("max_cpus", [0.0, 64.0])
async def test_a_run_may_need_the_cpus_that_an_autoscaler_adds(
    max_cpus: float, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_run_factory, "ensure_reaper", lambda: None)
    monkeypatch.setattr(Cluster, "from_ray", classmethod(lambda cls: cls(8.0, (NO_GPU,), 1)))
    monkeypatch.setattr(ray_run_factory, "read_app_statuses", dict)
    factory = RayRunFactory(AsyncRedis.from_url(redis_url), redis_url, tmp_path, max_cpus)
    tree = compose_tree(QUICKSTART, ["rollout.num_workers=40"])
    if max_cpus:
        assert (await factory.load(tree)).rollout.num_workers == 40
    else:
        with pytest.raises(ConfigError, match=r"rollout\.num_workers"):
            await factory.load(tree)


@pytest.mark.parametrize(("gpus", "transport"), [(1, "ipc"), (2, "shm")])
async def test_runs_without_devices_take_the_gpus_of_the_cluster(
    gpus: int, transport: str, factory: RayRunFactory, monkeypatch: pytest.MonkeyPatch
):
    node = NO_GPU._replace(gpus=gpus, memory_gib=80.0)
    monkeypatch.setattr(Cluster, "from_ray", classmethod(lambda cls: cls(8.0, (node,), 1)))
    monkeypatch.setattr(ray_run_factory, "read_app_statuses", dict)
    monkeypatch.setattr(devices, "is_installed", lambda _: True)
    config = await factory.load(compose_tree(QUICKSTART))
    assert (config.actor_infer.device, config.actor_train.device) == ("cuda", "cuda")
    assert config.weights.transport == transport


def record(folder: Path, *overrides: str) -> RunRecord:
    config = run_config(*overrides)
    return RunRecord("lake", config.model_dump_json(), str(folder), 7, config.settings, created_at=1.0)


async def test_failed_report_names_the_command_that_writes_it(factory: RayRunFactory, tmp_path: Path):
    (tmp_path / CLAIM).write_text("lake 1.0")
    with pytest.raises(ControlError, match=rf"there is no run in .*write it with `offbeat report {tmp_path} --redis"):
        await factory.write_report(record(tmp_path))


async def test_no_report_is_written_to_the_folder_of_another_run(factory: RayRunFactory, tmp_path: Path):
    """The run failed because another run uses the folder."""
    (tmp_path / CLAIM).write_text("other 1.0")
    await factory.write_report(record(tmp_path))
    assert not (tmp_path / "report.json").exists()


def trained_in(folder: Path, *, claim: str = "") -> Path:
    """A run of that name by `offbeat train`, or the mesh's own that claimed the folder."""
    run_folder.claim(folder, "lake", resume=False)
    (folder / "checkpoints" / "step-000040").mkdir(parents=True)
    if claim:
        (folder / CLAIM).write_text(claim)
    return folder


@pytest.mark.parametrize("claim", ["", "lake 2.0"])
def test_another_run_of_that_name_keeps_its_files(factory: RayRunFactory, tmp_path: Path, claim: str):
    """It took the folder after this one, which was moved aside, or this one never had it."""
    folder = trained_in(tmp_path / "lake", claim=claim)
    with factory.hold_files(record(folder)) as remove:
        assert remove().left == [str(folder)]
    assert (folder / "checkpoints" / "step-000040").is_dir()


def test_a_run_that_takes_the_folder_before_its_lock_keeps_its_files(
    factory: RayRunFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, locked = trained_in(tmp_path / "lake", claim="lake 1.0"), run_folder.locked

    def take_first(path: Path) -> AbstractContextManager[None]:
        with monkeypatch.context() as own:
            own.setattr(run_folder, "locked", locked)
            trained_in(folder)
        return locked(path)

    monkeypatch.setattr(run_folder, "locked", take_first)
    with factory.hold_files(record(folder)) as remove:
        assert remove().left == [str(folder)]
    assert (folder / "checkpoints" / "step-000040").is_dir()


def test_the_files_of_another_run_of_that_name_are_not_read(factory: RayRunFactory, tmp_path: Path):
    """A fork would start from its checkpoint."""
    taken = record(trained_in(tmp_path / "lake"))
    for read in (
        lambda: factory.open_archive(taken),
        lambda: factory.find_checkpoint(taken, 40),
        lambda: factory.reproduce(taken, 40),
        lambda: factory.plan(taken, taken.settings),
    ):
        with pytest.raises(NotRecordedError, match=r"another run, which has moved those of this run 'lake' to lake\.1"):
            read()


async def test_an_open_archive_shows_no_run_that_took_its_folder(
    factory: RayRunFactory, tmp_path: Path, redis_url: str
):
    folder, store = tmp_path / "quickstart", RunStore(AsyncRedis.from_url(redis_url))
    own, _ = await store.create(run_spec(run_config(f"output_dir={folder}")))
    trained_in(folder, claim=run_folder.claim_id(own.run_id, own.created_at))
    service = ControlService(store, factory, wake=lambda: None)
    assert await service.archive(own.run_id) is await service.archive(own.run_id)
    trained_in(folder)
    with pytest.raises(NotRecordedError, match="has the files of another run"):
        await service.archive(own.run_id)
    await store.redis.aclose()


@pytest.mark.parametrize(("claim", "mesh"), [("lake 1.0", ""), ("", "of a train command")])
def test_the_files_of_the_run_itself_are_read_and_removed(
    factory: RayRunFactory, tmp_path: Path, claim: str, mesh: str
):
    folder = trained_in(tmp_path / "lake", claim=claim)
    own = replace(record(folder), mesh=mesh)
    assert factory.open_archive(own).folder == folder
    with factory.hold_files(own) as remove:
        assert remove().left == []
    assert not folder.exists()


async def test_a_run_that_is_refused_a_folder_leaves_the_weights_of_the_run_there(
    factory: RayRunFactory, tmp_path: Path
):
    folder = trained_in(tmp_path / "quickstart")
    mesh = factory.build_mesh(record(folder, f"output_dir={folder}", "weights.transport=fs"))
    weights = folder / "weights" / file_name(owner_of("quickstart", folder), 1, 1)
    weights.parent.mkdir()
    weights.touch()
    with run_folder.locked(folder):  # by `offbeat train`
        with pytest.raises(FolderInUseError):
            await mesh.prepare()
        await mesh.clean_up()
    assert weights.exists()
    (folder / CLAIM).write_text("lake 1.0")
    await mesh.clean_up()
    assert not weights.exists()


async def test_a_run_whose_folder_can_not_be_made_ends_without_a_report(factory: RayRunFactory, tmp_path: Path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "lake"
    failed = record(folder, f"output_dir={folder}")
    with pytest.raises(OSError, match="file"):
        await factory.build_mesh(failed).prepare()
    await factory.build_mesh(failed).clean_up()
    await factory.write_report(failed)


async def test_the_folder_of_an_active_run_is_locked_in_each_control_replica(factory: RayRunFactory, tmp_path: Path):
    """A train command in that folder would move its checkpoints aside."""
    folder = tmp_path / "lake"
    active = record(folder, f"output_dir={folder}")
    for replica in ("first", "second"):
        mesh = factory.build_mesh(active)
        await (mesh.prepare() if replica == "first" else mesh.drain())
        with pytest.raises(FolderInUseError, match="is used by run 'lake' of a mesh"):
            run_folder.claim(folder, "lake", resume=False)
        await mesh.clean_up()
    assert run_folder.claim(folder, "lake", resume=False) == tmp_path / "lake.1"
