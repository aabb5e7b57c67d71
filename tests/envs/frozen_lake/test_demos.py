import numpy as np

from offbeat.envs.frozen_lake import FrozenLakeConfig, FrozenLakeEnv
from offbeat.envs.frozen_lake.demos import careful_wandering
from offbeat.envs.frozen_lake.maps import ACTIONS

OFFSETS = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}


def demos(count: int) -> list[list[dict[str, str]]]:
    env, rng = FrozenLakeEnv(), np.random.default_rng(3)
    return [careful_wandering(env, rng) for _ in range(count)]


def test_roles_alternate_and_the_last_message_is_an_answer():
    for messages in demos(50):
        roles = [message["role"] for message in messages]
        assert roles == ["system", *["user", "assistant"] * ((len(roles) - 1) // 2)]
        assert 3 <= len(messages) <= 25
        assert all(m["content"] in ACTIONS for m in messages if m["role"] == "assistant")


def test_no_step_goes_onto_a_wall_or_a_hole():
    for messages in demos(200):
        for user, answer in zip(messages[1::2], messages[2::2], strict=True):
            words = user["content"].split("\n")[-1].split()
            assert dict(zip(words[2::2], words[3::2], strict=True))[answer["content"]] in ("_", "G")


def test_the_walk_is_the_one_that_the_messages_show():
    for messages in demos(30):
        positions = [tuple(map(int, m["content"].split("\n")[-1].split()[:2])) for m in messages[1::2]]
        for (row, column), answer, there in zip(positions, messages[2::2], positions[1:], strict=False):
            down, right = OFFSETS[answer["content"]]
            assert there == (row + down, column + right)


def test_all_directions_are_taken_and_few_walks_reach_the_goal():
    answers = [m["content"] for messages in demos(300) for m in messages if m["role"] == "assistant"]
    assert all(answers.count(action) > len(answers) / 8 for action in ACTIONS)
    short = sum(len(messages) < 25 for messages in demos(300))
    assert 0 < short < 150


def test_the_same_generator_gives_the_same_demonstrations():
    assert demos(5) == demos(5)


def test_templates_shape_prompts_as_they_do_in_a_rollout():
    rng = np.random.default_rng(0)
    messages = careful_wandering(
        FrozenLakeEnv(FrozenLakeConfig(size=5)),
        rng,
        max_turns=4,
        system_prompt="S",
        agent_template="{step}/{actions_left} {observation}",
    )
    assert messages[0] == {"role": "system", "content": "S"}
    assert [m["content"][:3] for m in messages[1::2]] == ["1/4", "2/3", "3/2", "4/1"][: len(messages) // 2]
