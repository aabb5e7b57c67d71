"""The parts of a run as components that the reconciler keeps up: learner, env workers, generation, broker.

Ray appears here and in the services' `app.py` alone. Calls into Ray block, so they run in threads.
"""
