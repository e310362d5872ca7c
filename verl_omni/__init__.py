"""Reinforcement learning for diffusion models on verl. Importing the package loads nothing heavy."""

__version__ = "0.1.0"
