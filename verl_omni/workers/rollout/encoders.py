"""Where a pipeline's text encoders are: each prompt is encoded once, after that they only take up memory."""

import torch

from verl_omni.workers.host_memory import HostMemory, bring


class Encoders:
    """The frozen encoders of a pipeline, on the device while there is something to encode.

    `offload` True: they leave it as soon as they are done. False: never. None: after a rollout that had no new prompt,
    so that a first pass over the prompts does not move them at every batch.
    """

    def __init__(self, modules: list[torch.nn.Module], device: torch.device, offload: bool | None = None):
        self.modules, self.device, self.offload = modules, device, offload
        for module in modules:
            module.requires_grad_(False)
        self.host = HostMemory()
        self.present, self._used = True, True

    def forget(self, module: torch.nn.Module) -> None:
        """One that nobody will ask."""
        self.modules = [one for one in self.modules if one is not module]

    def enter(self) -> None:
        """Before something is encoded."""
        self._used = True
        if not self.present:
            bring(self.modules, self.device)
            self.present = True

    def batch_encoded(self) -> None:
        if self.offload:
            self._leave()

    def rollout_begins(self) -> None:
        if self.offload is None and not self._used:
            self._leave()
        self._used = False

    def _leave(self) -> None:
        if self.present:
            self.host.take(self.modules)
            self.present = False
