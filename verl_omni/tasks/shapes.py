"""Eight shapes in ten colours on a grey ground: to draw, many pictures at once, and to find again."""

import itertools
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

SIZE = 64  # pixels of a side
GROUND = 128  # grey, as far from every colour as they allow
COLOURS = {
    "red": (220, 30, 30),
    "orange": (255, 140, 0),
    "yellow": (250, 230, 40),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "purple": (130, 30, 180),
    "pink": (255, 160, 205),
    "brown": (110, 60, 20),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
}
FOREGROUND = 60.0  # distance in RGB from which on a pixel is not ground
LEAST_PIXELS = 20  # what is smaller is a speck
PALETTE = np.array(list(COLOURS.values()))


def _star(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Five points. In the box from -1 to 1 its own height and width are stretched a little."""
    x, y = 0.951 * u, 0.0955 - 0.9045 * v
    radius, angle = torch.hypot(x, y), torch.atan2(x, y)
    away = (torch.remainder(angle + math.pi / 5, 2 * math.pi / 5) - math.pi / 5).abs()  # from the nearest point's axis
    inner_x, inner_y = 0.55 * math.cos(math.pi / 5), 0.55 * math.sin(math.pi / 5)
    return (inner_x - 1) * radius * away.sin() >= inner_y * (radius * away.cos() - 1)


def _heart(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x, y = 1.14 * u, 0.11 - 1.11 * v
    return (x**2 + y**2 - 1) ** 3 <= x**2 * y**3


# Whether a point belongs to the shape; each fills the box from -1 to 1, v points down.
SHAPES = {
    "circle": lambda u, v: u**2 + v**2 <= 1,
    "square": lambda u, v: u.abs().maximum(v.abs()) <= 1,
    "triangle": lambda u, v: u.abs() <= (v + 1) / 2,
    "diamond": lambda u, v: u.abs() + v.abs() <= 1,
    "cross": lambda u, v: u.abs().minimum(v.abs()) <= 0.28,
    "ring": lambda u, v: ((u**2 + v**2) <= 1) & ((u**2 + v**2) >= 0.3),
    "star": _star,
    "heart": _heart,
}
NAMES = tuple(SHAPES)
COLOUR_NAMES = tuple(COLOURS)


@dataclass(frozen=True)
class Found:
    """An object in a picture. `score` is how well its outline is that of the shape, from 0 to 1."""

    name: str
    colour: str
    score: float
    box: tuple[int, int, int, int]  # left, top, right, bottom; the last pixels belong to it


def draw(
    shapes: torch.Tensor, colours: torch.Tensor, places: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Pictures, uint8 (B, 3, SIZE, SIZE): of each at most K objects.

    `shapes` (B, K) are numbers of NAMES, -1 for none; `colours` (B, K) numbers of COLOURS; `places` (B, K, 3) the
    middle (x, y) and half the side of an object's box, in pixels.
    """
    device = shapes.device
    axis = torch.arange(SIZE, device=device)
    ground = GROUND + torch.randint(-8, 9, (len(shapes), 1, 1, 1), generator=generator, device=device)
    picture = ground.float().repeat(1, 3, SIZE, SIZE)
    palette = torch.from_numpy(PALETTE).to(device, torch.float32)
    for k, (number, name) in itertools.product(range(shapes.shape[1]), enumerate(NAMES)):
        of_this = (shapes[:, k] == number).nonzero()[:, 0]
        x, y, half = places[of_this, k, :, None, None].unbind(1)
        u = ((axis[None, None, :] - x) / half).expand(-1, SIZE, -1)
        v = ((axis[None, :, None] - y) / half).expand(-1, -1, SIZE)
        inside = (u.abs().maximum(v.abs()) <= 1) & SHAPES[name](u, v)
        colour = palette[colours[of_this, k]][:, :, None, None]
        picture[of_this] = torch.where(inside[:, None], colour, picture[of_this])
    noise = 4 * torch.randn(picture.shape, generator=generator, device=device)
    return (picture + noise).round().clamp(0, 255).to(torch.uint8)


def find(picture: np.ndarray) -> list[Found]:
    """The objects of a picture (H, W, 3), uint8: what is not ground, in connected pieces that do not touch the rest."""
    pixels = picture.astype(np.float32)
    away = np.sqrt(((pixels - GROUND) ** 2).sum(-1)) > FOREGROUND
    found = []
    for rows, columns in pieces(away):
        if len(rows) >= LEAST_PIXELS:
            found.append(_identify(pixels, rows, columns))
    return found


def _identify(pixels: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> Found:
    top, bottom, left, right = rows.min(), rows.max(), columns.min(), columns.max()
    height, width = bottom - top + 1, right - left + 1
    piece = np.zeros((height, width), bool)
    piece[rows - top, columns - left] = True
    drawn = outlines(int(height), int(width))
    agreement = (drawn & piece).sum((1, 2)) / (drawn | piece).sum((1, 2))
    best = int(agreement.argmax())
    score = float(agreement[best]) * min(height, width) / max(height, width)
    colour = np.median(pixels[rows, columns], axis=0)
    nearest = int(((PALETTE - colour) ** 2).sum(1).argmin())
    return Found(NAMES[best], COLOUR_NAMES[nearest], score, (int(left), int(top), int(right), int(bottom)))


@cache
def outlines(height: int, width: int) -> np.ndarray:
    """Each shape in a box of that size, (shapes, height, width)."""
    v, u = torch.meshgrid(*((torch.arange(n) + 0.5) / n * 2 - 1 for n in (height, width)), indexing="ij")
    return torch.stack([shape(u, v) for shape in SHAPES.values()]).numpy()


def pieces(mask: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The connected pieces of a mask, each as (rows, columns); diagonal neighbours do not connect.

    Runs of a row are joined with those of the row above that they touch.
    """
    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), np.int8)
    padded[:, 1:-1] = mask
    edges = np.diff(padded, axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    owner = _joined(rows.tolist(), starts.tolist(), ends.tolist())
    lengths = ends - starts
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    all_rows = np.repeat(rows, lengths)
    all_columns = np.repeat(starts, lengths) + np.arange(lengths.sum()) - before
    owners = np.repeat(owner, lengths)
    return [(all_rows[owners == one], all_columns[owners == one]) for one in sorted(set(owner))]


def _joined(rows: list[int], starts: list[int], ends: list[int]) -> list[int]:
    """Of each run the number of a run that stands for its piece."""
    parent = list(range(len(rows)))

    def root(run: int) -> int:
        while parent[run] != run:
            run = parent[run]
        return run

    above: list[int] = []
    current: list[int] = []
    for run, row in enumerate(rows):
        if current and row != rows[current[0]]:
            above, current = (current if row == rows[current[0]] + 1 else []), []
        current.append(run)
        for other in above:
            if starts[other] < ends[run] and starts[run] < ends[other]:
                parent[root(other)] = root(run)
    return [root(run) for run in range(len(rows))]
