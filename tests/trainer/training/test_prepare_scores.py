"""Scores of a dataset's rows are computed once, and again for rows that have changed."""

import json
from pathlib import Path
from typing import Any

import torch

from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.config.scored_roles import scored_roles
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.group_scorer import GroupScorer
from offbeat.trainer.training.prepare_scores import ROWS_PER_PASS, open_sources, prepare_scores, row_group, show_files
from offbeat.trainer.training.score_files import ROWS_PER_FILE, ScoreFiles, token_digest

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


class Preparation:
    """`dpo.precompute_ref_log_probs` over rows that the test rewrites."""

    def __init__(self, folder: Path, dataset: Path, loss_type: str = "sigmoid") -> None:
        self.folder = folder
        self.dataset = dataset
        tree = {
            "pipeline": "dpo",
            "dpo": {"precompute_ref_log_probs": True, "loss_type": loss_type},
            "reference": {"strategy_args": {"placement": "files"}},
            "pretrain": str(folder),
            "data": {"dataset_name": dataset},
        }
        self.run = LearnerRun("run", "", dataset.parent, LearnerRunConfig.model_validate(tree))
        (self.role,) = scored_roles(self.run.config, self.run.config.reference, "files")
        self.scorer = GroupScorer(FrozenModel(load_policy(folder, ModelArgs(), 1), ALONE), self.run.config, None)

    def write(self, *rows: dict[str, Any] | str) -> None:
        self.dataset.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

    def prepare(self, *rows: dict[str, Any] | str) -> int | None:
        """Write the rows and return how many are scored."""
        self.write(*rows)
        return prepare_scores(list(open_sources(self.run, self.folder)), self.role, "reference@1", self.scorer, ALONE)

    def read(self, row: int) -> bytes:
        """Return a row's scores; raises ControlError if they are of other tokens."""
        ((_, source),) = open_sources(self.run, self.folder)
        return ScoreFiles(self.dataset, "reference@1").read(row, digest_of(source, row))


def digest_of(source: DataSource, row: int) -> bytes:
    return token_digest(row_group(row, source.row(row)))


def pair(chosen: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": "a b", "chosen": chosen, "rejected": "d", **columns}


def test_rows_that_have_changed_are_scored_again(folder: Path, tmp_path: Path):
    preparation = Preparation(folder, tmp_path / "rows.jsonl")
    assert preparation.prepare(pair("a"), pair("b"), pair("c")) == 3
    before = [preparation.read(row) for row in range(3)]
    assert preparation.prepare(pair("a", note=1), pair("b"), pair("c")) == 0
    assert preparation.prepare(pair("a"), pair("b c b"), pair("c")) == 3
    after = [preparation.read(row) for row in range(3)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_a_stopped_preparation_continues_with_the_first_missing_file(folder: Path, tmp_path: Path):
    preparation = Preparation(folder, tmp_path / "rows.jsonl")
    preparation.write(*[pair("a")] * (ROWS_PER_FILE + 2))
    ((_, source),) = sources = list(open_sources(preparation.run, folder))
    shown: list[tuple[int, int]] = []
    stops = iter([False] * (ROWS_PER_FILE // ROWS_PER_PASS) + [True])
    arguments = (sources, preparation.role, "reference@1", preparation.scorer, ALONE)
    show = show_files(sources, lambda done, total: shown.append((done, total)))
    assert prepare_scores(*arguments, show, lambda: next(stops)) is None
    assert shown == [(ROWS_PER_FILE, source.num_rows)]
    assert prepare_scores(*arguments, show) == 2
    assert shown[1:] == [(source.num_rows, source.num_rows)]


def test_a_row_that_was_unreadable_is_scored_once_it_is_mended(folder: Path, tmp_path: Path):
    preparation = Preparation(folder, tmp_path / "rows.jsonl")
    assert preparation.prepare(pair("a"), "{broken") == 1
    assert preparation.prepare(pair("a"), "{broken") == 0
    assert preparation.prepare(pair("a"), pair("b")) == 2
    assert preparation.read(1)


def test_a_response_of_kto_is_scored_again_after_the_row_before_it(folder: Path, tmp_path: Path):
    """Its mismatched response is that row's."""
    preparation = Preparation(folder, tmp_path / "rows.jsonl", "kto")
    rows = [{"prompt": "a", "completion": text, "label": True} for text in ("b", "c", "d")]
    assert preparation.prepare(*rows) == 3
    ((_, source),) = open_sources(preparation.run, folder)
    before = [source.digest(row) for row in range(3)]
    assert preparation.prepare(rows[0] | {"completion": "b b"}, *rows[1:]) == 3
    ((_, source),) = open_sources(preparation.run, folder)
    assert [source.digest(row) == each for row, each in enumerate(before)] == [False, False, True]
    assert all(preparation.read(row) for row in range(3))
