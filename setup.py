"""Maps the folders of the repository to packages; everything static is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["fastattn", "fastattn.*"]))
