from offbeat.deploy.cli.runs.recorded import _group_table
from offbeat.services.control.console.schemas import GroupDetailView, GroupState, MemberView

LIFE = {"number": 3, "state": GroupState.TRAINED, "tag": "Lake", "reason": "", "step": 5, "staleness": 1, "rewards": []}


def test_versions_of_a_trajectory_are_shown_from_the_oldest():
    """Whatever the hash seed of the process."""
    pairs = [(10, 12), (11, 13), (20, 30), (21, 31), (40, 50), (41, 51), (98, 99), (7, 7), (9, 10)]
    members = [
        MemberView(
            index=index,
            reward=1.0,
            turns=1,
            num_sampled=1,
            stop_reason="",
            oldest_version=oldest,
            newest_version=newest,
            max_ratio=None,
            outcomes={},
        )
        for index, (oldest, newest) in enumerate(pairs)
    ]
    table = _group_table(GroupDetailView.model_construct(**LIFE, members=members))
    shown = list(table.columns[4].cells)
    assert shown == ["10-12", "11-13", "20-30", "21-31", "40-50", "41-51", "98-99", "7", "9-10"]
