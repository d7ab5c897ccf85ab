"""Names: globals, class and module namespaces, cells, imports."""
from __future__ import annotations

import sys
from types import CellType, ModuleType
from typing import Any

from ..lazy_imports import LAZY, import_from_lazy, import_name_lazily, is_lazy, resolve_binding
from ..private_builtins import ORIGINAL as builtins
from ..sentinels import UNSET
from .core import Core, is_a, type_name

SAYS_UNFINISHED = sys.version_info >= (3, 14)  # of a module without a file as well
DICT_SET, DICT_DEL = dict.__setitem__, dict.__delitem__  # globals may be of a subclass, whose own methods do not count


class Names(Core):
    """Everything that resolves a name."""

    def load_global(self, frame: Any, name: str) -> Any:
        if type(frame.globals) is dict:
            value = frame.globals.get(name, UNSET)
        else:
            value = self.look_up(frame.globals, name)
        if value is UNSET:
            value = self.look_up(frame.builtins, name)
            if value is UNSET:
                raise NameError(f"name '{name}' is not defined", name=name)
        return value if type(value) is not LAZY else self.native(resolve_binding, frame.globals, name, value)

    def look_up(self, mapping: Any, name: str) -> Any:
        """mapping[name], or UNSET where that raises KeyError."""
        if type(mapping) is dict:
            return mapping.get(name, UNSET)
        try:
            return self.get_item(mapping, name)
        except KeyError as error:
            self.machine.swallow(error)
        return UNSET

    def store_global(self, frame: Any, name: str, value: Any) -> None:
        DICT_SET(frame.globals, name, value)

    def delete_global(self, frame: Any, name: str) -> None:
        try:
            DICT_DEL(frame.globals, name)
            return
        except KeyError:
            pass
        raise NameError(f"name '{name}' is not defined", name=name)

    def load_name(self, frame: Any, name: str) -> Any:
        if frame.names is None:
            raise SystemError(f"no locals when loading '{name}'")
        return self.load_from_mapping(frame, frame.names, name)

    def load_from_mapping(self, frame: Any, mapping: Any, name: str) -> Any:
        value = self.look_up(mapping, name)
        if type(value) is LAZY:
            return self.native(resolve_binding, mapping, name, value)
        return self.load_global(frame, name) if value is UNSET else value

    def store_name(self, frame: Any, name: str, value: Any) -> None:
        if type(frame.names) is dict:
            frame.names[name] = value
        else:
            self.set_item(frame.names, name, value)

    def delete_name(self, frame: Any, name: str) -> None:
        try:
            self.del_item(frame.names, name)
            return
        except KeyError as error:
            self.machine.swallow(error)
        raise NameError(f"name '{name}' is not defined", name=name)

    def load_locals(self, frame: Any) -> Any:
        return frame.names

    def make_cell(self, value: Any) -> CellType:
        return CellType() if value is UNSET else CellType(value)

    def make_cell_unset(self) -> CellType:
        return CellType()

    def load_cell(self, cell: CellType) -> Any:
        """The cell's value, or UNSET."""
        try:
            return cell.cell_contents
        except ValueError:
            return UNSET

    def store_cell(self, cell: CellType, value: Any) -> None:
        cell.cell_contents = value

    def delete_cell(self, cell: CellType) -> None:
        del cell.cell_contents

    def unbound(self, frame: Any, index: int) -> None:
        """Raise what reading the unset local, cell or free variable raises."""
        name = frame.program.localsplus[index]
        if index >= len(frame.program.localsplus) - len(frame.code.co_freevars):
            raise NameError(
                f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope",
                name=name,
            )
        raise UnboundLocalError(f"cannot access local variable '{name}' where it is not associated with a value")

    def import_name(self, frame: Any, name: str, fromlist: Any, level: int) -> Any:
        function = self.look_up(frame.builtins, "__import__")
        if function is UNSET:
            raise ImportError("__import__ not found")
        names = frame.names if frame.names is not None else None
        if function is builtins.__import__:
            return self.import_module(name, frame.globals, names, fromlist, level)
        return self.call(function, [name, frame.globals, names, fromlist, level], {})

    def import_lazily(self, frame: Any, name: str, fromlist: Any, level: int, asked: bool) -> Any:
        """The same of a statement that may be lazy; `asked`: it says so. Where it is, a placeholder."""
        if not self.native(is_lazy, frame.globals, name, level, asked):
            return self.import_name(frame, name, fromlist, level)
        return self.native(import_name_lazily, name, frame.globals, frame.names, fromlist, level)

    def import_module(self, name: str, globals_: Any, locals_: Any, fromlist: Any, level: int) -> Any:
        """builtins.__import__: natively where every module is there already, else importlib's Python, interpreted."""
        if level == 0 and type(name) is str:
            module = sys.modules.get(name)
            if type(module) is ModuleType and not still_importing(module):
                if not fromlist or all(type(item) is str and item in module.__dict__ for item in fromlist):
                    return self.native(builtins.__import__, name, globals_, locals_, fromlist, level)
        return self.machine.import_interpreted(name, globals_, locals_, fromlist, level)

    def import_from(self, module: Any, name: str) -> Any:
        """`from module import name`: the attribute, or the submodule in sys.modules, or ImportError."""
        if (found := self.get_attr_or(module, name, UNSET)) is not UNSET:
            return found
        package = self.get_attr_or(module, "__name__", None)
        if is_a(package, str):
            found = sys.modules.get(f"{package}.{name}", UNSET)
            if found is not UNSET:
                return found
        else:
            package = None
        shown = "<unknown module name>" if package is None else package
        path = module.__dict__.get("__file__") if is_a(module, ModuleType) else None  # PyModule_GetFilenameObject
        known = is_a(path, str)
        if (known or SAYS_UNFINISHED) and still_importing(module):
            where = f"partially initialized module {shown!r} (most likely due to a circular import)"
        else:
            where = repr(shown)
        message = f"cannot import name {name!r} from {where} ({path if known else 'unknown location'})"
        wrong = ImportError(message, name=package, path=path if known else None)
        if sys.version_info >= (3, 12):
            wrong.name_from = name
        raise wrong

    def import_from_lazy(self, frame: Any, module: Any, name: str) -> Any:
        """The same where `module` may be a lazy import's placeholder."""
        if type(module) is LAZY:
            return self.native(import_from_lazy, module, name, frame.globals)
        return self.import_from(module, name)

    def import_star(self, frame: Any, module: Any) -> None:
        public = self.get_attr_or(module, "__all__", None)
        skip_underscore = public is None
        if public is None:
            if not hasattr(module, "__dict__"):
                raise ImportError("from-import-* object has no __dict__ and no __all__")
            public = list(module.__dict__)
        for name in public:
            if not is_a(name, str):
                shown = self.get_attr_or(module, "__name__", "?")
                where = f"Key in {shown}.__dict__" if skip_underscore else f"Item in {shown}.__all__"
                raise TypeError(f"{where} must be str, not {type_name(type(name))}")
            if skip_underscore and name.startswith("_"):
                continue
            self.store_name(frame, name, self.get_attr(module, name))


def still_importing(module: Any) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
