"""Headway: the control loop between generation and training in asynchronous RL post-training."""

__version__ = "0.1.0"
