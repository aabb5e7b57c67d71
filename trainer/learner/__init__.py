"""The learner loop and what rank 0 does between optimizer steps."""
