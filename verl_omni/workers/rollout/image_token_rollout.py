"""Tokens of images from a model that writes them, with the weights that are trained."""

from typing import Any

import torch

from verl_omni.workers.rollout.text_rollout import TextRequest, TextRollout


class ImageTokenRollout(TextRollout):
    """As many tokens as the size of the image asks for: a preview's, then its own, which are what is drawn.

    Its adapter (`writer`) says how it is asked for them.
    """

    def __init__(self, writer: Any, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.writer = writer

    def _size(self, request: TextRequest) -> tuple[list[int], list[tuple[int, int]]]:
        return self.writer.target(self.tokenizer, *request.size)

    def ids_of(self, request: TextRequest) -> list[int]:
        return self.writer.asked(self.tokenizer, request.prompt) + self._size(request)[0]

    def most_tokens(self, request: TextRequest) -> int:
        return sum(rows * columns for rows, columns in self._size(request)[1])

    def told(self, requests: list[TextRequest]) -> dict[str, torch.Tensor]:
        return self.writer.as_grids(self._size(requests[0])[1], len(requests), self.device)

    def response(self, tokens: torch.Tensor, request: TextRequest) -> str:
        """The image's, in words."""
        (rows, columns), _ = self._size(request)[1]
        return " ".join(map(str, tokens[-rows * columns :].tolist()))

    def beside(self, prompt: list[int], request: TextRequest) -> dict[str, torch.Tensor]:
        return {"text_positions": self.writer.positions(len(prompt), self._size(request)[1]).to(self.device)}

    def _length(self, tokens: list[int]) -> int:
        return len(tokens)  # none of them is an end
