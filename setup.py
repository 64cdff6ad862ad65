"""The one thing that `pyproject.toml` cannot say: the laboratory is for a checkout only, and no part of the wheel."""

from setuptools import setup
from setuptools.command.build_py import build_py

OF_A_CHECKOUT = "espalier.experiments.lab."
"""The laboratory, with its inner packages."""


class BuildPy(build_py):
    """Leaves the packages of a checkout out, unless the install is editable."""

    def run(self) -> None:
        """Build what the wheel, or the editable install, is to hold."""
        if not self.editable_mode:
            self.packages = [name for name in self.packages if not f"{name}.".startswith(OF_A_CHECKOUT)]
        super().run()


setup(cmdclass={"build_py": BuildPy})
