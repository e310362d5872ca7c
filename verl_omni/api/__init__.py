"""A run in a few lines of Python, `verl_omni.train(model, prompts, reward)`, on the engine of the command."""
