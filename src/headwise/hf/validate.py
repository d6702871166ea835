"""Checks that refuse an unsupported model when it is built with or switched to headwise, not in its forward pass.

transformers calls `PreTrainedModel.get_correct_attn_implementation` to check the attention implementation when a model
is built or switched, and `post_init` at the end of the constructor. Every registered name passes that check, and
transformers has no hook to add another one. So these two methods are wrapped; for other names they behave as before.
The error for `output_attentions` in a config, which transformers allows only for "eager", is replaced too.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from functools import cache, wraps
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .errors import ModelError
from .models.own_attention import family_of, has_own_attention, is_switched
from .models.support import NAME, outside_text, require_interface, source_of, title, unseen_modules
from .own_code.switch import switch

_switching: ContextVar[bool] = ContextVar("headwise_switching", default=False)
_BACK = {"eager", "sdpa"}
"""The implementation names for which a model's own attention code runs unchanged."""
_OURS = "_checks_for_headwise"
"""The attribute that marks a method of transformers as already wrapped."""


def check_what_is_built() -> None:
    """Patch transformers to check every model that is built with or switched to "headwise"; safe to call twice."""
    theirs, finished = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.post_init
    if hasattr(theirs, _OURS):
        return
    check_what_is_switched()

    @wraps(theirs)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        if requested_attention == NAME:
            require_interface(type(self), self.config.model_type)
            if is_init_check:
                require_no_table(type(self), self.config.model_type)
        return theirs(self, requested_attention, is_init_check)

    @wraps(finished)
    def post_init(self: PreTrainedModel) -> None:
        if self.config._attn_implementation == NAME:
            switch(self, NAME)
            warn_of_own_attention(self)
        finished(self)

    setattr(get_correct_attn_implementation, _OURS, True)
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.post_init = post_init
    _explain_output_attentions()


def _explain_output_attentions() -> None:
    """Replace the error for `output_attentions=True` in a config with "headwise" by one that names the alternatives.

    transformers allows the setting only for "eager". The error comes from the setter and from a validator that each
    config class lists and that runs when a config is created, loaded or saved.
    """
    theirs, check = PreTrainedConfig.output_attentions, PreTrainedConfig.validate_output_attentions
    PreTrainedConfig.output_attentions = property(theirs.fget, _explained(theirs.fset), doc=theirs.__doc__)
    PreTrainedConfig.validate_output_attentions = explained = _explained(check)
    todo = PreTrainedConfig.__subclasses__()
    while todo:  # Existing classes list the old validator; classes defined later inherit the new one.
        cls = todo.pop()
        todo += cls.__subclasses__()
        listed = getattr(cls, "__class_validators__", [])
        listed[:] = [explained if validator is check else validator for validator in listed]


def _explained(theirs: Callable[..., None]) -> Callable[..., None]:
    @wraps(theirs)
    def explained(self: PreTrainedConfig, *args: Any) -> None:
        try:
            theirs(self, *args)
        except ValueError:
            if self._attn_implementation != NAME:
                raise
            raise ValueError(
                'transformers keeps output_attentions=True in a config for attn_implementation="eager", and this one '
                f'has "{NAME}"; leave it out, and ask in the call, where headwise gives them: '
                "model(..., output_attentions=True); or use headwise.look.at, which needs no T x S matrix"
            ) from None

    return explained


def check_what_is_switched() -> None:
    """Patch transformers so that the models of `architectures.OWN_ATTENTION` can be switched to "headwise" and back.

    transformers refuses to switch a model with its own attention code. It still does so between its own names.
    """
    theirs, can_set = PreTrainedModel.set_attn_implementation, PreTrainedModel._can_set_attn_implementation.__func__

    @wraps(theirs)
    def set_attn_implementation(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        names = set(_leaves(attn_implementation))
        before = _switching.get()
        _switching.set(NAME in names or (bool(names & _BACK) and is_switched(self.config)))
        if _switching.get() and isinstance(attn_implementation, str):
            for part in _configs_without_a_model(self):  # Otherwise transformers warns about these unused configs.
                part._attn_implementation_internal = attn_implementation
        try:
            theirs(self, attn_implementation, *args, **kwargs)
        finally:
            _switching.set(before)
        switch(self, NAME)

    @wraps(can_set)
    def _can_set_attn_implementation(cls: type[PreTrainedModel]) -> bool:
        return bool(can_set(cls)) or (_switching.get() and family_of(cls) is not None)

    PreTrainedModel.set_attn_implementation = set_attn_implementation
    PreTrainedModel._can_set_attn_implementation = classmethod(_can_set_attn_implementation)


def _configs_without_a_model(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the sub-configs of a model in `OWN_ATTENTION` that belong to no submodel, such as that of the attention."""
    if family_of(type(model)) is not None:
        owned = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
        within = (getattr(model.config, key, None) for key in model.config.sub_configs)
        yield from (config for config in within if config is not None and id(config) not in owned)


def _leaves(names: Any) -> Iterator[Any]:
    """Yield the implementation names in a name or in a nested dict of names by submodel."""
    for name in names.values() if isinstance(names, Mapping) else [names]:
        yield from _leaves(name) if isinstance(name, Mapping) else [name]


def warn_of_own_attention(model: PreTrainedModel) -> None:
    """Warn if some attention modules of a model do not use the interface (such as a pooling head)."""
    whole = [name for name, part in model.named_modules() if name and isinstance(part, PreTrainedModel)]
    own = {
        type(part).__name__
        for name, part in unseen_modules(model).items()
        if not any(name.startswith(f"{other}.") for other in whole)  # A submodel gives its own warning.
    }
    if own:
        warnings.warn(
            f"{title(model)}: attention in code of its own, which no implementation reaches, is in "
            f"{', '.join(sorted(own))}; all its other attention runs on headwise",
            stacklevel=3,
        )


def require_no_table(model: type[PreTrainedModel], model_type: str) -> None:
    """Raise ModelError if a part of the model selects its attention class from a table by implementation name.

    Such a table has no class for "headwise", so building the model would raise KeyError. If headwise can run the class
    for "eager", that class is added to the table for "headwise" instead.
    """
    for part in module_classes(model):
        table = _table(part)
        if table is None or NAME in table:
            continue
        if has_own_attention(table.get("eager", nn.Module)) and isinstance(table, MutableMapping):
            table[NAME] = table["eager"]
            continue
        reason = f"{part.__name__} picks its attention from a table of its own, of {', '.join(map(repr, table))}"
        raise ModelError(outside_text(model.__name__, model_type, reason))


def module_classes(model: type[nn.Module]) -> set[type[nn.Module]]:
    """Return a module class and the module classes that it builds, found by their names in the source.

    Submodels (a PreTrainedModel) are left out, because each is checked when it is built.
    """
    classes: set[type[nn.Module]] = set()
    todo = [model]
    while todo:
        part = todo.pop()
        if part in classes:
            continue
        classes.add(part)
        for file, x in _constructor(part):
            named = getattr(file, x.id, None) if isinstance(x, ast.Name) else None
            values: Iterable[Any] = named.values() if isinstance(named, Mapping) else (named,)
            todo += [x for x in values if _is_part(x)]
    return classes


def _is_part(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, nn.Module) and not issubclass(x, PreTrainedModel)


def _table(part: type[nn.Module]) -> Mapping[str, Any] | None:
    """Return the table from which a part selects its attention class by implementation; None if it has no table."""
    for file, x in _constructor(part):
        if isinstance(x, ast.Subscript) and ast.unparse(x.slice).endswith("attn_implementation"):
            table = getattr(file, ast.unparse(x.value), None)
            if isinstance(table, Mapping):
                return table
    return None


def _constructor(part: type[nn.Module]) -> Iterator[tuple[ModuleType, ast.AST]]:
    """Yield the nodes of the constructors of a class and of its bases up to PreTrainedModel, each with its module."""
    for base in part.__mro__:
        file = sys.modules.get(base.__module__)
        if file is None or base in PreTrainedModel.__mro__:
            continue
        for node in getattr(_classes(file).get(base.__name__), "body", ()):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                yield from ((file, x) for x in ast.walk(node))


@cache
def _classes(file: ModuleType) -> dict[str, ast.ClassDef]:
    """Return the class definitions of a Python module by name; empty for torch and for modules without source text."""
    source = "" if file.__name__.partition(".")[0] == "torch" else source_of(file)
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
