"""verl-omni: one command, one file a subcommand. Without a subcommand it trains."""

import importlib
import sys

SUBCOMMANDS = {
    "train": "verl_omni.cli.train",
    "plan": "verl_omni.cli.plan",
    "score": "verl_omni.cli.score",
    "report": "verl_omni.report.report",
    "serve-reward": "verl_omni.cli.serve_reward",
    "prepare-pairs": "verl_omni.data.prepare_offline_dpo",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in SUBCOMMANDS:
        del sys.argv[1]
    module = importlib.import_module(SUBCOMMANDS.get(name, SUBCOMMANDS["train"]))
    (module.command if hasattr(module, "command") else module.main)()


if __name__ == "__main__":
    main()
