"""The OS processes of one learner: ranks, lease, heartbeats, watchdog, signals."""
