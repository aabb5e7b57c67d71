"""Components of a run, kept up by the reconciler. Calls into Ray block, so they run in threads."""
