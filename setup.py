from setuptools import setup

setup(cffi_modules=["native/build.py:ffi"], options={"bdist_wheel": {"py_limited_api": "cp311"}})
