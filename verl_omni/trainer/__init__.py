"""Runner and trainers: checks before a run, `sample` and `learn`, checkpoints, what a run leaves behind."""
