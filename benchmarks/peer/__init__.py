"""`offbeat bench peer`: a task trained by Offbeat and by TRL's GRPOTrainer."""
