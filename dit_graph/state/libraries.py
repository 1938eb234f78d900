"""Classes of diffusers that the core asks about, without importing diffusers.

It takes seconds to import, transformers and torch's compiler with it, and a module of the user's
own needs none of them. An instance of a class exists only where the module that defines the class
has been imported.
"""

import sys
from typing import Any

FIXED = frozenset({"torch", "numpy", "dit_graph"} | sys.stdlib_module_names)
"""Top packages of which nothing is looked into: what they hold is no state of a model."""

LIBRARIES = FIXED | {"accelerate", "diffusers", "peft", "safetensors", "transformers"}
"""These are libraries too where a checkout of them lies beside the user's own code."""

Named = tuple[str, str]  # the module that defines a class, and the class

PIPELINE: Named = ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline")
MODEL: Named = ("diffusers.models.modeling_utils", "ModelMixin")
HOOKS: Named = ("diffusers.hooks.hooks", "HookRegistry")


def imported(*wanted: Named) -> tuple[type[Any], ...]:
    """Those of the classes that are there by now, for `isinstance` and `issubclass`.

    Asked anew each time: the user may import diffusers later.
    """
    found = (getattr(sys.modules.get(module), name, None) for module, name in wanted)
    return tuple(cls for cls in found if cls is not None)


def is_pipeline(value: Any) -> bool:
    """Whether it is a diffusers pipeline."""
    return isinstance(value, imported(PIPELINE))
