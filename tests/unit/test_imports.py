"""What `import dit_graph` imports, in processes of their own: diffusers takes seconds."""

import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.hooks import HookRegistry

from dit_graph.state import libraries
from tests.toys import watched

ROOT = Path(__file__).parents[2]
LOADED = "sorted({'diffusers', 'transformers', 'accelerate', 'peft'} & sys.modules.keys())"
A_MODULE = f"""
import sys, torch, dit_graph
print({LOADED})
module = torch.nn.Linear(4, 4).requires_grad_(False)
handle = dit_graph.enable(module, device="recorder")
module(torch.ones(2, 4))
before = set(sys.modules)
module(torch.ones(2, 4))
print(sorted(set(sys.modules) - before))  # by a capture
module(torch.ones(2, 4))
handle.warmup(inputs=[(torch.ones(3, 4),)])
print(handle.stats(), bool(handle.report()), bool(str(handle.explain())))
print({LOADED})
"""
A_PIPELINE_LATER = """
import torch, dit_graph
torch.set_grad_enabled(False)
module = torch.nn.Linear(4, 4)
graphed = dit_graph.enable(module, device="recorder")
module(torch.ones(2, 4))
try:
    dit_graph.enable("pipe", device="recorder")
except dit_graph.ConfigError as error:
    print(error)
from tests.recorder.test_denoise import HookRegistry, OPTIONS, draw, flux_pipeline
pipe = flux_pipeline()
handle = dit_graph.enable(pipe, **OPTIONS)
draw(pipe)
for _ in range(2):
    module(torch.ones(2, 4))
HookRegistry.check_if_exists_or_initialize(module)
module(torch.ones(2, 4))
print(list(handle.installs), handle.stats()["replays"])
print(graphed.stats()["captures"], graphed.stats()["replays"] > 0)
"""


def printed(program: str) -> list[str]:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_module_of_ones_own_needs_no_diffusers() -> None:
    imported, by_capture, works, at_last = printed(A_MODULE)
    assert imported == "[]" and at_last == "[]"
    assert by_capture == "[]", "an import in a capture would be recorded with it"
    counts = "'calls': 5, 'cold': 2, 'captures': 2, 'replays': 1, 'dropped': 0, 'eager': {}"
    assert works == f"{{{counts}}} True True"


def test_diffusers_may_be_imported_after_dit_graph() -> None:
    error, pipeline, module = printed(A_PIPELINE_LATER)
    assert error == "enable takes a diffusers pipeline or a torch.nn.Module, got str"
    assert pipeline == "['transformer'] 2"
    assert module == "1 True", "an empty hook registry is no change"


@pytest.mark.parametrize(
    ("named", "cls"),
    [
        (libraries.PIPELINE, diffusers.DiffusionPipeline),
        (libraries.MODEL, diffusers.ModelMixin),
        (libraries.HOOKS, HookRegistry),
    ],
)
def test_a_class_is_where_it_is_looked_for(named: libraries.Named, cls: type) -> None:
    assert libraries.imported(named) == (cls,)


def test_a_pipeline_that_a_module_holds_is_not_looked_into() -> None:
    module = torch.nn.Linear(2, 2)
    module.pipe = diffusers.DiffusionPipeline()
    state = watched(module)
    module.pipe.set_progress_bar_config(disable=True)
    assert state.compare() == ""
    module.more = 1
    assert state.compare() == "more"


def test_a_module_that_is_not_imported_has_no_instances() -> None:
    assert libraries.imported(("diffusers.nowhere", "DiffusionPipeline")) == ()
    assert libraries.imported(("diffusers", "NoSuchClass"), libraries.MODEL) == (
        diffusers.ModelMixin,
    )
