"""Drawn scenes with text in them, whose truth is known, to try readers of text on."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIGNS = ["Main St", "SALE 50%", "Tel 555-0199", "EST. 1987"]
WORDS = (
    "Bakery Open Grand Spring Garden Harbor Coffee Museum Fresh Bread Daily Winter Market Station River Library "
    "Concert Tonight Summer Festival Welcome Home Forever Yours Lost City Golden Bridge Night Train Exit Hotel"
).split()
FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "LiberationSans-Regular.ttf",
    "LiberationSerif-Regular.ttf",
    "LiberationSansNarrow-Bold.ttf",
    "Pillow's own",
)
# Ink on board: dark on light and light on dark, at least 100 levels apart in brightness.
COLOURS = (
    ((150, 20, 20), (245, 240, 230)),
    ((20, 30, 60), (250, 220, 120)),
    ((10, 90, 40), (230, 240, 235)),
    ((255, 255, 255), (150, 30, 40)),
    ((250, 240, 130), (20, 40, 110)),
    ((235, 235, 235), (40, 40, 45)),
)
BOARD = (470, 180)


def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font of the machine, or Pillow's own where it has none of that name."""
    try:
        return ImageFont.truetype(name, size)
    except OSError:
        return ImageFont.load_default(size=size)


@dataclass(frozen=True)
class Sign:
    """What is written on the board of a scene, and how. `angle` is in degrees, against the clock."""

    text: str
    font: str = "Pillow's own"
    size: int = 44
    angle: float = 0.0
    stroke: int = 0
    ink: tuple[int, int, int] = COLOURS[0][0]
    board: tuple[int, int, int] = COLOURS[0][1]


def draw_scene(sign: Sign, seed: int = 0) -> Image.Image:
    """512 x 512: spots, a board with the sign, and three other signs."""
    rng = np.random.default_rng(seed)
    image = Image.linear_gradient("L").resize((512, 512)).convert("RGB")
    draw = ImageDraw.Draw(image)
    for x, y, d in rng.integers(0, [512, 512, 60], (30, 3)).tolist():
        draw.ellipse((x, y, x + d, y + d), fill=tuple(rng.integers(0, 256, 3).tolist()))
    for y, other in zip((30, 100, 430), rng.permutation(SIGNS), strict=False):
        draw.rectangle((30, y, 250, y + 50), fill=(20, 30, 60))
        draw.text((140, y + 25), other, fill=(250, 250, 200), font=font("Pillow's own", 24), anchor="mm")
    board = Image.new("RGB", BOARD, sign.board)
    ImageDraw.Draw(board).text(
        (BOARD[0] / 2, BOARD[1] / 2),
        sign.text,
        sign.ink,
        font(sign.font, sign.size),
        anchor="mm",
        stroke_width=sign.stroke,
    )
    image.paste(board.rotate(sign.angle, expand=True) if sign.angle else board, (20, 190))
    return image


def legible_signs(count: int, seed: int = 0) -> Iterator[Sign]:
    """Two to four words in a font, size, colour and small angle drawn at random, such that the board holds them."""
    rng = np.random.default_rng(seed)
    while count:
        words = rng.choice(WORDS, rng.integers(2, 5), replace=False).tolist()
        if rng.random() < 0.3:
            words.append(str(rng.integers(10, 2030)))
        text = " ".join(words) if rng.random() < 0.7 else "\n".join([" ".join(words[:2]), " ".join(words[2:])]).strip()
        ink, board = COLOURS[rng.integers(len(COLOURS))]
        sign = Sign(text, str(rng.choice(FONTS)), int(rng.integers(24, 61)), float(rng.uniform(-5, 5)), 0, ink, board)
        left, top, right, bottom = ImageDraw.Draw(Image.new("L", (1, 1))).textbbox(
            (0, 0), sign.text, font(sign.font, sign.size)
        )
        if right - left < BOARD[0] - 40 and bottom - top < BOARD[1] - 40:
            count -= 1
            yield sign
