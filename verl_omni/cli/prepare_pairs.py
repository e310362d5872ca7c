"""Encode preference pairs for offline training; the options are in `verl_omni/data/pair_options.py`."""

from verl_omni.data.pair_options import parser


def main() -> None:
    options = parser().parse_args()
    from verl_omni.data.prepare_offline_dpo import run
    from verl_omni.workers.engine.module import quiet_loading

    quiet_loading()
    run(options)


if __name__ == "__main__":
    main()
