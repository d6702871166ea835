"""What the code of a transformers attention does once it has queries, keys and values, read as syntax.

Nearly all classes end alike: they turn queries and keys, hand keys and values to the cache, call an attention function,
and project what it gives. `with_steps` makes of such a `forward` one that asks in front of these statements whether
they can be done in one call, and runs them where they cannot. All else in it stays as it is.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from hashlib import blake2b
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from transformers.utils import deprecation

STEP, TURN, _TEST = "_headwise_step", "_headwise_turn", "_headwise_test"

# Names in capitals stand for a name each, those of `_EXPRESSIONS` for any expression.
_EXPRESSIONS = frozenset({"TEST", "WHEN", "SIZE", "LAYER", "ANGLES", "OTHER"})
_LOOKED_UP = "ATTEND = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, OTHER)"
_KEPT = "K, V = CACHE.update(K, V, LAYER)", "K, V = CACHE.update(K, V, LAYER, kwargs=kwargs)"  # since 5.24
_CACHED = tuple(f"if WHEN:\n    {kept}" for kept in _KEPT)
_ATTENDED = "OUT, WEIGHTS = ATTEND(self, Q, K, V)"
_ROTATIONS = (
    ("Q, K = ROTATE(Q, K, COS, SIN)",),
    ("if TEST:\n    Q, K = ROTATE(Q, K, COS, SIN)",),
    ("if TEST:\n    COS, SIN = ANGLES\n    Q, K = ROTATE(Q, K, COS, SIN)",),
    (
        "QR, QP = Q[..., :SIZE], Q[..., SIZE:]",
        "KR, KP = K[..., :SIZE], K[..., SIZE:]",
        "QR, KR = ROTATE(QR, KR, COS, SIN)",
        "Q = torch.cat((QR, QP), dim=-1)",
        "K = torch.cat((KR, KP), dim=-1)",
    ),
)
_PLAIN = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp),
    *(ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop),
)
_CHANGED = frozenset({"Q", "K", "V", "QR", "KR", "QP", "KP"})  # not what they were once the core has run
_NOT_SAID = frozenset({"decorator_list", "annotation", "returns", "type_comment", "type_params", "kind", "ctx", "name"})


class Core(NamedTuple):
    """The statements of a `forward` that one call can stand for.

    Attributes:
        first: the number of the first of them, of those at the top of its body.
        cached: that of the statement that hands keys and values to the cache.
        last: that of the attention call, or of the `if` of which it is the other way.
        call: the attention call.
        noted: the numbers of statements in between that write down something plain: they may come first.
        bound: what the capitals of the patterns are in it.
        unless: tests of what else may happen between the two: then there is no step.
        function: the syntax of the `forward`.
    """

    first: int
    cached: int
    last: int
    call: ast.Call
    noted: list[int]
    bound: dict[str, ast.expr]
    unless: list[ast.expr]
    function: ast.FunctionDef

    @property
    def rotate(self) -> str | None:
        """The name of the function that turns; None where nothing turns right before keys go into the cache."""
        name = self.bound.get("ROTATE")
        return name.id if isinstance(name, ast.Name) else None


def fingerprint(function: Callable[..., Any]) -> str:
    """Of what a function does: its syntax without decorators, annotations and its docstring.

    >>> def one(x: int) -> int:
    ...     "Adds."
    ...     return x + 1
    >>> def other(x):
    ...     return (x +
    ...             1)
    >>> fingerprint(one) == fingerprint(other).replace("other", "one")
    True
    """
    tree = syntax_of(function)
    if isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant):
        del tree.body[0]
    return fingerprint_of(tree)


def fingerprint_of(syntax: ast.AST | list[ast.stmt]) -> str:
    """Of syntax as it stands."""
    return blake2b(repr(_plain(syntax)).encode(), digest_size=8).hexdigest()


def without_renaming(forward: Any) -> tuple[Any, frozenset[str]]:
    """A function without transformers' decorators that rename an argument, and the names that they accept still.

    Since 5.24 they stand around each `forward` whose cache was called `past_key_values`.
    """
    renamed = set[str]()
    while getattr(forward, "__globals__", None) is vars(deprecation) and hasattr(forward, "__wrapped__"):
        renamed.add(inspect.getclosurevars(forward).nonlocals["old_name"])
        forward = forward.__wrapped__
    return forward, frozenset(renamed)


def syntax_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """The syntax of a function, at its lines of its file. Raises OSError, TypeError or SyntaxError where there is none.

    A text of other names than the code that runs is refused: it has changed since, or a class has mangled them.
    """
    lines, first = inspect.getsourcelines(function)
    module = ast.parse(textwrap.dedent("".join(lines)))
    tree = ast.increment_lineno(module, max(first - 1, 0)).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise OSError("no function")
    tree.decorator_list = []
    ours, theirs = _inner(compile(module, "<text>", "exec", dont_inherit=True), tree.name), function.__code__
    if any(getattr(ours, name) != getattr(theirs, name) for name in ("co_names", "co_varnames", "co_freevars")):
        raise OSError("the text is not that of the function")
    return tree


def _plain(node: Any) -> Any:
    """Syntax as tuples, alike in all versions of Python; names of functions are left out."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _NOT_SAID)
        return type(node).__name__, [(name, _plain(value)) for name, value in fields if value not in (None, [])]
    return [_plain(part) for part in node] if isinstance(node, list) else node


def _inner(code: CodeType, name: str) -> CodeType:
    """The code of a function that is made in another, or in a module."""
    return next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)


# -- what a forward does ----------------------------------------------------------------------------------------------


def core_of(function: ast.FunctionDef) -> Core | None:
    """The statements that cache and attend, and those before them that turn; None where it does them otherwise."""
    function.body = [part for statement in function.body for part in parted(statement)]
    body = [_assignment(statement) for statement in function.body]
    last = next((at for at in reversed(range(len(body))) if _attended(body[at]) is not None), None)
    if last is None:
        return None
    bound, call, other = _attended(body[last]) or ({}, None, None)
    own, unless = {_id(bound[name]) for name in "QKV"}, [] if other is None else [other]
    at = _before(body, last, bound)
    while at > 0 and not _is_cached(body[at], bound):
        between = body[at]
        if not isinstance(between, ast.If) or between.orelse:
            return None
        unless.append(between.test)
        at = _before(body, at, bound)
    if call is None or at < 0 or not _is_cached(body[at], bound):
        return None
    if not all(_is_plain(test, own) for test in (*unless, bound["WHEN"])):
        return None
    first, ends = at, _before(body, at, bound)
    for patterns in _ROTATIONS:
        start, more = ends - len(patterns) + 1, dict(bound)
        if start >= 0 and all(_matches(text, body[start + n], more) for n, text in enumerate(patterns)):
            first, bound = start, more
            break
    changed = {_id(node) for name, node in bound.items() if name in _CHANGED}
    noted = [n for n in range(first, last) if _is_noted(body[n]) and not _is_looked_up(body[n])]
    if changed & _names(body[last + 1 :]) or not _may_come_first(body, first, last, noted):
        return None
    return Core(first, at, last, call, noted, bound, unless, function)


def unlike(function: ast.FunctionDef) -> str:
    """What a `forward` without a core lacks; "" where it has no cache, or calls no attention function."""
    if not {"update", "get_interface"} <= {x.attr for x in ast.walk(function) if isinstance(x, ast.Attribute)}:
        return ""
    body = [_assignment(part) for statement in function.body for part in parted(statement)]
    if all(_attended(statement) is None for statement in body):
        return f"no statement reads `{_ATTENDED}`"
    if not any(_is_cached(statement, {}) for statement in body):
        return f"no statement reads `{' '.join(_CACHED[-1].split())}`"
    return "between cache and attention, or with its keys after them, it does more than headwise knows"


def _may_come_first(body: list[ast.stmt], first: int, last: int, noted: list[int]) -> bool:
    """Whether what some statements write down is the same in front of the others, and the others do not read it."""
    others = [body[n] for n in range(first, last) if n not in noted]
    written = {name for statement in others for name in _written(statement)}
    read = _names(others) - written
    return not any(_names([body[n]]) & written or _written(body[n]) & read for n in noted)


def parted(statement: ast.stmt) -> list[ast.stmt]:
    """An `if` around what a cache keeps as some of the same test: what goes before, that alone, and what follows."""
    if not isinstance(statement, ast.If) or not _is_plain(statement.test, set()):
        return [statement]
    test, body, parts = statement.test, statement.body, list[ast.stmt]()
    if not _is_plain(test, _written(statement)):  # what the test says is written down before that changes
        if statement.orelse:
            return [statement]
        test = ast.Name(f"{_TEST}_{statement.lineno}", ast.Load())
        parts.append(ast.Assign([ast.Name(test.id, ast.Store())], statement.test))
    if statement.orelse:
        *before, kept = statement.orelse
        rest = [x for x in parted(kept) if isinstance(x, ast.If)]
        if before and any(_is_cached(x, {}) for x in rest):
            parts = [ast.If(test, body, before)]
            parts += [ast.If(ast.BoolOp(ast.And(), [x.test, ast.UnaryOp(ast.Not(), test)]), x.body, []) for x in rest]
    else:
        at = next((n for n, x in enumerate(body) if _is_kept(x) or _is_cached(x, {})), len(body))
        if at == len(body):
            return [statement]
        parts += [ast.If(test, body[:at], [])] if at else []
        for x in body[at:]:
            if isinstance(x, ast.If) and not x.orelse:
                parts.append(ast.If(ast.BoolOp(ast.And(), [test, x.test]), x.body, []))
            else:
                parts.append(ast.If(test, [x], []))
    return [ast.fix_missing_locations(ast.copy_location(part, statement)) for part in parts] or [statement]


def _written(statement: ast.stmt) -> set[str]:
    """The names that a statement gives to something."""
    return {x.id for x in ast.walk(statement) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def _is_kept(statement: ast.stmt) -> bool:
    """Whether it hands keys and values to the cache, whatever goes before."""
    return any(_matches(text, statement, {}) for text in _KEPT)


def _is_cached(statement: ast.stmt, bound: dict[str, ast.expr]) -> bool:
    """Whether it hands keys and values to the cache; `bound` learns then what its capitals are."""
    for text in _CACHED:
        more = dict(bound)
        if _matches(text, statement, more):
            bound.update(more)
            return True
    return False


def _is_plain(test: ast.expr, without: set[str]) -> bool:
    """Whether a test asks for attributes, names and kinds alone, not of these: it may be asked at another moment."""
    nodes = list(ast.walk(test))
    known = (isinstance(x, _PLAIN) or (isinstance(x, ast.Call) and _id(x.func) == "isinstance") for x in nodes)
    return all(known) and not without & {getattr(x, "id", "") for x in nodes}


def _before(body: list[ast.stmt], at: int, bound: dict[str, ast.expr]) -> int:
    """The statement before one, but for those that look up the attention function or write down something plain."""
    at -= 1
    while at > 0 and (_is_looked_up(body[at], bound) or _is_noted(body[at])):
        at -= 1
    return at


def _is_looked_up(statement: ast.stmt, bound: dict[str, ast.expr] | None = None) -> bool:
    return _matches(_LOOKED_UP, statement, dict(bound or {}))


def _is_noted(statement: ast.stmt) -> bool:
    """Whether it writes down, in a new name, what attributes, names and kinds are."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not _id(statement.targets[0]):
        return False
    return _is_plain(statement.value, _written(statement))


def _assignment(statement: ast.stmt) -> ast.stmt:
    """`x: T = y` as `x = y`."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return ast.copy_location(ast.Assign([statement.target], statement.value), statement)
    return statement


def _attended(statement: ast.stmt) -> tuple[dict[str, ast.expr], ast.Call, ast.expr | None] | None:
    """Of `OUT, WEIGHTS = ATTEND(self, Q, K, V, ...)`: what the capitals are, the call, and None.

    Where that is the other way of an `if`, its test is the third.
    """
    if isinstance(statement, ast.If) and len(statement.orelse) == 1:
        other = _attended(_assignment(statement.orelse[0]))
        return None if other is None or other[2] is not None else (*other[:2], statement.test)
    call = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(call, ast.Call) or len(call.args) < 4:
        return None
    short = ast.Assign([statement.targets[0]], ast.Call(call.func, call.args[:4], []))  # type: ignore[attr-defined]
    bound: dict[str, ast.expr] = {}
    return (bound, call, None) if _matches(_ATTENDED, short, bound) else None


def _matches(text: str, statement: ast.stmt, bound: dict[str, ast.expr]) -> bool:
    """Whether a statement reads as a pattern; `bound` learns what its capitals are."""
    return _alike(ast.parse(text).body[0], statement, bound)


def _alike(pattern: Any, node: Any, bound: dict[str, ast.expr]) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.isupper() and "_" not in pattern.id:
        if pattern.id in bound:
            return bool(_plain(bound[pattern.id]) == _plain(node))
        bound[pattern.id] = node
        return isinstance(node, ast.expr if pattern.id in _EXPRESSIONS else ast.Name)
    if isinstance(pattern, ast.AST):
        fields = [name for name in pattern._fields if name not in _NOT_SAID - {"name"}]
        return type(pattern) is type(node) and all(
            _alike(getattr(pattern, name, None), getattr(node, name, None), bound) for name in fields
        )
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(_alike(one, other, bound) for one, other in zip(pattern, node, strict=True))
        )
    return bool(pattern == node)


def _id(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _names(statements: list[ast.stmt]) -> set[str]:
    return {node.id for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)}


# -- the same, and a step ---------------------------------------------------------------------------------------------


def with_steps(forward: FunctionType, core: Core, turns: bool, step: Callable[..., Any]) -> FunctionType:
    """A `forward` that asks ``step(attend, angles, size, cache, layer, self, q, k, v, ...)`` before its core.

    Where that gives None it does what it always did. `turns`: queries and keys come as they are before the rotation;
    else the rotation is done.
    """
    function, bound = core.function, {name: ast.unparse(node) for name, node in core.bound.items()}
    attended, call = function.body[core.last], core.call
    middle, noted = function.body[core.first : core.last], [function.body[n] for n in core.noted]
    looked_up = [x for x in middle if x in noted or _is_looked_up(_assignment(x))]
    theirs = [x for x in middle if x not in looked_up]
    if not turns:
        at = theirs.index(function.body[core.cached])
        before, theirs, turned = theirs[:at], theirs[at:], "None"
    else:
        before, turned = ast.parse(_angles(bound)).body, TURN
        if "ANGLES" in bound:  # they are computed once
            del theirs[0].body[0]  # type: ignore[attr-defined]
    rest = ", ".join(ast.unparse(x) for x in (*call.args, *call.keywords))
    size = bound.get("SIZE", "None") if turns else "None"
    conditions = [f"({bound['WHEN']})", *(f"not ({ast.unparse(test)})" for test in core.unless)]
    cache = f"{bound['CACHE']} if {' and '.join(conditions)} else None"
    question = ast.parse(
        f"{bound['OUT']} = {STEP}({bound['ATTEND']}, {turned}, {size}, {cache}, {bound['LAYER']}, {rest})\n"
        f"if {bound['OUT']} is None:\n    pass\nelse:\n    {bound['WEIGHTS']} = None"
    ).body
    question[1].body = [*theirs, attended]  # type: ignore[attr-defined]
    made = {id(node) for statement in (*theirs, attended) for node in ast.walk(statement)}
    for statement in (*before, *question) if turns else question:
        for node in ast.walk(statement):
            if id(node) not in made:
                ast.copy_location(node, attended)
    function.body[core.first : core.last + 1] = [*looked_up, *before, *question]
    return compiled(function, forward, step)


def _angles(bound: dict[str, str]) -> str:
    """The statements that say by which angles queries and keys turn, and whether."""
    pair = f"{TURN} = ({bound['COS']}, {bound['SIN']})"
    if "TEST" not in bound:
        return pair
    read = f"    {bound['COS']}, {bound['SIN']} = {bound['ANGLES']}\n" if "ANGLES" in bound else ""
    return f"{TURN} = None\nif {bound['TEST']}:\n{read}    {pair}"


def compiled(function: ast.FunctionDef, forward: FunctionType, step: Callable[..., Any]) -> FunctionType:
    """The function of a syntax, in the place of another: its file, globals and defaults."""
    around = ast.parse(f"def made({STEP}):\n    return None")
    around.body[0].body = [function]  # type: ignore[attr-defined]
    code = _inner(
        _inner(compile(around, forward.__code__.co_filename, "exec", dont_inherit=True), "made"), function.name
    )
    made = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, (CellType(step),))
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
