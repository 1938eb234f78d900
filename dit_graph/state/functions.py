"""What a function reads beside its arguments: its cells, defaults and globals.

Torch's own functions, and those of the standard library, are what they are. Of another library's
the cells are read, since hooks are closures; of all other functions the globals are too, and the
attributes of the user's own Python modules.
"""

import dis
import functools
import sys
import sysconfig
import types
from contextvars import ContextVar
from typing import Any, NamedTuple

from dit_graph.state.libraries import FIXED, LIBRARIES
from dit_graph.state.places import Attributes

_INSTALLED = ("site-packages", "dist-packages", "<frozen", sysconfig.get_path("stdlib"))
_READS_ANYTHING = frozenset({"globals", "eval", "exec"})
UNSET = object()


def is_fixed(function: types.FunctionType) -> bool:
    """Whether nothing that it reads changes: torch's, the standard library's, our own."""
    return _root(function.__globals__) in FIXED


def _is_users(function: types.FunctionType) -> bool:
    installed = any(part in function.__code__.co_filename for part in _INSTALLED)
    return not installed and _root(function.__globals__) not in LIBRARIES


def _root(space: dict[str, Any]) -> str:
    return str(space.get("__name__")).partition(".")[0]


class _Names(NamedTuple):
    """What the code of a function names, that of functions inside of it too."""

    globals: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]  # that it imports itself


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> _Names:
    found: tuple[set[str], ...] = (set(), set(), set())
    for instruction in dis.get_instructions(code):
        for names, endings in zip(found, (("_GLOBAL", "_NAME"), ("_ATTR", "_METHOD", "_FROM"), ())):
            if instruction.opname.endswith(endings):
                names.add(instruction.argval)
        if instruction.opname == "IMPORT_NAME":
            found[2].add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for names, more in zip(found, _names(inner)):
                names |= more
    return _Names(*map(frozenset, found))


class FunctionReads(Attributes):
    """All that one function reads, as a dict by name; a global that is not there has no entry."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        self._names = _names(function.__code__)
        self._users = _is_users(function)
        names = self._names.globals if self._users else frozenset[str]()
        self.unseen = _READS_ANYTHING & names - function.__globals__.keys()
        self._globals = sorted(names)

    def read(self) -> dict[str, Any]:
        function = self._function
        found = {
            "__code__": function.__code__, "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
        }  # fmt: skip
        for name, cell in self._cells.items():
            try:
                found[name] = cell.cell_contents
            except ValueError:  # a cell that is not set yet
                continue
        space = function.__globals__
        for name in self._globals:
            if (value := space.get(name, UNSET)) is UNSET:
                continue
            found[f"global {name}"] = value
            self._add_module(f"global {name}", value, found)
        for name in self._names.modules if self._users else ():
            self._add_module(f"global {name}", sys.modules.get(name), found)
        return found

    def _add_module(self, path: str, module: Any, found: dict[str, Any]) -> None:
        """What the function reads of a Python module of the user's: `settings.SCALE`."""
        if type(module) is not types.ModuleType or _root(vars(module)) in LIBRARIES:
            return
        if any(part in (getattr(module, "__file__", None) or "") for part in _INSTALLED):
            return
        for name in sorted(self._names.attributes & vars(module).keys()):
            if f"{path}.{name}" not in found:
                found[f"{path}.{name}"] = value = vars(module)[name]
                self._add_module(f"{path}.{name}", value, found)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        elif name.startswith("global "):
            space, attribute = self._space(name)
            space[attribute] = value
        else:
            setattr(self._function, name, value)

    def __delitem__(self, name: str) -> None:
        if name in self._cells:
            del self._cells[name].cell_contents
        else:
            space, attribute = self._space(name)
            del space[attribute]

    def _space(self, name: str) -> tuple[dict[str, Any], str]:
        """The namespace that a global lies in, and its name there."""
        path, _, attribute = name.removeprefix("global ").rpartition(".")
        if not path:
            return self._function.__globals__, attribute
        module = self.read().get(f"global {path}") or sys.modules[path]
        return vars(module), attribute


class ContextValue(Attributes):
    """The value of a context variable in this thread or task, under the name `value`."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable

    def read(self) -> dict[str, Any]:
        value = self._variable.get(UNSET)
        return {} if value is UNSET else {"value": value}

    def __setitem__(self, name: str, value: Any) -> None:
        self._variable.set(value)

    def __delitem__(self, name: str) -> None:
        """A variable that was set cannot be unset again without its token."""


class LocalValues(Attributes):
    """The attributes of a `threading.local` in this thread."""

    def __init__(self, local: Any) -> None:
        self._local = local

    def read(self) -> dict[str, Any]:
        return dict(vars(self._local))

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._local, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._local, name)
