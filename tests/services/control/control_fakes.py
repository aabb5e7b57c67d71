"""A mesh whose components are set by the test."""

from dataclasses import dataclass, field

from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.run import RunSpec, RunState
from offbeat.services.live_settings import Settings

SETTINGS = Settings(
    num_workers=1, num_replicas=1, learning_rate=1e-3, temperature=1.0, max_staleness=1.0, num_env_groups=24
)


SPEC = RunSpec("lake", '{"max_steps": 3}', "/tmp/lake", 3, SETTINGS)


@dataclass
class FakeComponent:
    """Comes up at once, and dies or finishes when a test says so."""

    name: str
    health: Health = Health.ABSENT
    detail: str = ""
    starts: int = 0
    stops: list[bool] = field(default_factory=list[bool])
    deaths: int = 0
    stays_dead: bool = False
    start_error: Exception | None = None
    stops_at_once: bool = True

    async def ensure(self) -> None:
        if self.start_error:
            raise self.start_error
        if self.health in (Health.ABSENT, Health.DEAD):
            self.starts += 1
            self.health = Health.READY
            if self.stays_dead:
                self.die("it always does")

    async def stop(self, *, now: bool) -> None:
        self.stops.append(now)
        if now or self.stops_at_once:
            self.health = Health.ABSENT

    async def observe(self) -> Observation:
        return Observation(self.health, self.detail, f"logs/{self.name}.log", f"death {self.deaths}")

    def die(self, detail: str = "killed") -> None:
        self.deaths += 1
        self.health = Health.DEAD
        self.detail = detail


@dataclass
class FakeMesh:
    """A learner, an engine and a pool of workers."""

    components: list[FakeComponent] = field(
        default_factory=lambda: [FakeComponent("learner"), FakeComponent("env-workers"), FakeComponent("generation")]
    )
    prepared: int = 0
    steered: list[tuple[Settings, bool]] = field(default_factory=list[tuple[Settings, bool]])
    drained: int = 0
    cleaned: int = 0
    prepare_error: Exception | None = None

    async def prepare(self) -> None:
        if self.prepare_error:
            raise self.prepare_error
        self.prepared += 1

    async def apply_settings(self, settings: Settings, *, paused: bool) -> None:
        self.steered.append((settings, paused))

    async def drain(self) -> None:
        self.drained += 1

    async def clean_up(self) -> None:
        self.cleaned += 1

    def __getitem__(self, name: str) -> FakeComponent:
        return next(component for component in self.components if component.name == name)


@dataclass
class FakeClock:
    """Time that passes when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


async def reconcile_until(reconciler: Reconciler, state: RunState, passes: int = 10) -> None:
    states = [await reconciler.reconcile("lake") for _ in range(passes)]
    assert states[-1] is state, states
