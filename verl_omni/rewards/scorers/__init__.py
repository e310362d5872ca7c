"""Scorers: one file each. A file here is found by looking; it imports what is heavy only when it scores."""
