"""The quickstart's control: the same OCR scores, dealt to the wrong images. Nothing can be learned from them.

    python -m verl_omni.quickstart --run control \
        reward.custom_reward_function.path=pkg://verl_omni.quickstart.control

Validation is scored honestly.
"""

import random

from verl_omni.rewards.scorers.ocr import compute_score_ocr_line


def compute_score(
    images: list, ground_truths: list[str], prompts: list[str], extra_infos: list[dict]
) -> list[dict[str, object]]:
    """OCR scores, permuted among the training images of a batch."""
    return dealt(compute_score_ocr_line(images, ground_truths, prompts, extra_infos), extra_infos)


def dealt(results: list[dict[str, object]], extra_infos: list[dict]) -> list[dict[str, object]]:
    """The same answers with the scores of the training samples permuted."""
    training = [i for i, info in enumerate(extra_infos) if info.get("split") == "train"]
    scores = [result["score"] for result in results]
    shuffled = random.Random(repr(scores)).sample(training, len(training))
    changed = list(results)
    for i, j in zip(training, shuffled, strict=True):
        changed[i] = results[i] | {"score": scores[j]}
    return changed
