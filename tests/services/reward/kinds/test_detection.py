import json

import pytest

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.detection import Box, average_precision, iou
from tests.services.reward.samples import score

CAT = {"bbox_2d": [0, 0, 10, 10], "label": "cat"}
DOG = {"bbox_2d": [20, 20, 30, 30], "label": "dog"}


def answer(*boxes: object) -> str:
    return f"<think>see</think>\n```json\n{json.dumps(boxes)}\n```"


def test_iou_by_hand():
    assert iou(Box("", 0, 0, 10, 10), Box("", 5, 0, 15, 10)) == pytest.approx(50 / 150)
    assert iou(Box("", 0, 0, 10, 10), Box("", 10, 0, 20, 10)) == 0.0


def test_missing_extra_and_mislabelled_boxes_cost():
    assert score("detection", answer(DOG, CAT), [CAT, DOG]) == 1.0
    assert score("detection", answer(CAT), [CAT, DOG]) == 0.5
    assert score("detection", answer(CAT, DOG, CAT, CAT), [CAT, DOG]) == 0.5
    assert score("detection", answer({**CAT, "label": "dog"}), [CAT]) == 0.0
    shifted = {"bbox_2d": [5, 0, 15, 10], "label": "Cat "}
    assert score("detection", answer(shifted), json.dumps([CAT])) == pytest.approx(1 / 3)


def test_an_empty_list_is_right_where_there_is_nothing():
    assert score("detection", "[]", []) == 1.0
    assert score("detection", answer(CAT), []) == 0.0
    assert score("detection", "[]", [CAT], metric="map") == 0.0


def test_average_precision_by_hand():
    """Confident miss, then two hits of two: precisions 1/2 and 2/3 at recalls 1/2 and 1, interpolated to 2/3."""
    gold = [Box("", 0, 0, 10, 10), Box("", 20, 20, 30, 30)]
    boxes = [Box("", 50, 50, 60, 60, 0.9), gold[0]._replace(confidence=0.8), gold[1]._replace(confidence=0.7)]
    assert average_precision(boxes, gold, 0.5) == pytest.approx(2 / 3)
    # One hit of two: precision 1 up to recall 1/2, which are 51 of 101 points
    assert average_precision(boxes[1:2], gold, 0.5) == pytest.approx(51 / 101)


def test_map_averages_thresholds_and_labels():
    """An IoU of 0.72 passes 5 of 10 thresholds; a label that the image has not counts with 0."""
    near = {"bbox_2d": [0, 0, 10, 7.2], "label": "cat"}
    assert score("detection", answer(near), [CAT], metric="map") == pytest.approx(0.5)
    assert score("detection", answer(near, DOG), [CAT], metric="map") == pytest.approx(0.25)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "no boxes",
        "[",
        "]" * 10 + "[" * 10,
        "[" * 100_000 + "]" * 100_000,
        '[{"bbox_2d": [0, 0, NaN, 10], "label": "cat"}]',
        '[{"bbox_2d": [0, 0, 1e999, 10], "label": "cat"}]',
        '[{"bbox_2d": [0, 0, ' + "9" * 5_000 + ', 10], "label": "cat"}]',
        '[{"bbox_2d": [true, 0, 10, 10], "label": "cat"}]',
        '[{"bbox_2d": [10, 10, 0, 0], "label": "cat"}]',
        '[{"bbox_2d": "0000", "label": "cat"}]',
        '[{"label": "cat"}]',
        "[[0, 0, 10, 10]]",
        json.dumps([CAT] * 301),
    ],
)
def test_malformed_boxes_score_zero(response: str):
    assert score("detection", response, [CAT]) == 0.0
    assert score("detection", response, [CAT], metric="map") == 0.0


@pytest.mark.parametrize("truth", [None, "not json", [{"label": "cat"}], {"boxes": []}, 3])
def test_a_malformed_truth_fails_the_row(truth: object):
    with pytest.raises(RewardError) as raised:
        score("detection", answer(CAT), truth)
    assert raised.value.failure is Failure.BAD_ROW
    assert truth != "not json" or "ground_truth 'not json' is no JSON" in str(raised.value)
