"""Write a miniature of a model, with random weights, in diffusers' layout: to try settings on, in seconds on a CPU."""

import sys
from pathlib import Path

from verl_omni.utils.options import Parser, at_least


def main() -> None:
    parser = Parser("verl-omni tiny", description=__doc__)
    which = "a pipeline class (`verl-omni models`), a model's folder, or its name on the hub"
    parser.add_argument("model", metavar="MODEL", help=which)
    parser.add_argument("folder", metavar="FOLDER", help="where to write it")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the weights (%(default)s)")
    options = parser.parse_args()
    folder = Path(options.folder).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        sys.exit(f"error: {folder} is not empty: name a new folder")
    import transformers

    from verl_omni.config.model import read_architecture
    from verl_omni.testing.tiny_random import WRITERS, build_tiny_random
    from verl_omni.utils.hub import model_folder
    from verl_omni.workers.engine.module import quiet_loading

    quiet_loading()
    transformers.utils.logging.set_verbosity_error()  # the defaults of its own configurations are news to it
    try:
        source = model_folder(options.model, weights=False, setting="MODEL")
        model = read_architecture(source) if Path(source).expanduser().is_dir() else options.model
        build_tiny_random(model, folder, options.seed)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    where = "actor_rollout_ref.rewriter.path" if model in WRITERS else "actor_rollout_ref.model.path"
    print(f"{folder}: a {model}. Try it: verl-omni check {where}={folder} data.train_files=...")


if __name__ == "__main__":
    main()
