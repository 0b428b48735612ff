"""Guards on code: budgets of size and nesting, forbidden constructs, public functions with a contract."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from tests.guards.source import FunctionNode, Source, calls, dotted, functions, last_name

FILE_LINES = 300
FUNCTION_LINES = 60
NESTING = 3

BROAD = {"Exception", "BaseException"}
ENVIRONMENT_HOME = "evenspan/config/environment.py"
PRINT_HOME = "evenspan/cli/"
BROAD_EXCEPT_HOMES = {
    "evenspan/ranks.py": "a rank sends whatever failed, with its traceback, to the process that waits",
}
NESTED = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def check_size(source: Source) -> list[str]:
    """Files and functions fit their budgets of lines."""
    found = []
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        found.append(f"{source.path}:1: {lines} lines, more than {FILE_LINES}")
    for node in functions(source.tree):
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        if length > FUNCTION_LINES:
            found.append(source.at(node, f"{node.name} has {length} lines, more than {FUNCTION_LINES}"))
    return found


def check_nesting(source: Source) -> list[str]:
    """No statement stands deeper than NESTING blocks inside its function."""
    return [
        source.at(node, f"{node.name} nests {depth} deep, more than {NESTING}")
        for node in functions(source.tree)
        if (depth := _depth(node.body)) > NESTING
    ]


def _depth(body: list[ast.stmt]) -> int:
    """How many blocks the deepest statement of a body stands in; `elif` and `else` add none."""
    deepest = 0
    for node in body:
        if not isinstance(node, NESTED):
            continue
        inner = 1 + max(_depth(block) for block in _blocks(node))
        if _is_elif_chain(node):
            inner = max(inner, _depth(node.orelse))  # type: ignore[attr-defined]
        deepest = max(deepest, inner)
    return deepest


def _is_elif_chain(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statement lists of a compound statement, an `elif` chain's continuation left out."""
    for name, value in ast.iter_fields(node):
        if name == "orelse" and _is_elif_chain(node):
            continue
        if not isinstance(value, list):
            continue
        statements = [item for item in value if isinstance(item, ast.stmt)]
        yield statements
        yield from (item.body for item in value if isinstance(item, ast.ExceptHandler | ast.match_case))


def check_forbidden_names(source: Source) -> list[str]:
    """No `global`, no rebound methods, no attribute probing."""
    found = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Global():
                found.append(source.at(node, "global: pass the value"))
            case ast.Name(id="MethodType") | ast.Attribute(attr="MethodType") | ast.alias(name="MethodType"):
                found.append(source.at(node, "MethodType: replace a child module"))
            case ast.Call(func=ast.Name(id="hasattr")):
                found.append(source.at(node, "hasattr: declare the type"))
            case ast.Call(func=ast.Name(id="getattr"), args=[_, _, _]):
                found.append(source.at(node, "getattr with a default: declare the field"))
            case _:
                continue
    return found


def check_keyword_passing(source: Source) -> list[str]:
    """No function hands on keyword arguments it does not know."""
    found = []
    for function in functions(source.tree):
        unknown = function.args.kwarg
        for _, call in calls(function) if unknown else ():
            handed_on = [item.value for item in call.keywords if item.arg is None]
            if any(isinstance(value, ast.Name) and value.id == unknown.arg for value in handed_on):
                found.append(source.at(call, f"hands on **{unknown.arg}: name the arguments"))
    return found


def check_excepts(source: Source) -> list[str]:
    """A handler names what it handles; a broad one must end by raising again, or stand in a listed file."""
    found = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            found.append(source.at(node, "bare except"))
        elif _is_broad(node.type) and not _raises_again(node) and source.path not in BROAD_EXCEPT_HOMES:
            found.append(source.at(node, "broad except that does not raise again"))
    return found


def _is_broad(kind: ast.expr) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(last_name(item) in BROAD for item in kinds)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def check_output(source: Source) -> list[str]:
    """`print` stands in the command line's files only."""
    if source.path.startswith(PRINT_HOME):
        return []
    return [
        source.at(node, "print: use logging, or return the text")
        for _, node in calls(source.tree)
        if isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def check_environment(source: Source) -> list[str]:
    """The environment is read and written in one file."""
    if source.path == ENVIRONMENT_HOME:
        return []
    found = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute() if dotted(node) in {"os.environ", "os.getenv", "os.putenv", "os.unsetenv"}:
                found.append(source.at(node, f"{dotted(node)}: use config/environment.py"))
            case ast.ImportFrom(module="os", names=names) if {"environ", "getenv", "putenv"} & {
                alias.name for alias in names
            }:
                found.append(source.at(node, "imports the environment: use config/environment.py"))
            case _:
                continue
    return found


def check_exceptions_used(source: Source) -> list[str]:
    """An exception that is built is raised, and a comparison that is made is used."""
    found = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Expr(value=ast.Call(func=func)) if _is_exception_name(last_name(func)):
                found.append(source.at(node, f"{last_name(func)} is built but not raised"))
            case ast.Expr(value=ast.Compare()):
                found.append(source.at(node, "the comparison's result is not used"))
            case _:
                continue
    return found


def check_exception_messages(source: Source) -> list[str]:
    """An exception holds one message, and a message with {names} in it is an f-string."""
    found = []
    for name, node in calls(source.tree):
        if not _is_exception_name(name):
            continue
        texts = [argument for argument in node.args if _is_text(argument)]
        if len(texts) > 1 and not _is_code(node.args[0]):
            found.append(source.at(node, f"{name} is given {len(texts)} messages: a stray comma"))
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(_looks_like_f_string(value) for value in values):
            found.append(source.at(node, f"{name}'s message misses its f prefix"))
    return found


def _is_exception_name(name: str) -> bool:
    return name.endswith(("Error", "Exception")) and name[0].isupper()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_code(node: ast.expr) -> bool:
    """True for an error code such as "T102"."""
    match node:
        case ast.Constant(value=str(text)):
            return len(text) == 4 and text[0].isupper() and text[1:].isdigit()
        case _:
            return False


def _looks_like_f_string(node: ast.expr) -> bool:
    """True for a plain literal that holds `{name}`."""
    match node:
        case ast.Constant(value=str(text)):
            inside = [piece.split("}")[0] for piece in text.split("{")[1:] if "}" in piece]
            return any(name.replace(".", "").isidentifier() for name in inside)
        case _:
            return False


def check_annotations(source: Source) -> list[str]:
    """Every public function is annotated in full."""
    found = []
    for node, is_method in _public_functions(source.tree.body, in_class=False):
        if node.returns is None:
            found.append(source.at(node, f"{node.name} does not annotate what it returns"))
        arguments = [*node.args.posonlyargs, *node.args.args]
        positional = arguments[1:] if is_method else arguments
        bare = [item.arg for item in [*positional, *node.args.kwonlyargs] if item.annotation is None]
        if bare:
            found.append(source.at(node, f"{node.name} does not annotate {', '.join(bare)}"))
    return found


def check_docstrings(source: Source) -> list[str]:
    """Every module, public class and public function says what it gives; a class speaks for its `forward`."""
    if not source.path.startswith("evenspan/"):
        return []
    found = []
    if source.tree.body and ast.get_docstring(source.tree) is None:
        found.append(f"{source.path}:1: no module docstring")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            found.append(source.at(node, f"{node.name} has no docstring"))
    for function, is_method in _public_functions(source.tree.body, in_class=False):
        spoken_for = function.name.startswith("__") or (is_method and function.name == "forward")
        if not spoken_for and ast.get_docstring(function) is None:
            found.append(source.at(function, f"{function.name} has no docstring"))
    return found


def _public_functions(body: list[ast.stmt], *, in_class: bool) -> Iterator[tuple[FunctionNode, bool]]:
    """Functions and methods another file can call, each with whether its first argument is the instance."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body, in_class=True)
        if not isinstance(node, FunctionNode):
            continue
        special = node.name.startswith("__") and node.name.endswith("__")
        static = any(last_name(item) == "staticmethod" for item in node.decorator_list)
        if special or not node.name.startswith("_"):
            yield node, in_class and not static


def check_ascii(source: Source) -> list[str]:
    """Source files are ASCII."""
    return [
        f"{source.path}:{number}: not ASCII"
        for number, line in enumerate(source.text.splitlines(), start=1)
        if not line.isascii()
    ]


CHECKS: tuple[Callable[[Source], list[str]], ...] = (
    check_size,
    check_nesting,
    check_forbidden_names,
    check_keyword_passing,
    check_excepts,
    check_output,
    check_environment,
    check_exceptions_used,
    check_exception_messages,
    check_annotations,
    check_docstrings,
    check_ascii,
)
