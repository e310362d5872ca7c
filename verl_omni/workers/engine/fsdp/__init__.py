"""FSDP2."""

STRATEGIES = {"fsdp2": "verl_omni.workers.engine.fsdp.diffusers_impl"}
