"""Losses of Tinker's API: values and gradients are those of a plain loop in float64."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.services.errors import CodecError
from offbeat.services.tinker.wire import Datum
from offbeat.trainer.tinker.client_model import ClientModel
from offbeat.trainer.tinker.losses import LOSSES, check_datum, find_loss, read_settings
from tests.trainer.tinker.tiny_base import LORA, VOCABULARY, make_data, make_pool, randomize

Token = Callable[[Tensor, float, float], Tensor]
"""(logprob, sampling logprob, advantage or weight) -> loss of a token."""


def ppo(logprob: Tensor, old: float, advantage: float) -> Tensor:
    ratio = torch.exp(logprob - old)
    bounded = min(max(float(ratio.detach()), 0.9), 1.3)
    is_clipped = bounded * advantage < float(ratio.detach()) * advantage
    return torch.tensor(-bounded * advantage, dtype=torch.float64) if is_clipped else -ratio * advantage


def cispo(logprob: Tensor, old: float, advantage: float) -> Tensor:
    return -min(max(math.exp(float(logprob.detach()) - old), 0.9), 1.3) * advantage * logprob


TOKEN_LOSSES: dict[str, Token] = {
    "cross_entropy": lambda logprob, _, weight: -logprob * weight,
    "importance_sampling": lambda logprob, old, advantage: -torch.exp(logprob - old) * advantage,
    "ppo": ppo,
    "cispo": cispo,
    "dro": lambda logprob, old, advantage: 0.5 * 0.3 * (logprob - old) ** 2 - logprob * advantage,
}
SETTINGS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3, "beta": 0.3}


def settings_of(name: str) -> dict[str, float]:
    loss = find_loss(name)
    return read_settings(name, loss, {key: SETTINGS[key] for key in loss.defaults or ()})


class Float64:
    """A model in float64, and its logprobs by a plain forward of one sequence."""

    def __init__(self, folder: Path) -> None:
        self.pool = make_pool(folder)
        self.model = ClientModel(self.pool, LORA)
        self.parameters = self.model.parameters
        self.pool.policy.double()
        randomize(self.parameters)

    def logprobs(self, datum: Datum) -> list[Tensor]:
        tokens = torch.from_numpy(datum.tokens.astype(np.int64))
        rows = self.pool.logits(tokens, torch.tensor([0, len(tokens)])).log_softmax(1)
        return [row[int(target)] for row, target in zip(rows, datum.inputs["target_tokens"], strict=True)]

    def gradients(self) -> dict[str, Tensor]:
        gradients = {name: each.grad for name, each in self.parameters.items()}
        assert all(each is not None and each.abs().max() > 0 for each in gradients.values())
        return {name: each.clone() for name, each in gradients.items() if each is not None}

    def clear(self) -> None:
        for each in self.parameters.values():
            each.grad = None


@pytest.fixture
def float64(tmp_path: Path) -> Float64:
    return Float64(tmp_path / "base")


def near(model: Float64, data: list[Datum]) -> list[Datum]:
    """Move sampling logprobs near the model's, so that some ratios are clipped and others are not."""
    for datum in data:
        if "logprobs" in datum.inputs:
            noise = datum.inputs["logprobs"] * 0.1 + 0.3
            exact = np.array([float(each.detach()) for each in model.logprobs(datum)])
            datum.inputs["logprobs"][:] = exact + noise
    return data


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("max_tokens", [1, 8, 100])
def test_loss_and_gradient_are_those_of_a_loop(float64: Float64, name: str, max_tokens: int) -> None:
    loss = LOSSES[name]
    data = near(float64, make_data(loss.inputs))
    scores = float64.model.compute(data, loss, settings_of(name), backward=True, max_tokens=max_tokens)
    gradients = float64.gradients()
    float64.clear()
    total = torch.zeros((), dtype=torch.float64)
    for datum, returned in zip(data, scores.logprobs, strict=True):
        logprobs = float64.logprobs(datum)
        np.testing.assert_allclose(returned, [float(each.detach()) for each in logprobs], rtol=1e-6)
        given = [datum.inputs.get(key, np.zeros(len(logprobs))) for key in ("logprobs", loss.inputs[-1])]
        for logprob, old, factor in zip(logprobs, *given, strict=True):
            total = total + TOKEN_LOSSES[name](logprob, float(old), float(factor))
    total.backward()
    assert scores.loss == pytest.approx(float(total.detach()), rel=1e-9)
    for key, expected in float64.gradients().items():
        torch.testing.assert_close(gradients[key], expected, rtol=1e-9, atol=1e-10)


def test_gspo_clips_a_sequence_with_the_gradient_of_its_mean_ratio(float64: Float64) -> None:
    """Prompt tokens have no advantage, and are no part of the ratio. The clipped sequence has no gradient."""
    data = near(float64, make_data(("logprobs", "advantages"), lengths=(4, 6)))
    for datum, shift in zip(data, (0.0, 1.0), strict=True):
        datum.inputs["advantages"][:2] = 0
        datum.inputs["advantages"][2:] = 0.75
        exact = np.array([float(each.detach()) for each in float64.logprobs(datum)])
        datum.inputs["logprobs"][:] = exact - shift
        datum.inputs["logprobs"][:2] -= 5.0
    scores = float64.model.compute(data, LOSSES["gspo"], settings_of("gspo"), backward=True, max_tokens=100)
    gradients = float64.gradients()
    float64.clear()
    logprobs = float64.logprobs(data[0])[2:]
    mean = torch.stack(logprobs).mean() - float(data[0].inputs["logprobs"][2:].astype(np.float64).mean())
    expected = -0.75 * len(logprobs) * mean.exp()
    expected.backward()
    assert scores.loss == pytest.approx(float(expected.detach()) - 1.3 * 0.75 * 4, rel=1e-9)
    for key, gradient in float64.gradients().items():
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-9, atol=1e-10)


def test_gspo_takes_the_ratio_over_the_tokens_of_the_mask(float64: Float64) -> None:
    """A marked token without an advantage counts for the ratio, and one that is not marked has it. A datum may have none."""
    mask = np.array([0, 1, 1, 0, 0, 1], np.float32)
    data = make_data(("logprobs", "advantages"), lengths=(6, 4))
    for datum in data:
        exact = np.array([float(each.detach()) for each in float64.logprobs(datum)])
        datum.inputs["logprobs"][:] = exact + np.linspace(-0.2, 0.2, len(exact))
        datum.inputs["advantages"][1] = 0
    data[0].inputs["sequence_ratio_mask"] = mask
    scores = float64.model.compute(data, LOSSES["gspo"], settings_of("gspo"), backward=True, max_tokens=100)
    gradients = float64.gradients()
    float64.clear()
    total = torch.zeros((), dtype=torch.float64)
    for datum, marked in zip(data, (mask != 0, data[1].inputs["advantages"] != 0), strict=True):
        logprobs = torch.stack(float64.logprobs(datum))
        log_ratio = logprobs.detach() - torch.from_numpy(datum.inputs["logprobs"]).double()
        value = math.exp(float(log_ratio[torch.from_numpy(marked)].mean()))
        assert 0.9 < value < 1.3, "not clipped"
        ratio = value * (logprobs - logprobs.detach()).exp()
        total = total - (ratio * torch.from_numpy(datum.inputs["advantages"]).double()).sum()
    total.backward()
    assert scores.loss == pytest.approx(float(total.detach()), rel=1e-9)
    for key, expected in float64.gradients().items():
        torch.testing.assert_close(gradients[key], expected, rtol=1e-9, atol=1e-10)


def test_a_mask_of_the_ratio_that_marks_no_token_is_refused() -> None:
    (datum,) = make_data(("logprobs", "advantages"), lengths=(4,))
    datum.inputs["sequence_ratio_mask"] = np.zeros(4, np.float32)
    with pytest.raises(CodecError, match=r"data\[0\]\.sequence_ratio_mask marks no token"):
        check_datum(datum, LOSSES["gspo"], vocab_size=VOCABULARY, context=10, path="data[0]")
    datum.inputs["advantages"][:] = 0
    check_datum(datum, LOSSES["gspo"], vocab_size=VOCABULARY, context=10, path="data[0]")


def test_several_targets_of_a_position_are_weighted_each(float64: Float64) -> None:
    (datum,) = make_data((), lengths=(4,))
    targets = np.array([[1, 2], [3, 4], [5, 6], [7, 8]])
    weights = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)
    data = [Datum(datum.tokens, {"target_tokens": targets, "weights": weights})]
    scores = float64.model.compute(data, LOSSES["cross_entropy"], {}, backward=True, max_tokens=100)
    gradients = float64.gradients()
    float64.clear()
    tokens = torch.from_numpy(datum.tokens.astype(np.int64))
    rows = float64.pool.logits(tokens, torch.tensor([0, 4])).log_softmax(1)
    loss = -sum(rows[i, targets[i, j]] * float(weights[i, j]) for i in range(4) for j in range(2))
    assert isinstance(loss, Tensor)
    loss.backward()
    assert scores.logprobs[0].shape == (4, 2)
    assert scores.loss == pytest.approx(float(loss.detach()), rel=1e-9)
    for key, expected in float64.gradients().items():
        torch.testing.assert_close(gradients[key], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "message"),
    [("stable_reinforce", 'loss_fn="ppo"'), ("custom", "forward_backward_custom"), ("nonsense", "cross_entropy")],
)
def test_an_unknown_loss_is_refused_with_what_to_pass(name: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        find_loss(name)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CodecError, match=r"loss_fn_config.clip: .*clip_low_threshold, clip_high_threshold"):
        read_settings("ppo", find_loss("ppo"), {"clip": 0.2})
    with pytest.raises(CodecError, match=r"loss_fn_config.beta: .*beta"):
        read_settings("dro", find_loss("dro"), {"beta": "much"})


BAD: dict[str, tuple[str, Callable[[Datum], Datum]]] = {
    "no tokens": ("has 0 tokens", lambda d: Datum(d.tokens[:0], d.inputs)),
    "too long": ("1 to 6 fit", lambda d: Datum(np.zeros(7, np.int32), d.inputs)),
    "token": ("no token ids", lambda d: Datum(d.tokens + VOCABULARY, d.inputs)),
    "target": ("target_tokens holds", lambda d: Datum(d.tokens, {**d.inputs, "target_tokens": -np.ones(5, np.int64)})),
    "shape": ("shape", lambda d: Datum(d.tokens, {**d.inputs, "target_tokens": np.zeros(4, np.int64)})),
    "input's shape": ("advantages has", lambda d: Datum(d.tokens, {**d.inputs, "advantages": np.zeros(4, np.float32)})),
    "infinite": ("finite", lambda d: Datum(d.tokens, {**d.inputs, "logprobs": np.full(5, np.nan, np.float32)})),
    "missing": ("the loss needs", lambda d: Datum(d.tokens, {"target_tokens": d.inputs["target_tokens"]})),
    "unknown": ("the loss needs", lambda d: Datum(d.tokens, {**d.inputs, "mask": np.ones(5, np.float32)})),
}


@pytest.mark.parametrize("kind", BAD)
def test_data_that_does_not_fit_is_refused_with_its_place(kind: str) -> None:
    message, spoil = BAD[kind]
    (datum,) = make_data(("logprobs", "advantages"), lengths=(5,))
    check_datum(datum, LOSSES["ppo"], vocab_size=VOCABULARY, context=6, path="data[0]")
    with pytest.raises(CodecError, match=message):
        check_datum(spoil(datum), LOSSES["ppo"], vocab_size=VOCABULARY, context=6, path="data[0]")
