"""`offbeat bench peer`: the same task trained by Offbeat and by TRL's GRPOTrainer, each well tuned."""
