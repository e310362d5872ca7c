"""Tokens of images from GLM-Image's autoregressive model, with the weights that are trained."""


import torch

from verl_omni.pipelines.glm_image.image_tokens import as_grids, asked, positions, target
from verl_omni.workers.rollout.text_rollout import TextRequest, TextRollout


class ImageTokenRollout(TextRollout):
    """As many tokens as the size of the image asks for: a preview's, then its own, which are what is drawn.

    The tokenizer is GLM-Image's processor.
    """

    def _size(self, request: TextRequest) -> tuple[list[int], list[tuple[int, int]]]:
        return target(self.tokenizer, *request.size)

    def ids_of(self, request: TextRequest) -> list[int]:
        return asked(self.tokenizer, request.prompt) + self._size(request)[0]

    def most_tokens(self, request: TextRequest) -> int:
        return sum(rows * columns for rows, columns in self._size(request)[1])

    def told(self, requests: list[TextRequest]) -> dict[str, torch.Tensor]:
        return as_grids(self._size(requests[0])[1], len(requests), self.device)

    def response(self, tokens: torch.Tensor, request: TextRequest) -> str:
        """The image's, in words."""
        (rows, columns), _ = self._size(request)[1]
        return " ".join(map(str, tokens[-rows * columns :].tolist()))

    def beside(self, prompt: list[int], request: TextRequest) -> dict[str, torch.Tensor]:
        return {"text_positions": positions(len(prompt), self._size(request)[1]).to(self.device)}

    def _length(self, tokens: list[int]) -> int:
        return len(tokens)  # none of them is an end
