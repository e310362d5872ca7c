"""Options of commands: whole numbers within bounds, and mistakes in one line that name the nearest option."""

import argparse
import math
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

from verl_omni.utils.suggest import nearest

# As argparse says it: invalid choice: 'lst' (choose from 'list', 'show')
CHOICE = re.compile(r".*invalid choice: '(.*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """argparse's, which says no more than what is wrong."""

    def error(self, message: str) -> NoReturn:
        prefix, _, words = message.partition("unrecognized arguments: ")
        if words and not prefix:
            word = next((word for word in words.split() if word.startswith("-")), words.split()[0])
            known = [name for name in self._option_string_actions if name.startswith("--")]
            message = no_option(word, known) if word.startswith("-") else f"{word}: nothing is expected here"
        elif match := CHOICE.fullmatch(message):
            message = message + nearest(match[1], re.findall(r"[\w-]+", match[2]))
        self.exit(2, f"error: {message}; {self.prog} --help says what there is\n")


def no_option(word: str, known: Iterable[str]) -> str:
    name = word.partition("=")[0]
    return f"there is no option {name}.{nearest(name, known)}".removesuffix(".")


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """For argparse's `type`: a whole number within these bounds."""
    bounds = f"{least} or more" if most is None else f"{least} to {most}"

    def whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number, {bounds}")
        return number

    return whole


def above_zero(text: str) -> float:
    """For argparse's `type`: a number above 0 that is finite."""
    number = finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number


def finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text}: expected a number")
    return number
