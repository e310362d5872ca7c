"""FLOPs, profiles, memory."""
