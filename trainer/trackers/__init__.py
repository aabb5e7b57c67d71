"""Trackers: TensorBoard, Weights & Biases, MLflow, SwanLab, Trackio, standard output, or a class of the user's."""
