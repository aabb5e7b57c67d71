import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.services.errors import EpisodeError
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import Completion, Trajectory, VersionSpan
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.sampled import sample_response
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy

WORDS = ("Left", "Right", "Up", "Down", "go", "where", "now", "no")
SAY = {"role": "user", "content": "go where"}
ANSWER = {"role": "assistant", "content": "Left now"}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    write_tiny_policy(tmp_path / "policy", TinyPolicyConfig(), WORDS)
    return tmp_path / "policy"


def source(policy: Path, rows: list[Any], pipeline: str = "sft", max_tokens: int = 64, **settings: Any) -> DataSource:
    path = policy.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(dataset_name=path, shuffle=False, **settings)
    return DataSource(config, pipeline, policy, seed=1, max_tokens=max_tokens)


def learned(trajectory: Trajectory) -> list[list[int]]:
    (segment,) = trajectory.segments
    return [segment.tokens[turn.start : turn.end].tolist() for turn in trajectory.turns]


def test_messages_and_columns_of_texts_give_the_same_tokens(policy: Path):
    one = source(policy, [{"messages": [SAY, ANSWER]}]).trajectory(0, 0, 5)
    other = source(policy, [{"prompt": "go where", "response": "Left now"}]).trajectory(0, 0, 5)
    renamed = source(policy, [{"q": [SAY], "a": [ANSWER]}], prompt_key="q", response_key="a").trajectory(0, 0, 5)
    for trajectory in (other, renamed):
        assert trajectory.segments[0].tokens.tolist() == one.segments[0].tokens.tolist()
        assert learned(trajectory) == learned(one)
    assert one.version_range() == (5, 5)
    assert not one.segments[0].logprobs.any()
    assert encode_trajectory(decode_trajectory(encode_trajectory(one))) == encode_trajectory(one)


def test_a_query_follows_the_prompt_and_a_system_message_precedes_it(policy: Path):
    """As Alpaca's rows: `instruction`, an `input` that may be empty, `output`."""
    keys = {"query_key": "input", "system_key": "about"}
    messages = [{"role": "system", "content": "now"}, {"role": "user", "content": "go\nwhere"}, ANSWER]
    said = source(policy, [{"messages": messages}]).trajectory(0, 0, 0)
    row = {"prompt": "go", "input": "where", "about": "now", "response": ANSWER["content"]}
    asked = source(policy, [row], **keys).trajectory(0, 0, 0)
    assert asked.segments[0].tokens.tolist() == said.segments[0].tokens.tolist()
    assert learned(asked) == learned(said)
    plain = source(policy, [{"prompt": "go", "response": ANSWER["content"]}]).trajectory(0, 0, 0)
    empty = source(policy, [row | {"input": "", "about": None}], **keys).trajectory(0, 0, 0)
    assert empty.segments[0].tokens.tolist() == plain.segments[0].tokens.tolist()
    for changes, problem in (
        ({"input": 3}, "input: expected a text, got int"),
        ({"prompt": [SAY]}, "it follows a text"),
    ):
        with pytest.raises(EpisodeError, match=problem):
            source(policy, [row | changes], **keys).trajectory(0, 0, 0)


TEMPLATE = """{{ tools | tojson if tools }}
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def call_row(name: str, arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    parameters = {"type": "object", "properties": properties}
    return {
        "messages": [SAY, {**ANSWER, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
    }


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_calls_and_tools_of_a_table_have_their_own_keys_alone(policy: Path, tmp_path: Path, name: str):
    """Arrow gives each mapping the keys of all rows; a row has the tokens of the same row as a line of JSON."""
    datasets = pytest.importorskip("datasets")
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        call_row("go", {"places": ["Up", None]}, {"places": {"type": "array"}}),
        call_row("add", {"a": 1, "b": 2}, {"a": {"type": "integer"}, "b": {"enum": [2, 3]}}),
    ]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    lines = source(policy, rows)
    of_table = DataSource(DataConfig(dataset_name=tmp_path / name, shuffle=False), "sft", policy, seed=1, max_tokens=64)
    for number in range(2):
        line, row = lines.trajectory(number, 0, 0), of_table.trajectory(number, 0, 0)
        assert row.segments[0].tokens.tolist() == line.segments[0].tokens.tolist()
        assert learned(row) == learned(line)


def test_the_last_answer_alone_is_learned_on_request(policy: Path):
    messages = [SAY, ANSWER, SAY, {"role": "assistant", "content": "Up"}]
    every = source(policy, [{"messages": messages}]).trajectory(0, 0, 0)
    last = source(policy, [{"messages": messages}], train_on="last").trajectory(0, 0, 0)
    assert learned(last) == learned(every)[1:]
    assert np.array_equal(last.segments[0].tokens, every.segments[0].tokens)


def test_everything_after_the_prompt_is_learned_on_request(policy: Path):
    messages = [SAY, ANSWER, SAY, {"role": "assistant", "content": "Up"}]
    every = source(policy, [{"messages": messages}]).trajectory(0, 0, 0)
    rest = source(policy, [{"messages": messages}], train_on="completion").trajectory(0, 0, 0)
    first, last = every.turns
    assert [(turn.start, turn.end) for turn in rest.turns] == [(first.start, last.start), (last.start, last.end)]
    assert rest.num_sampled == last.end - first.start == int(rest.segments[0].loss_mask.sum())
    assert rest.num_sampled > every.num_sampled


@pytest.mark.parametrize("train_on", ["all", "last", "completion"])
async def test_the_last_response_is_what_is_sampled_whatever_is_learned(policy: Path, train_on: str):
    """With `distill.lmbda`: the prompt has all earlier answers."""
    messages = [SAY, ANSWER, SAY, {"role": "assistant", "content": "Up"}]
    row = source(policy, [{"messages": messages}], train_on=train_on).trajectory(0, 0, 0)
    last = source(policy, [{"messages": messages}]).trajectory(0, 0, 0).turns[-1]
    asked: list[list[int]] = []

    async def answer(prompt: Sequence[int], *_: Any) -> Completion:
        asked.append(list(prompt))
        return Completion("r", (7,), (-0.5,), (VersionSpan(0, 1, 5),))

    await sample_response(row, answer, max_new_tokens=4, max_tokens=64)
    assert asked == [row.segments[0].tokens[: last.start].tolist()]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "go where", "chosen": "Left", "rejected": "Up now"},
        {"prompt": [SAY], "chosen": [{"role": "assistant", "content": "Left"}], "rejected": "Up now"},
        {
            "chosen": [SAY, {"role": "assistant", "content": "Left"}],
            "rejected": [SAY, {"role": "assistant", "content": "Up now"}],
        },
        {
            "prompt": "go where",
            "chosen": [SAY, {"role": "assistant", "content": "Left"}],
            "rejected": [SAY, {"role": "assistant", "content": "Up now"}],
        },
    ],
)
def test_a_pair_is_two_trajectories_after_one_prompt(policy: Path, row: Any):
    rows = source(policy, [row], "dpo")
    chosen, rejected = (rows.trajectory(0, index, 0) for index in range(2))
    start = chosen.turns[0].start
    assert start == rejected.turns[0].start
    assert np.array_equal(chosen.segments[0].tokens[:start], rejected.segments[0].tokens[:start])
    assert [len(each) for each in (*learned(chosen), *learned(rejected))] == [2, 3]  # with the end of the turn
    said = source(policy, [{"messages": [SAY, {"role": "assistant", "content": "Left"}]}]).trajectory(0, 0, 0)
    assert np.array_equal(chosen.segments[0].tokens, said.segments[0].tokens)


def test_a_pair_without_a_difference_differs_in_its_last_messages(policy: Path):
    equal, longer = [SAY, ANSWER], [SAY, ANSWER, SAY, {"role": "assistant", "content": "Up"}]
    for row, sizes in (
        ({"chosen": equal, "rejected": equal}, [3, 3]),
        ({"chosen": longer, "rejected": equal}, [3, 2, 3]),
    ):
        rows = source(policy, [row], "dpo")
        assert [len(turn) for index in range(2) for turn in learned(rows.trajectory(0, index, 0))] == sizes


@pytest.mark.parametrize(
    ("pipeline", "row"),
    [
        ("sft", {"prompt": "go where", "response": [SAY, ANSWER]}),
        ("dpo", {"prompt": "go where", "completion": [SAY, ANSWER], "label": True}),
        ("dpo", {"prompt": [SAY], "chosen": [SAY, ANSWER], "rejected": [SAY, ANSWER]}),
        ("dpo", {"prompt": "go where", "chosen": [SAY, ANSWER], "rejected": "Left"}),
    ],
)
def test_a_response_that_repeats_the_prompt_is_refused(policy: Path, pipeline: str, row: Any):
    with pytest.raises(EpisodeError, match=r"\[0\]: expected an answer to the prompt, got a message of the role user"):
        source(policy, [row], pipeline).trajectory(0, 0, 0)


def test_answers_in_a_pairs_prompt_are_not_learned(policy: Path):
    row = {"prompt": [SAY, ANSWER, SAY], "chosen": "Left", "rejected": "Up"}
    assert [len(turn) for turn in learned(source(policy, [row], "dpo").trajectory(0, 0, 0))] == [2]


def test_a_long_row_is_left_unlearned_or_cut(policy: Path):
    row = {"messages": [SAY, {"role": "assistant", "content": "Left " * 30}]}
    dropped = source(policy, [row], max_tokens=16).trajectory(0, 0, 0)
    cut = source(policy, [row], max_tokens=16, too_long="truncate").trajectory(0, 0, 0)
    assert (dropped.num_sampled, dropped.is_truncated) == (0, True)
    assert (cut.num_tokens, cut.is_truncated) == (16, True)
    assert cut.num_sampled == 16 - cut.turns[0].start


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [SAY]}, "no assistant turn"),
        ({"messages": "hello"}, "expected a list of messages, got str"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]: expected an object with role and content"),
        ({"messages": [SAY, {"role": "assistant"}]}, r"messages\[1\]: a message needs content or tool_calls"),
        ({"messages": [SAY, ANSWER], "tools": "{"}, "tools: not JSON"),
        ({"messages": [SAY, ANSWER], "tools": "[" * 100_000}, "tools: not JSON: maximum recursion depth"),
        ({"messages": [SAY, ANSWER | {"content": "cut \ud83d"}]}, "surrogates not allowed"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(policy: Path, row: Any, problem: str):
    rows = source(policy, [{"messages": [SAY, ANSWER]}, row])
    with pytest.raises(EpisodeError, match=rf"bad_row: .*rows.jsonl:2: .*{problem}"):
        rows.trajectory(1, 0, 0)


@pytest.mark.parametrize("margin", [10**400, float("inf"), float("nan"), True, "1"], ids=lambda margin: str(margin)[:5])
def test_a_margin_is_a_finite_number(policy: Path, margin: Any):
    pair = {"prompt": "go", "chosen": "Left", "rejected": "Right"}
    assert source(policy, [pair | {"margin": 2}], "reward_model").trajectory(0, 0, 0).metrics == {"margin": 2.0}
    rows = source(policy, [pair | {"margin": margin}], "reward_model")
    with pytest.raises(EpisodeError, match=r"rows.jsonl:1: margin: expected a finite number"):
        rows.trajectory(0, 0, 0)


@pytest.mark.parametrize(
    ("pipeline", "row", "problem"),
    [
        ("sft", {"prompt": "x"}, "neither the column 'messages'.* nor 'response'.*there is prompt"),
        ("dpo", {"chosen": "x"}, "no column 'rejected' .rejected_key.; there is chosen"),
    ],
)
def test_a_missing_column_is_named_with_those_that_exist(policy: Path, pipeline: str, row: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        source(policy, [row], pipeline)


def test_validation_rows_keep_the_files_order_without_long_ones(policy: Path):
    path = policy.parent / "val.jsonl"
    long = {"messages": [SAY, {"role": "assistant", "content": "Left " * 80}]}
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [{"messages": [SAY, ANSWER]}, long, {"messages": [SAY, ANSWER]}])
    )
    validation = source(policy, [{"messages": [SAY, ANSWER]}], val_dataset_name=path).validation()
    assert [group[0].seed for group in validation.groups] == [0, 2]
    assert validation.left_out == {"too_long": 1}


UNPAIRED = [
    {"prompt": "go where", "completion": "Left now", "label": True},
    {"prompt": [SAY, ANSWER, SAY], "completion": "Up", "label": 0},
]


def test_a_row_without_a_partner_comes_with_the_response_of_the_one_before_it(policy: Path):
    rows = source(policy, UNPAIRED, "dpo")
    first, mismatch = rows.row(0)
    assert (first.reward, first.seed, mismatch.seed) == (1.0, 0, 0)
    up = source(policy, UNPAIRED, "dpo").row(1)[0]
    assert up.reward == 0.0
    assert learned(mismatch) == learned(up)
    start = first.turns[0].start
    assert np.array_equal(mismatch.segments[0].tokens[:start], first.segments[0].tokens[:start])
    assert learned(rows.row(1)[1]) == learned(first)
    assert rows.trajectory(1, 1, 3).segments[0].tokens.tolist() == rows.row(1)[1].segments[0].tokens.tolist()


def test_rows_that_are_appended_change_no_mismatched_response(policy: Path):
    """Of which scores are kept in files."""
    before, after = (source(policy, [*UNPAIRED, *more], "dpo").row(0)[1] for more in ([], [UNPAIRED[0]]))
    assert np.array_equal(before.segments[0].tokens, after.segments[0].tokens)


def test_a_label_is_true_or_false(policy: Path):
    with pytest.raises(EpisodeError, match="label: expected true or false"):
        source(policy, [{**UNPAIRED[0], "label": "yes"}, UNPAIRED[1]], "dpo").trajectory(0, 0, 0)


def test_a_mismatched_response_that_is_too_long_is_cut(policy: Path):
    rows = [UNPAIRED[0], {**UNPAIRED[0], "completion": "go " * 60}]
    first, mismatch = source(policy, rows, "dpo").row(0)
    assert (first.num_sampled, mismatch.num_tokens) == (3, 64)
    assert source(policy, rows, "dpo").row(1)[0].num_sampled == 0


def test_a_rows_tag_is_that_of_its_column(policy: Path):
    rows = [{"messages": [SAY, ANSWER], "tag": "math"}, {"messages": [SAY, ANSWER]}]
    tags = [source(policy, rows, "distill").trajectory(number, 0, 0).tag for number in range(2)]
    assert tags == ["math", "distill"]
    assert source(policy, [{**rows[1], "task": "code"}], tag_key="task").trajectory(0, 0, 0).tag == "code"
