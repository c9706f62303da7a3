"""The shape of the project: which way imports point, what lies at the top, what is public."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gradcomp

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gradcomp"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {"core": 0, "ddp": 1, "data": 1, "active": 1, "analysis": 1, "optim": 1, "integrations": 2, "cli": 2}


def room_of(parts):
    return parts[1].removesuffix(".py") if len(parts) > 1 else ""


def imports_of(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or "", node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file):
    own = room_of(file.relative_to(ROOT).parts)
    for module, _ in imports_of(file):
        top = module.split(".")[0]
        allowed = {"gradcomp", "torch", "numpy"} | ({"numba"} if file.name == "compiled.py" else set())
        assert top in sys.stdlib_module_names | allowed or ROOMS.get(own) == 2, f"{module}: only torch and numpy"
        other = room_of(module.split("."))
        if top == "gradcomp" and own in ROOMS and other in ROOMS and own != other:
            assert ROOMS[other] < ROOMS[own], f"{own} must not import {other}"


HARMLESS = {"ProcessGroup", "GradBucket", "is_initialized", "group", "get_rank", "get_world_size"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_the_exchange_talks(file):
    if file.name == "exchange.py" or room_of(file.relative_to(ROOT).parts) == "cli":  # benchmarks of others' hooks
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            assert {alias.name for alias in node.names} <= HARMLESS
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed"):
            assert node.attr in HARMLESS


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_short_and_speak_to_users_without_asserts(file):
    source = file.read_text()
    assert source.count("\n") <= 300
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(source)))


def test_the_hook_keeps_real_annotations():
    for file in (PACKAGE / "ddp").glob("*.py"):
        assert all(module != "__future__" for module, _ in imports_of(file))


def test_the_top_level_is_the_agreed_one():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:  # an unpacked archive
        tracked = [entry.name for entry in ROOT.iterdir() if entry.suffix != ".egg-info"]
    top = {Path(name).parts[0] for name in tracked}
    visible = {name for name in top if not name.startswith(".")}
    assert visible <= {"pyproject.toml", "gradcomp", "tests", "scripts", "benchmarks", "docker", "README.md", "LICENSE"}


def test_all_is_what_is_public():
    public = {name for name, value in vars(gradcomp).items() if not name.startswith("_") and not inspect.ismodule(value)} | {
        "codec",
        "data",
        "optim",
        "schedule",
    }
    assert public == set(gradcomp.__all__)
    assert gradcomp.__all__ == sorted(gradcomp.__all__)


@pytest.mark.parametrize("name", gradcomp.__all__)
def test_everything_public_is_documented(name):
    value = getattr(gradcomp, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for member, what in vars(value).items():
            if not member.startswith("_") and (inspect.isfunction(what) or isinstance(what, property)):
                assert inspect.getdoc(what), f"{name}.{member}"


def test_importing_is_quiet():
    code = (
        "import logging, warnings; before = (list(warnings.filters), list(logging.root.handlers)); import torch; "
        "middle = list(warnings.filters); import gradcomp, torch.distributed as dist; "
        "assert list(warnings.filters) == middle and list(logging.root.handlers) == before[1]; "
        "assert not dist.is_initialized() and not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
