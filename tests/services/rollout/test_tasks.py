import asyncio
from collections import Counter

import pytest

from offbeat.envs import registry
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig
from offbeat.services.rollout.tasks import (
    FIRST_EVAL_SEED,
    EvalTasks,
    eval_task,
    tag_cycle,
    train_task,
)
from tests.waiting import PATIENCE_S


class Config:
    def __init__(self, train: EnvManagerConfig, val: EnvManagerConfig | None = None) -> None:
        lake = CustomEnv(env_type="frozen_lake")
        big = CustomEnv(env_type="frozen_lake", env_config={"size": 6})
        self.custom_envs = {"Lake": lake, "BigLake": big}
        self.train_env_manager = train
        self.val_env_manager = val or EnvManagerConfig(group_size=1)


SHARED = EnvManagerConfig(tags=("Lake", "BigLake"), num_groups_partition=(6, 2))


def test_the_same_config_seed_and_number_give_the_same_task():
    first = [train_task(Config(SHARED), 42, number) for number in range(50)]
    assert first == [train_task(Config(SHARED), 42, number) for number in reversed(range(50))][::-1]
    assert len({task.seed for task in first}) == 50


def test_another_seed_gives_other_tasks():
    a, b = ({train_task(Config(SHARED), seed, number).seed for number in range(50)} for seed in (1, 2))
    assert not a & b


def test_tasks_are_those_that_every_release_gave():
    assert [train_task(Config(SHARED), 42, n) for n in range(3)] == [
        ("Lake", 995508986),
        ("Lake", 1761329061),
        ("BigLake", 371152380),
    ]
    assert [eval_task(Config(SHARED), 42, n) for n in range(3)] == [
        ("Lake", 2303750527),
        ("BigLake", 2645728477),
        ("Lake", 2303750528),
    ]


LEVELS = "offbeat.envs.task_samplers:Levels"


class Fixed:
    """Sampler of given draws."""

    def __init__(self, tags: tuple[str, ...], *, tag: str = "", seed: int | None = None) -> None:
        self.tag, self.seed = tag or tags[-1], seed

    def draw(self, *_: object) -> tuple[str, int | None]:
        return self.tag, self.seed

    def learn(self, *_: object) -> None:
        pass

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, *_: object) -> None:
        pass


def drawing(path: str, **args: object) -> Config:
    return Config(EnvManagerConfig.model_validate({"task_sampler": {"path": path, "args": args}}))


def test_a_sampler_draws_by_its_state_alike_for_whoever_asks():
    config = drawing(LEVELS, review=0.5)
    first = [train_task(config, 42, number) for number in range(40)]
    assert {task.tag for task in first} == {"Lake"}
    later = [train_task(config, 42, number, '{"level": 1, "seen": []}') for number in range(40)]
    assert later == [train_task(config, 42, number, '{"level": 1, "seen": []}') for number in range(40)]
    assert {task.tag for task in later} == {"Lake", "BigLake"}
    assert [task.seed for task in later] == [task.seed for task in first]
    assert len({task.seed for task in first}) == 40


def test_a_sampler_may_name_the_seed_too():
    assert train_task(drawing(f"{__name__}:Fixed", seed=7), 1, 3) == ("BigLake", 7)


@pytest.mark.parametrize(
    ("path", "args", "says"),
    [
        ("offbeat.envs.task_samplers:Nothing", {}, "has no attribute 'Nothing'"),
        ("envs.no_such:Thing", {}, "No module named"),
        (LEVELS, {"at": 2.0}, r"at in \(0, 1\]"),
        (LEVELS, {"speed": 1}, "unexpected keyword argument 'speed'; it is called with the tags"),
        ("collections:Counter", {}, "has no method draw"),
        (f"{__name__}:Fixed", {"tag": "Pond"}, "tag 'Pond', which training does not have"),
        (f"{__name__}:Fixed", {"seed": -1}, "seed -1, which is not in"),
    ],
)
def test_an_invalid_sampler_is_refused_with_its_error(path: str, args: dict[str, object], says: str):
    with pytest.raises(ValueError, match=says):
        train_task(drawing(path, **args), 0, 0)


def test_a_sampler_is_named_by_module_and_class():
    with pytest.raises(ValueError, match="'Levels' must be `module:Class`"):
        EnvManagerConfig.model_validate({"task_sampler": {"path": "Levels"}})


def test_a_sampler_and_shares_of_tags_exclude_each_other():
    with pytest.raises(ValueError, match="leave num_groups_partition out"):
        EnvManagerConfig.model_validate(
            {"tags": ("a",), "num_groups_partition": (8,), "task_sampler": {"path": LEVELS}}
        )


def test_tags_get_their_shares_spread_evenly():
    tags = [train_task(Config(SHARED), 0, number).tag for number in range(80)]
    assert Counter(tags) == {"Lake": 60, "BigLake": 20}
    assert Counter(tags[:4]) == {"Lake": 3, "BigLake": 1}


def test_without_tags_all_envs_take_turns():
    envs = Config(SHARED).custom_envs
    assert tag_cycle(envs, EnvManagerConfig()) == ("Lake", "BigLake")


def test_evaluation_uses_distinct_held_out_maps_unknown_to_training():
    config = Config(EnvManagerConfig(tags=("Lake",)), EnvManagerConfig(tags=("Lake",), group_size=1))
    tasks = EvalTasks(config, 42)
    held_out = registry.make("frozen_lake", registry.held_out_config("frozen_lake", {})).unwrapped
    maps = [held_out.task_id(tasks.task(number).seed) for number in range(256)]
    assert len(set(maps)) == 256
    train_env = registry.make("frozen_lake", {}).unwrapped
    trained = {train_env.task_id(train_task(config, 42, number).seed) for number in range(1000)}
    assert not trained & set(maps)


def test_evaluation_tasks_do_not_depend_on_the_order_of_calls():
    config = Config(SHARED)
    tasks = EvalTasks(config, 3)
    assert tasks.task(200) == eval_task(config, 3, 200)
    assert [tasks.task(n) for n in range(10)] == [eval_task(config, 3, n) for n in range(10)]


def test_members_of_an_evaluation_group_share_a_map_and_tags_alternate():
    config = Config(SHARED, EnvManagerConfig(group_size=2))
    tasks = [eval_task(config, 0, number) for number in range(8)]
    assert [task.tag for task in tasks] == ["Lake"] * 2 + ["BigLake"] * 2 + ["Lake"] * 2 + ["BigLake"] * 2
    assert tasks[0] == tasks[1]
    assert tasks[0] != tasks[4]


def test_greedy_episodes_have_tasks_of_their_own():
    """Members of a group would be played alike."""
    tasks = EvalTasks(Config(SHARED, EnvManagerConfig(group_size=4)), 0)
    greedy = [tasks.task(number, greedy=True) for number in range(16)]
    assert len(set(greedy)) == 16
    assert greedy[:4] == [tasks.task(number) for number in range(0, 16, 4)]


async def test_a_failed_search_fails_all_that_waited_for_it_and_delays_no_other_tag():
    tasks = EvalTasks(Config(SHARED), 0)
    fails, searches = asyncio.Event(), list[str]()

    async def find_seeds(tag: str, n: int, start: int) -> list[int]:
        searches.append(tag)
        if tag == "Lake" and searches.count(tag) == 1:
            await fails.wait()
            raise EpisodeError("reset_timeout")
        return [start + index for index in range(n)]

    waiting = [asyncio.create_task(tasks.find(number, find_seeds)) for number in range(0, 16, 2)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.sleep(0)  # all of them wait
        assert (await tasks.find(1, find_seeds)).tag == "BigLake"
        fails.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(result) for result in results] == ["reset_timeout"] * 8
        assert (await tasks.find(0, find_seeds)).tag == "Lake"  # another attempt searches again
    assert searches == ["Lake", "BigLake", "Lake"]


@pytest.mark.parametrize("seed", [0, 2**63, -1])
def test_seeds_of_training_and_evaluation_are_disjoint(seed: int):
    config = Config(SHARED)
    assert all(0 <= train_task(config, seed, number).seed < FIRST_EVAL_SEED for number in range(200))
    tasks = EvalTasks(config, seed)
    assert all(FIRST_EVAL_SEED <= tasks.task(number).seed < 2**32 for number in range(20))
