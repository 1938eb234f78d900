"""Which submodules of a module are its regions: what repeats, cut where hooks stand inside."""

from collections.abc import Iterator

import torch

from dit_graph.state.blockers import hook_on

Part = tuple[str, torch.nn.Module]


def regions_of(module: torch.nn.Module) -> list[Part]:
    """The regions of a module with their paths: the elements of its outermost lists of blocks,
    each whole, or where hooks stand inside one its largest submodules without any."""
    blocks = _blocks(module, "", {id(module)})
    return [part for path, block in blocks for part in _without_hooks(path, block)]


def cache_on(module: torch.nn.Module) -> str:
    """That a step cache of diffusers is on, which keeps what it saw at every call; else empty."""
    for path, child in module.named_modules():
        registry = child.__dict__.get("_diffusers_hook")
        for hook in getattr(registry, "hooks", {}).values():
            if getattr(hook, "_is_stateful", False):
                return f"a step cache: {type(hook).__name__} on {path or 'the module itself'}"
    return ""


def _blocks(module: torch.nn.Module, path: str, seen: set[int]) -> Iterator[Part]:
    """Elements of lists whose elements are of one class and have parameters in submodules.

    Nothing is looked for inside an element: a block's experts are none. A list of one repeats
    nothing, where something inside of it does.
    """
    for name, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        at = f"{path}{name}"
        inside = [(f"{at}.{name}", element) for name, element in child.named_children()]
        listed = isinstance(child, torch.nn.ModuleList) and _are_blocks(inside)
        inner = [] if listed and len(inside) > 1 else list(_blocks(child, f"{at}.", seen))
        if listed and not inner:
            yield from inside
        yield from inner


def _are_blocks(elements: list[Part]) -> bool:
    one_class = len({type(element) for _, element in elements}) == 1
    return one_class and all(_is_worth_it(element) for _, element in elements)


def _is_worth_it(module: torch.nn.Module) -> bool:
    """Whether it is called, and has parameters in submodules: not a single layer."""
    called = type(module).forward is not torch.nn.Module.forward
    return called and any(True for child in module.children() for _ in child.parameters())


def _without_hooks(path: str, module: torch.nn.Module) -> Iterator[Part]:
    inside = (child for child in module.modules() if child is not module)
    if _is_worth_it(module) and not any(map(hook_on, inside)):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _without_hooks(f"{path}.{name}", child)
