"""GenEval (arXiv 2310.11513): are the objects of the prompt in the image, as many, coloured and placed as it says?"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from verl_omni.config.knob import MOST_IMAGES, Range
from verl_omni.rewards.images import frames_of, to_rgb_array
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.scorers.geneval.accuracy import accuracy, accuracy_of
from verl_omni.rewards.scorers.geneval.rules import Limits, Verdict, judge, keep
from verl_omni.rewards.scorers.geneval.tasks import Task, read_task
from verl_omni.rewards.scorers.geneval.vision import ColourClassifier, Detector, ZeroShotDetector
from verl_omni.rewards.torch_models import find_device

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["GenEval", "accuracy", "accuracy_of", "look"]

Share = Annotated[float, Range(least=0, most=1)]
Count = Annotated[int, Range(least=1, most=MOST_IMAGES)]


@register_reward("geneval")
class GenEval:
    """1 where the image is right, else 0; or, with ``score="graded"``, how much of it is.

    The metadata of a prompt is its `extra_info`, or JSON in its ground truth: see :func:`read_task`. Rules, margins and
    templates are those of the paper. The detector is another: an OWLv2 or Grounding DINO of transformers, in place of a
    Mask2Former of mmdet, so numbers are not those of the paper's table.

    Args:
        detector: folder or name on the hub of an OWLv2 or Grounding DINO.
        classifier: the same of a CLIP, for colours. The default is the paper's.
        score: "correct" as the paper counts, or "graded" as Flow-GRPO trains (:func:`rules.graded`).
        threshold: an object counts with a higher score than this.
        counting_threshold: the same where objects are counted. The paper has 0.9, which its Mask2Former reaches for
            clear objects; zero-shot detectors hardly do.
        max_objects: at most so many of a class count, the surest.
        max_overlap: of two boxes of a class that overlap by this (intersection over union) or more, the surer counts.
            The paper has 1, which lets all pass; OWLv2 reports an object several times.
        device: of both models; None: a GPU if there is one.

    Returns for each image ``score``, ``correct`` (1.0 or 0.0, whatever the score is), ``tag`` (the task) and ``reason``
    (why it is wrong, else empty).
    """

    def __init__(
        self,
        *,
        detector: str = "IDEA-Research/grounding-dino-base",
        classifier: str = "openai/clip-vit-large-patch14",
        score: Literal["correct", "graded"] = "correct",
        threshold: Share = 0.3,
        counting_threshold: Share = 0.3,
        max_objects: Count = 16,
        max_overlap: Share = 0.5,
        device: str | None = None,
    ):
        self._graded = score == "graded"
        self._limits = Limits(threshold, counting_threshold, max_objects, max_overlap)
        device = str(find_device("geneval", device))
        self._detect, self._colours_of = ZeroShotDetector(detector, device), ColourClassifier(classifier, device)

    def __call__(
        self, images: list, ground_truths: list[Any], prompts: list[str], extra_infos: list[dict]
    ) -> list[dict[str, Any]]:
        from PIL import Image

        answers = []
        for image, truth, info in zip(images, ground_truths, extra_infos, strict=True):
            if frames_of(image) is not None:
                raise ValueError("the geneval reward looks at still images, and it was given a video")
            task = read_task(info, truth)
            picture = Image.fromarray(to_rgb_array(image))
            verdict = look(picture, task, self._detect, self._colours_of, self._limits)
            answers.append(
                {
                    "score": verdict.graded if self._graded else float(verdict.correct),
                    "correct": float(verdict.correct),
                    "tag": task.tag,
                    "reason": verdict.reason,
                }
            )
        return answers


def look(image: "Image.Image", task: Task, detect: Detector, colours_of: Any, limits: Limits) -> Verdict:
    """What the two models see in an image, judged by the rules."""
    objects = keep(detect(image, task.names()), task.tag, limits)
    colours = {}
    for wanted in task.include:
        boxes = [one.box for one in objects.get(wanted.name, [])[: wanted.count]]
        if wanted.colour is not None and len(boxes) == wanted.count > len(colours.get(wanted.name, [])):
            colours[wanted.name] = colours_of(image, boxes, wanted.name)
    return judge(task, objects, colours)
