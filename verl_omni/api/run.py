"""What a run has left in its folder, for a notebook: metrics, checkpoints, images; to draw with and to hand on."""

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

SCORE = re.compile("val-core/.*/reward/mean@")  # validation's, for each data_source
REWARD = "critic/rewards/mean"


class Run:
    """A run's folder: of one that `train` has just ended, or of any other."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()

    def __repr__(self) -> str:
        steps = self.checkpoints
        return f"Run({str(self.folder)!r}): {len(self.metrics)} steps, checkpoints of {list(steps) or 'none'}"

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Of every step, under the names of metrics.jsonl; `step` says which."""
        from verl_omni.utils.run_files import read_metrics

        file = self.folder / "metrics.jsonl"
        return [{"step": line["step"], **line["data"]} for line in read_metrics(file)] if file.is_file() else []

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step -> folder, in ascending order."""
        from verl_omni.trainer.run_folder.checkpointing import whole_checkpoints

        return whole_checkpoints(self.folder)

    @property
    def last(self) -> Path | None:
        """The last checkpoint."""
        return next(reversed(self.checkpoints.values()), None)

    @property
    def best(self) -> Path | None:
        """The checkpoint whose step has the highest validation score, or mean reward where nothing was validated."""
        saved = self.checkpoints
        scores = {line["step"]: score for line in self.metrics if (score := _score(line)) is not None}
        known = [step for step in saved if step in scores]
        return saved[max(known, key=scores.__getitem__)] if known else self.last

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    def images(self, step: int | None = None) -> list["Image | list[Image]"]:
        """Validation's images after a step (by default the last one), in the order of the prompts.

        A video is a list of its frames, as `sample` gives it.
        """
        from PIL import Image

        from verl_omni.utils.image_files import frames_in

        files = [path for _, path in self._shown(step)]
        return [list(frames_in(path)) if path.suffix in (".mp4", ".gif") else Image.open(path) for path in files]

    def sample(
        self,
        prompts: str | Sequence[str],
        seeds: int | Sequence[int] = 0,
        *,
        checkpoint: str | Path | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> list[Any]:
        """Images (or `verl_omni.utils.responses.Sound` ...) with the trained weights, one for each prompt and seed.

        `checkpoint` is `run.best` or any other (by default the last one), `settings` are fields of `rollout.pipeline`,
        such as `height`; by default they are those of the run's validation.
        """
        from verl_omni.cli.painter import Painter
        from verl_omni.cli.trained import find_weights
        from verl_omni.utils.pictures import as_pil
        from verl_omni.utils.responses import pixels_of
        from verl_omni.workers.engine.module import quiet_loading

        quiet_loading()
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        numbers = [seeds] if isinstance(seeds, int) else list(seeds)
        painter = Painter(find_weights(checkpoint or self.folder), settings, device)
        drawn = [painter.draw([text], [seed])[0].response for text in texts for seed in numbers]
        return [as_pil(pixels_of(one)) if painter.kind.name in ("image", "video") else one for one in drawn]

    def export(self, out: str | Path, format: str = "diffusers", checkpoint: str | Path | None = None) -> Path:
        """The trained weights as `verl-omni export` writes them: diffusers, kohya or merged."""
        from verl_omni.cli.export import export

        return export(checkpoint or self.folder, out, format)

    def _shown(self, step: int | None) -> list[tuple[str, Path]]:
        """(prompt, file) of what a validation has written."""
        folders = {int(f.name.removeprefix("step_")): f for f in self.folder.glob("validation/step_*")}
        if not folders:
            return []
        folder = folders[max(folders) if step is None else step]
        lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [(row["prompt"], folder / row["image"]) for row in rows if row.get("image")]

    def _repr_html_(self) -> str:
        """In a notebook: what it is, and the images of the last validation."""
        from verl_omni.report.pictures import picture_or_player

        tiles = "".join(
            f'<figure style="display:inline-block;margin:4px;width:128px">{picture_or_player(path, "", "width=128 ")}'
            f'<figcaption style="font-size:80%">{html.escape(prompt[:80])}</figcaption></figure>'
            for prompt, path in self._shown(None)[:12]
        )
        return f"<div><code>{html.escape(repr(self))}</code><br>{tiles}</div>"


def _score(metrics: dict[str, float]) -> float | None:
    found = [value for name, value in metrics.items() if SCORE.match(name)]
    return sum(found) / len(found) if found else metrics.get(REWARD)
