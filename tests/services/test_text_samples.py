import pytest

from offbeat.services.telemetry import MetricRecord, decode_record, encode_record, mean
from offbeat.services.text_samples import CUT, TextSample, cut_middle, describe_samples, escape, to_columns, to_text

HOSTILE = "\x1b[2J\x1b]0;owned\x07 [bold red]x[/] \u202egnp.\u2028\udcff C:\\ é\r\n| 日本"
SAMPLE = TextSample(4, 3, "Lake", 1.0, "<|im_start|>user\nS F", ("<answer>Left</answer>", "hm"), ("Left", "hm"))


def test_what_a_terminal_would_interpret_is_escaped_and_letters_are_kept():
    shown = escape(HOSTILE)
    assert shown == "\\x1b[2J\\x1b]0;owned\\x07 [bold red]x[/] \\u202egnp.\\u2028\\udcff C:\\ é\\r\\n| 日本"
    assert shown.isprintable()


@pytest.mark.parametrize("length", [10, 40, 41, 400])
def test_a_cut_text_keeps_both_ends_and_its_limit(length: int):
    text = "".join(chr(ord("a") + i % 26) for i in range(length))
    cut = cut_middle(text, 40)
    assert len(cut) <= 40
    assert (cut == text) == (length <= 40)
    assert length <= 40 or (cut.startswith(text[:10]) and cut.endswith(text[-10:]) and CUT in cut)


def test_a_sample_takes_few_lines_on_a_console():
    assert describe_samples([SAMPLE]).splitlines() == [
        "Sample of step 4: Lake, score 1, version 3",
        "  prompt   <|im_start|>user\\nS F",
        "  answers  <answer>Left</answer> | hm",
        "  actions  Left | hm",
    ]
    hostile = TextSample(4, -1, HOSTILE, 0.5, HOSTILE * 100, (HOSTILE,) * 9, (HOSTILE,) * 9)
    lines = describe_samples([hostile]).splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() and len(line) < 600 for line in lines)


def test_samples_travel_with_their_step_and_old_records_are_read():
    samples = (SAMPLE, TextSample(4, 3, "Lake", 0.0, HOSTILE, (), ()))
    record = MetricRecord("learner", {"reward": mean([0.5])}, 4, {}, 1.0, samples)
    assert decode_record(encode_record(record)) == record
    assert decode_record(encode_record(MetricRecord("learner", {}, 4, {}, 1.0))).samples == ()


def test_trackers_get_a_text_or_a_table():
    assert to_text(SAMPLE).splitlines()[0] == "step 4, version 3, tag Lake, score 1"
    assert "action 1: Left" in to_text(SAMPLE)
    assert to_columns([SAMPLE])["actions"] == ["Left\nhm"]
