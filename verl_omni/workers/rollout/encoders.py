"""Where a pipeline's text encoders are: each prompt is encoded once, after that they only take up memory."""

import torch


class Encoders:
    """The frozen encoders of a pipeline, on the device while there is something to encode.

    `offload` True: they leave it as soon as they are done. False: never. None: after a rollout that had no new prompt,
    so that a first pass over the prompts does not move them at every batch.
    """

    def __init__(self, modules: list[torch.nn.Module], device: torch.device, offload: bool | None = None):
        self.modules, self.device, self.offload = modules, device, offload
        self._in_cpu_memory: list[torch.Tensor] | None = None
        self.present, self._used = True, True

    def enter(self) -> None:
        """Before something is encoded."""
        self._used = True
        if not self.present:
            for tensor, home in zip(self._tensors(), self._in_cpu_memory, strict=True):
                tensor.data = home.to(self.device)
            self.present = True

    def batch_encoded(self) -> None:
        if self.offload:
            self._leave()

    def rollout_begins(self) -> None:
        if self.offload is None and not self._used:
            self._leave()
        self._used = False

    def _leave(self) -> None:
        if not self.present:
            return
        tensors = self._tensors()
        if self._in_cpu_memory is None:  # they are frozen: one copy serves for ever
            self._in_cpu_memory = [tensor.data.cpu() for tensor in tensors]
        for tensor, home in zip(tensors, self._in_cpu_memory, strict=True):
            tensor.data = home
        self.present = False

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]
