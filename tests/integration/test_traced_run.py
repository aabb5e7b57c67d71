"""A short `offbeat train` with traces and JSON logs: what each process reports, and how it fits together.

Half of its groups are games of two seats, which the policy plays against itself.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.deploy.cli.audit import examine
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.run_folder import newest_checkpoint
from offbeat.envs import registry
from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.messages.types import Group, Trajectory
from offbeat.trainer.data.seats import take_seat
from offbeat.trainer.training.batch_log import BatchLog
from tests.integration.mesh import HF_INFER, TrainProcess
from tests.otlp import Collector, otlp_collector

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

STEPS, GROUPS_PER_STEP, GROUP_SIZE, MAX_STALENESS = 4, 4, 4, 1
SIZES = (
    f"max_steps={STEPS}",
    f"rollout_batch_size={GROUPS_PER_STEP * GROUP_SIZE}",
    f"train_env_manager.group_size={GROUP_SIZE}",
    "train_env_manager.num_env_groups=8",
    "rollout.num_workers=2",
    "rollout.max_env_num_per_worker=14",
    "warm_start.steps=4",
    "save_steps=2",
    "eval_steps=0",
    "final_val_batch_size=8",
    "zero_variance=train",
    HF_INFER,
    "custom_envs.Game={env_type: pettingzoo, env_config: {id: classic/tictactoe-v3}, max_steps: 9, max_tokens_per_step: 1}",
    "train_env_manager.tags=[FrozenLake,Game]",
    "val_env_manager.tags=[FrozenLake,Game]",
)
GAME, PLAYERS = "classic/tictactoe-v3", ("player_1", "player_2")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with otlp_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Path]:
    """Folder of the run, which has ended."""
    folder = tmp_path_factory.mktemp("traced") / "quickstart"
    telemetry = (f"telemetry.otlp_endpoint={collector.endpoint}", "telemetry.sample_rate=1.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_LOG_FORMAT", "json")
        train = TrainProcess(folder, *telemetry, small=SIZES)
    try:
        assert train.wait() == 0, train.output
        yield folder
    finally:
        train.close()


@pytest.mark.usefixtures("run")
def test_each_trained_group_is_one_trace_that_its_step_links_to(collector: Collector) -> None:
    steps = collector.named("rl.train")
    assert [span.attributes["rl.step"] for span in steps] == list(range(1, STEPS + 1))
    links = [(trace, span, fields["rl.group.number"]) for step in steps for trace, span, fields in step.links]
    assert len({number for *_, number in links}) == STEPS * GROUPS_PER_STEP
    episodes = collector.named("invoke_agent")
    for trace, linked, number in links:
        members = [span for span in episodes if span.trace_id == trace]
        assert {span.attributes["rl.group.number"] for span in members} == {number}
        assert sorted(span.attributes["rl.episode.index"] for span in members) == list(range(GROUP_SIZE))
        assert linked in {span.span_id for span in members}
        for member in members:
            children = Counter(span.name for span in collector.spans if span.parent_id == member.span_id)
            turns = member.attributes["rl.episode.turns"]
            assert children == {"chat policy": turns, "rl.environment.step": turns, "rl.environment.reset": 1}
    published = [link for sync in collector.named("rl.sync") for link in sync.links]
    assert {(trace, span) for trace, span, _ in published} == {(step.trace_id, step.span_id) for step in steps}


@pytest.mark.usefixtures("run")
def test_a_trace_crosses_workers_and_holds_the_versions_that_sampled_it(collector: Collector) -> None:
    before = {trace: step.attributes["rl.step"] - 1 for step in collector.named("rl.train") for trace, *_ in step.links}
    members = [span for span in collector.named("invoke_agent") if span.trace_id in before]
    workers = {
        trace: {span.resource["service.instance.id"] for span in members if span.trace_id == trace} for trace in before
    }
    assert max(map(len, workers.values())) == 2
    for span in members:
        oldest, newest = span.attributes["rl.policy.version.min"], span.attributes["rl.policy.version.max"]
        assert before[span.trace_id] - MAX_STALENESS <= oldest <= newest <= before[span.trace_id]
    assert len({span.attributes["rl.policy.version.max"] for span in members}) > 1


def test_every_line_of_a_log_is_json_with_what_it_is_about(run: Path) -> None:
    logs = {path.stem: read_json_lines(path) for path in (run / "logs").glob("*.log")}
    assert {"control", "env-worker-quickstart-0", "env-worker-quickstart-1", "learner", "offbeat"} <= logs.keys()
    for name, lines in logs.items():
        for line in lines:
            assert {"time", "level", "service", "logger", "message"} <= line.keys(), name
            assert line["service"] == name
    (engine,) = (lines for name, lines in logs.items() if name.startswith("generation-"))
    served = [line["version"] for line in engine if line["message"].startswith("serves version")]
    assert served[-1] == STEPS
    assert all(line["run"] == "quickstart" for line in (*engine, *logs["learner"], *logs["control"]))
    in_training = [line for line in logs["learner"] if line.get("step")]
    assert {1, STEPS} <= {line["step"] for line in in_training} <= set(range(1, STEPS + 1))
    assert all(line["version"] <= line["step"] for line in in_training)


def test_seats_are_trained_each_in_its_own_context_and_games_once(run: Path) -> None:
    assert examine(run)[0].proven
    config, log, numbers = load_run(run / "config.yaml", []), BatchLog(run), []
    tokenizer = load_tokenizer(newest_checkpoint(run)[1])
    for step in range(1, STEPS + 1):
        batch = log.read(step, config).batch
        kept = {(row.group, row.index): row.advantages for row in log.read_tokens(step)}
        for group in (group for group in batch.groups if group.tag == "Game"):
            numbers.append(group.number)
            for member in group.trajectories:
                check_game(member, tokenizer)
            check_advantages(group, kept)
    assert len(numbers) == len(set(numbers)) == STEPS * GROUPS_PER_STEP // 2
    evaluations = [record["values"] for record in read_json_lines(run / "metrics.jsonl") if record["source"] == "eval"]
    assert len(evaluations) == 4
    for values in evaluations:
        assert values["env/Game/reward"] == sum(values[f"env/Game/{seat}/reward"] for seat in PLAYERS)
        assert 0.0 <= values[f"env/Game/{PLAYERS[0]}/success"] <= 1.0


def check_game(member: Trajectory, tokenizer: Any) -> None:
    """Play a recorded game again by its sampled words: each seat was shown its own position, and got its own reward."""
    env = registry.make("pettingzoo", {"id": GAME})
    (position, info), earned = env.reset(seed=member.seed), dict.fromkeys(PLAYERS, 0.0)
    for turn, seat in zip(member.turns, member.seats, strict=True):
        tokens = member.segments[turn.segment].tokens
        shown = tokenizer.decode(tokens[: turn.start], skip_special_tokens=True).split()
        answer = tokenizer.decode(tokens[turn.start : turn.end], skip_special_tokens=True)
        assert info["seat"] == seat
        assert shown[-1 - len(position.split()) :] == [*position.split(), "assistant"]
        assert set(PLAYERS) & set(shown) == {seat}
        position, _, is_over, _, info = env.step(answer)
        earned = {name: reward + info["seats"].get(name, {"reward": 0.0})["reward"] for name, reward in earned.items()}
    assert is_over
    assert {name: member.metrics[f"{name}/reward"] for name in PLAYERS} == earned
    assert {seat: take_seat(member, seat).reward for seat in set(member.seats)} == {
        seat: earned[seat] for seat in set(member.seats)
    }


def check_advantages(group: Group, kept: Mapping[tuple[int, int], Any]) -> None:
    """Each seat's reward less the mean of that seat, on that seat's tokens."""
    starts = dict.fromkeys([member.index for member in group.trajectories], 0)
    for seat in PLAYERS:
        played = [own for member in group.trajectories if (own := take_seat(member, seat)).turns]
        mean = sum(own.reward for own in played) / max(len(played), 1)
        for own in played:
            start, end = starts[own.index], starts[own.index] + own.num_sampled
            np.testing.assert_allclose(kept[group.number, own.index][start:end], own.reward - mean, atol=1e-6)
            starts[own.index] = end
    assert starts == {member.index: len(kept[group.number, member.index]) for member in group.trajectories}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
