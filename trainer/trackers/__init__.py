"""Trackers: TensorBoard, Weights & Biases, MLflow, SwanLab, Trackio, standard output, or a user's class."""
