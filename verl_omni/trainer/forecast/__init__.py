"""Will a run fit, and how long will its steps take? From its settings and its model's configs, without a GPU."""
