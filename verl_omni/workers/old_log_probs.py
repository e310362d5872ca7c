"""Where the old log-probabilities of an update come from, and why."""

from typing import NamedTuple


class OldLogProbs(NamedTuple):
    source: str
    why: str


SOURCES = {
    "rollout": "the rollout's own",
    "train": "of the training graph: the first optimizer step takes its own, as the weights have not moved",
    "recompute": "of a pass before the update",
}


def choose_old_log_probs(setting: str | None, same_arithmetic: bool, same_weights: bool = True) -> OldLogProbs:
    """`setting` is `actor_rollout_ref.actor.old_log_probs`; null chooses what makes the first ratio exactly 1.

    Where other weights drew the samples, the ratio is to those; but not where rounding alone would take it out of the
    clip range.
    """
    if setting is not None:
        return OldLogProbs(setting, f"actor_rollout_ref.actor.old_log_probs={setting}")
    if not same_weights:
        if same_arithmetic:
            return OldLogProbs("rollout", "earlier weights drew the samples, and ratios are to those")
        return OldLogProbs("recompute", "earlier weights drew the samples, in kernels that round differently")
    if same_arithmetic:
        return OldLogProbs("rollout", "the same weights in the same arithmetic drew the samples")
    return OldLogProbs("train", "the rollout's kernels round differently from those of training")
