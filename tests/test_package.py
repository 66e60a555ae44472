"""What `import binidx` promises."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
from helpers.public_names import MODULES

import binidx
import binidx.core
import binidx.megatron
import binidx.order
from binidx.lazy_names import lazy_names

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_brings_no_torch_no_fsspec_and_no_numpy() -> None:
    loaded = run_python("import binidx, sys; print(*sys.modules)").split()
    assert not {"torch", "fsspec", "numpy"} & set(loaded)


def test_reading_a_dataset_brings_no_torch() -> None:
    loaded = run_python("import binidx, sys; binidx.IndexedDataset, binidx.IndexedDatasetBuilder; print(*sys.modules)")
    assert "torch" not in loaded.split()


def test_every_public_name_is_there() -> None:
    for module in MODULES:
        for name in module.__all__:
            assert getattr(module, name).__name__ == name
        assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = binidx.Nonsense


def test_a_lazy_name_is_loaded_once_and_a_package_need_not_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    load, listed = lazy_names("binidx.order", {"View": "binidx.order.view", "view": "binidx.order"})
    assert listed() == ["View", "view"]
    assert load("view").View is load("View") is vars(binidx.order)["View"]
    monkeypatch.delattr(binidx.order, "View")
    assert run_python("import binidx; print(binidx.megatron.SFTDataset.__name__)") == "SFTDataset\n"


def test_every_public_name_stands_in_the_page_of_names() -> None:
    page = (ROOT / "docs/reference/names.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    listed = sorted(f"binidx.{name}" for name in re.findall(r"`([\w.]+)`", rows))
    assert listed == sorted(f"{module.__name__}.{name}" for module in MODULES for name in module.__all__)


def test_names_that_have_moved_are_at_the_old_place_with_a_warning() -> None:
    moved = [(binidx.order, name, import_module(home)) for name, home in binidx.order.MOVED.items()]
    moved += [(binidx, name, module) for module in MODULES[1:] for name in module.__all__]
    for old, name, module in moved:
        with pytest.warns(DeprecationWarning, match=f"^{old.__name__}.{name} is {module.__name__}.{name} now$"):
            assert getattr(old, name) is getattr(module, name)


def test_about_forty_names_are_at_the_top() -> None:
    assert len(binidx.__all__) < 45
    assert not {*binidx.__all__} & {*binidx.megatron.__all__, *binidx.packed.__all__}


def test_names_to_build_upon_are_those_of_their_modules() -> None:
    for name, home in binidx.core.HOMES.items():
        assert getattr(binidx.core, name) is getattr(import_module(home), name)


def test_no_link_of_a_page_outside_the_site_leads_nowhere() -> None:
    """`mkdocs build --strict` checks those inside docs/."""
    links = {
        (page.parent / link).resolve()
        for page in ROOT.glob("*.md")
        for link in re.findall(r"\]\((?!https?:|\.\./\.\./security/)([^)#]+)", page.read_text())
    }
    assert [path for path in links if not path.exists()] == []


def test_every_docstring_is_text_that_python_3_13_compiles() -> None:
    for path in [*ROOT.glob("src/binidx/**/*.py"), *ROOT.glob("tools/**/*.py")]:
        values = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)]
        texts = [each.value for each in values if isinstance(each, ast.Constant)]
        assert not re.search(r"[\ud800-\udfff\0]", "".join(map(str, texts))), path


def test_the_version_is_that_of_the_installation_or_says_that_there_is_none(tmp_path: Path) -> None:
    assert binidx.__version__ == metadata.version("binidx")
    assert vars(binidx)["__version__"] == binidx.__version__  # each state of a loader has it: it is looked up once
    copied = shutil.copytree(ROOT / "src/binidx", tmp_path / "binidx", ignore=lambda *_: ["tools"])
    program = (
        f"import sys; sys.path[:] = [{str(copied.parent)!r}, *sys.path[1:]]; import binidx; print(binidx.__version__)"
    )
    done = subprocess.run([sys.executable, "-IS", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0+unknown\n"


def test_a_traceback_ends_at_the_call_and_keeps_the_cause(tmp_path: Path) -> None:
    call = f"import binidx\nbinidx.load_dataset('{tmp_path}/en', 16)"
    for full in (False, True):
        environment = {**os.environ, "BINIDX_TRACEBACK": "full" if full else ""}
        done = subprocess.run(
            [sys.executable, "-c", call], env=environment, capture_output=True, text=True, check=False
        )
        assert "FileNotFoundError: [Errno 2]" in done.stderr
        assert done.stderr.splitlines()[-1] == f"binidx.errors.ObjectNotFoundError: {tmp_path}/en.idx: no such file"
        assert (len(done.stderr.splitlines()) > 30) == full
        assert full or len(done.stderr.splitlines()) <= 10


def test_a_traceback_of_a_sample_has_few_frames_of_ours() -> None:
    load = f"import sys, binidx\ndata = binidx.load_dataset('{ROOT}/tests/golden/int32', 4)"
    call = f"{load}\nlen(data)\nsys.modules['torch'] = None\ndata[0]"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("binidx.errors.MissingDriverError: samples and batches: need torch;")
    assert done.stderr.count("binidx/") <= 3


def test_ctrl_c_in_a_loop_and_a_wrong_number_end_at_the_users_line() -> None:
    load = f"import signal, binidx\ndata = binidx.load_dataset('{ROOT}/tests/golden/int32', 4)\n"
    # The signal comes while `next` waits for the batch.
    loop = "for batch in data.loader(1, collate_fn=lambda samples: signal.raise_signal(signal.SIGINT)): pass"
    for program, last, most in ((loop, "KeyboardInterrupt", 4), ("data[9999]", "IndexError: sample 9999: out of", 8)):
        done = subprocess.run([sys.executable, "-c", load + program], capture_output=True, text=True, check=False)
        assert done.stderr.splitlines()[-1].startswith(last), done.stderr
        assert len(done.stderr.splitlines()) <= most
