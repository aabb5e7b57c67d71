"""Components of a run, maintained by the reconciler in threads, as Ray blocks."""
