"""Declares the compiled module to setuptools, which pyproject.toml has no settled way to do. How: build_ggml.py."""

from setuptools import Extension, setup

from build_ggml import BuildExt, EggInfo

setup(
    cmdclass={"build_ext": BuildExt, "egg_info": EggInfo},
    ext_modules=[Extension("ggufpy._ffi._ggml", sources=[])],
)
