"""Boxes of objects in an image, by IoU or mean average precision."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.function import require_truth
from offbeat.services.reward.kinds.config import DetectionConfig
from offbeat.services.reward.sample import RewardSample, final_text

BOX_KEYS = ("bbox_2d", "bbox", "box")
IOU_THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))
RECALL_POINTS = tuple(step / 100 for step in range(101))
MAX_CHARS = 200_000


class Box(NamedTuple):
    label: str
    x1: float
    y1: float
    x2: float
    y2: float
    confidence: float = 1.0


class Detection:
    def __init__(self, config: DetectionConfig) -> None:
        self._metric = mean_iou if config.metric == "iou" else mean_average_precision
        self._max_boxes = config.max_boxes

    def __call__(self, sample: RewardSample) -> float:
        truth = require_truth(sample)
        try:
            gold = read_boxes(json.loads(truth) if isinstance(truth, str) else truth)
        except json.JSONDecodeError as error:
            raise RewardError(Failure.BAD_ROW, f"ground_truth {str(truth)[:80]!r} is no JSON: {error}") from error
        except ValueError as error:
            raise RewardError(Failure.BAD_ROW, f"ground_truth: {error}") from error
        boxes = parse_boxes(final_text(sample.response))
        if boxes is None or len(boxes) > self._max_boxes:
            return 0.0
        return self._metric(boxes, gold)


def parse_boxes(text: str) -> list[Box] | None:
    """Return the boxes of a JSON list, fenced or in `<answer>`; None if invalid."""
    if len(text) > MAX_CHARS:
        return None
    start, end = text.find("["), text.rfind("]")
    if start < 0 or end < start:
        return None
    try:
        return read_boxes(json.loads(text[start : end + 1]))
    except (ValueError, RecursionError):
        return None


def read_boxes(value: Any) -> list[Box]:
    """Read a JSON list of objects; raises ValueError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("expected a list of boxes")
    return [_read_box(each) for each in value]


def _read_box(value: Any) -> Box:
    if not isinstance(value, dict):
        raise ValueError("a box is no object")
    corners = next((value[key] for key in BOX_KEYS if key in value), None)
    if not isinstance(corners, Sequence) or isinstance(corners, str) or len(corners) != 4:
        raise ValueError(f"a box has no {BOX_KEYS[0]} of four numbers")
    x1, y1, x2, y2 = (_number(corner) for corner in corners)
    if x2 <= x1 or y2 <= y1:
        raise ValueError(f"the box {[x1, y1, x2, y2]} is empty")
    confidence = _number(value.get("confidence", value.get("score", 1.0)))
    return Box(str(value.get("label", "")).strip().lower(), x1, y1, x2, y2, confidence)


def _number(value: Any) -> float:
    # Beyond the bound areas would overflow
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ValueError(f"{str(value)[:40]!r} is no coordinate")
    return float(value)


def iou(one: Box, other: Box) -> float:
    width = min(one.x2, other.x2) - max(one.x1, other.x1)
    height = min(one.y2, other.y2) - max(one.y1, other.y1)
    if width <= 0 or height <= 0:
        return 0.0
    union = _area(one) + _area(other) - width * height
    return width * height / union if union > 0 else 0.0


def _area(box: Box) -> float:
    return (box.x2 - box.x1) * (box.y2 - box.y1)


def mean_iou(boxes: Sequence[Box], gold: Sequence[Box]) -> float:
    """Return the IoU of pairs of a label, best first, over the larger number of boxes."""
    if not boxes and not gold:
        return 1.0
    pairs = [
        (value, i, j)
        for i, box in enumerate(boxes)
        for j, target in enumerate(gold)
        if box.label == target.label and (value := iou(box, target)) > 0
    ]
    used_boxes: set[int] = set()
    used_gold: set[int] = set()
    total = 0.0
    for value, i, j in sorted(pairs, reverse=True):
        if i not in used_boxes and j not in used_gold:
            used_boxes.add(i)
            used_gold.add(j)
            total += value
    return total / max(len(boxes), len(gold))


def mean_average_precision(boxes: Sequence[Box], gold: Sequence[Box]) -> float:
    """Return COCO's mAP of one image; unlike there, an absent label counts with 0."""
    by_label: dict[str, tuple[list[Box], list[Box]]] = defaultdict(lambda: ([], []))
    for box in boxes:
        by_label[box.label][0].append(box)
    for target in gold:
        by_label[target.label][1].append(target)
    if not by_label:
        return 1.0
    precisions = [
        average_precision(found, targets, threshold)
        for found, targets in by_label.values()
        for threshold in IOU_THRESHOLDS
    ]
    return math.fsum(precisions) / len(precisions)


def average_precision(boxes: Sequence[Box], gold: Sequence[Box], threshold: float) -> float:
    """Return the precision interpolated at 101 recalls; boxes of equal confidence in their order."""
    if not gold:
        return 0.0
    matched: set[int] = set()
    curve: list[tuple[float, float]] = []
    for rank, box in enumerate(sorted(boxes, key=lambda box: -box.confidence), start=1):
        overlaps = [(iou(box, target), -j) for j, target in enumerate(gold) if j not in matched]
        best, j = max(overlaps, default=(0.0, 0))
        if best >= threshold - 1e-9:
            matched.add(-j)
        curve.append((len(matched) / len(gold), len(matched) / rank))
    best_from: list[tuple[float, float]] = []
    highest = 0.0
    for recall, precision in reversed(curve):
        highest = max(highest, precision)
        best_from.append((recall, highest))
    best_from.reverse()
    points = [next((p for r, p in best_from if r >= point - 1e-9), 0.0) for point in RECALL_POINTS]
    return math.fsum(points) / len(points)
