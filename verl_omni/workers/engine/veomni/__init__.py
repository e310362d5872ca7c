"""VeOmni."""

STRATEGIES = {"veomni": "verl_omni.workers.engine.veomni.veomni_impl"}
