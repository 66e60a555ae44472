import re
import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildCore(build_ext):
    """Build of the C core that says what to install if it cannot begin."""

    def build_extensions(self):
        if not shutil.which(self.compiler.compiler[0]):
            sys.exit(
                f"binidx: needs a C compiler for its core (found no {self.compiler.compiler[0]}); apt install gcc, dnf "
                "install gcc or xcode-select --install, or name one in CC, or install a wheel"
            )
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            sys.exit("binidx: needs Python's headers for its core; apt install python3-dev, dnf install python3-devel")
        super().build_extensions()


# A package index shows this text alone: without what is for a clone, with the addresses of files and pictures.
HERE = Path(__file__).parent
ADDRESS = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
README = re.sub(r"<!-- clone -->.*?<!-- end -->\n*", "", (HERE / "README.md").read_text("utf-8"), flags=re.S)
README = re.sub(r"<!--.*?-->\n*", "", README)
README = re.sub(r"(\]\()(?!https?:)([^)]+\))", rf"\1{ADDRESS}/blob/HEAD/\2", README)
README = re.sub(r"(src|srcset)=\"(?!https?:)", rf'\1="{ADDRESS}/raw/HEAD/', README)

setup(
    long_description=README,
    long_description_content_type="text/markdown",
    cffi_modules=["native/build.py:ffi"],
    cmdclass={"build_ext": BuildCore},
    # A free-threaded Python has no stable ABI.
    options={} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
