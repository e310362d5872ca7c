"""Rollout engines: base.py is the protocol."""
