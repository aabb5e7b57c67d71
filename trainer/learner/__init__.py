"""The learner loop."""
