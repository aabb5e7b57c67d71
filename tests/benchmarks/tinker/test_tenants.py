import pytest

from offbeat.benchmarks.tinker.tenants import Arrangement, TenantRun, TenantsOptions, jain_index, summarize

OPTIONS = TenantsOptions(steps=2, batch=3, tokens=10)


def run(began: float, ended: float, loss: float = 1.0) -> TenantRun:
    return TenantRun(began, ended, (loss,), num_sampled=40)


def test_fairness_is_one_over_k_if_one_tenant_has_all() -> None:
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25


def test_a_row_compares_wall_time_tokens_and_losses() -> None:
    together = Arrangement((run(0, 4), run(1, 5)), 100.0)
    apart = Arrangement((run(0, 4), run(4, 10)), 90.0)
    row = summarize(2, [(together, apart)], OPTIONS)
    assert (row["together_s"].median, row["apart_s"].median, row["ratio"].median) == (5, 10, 2)
    assert row["together_tokens_per_s"].median == (2 * 2 * 3 * 10 + 80) / 5
    assert (row["together_peak_mib"], row["apart_peak_mib"]) == (100, 90)
    assert row["equal_losses"]
    other = Arrangement((run(0, 4), run(4, 10, loss=1.1)), 90.0)
    assert not summarize(2, [(together, other)], OPTIONS)["equal_losses"]
