"""Components of a run, kept up by the reconciler, in threads because Ray blocks."""
