"""Picture of a plan."""

from pathlib import Path

from offbeat.deploy.plan.plan import Plan

CONFIGURED, OTHER, LIMIT = "#1f77b4", "#9aa5b1", "#d62728"


def draw_plan(path: Path, plan: Plan, title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(13, 3.6), dpi=120, layout="constrained")
    figure.suptitle(title)
    rates, lags, gains = figure.subplots(1, 3)
    at = plan.configured.estimate
    rates.plot(
        [float(t.text) for t in plan.by_staleness], [t.trajectories_per_s for t in plan.by_staleness], "o-", color=OTHER
    )
    rates.plot(
        [plan.configured.max_staleness],
        [at.trajectories_per_s],
        "o",
        color=CONFIGURED,
        markersize=9,
        label="configured",
    )
    ideal = at.trajectories_per_s * at.step_s / at.closed.ideal_step_s
    rates.axhline(ideal, color=LIMIT, linestyle="--", label="max(train, batch x episode / slots)")
    rates.set(xlabel="max_staleness", ylabel="trained trajectories/s", ylim=(0, None))
    rates.legend(frameon=False, fontsize=8)
    bars = lags.bar([str(lag) for lag in at.lags], list(at.lags.values()), color=CONFIGURED)
    lags.bar_label(bars, [f"{share:.0%}" for share in at.lags.values()], fontsize=8)
    lags.set(xlabel="lag of trained groups, versions", ylabel="share")
    shown = [*plan.changes][::-1]
    gains.barh([t.text for t in shown], [100 * (t.gain - 1) for t in shown], color=OTHER)
    gains.axvline(0, color="black", linewidth=0.8)
    gains.set(xlabel="change of trajectories/s, %")
    gains.tick_params(axis="y", labelsize=7)
    for axis in (rates, lags, gains):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
