from pathlib import Path

from PIL import Image

from offbeat.deploy.report.curve import CurvePoint, draw_learning_curve, smooth


def test_a_constant_stays_constant_and_a_step_is_rounded():
    assert smooth([2.0] * 5, 3) == [2.0] * 5
    assert smooth([0.0, 0.0, 3.0, 3.0], 3) == [0.0, 1.0, 2.0, 3.0]
    assert smooth([], 3) == []


def test_a_curve_is_plotted_even_of_a_run_that_hardly_began(tmp_path: Path):
    points = [CurvePoint(step, 10.0 + step, step / 20) for step in range(20)]
    for name, rollout in (("full", points), ("empty", [])):
        draw_learning_curve(
            tmp_path / f"{name}.png", title="t", rollout=rollout, evaluations=points[::5], baselines={"random": 0.1}
        )
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.size[0] > 1000
