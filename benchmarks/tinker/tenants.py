"""`offbeat bench tenants`: LoRA tenants together on one server, against the same runs one after the other.

Invariant: both sides have one server, and each tenant the same commands; its losses must be equal to the bit.
"""

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.benchmarks.tinker.server import RunningServer, running_server

RANK = 8
VOCABULARY = 24
"""Size of the drawn vocabulary; smaller than that of the quickstart's policy."""
FIRST_WORD = 4


@dataclass(frozen=True, slots=True)
class TenantsOptions:
    """A step of a tenant: `samples` answers of `answer` tokens by its newest weights, and an optimizer step on `batch`
    sequences of `tokens`.
    """

    size: str = "1M"
    tenants: tuple[int, ...] = (1, 2, 4, 8)
    steps: int = 5
    samples: int = 8
    answer: int = 32
    batch: int = 8
    tokens: int = 64
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class TenantRun:
    """began, ended: monotonic seconds."""

    began: float
    ended: float
    losses: tuple[float, ...]
    num_sampled: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Runs of all tenants, together or one after the other."""

    runs: tuple[TenantRun, ...]
    peak_mib: float

    @property
    def wall_s(self) -> float:
        return max(run.ended for run in self.runs) - min(run.began for run in self.runs)

    def tokens_per_s(self, options: TenantsOptions) -> float:
        trained = len(self.runs) * options.steps * options.batch * options.tokens
        return (trained + sum(run.num_sampled for run in self.runs)) / self.wall_s


class TenantClient:
    """Client with a key and a model of its own."""

    def __init__(self, url: str, number: int, options: TenantsOptions) -> None:
        import tinker

        self._options = options
        self._service = tinker.ServiceClient(base_url=url, api_key=f"tml-tenant-{number}")
        self._client = self._service.create_lora_training_client("tiny", rank=RANK, seed=number).result()
        draw = np.random.default_rng(number)
        self._data = [_datum(draw.integers(FIRST_WORD, VOCABULARY, options.tokens + 1)) for _ in range(options.batch)]

    def run(self) -> TenantRun:
        from tinker import types

        began, losses, num_sampled = time.monotonic(), list[float](), 0
        prompt = types.ModelInput.from_ints([FIRST_WORD] * 8)
        params = types.SamplingParams(max_tokens=self._options.answer, stop=[])
        for _ in range(self._options.steps):
            sampler = self._client.save_weights_and_get_sampling_client().result()
            answers = sampler.sample(prompt, self._options.samples, params).result()
            num_sampled += sum(len(each.tokens) for each in answers.sequences)
            forward = self._client.forward_backward(self._data, "cross_entropy")
            step = self._client.optim_step(types.AdamParams(learning_rate=1e-3))
            losses.append(forward.result().metrics["loss:sum"])
            step.result()
        return TenantRun(began, time.monotonic(), tuple(losses), num_sampled)

    def close(self) -> None:
        self._service.close("success").result()


def run(options: TenantsOptions) -> dict[str, Any]:
    from offbeat.benchmarks.weights import SHAPES

    shape = SHAPES[options.size]
    overrides = [f"tiny.{name}={value}" for name, value in shape.model_dump(exclude={"vision"}).items()]
    most = max(options.tenants)
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as temporary,
        console().status("starting") as status,
        running_server(
            Path(temporary) / "run", *overrides, f"tinker.max_models={most}", f"tinker.max_adapters={2 * most}"
        ) as server,
    ):
        run_side(server, 1, options, together=True)  # warms the server up
        rows: list[dict[str, Any]] = []
        for k in options.tenants:
            rounds: list[tuple[Arrangement, Arrangement]] = []
            for number in range(options.rounds):
                status.update(f"{k} tenants, round {number + 1}/{options.rounds}")
                order = (True, False) if number % 2 else (False, True)  # neither side is always the first
                sides = {together: run_side(server, k, options, together=together) for together in order}
                rounds.append((sides[True], sides[False]))
            rows.append(summarize(k, rounds, options))
    _show(rows, options)
    return {"settings": rows}


def run_side(server: RunningServer, k: int, options: TenantsOptions, *, together: bool) -> Arrangement:
    tenants = [TenantClient(server.url, number, options) for number in range(k)]
    try:
        server.reset_peaks()
        with ThreadPoolExecutor(k if together else 1) as threads:
            runs = tuple(threads.map(TenantClient.run, tenants))
        return Arrangement(runs, server.peak_mib())
    finally:
        for tenant in tenants:
            tenant.close()


def summarize(k: int, rounds: Sequence[tuple[Arrangement, Arrangement]], options: TenantsOptions) -> dict[str, Any]:
    """rounds: together, and one after the other."""
    return {
        "tenants": k,
        "together_s": Spread.of(both.wall_s for both, _ in rounds),
        "apart_s": Spread.of(apart.wall_s for _, apart in rounds),
        "ratio": Spread.of(apart.wall_s / both.wall_s for both, apart in rounds),
        "together_tokens_per_s": Spread.of(both.tokens_per_s(options) for both, _ in rounds),
        "apart_tokens_per_s": Spread.of(apart.tokens_per_s(options) for _, apart in rounds),
        "together_peak_mib": max(both.peak_mib for both, _ in rounds),
        "apart_peak_mib": max(apart.peak_mib for _, apart in rounds),
        "fairness": min(jain_index([1 / run.seconds for run in both.runs]) for both, _ in rounds),
        "slowest_to_fastest": max(_slowest_to_fastest(both) for both, _ in rounds),
        "equal_losses": all(a.losses == b.losses for both, apart in rounds for a, b in _pairs(both, apart)),
    }


def jain_index(rates: Sequence[float]) -> float:
    """Return Jain's fairness index of the tenants' rates: 1 if equal, 1 / k if one has all."""
    return sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))


def _pairs(one: Arrangement, other: Arrangement) -> list[tuple[TenantRun, TenantRun]]:
    return list(zip(one.runs, other.runs, strict=True))


def _slowest_to_fastest(side: Arrangement) -> float:
    seconds = [run.seconds for run in side.runs]
    return max(seconds) / min(seconds)


def _datum(tokens: Any) -> Any:
    from tinker import types

    inputs: Any = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def _show(rows: Sequence[dict[str, Any]], options: TenantsOptions) -> None:
    columns = ("tenants", "s together", "s in turn", "x faster", "tokens/s together", "in turn", "peak MiB together",
               "in turn", "Jain's index", "slowest / fastest", "equal losses")  # fmt: skip
    table = [
        (row["tenants"], row["together_s"].median, row["apart_s"].median, row["ratio"].median,
         row["together_tokens_per_s"].median, row["apart_tokens_per_s"].median, row["together_peak_mib"],
         row["apart_peak_mib"], row["fairness"], row["slowest_to_fastest"], "yes" if row["equal_losses"] else "NO")
        for row in rows
    ]  # fmt: skip
    title = f"{options.steps} steps of each tenant ({options.size} parameters, adapters of rank {RANK})"
    show(title, columns, table)
