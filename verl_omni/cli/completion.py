"""Let your shell complete verl-omni: its subcommands, their options, recipes, settings and their values.

    echo 'eval "$(verl-omni completion bash)"' >> ~/.bashrc
    echo 'eval "$(verl-omni completion zsh)"' >> ~/.zshrc
    verl-omni completion fish > ~/.config/fish/completions/verl-omni.fish
"""

import argparse
import contextlib
import io
import re
import sys

from verl_omni.utils.options import Parser

BASH = """\
_verl_omni() {
    local line=${COMP_LINE:0:COMP_POINT} words
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    mapfile -t COMPREPLY < <(verl-omni completion words "${words[@]:1}" 2>/dev/null)
    # bash takes what follows a = for a word of its own
    [[ ${words[-1]} == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _verl_omni verl-omni
"""

ZSH = """\
_verl_omni() {
    local -a found
    found=("${(@f)$(verl-omni completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    # what ends in = goes on with a value
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
    [[ -n ${found[1]} ]] || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _verl_omni verl-omni
"""
FISH = """\
function __verl_omni_words
    set -l words (commandline -opc) (commandline -ct)
    verl-omni completion words $words[2..-1] 2>/dev/null
end
# files are offered where the command knows no word
complete -c verl-omni -n '__verl_omni_words | string length -q' -f -a '(__verl_omni_words)'
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def candidates(words: list[str]) -> list[str]:
    """What the last of the words after `verl-omni` may become."""
    from verl_omni.cli.main import SUBCOMMANDS

    *before, now = words or [""]
    if not before and "." not in now and "=" not in now:
        known = [*SUBCOMMANDS, "--help", "--version"]
    elif not before or before[0] == "train" or before[0] not in SUBCOMMANDS:
        known = settings(now) + (recipes() if before == ["train"] else []) + ["--help", "--cfg"]
    elif before == ["recipes"]:
        known = ["list", "show"]
    elif before == ["recipes", "show"]:
        known = recipes()
    else:
        known = options(before[0])
    return [word for word in known if word.startswith(now)]


def settings(now: str) -> list[str]:
    """`key=`, or of a key that is typed already what it may be."""
    from verl_omni.cli.train_help import DiffusionTrainerConfig, walk

    key, typed, _ = now.partition("=")
    knobs = {knob.name: knob for knob in walk(DiffusionTrainerConfig)}
    if not typed:
        return [f"{name}=" for name in knobs]
    knob = knobs.get(key)
    if knob is None:
        return []
    values = ["true", "false"] if isinstance(knob.default, bool) else []
    if not callable(knob.range.choices):  # names that can be registered would have to be imported
        values += knob.range.names()
    return [f"{key}={value}" for value in values]


def recipes() -> list[str]:
    from verl_omni.cli.recipes import shipped

    return list(shipped())


def options(name: str) -> list[str]:
    """As its own help page has them."""
    from verl_omni.cli.main import run

    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        run(name, ["--help"])
    return sorted(set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", page.getvalue(), re.MULTILINE)))


def main() -> None:
    if sys.argv[1:2] == ["words"]:  # the shell asks: what was typed so far may look like options of ours
        print("\n".join(candidates(sys.argv[2:])))
        return
    parser = Parser(
        "verl-omni completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to be told")
    print(SHELLS[parser.parse_args().shell], end="")


if __name__ == "__main__":
    main()
