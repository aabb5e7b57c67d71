"""Splits of a repository by the names of its files and its card."""

from pathlib import Path

import pytest

from offbeat.deploy.config.dataset_splits import Split, SplitError, find_split
from tests.dataset_repository import CARD

NAMES = [
    *("README.md", "sums.py", "main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"),
    *("main/test-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet", "pairs.jsonl.gz"),
]
TRAIN = Split("main", "train", ("main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"))
SHARDS = [
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
    "data/validation-00000-of-00001.parquet",
]
EXPORT = ["main/train/0000.parquet", "main/train/0001.parquet", "main/test/0000.parquet"]


@pytest.fixture
def card(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(CARD)
    return path


@pytest.mark.parametrize(
    ("config", "split", "found"),
    [
        ("main", None, TRAIN),
        ("main", "train", TRAIN),
        ("main", "test", Split("main", "test", ("main/test-00000-of-00001.parquet",))),
        ("pairs", None, Split("pairs", "train", ("pairs.jsonl.gz",))),
    ],
)
def test_a_card_says_which_files_a_split_has(card: Path, config: str, split: str | None, found: Split):
    assert find_split(NAMES, card, config, split, "train") == found


def test_without_a_card_names_of_files_say_it():
    assert find_split(SHARDS, None, None, None, "train") == Split("default", "train", tuple(SHARDS[:2]))
    assert find_split(SHARDS, None, "validation", None, "train") == Split("default", "validation", (SHARDS[2],))
    assert find_split(["rows.jsonl"], None, None, None, "train") == Split("default", "train", ("rows.jsonl",))


def test_a_conversion_of_the_hub_has_folders_of_configs_and_splits():
    assert find_split(EXPORT, None, None, None, "train") == Split("main", "train", tuple(EXPORT[:2]))
    assert find_split(EXPORT, None, "test", None, "train") == Split("main", "test", (EXPORT[2],))


@pytest.mark.parametrize(
    ("config", "split", "says"),
    [
        (None, None, "several configs; there is main, socratic, pairs: write `:CONFIG`"),
        ("other", None, "no config 'other'; there is main, socratic, pairs"),
        ("main", "dev", "config main has no split 'dev'; there is train, test: write `:main/SPLIT`"),
        ("socratic", "test", "config socratic has no split 'test'; there is train:"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(card: Path, config: str | None, split: str | None, says: str):
    with pytest.raises(SplitError, match=says):
        find_split(NAMES, card, config, split, "train")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["README.md", "load.py"], "no data files are found .*scripts are not run.*`@refs/convert/parquet`"),
        (["a/1.png", "b/2.png"], "its data files are .png, of which one of .jsonl"),
        (["train/a.json", "train/b.jsonl"], "its data files are .json, .jsonl, of which"),
    ],
)
def test_files_that_are_not_rows_are_refused(names: list[str], says: str):
    with pytest.raises(SplitError, match=says):
        find_split(names, None, None, None, "train")


@pytest.mark.parametrize("pattern", ["/etc/*", "../../*.jsonl", "https://127.0.0.1:9/x.jsonl", "zip://*::x.zip"])
def test_a_card_can_not_name_files_elsewhere(card: Path, pattern: str):
    card.write_text(f"---\nconfigs:\n- config_name: main\n  data_files: [{{split: train, path: '{pattern}'}}]\n---\n")
    with pytest.raises(SplitError, match=r"its card names .*, which is not in the repository"):
        find_split(NAMES, card, None, None, "train")


@pytest.mark.parametrize("text", ["---\nconfigs: 3\n---\n", "---\nconfigs: [\n---\n"])
def test_a_card_that_can_not_be_read_is_a_line(card: Path, text: str):
    card.write_text(text)
    with pytest.raises(SplitError):
        find_split(NAMES, card, None, None, "train")


def test_names_of_files_outside_of_a_repository_are_not_created(tmp_path: Path):
    found = find_split([f"{tmp_path}/made.jsonl", "../made.jsonl", "rows.jsonl"], None, None, None, "train")
    assert found.files == ("rows.jsonl",)
    assert not list(tmp_path.iterdir())
