import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from offbeat import Run
from offbeat.benchmarks.studies.pipeline_plot import PANELS, Panel, draw

SVG = "{http://www.w3.org/2000/svg}"


def made_run(folder: Path, evaluations: list[tuple[int, str, dict[str, float]]]) -> Run:
    folder.mkdir()
    records = [
        {
            "id": f"{i}-0",
            "time": float(i),
            "source": "eval",
            "step": step,
            "labels": {"sampling": sampling},
            "values": v,
        }
        for i, (step, sampling, v) in enumerate(evaluations)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Run(folder)


def test_a_curve_has_a_samplings_values_by_step_a_repeated_step_once(tmp_path: Path):
    run = made_run(
        tmp_path / "run",
        [
            (0, "sampled", {"success": 0.1}),
            (0, "greedy", {"success": 0.9}),
            (10, "loss", {"loss": 2.0}),
            (20, "sampled", {"success": 0.3}),
            (10, "sampled", {"success": 0.2}),
            (20, "sampled", {"success": 0.4}),
        ],
    )
    assert Panel("sampled", "success", "").curve(run) == ([0, 10, 20], [0.1, 0.2, 0.4])
    assert Panel("loss", "loss", "").curve(run) == ([10], [2.0])


@pytest.mark.parametrize("name", PANELS)
def test_the_plot_of_each_pipeline_is_small_and_follows_the_pages_scheme(name: str, tmp_path: Path):
    values = {"success": 0.5, "loss": 1.0, "kd_loss": 1.0, "rewards/accuracies": 0.5}
    evaluations = [(step, sampling, values) for step in range(0, 70, 10) for sampling in ("sampled", "loss")]
    runs = {seed: made_run(tmp_path / f"{seed}", evaluations[: None if seed else -2]) for seed in range(3)}
    teachers = [0.9, 0.8, 0.7] if name == "distill" else []
    draw(name, runs, tmp_path / "plot.svg", teachers=teachers)
    text = (tmp_path / "plot.svg").read_text()
    root = ElementTree.fromstring(text)
    assert len(text) < 60_000
    assert "prefers-color-scheme: dark" in str(root.findtext(f"{SVG}style"))
    named = {"".join(each.itertext()) for each in root.iter(f"{SVG}text")}
    assert {"seed 0", "seed 1", "seed 2", "mean", "steps", *(panel.label for panel in PANELS[name])} <= named
    assert ("their teachers" in named) == bool(teachers)
    ids = [each.get("id") for each in root.iter(f"{SVG}g")]
    assert "background" in ids
    assert ids.count("mean") == len(PANELS[name])
    draw(name, runs, tmp_path / "again.svg", teachers=teachers)
    assert (tmp_path / "again.svg").read_text() == text
