"""The control of the melody: the same scores, dealt to the wrong sounds. Nothing can be learned from them.

    python -m verl_omni.quickstart --task melody --run control \
        reward.custom_reward_function.path=pkg://verl_omni.quickstart.melody.control

Validation is scored honestly.
"""

from verl_omni.quickstart.control import dealt
from verl_omni.rewards.scorers.pitch import compute_score_pitch


def compute_score(
    audios: list, sample_rates: list[int], ground_truths: list[str], extra_infos: list[dict]
) -> list[dict[str, object]]:
    """Scores of pitch, permuted among the training sounds of a batch."""
    return dealt(compute_score_pitch(audios, sample_rates, ground_truths), extra_infos)
