"""A model that cannot run on headwise is refused when it is built with the name, not at its first text.

transformers asks `PreTrainedModel.get_correct_attn_implementation` whether a model may have an implementation, when the
model is built and when it is switched, and calls `post_init` once it is built. For a registered name the answer is
always yes, and there is no place to register another. So these two methods are wrapped; for other names they do what
they did. So is what transformers says of `output_attentions` in a config, which it keeps for "eager".
"""

from __future__ import annotations

import ast
import inspect
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
from .models.own_attention import family_of, is_seam, is_switched
from .models.support import NAME, outside_text, require_interface, title, unseen_modules
from .own_code.switch import switch

_switching: ContextVar[bool] = ContextVar("headwise_switching", default=False)
_BACK = {"eager", "sdpa"}
"""The names under which code of a model's own runs as it is."""
_OURS = "_checks_for_headwise"
"""The mark of our function in the place of transformers'."""


def check_what_is_built() -> None:
    """From here on, a model that is built with this name, or switched to it, is checked first."""
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
    """transformers refuses the setting in a config for all but "eager"; for ours, the error says the way that there is.

    The setter does so, and a check of the whole config (when it is made, loaded or saved) that each class lists.
    """
    theirs, check = PreTrainedConfig.output_attentions, PreTrainedConfig.validate_output_attentions
    PreTrainedConfig.output_attentions = property(theirs.fget, _explained(theirs.fset), doc=theirs.__doc__)
    PreTrainedConfig.validate_output_attentions = explained = _explained(check)
    todo = PreTrainedConfig.__subclasses__()
    while todo:  # the classes made before: later ones list what they inherit
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
    """From here on, a model with attention in code of its own may be switched to ours and back, where a seam is known.

    transformers refuses to switch such a model, and so it still does between its own names.
    """
    theirs, can_set = PreTrainedModel.set_attn_implementation, PreTrainedModel._can_set_attn_implementation.__func__

    @wraps(theirs)
    def set_attn_implementation(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        names = {attn_implementation} if isinstance(attn_implementation, str) else set(_leaves(attn_implementation))
        before = _switching.get()
        _switching.set(NAME in names or (bool(names & _BACK) and is_switched(self.config)))
        if _switching.get() and isinstance(attn_implementation, str):
            for part in _configs_without_a_model(self):  # or transformers warns that it sets what nothing reads
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
    """Of models in the table, the configs within a config that are of no model: of attention itself, say."""
    if family_of(type(model)) is not None:
        owned = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
        within = (getattr(model.config, key, None) for key in model.config.sub_configs)
        yield from (config for config in within if config is not None and id(config) not in owned)


def _leaves(names: Any) -> Iterator[Any]:
    """The names in what transformers takes as a dict of sub-models."""
    for name in names.values() if isinstance(names, Mapping) else [names]:
        yield from _leaves(name) if isinstance(name, Mapping) else [name]


def warn_of_own_attention(model: PreTrainedModel) -> None:
    """UserWarning where some attention of a model on the interface is in code of its own (a pooling head, say)."""
    whole = [name for name, part in model.named_modules() if name and isinstance(part, PreTrainedModel)]
    own = {
        type(part).__name__
        for name, part in unseen_modules(model).items()
        if not any(name.startswith(f"{other}.") for other in whole)  # a model inside warns of its own
    }
    if own:
        warnings.warn(
            f"{title(model)}: attention in code of its own, which no implementation reaches, is in "
            f"{', '.join(sorted(own))}; all its other attention runs on headwise",
            stacklevel=3,
        )


def require_no_table(model: type[PreTrainedModel], model_type: str) -> None:
    """Raise ModelError where a part of the model picks its class of attention by the implementation's name.

    Such a model has no class for ours, and would die of a KeyError while it is built. Where the class for "eager" is
    one that headwise runs, it is entered for ours.
    """
    for part in module_classes(model):
        table = _table(part)
        if table is None or NAME in table:
            continue
        if is_seam(table.get("eager", nn.Module)) and isinstance(table, MutableMapping):
            table[NAME] = table["eager"]
            continue
        reason = f"{part.__name__} picks its attention from a table of its own, of {', '.join(map(repr, table))}"
        raise ModelError(outside_text(model.__name__, model_type, reason))


def module_classes(model: type[nn.Module]) -> set[type[nn.Module]]:
    """The classes of modules that a class builds, itself among them, as the source of its file names them.

    Whole models inside of it (a PreTrainedModel) are left out: each is checked when it is built.
    """
    classes: set[type[nn.Module]] = set()
    todo = [model]
    while todo:
        part = todo.pop()
        classes.add(part)
        for file, written in _written(part):
            names = {x.id for init in _constructors(written) for x in ast.walk(init) if isinstance(x, ast.Name)}
            for named in (getattr(file, name, None) for name in names):
                values: Iterable[Any] = named.values() if isinstance(named, Mapping) else (named,)
                todo += [x for x in values if _is_part(x) and x not in classes]
    return classes


def _is_part(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, nn.Module) and not issubclass(x, PreTrainedModel)


def _table(part: type[nn.Module]) -> Mapping[str, Any] | None:
    """The table of classes by implementation from which a part takes its attention; None where it has none."""
    for file, written in _written(part):
        for init in _constructors(written):
            for x in ast.walk(init):
                picks = isinstance(x, ast.Subscript) and ast.unparse(x.slice).endswith("attn_implementation")
                table = getattr(file, ast.unparse(x.value), None) if picks else None  # type: ignore[attr-defined]
                if isinstance(table, Mapping):
                    return table
    return None


def _written(part: type[nn.Module]) -> Iterator[tuple[ModuleType, ast.ClassDef]]:
    """The source of a class and of those it inherits from, as far as transformers' base class; each with its file."""
    for base in part.__mro__:
        file = sys.modules.get(base.__module__)
        if file is not None and base not in PreTrainedModel.__mro__:
            written = _classes(file).get(base.__name__)
            if written is not None:
                yield file, written


@cache
def _classes(file: ModuleType) -> dict[str, ast.ClassDef]:
    """The classes of a file by name; none where there is no text to read, as of what was typed in."""
    if file.__name__.partition(".")[0] == "torch":
        return {}
    try:
        tree = ast.parse(inspect.getsource(file))
    except (OSError, TypeError, SyntaxError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _constructors(written: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in written.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
