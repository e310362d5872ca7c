"""Bad files: prompts, rewards, models, cached pairs, checkpoints to go on from."""

import json
import shutil
from pathlib import Path

from inputs import BadInput, row

A = "actor_rollout_ref."
DEEP = "[" * 100_000 + "]" * 100_000
TRAIN, VAL = "data.train_files=", "data.val_files="


def prompts() -> list[BadInput]:
    theme, good = "Prompts", [row(f"a cat, number {i}") for i in range(5)]

    def without(key: str) -> dict:
        return {k: v for k, v in row().items() if k != key}

    files = [
        ("no file", "null", ("data.train_files",), {}),
        ("a file that is not there", "/no/such.parquet", ("/no/such.parquet", "data.train_files"), {}),
        ("a folder", "{f}/folder", ("folder", "without images and captions"), {"folder/x": ""}),
        ("an empty parquet file", "empty.parquet", ("empty.parquet",), {"empty.parquet": ""}),
        ("an empty JSONL file", "empty.jsonl", ("empty.jsonl",), {"empty.jsonl": ""}),
        ("a JSONL file of empty lines", "blank.jsonl", ("blank.jsonl",), {"blank.jsonl": "\n\n\n"}),
        ("no parquet inside", "x.parquet", ("x.parquet",), {"x.parquet": "no parquet at all"}),
        ("a cut-off parquet file", "x.parquet", ("x.parquet",), {"x.parquet": b"PAR1\x15\x04\x15"}),
        ("a CSV file", "x.csv", ("x.csv", ".jsonl"), {"x.csv": "a cat\n"}),
        ("a text of prompts, and no reward", "x.txt", ("no reward is named",), {"x.txt": "a cat\n" * 8}),
        ("images, one without a caption", "images", ("b.png has no caption",),
         {"images/a.png": b"", "images/a.txt": "a cat", "images/b.png": b""}),
        ("a compressed file under another name", "x.jsonl", ("x.jsonl",), {"x.jsonl": b"\x1f\x8b\x08\x00\xff\xfe"}),
        ("Latin-1", "x.jsonl", ("x.jsonl", "UTF-8"), {"x.jsonl": '{"prompt": "caf\xe9"}'.encode("latin-1")}),
        ("UTF-16", "x.jsonl", ("x.jsonl", "UTF-8"), {"x.jsonl": json.dumps(row()).encode("utf-16")}),
        ("JSON over several lines", "x.jsonl", ("x.jsonl, line 1",), {"x.jsonl": json.dumps(row(), indent=2)}),
        ("a line nested 100,000 levels deep", "x.jsonl", ("x.jsonl, line 1",), {"x.jsonl": DEEP}),
        ("a JSON list", "x.jsonl", ("x.jsonl, line 1",), {"x.jsonl": json.dumps([row()])}),
        ("a list of files, one of which is missing", "[{f}/good.jsonl,gone.jsonl]", ("gone.jsonl",),
         {"good.jsonl": json.dumps(row()) + "\n"}),
    ]  # fmt: skip
    cases = [BadInput(theme, name, (TRAIN + value,), says, files=content) for name, value, says, content in files]
    cases.append(BadInput(theme, "validation: a file that is not there", (VAL + "/no/val.jsonl",),
                          ("/no/val.jsonl", "data.val_files")))  # fmt: skip
    cases.append(BadInput(theme, "validation alone, without prompts", ("trainer.val_only=true", VAL + "null"),
                          ("data.val_files",)))  # fmt: skip
    rows = [
        ("a row that is no JSON", '{"prompt": "a cat', ("line 6",)),
        ("a row without data_source", without("data_source"), ("line 6", "data_source")),
        ("a row without prompt", without("prompt"), ("line 6", "prompt")),
        ("a row without reward_model", without("reward_model"), ("line 6", "reward_model")),
        ("no ground truth", row(reward_model={}), ("line 6", "ground_truth")),
        ("a text for reward_model", row(reward_model="407"), ("line 6", "reward_model")),
        ("an empty prompt", row("  "), ("line 6", "prompt")),
        ("a number for a prompt", row(407), ("line 6", "prompt")),
        ("a list of words for a prompt", row(["a", "cat"]), ("line 6", "prompt")),
        ("messages without a user", row([{"role": "system", "content": "x"}]), ("line 6", "user")),
        ("a number for negative_prompt", row(negative_prompt=5), ("line 6", "negative_prompt")),
        ("a lone surrogate in a prompt", row("a \ud800 cat"), ("line 6",)),
        ("a number for data_source", row(source=5), ("line 6", "data_source")),
        ("a misspelt reward", row(source="jpeg_compresibility"), ("jpeg_compresibility", "jpeg_compressibility")),
        ("a text for extra_info", row(extra_info="x"), ("line 6", "extra_info")),
        ("an unknown agent loop", row(agent_name="bogus"), ("bogus", "diffusion_single_turn_agent")),
        ("a number for agent_name", row(agent_name=7), ("agent_name",)),
        ("a prompt of 2 MB", row("x" * 2 * 2**20), ("line 6", "prompt has 2097152 letters")),
        ("a negative prompt of 2 MB", row(negative_prompt="x" * 2 * 2**20), ("line 6", "negative_prompt")),
        ("a prompt that is too long", row("word " * 3000), ("max_sequence_length",)),
        ("a negative prompt that is too long", row(negative_prompt="word " * 3000), ("max_sequence_length",)),
    ]  # fmt: skip
    cases += [BadInput(theme, name, (), says, rows=[*good, bad]) for name, bad, says in rows]
    misspelt = [{"promt": "a cat", **without("prompt")}] * 4
    cases.append(BadInput(theme, "a misspelt column", (), ("promt", "prompt"), rows=misspelt))
    alone = ("reward.scorers=[{name: ocr_line}]",)
    cases.append(BadInput(theme, "prompts alone for a reward that compares", alone, ("ocr_line", "ground_truth"),
                          rows=[{"prompt": "a cat"}] * 8))  # fmt: skip
    long = [row()] * 3 + [row("word " * 3000)]
    cases.append(BadInput(theme, "validation: a prompt that is too long", (VAL + "long.jsonl",),
                          ("max_sequence_length",),
                          files={"long.jsonl": "".join(json.dumps(r) + "\n" for r in long)}))  # fmt: skip
    return cases


def rewards() -> list[BadInput]:
    theme, path, name = "Rewards", "reward.custom_reward_function.path=", "reward.custom_reward_function.name="
    one = "def compute_score(image):\n    "
    early = [
        ("a parameter that does not exist", "def compute_score(imgae):\n    return 1.0\n", ("imgae", "image")),
        ("a parameter of a sound, which this model does not make", "def compute_score(audio):\n    return 1.0\n",
         ("audio", "image")),
        ("a syntax error", "def compute_score(image:\n    return 1\n", ("reward.py",)),
        ("an import that fails", "import no_such_package\n" + one + "return 1\n", ("reward.py", "no_such_package")),
        ("an error while it is imported", "1 / 0\n", ("reward.py", "ZeroDivisionError")),
        ("sys.exit while it is imported", "import sys\nsys.exit(3)\n", ("reward.py",)),
        ("no function at all", "score = 1.0\n", ("reward.py", "compute_score")),
        ("a number called compute_score", "compute_score = 1.0\n", ("reward.py", "compute_score")),
        ("an empty file", "", ("reward.py", "compute_score")),
    ]  # fmt: skip
    late = [
        ("raises", one + "return {}['key']\n", ("compute_score", "KeyError")),
        ("returns None", one + "pass\n", ("compute_score", "None")),
        ("returns NaN", one + "return float('nan')\n", ("compute_score", "nan")),
        ("returns infinity", one + "return float('-inf')\n", ("compute_score", "-inf")),
        ("returns a text", one + "return '0.5'\n", ("compute_score", "'0.5'")),
        ("returns a huge integer", one + "return 10 ** 400\n", ("compute_score",)),
        ("returns a dict without a score", one + "return {'points': 1}\n", ("compute_score", "score")),
        ("returns two numbers", one + "import numpy as np\n    return np.ones(2)\n", ("compute_score",)),
        ("returns too few for a batch", "def compute_score(images):\n    return [1.0]\n", ("compute_score", "images")),
        ("returns no list for a batch", "def compute_score(images):\n    return 1.0\n", ("compute_score", "images")),
        ("is async and raises", "async def compute_score(image):\n    raise RuntimeError('no server')\n",
         ("compute_score", "no server")),
        ("raises in many lines", one + "raise ValueError('first\\nsecond\\nthird')\n", ("compute_score", "first")),
    ]  # fmt: skip
    cases = [
        BadInput(theme, "a file that is not there", (path + "/no/reward.py",), ("/no/reward.py",)),
        BadInput(theme, "a folder", (path + "{f}",), ("custom_reward_function.path",)),
        BadInput(theme, "a binary file", (path + "reward.py",), ("reward.py",), files={"reward.py": b"\x00\xff\x00"}),
        BadInput(theme, "a function that is not in the file", (path + "r.py", name + "score"), ("score",),
                 files={"r.py": one + "return 1.0\n"}),
        BadInput(theme, "an argument that it does not take",
                 (path + "r.py", "reward.custom_reward_function.reward_kwargs.scale=2"), ("scale",),
                 files={"r.py": one + "return 1.0\n"}),
    ]  # fmt: skip
    forever = "while True:\n    pass\n"
    cases += [
        BadInput(theme, "a module that is never imported to its end", ("reward.timeout=5",), ("reward.py", "5 s"),
                 reward=forever),
    ]  # fmt: skip
    cases += [BadInput(theme, what, (), says, reward=source) for what, source, says in early]
    kwargs = "+reward.custom_reward_function.reward_kwargs.key="
    taking = "def compute_score(image, key):\n    return 1.0\n"
    cases.append(BadInput(theme, "a key in a variable that is not set", (f"{kwargs}env:NO_SUCH_NAME",),
                          ("reward_kwargs.key", "NO_SUCH_NAME"), reward=taking))  # fmt: skip
    cases.append(BadInput(theme, "a key in a file that is not there", (f"{kwargs}file:/no/key",),
                          ("reward_kwargs.key", "/no/key"), reward=taking))  # fmt: skip
    stop = ("reward.on_failure=stop",)  # else the image leaves, and several in a row end the run
    cases += [BadInput(theme, what, stop, says, reward=source, early=False) for what, source, says in late]
    return cases


# ---- model folders --------------------------------------------------------------------------------------


def write(name: str, text: str | bytes):
    def spoil(model: Path) -> None:
        (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return spoil


def remove(name: str):
    def spoil(model: Path) -> None:
        path = model / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


def index(**changes):
    def spoil(model: Path) -> None:
        path = model / "model_index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def component(name: str, **changes):
    def spoil(model: Path) -> None:
        path = model / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def halve(pattern: str):
    def spoil(model: Path) -> None:
        (path,) = model.glob(pattern)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return spoil


def as_pickle(name: str):
    def spoil(model: Path) -> None:
        (model / name).rename((model / name).with_suffix(".bin"))

    return spoil


def models() -> list[BadInput]:
    theme, path, weights = "Models", f"{A}model.path=", "transformer/diffusion_pytorch_model.safetensors"
    spoiled = [
        ("model_index.json is missing", remove("model_index.json"), ("model_index.json",)),
        ("model_index.json is empty", write("model_index.json", ""), ("model_index.json",)),
        ("model_index.json is no JSON", write("model_index.json", "{oops"), ("model_index.json",)),
        ("model_index.json is nested 100,000 levels deep", write("model_index.json", DEEP), ("model_index.json",)),
        ("model_index.json is a list", write("model_index.json", "[1]"), ("model_index.json",)),
        ("model_index.json has no class", write("model_index.json", "{}"), ("model_index.json",)),
        ("a class that does not exist", index(_class_name="QwenImagesPipeline"),
         ("QwenImagesPipeline", "QwenImagePipeline")),
        ("a number for the class", index(_class_name=7), ("model_index.json",)),
        ("a component without a class", index(vae=[None, None]), ("vae",)),
        ("a component that is a text", index(vae="AutoencoderKLQwenImage"), ("vae",)),
        ("a component of a class that does not exist", index(vae=["diffusers", "AutoencoderX"]), ("AutoencoderX",)),
        ("a component from another library", index(vae=["os.path", "join"]), ("vae", "os.path")),
        ("a program in a component's folder", write("vae/helper.py", "print(1)"), ("vae/helper.py",)),
        ("a config that names code", component("text_encoder", auto_map={"AutoModel": "m.M"}), ("auto_map",)),
        ("a config that names a kernel to download", component("text_encoder", attn_implementation="a/kernel"),
         ("attn_implementation", "a/kernel")),
        ("weights that are a pickle", as_pickle(weights), ("transformer", ".bin")),
        ("the tokenizer's folder is missing", remove("tokenizer"), ("tokenizer",)),
        ("the tokenizer is no JSON", write("tokenizer/tokenizer.json", "{oops"), ("tokenizer",)),
        ("the transformer's folder is missing", remove("transformer"), ("transformer",)),
        ("the transformer's config is missing", remove("transformer/config.json"), ("transformer/config.json",)),
        ("the transformer's config is no JSON", write("transformer/config.json", "{"), ("transformer/config.json",)),
        ("the transformer's config names another class", component("transformer", _class_name="AutoencoderKL"),
         ("transformer", "AutoencoderKL")),
        ("the transformer's weights are missing", remove(weights), ("transformer",)),
        ("the transformer's weights are cut off", halve(weights), ("transformer",)),
        ("the transformer's weights are empty", write(weights, b""), ("transformer",)),
        ("the VAE's folder is missing", remove("vae"), ("vae",)),
        ("the VAE's config is no JSON", write("vae/config.json", "no JSON"), ("vae/config.json",)),
        ("the VAE's weights are missing", remove("vae/diffusion_pytorch_model.safetensors"), ("vae",)),
        ("the text encoder's folder is missing", remove("text_encoder"), ("text_encoder",)),
        ("the text encoder's config is no JSON", write("text_encoder/config.json", "{"), ("text_encoder",)),
        ("the text encoder's weights are cut off", halve("text_encoder/model.safetensors"), ("text_encoder",)),
        ("the scheduler's folder is missing", remove("scheduler"), ("scheduler",)),
        ("the scheduler's config is no JSON", write("scheduler/scheduler_config.json", "{"), ("scheduler",)),
    ]  # fmt: skip
    cases = [
        BadInput(theme, "no model", (path + "null",), ("model.path",)),
        BadInput(theme, "a folder that is not there", (path + "/no/model",), ("/no/model",)),
        BadInput(theme, "a name that is on no hub", (path + "nobody-at-all/no-model",),
                 ("nobody-at-all/no-model", "no folder here")),
        BadInput(theme, "a revision of a folder", (f"{A}model.revision=v1",), ("revision=v1", "no effect")),
        BadInput(theme, "a file", (path + "{f}/file",), ("file",), files={"file": "x"}),
        BadInput(theme, "a language model", (path + "{f}/llm",), ("llm", "model_index.json"),
                 files={"llm/config.json": '{"architectures": ["LlamaForCausalLM"]}'}),
        BadInput(theme, "an architecture that is not its own", (f"{A}model.architecture=WanPipelin",),
                 ("WanPipelin", "WanPipeline")),
        BadInput(theme, "a tokenizer that is not there", (f"{A}model.tokenizer_path=/no/tokenizer",),
                 ("/no/tokenizer",)),
        BadInput(theme, "a transformer folder that is not there", (f"{A}model.transformer_subfolder=unet",), ("unet",)),
    ]  # fmt: skip
    cases += [BadInput(theme, name, (), says, model=spoil) for name, spoil, says in spoiled]
    unfit = component("transformer", num_layers=7)
    return [*cases, BadInput(theme, "the transformer's config does not fit its weights", (), ("transformer",),
                             model=unfit, early=False)]  # fmt: skip


def pairs() -> list[BadInput]:
    theme = "Cached pairs"
    offline = (f"{A}model.algorithm=dpo", "algorithm.sample_source=offline", TRAIN + "{f}/pairs", VAL + "null")
    made = {"format": 1, "architecture": "QwenImagePipeline", "model": "0", "path": "/elsewhere", "height": 32,
            "width": 32, "scores": False}  # fmt: skip
    empty = b"\2\0\0\0\0\0\0\0{}"  # a safetensors file without tensors
    shard = {"file": "0.safetensors", "bytes": len(empty), "pairs": 1}

    def manifest(content: dict) -> dict[str, str]:
        return {"pairs/manifest.json": json.dumps(content)}

    return [
        BadInput(theme, "a folder without manifest.json", offline, ("pairs", "manifest.json"), files={"pairs/x": ""}),
        BadInput(theme, "manifest.json is no JSON", offline, ("manifest.json",), files={"pairs/manifest.json": "{"}),
        BadInput(theme, "manifest.json is nested 100,000 levels deep", offline, ("manifest.json",),
                 files={"pairs/manifest.json": DEEP}),
        BadInput(theme, "a format of the future", offline, ("format 9",), files=manifest({"format": 9})),
        BadInput(theme, "manifest.json without its keys", offline, ("manifest.json",), files=manifest({"format": 1})),
        BadInput(theme, "a shard that is missing", offline, ("0.safetensors",),
                 files=manifest(made | {"shards": [shard]})),
        BadInput(theme, "pairs of another model", offline, ("another model",),
                 files=manifest(made | {"shards": [shard]}) | {"pairs/0.safetensors": empty}),
    ]  # fmt: skip


CASES = [*prompts(), *rewards(), *models(), *pairs()]
