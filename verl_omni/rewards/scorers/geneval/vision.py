"""The two models that GenEval looks with: a detector of objects by their names, and a classifier of colours."""

import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from verl_omni.rewards.scorers.geneval.rules import Box, Seen
from verl_omni.rewards.scorers.geneval.tasks import COLOURS
from verl_omni.rewards.torch_models import refuse_code_of
from verl_omni.utils.hub import model_folder
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    import torch
    from PIL import Image

Detector = Callable[["Image.Image", list[str]], list[Seen]]

# As in the paper's repository; the embeddings of the three are averaged.
COLOUR_TEMPLATES = (
    "a photo of a {colour} {name}",
    "a photo of a {colour}-colored {name}",
    "a photo of a {colour} object",
)


class ZeroShotDetector:
    """An OWLv2 or Grounding DINO of transformers. A box counts for the class that it has the highest score for."""

    def __init__(self, path: str, device: str = "cpu"):
        from transformers import AutoModelForZeroShotObjectDetection

        kinds = {"owlv2": self._owl, "grounding-dino": self._dino}
        self._model, self._processor = _load(AutoModelForZeroShotObjectDetection, path, device, "detector", kinds)
        kind = self._model.config.model_type
        if kind == "owlv2" and not any(importlib.util.find_spec(package) for package in ("torchvision", "scipy")):
            raise ImportError(
                "the images for OWLv2 are prepared with torchvision or scipy: pip install scipy, or choose a Grounding "
                "DINO as reward.scorers.geneval.detector"
            )
        self._look = kinds[kind]

    def __call__(self, image: "Image.Image", names: list[str]) -> list[Seen]:
        import torch

        with torch.inference_mode():
            scores, labels, boxes = self._look(image.convert("RGB"), names)
        found = zip(scores.tolist(), labels.tolist(), boxes.tolist(), strict=True)
        inside = ((score, label, _inside(box, *image.size)) for score, label, box in found)
        return [Seen(names[label], score, box) for score, label, box in inside if box is not None]

    def _owl(self, image: "Image.Image", names: list[str]) -> tuple["torch.Tensor", ...]:
        queries = [f"a photo of a {name}" for name in names]
        inputs = self._processor(text=[queries], images=image, return_tensors="pt").to(self._model.device)
        (found,) = self._processor.post_process_grounded_object_detection(
            self._model(**inputs), threshold=0.0, target_sizes=[(image.height, image.width)]
        )
        return found["scores"], found["labels"], found["boxes"]

    def _dino(self, image: "Image.Image", names: list[str]) -> tuple["torch.Tensor", ...]:
        """A class has several tokens: its score is their mean, as where Grounding DINO is evaluated on COCO.

        transformers would give each box the tokens above a threshold, which need not be those of one class.
        """
        import torch

        text = "".join(f"{name.lower()}. " for name in names).rstrip()
        inputs = self._processor(text=text, images=image, return_offsets_mapping=True, return_tensors="pt")
        begin, end = inputs.pop("offset_mapping")[0].unbind(-1)
        outputs = self._model(**inputs.to(self._model.device))
        tokens, scores, start = outputs.logits[0].sigmoid().cpu(), [], 0
        for name in names:
            own = (begin >= start) & (end <= start + len(name)) & (begin < end)
            scores.append(tokens[:, : len(own)][:, own].mean(-1))
            start += len(name) + 2
        best = torch.stack(scores).max(0)
        x, y, width, height = outputs.pred_boxes[0].cpu().unbind(-1)
        corners = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], -1)
        return best.values, best.indices, corners * torch.tensor([*image.size, *image.size])


class ColourClassifier:
    """A CLIP that names the colour of what is in a box, given its class."""

    def __init__(self, path: str, device: str = "cpu"):
        from transformers import CLIPModel

        self._model, self._processor = _load(CLIPModel, path, device, "classifier", ["clip"])
        self._by_name: dict[str, torch.Tensor] = {}

    def __call__(self, image: "Image.Image", boxes: list[Box], name: str) -> list[str]:
        import torch

        crops = [image.convert("RGB").crop(box) for box in boxes]
        with torch.inference_mode():
            inputs = self._processor(images=crops, return_tensors="pt").to(self._model.device)
            seen = self._model.visual_projection(self._model.vision_model(**inputs).pooler_output)
            best = (_unit(seen) @ self._colours(name).T).argmax(-1)
        return [COLOURS[index] for index in best.tolist()]

    def _colours(self, name: str) -> "torch.Tensor":
        """One direction for each colour of this class."""
        if name not in self._by_name:
            texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in COLOUR_TEMPLATES]
            inputs = self._processor(text=texts, padding=True, return_tensors="pt").to(self._model.device)
            said = _unit(self._model.text_projection(self._model.text_model(**inputs).pooler_output))
            self._by_name[name] = _unit(said.unflatten(0, (len(COLOURS), -1)).mean(1))
        return self._by_name[name]


def _unit(vectors: "torch.Tensor") -> "torch.Tensor":
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _inside(box: list[float], width: int, height: int) -> Box | None:
    """What of a box is in the image, or None where no pixel is."""
    left, top, right, bottom = max(box[0], 0), max(box[1], 0), min(box[2], width), min(box[3], height)
    return (left, top, right, bottom) if round(right) > round(left) and round(bottom) > round(top) else None


def _load(cls: Any, path: str, device: str, setting: str, kinds: Iterable[str]) -> tuple[Any, Any]:
    """Model and processor, or one line that says which setting cannot be had.

    transformers would fill weights that are not there with random ones.
    """
    from transformers import AutoConfig, AutoProcessor

    where = f'reward.scorers.geneval.{setting}="{path}"'
    try:
        path = os.path.expanduser(model_folder(path, setting=where.partition("=")[0]))
        if os.path.isdir(path):
            refuse_code_of(where, path)
        kind = AutoConfig.from_pretrained(path).model_type
        if kind not in kinds:
            raise ValueError(unknown("kind of model", kind, kinds))
        model, told = cls.from_pretrained(path, output_loading_info=True, use_safetensors=True)
        if told["missing_keys"]:
            raise ValueError(f"it has no {sorted(told['missing_keys'])[0]}")
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: expected a folder or a name on the hub. {_first_line(error)}") from error
    try:
        return model.eval().to(device), processor
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f'reward.scorers.geneval.device="{device}" cannot be used: {_first_line(error)}') from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
