"""Episodes of several seats: each has its own context, rewards and metrics."""

import pytest
from tokenizers import Tokenizer

from offbeat.envs.contract import check_contract
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import CodecError, EpisodeError
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import StopReason
from offbeat.trainer.data.seats import take_seat
from tests.copying import replace
from tests.fakes_rollout import HERE, SeatsEnv
from tests.services.rollout.episodes.test_episode import Player, render_chatml, saying

GAME = f"{HERE}SeatsEnv"
MOVES = ("Left", "Down", "Right", "Up")


@pytest.mark.parametrize("manager", ["TrajEnvManager", "StepEnvManager"])
async def test_each_seat_has_a_conversation_of_its_own(chat: ChatFormat, tokenizer: Tokenizer, manager: str):
    player = Player(chat, saying(tokenizer, *MOVES))
    got = await player.play(env_type=GAME, env_config={"order": "baba"}, env_manager_cls=manager, keep_text=True)
    assert decode_trajectory(encode_trajectory(got)).seats == got.seats == ("b", "a", "b", "a")
    assert [got.segments[turn.segment].token_versions()[turn.start] for turn in got.turns] == [0, 1, 2, 3]
    assert got.text == ("Go", "G", "Left", "P", "Down", "G", "Right", "P", "Up")
    for seat, moves in (("b", ("Left", "Right")), ("a", ("Down", "Up"))):
        own = take_seat(got, seat)
        turns = [[("user", SeatsEnv.SEES[seat]), ("assistant", move)] for move in moves]
        contexts = [turns[0] + turns[1]] if manager == "TrajEnvManager" else turns
        expected = [[{"role": r, "content": c} for r, c in (("system", "Go"), *context)] for context in contexts]
        assert [s.tokens.tolist() for s in own.segments] == [tokenizer.encode(render_chatml(m)).ids for m in expected]
        for turn, move in zip(own.turns, moves, strict=True):
            segment = own.segments[turn.segment]
            assert segment.loss_mask[turn.start : turn.end].all()
            assert tokenizer.decode(segment.tokens[turn.start : turn.end]) == move
    assert [list(prompt) for prompt in player.prompts] == [
        got.segments[turn.segment].tokens[: turn.start].tolist() for turn in got.turns
    ]


async def test_rewards_of_others_moves_go_to_a_seats_last_turn(chat: ChatFormat, tokenizer: Tokenizer):
    """The game ends with a move of `b`; `c` never moves."""
    got = await Player(chat, saying(tokenizer, *MOVES)).play(env_type=GAME, env_config={"order": "abab"})
    assert [turn.reward for turn in got.turns] == [1.0, 1.0, 1.0 + 10.0, 1.0 + 20.0]
    metrics = {name: value for name, value in got.metrics.items() if "/" in name}
    rewards = {"a/reward": 12.0, "b/reward": 22.0, "c/reward": 30.0}
    assert metrics == {**rewards, "a/success": 0.0, "b/success": 1.0, "c/success": 1.0}
    assert take_seat(got, "b").metrics["success"] == 1.0
    assert (take_seat(got, "b").reward, take_seat(got, "c").turns) == (22.0, ())


async def test_a_reward_before_a_seats_first_turn_is_on_that_turn(chat: ChatFormat, tokenizer: Tokenizer):
    class Paid(SeatsEnv):
        def step(self, action: str):
            observation, reward, over, cut, info = super().step(action)
            info["seats"]["c"]["reward"] += 5.0  # also before c has moved
            return observation, reward, over, cut, info

    globals()["Paid"] = Paid
    got = await Player(chat, saying(tokenizer, *MOVES)).play(env_type=f"{__name__}:Paid", env_config={"order": "abc"})
    assert [turn.reward for turn in got.turns] == [11.0, 21.0, 5.0 + 5.0 + 1.0 + 30.0 + 5.0]


async def test_a_full_context_of_one_seat_ends_the_game(chat: ChatFormat, tokenizer: Tokenizer):
    player = Player(chat, saying(tokenizer, *MOVES))
    got = await player.play(env_type=GAME, env_config={"order": "abaaaaab"}, sequence_length=24)
    assert got.stop_reason is StopReason.MAX_LENGTH
    assert got.seats == ("a", "b", "a")
    assert all(len(segment.tokens) <= 24 for segment in got.segments)


async def test_a_seat_that_the_env_does_not_have_is_named(chat: ChatFormat, tokenizer: Tokenizer):
    with pytest.raises(EpisodeError, match="names 'd' to move; its `seats` are a, b, c"):
        await Player(chat, saying(tokenizer, *MOVES)).play(env_type=GAME, env_config={"order": "ad"})


async def test_seats_that_do_not_fit_the_turns_are_refused(chat: ChatFormat, tokenizer: Tokenizer):
    got = await Player(chat, saying(tokenizer, *MOVES)).play(env_type=GAME)
    for seats in (("a",), ("a", "a", "b", "b")):
        with pytest.raises(CodecError, match="seat"):
            encode_trajectory(replace(got, seats=seats))


def test_the_contract_names_a_seat_that_does_not_exist():
    assert check_contract(GAME, {"order": "baba"}).problems == []
    (problem,) = check_contract(GAME, {"order": "bd"}).problems
    assert problem.message == "info's `seat` is 'd' where a seat is to move: name one of a, b, c"
