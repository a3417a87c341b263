"""The shape of the package: its public names and signatures, what importing it costs, and which way imports point."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import treeattn
from treeattn.arguments.spec import Options

ROOT = Path(treeattn.__file__).parent
PUBLIC = [
    "PartialState", "ShardedKVCache", "TreeComm", "attention", "backends", "baselines", "decode", "energy", "errors",
    "kernels", "merge", "partial_attention", "prefill", "testing", "zigzag",
]  # fmt: skip
SUBMODULES = {"backends", "baselines", "errors", "kernels", "testing"}
CALLABLE = [name for name in PUBLIC if name not in SUBMODULES]
SHARED = (
    "scale=None, mask=None, causal=False, window=None, softcap=None, {sink}q_pos=None, kv_pos=None, kv_len=None, "
    "k_scale=None, v_scale=None, kv_dtype=None, layout='bhtd', backend=None"
)
WITHOUT_SINK = SHARED.format(sink="")


def modules():
    """Every module of the package by its full name, with the file that it stands in."""
    found = {}
    for folder, _, files in os.walk(ROOT, followlinks=True):  # kernels and backends are links here
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = ("treeattn", *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


# ---- names and signatures


def test_all_is_exact_and_every_name_is_there():
    assert treeattn.__all__ == PUBLIC
    assert [name for name in dir(treeattn) if not name.startswith("_")] == PUBLIC
    assert [name for name in dir(treeattn.testing) if not name.startswith("_")] == treeattn.testing.__all__
    for name in PUBLIC:
        assert getattr(treeattn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attenton'"):
        treeattn.attenton  # noqa: B018 - looking it up is the test


REFERENCE_PAGE = ROOT.parent / "docs" / "reference.md"


def one_of_each():
    """An object of each public class, by the name that the reference gives it."""
    comm = treeattn.TreeComm()
    return {
        "treeattn.TreeComm": comm,
        "treeattn.ShardedKVCache": treeattn.ShardedKVCache(comm, batch=1, kv_heads=1, head_dim=2, capacity=4),
        "treeattn.PartialState": treeattn.PartialState.identity((1, 1, 1, 2)),
        "treeattn.planning.plan.Plan": comm.plan,
        "treeattn.backends.Backend": treeattn.backends.find("cpu"),
    }


@pytest.mark.skipif(not REFERENCE_PAGE.exists(), reason="runs from a checkout: docs/ is not installed")
def test_what_public_classes_have_is_what_the_reference_lists():
    sections = re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", REFERENCE_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    cells = {title: re.findall(r"^\|([^|]+)\|", rows, re.MULTILINE) for title, rows in sections}
    listed = {title: sorted(re.findall(r"`(\w+)`", "".join(each))) for title, each in cells.items()}
    assert listed == {title: [n for n in dir(each) if not n.startswith("_")] for title, each in one_of_each().items()}


def test_what_a_backend_is_made_of_is_in_one_place():
    assert [name for name in dir(treeattn.backends) if not name.startswith("_")] == treeattn.backends.__all__
    assert all(getattr(treeattn.backends, name) is not None for name in treeattn.backends.__all__)
    assert issubclass(type(treeattn.backends.find("cpu")), treeattn.backends.Backend)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention", f"(q, k, v, *, {SHARED.format(sink='sink=None, ')}, return_lse=False, out=None)"),
        ("partial_attention", f"(q, k, v, *, {WITHOUT_SINK}, out=None)"),
        ("energy", f"(q, k, v, zeta, *, {WITHOUT_SINK})"),
        ("decode", f"(q, k, v, *, comm, root=None, return_lse=False, sink=None, {WITHOUT_SINK}, pipeline=1)"),
    ],
)
def test_the_signatures_are_written_out(name, expected):
    signature = inspect.signature(getattr(treeattn, name))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == expected


@pytest.mark.parametrize("name", ["attention", "partial_attention", "energy", "decode"])
def test_every_shared_option_is_a_keyword_with_one_default(name):
    parameters = inspect.signature(getattr(treeattn, name)).parameters
    assert Options._field_defaults.items() <= {n: p.default for n, p in parameters.items()}.items()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_says_what_it_is_and_all_names_only_what_it_defines(module):
    tree = parsed(module)
    assert ast.get_docstring(tree)
    listed = next((n.value for n in tree.body if isinstance(n, ast.Assign) and "__all__" in _targets(n)), None)
    if listed is None or module == "treeattn":
        return
    names = ast.literal_eval(listed)
    defined = {name for node in tree.body for name in _defined(node)}
    assert names == sorted(names, key=_isort_style), "__all__ is sorted as ruff does it"
    lazy = "__getattr__" in defined
    assert lazy or set(names) <= defined


def _isort_style(name):
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


def _targets(node):
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _defined(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return _targets(node)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_hides_a_public_function_or_a_library(module):
    name = module.rpartition(".")[2]
    assert module.count(".") != 1 or name not in CALLABLE
    assert name not in sys.stdlib_module_names
    assert name not in {"numpy", "numba", "mpi4py", "click", "rich", "ml_dtypes", "cupy", "torch", "gguf"}


# ---- documentation


def parts_of(name):
    """A public function, or a class and its public methods and properties, by name."""
    thing = getattr(treeattn, name)
    yield name, thing
    if inspect.isclass(thing):
        for attribute in dir(thing):
            value = inspect.getattr_static(thing, attribute)
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if not attribute.startswith("_") and inspect.isfunction(value):
                yield f"{name}.{attribute}", value


@pytest.mark.parametrize("public", CALLABLE)
def test_public_names_are_documented_with_every_parameter(public):
    for name, thing in parts_of(public):
        text = inspect.getdoc(thing)
        assert text, f"{name} has no docstring"
        parameters = [p for p in inspect.signature(thing).parameters if p not in ("self", "cls")]
        missing = set(parameters) - documented_parameters(text)
        assert len(parameters) < 2 or not missing, f"{name} does not document {sorted(missing)}"


def documented_parameters(docstring):
    listed = re.split(r"\n(?:Returns|Raises|Notes|Examples)\n", docstring.partition("Parameters\n")[2])[0]
    entries = [line.partition(" : ")[0] for line in listed.splitlines() if line and line[0] != " "]
    return {name.strip("* ") for entry in entries for name in entry.split(",")}


@pytest.mark.parametrize("name", CALLABLE)
def test_every_public_function_and_class_has_an_example(name):
    assert ">>> " in (inspect.getdoc(getattr(treeattn, name)) or "")


@pytest.mark.parametrize("public", [name for name in CALLABLE if inspect.isclass(getattr(treeattn, name))])
def test_every_public_method_is_in_an_example_and_says_what_it_returns(public):
    every = "".join(examples_of(thing) for _, thing in parts_of(public))
    for name, thing in parts_of(public):
        if not inspect.isfunction(thing) or isinstance(vars_of(public).get(name.rpartition(".")[2]), property):
            continue
        assert f".{name.rpartition('.')[2]}(" in every, f"{name} is in no example"
        assert thing.__annotations__["return"] == "None" or "\nReturns\n" in inspect.getdoc(thing), name


def examples_of(thing):
    lines = (inspect.getdoc(thing) or "").splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith((">>> ", "... ")))


def vars_of(public):
    thing = getattr(treeattn, public)
    return {name: inspect.getattr_static(thing, name) for name in dir(thing)}


@pytest.mark.parametrize("module", sorted(m for m, path in MODULES.items() if ">>> " in path.read_text()))
def test_examples_run(module):
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted
    assert not outcome.failed


# ---- what an import costs

LOADED = """
import json, sys
import numpy
before = set(sys.modules)
{statements}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps(sorted(new - set(sys.stdlib_module_names))))
"""


def loaded_by(statements):
    code = LOADED.format(statements=statements)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return {name for name in json.loads(run.stdout) if not name.startswith("_")}


def test_importing_the_package_imports_numpy_and_nothing_else():
    names = ", ".join(["PartialState", "ShardedKVCache", "TreeComm", *sorted(SUBMODULES)])
    assert loaded_by("import treeattn") <= {"treeattn", "numpy"}  # numpy, too, loads its parts when they are used
    assert loaded_by(f"from treeattn import {names}\nimport treeattn.arguments.inputs, treeattn.local") <= {
        "treeattn",
        "numpy",
    }


def test_attention_in_one_process_loads_no_mpi_and_no_command_line():
    call = "import treeattn\nq = numpy.ones((1, 1, 1, 4), 'float32')\ntreeattn.attention(q, q, q)"
    assert not loaded_by(call) & {"mpi4py", "click", "rich", "ml_dtypes", "torch"}


# ---- which way imports point

FOUNDATION = {"arguments", "errors", "lazy", "state", "state_ops", "storage", "wire_form"}
ABOVE_BOTH_SIDES = {"distributed", "cache", "baselines", "prompt"}
TOOLS = {"cli", "doctor", "testing", "__main__", "treeattn"}

EXCEPTIONS = {
    # A state finds its backend's operations when it is made from nothing: the one way up, and only inside a function.
    "treeattn.state": {"treeattn.backends.registry"},
    # So do cards that are joined before there is any state.
    "treeattn.gpu.cards": {"treeattn.backends.registry"},
    # What merges states, and shares memory fast and safely, is compiled; it knows of rows, and nothing of attention.
    "treeattn.execution.window": {"treeattn.kernels.window"},
    "treeattn.steps.relay": {"treeattn.kernels.relay"},
    "treeattn.wire_form": {"treeattn.kernels.wire_rows"},
    # Ranks that can't compile it are told so together.
    "treeattn.ranks.settings": {"treeattn.kernels.numba_settings"},
}


@cache
def parsed(module):
    return ast.parse(MODULES[module].read_text())


@cache
def imports(module, *, lazy):
    """Modules of the package that ``module`` imports when it runs; with ``lazy``, those that its functions do too."""
    found = set()
    pending = list(parsed(module).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "treeattn":
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif lazy or not isinstance(node, ast.FunctionDef):
            pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return found - {module} - EXCEPTIONS.get(module, set())


def part(module):
    """First name below the package: the folder or the file that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def reached_from(module):
    seen, pending = {module}, [module]
    while pending:
        for name in imports(pending.pop(), lazy=True) - seen:
            seen.add(name)
            pending.append(name)
    return seen


def test_modules_import_each_other_in_one_direction():
    graph = {module: imports(module, lazy=False) for module in MODULES}
    order = graphlib.TopologicalSorter(graph).static_order()  # raises CycleError with the circle in it
    assert set(order) == set(MODULES)


def test_folders_import_each_other_in_one_direction():
    graph = {part(module): set() for module in MODULES}
    for module in MODULES:
        graph[part(module)] |= {part(name) for name in imports(module, lazy=True)} - {part(module)}
    assert set(graphlib.TopologicalSorter(graph).static_order()) == set(graph)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_lower_layers_know_nothing_of_higher_ones(module):
    allowed = {
        **dict.fromkeys(FOUNDATION, FOUNDATION),
        "kernels": FOUNDATION | {"kernels"},
        "backends": FOUNDATION | {"kernels", "backends", "launch"},  # a launcher says which card is a rank's
        "local": FOUNDATION | {"backends"},
    }
    if part(module) in allowed:
        assert {part(name) for name in imports(module, lazy=True)} <= allowed[part(module)]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_communication_and_kernels_meet_only_in_the_entry_points(module):
    modules = reached_from(module)
    folders = {part(name) for name in modules}
    computes = folders & {"kernels", "backends"} or "treeattn.arguments.inputs" in modules
    assert not (computes and folders & {"comm", "ranks"}) or part(module) in ABOVE_BOTH_SIDES | TOOLS


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_but_tools_needs_the_tools(module):
    assert part(module) in TOOLS or not {part(name) for name in imports(module, lazy=True)} & TOOLS


# ---- the table of options

OPTIONS_PAGE = ROOT.parent / "docs" / "options.md"


def rows_of_options():
    """(option names, example) of each row of the first table; no rows where the documentation isn't installed."""
    if not OPTIONS_PAGE.exists():
        return []
    table = OPTIONS_PAGE.read_text().partition("|---|")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    return [(row[0].replace("`", "").split(", "), row[-1].strip("`")) for row in cells]


@pytest.mark.parametrize(("names", "example"), rows_of_options(), ids=[row[1] for row in rows_of_options()])
def test_the_examples_of_the_options_run(names, example):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 3, 8), dtype=np.float32)
    k, v = (rng.standard_normal((2, 2, 10, 8), dtype=np.float32) for _ in "kv")
    options = eval(f"dict({example})", {"np": np, "q": q})
    assert set(names) & set(options)
    treeattn.attention(q, k, v, **options)


@pytest.mark.skipif(not OPTIONS_PAGE.exists(), reason="runs from a checkout: docs/ is not installed")
def test_the_table_lists_every_option():
    listed = [name for names, _ in rows_of_options() for name in names]
    parameters = [p.name for p in inspect.signature(treeattn.attention).parameters.values() if p.kind == p.KEYWORD_ONLY]
    assert sorted(listed) == sorted(parameters)


@pytest.mark.skipif(not OPTIONS_PAGE.exists(), reason="runs from a checkout: docs/ is not installed")
def test_the_page_names_those_of_a_cache():
    sentence = OPTIONS_PAGE.read_text().partition("`ShardedKVCache.decode` takes")[2].partition(":")[0]
    parameters = [*inspect.signature(treeattn.ShardedKVCache.decode).parameters]
    known = {name for names, _ in rows_of_options() for name in names}
    assert sorted(re.findall(r"`(\w+)`", sentence)) == sorted(known & set(parameters))
