"""What a run keeps in its folder: checkpoints, the record of what it was, its lock and its log."""
