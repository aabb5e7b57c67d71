"""Components of a run, kept up by the reconciler: learner, env workers, generation, broker.

Calls into Ray block, so they run in threads.
"""
