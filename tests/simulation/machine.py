"""The protocol as a state machine on a real Redis: any process may be killed between any two commands.

Checked after each command: the ledger's identity, the admission bound, and that each member of a live group is in exactly
one place. Checked at consumption: the staleness bound. Checked at the end: every group of the surviving lineage was trained
exactly once, nothing is left, and the audit of the ledger that was kept meanwhile proves it.
"""

import math
import shutil

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from offbeat.deploy.audit.audit import Evidence, audit
from offbeat.services.buffer.group_ledger import (
    LEDGER_FILE,
    LedgerFile,
    read_events_after,
    read_ledger,
)
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.keys import RunKeys
from offbeat.trainer.learner.loop import UNNEEDED
from offbeat.trainer.learner.step_ledger import read_step_ledger
from tests.services.buffer.buffer_play import RUN
from tests.simulation.actors import GROUPS_PER_STEP, LIMITS, STEPS
from tests.simulation.learners import LearnerRules
from tests.simulation.workers import WorkerRules


class Protocol(WorkerRules, LearnerRules):
    """Workers, learners and weights that take turns in any order, a ledger that is copied meanwhile, and what must hold."""

    # The ledger: whoever copies it dies anywhere too

    @rule(cut=st.integers(0, 40))
    def ledger_is_copied(self, cut: int) -> None:
        """cut: bytes of the last write that a death of the writer leaves out."""
        self.ledger.append(read_events_after(self.redis, RUN, self.ledger.position))
        if cut:
            self.ledger.close()
            path = self.folder / LEDGER_FILE
            path.write_bytes(path.read_bytes()[:-cut])
            self.ledger = LedgerFile(self.folder)

    # What must hold

    @invariant()
    def the_ledger_adds_up(self) -> None:
        snapshot = self.run.learner.snapshot()
        counters = snapshot.counters
        gone = sum(counters.dropped.values()) + sum(counters.failed.values())
        assert counters.admitted == counters.trained + gone + counters.in_flight
        assert snapshot.playing <= LIMITS.max_groups_in_flight
        bound = math.ceil((self.newest + self.max_staleness + 1) * GROUPS_PER_STEP) if self.newest >= 0 else 0
        assert counters.admitted - gone <= min(bound, LIMITS.total_groups)

    @invariant()
    def each_member_is_in_one_place(self) -> None:
        root = BufferKeys(RUN).root
        places = [t.decode() for q in ("t", "e") for t in self.redis.lrange(f"{root}:queue:{q}", 0, -1)]  # type: ignore[union-attr]
        for key in self.redis.scan_iter(f"{root}:claims:*"):
            places += [token.decode() for token in self.redis.hkeys(key)]  # type: ignore[union-attr]
        for key in self.redis.scan_iter(f"{root}:unit:*"):
            unit = key.decode().removeprefix(f"{root}:unit:")
            fields = {name.decode() for name in self.redis.hkeys(key)}  # type: ignore[union-attr]
            places += [f"{unit}:{name[1:]}" for name in fields if name[0] in "sd" and name[1:].isdigit()]
            members = int(self.redis.hget(key, "members"))  # type: ignore[arg-type]
            if "scoring" in fields:
                assert f"{unit}:{members}" in places
                assert len([name for name in fields if name[0] == "s" and name[1:].isdigit()]) == LIMITS.group_size
            else:
                assert {f"{unit}:{i}" for i in range(members)} <= set(places)
            num_samples = len([name for name in fields if name[0] == "p" and name[1:].isdigit()])
            assert num_samples == int(self.redis.hget(key, "samples") or 0)  # type: ignore[arg-type]
        assert len(places) == len(set(places))
        live = {key.decode() for key in self.redis.scan_iter(f"{root}:unit:*")}
        assert {f"{root}:unit:{place.rpartition(':')[0]}" for place in places} <= live

    @invariant()
    def versions_only_grow(self) -> None:
        raw: bytes | None = self.redis.hget(RunKeys(RUN).progress, "version")  # type: ignore[assignment]
        assert (-1 if raw is None else int(raw)) == self.published

    @invariant()
    def no_group_is_trained_twice(self) -> None:
        for state in (self.learner.now, self.durable):
            numbers = [number for batch in state.lineage for number in batch]
            assert len(numbers) == len(set(numbers))

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            self.clean_up()

    def finish(self) -> None:
        """End all faults; the run then finishes, complete and proven."""
        while self.paused:
            self.a_paused_learner_wakes()
        while self.learner.start_up:
            self.learner.start_up.pop(0)()
        for _ in range(200):
            results = [self.run.learner.eval_result(eval_id) for eval_id in self.evaluations]
            if None not in results and self.run.learner.counters().trained == LIMITS.total_groups:
                break
            self._everyone_acts_once()
        num_unneeded = self.learner.buffer.close(UNNEEDED)
        assert self.has_lost or num_unneeded == 0
        self._ends_complete()
        self._audit_proves_it()

    def clean_up(self) -> None:
        for paused in self.paused:
            paused.wake()
        for lease in self.leases:
            lease.release()
        for journal in self.journals:
            journal.close()
        self.ledger.close()
        self.runner.run(self.async_redis.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)

    def _everyone_acts_once(self) -> None:
        for name, worker in self.workers.items():
            self.heartbeat(name)
            self.claim(name, 50, answer_lost=False)
            while worker.held and not self._is_pending():
                self.submit(name, 0, 0)
        for _ in range(8):
            self._next_command()()
        if not self.learner.start_up:
            self.checkpoint()
            self.acknowledge()

    def _ends_complete(self) -> None:
        counters = self.run.learner.counters()
        assert counters.trained == LIMITS.total_groups
        assert counters.in_flight == 0
        numbers = [number for batch in self.durable.lineage for number in batch]
        assert len(numbers) == len(set(numbers)) == LIMITS.total_groups
        for eval_id in self.evaluations:
            assert self.run.learner.eval_result(eval_id) is not None
            self.run.learner.forget_eval(eval_id)
        assert [self.run.keys_left(part) for part in ("unit", "blobs", "claims", "queue")] == [[]] * 4

    def _audit_proves_it(self) -> None:
        self.ledger_is_copied(cut=17)
        self.ledger_is_copied(cut=0)
        journal, broken = read_step_ledger(self.folder)
        evidence = Evidence(
            events=read_ledger(self.folder),
            journal=journal,
            checkpoints={self.durable.step: ""},
            counters=self.run.learner.counters(),
            groups_per_step=GROUPS_PER_STEP,
            max_steps=STEPS,
            broken_lines=broken,
        )
        result = audit(evidence)
        assert result.proven, result.findings
        assert result.lineage.last == STEPS
        assert [sorted(g.number for g in line.groups) for line in result.lineage.steps] == [
            sorted(batch) for batch in self.durable.lineage
        ]
        assert max(result.staleness) <= self.max_staleness
