"""Training engines: base.py is the protocol and what all share, a folder is one engine."""
