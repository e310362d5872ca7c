"""How weights travel from training ranks to rollout servers: through Ray or one of verl's checkpoint engines."""
